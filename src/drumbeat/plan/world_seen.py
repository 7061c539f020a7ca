"""Judge the world that a run's processes form: compare their RANK, WORLD_SIZE and meeting point with the plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.ranges import named_ranks, ranges
from drumbeat.base.text import count
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import CERTAIN, LIKELY, UNKNOWN, WARNING, Evidence, Finding, Verdict
from drumbeat.inspector.record import ENOUGH, PLENTY, SHARED, Row

find = Catalog("plan")
AS_PLANNED, SEVERAL, REPEATED, OTHER_SIZE = "as planned", "separate worlds", "repeated ranks", "another size"
SILENT, COPIES = "no exchange", "separate copies"

_WITH_OURS = (
    "--nnodes=$NNODES --node_rank=$NODE_RANK --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT "
    "--nproc_per_node=$LOCAL_WORLD_SIZE"
)
_SHOWN = 8

_Process = Tuple[int, int]  # node and pid


@dataclass(frozen=True)
class Planned:
    world_size: int
    nodes: int
    each_rank: bool  # the command was started once for each rank


_PER_STEP = 2048  # bytes per step: more than ranks need to average a loss and other printed figures
_MANY = 20  # steps after which the bytes per step are judged
LITTLE = "bytes of the TCP connections between them, per step"  # seen, if it is too little to prove one training

# Steps since the first report of a step, whether all that were made are known, and the row at the time of that report.
Begun = Mapping[_Process, Tuple[int, bool, Row]]


def judge(rows: Sequence[Row], planned: Planned, final: bool, begun: Optional[Begun] = None) -> Optional[Verdict]:
    """Return a verdict; None while not all ranks can be seen. `final`: no more processes will appear, since training goes on.
    `begun`: the ranks when steps began. An error, which may end a run, requires ranks that were seen to meet; their
    environment alone gives at most a warning."""
    ranks = _ranks(rows, planned)
    worlds: Dict[Tuple[str, Optional[int]], List[Row]] = {}
    for row in ranks:
        worlds.setdefault(row.world, []).append(row)
    seen = (f"RANK, WORLD_SIZE and MASTER_ADDR:PORT of {count(len(ranks), 'process', 'processes')}",)
    for members in worlds.values():
        for known in ([row for row in members if row.proven], [row for row in members if final and row.complete]):
            repeated = [rank for rank, times in Counter(row.rank for row in known).items() if times > 1]
            if repeated:
                return _verdict(REPEATED, _repeated(known, repeated, planned), seen, known)
    whole = {world: rows for world, rows in worlds.items() if len(rows) == world[1] and all(r.complete for r in rows)}
    planned_in_part = any(
        size == planned.world_size and len(rows) < planned.world_size for (_, size), rows in worlds.items()
    )
    if len(whole) > 1 and not planned_in_part:
        return _verdict(SEVERAL, _several(worlds, planned), seen, [row for rows in whole.values() for row in rows])
    if len(worlds) == 1:
        ((_, size), members), total = next(iter(worlds.items())), planned.world_size
        everywhere = len({row.node for row in members}) == planned.nodes
        complete = all(row.complete for row in members)
        if size != total and complete and ((size == len(members) and everywhere) or final):
            return replace(_verdict(OTHER_SIZE, _other_size(size, planned), seen, members), count=size)
        if size == total and len(members) == total and (total == 1 or _together(members)):
            return _one_world(members, seen, begun or {})
    return _unnumbered(rows, ranks, planned, seen) if final else None


def _one_world(members: Sequence[Row], seen: Tuple[str, ...], begun: Begun) -> Verdict:
    """Judge a single world. Certain if all ranks have met and exchanged more data than figures for a log, in each step if
    steps are known: ranks that have only met, or average only their losses, may each train alone."""
    total, inner = len(members), members[0].inner if len(members) == 1 else 0
    # Connections other than those to the meeting point may be any program's.
    met = total == 1 or all(row.joined or row.alone is None for row in members)
    hidden = next((row.hidden for row in members if row.hidden), "")
    exchanged = _exchanged(members)
    sent = min(map(exchanged, members))
    since = [(row, *begun[_process(row)]) for row in members if _process(row) in begun]
    steps = min((steps for _, steps, _, _ in since), default=0) if len(since) == total else 0
    each = (
        min(max(0, exchanged(row) - exchanged(then)) // made for row, made, _, then in since)
        if steps >= _MANY
        else None
    )
    # Where steps are read late, bytes of later ones count as theirs: that can show that they are few, not that they are many.
    fresh = all(fresh for _, _, fresh, _ in since)
    little = not hidden and total > 1 and sent >= ENOUGH and each is not None and each < _PER_STEP
    proven = total == 1 or (
        not hidden and not little and (sent >= PLENTY or (fresh and each is not None and sent >= ENOUGH))
    )
    early = not (proven or little or hidden)
    of_them = f"(seen in {total} of {count(total, 'process', 'processes')})"
    summary = f"{count(total, 'rank')} {'in one world' if proven else 'connected'} {of_them}"
    if hidden == "MPI":
        summary = f"{count(total, 'rank')} of one world by their numbers {of_them}"
    if hidden:
        summary += f"; what they exchange is not visible here ({hidden})"
    if little:
        summary += f"; they exchange {each} bytes per step, so it is not proven that they average gradients"
    if early:
        summary += "; too little data between them to tell if they train together"
    if inner:
        summary += f"; {inner} processes below it are connected to each other, and may be ranks of their own"
    seen += (LITTLE,) if little else ("bytes of the TCP connections between them",) if proven and total > 1 else ()
    sure = CERTAIN if proven and met and not inner else LIKELY
    unseen: Tuple[str, ...] = (f"what they exchange: {hidden}",) if hidden else ()
    unseen = ("whether they exchange gradients",) if early and sent >= ENOUGH else unseen
    return Verdict("world", AS_PLANNED, sure, summary, seen=seen, unseen=unseen, count=total)


def _exchanged(rows: Sequence[Row]) -> Callable[[Row], int]:
    """Return a function that counts the bytes a rank exchanged with others: on its node, over a connection seen at both ends,
    or over the meeting point if no framework keeps its store there."""
    ends = {(row.node, end) for row in rows for end in row.ends}
    nodes = {row.node for row in rows}

    def exchanged(row: Row) -> int:
        others = nodes - {row.node}
        left = any((node, (there, here)) in ends for here, there in row.ends for node in others)
        return row.sent + (row.out if left else 0) + (0 if row.framework else row.met)

    return exchanged


def silent(rows: Sequence[Row], planned: Planned, seconds: float, steps: int) -> Optional[Finding]:
    """Report ranks of one world that have met but sent nothing since. One rank may send, to a server."""
    ranks = _ranks(rows, planned)
    if len(ranks) < 2 or len(ranks) != planned.world_size or not all(row.proven for row in ranks):
        return None
    if (
        any(row.hidden for row in ranks)
        or sum(row.has_sent for row in ranks) > 1
        or len({row.world for row in ranks}) > 1
    ):
        return None
    torch = any(row.framework == "torch" for row in ranks)
    return find(
        "ranks-exchange-nothing", "torch" if torch else "",
        ranks=len(ranks), seconds=seconds, steps=f" and {steps} reports of steps" if steps else "",
        evidence=[
            f"rank {row.rank}: process {row.pid} on node {row.node}: {row.sent + row.out} bytes, {row.met} more to meet"
            for row in ranks[:_SHOWN]
        ],
        confidence=LIKELY, seen=(f"bytes of the TCP connections of {count(len(ranks), 'process', 'processes')}",),
    )  # fmt: skip


def unmet(finding: Finding) -> Verdict:
    """Return the verdict for a finding of `silent` or `copies`."""
    if finding.code == "ranks-exchange-nothing":
        answer, words = SILENT, "no bytes pass between the ranks while they train"
    else:
        answer, words = COPIES, finding.title
    return Verdict("world", answer, LIKELY, words, (finding,), finding.seen)


def copies(rows: Sequence[Row], planned: Planned, training: bool = True) -> Optional[Finding]:
    """Report ranks that train without any connection to each other: several trainings, not one. `training`: steps were
    reported; before that the ranks may still connect."""
    ranks = _ranks(rows, planned)
    sizes = [len(group) for group in _groups(ranks)]
    groups = len(sizes)
    if len(ranks) < 2 or groups < 2 or len(set(sizes)) > 1 or any(row.joined or row.alone is None for row in ranks):
        return None
    if any(row.hidden == SHARED or row.hidden and groups < len(ranks) for row in ranks):
        return None  # they may be connected in ways not visible here
    smaller = (("--nodes 1", planned.nodes > 1), ("--ranks-per-node 1", planned.world_size > planned.nodes))
    alone = " ".join(flag for flag, differs in smaller if differs)
    loaded = sorted({row.framework for row in ranks if row.framework})
    own = made_groups(rows, planned)
    return find(
        "ranks-never-joined",
        "groups" if groups < len(ranks) else "" if training else "yet",
        ranks=len(ranks),
        groups=groups,
        join=_OWN_GROUPS if own else _join_with(loaded[0] if len(loaded) == 1 else "", planned),
        alone="" if own else alone,
        evidence=[
            f"rank {row.rank}: process {row.pid} on node {row.node} is connected to "
            + (f"{_with(row, ranks)} alone" if groups < len(ranks) else "no other rank")
            for row in ranks[:_SHOWN]
        ],
        confidence=LIKELY,
        seen=(f"the sockets of {count(len(ranks), 'process', 'processes')}",),
    )


_OWN_GROUPS = (
    "make one group of all, by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as drumbeat sets them: the program has ranks, "
    "sizes or addresses of its own; if they are meant to train apart: checks: {world: warn}"
)


def made_groups(rows: Sequence[Row], planned: Planned) -> bool:
    """Return true if ranks that are not all connected have formed groups of their own, with each other or each with itself."""
    ranks = _ranks(rows, planned)
    with_itself = all(any((there, here) in row.links for here, there in row.links) for row in ranks)
    return with_itself or len(_groups(ranks)) < len(ranks)


def _join_with(framework: str, planned: Planned) -> str:
    """Return advice on the call that joins the ranks into one world."""
    return {
        "torch": "call torch.distributed.init_process_group (drumbeat sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); "
        f"Lightning: Trainer(devices={max(1, planned.world_size // planned.nodes)}, num_nodes={planned.nodes})",
        "jax": "call jax.distributed.initialize() before anything else of JAX; Keras: keras.distribution.initialize()",
        "tensorflow": "train under tf.distribute.MultiWorkerMirroredStrategy; it reads the other ranks' addresses from "
        "TF_CONFIG",
        "paddle": "call paddle.distributed.init_parallel_env(); it reads the other ranks' addresses from "
        "PADDLE_TRAINER_ENDPOINTS",
    }.get(
        framework,
        "make one group of them at the start of the program, as its framework does it (torch.distributed.init_process_group, "
        "jax.distributed.initialize); drumbeat sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
    )


def _together(ranks: Sequence[Row]) -> bool:
    """Return true if connections make the ranks one world. For MPI, connections are not examined and its numbers count."""
    return all(row.joined or row.alone is None for row in ranks) or len(_groups(ranks)) == 1


def _groups(ranks: Sequence[Row]) -> List[Set[_Process]]:
    """Return the groups of ranks connected through their meeting point, or by a TCP connection seen at both ends."""
    ends = {link: _process(row) for row in ranks for link in row.links}
    groups: List[Set[_Process]] = []
    met = {_process(row) for row in ranks if row.joined}
    for row in ranks:
        own = {_process(row), *(ends[there, here] for here, there in row.links if (there, here) in ends)}
        own |= met if own & met else set()
        touched = [group for group in groups if group & own]
        groups = [group for group in groups if not group & own] + [own.union(*touched)]
    return groups


def _with(row: Row, ranks: Sequence[Row]) -> str:
    """Name the other ranks of this rank's group."""
    group = next(group for group in _groups(ranks) if _process(row) in group)
    return named_ranks(sorted(each.rank or 0 for each in ranks if _process(each) in group and each is not row), 8)


