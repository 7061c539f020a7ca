"""Assign each local rank its GPU, the cores beside it and its nearest NIC."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import field, replace
from typing import Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import EnvVar, Order
from drumbeat.base.ranges import ranges
from drumbeat.base.regex import regex
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import Finding
from drumbeat.machine.model import Cpus, CxiDevice, Facts, Gpu, Peers, RdmaDevice
from drumbeat.machine.parse import cpulist, natural
from drumbeat.machine.topology import distance, nearest
from drumbeat.machine.vendors import vendor_of
from drumbeat.plan.network import compute_nics

# Sets of CPUs as text: parse and format Slurm's `mask_cpu` form and core lists; check a user's own.


find = Catalog("plan")
MOST_CPUS = 8192  # the kernel's own bound; a longer text is not a mask
_LIST = regex(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")


def mask(cpus: Iterable[int]) -> str:
    """Return the mask of these CPUs: bit n is CPU n."""
    return hex(sum(1 << cpu for cpu in set(cpus)))


def parse_mask(text: str) -> Optional[Tuple[int, ...]]:
    """Parse a mask (0xfe) or a list (1-7,9); None if it is neither."""
    text = text.strip()
    if re.fullmatch(r"0[xX][0-9a-fA-F]{1,2048}", text):
        bits = int(text, 16)
        return tuple(cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1)
    if not _LIST.fullmatch(text):
        return None
    cpus = cpulist(text)
    return cpus if cpus and cpus[-1] < MOST_CPUS else None


def from_slurm(value: str) -> Tuple[str, ...]:
    """Return the masks or cores in SLURM_CPU_BIND ('quiet,mask_cpu:0xfe,0xfe00', 'map_cpu:49,57'), if any."""
    cores = re.search(r"map_cpu:(\d{1,4}(?:,\d{1,4})*)", value)
    if cores:
        return tuple(cores.group(1).split(","))
    found = re.search(r"mask_cpu:((?:0[xX])?[0-9a-fA-F]+(?:,(?:0[xX])?[0-9a-fA-F]+)*)", value)
    if not found:
        return ()
    return tuple(part if part[:2].lower() == "0x" else "0x" + part for part in found.group(1).split(","))


def bound_by_user(environment: Mapping[str, str]) -> bool:
    """Return true if the user told this job's launcher where to place its tasks."""
    return typed_by_user(environment.get("SLURM_CPU_BIND", ""))


def typed_by_user(value: str) -> bool:
    """Return true if SLURM_CPU_BIND holds masks or cores that a person wrote.

    Slurm also sets the variable for its own default, with masks of equal width, zero-padded, in capitals.
    """
    if "map_cpu:" in value:
        return True
    found = re.search(r"mask_cpu:([^\s]+)", value)
    if not found:
        return False
    entries = found.group(1).split(",")
    slurms_own = all(re.fullmatch(r"0x[0-9A-F]{8,}", entry) for entry in entries)
    return not slurms_own or len({len(entry) for entry in entries}) > 1


def check_masks(
    entries: Sequence[str], ranks: int, allowed: Iterable[int]
) -> Tuple[List[Tuple[int, ...]], List[Finding]]:
    """Parse a user's list, one entry per local rank, repeated if shorter; return the CPU sets and findings."""
    sets: List[Tuple[int, ...]] = []
    findings: List[Finding] = []
    for place, entry in enumerate(entries):
        cpus = parse_mask(entry)
        if not cpus:
            return [], [find("mask-unreadable", place=place, evidence=[entry])]
        sets.append(cpus)
    everything = set(allowed)
    chosen = [sets[rank % len(sets)] for rank in range(ranks)]
    for rank, cpus in enumerate(chosen):
        outside = set(cpus) - everything if everything else set()
        if outside:
            entry, may = entries[rank % len(entries)], ranges(everything)
            findings.append(
                find("mask-outside", outside=ranges(outside), local_rank=rank, allowed=may, evidence=[entry])
            )
        for before in range(rank):
            both = set(cpus) & set(chosen[before])
            if both:
                kind = "the same mask" if set(cpus) == set(chosen[before]) else f"CPUs {ranges(both)} in common"
                masks = f"{entries[before % len(entries)]} and {entries[rank % len(entries)]}"
                findings.append(find("mask-overlap", first=before, second=rank, kind=kind, evidence=[masks]))
                break
    return chosen, findings


# Cores: the unit that ranks are bound to, and how a set of them is divided among ranks.


