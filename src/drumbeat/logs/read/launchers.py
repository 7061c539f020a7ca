"""torchrun's closing summary: which rank it saw fail first, where, and how."""

from __future__ import annotations

import re
import signal as signals
from dataclasses import replace
from datetime import datetime
from typing import Collection, Dict, FrozenSet, List, Mapping, Optional, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import CERTAIN, LIKELY, Evidence, Finding
from drumbeat.logs.read.prefixes import Line, seconds_in_year

find = Catalog("logs")
_FIELD = re.compile(r"\s*(time|host|rank|exitcode|error_file|traceback|msg)\s*: ?(.*)")
# The same fields where copying has put several of them on one line.
_INLINE = (
    ("time", re.compile(r"\btime\s*: (\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d)")),
    ("host", re.compile(r"\bhost\s*: (\S+)")),
    ("rank", re.compile(r"\brank\s*:?\s*(\d+ \(local[ _]rank:? ?\d*)")),
    ("exitcode", re.compile(r"\bexitcode\s*: ?(-?\d+) \(pid")),
)
ROOT_CAUSE, LOCAL_RANK = "Root Cause (first observed failure)", "(local_rank: "  # text found in its lines
FAILURES = "Failures:"  # its title
_ENTRY = re.compile(r"\s*\[\d+\]:\s*$")
_RANK_FIELD = re.compile(r"\s*rank\s*: \d+ \(local_rank: \d+\)")
_MAX_LINES = 16
_MAX_TABLES = 1_000
TORCHRUN = "torchrun"
OWN_LOG = (
    "read that rank's own log: torchrun --log-dir DIR --redirects 3 keeps one for each rank; @record of "
    "torch.distributed.elastic.multiprocessing.errors before main() brings the traceback into torchrun's table"
)
NOTICED = 10  # seconds: a launcher notices a death within this time, clock differences between hosts included
APART = 60  # seconds between the ends of two runs; less may be two launchers of one run
# Signals that kill a process from outside or for its own fault. Launchers stop the other ranks with SIGTERM, and a rank that
# gave up waiting calls abort().
_DEATHS = frozenset({signals.SIGKILL, signals.SIGSEGV, signals.SIGBUS, signals.SIGILL, signals.SIGFPE})


@dataclass(frozen=True)
class FirstFailure:
    rank: Optional[int]
    host: str
    exit_code: Optional[int]
    evidence: Evidence
    who: str = TORCHRUN  # says so
    time: str = ""  # 2026-03-29_22:03:17, as torchrun writes it
    alone: bool = (
        True  # False: another host's torchrun saw its own failure at about that time, so neither knows the first
    )

    @property
    def by_signal(self) -> bool:
        """Return True if the rank died from a signal that no other rank's failure explains."""
        code = self.exit_code or 0
        return (-code if code < 0 else code - 128) in _DEATHS

    @property
    def seconds(self) -> Optional[float]:
        """Time of the failure in seconds, comparable with a log line's time."""
        return seconds_in_year(self.time) if self.time else None

    @property
    def fix(self) -> str:
        return OWN_LOG if self.who == TORCHRUN else ""

    def tells_of(self, report: Finding) -> bool:
        """Return True if a report without a cause is about the same rank and from the same torchrun."""
        of_same = bool(report.evidence) and report.evidence[0].file == self.evidence.file
        return self.who == TORCHRUN and of_same and report.code == "child-failed" and report.rank in (None, self.rank)


