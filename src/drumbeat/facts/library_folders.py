"""Where libraries may be: the loader's own folders, what Python's wheels bring, and where sites put the rest."""

from __future__ import annotations

import fnmatch
import os.path
from typing import List, Tuple

from drumbeat.facts.dynamic_loader import Loader
from drumbeat.facts.parse import natural

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
PACKAGES = ("lib/python3*/site-packages", "lib/python3*/dist-packages")


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
    patterns = [f"{prefix}/{packages}" for prefix in prefixes for packages in PACKAGES]
    return list(dict.fromkeys(folder for pattern in patterns for folder in glob(loader, pattern)))


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
