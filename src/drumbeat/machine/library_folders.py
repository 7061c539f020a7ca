"""Where libraries may be: the loader's own folders, what Python's wheels bring, and where sites put the rest."""

from __future__ import annotations

import fnmatch
import os.path
import re
from typing import List, Sequence, Tuple

from drumbeat.base.regex import regex
from drumbeat.machine.dynamic_loader import Loader
from drumbeat.machine.parse import natural

# When they are not on the library path. Patterns: versions age.
_USUAL = (
    "/opt/rocm/lib",
    "/opt/cray/libfabric/*/lib64",
    "/opt/amazon/ofi-nccl/lib",
    "/opt/amazon/ofi-nccl/lib/*",
    "/opt/amazon/efa/lib",
    "/opt/aws-ofi-nccl/lib",
    "/opt/aws-ofi-rccl",
    "/opt/libfabric/lib",
    "/opt/nccl/lib",
    "/usr/local/lib",
    "/usr/local/nccl/lib",
)
_MODULES = ("ROCM_PATH", "CUDA_HOME", "EBROOTLIBFABRIC", "EBROOTAWSMINOFIMINNCCL", "EBROOTNCCL")
_IN_WHEELS = ("nvidia/nccl/lib", "torch/lib")
_PACKAGES = ("lib/python3*/site-packages", "lib/python3*/dist-packages")

_SETTING = regex(r"^([\w-]+)\s*=\s*(.*?)\s*$", re.MULTILINE)  # of pyvenv.cfg


def search_folders(loader: Loader) -> Tuple[str, ...]:
    """In the order in which torch's process would come to them: a wheel's run path stands before the system's."""
    environ = loader.host.environ
    modules = [f"{environ[name]}/lib" for name in _MODULES if environ.get(name)]
    cached = [os.path.dirname(path) for path in loader.cache.values()]
    folders = [*loader.given, *_wheels(loader), *cached, *loader.standard]
    for pattern in (*modules, *_USUAL):
        folders += glob(loader, pattern)
    return tuple(dict.fromkeys(folders))


def _wheels(loader: Loader) -> List[str]:
    patterns = [f"{folder}/{inside}" for folder in package_folders(loader) for inside in _IN_WHEELS]
    return [folder for pattern in patterns for folder in glob(loader, pattern) if loader.names(folder)]


def package_folders(loader: Loader) -> List[str]:
    """Where Python's packages are: of the environment that is active, else of the first Python on the path."""
    environ = loader.host.environ
    prefixes = [environ[name] for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if environ.get(name)]
    for folder in environ.get("PATH", "").split(":")[:64]:
        if folder.startswith("/") and loader.host.resolve(f"{folder}/python3"):
            prefixes += [os.path.dirname(folder.rstrip("/")), "/usr/local"]
            break
    return visible_folders(loader, prefixes)


def visible_folders(loader: Loader, prefixes: Sequence[str]) -> List[str]:
    """The package folders of these environments, the system's where they may use them, and those that .pth files add."""
    host, every = loader.host, []
    for prefix in prefixes:
        every.append(prefix)
        settings = dict(_SETTING.findall(host.read(f"{prefix}/pyvenv.cfg") or ""))
        if settings.get("include-system-site-packages", "").lower() == "true" and settings.get("home"):
            every.append(os.path.dirname(settings["home"].rstrip("/")))
    patterns = [f"{prefix}/{packages}" for prefix in dict.fromkeys(every) for packages in _PACKAGES]
    found = list(dict.fromkeys(folder for pattern in patterns for folder in glob(loader, pattern) if host.list(folder)))
    for folder in tuple(found):
        for name in host.list(folder):
            lines = (host.read(f"{folder}/{name}") or "").splitlines() if name.endswith(".pth") else []
            added = (os.path.normpath(os.path.join(folder, line.strip())) for line in lines if _is_path(line))
            found += [each for each in added if each not in found and host.list(each)]
    return found


def _is_path(line: str) -> bool:
    """The other lines of a .pth file are comments, or code."""
    return bool(line.strip()) and not line.startswith(("#", "import ", "import\t"))


def glob(loader: Loader, pattern: str) -> List[str]:
    """Folders that fit, the newest version first. They need not be there."""
    folders = ["/"]
    for part in pattern.strip("/").split("/"):
        if "*" in part:
            folders = [
                os.path.join(folder, name)
                for folder in folders
                for name in sorted(fnmatch.filter(loader.names(folder), part), key=natural, reverse=True)[:8]
            ]
        else:
            folders = [os.path.join(folder, part) for folder in folders]
    return folders
