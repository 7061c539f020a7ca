"""Cores: the unit a rank is bound to, and how a set of them is divided among ranks."""

from __future__ import annotations

from typing import Dict, Iterable, List, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.machine.model import Cpus


@dataclass(frozen=True)
class Core:
    """A physical core: the hardware threads of it that this job may use, and where it sits."""

    cpus: Tuple[int, ...]
    numa: Optional[str]
    l3: Optional[int]


def usable_cores(cpus: Cpus, reserved: Iterable[int] = (), threads: Optional[int] = None) -> List[Core]:
    """The cores this process may use, less the reserved ones; `threads` hardware threads of each (none: all)."""
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
    """Equal shares, in order. No share crosses a last-level cache if that can be had."""
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
    """A share of the cores for each rank, given the NUMA node of its GPU; and whether every rank sits beside it.

    Within a NUMA node they are given out by `turns`, the GPUs' own order, which follows the board's.
    Where a NUMA node has fewer cores than ranks, or nothing is known, the cores are shared out in NUMA order instead.
    """
    pools: Dict[str, List[Core]] = {}
    for core in cores:
        pools.setdefault(core.numa or "", []).append(core)
    homes = _homes(numas, list(pools))
    if homes is not None and all(len(pools[home]) >= homes.count(home) for home in set(homes)):
        shares: List[List[Core]] = [[] for _ in numas]
        for home in set(homes):
            members = sorted((turns[rank], rank) for rank, where in enumerate(homes) if where == home)
            for (_, rank), share in zip(members, divide(pools[home], len(members))):
                shares[rank] = share
        return shares, all(numa is None or str(numa) == home or home == "" for numa, home in zip(numas, homes))
    by_numa = [core for name in sorted(pools, key=_number) for core in pools[name]]
    order = sorted(range(len(numas)), key=lambda rank: (_or_last(numas[rank]), turns[rank], rank))
    shares = [[] for _ in numas]
    for rank, share in zip(order, _chunks(by_numa, len(numas))):
        shares[rank] = share
    return shares, False


def _homes(numas: Sequence[Optional[int]], pools: List[str]) -> Optional[List[str]]:
    """The pool each rank belongs to; None when a rank's is not known or has no core for us."""
    if len(pools) == 1:
        return [pools[0]] * len(numas)
    if all(numa is None for numa in numas) and len(numas) % len(pools) == 0:  # no GPUs: spread evenly
        each = len(numas) // len(pools)
        return [pools[rank // each] for rank in range(len(numas))]
    homes = [str(numa) for numa in numas]
    return homes if set(homes) <= set(pools) else None


def _number(name: str) -> int:
    return int(name) if name.isdigit() else -1


def _or_last(numa: Optional[int]) -> int:
    return 1 << 30 if numa is None else numa
