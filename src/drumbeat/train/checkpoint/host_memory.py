"""How much of this host's memory a program may still take."""

from __future__ import annotations

import os
from typing import Dict, Optional


def free_bytes(root: str = "/") -> Optional[int]:
    """What the kernel calls available, and no more than the control group of this process has left; None: unknown."""
    try:
        with open(os.path.join(root, "proc/meminfo"), encoding="ascii") as file:
            rows: Dict[str, int] = {line.split(":")[0]: int(line.split()[1]) << 10 for line in file if "kB" in line}
        free = rows["MemAvailable"]
    except (OSError, ValueError, KeyError, IndexError):
        return None
    try:
        with open(os.path.join(root, "sys/fs/cgroup/memory.max"), encoding="ascii") as file:
            most = int(file.read())  # "max": no limit
        with open(os.path.join(root, "sys/fs/cgroup/memory.current"), encoding="ascii") as file:
            free = min(free, max(0, most - int(file.read())))
    except (OSError, ValueError):
        pass
    return free
