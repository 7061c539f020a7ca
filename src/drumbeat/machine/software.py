"""Software of a node: libraries that carry collectives (NCCL or RCCL, their network plug-ins, libfabric, RDMA providers), Python
packages, and what a framework says about its own build.

Each library is found as the loader would find it, and judged loadable or not without being loaded.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import re
import time
from dataclasses import field
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.machine.libraries import Loader, package_folders, search_folders, visible_folders
from drumbeat.machine.model import CxiDevice, Gpu, Host, Library, RdmaDevice
from drumbeat.machine.parse import natural
from drumbeat.machine.vendors import vendor_of

_COLLECTIVES = ("libnccl.so*", "librccl.so*")
_PLUGINS = ("libnccl-net*.so*", "librccl-net*.so*", "librccl-anp*.so*")
_PROVIDERS = {
    "mlx5_core": "libmlx5*.so*", "bnxt_re": "libbnxt_re*.so*", "ionic_rdma": "libionic*.so*", "efa": "libefa*.so*",
    "irdma": "libirdma*.so*", "hfi1": "libhfi1verbs*.so*",
}  # fmt: skip
_PROVIDER_FOLDERS = ("libibverbs",)  # below a library folder, where rdma-core keeps them
_COMMENTS = {  # text before the version among a library's constants
    "libnccl.so": "NCCL version ",
    "librccl.so": "RCCL version ",
    "libnccl-net": "aws-ofi-nccl ",
    "librccl-net": "aws-ofi-rccl ",
}
_NOT_FOUND = "not on the library path, nor in the usual folders"


def read_libraries(
    host: Host,
    arch: Optional[str],
    gpus: Sequence[Gpu] = (),
    rdma: Sequence[RdmaDevice] = (),
    cxi: Sequence[CxiDevice] = (),
) -> Tuple[Library, ...]:
    loader = Loader(host, arch)
    folders = search_folders(loader)
    found = [library for pattern in _COLLECTIVES for library in _matching(loader, folders, pattern, True)]
    fast = bool(cxi) or any(device.driver == "efa" for device in rdma)
    for name, expected in (
        ("libfabric.so.1", fast),
        ("libcxi.so.1", bool(cxi)),
        ("libibverbs.so.1", bool(rdma)),
        ("librdmacm.so.1", bool(rdma)),
        *((("libucp.so.0", False),) if rdma else ()),  # UCX, by which MPI uses those devices
    ):
        found += _named(loader, folders, name, expected)
    plugins = [library for pattern in _PLUGINS for library in _matching(loader, folders, pattern)]
    if fast and not plugins:
        plugins = [Library(vendor_of(gpus).net_plugin, why_not=_NOT_FOUND)]
    found += plugins
    providers = [name + "/" + below for name in folders for below in _PROVIDER_FOLDERS]
    for driver in sorted({device.driver for device in rdma if device.driver}):
        if driver in _PROVIDERS:
            matching = _matching(loader, (*providers, *folders), _PROVIDERS[driver])
            missing = Library(_PROVIDERS[driver].replace("*", ""), why_not=_NOT_FOUND)
            found += [dataclasses.replace(one, digest=host.digest(one.path or "")) for one in matching] or [missing]
    return tuple(found)


def versions(libraries: Sequence[Library]) -> Dict[str, str]:
    """Return versions for Facts.versions: the first of each library, which a process would load."""
    starts = {"nccl": "libnccl.so", "rccl": "librccl.so", "libfabric": "libfabric.so"}
    known = [(library.name, library.version) for library in libraries if library.version]
    found = {name: next((own for file, own in known if file.startswith(start)), "") for name, start in starts.items()}
    return {name: version for name, version in found.items() if version}


def _named(loader: Loader, folders: Sequence[str], soname: str, expected: bool) -> List[Library]:
    elsewhere = (f"{folder}/{soname}" for folder in folders if soname in loader.names(folder))
    path = loader.find(soname) or next(elsewhere, None)
    if path:
        return [_library(loader, soname, path)]
    return [Library(soname, why_not=_NOT_FOUND)] if expected else []


def _matching(loader: Loader, folders: Sequence[str], pattern: str, by_soname: bool = False) -> List[Library]:
    """List every matching file once, however many names and links lead to it, under the first name that the loader would find."""
    found: Dict[str, Library] = {}
    for folder in folders:
        for name in sorted(fnmatch.filter(loader.names(folder), pattern), key=natural):
            path = f"{folder}/{name}"
            real = loader.host.resolve(path) or path
            if real not in found and len(found) < 16:
                about = loader.about(path) if by_soname else None
                found[real] = _library(loader, about.soname if about and about.soname else name, path)
    return list(found.values())


def _library(loader: Loader, name: str, path: str) -> Library:
    loadable, why_not = loader.why_not(path)
    return Library(name, path, _version(loader, name, path), loadable, why_not)


def _version(loader: Loader, name: str, path: str) -> Optional[str]:
    """Read a version from the library's own texts, else from its file or folder name."""
    real = loader.host.resolve(path) or path
    suffix = os.path.basename(real).partition(".so.")[2]
    if name.startswith("libnccl.so") and suffix.count(".") == 2:  # libnccl.so.2.28.3; others number their ABI there
        return suffix
    return (
        _own_version(loader, name, path)
        or _wheel_version(loader, real)
        or _pkgconfig_version(loader, name, real)
        or _folder_version(real)
    )


