"""Numbers that a launcher gives to its own units: srun's tasks, mpirun's processes.

They are ranks unless each unit starts several: a launcher of ranks speaks in the same file, ranks label lines behind the
unit's number, or a rank speaks whose number is higher than that of every unit.
"""

from __future__ import annotations

import re
from typing import Dict, Optional, Sequence, Set

from drumbeat.logs.read.prefixes import Line

MAX_FILES = 1_000
MAX_NUMBERS = 20_000
# torchrun and the like, by what they print; `--nproc-per-node 1` starts one rank per unit.
_LAUNCHER = re.compile(
    rb"torch[./]distributed[./](?:elastic|run\b|launch)|elastic/multiprocessing|\(exitcode: -?\d+\) local_rank: \d"
    rb"|\(local_rank: \d|--(?:nproc[_-]per[_-]node|num[_-]gpus)[= ](?:[2-9]|1\d|gpu|auto|\$)|deepspeed[./]launcher[./]launch"
)
_REPORTED = re.compile(rb"(?m)srun: error: \S{1,80}: tasks? (\d[\d,-]{0,200}): ")
_RANK = re.compile(rb"(?m)^\W{0,3}(?:\d{1,6}: ?)?\[[Rr]ank ?(\d{1,6})\]")
_NUMBER = re.compile(rb"\d+")
# Ray says once which process is which rank: `(ip=10.0.0.5, pid=2902) world_rank=3`, `(Worker pid=811) ... [rank=0, world_size=3]`
_PROCESS = r"pid=(?P<{pid}>\d{{1,9}})(?:, ip=(?P<{ip}>[\w.:-]{{1,60}}))?"
_RANK_OF = re.compile(
    (
        r"\((?:[\w=, -]{0,60}\bip=(?P<of>[\w.:-]{1,60}), )?pid=(?P<process>\d{1,9})\) world_rank=(?P<rank>\d{1,6})"
        rf"|\(\w{{1,60}} {_PROCESS.format(pid='pid', ip='ip')}\).{{0,80}}\[rank=(?P<own>\d{{1,6}}), world_size="
    ).encode()
)
_SPEAKS = re.compile(rf"\((?:\w{{1,60}} )?{_PROCESS.format(pid='pid', ip='ip')}[,)]")


class Units:
    def __init__(self) -> None:
        self._of_several: Set[str] = set()  # files in which a unit is seen to start several ranks
        self._reported: Dict[str, Set[int]] = {}  # file -> units that its launcher reports
        self._ranks: Dict[str, int] = {}  # file -> the highest rank that labels a line
        self._failing: Dict[str, Set[int]] = {}  # file -> ranks that label a line of an event
        self._of_process: Dict[str, Dict[str, Dict[str, int]]] = {}  # file -> process id -> address -> rank

    def look(self, file: str, lines: Sequence[bytes]) -> None:
        """Learn from lines of a file."""
        text = b"\n".join(lines)
        if file not in self._of_several and len(self._of_several) < MAX_FILES and _LAUNCHER.search(text):
            self._of_several.add(file)
        highest = max((int(found[1]) for found in _RANK.finditer(text)), default=-1) if b"ank" in text else -1
        if highest > self._ranks.get(file, -1) and len(self._ranks) < MAX_FILES:
            self._ranks[file] = highest
        for found in _RANK_OF.finditer(text) if b"rank=" in text and len(self._of_process) < MAX_FILES else ():
            known = self._of_process.setdefault(file, {})
            pid, address = found["process"] or found["pid"], found["of"] or found["ip"] or b""
            if len(known) < MAX_NUMBERS:
                known.setdefault(pid.decode(), {})[address.decode()] = int(found["rank"] or found["own"])
        for found in _REPORTED.finditer(text) if b"srun: error" in text else ():
            units = self._reported.setdefault(file, set())
            units.update(int(each) for each in _NUMBER.findall(found[1]) if len(units) < MAX_NUMBERS)

    def note(self, file: str, line: Line) -> None:
        """Learn from a line of an event."""
        if line.rank is None or line.rank == line.task:
            return
        failing = self._failing.setdefault(file, set())
        if len(failing) < MAX_NUMBERS:
            failing.add(line.rank)
        if line.task is not None and len(self._of_several) < MAX_FILES:
            self._of_several.add(file)

    def knows(self, file: str) -> bool:
        """Return True if the file says which process is which rank."""
        return file in self._of_process

    def speaker(self, file: str, text: str) -> Optional[int]:
        """Return the rank of the process that a line names as its writer, where the log says which is which."""
        found = _SPEAKS.search(text) if self.knows(file) else None
        ranks = self._of_process[file].get(found["pid"], {}) if found else {}
        if found and found["ip"]:
            return ranks.get(found["ip"], ranks.get(""))
        return next(iter(ranks.values())) if len(ranks) == 1 else None  # a line of the driver's own node has no address

    def are_ranks(self, file: str) -> bool:
        if file in self._of_several:
            return False
        reported = self._reported.get(file, set())
        return (
            not reported
            or self._ranks.get(file, -1) <= max(reported)
            or bool(reported & self._failing.get(file, set()))
        )