def _process(row: Row) -> _Process:
    return row.node, row.pid


def _ranks(rows: Sequence[Row], planned: Planned) -> List[Row]:
    """Return the processes that are ranks. A process that has started a world of its own may still be a planned rank if it is
    the only one missing: a rank may start a program that makes a small world. A process that only might be a rank by its
    number is dropped if another one certainly is."""
    known = {(row.rank, row.world) for row in rows if row.complete and not row.starts_others}
    numbered = [row for row in rows if row.rank is not None and (row.complete or (row.rank, row.world) not in known)]
    leaves = [row for row in numbered if not row.starts_others]
    main = [row for row in leaves if row.world_size == planned.world_size]
    if main:
        meeting = Counter(row.meeting for row in main).most_common(1)[0][0]
        all_of_it = [row for row in numbered if row.world == (meeting, planned.world_size)]
        if sorted(row.rank or 0 for row in all_of_it) == list(range(planned.world_size)):
            return all_of_it
        return leaves
    # Ranks that have met do the training, whatever each of them has started besides. A launcher meets elsewhere.
    connected = [row for row in numbered if row.world_size == planned.world_size and row.joined]
    one_world = len({row.world for row in connected}) == 1
    if one_world and sorted(row.rank or 0 for row in connected) == list(range(planned.world_size)):
        return connected
    return leaves


