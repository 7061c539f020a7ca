"""CPUs: NUMA nodes, cores that share a level 3 cache, hardware threads, and which of them we may use."""

from __future__ import annotations

from typing import Callable, Dict, List, Optional, Set, Tuple

from drumbeat.machine.host import Host
from drumbeat.machine.model import Cpus
from drumbeat.machine.parse import cpulist, integer, line, natural

_CPU = "/sys/devices/system/cpu"
_NODE = "/sys/devices/system/node"
Group = Tuple[int, ...]


def read(host: Host) -> Cpus:
    online = cpulist(line(host, f"{_CPU}/online")) or _listed(host)
    allowed = host.affinity()
    l3 = _groups(online, lambda cpu: _l3(host, cpu))
    siblings = _groups(online, lambda cpu: _siblings(host, cpu))
    isolated = cpulist(line(host, f"{_CPU}/isolated")) or ()
    return Cpus(
        model=_model(host),
        online=online,
        allowed=allowed,
        numa=_numa(host),
        l3=l3,
        siblings=siblings,
        reserved=tuple(sorted(set(isolated) | set(held_back(l3, siblings, allowed)))),
    )


def held_back(l3: Tuple[Group, ...], siblings: Tuple[Group, ...], allowed: Group) -> Group:
    """Cores that a scheduler keeps for the system show as the same few places missing from every cache group (LUMI: the
    first core of each). Any other missing core only belongs to someone else."""
    mine = set(allowed)
    threads = {core[0]: core for core in siblings}
    cores = [[cpu for cpu in group if cpu in threads] for group in l3]
    missing = [tuple(place for place, cpu in enumerate(group) if mine.isdisjoint(threads[cpu])) for group in cores]
    if len(l3) < 2 or len(set(missing)) != 1 or not missing[0] or 2 * len(missing[0]) >= len(cores[0]):
        return ()
    return tuple(thread for group in cores for place in missing[0] for thread in threads[group[place]])


def _listed(host: Host) -> Group:
    """Where `online` cannot be read, the folders still say."""
    numbers = (integer(name[3:]) for name in host.list(_CPU) if name.startswith("cpu"))
    return tuple(sorted(number for number in numbers if number is not None and number >= 0))


def _numa(host: Host) -> Dict[str, Group]:
    nodes: Dict[str, Group] = {}
    for name in sorted(host.list(_NODE), key=natural):
        if name.startswith("node") and name[4:].isdecimal():
            text = host.read(f"{_NODE}/{name}/cpulist")
            cpus = cpulist(text)
            if cpus is not None:  # memory-only nodes (GH200's HBM) have an empty list: they are nodes all the same
                nodes[name[4:]] = cpus
    return nodes


def _l3(host: Host, cpu: int) -> Optional[Group]:
    base = f"{_CPU}/cpu{cpu}/cache"
    # index3 is the level 3 cache nearly everywhere; where it is not, the levels are asked for.
    for index in ("index3", *host.list(base)):
        if line(host, f"{base}/{index}/level") == "3":
            return cpulist(line(host, f"{base}/{index}/shared_cpu_list"))
    return None


def _siblings(host: Host, cpu: int) -> Optional[Group]:
    base = f"{_CPU}/cpu{cpu}/topology"
    return cpulist(line(host, f"{base}/thread_siblings_list") or line(host, f"{base}/core_cpus_list"))


def _groups(cpus: Group, group_of: Callable[[int], Optional[Group]]) -> Tuple[Group, ...]:
    """Each group once. A CPU that a group already names is not asked again: 256 CPUs share 32 caches."""
    seen: Set[int] = set()
    groups: List[Group] = []
    for cpu in cpus:
        if cpu not in seen:
            group = group_of(cpu)
            if group and cpu in group:
                groups.append(group)
                seen.update(group)
    return tuple(sorted(set(groups)))


def _model(host: Host) -> Optional[str]:
    # One CPU says it for all; the whole file takes the kernel 50 ms on a big node.
    text = (host.data("/proc/cpuinfo", 0, 8192) or b"").decode("utf-8", "replace")
    about: Dict[str, str] = {}
    for entry in text.splitlines():
        name, colon, value = entry.partition(":")
        if colon and value.strip():
            about.setdefault(name.strip(), value.strip())
    if "CPU part" in about:  # 64-bit ARM has no name here
        return f"ARM implementer {about.get('CPU implementer', 'unknown')} part {about['CPU part']}"
    return about.get("model name") or about.get("cpu")
