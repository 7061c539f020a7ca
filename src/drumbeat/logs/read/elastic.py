"""torchrun's closing summary: which rank it saw fail first, where, and how."""

from __future__ import annotations

import re
import signal as signals
from datetime import datetime
from typing import Dict, List, Mapping, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.model import Evidence, Finding
from drumbeat.logs.read.prefixes import seconds_in_year

_FIELD = re.compile(r"\s*(time|host|rank|exitcode|error_file|traceback|msg)\s*: ?(.*)")
# The same fields where copying has put several of them on one line.
_INLINE = (
    ("time", re.compile(r"\btime\s*: (\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d)")),
    ("host", re.compile(r"\bhost\s*: (\S+)")),
    ("rank", re.compile(r"\brank\s*:?\s*(\d+ \(local[ _]rank:? ?\d*)")),
    ("exitcode", re.compile(r"\bexitcode\s*: ?(-?\d+) \(pid")),
)
ROOT_CAUSE, LOCAL_RANK = "Root Cause (first observed failure)", "(local_rank: "  # words of its lines
_RANK_FIELD = re.compile(r"\s*rank\s*: \d+ \(local_rank: \d+\)")
_MAX_LINES = 16
_MAX_TABLES = 1_000
TORCHRUN = "torchrun"
OWN_LOG = (
    "read that rank's own log: torchrun --log-dir DIR --redirects 3 keeps one for each rank; @record of "
    "torch.distributed.elastic.multiprocessing.errors before main() brings the traceback into torchrun's table"
)
APART = 60  # seconds between the ends of two runs; less may be two launchers of one run
# Signals that end a process from outside or for a fault of its own. Launchers stop the other ranks with SIGTERM, and a rank
# that gave up waiting calls abort().
_DEATHS = frozenset({signals.SIGKILL, signals.SIGSEGV, signals.SIGBUS, signals.SIGILL, signals.SIGFPE})


@dataclass(frozen=True)
class FirstFailure:
    rank: Optional[int]
    host: str
    exit_code: Optional[int]
    evidence: Evidence
    who: str = TORCHRUN  # says so
    local: Optional[int] = None  # its rank on its node
    time: str = ""  # 2026-03-29_22:03:17, as torchrun writes it

    @property
    def by_signal(self) -> bool:
        """Did the rank die from a signal that no other rank's failure explains?"""
        code = self.exit_code or 0
        return (-code if code < 0 else code - 128) in _DEATHS

    @property
    def seconds(self) -> Optional[float]:
        """Its time, comparable with that of a line."""
        return seconds_in_year(self.time) if self.time else None

    @property
    def fix(self) -> str:
        return OWN_LOG if self.who == TORCHRUN else ""

    def tells_of(self, report: Finding) -> bool:
        """Is this table of the same torchrun, and about the same rank, as that report without a cause?"""
        of_same = bool(report.evidence) and report.evidence[0].file == self.evidence.file
        return self.who == TORCHRUN and of_same and report.code == "child-failed" and report.rank in (None, self.rank)


class ElasticSummary:
    """Feed it lines; `first` is the failure that torchrun itself calls the root cause."""

    def __init__(self) -> None:
        self.first: Optional[FirstFailure] = None
        self.several_runs = False  # one host's torchrun ended more than once, and which lines are whose is not known
        self._tables: List[FirstFailure] = []
        self._ended: Dict[Tuple[str, str], FirstFailure] = {}  # file and host -> its torchrun's last end
        self._hosts: Dict[str, str] = {}  # host -> time of its torchrun's first end
        self.begins: Dict[str, int] = {}  # file -> first line behind the end of an earlier run in it
        self.open = 0  # lines of the block still to come
        self._headless = False  # the open block has no words before it that call it the root cause
        self._fields: Dict[str, str] = {}
        self._evidence = Evidence("")

    def feed(self, text: str, file: str, number: int) -> None:
        start = text.find(ROOT_CAUSE)
        if not self.open and start < 0 and _RANK_FIELD.match(text):
            # The table's beginning is not here. Its last block is the root cause, if nothing but its closing line follows.
            self.open, self._fields, self._headless = _MAX_LINES, {}, True
            self._evidence = Evidence(text.strip()[:200], file, number)
        if start >= 0:
            self.open, self._fields, self._headless = _MAX_LINES, {}, False
            self._evidence = Evidence(text.strip()[:200], file, number)
            self._inline(text[start:])
            return
        if not self.open:
            return
        self.open -= 1
        match = _FIELD.match(text)
        self._inline(text)
        if match:
            self._fields[match[1]] = match[2].strip()
        if self._headless:
            if text.startswith("===="):
                self._close()
            elif not match:
                self.open = 0
        elif match and match[1] == "traceback" or text.startswith("====") or not self.open:
            self._close()

    def finish(self) -> None:
        """The log ends within the table: what it holds so far counts; without the table's beginning, only a whole block."""
        if self.open and (not self._headless or "traceback" in self._fields):
            self._close()

    def _inline(self, text: str) -> None:
        for name, pattern in _INLINE:
            match = pattern.search(text)
            if match:
                self._fields.setdefault(name, match[1])

    def _close(self) -> None:
        self.open = 0
        rank = re.match(r"\d{1,7}", self._fields.get("rank", ""))
        local = re.search(r"\(local[ _]rank:? ?(\d{1,7})", self._fields.get("rank", ""))
        code = re.match(r"-?\d{1,7}", self._fields.get("exitcode", ""))
        if not rank and not code:
            return
        found = FirstFailure(
            int(rank[0]) if rank else None,
            self._fields.get("host", "").split(" ")[0],
            int(code[0]) if code else None,
            self._evidence,
            local=int(local[1]) if local else None,
            time=self._fields.get("time", "")[:40],
        )
        if len(self._tables) < _MAX_TABLES:
            self._tables.append(found)
        if self.first is None or _before(found, self.first):
            self.first = found
        if found.host:
            self._compare(found)

    def _compare(self, found: FirstFailure) -> None:
        """Has this host's torchrun ended before, in another run?"""
        file = found.evidence.file or ""
        before = self._ended.get((file, found.host))
        self._ended[(file, found.host)] = found
        if before is not None and _seconds_apart(before.time, found.time) > APART:
            self.begins[file] = max((before.evidence.line or 0) + 1, self.begins.get(file, 0))
        elif self._hosts.setdefault(found.host, found.time) != found.time:
            self.several_runs = True

    def drop(self, begins: Mapping[str, int]) -> None:
        """Forget the tables of earlier runs: `begins` has the first line of each file's last one."""
        self._tables = [
            table for table in self._tables if (table.evidence.line or 0) >= begins.get(table.evidence.file or "", 0)
        ]
        if self.first is not None and self.first.who == "torchrun":
            self.first = None
            for table in self._tables:
                if self.first is None or _before(table, self.first):
                    self.first = table


def _seconds_apart(one: str, other: str) -> float:
    try:
        first, second = (datetime.strptime(text[:19], "%Y-%m-%d_%H:%M:%S") for text in (one, other))
    except ValueError:
        return 0.0
    return abs((second - first).total_seconds())


def _before(one: FirstFailure, other: FirstFailure) -> bool:
    """Every node's torchrun prints a summary. One that was ended (SIGTERM) was not first; else the time decides."""
    if (one.exit_code == -15) != (other.exit_code == -15):
        return other.exit_code == -15
    return bool(one.time) and one.time < other.time
