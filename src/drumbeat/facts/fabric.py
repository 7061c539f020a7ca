"""Libraries that carry collectives: NCCL or RCCL, their network plug-ins, libfabric, RDMA providers.

Each one is found as the loader would find it, and judged loadable or not without being loaded.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import os.path
import re
from typing import Dict, List, Optional, Sequence, Tuple

from drumbeat.facts.host import Host
from drumbeat.facts.loader import Loader
from drumbeat.facts.model import CxiDevice, Gpu, Library, RdmaDevice
from drumbeat.facts.parse import natural

# Where sites put them when they are not on the library path. Patterns: versions age.
_FOLDERS = (
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
# In a virtual environment the wheels bring their own.
_IN_ENVIRONMENTS = ("lib/python3*/site-packages/nvidia/nccl/lib", "lib/python3*/site-packages/torch/lib")
_PLUGINS = ("libnccl-net*.so*", "librccl-net*.so*", "librccl-anp*.so*")
_PROVIDERS = {
    "mlx5_core": "libmlx5*.so*",
    "bnxt_re": "libbnxt_re*.so*",
    "ionic_rdma": "libionic*.so*",
    "efa": "libefa*.so*",
    "irdma": "libirdma*.so*",
    "hfi1": "libhfi1verbs*.so*",
}
_PROVIDER_FOLDERS = ("libibverbs",)  # below a library folder, where rdma-core keeps them
_COMMENTS = {  # what stands before the version among a library's constants
    "libnccl.so": "NCCL version ",
    "librccl.so": "RCCL version ",
    "libnccl-net": "aws-ofi-nccl ",
    "librccl-net": "aws-ofi-rccl ",
}
_NOT_FOUND = "not on the library path, nor in the usual folders"
_VERSION = re.compile(r"\d+\.\d+(?:\.\d+)*")


def read(
    host: Host,
    arch: Optional[str],
    gpus: Sequence[Gpu] = (),
    rdma: Sequence[RdmaDevice] = (),
    cxi: Sequence[CxiDevice] = (),
) -> Tuple[Library, ...]:
    loader = Loader(host, arch)
    folders = search_folders(host, loader)
    found: List[Library] = []
    vendors = {gpu.vendor for gpu in gpus if not gpu.integrated}
    fast = bool(cxi) or any(device.driver == "efa" for device in rdma)
    for name, expected in (
        ("libnccl.so.2", False),  # torch's wheel brings its own: missing here is no fault
        ("librccl.so.1", False),
        ("libfabric.so.1", fast),
        ("libcxi.so.1", bool(cxi)),
        ("libibverbs.so.1", bool(rdma)),
        ("librdmacm.so.1", bool(rdma)),
    ):
        found += _named(loader, folders, name, expected)
    plugins = [library for pattern in _PLUGINS for library in _matching(loader, folders, pattern)]
    if fast and not plugins:
        plugins = [Library("librccl-net.so" if "amd" in vendors else "libnccl-net.so", why_not=_NOT_FOUND)]
    found += plugins
    providers = [name + "/" + below for name in folders for below in _PROVIDER_FOLDERS]
    for driver in sorted({device.driver for device in rdma if device.driver}):
        if driver in _PROVIDERS:
            matching = _matching(loader, (*providers, *folders), _PROVIDERS[driver])
            found += [dataclasses.replace(one, digest=host.digest(one.path or "")) for one in matching] or [
                Library(_PROVIDERS[driver].replace("*", ""), why_not=_NOT_FOUND)
            ]
    return tuple(found)


def versions(libraries: Sequence[Library]) -> Dict[str, str]:
    """For Facts.versions: the first of each, which is the one the loader takes."""
    found: Dict[str, str] = {}
    for start, name in (("libnccl.so", "nccl"), ("librccl.so", "rccl"), ("libfabric.so", "libfabric")):
        for library in libraries:
            if library.name.startswith(start) and library.version:
                found.setdefault(name, library.version)
    return found


def search_folders(host: Host, loader: Loader) -> Tuple[str, ...]:
    """The loader's folders in its order, then the usual ones."""
    patterns = list(_FOLDERS)
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if host.environ.get(name):
            patterns += [f"{host.environ[name]}/{inside}" for inside in _IN_ENVIRONMENTS]
    for name in ("ROCM_PATH", "CUDA_HOME", "EBROOTLIBFABRIC", "EBROOTAWSMINOFIMINNCCL", "EBROOTNCCL"):
        if host.environ.get(name):
            patterns.append(f"{host.environ[name]}/lib")
    folders = [*loader.given, *loader.standard]
    for pattern in patterns:
        folders += _glob(loader, pattern)
    return tuple(dict.fromkeys(folders))


