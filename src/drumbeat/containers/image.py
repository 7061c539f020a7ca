"""Is the image there, and is it for the machines it will run on? Asked at the desk, before anything is queued."""

from __future__ import annotations

import os
from typing import Optional

from drumbeat.facts import elf
from drumbeat.facts.host import LiveHost
from drumbeat.order import Order
from drumbeat.problem import Problem

# The two digits that a SIF file's header names its architecture by.
_SIF_ARCH = {b"01": "i386", b"02": "x86_64", b"03": "arm", b"04": "aarch64", b"05": "ppc64", b"06": "ppc64le"}
_SIF_MAGIC = b"SIF_MAGIC"
_FILE_RUNTIMES = ("apptainer", "singularity")


def check_image(order: Order) -> None:
    used = order.container
    if used is None:
        return
    path = used.image
    by_name = "://" in path or used.runtime not in _FILE_RUNTIMES
    if by_name and not path.startswith("/"):
        return  # a registry's name: only the node can tell
    path = os.path.join(order.workdir, path)
    if not os.path.exists(path):
        raise Problem(f"the image {path} does not exist", "build or pull it first; container: names it in the job file")
    found = image_arch(path)
    if order.arch and found and found != order.arch:
        raise Problem(
            f"the image {path} is for {found}, but the nodes of {order.site} are {order.arch}",
            f"pull it for them: {used.runtime} pull --arch {_OCI.get(order.arch, order.arch)} ...",
        )


_OCI = {"x86_64": "amd64", "aarch64": "arm64"}


def image_arch(path: str) -> Optional[str]:
    """Of a SIF file or an unpacked tree; None where it does not say."""
    if os.path.isdir(path):
        host = LiveHost()
        for program in ("bin/sh", "usr/bin/sh", "bin/busybox", "usr/bin/env"):
            found = elf.architecture(host, os.path.realpath(os.path.join(path, program)))
            if found:
                return found
        return None
    try:
        with open(path, "rb") as file:
            head = file.read(64)
    except OSError:
        return None
    at = head.find(_SIF_MAGIC)
    if at < 0:
        return None
    return _SIF_ARCH.get(head[at + 13 : at + 15])
