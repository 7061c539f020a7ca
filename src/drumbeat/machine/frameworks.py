"""Ask a framework about its build: run its report tool and try to import its modules, each with a deadline."""

from __future__ import annotations

import json
import os
import time
from dataclasses import field
from typing import Any, Dict, List, Mapping, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.machine.model import Host

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


def ask(host: Host, framework: str, python: str, gpus: Tuple[str, ...] = ()) -> FrameworkAnswers:
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


def _stale_locks(host: Host, older_than: float = 600.0) -> Tuple[str, ...]:
    """List lock files of torch's extension builds untouched for minutes: a process that waits for one waits for ever."""
    environ = host.environ
    root = environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(environ.get("HOME", "/"), ".cache", "torch_extensions")
    locks: List[str] = []
    for version in host.list(root):
        for name in host.list(os.path.join(root, version)):
            path = os.path.join(root, version, name, "lock")
            try:
                if time.time() - os.stat(path).st_mtime > older_than:
                    locks.append(path)
            except OSError:
                continue
    return tuple(locks)