def _glob(loader: Loader, pattern: str) -> List[str]:
    folders = ["/"]
    for part in pattern.strip("/").split("/"):
        if "*" in part:
            # The newest version first.
            folders = [
                os.path.join(folder, name)
                for folder in folders
                for name in sorted(fnmatch.filter(loader.names(folder), part), key=natural, reverse=True)[:8]
            ]
        else:
            folders = [os.path.join(folder, part) for folder in folders]
    return folders


def _named(loader: Loader, folders: Sequence[str], soname: str, expected: bool) -> List[Library]:
    path = loader.find(soname)
    for folder in folders:
        path = path or (f"{folder}/{soname}" if soname in loader.names(folder) else None)
    if path:
        return [_library(loader, soname, path)]
    return [Library(soname, why_not=_NOT_FOUND)] if expected else []


def _matching(loader: Loader, folders: Sequence[str], pattern: str) -> List[Library]:
    """Every file once, however many names and links lead to it: the loader's first stays."""
    found: Dict[str, Library] = {}
    for folder in folders:
        for name in sorted(fnmatch.filter(loader.names(folder), pattern), key=natural):
            path = f"{folder}/{name}"
            real = loader.host.resolve(path) or path
            if real not in found and ".so" in name and len(found) < 16:
                found[real] = _library(loader, name, path)
    return list(found.values())


def _library(loader: Loader, name: str, path: str) -> Library:
    loadable, why_not = loader.why_not(path)
    return Library(name, path, _version(loader, name, path), loadable, why_not)


def _version(loader: Loader, name: str, path: str) -> Optional[str]:
    """From the file's full name, else from its own texts, else from a folder that is named after the version."""
    real = loader.host.resolve(path) or path
    suffix = os.path.basename(real).partition(".so.")[2]
    own_text = _own_version(loader, name, path)
    if own_text:
        return own_text
    if suffix.count(".") >= 1 and _VERSION.fullmatch(suffix) and not name.startswith(("libibverbs", "librdmacm")):
        return suffix
    wheel = _wheel_version(loader, real)
    if wheel:
        return wheel
    for part in reversed(os.path.dirname(real).split("/")):
        found = re.fullmatch(r"v?(\d+\.\d+(?:\.\d+)*)(?:[-+].*)?", part)
        if found:
            return found.group(1)
    return None


def _own_version(loader: Loader, name: str, path: str) -> Optional[str]:
    for start, comment in _COMMENTS.items():
        about = loader.elf(path) if name.startswith(start) else None
        if about:
            version = loader.host.version_in(path, comment, *about.rodata)
            if version:
                return version
    return None


def _wheel_version(loader: Loader, real: str) -> Optional[str]:
    """`site-packages/nvidia_nccl_cu12-2.27.3.dist-info` stands beside `site-packages/nvidia`."""
    site = real.partition("/nvidia/nccl/")[0]
    if site == real:
        return None
    for name in loader.names(site):
        found = re.fullmatch(r"nvidia_nccl_cu\d+-(\d+(?:\.\d+)+)\.dist-info", name)
        if found:
            return found.group(1)
    return None
