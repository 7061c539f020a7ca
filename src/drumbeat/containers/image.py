"""Is the image there, is it one, and is it for the machines it will run on? Checked before anything is queued."""

from __future__ import annotations

import hashlib
import os
from typing import Optional

from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.containers.runtimes import RUNTIMES
from drumbeat.machine import elf
from drumbeat.machine.host import LiveHost

# The two digits that a SIF file's header names its architecture by.
_SIF_ARCH = {b"01": "i386", b"02": "x86_64", b"03": "arm", b"04": "aarch64", b"05": "ppc64", b"06": "ppc64le"}
_SIF_MAGIC = b"SIF_MAGIC"
_SQUASHFS_MAGIC = b"hsqs"
_EXT3_MAGIC, _EXT3_OFFSET = b"\x53\xef", 1080
_OCI = {"x86_64": "amd64", "aarch64": "arm64"}


def check_image(order: Order) -> None:
    used = order.container
    if used is None:
        return
    by_name = "://" in used.image or not RUNTIMES[used.runtime].files
    if by_name and not used.image.startswith("/"):
        return  # a registry's name: only the node can tell
    path = os.path.join(order.source_workdir, used.image)
    if not os.path.exists(path):
        raise Problem(f"the image {path} does not exist", "build or pull it first; container: names it in the job file")
    if RUNTIMES[used.runtime].files and not is_image(path):
        raise Problem(
            f"{path} is not an image: it is neither a SIF, squashfs or ext3 file nor an unpacked tree",
            f"{used.runtime} pull or {used.runtime} build makes one",
        )
    arch = image_arch(path)
    if order.arch and arch and arch != order.arch:
        raise Problem(
            f"the image {path} is for {arch}, but the nodes of {order.site} are {order.arch}",
            f"pull it for them: {used.runtime} pull --arch {_OCI.get(order.arch, order.arch)} ...",
        )


def is_image(path: str) -> bool:
    """Whether apptainer or singularity could start it: by its first bytes. A file that we may not read passes."""
    if os.path.isdir(path):
        return any(os.path.lexists(os.path.join(path, part)) for part in ("bin", "usr", ".singularity.d"))
    head = _head(path, _EXT3_OFFSET + 2)
    if head is None:
        return True
    if _SIF_MAGIC in head[:64] or _SQUASHFS_MAGIC in head[:512]:  # old images begin with a line for their launcher
        return True
    return head[_EXT3_OFFSET:] == _EXT3_MAGIC


def image_arch(path: str) -> Optional[str]:
    """The architecture of a SIF file or an unpacked tree; None where it does not say."""
    if os.path.isdir(path):
        host = LiveHost()
        for program in ("bin/sh", "usr/bin/sh", "bin/busybox", "usr/bin/env"):
            arch = elf.architecture(host, os.path.realpath(os.path.join(path, program)))
            if arch:
                return arch
        return None
    head = _head(path, 64) or b""
    at = head.find(_SIF_MAGIC)
    return _SIF_ARCH.get(head[at + 13 : at + 15]) if at >= 0 else None


def image_identity(path: str) -> str:
    """What tells an image file from any other without reading gigabytes: a SIF's own UUID, a squashfs's superblock, or the
    digest that stands in a registry's name. Empty: not known."""
    _, pinned, digest = path.rpartition("@sha256:")
    if pinned and len(digest) == 64:
        return f"sha256:{digest}"
    head = _head(path, 512) if os.path.isfile(path) else None
    if not head:
        return ""
    at = head.find(_SIF_MAGIC)
    if 0 <= at < 64:
        return f"sif:{head[at + 16 : at + 32].hex()}"
    at = head.find(_SQUASHFS_MAGIC)
    return f"squashfs:{hashlib.sha256(head[at : at + 96]).hexdigest()[:32]}" if at >= 0 else ""


def _head(path: str, size: int) -> Optional[bytes]:
    try:
        with open(path, "rb") as file:
            return file.read(size)
    except OSError:
        return None
