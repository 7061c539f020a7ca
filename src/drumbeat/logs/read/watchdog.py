"""torch's collective timeouts: which ranks waited in which collective, and who was not there.

Everybody who waits prints a timeout; the rank to look at is the one that printed none, or one for an earlier
collective, or that says of itself that it has called fewer.
"""

from __future__ import annotations

import re
from typing import Dict, FrozenSet, List, Optional, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.model import ERROR, Evidence, Finding
from drumbeat.logs.read.prefixes import Line

_WORK = re.compile(
    r"Work(?:NCCL|Gloo|RCCL)?\(SeqNum=(\d+), OpType=(\w+)(?:, NumelIn=(\d+))?(?:, NumelOut=\d+)?, Timeout\(ms\)=(\d+)\)"
)
_GROUP = re.compile(r"\[PG (?:ID )?(\S+)(?: PG GUID (\S+))? Rank (\d+)\]|\[Rank (\d+)\]")
_ENQUEUED = re.compile(r"[Ll]ast enqueued (?:NCCL )?work: (\d{1,12})\b")  # longer numbers were seen to be garbage
_FAILED_AT = re.compile(r"(?:Timeout at NCCL work|detected by watchdog at work(?: sequence id)?): (\d{1,12})\b")
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
    """The last collective that a rank says it has called."""

    number: int
    evidence: Evidence


@dataclass(frozen=True)
class Late:
    """What the timeouts of one process group show together, and who was waited for: ranks that did not wait themselves."""

    finding: Finding
    ranks: Tuple[int, ...] = ()


class Timeouts:
    def __init__(self) -> None:
        self.groups: Dict[str, Dict[int, Timeout]] = {}  # process group -> rank -> its timeout
        self.enqueued: Dict[str, Dict[int, Enqueued]] = {}  # process group -> rank -> last collective it called
        self._failed_at: Dict[Tuple[int, int], Set[str]] = {}  # rank and SeqNum -> the groups whose lines name both
        self.heard: Set[int] = set()  # ranks whose own lines speak of collectives
        self._several: Set[str] = set()  # names under which lines of several process groups stand
        self._count = 0

    def feed(self, line: Line, evidence: Evidence) -> None:
        if not any(words in line.text for words in ("SeqNum=", "ast enqueued", "Received a dump signal")):
            return
        # The one nearest to the message: older torch repeats it in longer words.
        named = next(iter(list(_GROUP.finditer(line.text.split("Watchdog caught")[0]))[-1:]), None)
        # The prefix names the rank in the world, the group's own text its rank in the group.
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
            self._several.add(group)  # one rank waits in one collective of a group: these are of different groups

    def findings(self, nranks: Optional[int]) -> List[Finding]:
        return [late.finding for late in self._late(nranks)]

    def late_ranks(self, nranks: Optional[int]) -> FrozenSet[int]:
        """Those that the others waited for, whatever they printed themselves."""
        return frozenset(rank for late in self._late(nranks) for rank in late.ranks)

    def _late(self, nranks: Optional[int]) -> List[Late]:
        found = []
        for group, timeouts in sorted(self._by_group().items()):
            if group in self._several or not timeouts:  # each group counts for itself; nothing can be compared
                continue
            late = _judge(timeouts, nranks, self.enqueued.get(group, {}))
            if late:
                found.append(late)
        return found

    def _by_group(self) -> Dict[str, Dict[int, Timeout]]:
        """torch's line about a collective does not name its group. Another line of the same rank may: then all who wait in that
        collective belong there, if no other group is named for it."""
        groups = {group: dict(timeouts) for group, timeouts in self.groups.items()}
        if "" in self._several:
            return groups
        homes: Dict[Tuple[int, str], Set[str]] = {}
        for rank, timeout in groups.get("", {}).items():
            home = self._failed_at.get((rank, timeout.sequence), set())
            homes.setdefault((timeout.sequence, timeout.operation), set()).update(home)
        for rank, timeout in list(groups.get("", {}).items()):
            home = homes[(timeout.sequence, timeout.operation)]
            if len(home) == 1:
                groups.setdefault(next(iter(home)), {}).setdefault(rank, groups[""].pop(rank))
        return groups


