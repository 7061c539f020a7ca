"""Backends by name: the built-in ones, and those that installed packages add under the entry point `drumbeat.backends`.

    [project.entry-points."drumbeat.backends"]
    toy = "toy_backend:Toy"

Nothing is imported before it is asked for.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from contextlib import suppress
from typing import Any, Dict, Iterator, List, Mapping, Optional

from drumbeat.backends.contract import Backend, parse_handle
from drumbeat.base.problem import Problem
from drumbeat.machine.model import Identity

GROUP = "drumbeat.backends"
_BUILT_IN = {
    "local": "drumbeat.backends.local:Local",
    "slurm": "drumbeat.backends.slurm:Slurm",
    "kubernetes": "drumbeat.backends.kubernetes:Kubernetes",
    "runai": "drumbeat.backends.runai:RunAi",
    "ssh": "drumbeat.backends.ssh:Ssh",
}
FOR_HOSTS = "ssh"  # the backend for machines that are listed one by one
_HAS_LOGIN_NODES = ("slurm",)  # built-in backends only
_loaded: Dict[str, Backend] = {}


def names() -> List[str]:
    return sorted({*_BUILT_IN, *_installed()})


def get(name: str, where: str = "") -> Backend:
    """Return the backend of that name; `where` says where the name comes from, for the message about an unknown one."""
    if name not in _loaded:
        target = _BUILT_IN.get(name) or _installed().get(name)
        if target is None:
            raise Problem(
                f"{where + ': ' if where else ''}there is no backend {name!r}",
                f"known: {', '.join(names())}; an installed package may add one (CONTRIBUTING.md)",
            )
        module, _, attribute = target.partition(":")
        try:
            _loaded[name] = getattr(importlib.import_module(module), attribute)()
        except (ImportError, AttributeError) as error:
            raise Problem(f"the backend {name!r} cannot be loaded from {target}: {error}") from None
    return _loaded[name]


def of_handle(handle: str) -> Optional[Backend]:
    """Return the backend that a handle belongs to; None for text that is not a handle of a known backend."""
    parsed = parse_handle(handle)
    return get(parsed.backend) if parsed and _known(parsed.backend) else None


def at_login(environ: Mapping[str, str]) -> Optional[Backend]:
    """Return the backend whose login node this is."""
    return next((backend for backend in with_login_nodes() if backend.submits_here(environ)), None)


def with_login_nodes() -> Iterator[Backend]:
    for name in (*_HAS_LOGIN_NODES, *sorted(_installed())):
        yield get(name)


def of_job(identity: Identity) -> Optional[Backend]:
    """Return the backend whose job this process is in, also below mpirun."""
    return get(identity.batch) if _known(identity.batch) else None


def _known(name: str) -> bool:
    return bool(name) and (name in _BUILT_IN or name in _installed())


@functools.cache  # slow: looks through every installed package
def _installed() -> Dict[str, str]:
    archives = [path for path in sys.path if os.path.isfile(path) and not __file__.startswith(path)]
    if not archives and not any(GROUP.encode() in points for folder in sys.path for points in _entry_points(folder)):
        return {}  # the usual case; importlib.metadata would take 0.05 s to import
    from importlib import metadata

    found: Any = metadata.entry_points()
    if hasattr(found, "select"):
        points = found.select(group=GROUP)
    else:  # Python 3.9
        points = found.get(GROUP, ())
    return {point.name: point.value for point in points if point.name not in _BUILT_IN}


def _entry_points(folder: str) -> Iterator[bytes]:
    """Return the entry_points.txt of each package installed in that folder."""
    try:
        packages = [name for name in os.listdir(folder or ".") if name.endswith((".dist-info", ".egg-info"))]
    except OSError:
        return
    for name in packages:
        with suppress(OSError), open(os.path.join(folder, name, "entry_points.txt"), "rb") as file:
            yield file.read()
