"""Small parsers shared by several readers. Each accepts any input from a damaged machine and returns None for nonsense."""

from __future__ import annotations

import ipaddress
import re
from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple, Union

from drumbeat.base.ranges import HostlistError, expand
from drumbeat.base.regex import regex
from drumbeat.machine.model import Host

_CPU_LIMIT = 1 << 14
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_FIGURE = regex(r"\s*(\d{1,12}(?:\.\d{1,6})?)")
_UNIT = regex(r"[KMG]i?B")
_PCI = regex(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")


def natural(name: str) -> List[Tuple[int, int, str]]:
    """Sort key under which mlx5_2 comes before mlx5_10."""
    parts = filter(None, re.split(r"([0-9]+)", name))
    return [(0, int(part[:18]), "") if part.isdecimal() else (1, 0, part) for part in parts]


def line(host: Host, path: str) -> Optional[str]:
    """Return the first line of a small file, or None if it is missing or empty."""
    text = host.read(path)
    if text is None:
        return None
    first = text.strip().split("\n", 1)[0].strip().replace("\t", " ")
    return first if first and first.isprintable() else None


def integer(text: Optional[str], base: int = 10) -> Optional[int]:
    if text is None or len(text) > 40:
        return None
    try:
        return int(text.strip(), base)
    except ValueError:
        return None


def number(host: Host, path: str) -> Optional[int]:
    return integer(line(host, path))


def link_name(host: Host, path: str) -> Optional[str]:
    """Return the name of a symbolic link's target, such as a device's driver."""
    target = host.resolve(path)
    return target.rsplit("/", 1)[-1] if target else None


def figure(text: Optional[str]) -> Optional[float]:
    """Return the number at the start of `173.0W`, `55 °C`, `34 %`; `N/A`, `[Not Supported]` and the like are unknown."""
    found = _FIGURE.match(text or "")
    return float(found.group(1)) if found else None


def size_in_bytes(text: Optional[str], unit: str = "") -> Optional[int]:
    """Convert `1.5 GB` to bytes; `unit` applies if the text has none."""
    value, named = figure(text), _UNIT.search(text or "")
    scale = _UNITS.get(named.group() if named else unit)
    return None if value is None or scale is None else int(value * scale)


def numa_node(host: Host, path: str) -> Optional[int]:
    """Return a NUMA node; None for the -1 that sysfs shows if the firmware gives none."""
    node = number(host, path)
    return node if node is not None and node >= 0 else None


def cpulist(text: Optional[str]) -> Optional[Tuple[int, ...]]:
    """Parse `0-3,64-67` as the kernel writes it; an empty line means no CPU. None: not such a list."""
    if text is None:
        return None
    cpus: Set[int] = set()
    for part in text.strip().split(","):
        if not part:
            continue
        low, dash, high = part.partition("-")
        first, last = integer(low), integer(high if dash else low)
        if first is None or last is None or not 0 <= first <= last < _CPU_LIMIT:
            return None
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def pci_address(text: Optional[str]) -> Optional[str]:
    """Convert `00000009:01:00.0` (nvidia-smi) or `0009:01:00.0` to the form sysfs uses."""
    found = _PCI.search(text or "")
    if not found:
        return None
    domain, bus, device, function = found.groups()
    return f"{int(domain, 16):04x}:{bus.lower()}:{device.lower()}.{function}"


def bus_order(address: str) -> Tuple[int, ...]:
    """Sort key of PCI addresses, whose numbers are hexadecimal: 9d comes after 43."""
    found = _PCI.search(address)
    return tuple(int(part, 16) for part in found.groups()) if found else ()


def properties(text: Optional[str]) -> Dict[str, str]:
    """Parse `name value` lines, as KFD writes them."""
    pairs = [entry.split(None, 1) for entry in (text or "").splitlines()]
    return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}


def ip_text(address: Union[ipaddress.IPv4Address, ipaddress.IPv6Address]) -> str:
    """Format an address, with IPv4 inside IPv6 in dotted form on every Python."""
    mapped = getattr(address, "ipv4_mapped", None)
    return f"::ffff:{mapped}" if mapped else str(address)


# Single values from schedulers' variables.

NODES_LIMIT = 1 << 16


def hosts_of(text: Optional[str], notes: List[str]) -> Tuple[str, ...]:
    """Return the names in a host list such as `n[1-3]`."""
    try:
        return tuple(expand(text)) if text else ()
    except HostlistError as error:
        notes.append(f"identity: {error}")
        return ()


def port(text: Optional[str]) -> Optional[int]:
    number = integer(text)
    return number if number is not None and 0 < number < 65536 else None


def gpu_count(environ: Mapping[str, str], names: Sequence[str]) -> Optional[int]:
    """Return the number of GPUs from the first usable of these variables, such as `4` or `a100:4`."""
    found = (re.fullmatch(r"(?:[A-Za-z][\w.-]*:)*([0-9]{1,4})", environ.get(name, "")) for name in names)
    return next((int(match.group(1)) for match in found if match), None)


def times(text: Optional[str]) -> int:
    """Parse how often something has happened: 0 if missing."""
    return int(text) if text and text.isdigit() and len(text) < 6 else 0


def index_of(name: str, hosts: Tuple[str, ...]) -> Optional[int]:
    """Return the position of a host in the list by its short name, if listed exactly once."""
    short = name.split(".")[0]
    positions = [position for position, host in enumerate(hosts) if host.split(".")[0] == short]
    return positions[0] if len(positions) == 1 else None