def _own_version(loader: Loader, name: str, path: str) -> Optional[str]:
    comment = next((comment for start, comment in _COMMENTS.items() if name.startswith(start)), None)
    about = loader.about(path) if comment else None
    versions = (loader.host.version_in(path, comment or "", *piece) for piece in (about.constants if about else ()))
    return next(filter(None, versions), None)


def _pkgconfig_version(loader: Loader, name: str, real: str) -> Optional[str]:
    text = loader.host.read(f"{os.path.dirname(real)}/pkgconfig/{name.partition('.so')[0]}.pc")
    found = re.search(r"^Version:\s*(\d+(?:\.\d+)+)", text or "", re.MULTILINE)
    return found.group(1) if found else None


def _folder_version(real: str) -> Optional[str]:
    """Read `1.22.0` from /opt/cray/libfabric/1.22.0/lib64."""
    parts = reversed(os.path.dirname(real).split("/"))
    found = (re.fullmatch(r"v?(\d+\.\d+(?:\.\d+)*)(?:[-+].*)?", part) for part in parts)
    return next((match.group(1) for match in found if match), None)


def _wheel_version(loader: Loader, real: str) -> Optional[str]:
    """Read a version from `site-packages/nvidia_nccl_cu12-2.27.3.dist-info`, next to `site-packages/nvidia`."""
    site, inside, _ = real.partition("/nvidia/nccl/")
    names = loader.names(site) if inside else ()
    found = (re.fullmatch(r"nvidia_nccl_cu\d+-(\d+(?:\.\d+)+)\.dist-info", name) for name in names)
    return next((match.group(1) for match in found if match), None)


# Versions of Python packages, read from the names of their folders: nothing is imported.


_NAMES = ("torch", "jax", "deepspeed", "horovod")
_DIST = regex(r"(?P<name>[A-Za-z0-9_.]+)-(?P<version>\d[^-]*)\.(?:dist|egg)-info")


def all_versions(host: Host, program: str = "", workdir: str = "/") -> Dict[str, object]:
    """List all packages by name, for a run's records: those of the environment that `program` (the first word of a command)
    belongs to. Outside any environment, list the folders that `package_versions` reads."""
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


def package_versions(host: Host) -> Dict[str, str]:
    """Return packages of the active environment, else of the first Python on the path; the first version found of each wins."""
    found: Dict[str, str] = {}
    for folder in package_folders(Loader(host, None)):
        for name in host.list(folder):
            matched = _DIST.fullmatch(name)
            if matched and matched["name"] in _NAMES:
                found.setdefault(matched["name"], matched["version"])
        text = host.read(f"{folder}/torch/version.py") or ""
        built = re.search(r"^(?:__version__).{0,20}?['\"]([^'\"\n]{1,60})['\"]", text, re.MULTILINE)
        if built:
            found["torch"] = built.group(1)  # with the CUDA or ROCm it was built for: 2.9.0+cu128
        for key in ("cuda", "hip"):
            runtime = re.search(rf"^{key}\b[^=\n]{{0,40}}=\s*['\"]([^'\"\n]{{1,40}})['\"]", text, re.MULTILINE)
            if runtime:
                found.setdefault("torch-rocm" if key == "hip" else "torch-cuda", runtime.group(1))
        if "torch" in found:
            break
    return found


# Ask a framework about its build: run its report tool and try to import its modules, each with a deadline.


_STALE = 600.0  # seconds after which an untouched lock has no owner
SECONDS = 120.0  # importing torch or asking a driver can take long on a cold file system