def _verdict(answer: str, finding: Finding, seen: Tuple[str, ...], rows: Sequence[Row]) -> Verdict:
    """Return a verdict; certain only if all these ranks were seen to meet."""
    if not all(row.proven for row in rows):
        finding = replace(finding, severity=WARNING, confidence=LIKELY)
    return Verdict("world", answer, finding.confidence, finding.title, (finding,), seen)


def _repeated(members: Sequence[Row], repeated: Sequence[Optional[int]], planned: Planned) -> Finding:
    rank = min(rank for rank in repeated if rank is not None)
    same = [row for row in members if row.rank == rank]
    places = ", ".join(f"process {row.pid} on node {row.node}" for row in same[:3])
    who = f"rank {rank} runs" if len(repeated) == 1 else f"{len(repeated)} ranks run"
    places = places if len(repeated) == 1 else f"rank {rank}: {places}"
    variant = "each" if planned.each_rank else ""
    return find("ranks-repeated", variant, who=who, places=places, ours=_WITH_OURS, evidence=_evidence(same))


def _several(worlds: Dict[Tuple[str, Optional[int]], List[Row]], planned: Planned) -> Finding:
    sizes = sorted({size or 0 for _, size in worlds})
    shown = sorted(worlds.items(), key=lambda item: (item[1][0].node, item[0][0]))
    size = count(sizes[0], "rank") if len(sizes) == 1 else ""
    where = "; ".join(f"node {ranges({row.node for row in rows})} meets at {key[0]}" for key, rows in shown[:3])
    where += "; ..." if len(shown) > 3 else ""
    return find(
        "separate-worlds", "each" if planned.each_rank else "", worlds=len(worlds), size=size, planned=planned.world_size,
        where=where, ours=_WITH_OURS, evidence=_evidence([rows[0] for _, rows in shown]),
    )  # fmt: skip


