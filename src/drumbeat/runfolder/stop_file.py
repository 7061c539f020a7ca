"""The run's `stop` file: how somebody who cannot signal the lead asks it to end the run.

A batch script's trap, `drumbeat cancel` and the desk of an allocation append a line, `SIGNAL reason`. A signal sent through
srun would reach every process of the step, DataLoader workers too; a line reaches the lead alone.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import List, Tuple

_KNOWN = {"TERM": signal.SIGTERM, "INT": signal.SIGINT, "USR2": signal.SIGUSR2}
_LIMIT = 1 << 16


def ask_to_stop(path: str, name: str, reason: str) -> None:
    """`name` is TERM, INT or USR2 (the scheduler will end the job soon)."""
    assert name in _KNOWN, name
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{name} {reason}\n")


@dataclass
class StopFile:
    """The lead's side: what was asked since the last look."""

    path: str
    position: int = 0

    def look(self) -> List[Tuple[int, str]]:
        try:
            with open(self.path, "rb") as file:
                file.seek(self.position)
                data = file.read(_LIMIT)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.position += len(whole)
        asked = []
        for line in whole.decode("utf-8", "replace").splitlines():
            name, _, reason = line.partition(" ")
            if name in _KNOWN:
                asked.append((int(_KNOWN[name]), reason or f"asked to stop by {name}"))
        return asked

    def skip(self) -> None:
        """What was asked of an earlier start of this run is no longer meant."""
        self.look()
