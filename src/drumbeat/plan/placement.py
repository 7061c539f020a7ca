"""Placement: the cores and GPUs that each rank really has. The cores are judged by the GPU, whoever set the mask."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Collection, Container, Dict, FrozenSet, Iterator, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import EnvVar, Order
from drumbeat.base.ranges import named_ranks, ranges
from drumbeat.base.text import columns
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import Finding, Verdict
from drumbeat.inspector.record import RankSeen
from drumbeat.machine.model import Facts, Gpu
from drumbeat.plan.argv import IDENTITY
from drumbeat.plan.binding import Binding, Slot, mask, right_binding

RIGHT, WRONG, SHARED, NO_GPU, NOT_PINNED, UNKNOWN = "right", "wrong", "shared GPU", "no GPU", "not pinned", "unknown"


@dataclass(frozen=True)
class Row:
    rank: Optional[int]
    pid: Optional[int] = None
    gpus: Tuple[int, ...] = ()
    gpu_read: bool = False  # False: taken from the plan, not observed
    cpus: Optional[Tuple[int, ...]] = None
    numa: Tuple[int, ...] = ()  # NUMA nodes of its cores
    nic: Optional[str] = None  # the NIC nearest to its GPU
    verdict: str = UNKNOWN
    right: Tuple[int, ...] = ()  # the cores it should have, if known
    note: str = ""
    instances: Tuple[str, ...] = ()  # instance of a divided GPU


def rows(
    facts: Facts,
    bound: Binding,
    right: Binding,
    seen: Sequence[RankSeen],
    first_rank: int = 0,
    ended: Container[int] = (),
) -> List[Row]:
    """Return one row per rank. `right`: the binding that follows from the facts alone; `bound`: the one in force; `ended`:
    ranks that have ended."""
    by_rank = {each.rank: each for each in seen if each.rank is not None}
    expected = [first_rank + slot.local_rank for slot in bound.slots]
    unnumbered = not by_rank and any(each.rank is None for each in seen)
    # One process was started, and it started the ranks itself.
    if unnumbered or (len(bound.slots) == 1 and len(seen) > 1):
        expected = sorted(by_rank)
    found = [_row(facts, rank, _slot(bound, right, rank - first_rank), right, by_rank.get(rank)) for rank in expected]
    gone = "it ended before it was looked at"
    found = [replace(row, note=gone) if row.pid is None and row.rank in ended else row for row in found]
    found += [_row(facts, None, None, right, each) for each in seen if each.rank is None]
    return _together(facts, found, bound)


def _slot(bound: Binding, right: Binding, local_rank: int) -> Optional[Slot]:
    usable = [binding for binding in (bound, right) if len(binding.slots) > 1 or local_rank == 0]
    return next((slot for binding in usable for slot in binding.slots if slot.local_rank == local_rank), None)


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
    nearest = next((slot for slot in right.slots if row.gpus[0] in slot.gpus), None)
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
    """Return the row with the rank's GPU, or with a note why it is unknown."""
    if about.gpus:
        return replace(row, gpus=about.gpus, gpu_read=True)
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
    """Find faults that show only across ranks: a GPU or cores used by several."""
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
        names = ", ".join(_rank_name(other) for other in others)
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
            return replace(
                row, verdict=WRONG, right=planned, note=f"shares cores {ranges(both)} with {_rank_name(other)}"
            )
    return row


def _other_cache(facts: Facts, mine: FrozenSet[int], planned: Sequence[int]) -> str:
    """Note cores in another last-level cache of the same NUMA node than planned: not wrong, but reported."""
    caches = [frozenset(group) for group in facts.cpus.l3]
    here = {place for place, group in enumerate(caches) if group & mine}
    there = {place for place, group in enumerate(caches) if group & set(planned)}
    if not here or not there or here <= there:
        return ""
    return f"another L3 cache than planned ({ranges(planned)})"


def _another_gpus_cache(facts: Facts, gpus: Sequence[int], mine: FrozenSet[int], planned: Sequence[int]) -> bool:
    """Return true for cores in another GPU's cache: if a NUMA node has one last-level cache per GPU (one CCD for each GCD of
    an MI250X), each cache belongs to one GPU."""
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


def _discrete(facts: Facts) -> List[Gpu]:
    return [gpu for gpu in facts.gpus if not gpu.integrated]


def _numa_nodes(facts: Facts) -> List[str]:
    return [node for node, cpus in facts.cpus.numa.items() if cpus]


def _nodes_of(facts: Facts, cpus: Sequence[int]) -> Tuple[int, ...]:
    mine = set(cpus)
    return tuple(sorted(int(node) for node, members in facts.cpus.numa.items() if mine & set(members)))


