"""Versions of what Python brings, read from the folders of its packages: nothing is imported."""

from __future__ import annotations

import os.path
import re
from typing import Dict, List

from drumbeat.facts.dynamic_loader import Loader
from drumbeat.facts.host import Host
from drumbeat.facts.library_folders import PACKAGES, glob, package_folders

_NAMES = ("torch", "jax", "deepspeed", "horovod")
_SETTING = re.compile(r"^([\w-]+)\s*=\s*(.*?)\s*$", re.MULTILINE)  # of pyvenv.cfg
_DIST = re.compile(r"(?P<name>[A-Za-z0-9_.]+)-(?P<version>\d[^-]*)\.(?:dist|egg)-info")


def all_versions(host: Host, program: str = "", workdir: str = "/") -> Dict[str, object]:
    """Every package of the environment that `program` (the first word of a command) belongs to, by its name: what a run
    records once. Where it is in none, of the folders that `versions` reads."""
    loader = Loader(host, None)
    places = host.environ.get("PATH", "").split(":")[:64] if os.path.basename(program) == program else [""]
    paths = (os.path.normpath(os.path.join(workdir, place, program)) for place in places if program)
    found_at = next((path for path in paths if host.resolve(path)), "")
    prefix = os.path.dirname(os.path.dirname(found_at))
    folders = _visible(loader, prefix) if found_at else package_folders(loader)
    found: Dict[str, str] = {}
    for folder in folders:
        for name in sorted(host.list(folder)):
            matched = _DIST.fullmatch(name)
            if matched:
                found.setdefault(matched["name"].lower().replace("_", "-"), matched["version"])
    return {"folders": folders, "packages": dict(sorted(found.items()))}


def _visible(loader: Loader, prefix: str) -> List[str]:
    """The package folders of an environment, those that its .pth files add, and the system's where it may use them."""
    host = loader.host
    prefixes = [prefix]
    settings = dict(_SETTING.findall(host.read(f"{prefix}/pyvenv.cfg") or ""))
    if settings.get("include-system-site-packages", "").lower() == "true" and settings.get("home"):
        prefixes.append(os.path.dirname(settings["home"].rstrip("/")))
    patterns = [f"{each}/{packages}" for each in prefixes for packages in PACKAGES]
    found = [folder for pattern in patterns for folder in glob(loader, pattern) if host.list(folder)]
    for folder in tuple(found):
        for name in host.list(folder):
            lines = (host.read(f"{folder}/{name}") or "").splitlines() if name.endswith(".pth") else []
            added = (os.path.normpath(os.path.join(folder, line.strip())) for line in lines if _is_path(line))
            found += [each for each in added if each not in found and host.list(each)]
    return found


def _is_path(line: str) -> bool:
    """The other lines of a .pth file are comments, or code."""
    return bool(line.strip()) and not line.startswith(("#", "import ", "import\t"))


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