def _other_size(size: Optional[int], planned: Planned) -> Finding:
    each = max(1, (size or 0) // planned.nodes)
    return find("world-of-another-size", size=size or 0, planned=planned.world_size, each=each)


def ended_early(rows: Sequence[Row], planned: Planned, well: bool) -> str:
    """Describe what was seen of ranks that ended before all were seen connected. `well`: by themselves, with 0."""
    ranks = _ranks(rows, planned) or rows
    most = max((len(group) for group in _groups(ranks)), default=0)
    total = max(len(ranks), planned.world_size)
    if most < 2:
        none = f"none of {total} ranks was seen connected to another"
        return (
            f"{none}: they ended too soon, or are copies that each train alone" if well else f"{none} before they ended"
        )
    return f"the ranks ended before connections between all of them were seen ({most} of {total} were)"


def _unnumbered(rows: Sequence[Row], ranks: Sequence[Row], planned: Planned, seen: Tuple[str, ...]) -> Verdict:
    """Judge processes without a complete set of rank numbers: their connections show which belong together."""
    if ranks:
        words = f"{len(ranks)} of {planned.world_size} ranks were seen"
        if len(ranks) == planned.world_size:
            groups = len(_groups(ranks))
            words = f"{planned.world_size} ranks in {groups} groups that have no TCP connection to each other"
        return Verdict("world", UNKNOWN, UNKNOWN, words, seen=seen)
    connected = [row for row in rows if row.rank is None]
    groups_of = sorted((group for group in _groups(connected) if len(group) > 1), key=len, reverse=True)
    met = {_process(row) for row in connected if row.joined}
    if not groups_of and met:
        groups_of = [met]
    if not groups_of:
        words = "no process shows a RANK, or a TCP connection to another process of this run or to MASTER_ADDR:PORT"
        return Verdict("world", UNKNOWN, UNKNOWN, words, seen=("RANK and TCP connections of all processes",))
    world = groups_of[0]
    place = next((row.meeting for row in connected if _process(row) in world and row.joined), "")
    where, looked = place or "each other", (f"TCP connections {'to ' + place if place else 'of processes'}",)
    if len(groups_of) > 1:
        each = "; ".join(_where(group) for group in groups_of[:4])
        words = f"{len(groups_of)} groups of processes that have no TCP connection to each other: {each}"
        return Verdict("world", UNKNOWN, UNKNOWN, words, seen=looked)
    if len({node for node, _ in world}) < planned.nodes:
        words = f"connections were seen of {_where(world)} alone; this run has {planned.nodes} nodes"
        return Verdict("world", UNKNOWN, UNKNOWN, words, seen=looked)
    words = f"{count(len(world), 'process', 'processes')} of one world: connected to {where} (they number themselves)"
    return Verdict("world", AS_PLANNED, LIKELY, words, seen=looked, count=len(world))


def _where(group: Set[_Process]) -> str:
    nodes = {node for node, _ in group}
    place = f"node{'s' * (len(nodes) > 1)} {ranges(nodes)}"
    return f"{count(len(group), 'process', 'processes')} on {place}"


def _evidence(rows: Sequence[Row]) -> Tuple[Evidence, ...]:
    return tuple(
        Evidence(f"process {row.pid} on node {row.node}: RANK={row.rank} WORLD_SIZE={row.world_size} at {row.meeting}")
        for row in rows[:_SHOWN]
    )