MODULES = {
    "deepspeed": ("torch", "deepspeed"),
    "horovod": ("torch", "horovod"),
    "jax": ("jax", "jaxlib"),
    "keras": ("keras",),
    "maxtext": ("jax", "jaxlib", "maxtext", "MaxText"),
    "megatron": ("torch", "megatron.core", "transformer_engine", "apex", "flash_attn"),
    "mpi": ("mpi4py",),
    "paddle": ("paddle",),
    "ray": ("ray",),
    "tensorflow": ("tensorflow",),
}
TOOLS: Dict[str, Tuple[Tuple[str, ...], ...]] = {
    "deepspeed": (("ds_report",),),
    "horovod": (("horovodrun", "--check-build"),),
    "mpi": (("ompi_info", "--parsable", "--all"), ("mpichversion",), ("ucx_info", "-v"), ("mpirun", "--version")),
}
_VARIABLES = ("CRAY_MPICH_VERSION", "CRAY_ACCEL_TARGET", "MPICH_GPU_SUPPORT_ENABLED", "ROCM_PATH", "CUDA_HOME")

# Runs in the user's interpreter. Each module is imported on its own, so that one failure does not hide the others.
_PROBE = """
import importlib, json, os, sys
found = {"python": sys.version.split()[0], "executable": sys.executable, "modules": {}}
for name in sys.argv[1].split(","):
    try:
        module = importlib.import_module(name)
        found["modules"][name] = {"version": str(getattr(module, "__version__", ""))}
    except BaseException as error:
        found["modules"][name] = {"error": (type(error).__name__ + ": " + str(error))[:400]}
try:
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = {"cuda": torch.version.cuda, "hip": torch.version.hip, "gpus": torch.cuda.device_count()}
    jax = sys.modules.get("jax")
    if jax is not None and hasattr(jax, "devices"):
        found["jax"] = [device.platform for device in jax.devices()]
    if "mpi4py" in sys.modules:
        import mpi4py
        mpi4py.rc.initialize = False
        from mpi4py import MPI
        found["mpi_library"] = MPI.Get_library_version().splitlines()[0].split(",")[0].strip("\\0 ")
except BaseException as error:
    found["error"] = (type(error).__name__ + ": " + str(error))[:400]
print("\\ndrumbeat:" + json.dumps(found), flush=True)
os._exit(0)
"""


FRAMEWORKS = tuple(MODULES)


@dataclass(frozen=True)
class FrameworkAnswers:
    """Answers about a framework's build. `tools`: output of each report tool; None if it failed or timed out; absent if not
    installed."""

    framework: str
    python: str
    probe: Mapping[str, Any] = field(default_factory=dict)  # empty: the interpreter did not answer
    tools: Mapping[str, Optional[str]] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    stale_locks: Tuple[str, ...] = ()  # left by extension builds that were killed
    gpus: Tuple[str, ...] = ()  # vendors, one per GPU of this node


def ask_framework(host: Host, framework: str, python: str, gpus: Tuple[str, ...] = ()) -> FrameworkAnswers:
    folders = [folder for folder in host.environ.get("PATH", "").split(":") if folder]
    there = [argv for argv in TOOLS.get(framework, ()) if any(host.resolve(f"{each}/{argv[0]}") for each in folders)]
    return FrameworkAnswers(
        framework,
        python,
        _probe(host.command([python, "-c", _PROBE, ",".join(MODULES[framework])], SECONDS)),
        {argv[0]: host.command(argv, SECONDS) for argv in there},
        {name: host.environ[name] for name in _VARIABLES if name in host.environ},
        _stale_locks(host) if framework == "deepspeed" else (),
        gpus,
    )


def _probe(text: Optional[str]) -> Mapping[str, Any]:
    """Read the probe's answer: the last line with our mark, because modules may print while they are imported."""
    lines = [line for line in (text or "").splitlines() if line.startswith("drumbeat:")]
    try:
        found = json.loads(lines[-1][len("drumbeat:") :]) if lines else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _stale_locks(host: Host) -> Tuple[str, ...]:
    """List lock files of torch's extension builds untouched for minutes: a process that waits for one waits for ever."""
    environ = host.environ
    root = environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(environ.get("HOME", "/"), ".cache", "torch_extensions")
    locks: List[str] = []
    for version in host.list(root):
        for name in host.list(os.path.join(root, version)):
            path = os.path.join(root, version, name, "lock")
            try:
                if time.time() - os.stat(path).st_mtime > _STALE:
                    locks.append(path)
            except OSError:
                continue
    return tuple(locks)
