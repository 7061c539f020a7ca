"""Placement: where each rank really sits, judged by the GPU that it really has. Who set the mask makes no difference."""

from __future__ import annotations

from dataclasses import replace
from typing import Container, Dict, FrozenSet, List, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.machine.model import Facts, Gpu
from drumbeat.plan.binding import Binding, Slot
from drumbeat.plan.masks import ranges

RIGHT, WRONG, SHARED, NO_GPU, NOT_PINNED, UNKNOWN = "right", "wrong", "shared GPU", "no GPU", "not pinned", "unknown"


@dataclass(frozen=True)
class RankSeen:
    """What was read of one rank's main process while it ran."""

    rank: Optional[int]  # None: the process uses a GPU, but carries no rank number
    pid: int
    cpus: Optional[Tuple[int, ...]] = None  # None: its mask could not be read
    gpus: Optional[Tuple[int, ...]] = None  # those it uses; (): it has none open; None: which ones is not shown
    open: Tuple[int, ...] = ()  # those whose device file it holds: a runtime opens all that it is shown
    instances: Tuple[str, ...] = ()  # of a divided GPU (MIG), where open files or the environment name them
    stepped: bool = False  # the job has reported a step
    settled: bool = True  # two looks in a row saw the same


@dataclass(frozen=True)
class Row:
    rank: Optional[int]
    pid: Optional[int] = None
    gpus: Tuple[int, ...] = ()
    gpu_read: bool = False  # False: taken from the plan, not seen
    cpus: Optional[Tuple[int, ...]] = None
    numa: Tuple[int, ...] = ()  # of its cores
    nic: Optional[str] = None  # the one nearest to its GPU
    verdict: str = UNKNOWN
    right: Tuple[int, ...] = ()  # the cores it should have, where that can be said
    note: str = ""
    instances: Tuple[str, ...] = ()  # of a divided GPU


def rows(
    facts: Facts,
    bound: Binding,
    right: Binding,
    seen: Sequence[RankSeen],
    first_rank: int = 0,
    ended: Container[int] = (),
) -> List[Row]:
    """One row per rank. `right` is the binding as the facts alone would have it; `bound` is the one in force; `ended`: ranks."""
    by_rank = {each.rank: each for each in seen if each.rank is not None}
    expected = [first_rank + slot.local_rank for slot in bound.slots]
    unnumbered = not by_rank and any(each.rank is None for each in seen)
    # One process was started, which started the ranks itself.
    if unnumbered or (len(bound.slots) == 1 and len(seen) > 1):
        expected = sorted(by_rank)
    found = [_row(facts, rank, _slot(bound, right, rank - first_rank), right, by_rank.get(rank)) for rank in expected]
    found = [
        replace(row, note="it ended before it was looked at") if row.pid is None and row.rank in ended else row
        for row in found
    ]
    found += [_row(facts, None, None, right, each) for each in seen if each.rank is None]
    return _together(facts, found, bound)


def _slot(bound: Binding, right: Binding, local_rank: int) -> Optional[Slot]:
    for binding in (bound, right):
        if len(binding.slots) > 1 or local_rank == 0:
            for slot in binding.slots:
                if slot.local_rank == local_rank:
                    return slot
    return None


def _row(facts: Facts, rank: Optional[int], slot: Optional[Slot], right: Binding, about: Optional[RankSeen]) -> Row:
    if about is None:
        return Row(rank, note="no process of this rank was found")
    row = Row(rank, about.pid, cpus=about.cpus, numa=_nodes_of(facts, about.cpus or ()), instances=about.instances)
    if about.cpus is None:
        return replace(row, note="its mask could not be read")
    if not about.settled:
        return Row(rank, about.pid, note="it was not seen twice alike before it ended")
    if not _discrete(facts):
        return _without_gpus(row, slot, about.cpus)
    row = _with_gpu(row, slot, about)
    if not row.gpus:
        return row
    home = _home(facts, row.gpus)
    nearest = _slot_of_gpu(right, row.gpus[0])
    planned = nearest.cpus if nearest else ()
    row = replace(row, nic=nearest.nic if nearest else None)
    if home is None:
        return replace(row, verdict=UNKNOWN, note=f"the NUMA node of GPU {ranges(row.gpus)} is not known")
    mine = frozenset(about.cpus)
    if mine <= home and _another_gpus_cache(facts, row.gpus, mine, planned):
        return replace(row, verdict=WRONG, right=planned, note="its cores share their L3 cache with another GPU's rank")
    if mine <= home:
        return replace(row, verdict=RIGHT, note=_other_cache(facts, mine, planned))
    allowed = frozenset(facts.cpus.allowed or facts.cpus.online)
    wanted = planned if set(planned) <= home else tuple(sorted(home & allowed))
    if mine >= allowed or len(row.numa) == len(_numa_nodes(facts)):
        return replace(row, verdict=NOT_PINNED, right=wanted, note="it may use cores of every NUMA node")
    if not wanted:
        return replace(row, verdict=WRONG, note="no core beside its GPU is among those this job may use")
    away = "none" if not mine & home else f"{len(mine & home)} of {len(mine)}"
    return replace(row, verdict=WRONG, right=wanted, note=f"{away} of its cores on the NUMA node of its GPU")


def _without_gpus(row: Row, slot: Optional[Slot], cpus: Tuple[int, ...]) -> Row:
    if slot is None or not slot.cpus:
        return replace(row, verdict=NOT_PINNED)
    if set(cpus) == set(slot.cpus):
        return replace(row, verdict=RIGHT)
    return replace(row, verdict=WRONG, right=slot.cpus, note=f"planned were cores {slot.cores}")


