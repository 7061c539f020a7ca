"""Which instance of a divided NVIDIA GPU (MIG) a process uses: by the capability files it has open, else by its variables."""

from __future__ import annotations

from typing import Dict, Mapping, Tuple

from drumbeat.base.processes import open_files
from drumbeat.base.regex import regex

_MINORS = "/proc/driver/nvidia-caps/mig-minors"  # lines such as `gpu0/gi3/ci0/access 31`
_FOLDER = "/dev/nvidia-caps/nvidia-cap"
_LINE = regex(r"gpu(\d+)/(gi\d+)(?:/(ci\d+))?/access (\d+)")


def mig_instances(pid: int, environ: Mapping[str, str], proc: str = "/proc", minors: str = _MINORS) -> Tuple[str, ...]:
    """Names such as `gi3/ci0`, or `MIG-3f2a...` as the variable has it; empty where nothing shows one."""
    known = _known(minors)
    try:
        caps = [target[len(_FOLDER) :] for target in open_files(pid, proc) if target.startswith(_FOLDER)]
    except OSError:
        caps = []
    opened = [known[cap] for cap in caps if cap in known]
    compute = {f"{instance}/{part}" for instance, part in opened if part}
    if compute:
        return tuple(sorted(compute))
    if opened:
        return tuple(sorted({instance for instance, _ in opened}))
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        entries = environ.get(name, "").split(",")
        if entries[0].startswith("MIG-"):  # a process uses the first one that it is shown, and no other
            return (entries[0],)
    return ()


def _known(path: str) -> Dict[str, Tuple[str, str]]:
    """Number of a capability file -> GPU instance and compute instance."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            found = [_LINE.match(line) for line in file]
    except OSError:
        return {}
    return {match[4]: (match[2], match[3] or "") for match in found if match}
