"""Checks of an image before anything is queued: it exists, is an image, and fits the machines it will run on."""

from __future__ import annotations

import hashlib
import os
import re
from typing import Iterable, Optional

from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex
from drumbeat.containers import RUNTIMES
from drumbeat.machine import libraries
from drumbeat.machine.host import LiveHost

# Two digits in a SIF file's header that name its architecture.
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
    """Return true if apptainer or singularity could start it, by its first bytes. A file that we may not read passes."""
    if os.path.isdir(path):
        return any(os.path.lexists(os.path.join(path, part)) for part in ("bin", "usr", ".singularity.d"))
    head = _head(path, _EXT3_OFFSET + 2)
    if head is None:
        return True
    if _SIF_MAGIC in head[:64] or _SQUASHFS_MAGIC in head[:512]:  # old images begin with a line for their launcher
        return True
    return head[_EXT3_OFFSET:] == _EXT3_MAGIC


def image_arch(path: str) -> Optional[str]:
    """Return the architecture of a SIF file or an unpacked tree; None if it does not say."""
    if os.path.isdir(path):
        host = LiveHost()
        for program in ("bin/sh", "usr/bin/sh", "bin/busybox", "usr/bin/env"):
            arch = libraries.architecture(host, os.path.realpath(os.path.join(path, program)))
            if arch:
                return arch
        return None
    head = _head(path, 64) or b""
    at = head.find(_SIF_MAGIC)
    return _SIF_ARCH.get(head[at + 13 : at + 15]) if at >= 0 else None


def image_identity(path: str) -> str:
    """Identify an image file without reading gigabytes: by a SIF's own UUID, a squashfs's superblock, or the digest in a
    registry's name. Empty: not known."""
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


# An image recipe with the RDMA libraries that a site's NICs need, as a Dockerfile.


# Packages to build and check RDMA libraries on Ubuntu; kernel headers come from the host, not from an image.
_PACKAGES = (
    "autoconf", "ethtool", "gcc", "ibverbs-providers", "ibverbs-utils", "infiniband-diags", "iproute2", "libelf-dev",
    "libibmad5", "libibnetdisc5", "libibumad-dev", "libibumad3", "libibverbs-dev", "libibverbs1", "libnl-3-dev",
    "libnl-route-3-dev", "librdmacm-dev", "libtool", "make", "perftest", "rdma-core", "rdmacm-utils", "strace",
)  # fmt: skip
_SOURCE = regex(r"libbnxt_re-[0-9][0-9A-Za-z.]*\.tar\.gz")


def recipe(site: str, patterns: Iterable[str], runtime: str, base: str, source: Optional[str] = None) -> str:
    """Write an image's recipe. `patterns` and `runtime` are the host paths and the container runtime of the site's profile;
    `source` is the tar file of the host's libbnxt_re, from drivers_linux/bnxt_rocelib of Broadcom's package.

    Only Broadcom's library must be the host's own version; NVIDIA's and Pensando's work from the distribution's rdma-core.
    """
    broadcom = any("libbnxt_re" in pattern for pattern in patterns)
    if not broadcom and runtime not in ("docker", "podman"):
        raise Problem(
            f"no build steps are known for site {site}", "they are for sites that run docker or podman images"
        )
    if not re.fullmatch(r"[A-Za-z0-9][\w./:@-]{0,250}", base):
        raise Problem(f"--base {base!r} is not the name of an image")
    if not broadcom:
        if source:
            raise Problem(f"site {site} needs no library of its own", "leave --library out")
        head = [
            f"# An image for site {site}: {base} with rdma-core; its providers drive ConnectX (libmlx5) and Pollara (libionic).",
        ]
        steps = [
            "# without a provider libibverbs sees no device, and RCCL silently falls back to TCP",
            "RUN set -e; find /usr/lib -path '*libibverbs*' -name 'libmlx5*.so*' | grep -q . || \\",
            "    { echo 'no libmlx5 provider in this image' >&2; exit 1; }",
        ]
    elif not source or not _SOURCE.fullmatch(source):
        raise Problem(
            f"--library {source!r} is not libbnxt_re-A.B.C.D.tar.gz",
            "it is in drivers_linux/bnxt_rocelib of the Broadcom package that the hosts have installed",
        )
    else:
        folder = source[: -len(".tar.gz")]
        head = [
            f"# An image for site {site}: {base} with the hosts' own {folder}.",
            f"# Put {source} beside this file (from drivers_linux/bnxt_rocelib of the package on the hosts), then:",
        ]
        steps = [
            f"COPY {source} /tmp/",
            "# the distribution's own library goes out of the way, or libibverbs could load it instead",
            f"RUN set -e; cd /tmp; tar -xf {source}; cd {folder}; \\",
            "    sh autogen.sh; ./configure; make; \\",
            "    find /usr/lib64/ /usr/lib -name 'libbnxt_re-rdmav*.so' -exec mv {} {}.inbox \\; || true; \\",
            "    make install all; \\",
            "    echo /usr/local/lib > /etc/ld.so.conf.d/bnxt_re.conf; ldconfig; \\",
            "    cp -f bnxt_re.driver /etc/libibverbs.d/; \\",
            "    find /usr/local/lib -name 'libbnxt_re*.so' -exec sha256sum {} + | tee /opt/libbnxt_re.sha256; \\",
            f"    cd /; rm -rf /tmp/{folder} /tmp/{source}",
            "# drumbeat compares that checksum with the host's before ranks start",
        ]
    packages = [
        "#   docker build -t my-image .",
        f"FROM {base}",
        "RUN apt-get update && apt-get install -y --no-install-recommends \\",
        f"      {' '.join(_PACKAGES)} && \\",
        "    rm -rf /var/lib/apt/lists/*",
    ]
    return "\n".join([*head, *packages, *steps]) + "\n"