@dataclass(frozen=True)
class Core:
    """A physical core: the hardware threads of it that this job may use, and its place."""

    cpus: Tuple[int, ...]
    numa: Optional[str]
    l3: Optional[int]


def usable_cores(cpus: Cpus, reserved: Iterable[int], threads: Optional[int]) -> List[Core]:
    """Return the cores this process may use without the reserved ones, with at most `threads` hardware threads each (None:
    all)."""
    allowed = set(cpus.allowed or cpus.online) - set(reserved) - set(cpus.reserved)
    numa_of = {cpu: node for node, members in cpus.numa.items() for cpu in members}
    l3_of = {cpu: index for index, group in enumerate(cpus.l3) for cpu in group}
    cores: List[Core] = []
    seen: set[int] = set()
    groups: Iterable[Sequence[int]] = list(cpus.siblings) + [(cpu,) for cpu in sorted(allowed)]
    for group in groups:
        mine = tuple(cpu for cpu in sorted(group) if cpu in allowed and cpu not in seen)
        if mine:
            seen.update(mine)
            cores.append(Core(mine[:threads], numa_of.get(mine[0]), l3_of.get(mine[0])))
    return sorted(cores, key=lambda core: core.cpus)


def divide(cores: Sequence[Core], shares: int) -> List[List[Core]]:
    """Divide cores into equal shares, in order. No share crosses a last-level cache if that can be avoided."""
    by_l3: Dict[Optional[int], List[Core]] = {}
    for core in cores:
        by_l3.setdefault(core.l3, []).append(core)
    groups = list(by_l3.values())
    if None not in by_l3 and len({len(group) for group in groups}) == 1:
        if len(groups) % shares == 0:
            each = len(groups) // shares
            return [sum(groups[i * each : (i + 1) * each], []) for i in range(shares)]
        if shares % len(groups) == 0 and len(groups[0]) >= shares // len(groups):
            inside = shares // len(groups)
            return [part for group in groups for part in _chunks(group, inside)]
    return _chunks(cores, shares)


def _chunks(cores: Sequence[Core], shares: int) -> List[List[Core]]:
    each = len(cores) // shares
    return [list(cores[i * each : (i + 1) * each]) for i in range(shares)]


def place(numas: Sequence[Optional[int]], turns: Sequence[int], cores: Sequence[Core]) -> Tuple[List[List[Core]], bool]:
    """Return a share of the cores for each rank, given its GPU's NUMA node, and true if every rank is on that node.

    Within a NUMA node, shares are assigned by `turns`, the GPUs' own order, which follows the board's. If some NUMA nodes have
    no or too few cores, their ranks get cores where most are left; if nothing is known, the cores are shared out in NUMA
    order.
    """
    pools: Dict[str, List[Core]] = {}
    for core in cores:
        pools.setdefault(core.numa or "", []).append(core)
    homes = _homes(numas, list(pools))
    shares: List[List[Core]] = [[] for _ in numas]
    if homes is not None and all(len(pools[home]) >= homes.count(home) for home in set(homes)):
        for home in set(homes):
            members = sorted((turns[rank], rank) for rank, where in enumerate(homes) if where == home)
            for (_, rank), share in zip(members, divide(pools[home], len(members))):
                shares[rank] = share
        return shares, all(numa is None or str(numa) == home or home == "" for numa, home in zip(numas, homes))
    order = sorted(range(len(numas)), key=lambda rank: (numas[rank] is None, numas[rank] or 0, turns[rank]))
    homed = _members(numas, order, {name: len(pool) for name, pool in pools.items()})
    by_numa = [core for name in sorted(pools, key=_number) for core in pools[name]]
    dealt = [(ranks, divide(pools[name], max(1, len(ranks)))) for name, ranks in homed.items()]
    for ranks, parts in dealt or [(list(order), _chunks(by_numa, len(numas)))]:
        for rank, share in zip(ranks, parts):
            shares[rank] = share
    return shares, False