def _judge(timeouts: Dict[int, Timeout], nranks: Optional[int], enqueued: Dict[int, Enqueued]) -> Optional[Late]:
    sequences = {timeout.sequence for timeout in timeouts.values()}
    operations = {(timeout.sequence, timeout.operation) for timeout in timeouts.values()}
    evidence = tuple(timeout.evidence for timeout in sorted(timeouts.values(), key=lambda t: t.sequence)[:3])
    if len(sequences) > 1:
        behind = [rank for rank, timeout in timeouts.items() if timeout.sequence == min(sequences)]
        title = (
            f"ranks wait in different collectives: SeqNum {min(sequences)} to {max(sequences)}; behind: {ranks(behind)}"
        )
        cause = "the ranks did not make the same calls: uneven data, or a collective that only some of them reach"
        fix = (
            f"look at what {ranks(behind)} did before; every rank must make the same collective calls in the same order"
        )
        return Late(Finding("collective-desync", ERROR, title, cause, fix, evidence, rank=_only(behind)))
    if len({operation for _, operation in operations}) > 1:
        title = (
            f"ranks make different calls at SeqNum {min(sequences)}: {', '.join(sorted({o for _, o in operations}))}"
        )
        cause = "the ranks took different branches"
        fix = "every rank must make the same collective calls in the same order"
        return Late(Finding("collective-desync", ERROR, title, cause, fix, evidence))
    (sequence, operation) = next(iter(operations))
    behind = sorted(rank for rank, last in enqueued.items() if last.number < sequence and rank not in timeouts)
    silent = [rank for rank in _silent(timeouts, nranks) if rank not in enqueued]
    absent = [*behind, *silent]
    if not absent:
        return None
    words = [_stand(behind, [enqueued[rank].number for rank in behind], sequence, operation)] if behind else []
    if silent:
        words.append(f"no timeout from {ranks(silent)} in {operation} SeqNum {sequence}, which the others waited for")
    cause = "late, stuck or dead; or ended by the launcher before it could say so"
    fix = f"look at the log and the stack (py-spy dump) of {ranks(absent)}"
    shown = (*(enqueued[rank].evidence for rank in behind[:1]), *evidence)
    finding = Finding("rank-absent", ERROR, "; ".join(words), cause, fix, shown, rank=_only(absent))
    return Late(finding, tuple(absent))


def _stand(behind: List[int], numbers: List[int], sequence: int, operation: str) -> str:
    """`rank 2 stands at 1522, the others at 1523 (ALLREDUCE)`."""
    at = f"{min(numbers)} to {max(numbers)}" if len(set(numbers)) > 1 else f"{numbers[0]}"
    stand = "stands" if len(behind) == 1 else "stand"
    return f"{ranks(behind)} {stand} at {at}, the others at {sequence} ({operation})"


def _silent(timeouts: Dict[int, Timeout], nranks: Optional[int]) -> List[int]:
    """Ranks without a timeout; only when most of a known world did print one."""
    if not nranks or nranks > 100_000 or len(timeouts) * 2 < nranks or max(timeouts) >= nranks:
        return []
    return [rank for rank in range(nranks) if rank not in timeouts]


def _only(found: List[int]) -> Optional[int]:
    return found[0] if len(found) == 1 else None


def ranks(numbers: List[int]) -> str:
    """`rank 3`, `ranks 1, 2, 5`."""
    shown = ", ".join(map(str, sorted(numbers)[:MAX_NAMED]))
    more = f" and {len(numbers) - MAX_NAMED} more" if len(numbers) > MAX_NAMED else ""
    return f"rank{'s' if len(numbers) != 1 else ''} {shown}{more}"
