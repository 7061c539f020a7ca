"""Single values out of schedulers' variables."""

from __future__ import annotations

import re
from typing import List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.ranges import HostlistError, expand
from drumbeat.machine.parse import integer

NODES_LIMIT = 1 << 16


def hosts_of(text: Optional[str], notes: List[str]) -> Tuple[str, ...]:
    """The names in a host list such as `n[1-3]`."""
    try:
        return tuple(expand(text)) if text else ()
    except HostlistError as error:
        notes.append(f"identity: {error}")
        return ()


def port(text: Optional[str]) -> Optional[int]:
    number = integer(text)
    return number if number is not None and 0 < number < 65536 else None


def gpus(environ: Mapping[str, str], names: Sequence[str]) -> Optional[int]:
    """Return the number of GPUs that the first usable of these variables gives, such as `4` or `a100:4`."""
    for name in names:
        match = re.fullmatch(r"(?:[A-Za-z][\w.-]*:)*([0-9]{1,4})", environ.get(name, ""))
        if match:
            return int(match.group(1))
    return None


def count(text: Optional[str]) -> int:
    """Parse how often something has happened: 0 if that is not given."""
    return int(text) if text and text.isdigit() and len(text) < 6 else 0


def index_of(name: str, hosts: Tuple[str, ...]) -> Optional[int]:
    """The position of a host in the list, by its short name, if it is listed once."""
    short = name.split(".")[0]
    positions = [position for position, host in enumerate(hosts) if host.split(".")[0] == short]
    return positions[0] if len(positions) == 1 else None
