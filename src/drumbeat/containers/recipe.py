"""An image recipe for clusters whose RDMA library must be the host's own version: the build steps, as a Dockerfile."""

from __future__ import annotations

import re
from typing import Iterable, List

from drumbeat.problem import Problem

# What building and checking RDMA libraries takes on Ubuntu; kernel headers are the host's matter, not an image's.
_PACKAGES = (
    "autoconf", "ethtool", "gcc", "ibverbs-providers", "ibverbs-utils", "infiniband-diags", "iproute2", "libelf-dev",
    "libibmad5", "libibnetdisc5", "libibumad-dev", "libibumad3", "libibverbs-dev", "libibverbs1", "libnl-3-dev",
    "libnl-route-3-dev", "librdmacm-dev", "libtool", "make", "perftest", "rdma-core", "rdmacm-utils", "strace",
)  # fmt: skip
_SOURCE = re.compile(r"libbnxt_re-[0-9][0-9A-Za-z.]*\.tar\.gz")


def recipe(site: str, patterns: Iterable[str], base: str, source: str) -> str:
    """`patterns` are the host paths of the site's profile; `source` is the tar file of the host's version, from
    drivers_linux/bnxt_rocelib of Broadcom's package."""
    if not any("libbnxt_re" in pattern for pattern in patterns):
        raise Problem(f"no build steps are known for site {site}", "they are for sites with Broadcom's libbnxt_re")
    if not _SOURCE.fullmatch(source):
        raise Problem(
            f"--library {source!r} is not libbnxt_re-A.B.C.D.tar.gz",
            "it is in drivers_linux/bnxt_rocelib of the Broadcom package that the hosts have installed",
        )
    if not re.fullmatch(r"[A-Za-z0-9][\w./:@-]{0,250}", base):
        raise Problem(f"--base {base!r} is not the name of an image")
    return "\n".join(_lines(site, base, source)) + "\n"


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
