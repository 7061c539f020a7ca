"""Detect a container, its runtime, and the architecture of its image."""

from __future__ import annotations

import re
from typing import Optional, Tuple

from drumbeat.machine import libraries
from drumbeat.machine.host import Host
from drumbeat.machine.model import Container
from drumbeat.machine.parse import line

_INIT = ("systemd", "init", "runit", "openrc-init")
OCI = ("docker", "podman", "kubernetes")  # those that run the same images
_CGROUP_SIGNS = (
    ("kubepods", "kubernetes"),
    ("libpod", "podman"),
    ("containers/storage", "podman"),
    ("docker", "docker"),
    ("enroot", "enroot"),
)


def read(host: Host) -> Container:
    runtime, image = _runtime(host)
    if runtime is None:
        # A first process that is an init system is a whole machine's; anything else leaves it open.
        inside = False if line(host, "/proc/1/comm") in _INIT or _disk_is_root(host) else None
        return Container(inside)
    return Container(True, runtime, image, libraries.architecture(host, "/bin/sh"))


def _runtime(host: Host) -> Tuple[Optional[str], Optional[str]]:
    environ = host.environ
    for name in ("APPTAINER", "SINGULARITY"):
        if environ.get(f"{name}_CONTAINER"):
            return name.lower(), environ.get(f"{name}_CONTAINER")
    if host.resolve("/.singularity.d"):
        return "singularity", None
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes", None
    if _disk_is_root(host):
        return None, None  # a machine that was made from an image: its marks came along, a container they do not prove
    if host.resolve("/run/.containerenv"):
        found = re.search(r'^image="([^"\n]*)"', host.read("/run/.containerenv") or "", re.MULTILINE)
        return "podman", found.group(1) if found else None
    if host.resolve("/.dockerenv"):
        return "docker", None
    signs = (host.read("/proc/1/cgroup") or "") + _root_mount(host)
    for sign, runtime in _CGROUP_SIGNS:
        if sign in signs:
            return runtime, None
    return (environ["container"], None) if environ.get("container") else (None, None)


def _disk_is_root(host: Host) -> bool:
    """Return true if / is a disk of this machine. A container's is an overlay, a bind mount, or a loop device."""
    fields = _root_mount(host).split(" - ")
    source = fields[1].split()[1] if len(fields) == 2 and len(fields[1].split()) > 1 else ""
    whole = fields[0].split()[3:4] == ["/"]  # a bind mount shows the folder that it came from
    return (
        whole
        and re.fullmatch(r"/dev/(root|vd[a-z]+\d*|sd[a-z]+\d*|nvme\d+n\d+(p\d+)?|xvd[a-z]+\d*)", source) is not None
    )


def _root_mount(host: Host) -> str:
    for entry in (host.read("/proc/self/mountinfo") or "").splitlines():
        fields = entry.split()
        if len(fields) > 4 and fields[4] == "/":
            return entry
    return ""