class ElasticSummary:
    """Parses torchrun's summary line by line; `first` is the failure that torchrun calls the root cause."""

    def __init__(self) -> None:
        self.first: Optional[FirstFailure] = None
        self.several_runs = False  # one host's torchrun ended more than once; its lines cannot be told apart
        self._tables: List[FirstFailure] = []
        self._ended: Dict[Tuple[str, str], FirstFailure] = {}  # file and host -> its torchrun's last end
        self._hosts: Dict[str, str] = {}  # host -> time of its torchrun's first end
        self.begins: Dict[str, int] = {}  # file -> first line after the end of an earlier run in it
        self.open = 0  # lines of the entry still to come
        self.entry: Optional[FirstFailure] = None  # the last line fed is part of the table
        self.root = False  # the open entry is the root cause
        self._headless = False  # the start of the table is missing: its last entry is the root cause
        self._fields: Dict[str, str] = {}
        self._evidence = Evidence("")

    def feed(self, text: str, file: str, number: int) -> None:
        start = text.find(ROOT_CAUSE)
        match = _FIELD.match(text)
        next_one = bool(_ENTRY.match(text)) or bool(match and match[1] in self._fields)
        if self.open and self.root and (start >= 0 or next_one and "rank" in self._fields):
            self._close()
        if start >= 0 or not self.open and (FAILURES in text or _RANK_FIELD.match(text)):
            self.root, self._headless, next_one = start >= 0, start < 0 and bool(match), True
            self.open = _MAX_LINES
        if not self.open:
            self.entry = None
            return
        if next_one:  # do not mix the fields of two entries
            self._evidence = (
                Evidence(text.strip()[:200], file, number) if not self.root or start >= 0 else self._evidence
            )
            self._fields = {}
        self.open = _MAX_LINES if match and not self.root else self.open - 1
        self._inline(text[max(start, 0) :])
        if match:
            self._fields[match[1]] = match[2].strip()
        self.entry = self._read() if match and not self._headless else None
        if text.startswith("====") or not self.open:
            self._close()
        elif self._headless and not match and not next_one:
            self.open = 0

    def finish(self) -> None:
        """Close the table at the end of the log: partial entries count; without the table's start, only a complete one."""
        if self.open and (not self._headless or "traceback" in self._fields):
            self._close()

    def _inline(self, text: str) -> None:
        for name, pattern in _INLINE:
            match = pattern.search(text)
            if match:
                self._fields.setdefault(name, match[1])

    def _read(self) -> Optional[FirstFailure]:
        """Return the entry as read so far; None without a rank or an exit code."""
        rank = re.match(r"\d{1,7}", self._fields.get("rank", ""))
        code = re.match(r"-?\d{1,7}", self._fields.get("exitcode", ""))
        if not rank and not code:
            return None
        return FirstFailure(
            int(rank[0]) if rank else None,
            self._fields.get("host", "").split(" ")[0],
            int(code[0]) if code else None,
            self._evidence,
            time=self._fields.get("time", "")[:40],
        )

    def _close(self) -> None:
        self.open = 0
        found = self._read() if self.root or self._headless else None
        if found is None:
            return
        if len(self._tables) < _MAX_TABLES:
            self._tables.append(found)
        self.first = self._first_of_tables()
        if found.host:
            self._compare(found)

    def _compare(self, found: FirstFailure) -> None:
        """Note that this host's torchrun has ended before, in another run."""
        file = found.evidence.file or ""
        before = self._ended.get((file, found.host))
        self._ended[(file, found.host)] = found
        if before is not None and _seconds_apart(before.time, found.time) > APART:
            self.begins[file] = max((before.evidence.line or 0) + 1, self.begins.get(file, 0))
        elif self._hosts.setdefault(found.host, found.time) != found.time:
            self.several_runs = True

    def drop(self, begins: Mapping[str, int]) -> None:
        """Forget the tables of earlier runs: `begins` gives the first line of each file's last run."""
        self._tables = [
            table for table in self._tables if (table.evidence.line or 0) >= begins.get(table.evidence.file or "", 0)
        ]
        if self.first is not None and self.first.who == "torchrun":
            self.first = self._first_of_tables()

    def _first_of_tables(self) -> Optional[FirstFailure]:
        first: Optional[FirstFailure] = None
        for table in self._tables:
            first = table if first is None or _before(table, first) else first
        others = [table for table in self._tables if first and table.host != first.host and table.rank != first.rank]
        close = any(
            each.exit_code == 1 and _seconds_apart(each.time, first.time) <= NOTICED for each in others if first
        )
        return replace(first, alone=False) if first is not None and first.exit_code == 1 and close else first


def _seconds_apart(one: str, other: str) -> float:
    try:
        first, second = (datetime.strptime(text[:19], "%Y-%m-%d_%H:%M:%S") for text in (one, other))
    except ValueError:
        return 0.0
    return abs((second - first).total_seconds())


def _before(one: FirstFailure, other: FirstFailure) -> bool:
    """Return True if one failure came before another. Each node's torchrun prints a summary; one stopped by SIGTERM was not
    first."""
    if (one.exit_code == -15) != (other.exit_code == -15):
        return other.exit_code == -15
    return bool(one.time) and one.time < other.time


# torch's collective timeouts: the ranks that waited in each collective, and the ones that were missing. Every waiting rank
# prints a timeout; the rank to look at is the one that printed none, or one for an earlier collective, or that reports fewer
# calls of its own.


