"""torch's collective timeouts: which ranks waited in which collective, and who was not there.

Everybody who waits prints a timeout; the rank to look at is the one that printed none, or one for an earlier
collective.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict, List, Optional, Set

from drumbeat.diagnose.lines import Line
from drumbeat.finding import ERROR, Evidence, Finding

_WORK = re.compile(
    r"Work(?:NCCL|Gloo|RCCL)?\(SeqNum=(\d+), OpType=(\w+)(?:, NumelIn=(\d+))?(?:, NumelOut=\d+)?, Timeout\(ms\)=(\d+)\)"
)
_GROUP = re.compile(r"\[PG (?:ID )?(\S+)(?: PG GUID (\S+))? Rank (\d+)\]|\[Rank (\d+)\]")
_ENQUEUED = re.compile(r"last enqueued (?:NCCL )?work: (\d{1,12})\b")  # longer numbers were seen to be garbage
MAX_TIMEOUTS = 20_000
MAX_NAMED = 16


@dataclass(frozen=True)
class Timeout:
    rank: int
    sequence: int
    operation: str
    numel: Optional[int]
    evidence: Evidence


class Timeouts:
    def __init__(self) -> None:
        self.groups: Dict[str, Dict[int, Timeout]] = {}  # process group -> rank -> its timeout
        self.enqueued: Dict[str, Dict[int, int]] = {}  # process group -> rank -> last collective it called
        self._several: Set[str] = set()  # names under which lines of several process groups stand
        self._count = 0

    def feed(self, line: Line, evidence: Evidence) -> None:
        if "SeqNum=" not in line.text and "last enqueued" not in line.text:
            return
        # The one nearest to the message: older torch repeats it in longer words.
        named = next(iter(list(_GROUP.finditer(line.text.split("Watchdog caught")[0]))[-1:]), None)
        # The prefix names the rank in the world, the group's own text its rank in the group.
        rank = line.rank if line.rank is not None or not named else int(named[3] or named[4])
        if rank is None or self._count >= MAX_TIMEOUTS:
            return
        group = (named[2] or named[1] or "") if named else ""
        last = _ENQUEUED.search(line.text)
        if last:
            self._count += 1
            self.enqueued.setdefault(group, {})[rank] = int(last[1])
        work = _WORK.search(line.text) if "caught collective operation timeout" in line.text else None
        if not work:
            return
        self._count += 1
        numel = int(work[3]) if work[3] else None
        timeout = Timeout(rank, int(work[1]), work[2], numel, evidence)
        known = self.groups.setdefault(group, {}).setdefault(rank, timeout)
        if not group and known.sequence != timeout.sequence:
            self._several.add(group)  # one rank waits in one collective of a group: these are of different groups

    def findings(self, nranks: Optional[int]) -> List[Finding]:
        found = []
        for group, timeouts in sorted(self.groups.items()):
            if group in self._several:  # each group counts for itself; nothing can be compared
                continue
            finding = _judge(timeouts, nranks, self.enqueued.get(group, {}))
            if finding:
                found.append(finding)
        return found


def _judge(timeouts: Dict[int, Timeout], nranks: Optional[int], enqueued: Dict[int, int]) -> Optional[Finding]:
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
        return Finding("collective-desync", ERROR, title, cause, fix, evidence, rank=_only(behind))
    if len({operation for _, operation in operations}) > 1:
        title = (
            f"ranks make different calls at SeqNum {min(sequences)}: {', '.join(sorted({o for _, o in operations}))}"
        )
        cause = "the ranks took different branches"
        fix = "every rank must make the same collective calls in the same order"
        return Finding("collective-desync", ERROR, title, cause, fix, evidence)
    silent = _silent(timeouts, nranks) or [rank for rank, last in enqueued.items() if last < min(sequences)]
    if not silent:
        return None
    (sequence, operation) = next(iter(operations))
    title = f"no timeout from {ranks(silent)} in {operation} SeqNum {sequence}, which the others waited for"
    cause = "late, stuck or dead; or ended by the launcher before it could say so"
    fix = f"look at the log and the stack (py-spy dump) of {ranks(silent)}"
    return Finding("rank-absent", ERROR, title, cause, fix, evidence, rank=_only(silent))


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