def _home(facts: Facts, gpus: Sequence[int]) -> Optional[FrozenSet[int]]:
    """Return the CPUs of the GPUs' NUMA nodes; None if a GPU's node is unknown."""
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


# Summary of a placement table: one line, its confidence, and advice.


find = Catalog("plan")
_SHOWN = 8  # ranks listed in a finding


def verdict(table: Sequence[Row], facts: Facts, bound: Binding) -> Verdict:
    """Answer 'as planned', 'not pinned', 'mismatch' or 'unknown'."""
    findings = (
        *_wrong(table, bound), *_shared_gpus(table), *_without(table), *_few_cores(table, facts), *_idle(table, facts),
    )  # fmt: skip
    gpus = any(not gpu.integrated for gpu in facts.gpus)
    seen = tuple(
        f"{_rank_name(row)}: mask{' and GPU' * (gpus and (row.gpu_read or row.verdict == NO_GPU))} of pid {row.pid}"
        for row in table
        if row.cpus is not None
    )
    unseen = tuple(f"{_rank_name(row)}: {row.note}" for row in table if row.verdict == UNKNOWN)
    unseen += tuple(f"{_rank_name(row)}: which GPU it uses" for row in table if row.gpus and not row.gpu_read)
    answer, text = _answer(table, bound, findings, gpus)
    confidence = "likely" if any(row.gpus and not row.gpu_read for row in table) else "certain"
    return Verdict("affinity", answer, confidence, text, findings, seen, unseen)


def _answer(table: Sequence[Row], bound: Binding, findings: Sequence[Finding], gpus: bool) -> Tuple[str, str]:
    beside = "beside their GPU" if gpus else "on their cores"
    good = f"{_count(table, RIGHT)}/{len(table)} ranks {beside}"
    if any(finding.severity in ("warning", "error") for finding in findings):
        first = next(finding for finding in findings if finding.severity in ("warning", "error"))
        return "mismatch", good if first.code == "placement-wrong" else f"{good}; {first.title}"
    unknown = [row for row in table if row.verdict == UNKNOWN]
    if unknown or not table:
        reasons = sorted({row.note for row in unknown}) or ["no rank was found"]
        names = ", ".join(_rank_name(row) for row in unknown[:_SHOWN])
        known = f"{good}; " if _count(table, RIGHT) else "" if any(row.cpus for row in table) else "not looked at: "
        return "unknown", f"{known}{names}: {'; '.join(reasons[:2])}" if unknown else reasons[0]
    if _count(table, RIGHT) < len(table):
        return "not pinned", bound.threads_why
    return "as planned", good


def text_table(table: Sequence[Row], used: Optional[Mapping[str, Sequence[str]]] = None) -> List[str]:
    """Format the table for a person; a GPU in brackets was taken from the plan, not observed.

    `used`: the cards that NCCL's log shows for each rank, printed beside the one nearest to its GPU.
    """
    head = ("rank", "GPU", "cores", "NUMA", "NIC", "verdict")
    cells = [head if used is None else (*head[:-1], "NIC used", head[-1])]
    for row in table:
        gpu = (ranges(row.gpus) if row.gpus else "-") + (f" {'+'.join(row.instances)}" if row.instances else "")
        words = row.verdict + (f", right: {ranges(row.right)}" if row.right else "")
        cells.append(
            (
                "-" if row.rank is None else str(row.rank),
                gpu if row.gpu_read or not row.gpus else f"({gpu})",
                "unknown" if row.cpus is None else ranges(row.cpus),
                ranges(row.numa) or "-",
                row.nic or "-",
                *(() if used is None else (_used(row, used.get(str(row.rank), ())),)),
                f"{words} ({row.note})" if row.note else words,
            )
        )
    return columns(cells)


def _used(row: Row, names: Sequence[str]) -> str:
    if not names:
        return "not seen"
    away = row.nic is not None and row.nic not in names and not any("/" in name for name in names)
    return ", ".join(names) + (" (not the nearest)" if away else "")


def _wrong(table: Sequence[Row], bound: Binding) -> Iterator[Finding]:
    wrong = [row for row in table if row.verdict == WRONG]
    if not wrong:
        return
    place = "beside their GPU" if any(row.gpus for row in wrong) else "on the cores that were planned"
    planned = {slot.cpus for slot in bound.slots}
    ours = all(row.cpus in planned for row in wrong)
    cause = bound.bound_by if ours else "something bound them again after the start: taskset, numactl, a launcher"
    right = [row.right or row.cpus or () for row in table if row.rank is not None]
    known = all(row.right for row in wrong) and all(right)
    yield find(
        "placement-wrong", "known" if known else "", wrong=len(wrong), all=len(table), place=place, why=cause,
        masks=",".join(map(mask, right)), evidence=_evidence(wrong), rank=wrong[0].rank,
    )  # fmt: skip