_WORK = re.compile(
    r"Work(?:NCCL|Gloo|RCCL)?\(SeqNum=(\d+), OpType=(\w+)(?:, NumelIn=(\d+))?(?:, NumelOut=\d+)?, Timeout\(ms\)=(\d+)\)"
)
_GROUP = re.compile(r"\[PG (?:ID )?(\S+)(?: PG GUID (\S+))? Rank (\d+)\]|\[Rank (\d+)\]")
_ENQUEUED = re.compile(r"[Ll]ast enqueued (?:NCCL )?work: (\d{1,12})\b")  # longer numbers have been garbage
_FAILED_AT = re.compile(r"(?:Timeout at NCCL work|detected by watchdog at work(?: sequence id)?): (\d{1,12})\b")
_BETWEEN_TWO = frozenset({"SEND", "RECV", "RECVANYSOURCE"})  # each end has its own call
MAX_TIMEOUTS = 20_000
MAX_NAMED = 16


@dataclass(frozen=True)
class Timeout:
    rank: int
    sequence: int
    operation: str
    numel: Optional[int]
    evidence: Evidence


@dataclass(frozen=True)
class Enqueued:
    """The last collective that a rank says it has enqueued."""

    number: int
    evidence: Evidence


@dataclass(frozen=True)
class Late:
    """The timeouts of one process group, and the ranks that were waited for."""

    finding: Finding
    ranks: Tuple[int, ...] = ()


class Timeouts:
    def __init__(self) -> None:
        self.groups: Dict[str, Dict[int, Timeout]] = {}  # process group -> rank -> its timeout
        self.enqueued: Dict[str, Dict[int, Enqueued]] = {}  # process group -> rank -> last collective it called
        self._failed_at: Dict[Tuple[int, int], Set[str]] = {}  # rank and SeqNum -> the groups whose lines name both
        self.heard: Set[int] = set()  # ranks whose own lines mention collectives
        self._several: Set[str] = set()  # names that several process groups share
        self._count = 0

    def feed(self, line: Line, evidence: Evidence) -> None:
        if not any(words in line.text for words in ("SeqNum=", "ast enqueued", "Received a dump signal")):
            return
        # Use the one nearest to the message: older torch repeats it in longer form.
        named = next(iter(list(_GROUP.finditer(line.text.split("Watchdog caught")[0]))[-1:]), None)
        # The prefix has the global rank, the group's own text the rank in the group.
        rank = line.rank if line.rank is not None or not named else int(named[3] or named[4])
        if rank is None or self._count >= MAX_TIMEOUTS:
            return
        self._count += 1
        self.heard.add(rank)
        group = (named[2] or named[1] or "") if named else ""
        last = _ENQUEUED.search(line.text)
        if last:
            self.enqueued.setdefault(group, {})[rank] = Enqueued(int(last[1]), evidence)
            failed = _FAILED_AT.search(line.text)
            if failed and group:
                self._failed_at.setdefault((rank, int(failed[1])), set()).add(group)
        work = _WORK.search(line.text) if "caught collective operation timeout" in line.text else None
        if not work:
            return
        numel = int(work[3]) if work[3] else None
        timeout = Timeout(rank, int(work[1]), work[2], numel, evidence)
        known = self.groups.setdefault(group, {}).setdefault(rank, timeout)
        if not group and known.sequence != timeout.sequence:
            self._several.add(group)  # a rank waits in only one collective of a group: these are of different groups

    def findings(self, nranks: Optional[int]) -> List[Finding]:
        return [late.finding for late in self._late(nranks)]

    def late_ranks(self, nranks: Optional[int]) -> FrozenSet[int]:
        """Return the ranks that the others waited for, whatever they printed themselves."""
        return frozenset(rank for late in self._late(nranks) for rank in late.ranks)

    def _late(self, nranks: Optional[int]) -> List[Late]:
        found = []
        for group, timeouts in sorted(self._by_group().items()):
            if group in self._several or not timeouts:  # each group numbers its own calls; they cannot be compared
                continue
            late = _judge(group, timeouts, nranks, self.enqueued.get(group, {}))
            if late:
                found.append(late)
        return found

    def _by_group(self) -> Dict[str, Dict[int, Timeout]]:
        """Sort timeouts by process group. torch's line about a collective does not name its group, but another line of the
        same rank may: then all that wait in that collective belong to it, unless another group is named; and so do all
        others if no line names a second group."""
        groups = {group: dict(timeouts) for group, timeouts in self.groups.items()}
        if "" in self._several:
            return groups
        homes: Dict[Tuple[int, str], Set[str]] = {}
        for rank, timeout in groups.get("", {}).items():
            home = self._failed_at.get((rank, timeout.sequence), set())
            homes.setdefault((timeout.sequence, timeout.operation), set()).update(home)
        known: Set[str] = set().union(*homes.values())
        only: Set[str] = known if {*groups, *self.enqueued} - {""} <= known else set()
        for rank, timeout in list(groups.get("", {}).items()):
            home = homes[(timeout.sequence, timeout.operation)] or only
            if len(home) == 1:
                groups.setdefault(next(iter(home)), {}).setdefault(rank, groups[""].pop(rank))
        return groups


