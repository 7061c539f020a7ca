"""An image recipe with the RDMA libraries that a site's NICs need, as a Dockerfile."""

from __future__ import annotations

import re
from typing import Iterable, List, Optional

from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex

# What building and checking RDMA libraries takes on Ubuntu; kernel headers are the host's matter, not an image's.
_PACKAGES = (
    "autoconf", "ethtool", "gcc", "ibverbs-providers", "ibverbs-utils", "infiniband-diags", "iproute2", "libelf-dev",
    "libibmad5", "libibnetdisc5", "libibumad-dev", "libibumad3", "libibverbs-dev", "libibverbs1", "libnl-3-dev",
    "libnl-route-3-dev", "librdmacm-dev", "libtool", "make", "perftest", "rdma-core", "rdmacm-utils", "strace",
)  # fmt: skip
_SOURCE = regex(r"libbnxt_re-[0-9][0-9A-Za-z.]*\.tar\.gz")


def recipe(site: str, patterns: Iterable[str], runtime: str, base: str, source: Optional[str] = None) -> str:
    """`patterns` and `runtime` are the host paths and the container runtime of the site's profile; `source` is the tar file
    of the host's libbnxt_re, from drivers_linux/bnxt_rocelib of Broadcom's package.

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
        return "\n".join(_distribution_lines(site, base)) + "\n"
    if not source or not _SOURCE.fullmatch(source):
        raise Problem(
            f"--library {source!r} is not libbnxt_re-A.B.C.D.tar.gz",
            "it is in drivers_linux/bnxt_rocelib of the Broadcom package that the hosts have installed",
        )
    return "\n".join(_lines(site, base, source)) + "\n"


def _distribution_lines(site: str, base: str) -> List[str]:
    return [
        f"# An image for site {site}: {base} with rdma-core, whose providers drive ConnectX (libmlx5) and Pollara (libionic).",
        "#   docker build -t my-image .",
        f"FROM {base}",
        "RUN apt-get update && apt-get install -y --no-install-recommends \\",
        f"      {' '.join(_PACKAGES)} && \\",
        "    rm -rf /var/lib/apt/lists/*",
        "# without a provider libibverbs sees no device, and RCCL falls back to TCP without a word",
        "RUN set -e; find /usr/lib -path '*libibverbs*' -name 'libmlx5*.so*' | grep -q . || \\",
        "    { echo 'no libmlx5 provider in this image' >&2; exit 1; }",
    ]


def _lines(site: str, base: str, source: str) -> List[str]:
    folder = source[: -len(".tar.gz")]
    return [
        f"# An image for site {site}: {base} with the hosts' own {folder}.",
        f"# Put {source} beside this file (from drivers_linux/bnxt_rocelib of the package on the hosts), then:",
        "#   docker build -t my-image .",
        f"FROM {base}",
        "RUN apt-get update && apt-get install -y --no-install-recommends \\",
        f"      {' '.join(_PACKAGES)} && \\",
        "    rm -rf /var/lib/apt/lists/*",
        f"COPY {source} /tmp/",
        "# the distribution's own library goes out of the way, or libibverbs could load it instead",
        "RUN set -e; cd /tmp; tar -xf " + source + f"; cd {folder}; \\",
        "    sh autogen.sh; ./configure; make; \\",
        "    find /usr/lib64/ /usr/lib -name 'libbnxt_re-rdmav*.so' -exec mv {} {}.inbox \\; || true; \\",
        "    make install all; \\",
        "    echo /usr/local/lib > /etc/ld.so.conf.d/bnxt_re.conf; ldconfig; \\",
        "    cp -f bnxt_re.driver /etc/libibverbs.d/; \\",
        "    find /usr/local/lib -name 'libbnxt_re*.so' -exec sha256sum {} + | tee /opt/libbnxt_re.sha256; \\",
        f"    cd /; rm -rf /tmp/{folder} /tmp/{source}",
        "# drumbeat compares that checksum with the host's before ranks start",
    ]
