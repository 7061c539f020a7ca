"""Versions of what Python brings, read from the folders of its packages: nothing is imported."""

from __future__ import annotations

import os.path
import re
from typing import Dict

from drumbeat.base.regex import regex
from drumbeat.machine.dynamic_loader import Loader
from drumbeat.machine.host import Host
from drumbeat.machine.library_folders import package_folders, visible_folders

_NAMES = ("torch", "jax", "deepspeed", "horovod")
_DIST = regex(r"(?P<name>[A-Za-z0-9_.]+)-(?P<version>\d[^-]*)\.(?:dist|egg)-info")


def all_versions(host: Host, program: str = "", workdir: str = "/") -> Dict[str, object]:
    """Every package of the environment that `program` (the first word of a command) belongs to, by its name: what a run
    records once. Where it is in none, of the folders that `versions` reads."""
    loader = Loader(host, None)
    places = host.environ.get("PATH", "").split(":")[:64] if os.path.basename(program) == program else [""]
    paths = (os.path.normpath(os.path.join(workdir, place, program)) for place in places if program)
    found_at = next((path for path in paths if host.resolve(path)), "")
    prefix = os.path.dirname(os.path.dirname(found_at))
    folders = visible_folders(loader, [prefix]) if found_at else package_folders(loader)
    found: Dict[str, str] = {}
    for folder in folders:
        for name in sorted(host.list(folder)):
            matched = _DIST.fullmatch(name)
            if matched:
                found.setdefault(matched["name"].lower().replace("_", "-"), matched["version"])
    return {"folders": folders, "packages": dict(sorted(found.items()))}


def versions(host: Host) -> Dict[str, str]:
    """Of the active environment, else of the first Python on the path; the first of each name counts."""
    found: Dict[str, str] = {}
    for folder in package_folders(Loader(host, None)):
        for name in host.list(folder):
            matched = _DIST.fullmatch(name)
            if matched and matched["name"] in _NAMES:
                found.setdefault(matched["name"], matched["version"])
        text = host.read(f"{folder}/torch/version.py") or ""
        built = re.search(r"^(?:__version__).{0,20}?['\"]([^'\"\n]{1,60})['\"]", text, re.MULTILINE)
        if built:
            found["torch"] = built.group(1)  # with what it was built for: 2.9.0+cu128
        for key in ("cuda", "hip"):
            runtime = re.search(rf"^{key}\b[^=\n]{{0,40}}=\s*['\"]([^'\"\n]{{1,40}})['\"]", text, re.MULTILINE)
            if runtime:
                found.setdefault("torch-rocm" if key == "hip" else "torch-cuda", runtime.group(1))
        if "torch" in found:
            break
    return found
