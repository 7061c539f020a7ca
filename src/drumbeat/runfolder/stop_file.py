"""The run's `stop` file: how somebody who cannot signal the lead asks it to end the run.

A batch script's trap, `drumbeat cancel` and the desk of an allocation append a line, `WORD reason`. A signal sent through
a launcher may reach every process of the job, DataLoader workers too; a line reaches the
lead alone, and nodes that still wait for it or for their own tasks.
"""

from __future__ import annotations

import os
from typing import List, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.runfolder.write import append

# TERM: the scheduler asks; INT: the user interrupts, and a second time ends the run now; USR2: the scheduler will end the
# job soon; CANCEL: `drumbeat cancel`, after which the run does not come back, and which a second time ends it now; LOST: a
# node's agent has ended before all nodes had come, so the lead waits in vain.
WORDS = ("TERM", "INT", "USR2", "CANCEL", "LOST")
_LIMIT = 1 << 16


def ask_to_stop(path: str, name: str, reason: str) -> None:
    """`name` is one of WORDS."""
    append(path, stop_line(name, reason).encode())


def stop_line(name: str, reason: str) -> str:
    assert name in WORDS, name
    return f"{name} {reason}\n"


@dataclass
class StopFile:
    """The agents' side: what was asked since the last look."""

    path: str
    position: int = 0

    def look(self) -> List[Tuple[str, str]]:
        """Pairs of a word of WORDS and the reason."""
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
            if name in WORDS:
                asked.append((name, reason or f"asked to stop by {name}"))
        return asked

    def skip(self, started_before: bool, events: str) -> int:
        """Where to begin. What was asked of an earlier start of this run is no longer meant; that the run was cancelled still
        is. There was an earlier one if the scheduler says so (`started_before`), or if a lead left `events`."""
        position = 0
        try:
            with open(self.path, "rb") as file:
                for line in file:
                    if line.split()[:1] == [b"CANCEL"] or not line.endswith(b"\n"):
                        break
                    position += len(line)
        except OSError:
            pass  # nobody has asked
        return position if started_before or os.path.exists(events) else 0
