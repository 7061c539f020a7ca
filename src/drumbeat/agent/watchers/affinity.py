"""Looking at the ranks once they are up: which cores they may use, what they see, what their environment says."""

from __future__ import annotations

import os
from typing import Any, Dict, Mapping, Optional, Tuple

from drumbeat.facts.parse import cpulist

_VISIBILITY = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def look_at_ranks(run_id: str, node: int) -> Dict[int, Dict[str, Any]]:
    """Rank -> what /proc says of its main process: the one with the lowest pid among those that carry its number.

    Read from outside, so it holds for any command and any launcher.
    """
    seen: Dict[int, Dict[str, Any]] = {}
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        environ = _environ(pid)
        if environ is None or environ.get("DRUMBEAT_RUN") != run_id or environ.get("NODE_RANK") != str(node):
            continue
        rank = environ.get("RANK", "")
        if rank.isdecimal() and int(rank) not in seen:
            visible = next((environ[name] for name in _VISIBILITY if name in environ), None)
            seen[int(rank)] = {"cpus": _cpus(pid), "visible": visible, "env": environ, "pid": pid}
    return seen


def _environ(pid: int) -> Optional[Mapping[str, str]]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            data = file.read(1 << 20)
    except OSError:
        return None
    pairs = (entry.decode("utf-8", "replace").partition("=") for entry in data.split(b"\0") if entry)
    return {name: value for name, _, value in pairs}


def _cpus(pid: int) -> Optional[Tuple[int, ...]]:
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            line = next(line for line in file if line.startswith("Cpus_allowed_list:"))
    except (OSError, StopIteration):
        return None
    return cpulist(line.split(":", 1)[1].strip())