def _shared_gpus(table: Sequence[Row]) -> Iterator[Finding]:
    shared = [row for row in table if row.verdict == SHARED]
    if shared:
        gpus = _named("GPU", {gpu for row in shared for gpu in row.gpus})
        yield find("gpu-shared", ranks=len(shared), gpus=gpus, evidence=_evidence(shared), rank=shared[0].rank)


def _named(word: str, numbers: Collection[int]) -> str:
    return f"{word}{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"


def _without(table: Sequence[Row]) -> Iterator[Finding]:
    without = [row for row in table if row.verdict == NO_GPU]
    if without:
        counts = {"without": len(without), "all": len(table)}
        yield find("rank-without-gpu", evidence=_evidence(without), rank=without[0].rank, **counts)


def _few_cores(table: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """Report that all ranks share a small set of cores while the machine has more: their task was given too few."""
    masks = {row.cpus for row in table}
    only = next(iter(masks)) if len(masks) == 1 else None
    if not only or len(table) < 2 or len(only) >= len(table) or len(only) >= len(facts.cpus.online):
        return
    variant = "slurm" if facts.identity.scheduler == "slurm" else ""
    cores, online = _named("core", only), len(facts.cpus.online)
    yield find("all-ranks-on-few-cores", variant, all=len(table), cores=cores, online=online, rank=table[0].rank)


def _idle(table: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """Report unused GPUs, if the GPU of every rank was read."""
    mine = {gpu.index for gpu in facts.gpus if not gpu.integrated}
    used = {gpu for row in table for gpu in row.gpus}
    if used and all(row.gpu_read for row in table) and mine - used and not _count(table, SHARED):
        yield find("gpus-unused", gpus=_named("GPU", mine - used), all=len(mine), evidence=_evidence(table))


def _count(table: Sequence[Row], word: str) -> int:
    return sum(1 for row in table if row.verdict == word)


def _rank_name(row: Row) -> str:
    return f"pid {row.pid}" if row.rank is None else f"rank {row.rank}"


def _evidence(table: Sequence[Row]) -> List[str]:
    return [_row_words(row, _rank_name(row)) for row in table[:_SHOWN]]


def _row_words(row: Row, name: str) -> str:
    gpu = f"GPU {ranges(row.gpus)}" if row.gpus else "no GPU"
    right = f", right are {ranges(row.right)}" if row.right else ""
    return f"{name}: {gpu}, cores {ranges(row.cpus or ())}{right}"


# Compare the ranks' environment with the planned one. A command, its setup or a container may change it.


# Of libraries by which ranks exchange data; but not their output, and each one's NICs.
_OF_ALL = ("NCCL_", "RCCL_", "TORCH_NCCL_", "GLOO_", "FI_", "UCX_", "CXI_")
_MAY_DIFFER = ("DEBUG", "LOG", "DEVICE", "_HCA", "IFNAME", "IFACE", "DOMAIN")
# Each process has its own value: an MPI launcher's variables about a task.
_OF_ONE_PROCESS = ("OMPI_MCA_ess_", "OMPI_MCA_orte_", "PMIX_", "PMI_")


def changed(
    environments: Mapping[int, Mapping[str, str]], expected: Sequence[EnvVar], binding: Binding, first_rank: int
) -> List[Finding]:
    """Return one finding per variable whose value in some ranks is not the planned one or, if none is planned, not that of
    most ranks."""
    own = {first_rank + slot.local_rank: {each.name: each.value for each in slot.env} for slot in binding.slots}
    wrong: Dict[str, List[Tuple[int, str, str]]] = {}
    for rank, environ in sorted(environments.items()):
        planned = {variable.name: variable.value for variable in expected}
        planned.update(own.get(rank, {}))
        for name, value in planned.items():
            if environ.get(name) != value and not name.startswith(_OF_ONE_PROCESS):
                wrong.setdefault(name, []).append((rank, environ.get(name, "unset"), value))
    names = {name for environ in environments.values() for name in environ if name.startswith(_OF_ALL)}
    names -= {variable.name for variable in expected}.union(*own.values())
    odd = {name: _odd(name, environments) for name in sorted(names) if not any(part in name for part in _MAY_DIFFER)}
    looked_at = sorted(environments)
    found = [_finding(name, ranks, looked_at, "own" if name in IDENTITY else "") for name, ranks in wrong.items()]
    return found + [_finding(name, ranks, looked_at, "apart") for name, ranks in odd.items() if ranks]


def _odd(name: str, environments: Mapping[int, Mapping[str, str]]) -> List[Tuple[int, str, str]]:
    """Return the ranks with another value than most ranks have. A value for each rank, such as a NIC, is meant."""
    values = {rank: environ.get(name, "unset") for rank, environ in sorted(environments.items())}
    usual, count = Counter(values.values()).most_common(1)[0]
    lone = len(values) == 2 and "unset" in values.values()
    return [
        (rank, value, usual) for rank, value in values.items() if value != usual and (lone or 2 * count > len(values))
    ]


def environment(findings: Sequence[Finding]) -> Verdict:
    """Return the verdict about the ranks' variables, from the findings about them."""
    if not findings:
        return Verdict("environment", "as planned", "certain", "the ranks have the planned variables")
    rest = f", and {len(findings) - 1} more" if findings[1:] else ""
    title = f"{findings[0].title}{rest}"
    return Verdict("environment", "mismatch", "certain", title, tuple(findings), findings[0].seen)


def _finding(name: str, ranks: Sequence[Tuple[int, str, str]], looked_at: Sequence[int], variant: str) -> Finding:
    rank, value, planned = ranks[0]
    who = f"rank {rank} has" if len(ranks) == 1 else f"{len(ranks)} of {len(looked_at)} ranks have"
    return find(
        "environment-mismatch", variant, who=who, name=name, value=value, planned=planned, rank=rank,
        evidence=[f"rank {each}: {name}={now}" for each, now, _ in ranks[:_SHOWN]],
        seen=(f"the environment of {named_ranks(looked_at, _SHOWN)} in /proc",),
    )  # fmt: skip


# Masks set by somebody else, by the job's own cpu-bind or for scheduler tasks: which are kept and which are replaced.


def task_binding(right: Binding, masks: Mapping[int, Sequence[int]], facts: Facts, by_user: bool) -> Binding:
    """Return the binding for ranks in scheduler tasks. `right`: the binding within all cores of the tasks. `masks`: local rank
    -> its task's cores.

    Masks that a user wrote are kept; if they are wrong, the right ones are reported. A scheduler's default ignores GPUs: if it
    is wrong, the ranks are bound again within the cores of the step.
    """
    sets = [set(cpus) for cpus in masks.values()]
    if len(sets) < 2 or not all(sets) or set(masks) != {slot.local_rank for slot in right.slots}:
        return right
    apart = sum(map(len, sets)) == len(set().union(*sets))
    wrong = [] if not apart else _wrong_masks(right, masks, facts)
    if not by_user and (not apart or wrong):
        return replace(right, findings=(*right.findings, *_rebound(wrong, right, facts)))
    who = "the cpu-bind of the srun that started the tasks" if by_user else "the scheduler's default"
    why = "as the scheduler bound this task" if apart else "tasks overlap as the user's --cpu-bind set them"
    slots = tuple(replace(slot, cpus=tuple(masks[slot.local_rank]), why=why) for slot in right.slots)
    kept = replace(right, slots=slots, bound_by=f"{who} put them there")
    if not apart:
        return kept
    fewest = min(len(slot.cpus) for slot in slots)
    findings = (*right.findings, *_kept(wrong, right, who, facts))
    return replace(kept, threads=fewest, threads_why=f"the cores each task is bound to: {fewest}", findings=findings)


def question_cpu_bind(order: Order, facts: Facts, bound: Binding, node: int) -> List[Finding]:
    """Check that the job's own masks are near the GPUs of its ranks."""
    if not order.cpu_bind or order.cpu_bind == ("none",) or order.emulated:
        return []
    right = right_binding(order, facts, node)
    masks = {slot.local_rank: slot.cpus for slot in bound.slots if slot.cpus}
    if set(masks) != {slot.local_rank for slot in right.slots}:
        return []
    wrong = _wrong_masks(right, masks, facts)
    return _kept(wrong, right, "the job's own cpu-bind", facts)


def _wrong_masks(right: Binding, masks: Mapping[int, Sequence[int]], facts: Facts) -> List[str]:
    """Describe each local rank whose task is away from its GPU."""
    seen = [RankSeen(slot.local_rank, 0, tuple(masks[slot.local_rank]), slot.gpus) for slot in right.slots]
    return [
        _row_words(row, f"local rank {row.rank}")
        for row in rows(facts, right, right, seen)
        if row.verdict == WRONG and row.gpus and row.right and row.rank is not None
    ]


def _rebound(wrong: Sequence[str], right: Binding, facts: Facts) -> List[Finding]:
    if not wrong:
        return []
    every = len(right.slots)
    return [find("tasks-bound-again", wrong=len(wrong), all=every, evidence=wrong[:_SHOWN], host=facts.host)]


def _kept(wrong: Sequence[str], right: Binding, who: str, facts: Facts) -> List[Finding]:
    if not wrong:
        return []
    about = {"wrong": len(wrong), "all": len(right.slots), "masks": ",".join(mask(slot.cpus) for slot in right.slots)}
    return [find("cpu-bind-away-from-gpu", who=who, evidence=wrong[:_SHOWN], host=facts.host, **about)]