def _with_gpu(row: Row, slot: Optional[Slot], about: RankSeen) -> Row:
    """The row with the GPU that the rank has, or with the reason why that is not known."""
    if about.gpus:
        gpus: Tuple[int, ...] = about.gpus
        return replace(row, gpus=gpus, gpu_read=True)
    if about.gpus == ():
        if about.stepped:
            return replace(row, verdict=NO_GPU, note="the job reports steps, and this rank has no GPU open")
        return replace(row, note="it had no GPU open when it was looked at")
    if slot is not None and slot.gpus and set(slot.gpus) <= set(about.open):
        return replace(row, gpus=slot.gpus, gpu_read=False)
    if about.open:
        return replace(row, note=f"it has GPUs {ranges(about.open)} open; which one it uses is not shown")
    return replace(row, note="its open devices could not be read")


def _together(facts: Facts, found: List[Row], bound: Binding) -> List[Row]:
    """What only shows across ranks: one GPU used by several, cores used by several."""
    users: Dict[int, List[Row]] = {}
    for row in found:
        for gpu in row.gpus if row.gpu_read else ():
            users.setdefault(gpu, []).append(row)
    parts = {gpu.index for gpu in facts.gpus if gpu.mig}
    meant = {gpu for gpu in users if sum(gpu in slot.gpus for slot in bound.slots) > 1}
    return [_overlap(_shared(row, users, parts, meant), found, bound) for row in found]


def _shared(row: Row, users: Dict[int, List[Row]], parts: set[int], meant: set[int]) -> Row:
    for gpu in row.gpus if row.gpu_read else ():
        others = [other for other in users[gpu] if other is not row]
        if not others or gpu in meant:
            continue
        if gpu in parts and not row.instances:
            return replace(row, note=f"GPU {gpu} is divided (MIG); which instance it uses is not shown")
        if gpu in parts:
            others = [other for other in others if set(other.instances) & set(row.instances)]
            if not others:
                continue
        names = ", ".join(_name(other) for other in others)
        if gpu in parts:
            return replace(row, verdict=SHARED, note=f"instance {', '.join(row.instances)} is also used by {names}")
        if len(row.gpus) == 1:
            return replace(row, verdict=SHARED, note=f"GPU {gpu} is also used by {names}")
    return row


def _overlap(row: Row, found: List[Row], bound: Binding) -> Row:
    if row.verdict != RIGHT or row.cpus is None or not any(slot.cpus for slot in bound.slots):
        return row
    for other in found:
        both = set(row.cpus) & set(other.cpus or ()) if other is not row else set()
        if both and other.verdict in (RIGHT, WRONG) and (other.rank, other.pid) != (row.rank, row.pid):
            planned = next((slot.cpus for slot in bound.slots if set(slot.gpus) & set(row.gpus)), ())
            return replace(row, verdict=WRONG, right=planned, note=f"shares cores {ranges(both)} with {_name(other)}")
    return row


def _name(row: Row) -> str:
    return f"pid {row.pid}" if row.rank is None else f"rank {row.rank}"


def _other_cache(facts: Facts, mine: FrozenSet[int], planned: Sequence[int]) -> str:
    """Same NUMA node, another last-level cache than the plan's: not wrong, but said."""
    caches = [frozenset(group) for group in facts.cpus.l3]
    here = {place for place, group in enumerate(caches) if group & mine}
    there = {place for place, group in enumerate(caches) if group & set(planned)}
    if not here or not there or here <= there:
        return ""
    return f"another L3 cache than planned ({ranges(planned)})"


def _another_gpus_cache(facts: Facts, gpus: Sequence[int], mine: FrozenSet[int], planned: Sequence[int]) -> bool:
    """Where a NUMA node has one last-level cache per GPU (one CCD for each GCD of an MI250X), its cores are one GPU's own."""
    nodes = {gpu.numa for gpu in facts.gpus if gpu.index in gpus}
    if len(nodes) != 1 or not planned:
        return False
    node = nodes.pop()
    cores = set(facts.cpus.numa.get(str(node), ()))
    beside = [gpu for gpu in _discrete(facts) if gpu.numa == node]
    caches = [set(group) for group in facts.cpus.l3 if set(group) & cores]
    if len(beside) < 2 or len(caches) != len(beside):
        return False
    own = [cache for cache in caches if cache & set(planned)]
    return len(own) == 1 and not mine & own[0]


def _slot_of_gpu(binding: Binding, gpu: int) -> Optional[Slot]:
    return next((slot for slot in binding.slots if gpu in slot.gpus), None)


def _discrete(facts: Facts) -> List[Gpu]:
    return [gpu for gpu in facts.gpus if not gpu.integrated]


def _numa_nodes(facts: Facts) -> List[str]:
    return [node for node, cpus in facts.cpus.numa.items() if cpus]


def _nodes_of(facts: Facts, cpus: Sequence[int]) -> Tuple[int, ...]:
    mine = set(cpus)
    return tuple(sorted(int(node) for node, members in facts.cpus.numa.items() if mine & set(members)))


def _home(facts: Facts, gpus: Sequence[int]) -> Optional[FrozenSet[int]]:
    """The CPUs of the GPUs' NUMA nodes; None where a GPU's node is not known."""
    nodes = _numa_nodes(facts)
    if len(nodes) <= 1:
        return frozenset(facts.cpus.online) | frozenset(facts.cpus.allowed)
    home: set[int] = set()
    for gpu in facts.gpus:
        if gpu.index in gpus and not gpu.integrated:
            if gpu.numa is None or str(gpu.numa) not in nodes:
                return None
            home |= set(facts.cpus.numa[str(gpu.numa)])
    return frozenset(home) or None
