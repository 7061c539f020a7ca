"""Which package brings a library, by distribution, as data."""

from __future__ import annotations

from typing import Dict, Optional, Tuple

# library -> (Debian and Ubuntu, RHEL and its kin, SUSE)
PACKAGES: Dict[str, Tuple[str, str, str]] = {
    "libibverbs.so": ("libibverbs1", "libibverbs", "libibverbs1"),
    "librdmacm.so": ("librdmacm1", "librdmacm", "librdmacm1"),
    "libmlx5": ("ibverbs-providers", "libibverbs", "libmlx5-1"),
    "libbnxt_re": ("Broadcom's libbnxt_re, the host's exact version", "Broadcom's libbnxt_re, the host's exact version",
                   "Broadcom's libbnxt_re, the host's exact version"),
    "libionic": ("AMD's Pensando ionic RDMA library", "AMD's Pensando ionic RDMA library",
                 "AMD's Pensando ionic RDMA library"),
    "libefa": ("ibverbs-providers", "libibverbs", "libefa1"),
    "libirdma": ("ibverbs-providers", "libibverbs", "rdma-core"),
    "libhfi1verbs": ("ibverbs-providers", "libibverbs", "rdma-core"),
}  # fmt: skip


def package_of(library: str, os_name: Optional[str]) -> str:
    """The package of this distribution; all of them where it is not known."""
    names = PACKAGES[library]
    text = (os_name or "").lower()
    for place, marks in enumerate(
        (("ubuntu", "debian"), ("red hat", "rocky", "alma", "centos", "fedora"), ("suse", "sles"))
    ):
        if any(mark in text for mark in marks):
            return names[place]
    return " or ".join(dict.fromkeys(names))