def _judge(
    group: str, timeouts: Dict[int, Timeout], nranks: Optional[int], enqueued: Dict[int, Enqueued]
) -> Optional[Late]:
    sequences = {timeout.sequence for timeout in timeouts.values()}
    evidence = tuple(timeout.evidence for timeout in sorted(timeouts.values(), key=lambda t: t.sequence)[:3])
    if len(sequences) > 1:
        behind = [rank for rank, timeout in timeouts.items() if timeout.sequence == min(sequences)]
        return Late(
            find(
                "rank-behind", "apart", first=min(sequences), last=max(sequences), behind=ranks(behind),
                evidence=evidence, rank=_only(behind),
            )
        )  # fmt: skip
    callers: Dict[str, List[int]] = {}
    for rank in sorted(timeouts):
        callers.setdefault(timeouts[rank].operation, []).append(rank)
    sequence, operation = sequences.pop(), next(iter(callers))
    if len(callers) > 1:
        calls = ", ".join(f"{each} ({ranks(who)})" for each, who in sorted(callers.items()))
        odd = _only([who[0] for who in callers.values() if len(who) == 1]) if len(timeouts) > 2 else None
        shown = tuple(timeouts[who[0]].evidence for who in sorted(callers.values(), key=len)[:3])
        sure = CERTAIN if group else LIKELY  # else they may be of two groups
        differ = find(
            "collective-desync", "operations", sequence=sequence, operations=calls, evidence=shown, rank=odd, confidence=sure
        )  # fmt: skip
        return None if _BETWEEN_TWO.issuperset(callers) else Late(differ)
    behind = sorted(rank for rank, last in enqueued.items() if last.number < sequence and rank not in timeouts)
    silent = [rank for rank in _silent(timeouts, nranks) if rank not in enqueued]
    absent = [*behind, *silent]
    if not absent:
        return None
    words = [_stand(behind, [enqueued[rank].number for rank in behind], sequence, operation)] if behind else []
    if silent:
        words.append(f"no timeout from {ranks(silent)} in {operation} SeqNum {sequence}, which the others waited for")
    shown = (*(enqueued[rank].evidence for rank in behind[:1]), *evidence)
    finding = find("rank-absent", words="; ".join(words), absent=ranks(absent), evidence=shown, rank=_only(absent))
    return Late(finding, tuple(absent))


def _stand(behind: List[int], numbers: List[int], sequence: int, operation: str) -> str:
    """`rank 2 stands at 1522, the others at 1523 (ALLREDUCE)`."""
    at = f"{min(numbers)} to {max(numbers)}" if len(set(numbers)) > 1 else f"{numbers[0]}"
    stand = "stands" if len(behind) == 1 else "stand"
    return f"{ranks(behind)} {stand} at {at}, the others at {sequence} ({operation})"


def _silent(timeouts: Dict[int, Timeout], nranks: Optional[int]) -> List[int]:
    """Return ranks without a timeout; only if most ranks of a known world printed one."""
    if not nranks or nranks > 100_000 or len(timeouts) * 2 < nranks or max(timeouts) >= nranks:
        return []
    return [rank for rank in range(nranks) if rank not in timeouts]


def _only(found: List[int]) -> Optional[int]:
    return found[0] if len(found) == 1 else None


def ranks(numbers: Collection[int]) -> str:
    """`rank 3`, `ranks 1, 2, 5`."""
    shown = ", ".join(map(str, sorted(numbers)[:MAX_NAMED]))
    more = f" and {len(numbers) - MAX_NAMED} more" if len(numbers) > MAX_NAMED else ""
    return f"rank{'s' if len(numbers) != 1 else ''} {shown}{more}"