def _homes(numas: Sequence[Optional[int]], pools: List[str]) -> Optional[List[str]]:
    """Return the pool of each rank; None if a rank's NUMA node is unknown or has no usable core."""
    if len(pools) == 1:
        return [pools[0]] * len(numas)
    if all(numa is None for numa in numas) and len(numas) % len(pools) == 0:  # no GPUs: spread evenly
        each = len(numas) // len(pools)
        return [pools[rank // each] for rank in range(len(numas))]
    homes = [str(numa) for numa in numas]
    return homes if set(homes) <= set(pools) else None


def _members(numas: Sequence[Optional[int]], order: Sequence[int], sizes: Dict[str, int]) -> Dict[str, List[int]]:
    """Return NUMA node -> its ranks: those whose GPU is there, unless they would get less than half of a fair share."""
    least = max(1, sum(sizes.values()) // len(numas) // 2)
    members: Dict[str, List[int]] = {name: [] for name in sorted(sizes, key=_number)}
    away: List[int] = []
    for rank in order:
        home = str(numas[rank])
        at_home = home in sizes and sizes[home] >= least * (len(members[home]) + 1)
        (members[home] if at_home else away).append(rank)
    if len(away) == len(order):
        return {}
    for rank in away:
        members[max(members, key=lambda name: sizes[name] / (len(members[name]) + 1))].append(rank)
    return members


def _number(name: str) -> int:
    return int(name) if name.isdigit() else -1


# Choose a node's GPUs for a job, and the variables that show them to its ranks in that order.


@dataclass(frozen=True)
class Chosen:
    gpus: Tuple[Gpu, ...]  # in the order torch counts them
    variables: Tuple[EnvVar, ...] = ()
    findings: Tuple[Finding, ...] = ()
    why: str = ""


def choose(order: Order, facts: Facts) -> Chosen:
    discrete = [gpu for gpu in facts.gpus if not gpu.integrated]
    if not discrete:
        return Chosen((), why="no GPU was found")
    vendor = vendor_of(discrete)
    filters = visibility_filters(order, facts)
    exported = list(filters)
    seen, findings = vendor.visible([gpu for gpu in facts.gpus if gpu.vendor == vendor.name], filters)
    usable = [gpu for gpu in seen if not gpu.integrated]
    shown = [f"{name}={filters[name]}" for name in exported]
    if exported and len(usable) < len(seen):
        hidden = ", ".join(f"{gpu.index} ({gpu.name or 'integrated'})" for gpu in seen if gpu.integrated)
        findings.append(find("integrated-gpu-visible", gpus=hidden, variable=exported[0], evidence=shown))
    wanted = order.gpus if order.gpus is not None and not order.emulated else len(usable)
    if wanted > len(usable):
        findings.append(
            find("fewer-gpus-than-asked", wanted=wanted, usable=len(usable), evidence=shown, host=facts.host)
        )
    if wanted >= len(usable):
        picked, why = usable, "all of them"
    elif exported:
        picked, why = usable[:wanted], f"the first {wanted} of {exported[0]}"
    else:
        picked, why = closest(usable, wanted)
    variables: Tuple[EnvVar, ...] = ()
    hides = len(usable) < len(seen)
    if not exported and picked and (hides or picked != seen[: len(picked)]):
        variables = vendor.show(picked, "hides the integrated GPU" if hides else why)
    return Chosen(tuple(picked), variables, tuple(findings), why)


def visibility_filters(order: Order, facts: Facts) -> Dict[str, str]:
    """Return the variables that hide GPUs from the ranks: the job's or site's value overrides an exported one."""
    settled = {**facts.environment, **{variable.name: variable.value for variable in order.env}}
    return {name: settled[name] for name in vendor_of(facts.gpus).visibility if name in settled}


def closest(gpus: Sequence[Gpu], wanted: int) -> Tuple[List[Gpu], str]:
    """Choose GPUs behind one switch, else on one NUMA node, else the first ones; among groups the smallest, then the lowest."""
    groups: Dict[Tuple[str, str], List[Gpu]] = {}
    for gpu in gpus:
        steps = (gpu.pci_path or "").strip("/").split("/")[:-1]
        for depth in range(3, len(steps) + 1):  # everything below host bridge and root port is a switch
            groups.setdefault(("one PCIe switch", "/".join(steps[:depth])), []).append(gpu)
        if gpu.module is not None:
            groups.setdefault(("one module", str(gpu.module)), []).append(gpu)
        if gpu.numa is not None and gpu.numa >= 0:
            groups.setdefault(("one NUMA node", str(gpu.numa)), []).append(gpu)
    fitting = [(kind, members) for (kind, _), members in groups.items() if len(members) >= wanted]
    if not fitting:
        return list(gpus[:wanted]), "the first ones: no switch or NUMA node holds so many"
    kind, members = min(fitting, key=lambda group: (len(group[1]), group[1][0].index))
    return members[:wanted], f"they share {kind}"


@dataclass(frozen=True)
class Slot:
    """The place of one local rank on its node."""

    local_rank: int
    gpu: Optional[int] = None  # in the vendor runtime's numbering; the first, if a rank drives several
    cpus: Tuple[int, ...] = ()  # empty: no affinity is set
    nic: Optional[str] = None
    numa: Optional[int] = None  # NUMA node of the GPU; without one, of the cores, if they share one
    gpus: Tuple[int, ...] = ()
    env: Tuple[EnvVar, ...] = ()  # variables of this rank alone
    why: str = ""

    @property
    def mask(self) -> str:
        return mask(self.cpus)

    @property
    def cores(self) -> str:
        return ranges(self.cpus)


@dataclass(frozen=True)
class Binding:
    slots: Tuple[Slot, ...]
    threads: int  # for OMP_NUM_THREADS: cores of the smallest slot
    threads_why: str
    variables: Tuple[EnvVar, ...] = ()  # node-wide: GPUs that are visible
    findings: Tuple[Finding, ...] = field(default_factory=tuple)
    bound_by: str = "drumbeat bound them"  # the source of the binding, in words

    @property
    def mask_cpu(self) -> str:
        """Return the masks for srun --cpu-bind; '' if no affinity is set."""
        return ",".join(slot.mask for slot in self.slots) if all(slot.cpus for slot in self.slots) else ""

    def devices(self, local_rank: int, emulated_before: int = 0) -> Tuple[int, ...]:
        """Return the GPUs of one rank, numbered as in a process that sees all ranks' GPUs, after `emulated_before` emulated
        nodes."""
        shown = list(dict.fromkeys(gpu for slot in self.slots for gpu in slot.gpus))
        return tuple(emulated_before * len(shown) + shown.index(gpu) for gpu in self.slots[local_rank].gpus)


def binding(order: Order, facts: Facts, node: int, peers: Optional[Peers] = None) -> Binding:
    chosen = choose(order, facts)
    if order.launcher == "once" and order.ranks_per_node == 1:
        return _whole_node(order, facts, chosen)
    ranks = ranks_here(order, chosen)
    # Emulated nodes are processes of one machine: its cores and GPUs are divided among all of them.
    first, total = (node * ranks, order.nodes * ranks) if order.emulated else (0, ranks)
    groups = _gpu_groups(order, chosen, total)
    cores = usable_cores(facts.cpus, order.reserved_cpus, order.threads_per_core)
    alone = ranks == 1 and not order.emulated and order.visibility == "all" and bool(chosen.gpus)
    cpus, threads, words, more = _cpus(order, facts, [chosen.gpus] if alone else groups, cores)
    findings = (*chosen.findings, *_about_gpus(order, facts, chosen, ranks, groups), *more)
    nics = _nics(facts, peers, groups)
    slots = []
    for local in range(ranks):
        gpus = groups[first + local]
        slots.append(
            Slot(
                local_rank=local,
                gpu=gpus[0].index if gpus else None,
                cpus=cpus[first + local],
                nic=nics[first + local],
                numa=gpus[0].numa if gpus else _one_numa(facts, cpus[first + local]),
                gpus=tuple(gpu.index for gpu in gpus),
                env=_own_variables(gpus, order, facts),
                why=words,
            )
        )
    return Binding(tuple(slots), threads, words, chosen.variables, findings, _bound_by(order))


def _own_variables(gpus: Sequence[Gpu], order: Order, facts: Facts) -> Tuple[EnvVar, ...]:
    if order.visibility != "own" or not gpus:
        return ()
    vendor = vendor_of(gpus)
    node = [gpu for gpu in facts.gpus if gpu.vendor == vendor.name]
    return vendor.show_own(gpus, node, visibility_filters(order, facts))


def _one_numa(facts: Facts, cpus: Sequence[int]) -> Optional[int]:
    nodes = [node for node, members in facts.cpus.numa.items() if set(cpus) & set(members)]
    return int(nodes[0]) if len(nodes) == 1 and set(cpus) <= set(facts.cpus.numa[nodes[0]]) else None


def _bound_by(order: Order) -> str:
    if order.cpu_bind == ("none",):
        return "the job turns binding off (cpu-bind: none)"
    return "the job's own cpu-bind put them there" if order.cpu_bind else "drumbeat bound them"


def right_binding(order: Order, facts: Facts, node: int, peers: Optional[Peers] = None) -> Binding:
    """Return the binding that follows from the facts alone, whatever the job or the scheduler requested."""
    if order.launcher == "once":
        order = replace(order, launcher="ranks", ranks_per_node=order.ranks_per_node if order.ranks_per_node > 1 else 0)
    return binding(replace(order, cpu_bind=()), facts, node, peers)


def _whole_node(order: Order, facts: Facts, chosen: Chosen) -> Binding:
    """Return the binding of a single process that drives all GPUs of the node: it may use all cores."""
    cores = usable_cores(facts.cpus, order.reserved_cpus, order.threads_per_core)
    threads = max(1, len(cores) // (order.nodes if order.emulated else 1))
    words = "one process has the whole node, so it is not bound"
    gpus = tuple(gpu.index for gpu in chosen.gpus)
    slot = Slot(0, gpus[0] if gpus else None, gpus=gpus, why=words)
    return Binding((slot,), threads, words, chosen.variables, chosen.findings)


def ranks_here(order: Order, chosen: Chosen) -> int:
    """Return the number of ranks of this node: as ordered, else one per GPU (or as the job's shape requires)."""
    if order.ranks_per_node:
        return order.ranks_per_node
    return max(1, len(chosen.gpus) * order.ranks_per_gpu // order.gpus_per_rank)


def _gpu_groups(order: Order, chosen: Chosen, total: int) -> List[Tuple[Gpu, ...]]:
    """Return the GPUs of each rank of the machine; empty for a rank without any."""
    if order.ranks_per_gpu > 1:
        each = order.ranks_per_gpu
        return [chosen.gpus[rank // each : rank // each + 1] for rank in range(total)]
    width = order.gpus_per_rank
    parts = [chosen.gpus[rank * width : (rank + 1) * width] for rank in range(total)]
    return [part if len(part) == width else () for part in parts]


def _about_gpus(
    order: Order, facts: Facts, chosen: Chosen, ranks: int, groups: Sequence[Tuple[Gpu, ...]]
) -> Iterator[Finding]:
    if order.ranks_per_gpu > 1:
        yield find("ranks-share-gpu", ranks=order.ranks_per_gpu)
    yield from ranks_without_gpu(
        ranks, len(chosen.gpus), order.ranks_per_gpu, order.gpus_per_rank,
        total=len(groups), severity="warning" if order.emulated else "error", host=facts.host,
    )  # fmt: skip
    if order.visibility == "own" and chosen.gpus and ranks > 1:
        yield find("visibility-own")


def ranks_without_gpu(
    ranks: int, gpus: int, ranks_per_gpu: int = 1, gpus_per_rank: int = 1, total: int = 0,
    severity: str = "error", host: str = "",
) -> List[Finding]:  # fmt: skip
    """Check that a node with GPUs has one for each of its ranks. `total`: ranks of all nodes emulated on it."""
    served = gpus * ranks_per_gpu if ranks_per_gpu > 1 else gpus // gpus_per_rank
    total = total or ranks
    if not gpus or total <= served:
        return []
    words = {"without": total - served, "groups": total, "ranks": ranks, "each": gpus_per_rank, "usable": gpus}
    return [find("more-ranks-than-gpus", severity=severity, host=host, **words)]


def requested_without_gpu(order: Order) -> List[Finding]:
    """Check the requested GPUs against the requested ranks, before any node is known."""
    gpus = order.resources.gpus or 0
    return ranks_without_gpu(order.ranks_per_node, gpus, order.ranks_per_gpu, order.gpus_per_rank)


def _cpus(
    order: Order, facts: Facts, groups: Sequence[Tuple[Gpu, ...]], cores: List[Core]
) -> Tuple[List[Tuple[int, ...]], int, str, List[Finding]]:
    """Return the CPUs of each rank of the machine, threads per rank, the reason in words, and findings."""
    total = len(groups)
    nothing: List[Tuple[int, ...]] = [()] * total
    fair = max(1, len(cores) // total)
    if order.cpu_bind == ("none",):
        return nothing, fair, "the job turns binding off; threads are the cores divided by the ranks", []
    if order.cpu_bind:
        # A list is for one node and reused on the next: emulated nodes then share their cores, unless it covers all ranks.
        width = total if len(order.cpu_bind) >= total else max(1, total // (order.nodes if order.emulated else 1))
        sets, findings = check_masks(order.cpu_bind, width, facts.cpus.allowed or facts.cpus.online)
        sets = sets * (total // width)
        threads = min((_count_cores(cpus, cores) for cpus in sets), default=fair)
        return sets or nothing, max(1, threads), "the job's own masks", findings
    if not cores:
        return nothing, 1, "the cores this job may use are not known, so no affinity is set and one thread is safe", []
    if len(cores) < total:
        words = f"{total} ranks share {len(cores)} core{'s' if len(cores) > 1 else ''}"
        return nothing, fair, words, [] if order.emulated else [_few(facts, words)]
    # A rank has one share beside each of its GPUs' NUMA nodes, and the cores of all its shares.
    homes = [
        tuple(dict.fromkeys(gpu.numa if (gpu.numa or 0) >= 0 else None for gpu in group)) or (None,) for group in groups
    ]
    if sum(map(len, homes)) > len(cores):
        homes = [home[:1] for home in homes]
    seats = [(rank, numa) for rank, home in enumerate(homes) for numa in home]
    numas = [numa for _, numa in seats]
    turns = [groups[rank][0].index if groups[rank] else rank for rank, _ in seats]
    parts, beside = place(numas, turns, cores)
    shares = [[core for (seat, _), part in zip(seats, parts) if seat == rank for core in part] for rank in range(total)]
    findings = _part_of_node(facts, groups, cores)
    sets = [tuple(sorted(cpu for core in share for cpu in core.cpus)) for share in shares]
    threads = min(len(share) for share in shares)
    if any(groups) and not beside:
        words = "an equal share of the cores, not all beside the GPU"
        return sets, threads, words, [*findings, _not_beside(facts, numas, cores)]
    if any(groups) and len({core.numa for core in cores}) > 1:
        return sets, threads, "the cores beside the rank's GPU", findings
    return sets, threads, "an equal share of the usable cores", findings


def _count_cores(cpus: Sequence[int], cores: Sequence[Core]) -> int:
    mine = set(cpus)
    return sum(1 for core in cores if mine & set(core.cpus))


def _few(facts: Facts, words: str) -> Finding:
    allowed = f"CPUs this job may use: {ranges(facts.cpus.allowed) or 'unknown'}"
    return find("ranks-share-cores", words=words, evidence=[allowed], host=facts.host)


def _part_of_node(facts: Facts, groups: Sequence[Tuple[Gpu, ...]], cores: Sequence[Core]) -> List[Finding]:
    """Warn if a task has all GPUs of the node, but less than half of its cores."""
    driven = {gpu.index for group in groups for gpu in group}
    everything = len(facts.cpus.siblings) or len(facts.cpus.online)
    if not driven or len(driven) < len([gpu for gpu in facts.gpus if not gpu.integrated]):
        return []
    if len(cores) * 2 >= everything:
        return []
    return [_few(facts, f"the job drives all GPUs of the node, but may use {len(cores)} of its {everything} cores")]


def _not_beside(facts: Facts, numas: Sequence[Optional[int]], cores: Sequence[Core]) -> Finding:
    have = Counter(core.numa or "unknown" for core in cores)
    unknown = any(numa is None for numa in numas)
    shown = [
        "cores by NUMA node: " + ", ".join(f"{node}: {count}" for node, count in sorted(have.items())),
        "GPUs' NUMA nodes: " + ", ".join("unknown" if numa is None else str(numa) for numa in numas),
    ]
    return find("cores-not-beside-gpu", "unknown" if unknown else "", evidence=shown, host=facts.host)


def _nics(facts: Facts, peers: Optional[Peers], groups: Sequence[Tuple[Gpu, ...]]) -> List[Optional[str]]:
    """Return the nearest NIC of each rank; GPUs with the same nearest NICs alternate. Unknown stays unknown."""
    devices: Sequence[Union[CxiDevice, RdmaDevice]] = facts.cxi or compute_nics(facts, peers).devices
    devices = sorted(devices, key=lambda device: natural(device.name))
    near = [_near(group[0], devices) if group else [] for group in groups]
    takes: Dict[Tuple[str, ...], List[int]] = {}
    for group, names in zip(groups, near):
        if names and group[0].index not in takes.setdefault(tuple(names), []):
            takes[tuple(names)].append(group[0].index)
    found: List[Optional[str]] = []
    for group, names in zip(groups, near):
        found.append(names[sorted(takes[tuple(names)]).index(group[0].index) % len(names)] if names else None)
    return found


def _near(gpu: Gpu, devices: Sequence[Union[CxiDevice, RdmaDevice]]) -> List[str]:
    """Return the names of the nearest NICs; a single NIC always counts; none if all are far or the distance is unknown."""
    found = nearest(gpu, devices)
    known = len(devices) == 1 or (found and distance(gpu, found[0]) not in (None, "SYS"))
    return [device.name for device in found] if known else []
