"""Cores: the unit a rank is bound to, and how a set of them is divided among ranks. Masks and lists in and out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional, Sequence, Tuple

from drumbeat.facts.model import Cpus


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


def mask(cpus: Iterable[int]) -> str:
    """Slurm's `mask_cpu` form: bit n is cpu n."""
    return hex(sum(1 << cpu for cpu in set(cpus)))


def ranges(cpus: Iterable[int]) -> str:
    """1-7,9: the list form that taskset and the kernel use."""
    parts: List[List[int]] = []
    for cpu in sorted(set(cpus)):
        if parts and cpu == parts[-1][1] + 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)
