"""show_gids: which entry of each card's table is the RoCE v2 address that NCCL needs."""

from __future__ import annotations

import re
from typing import Dict, List, Optional

from drumbeat.findings.model import INFO, WARNING, Finding
from drumbeat.machine.dumps.content import Content

_ROW = re.compile(
    r"^\s*(?P<device>[\w-]+)\s+(?P<port>\d+)\s+(?P<index>\d+)\s+(?P<gid>[0-9a-f]{4}(?::[0-9a-f]{4}){7})"
    r"(?:\s+(?P<ip>\d{1,3}(?:\.\d{1,3}){3}))?\s+(?P<version>v[12])(?:[ \t]+(?P<netdev>\S+))?[ \t]*$",
    re.MULTILINE,
)


def read(text: str) -> Optional[Content]:
    rows = [match.groupdict() for match in _ROW.finditer(text)]
    if not rows:
        return _none() if re.search(r"\bn_gids_found=0\b", text) else None
    devices: Dict[str, List[Dict[str, Optional[str]]]] = {}
    for row in rows:
        devices.setdefault(str(row["device"]), []).append(row)
    facts, findings, indices = [], [], {}
    for device, entries in devices.items():
        if not any(entry["netdev"] for entry in entries):
            facts.append(f"{device}: InfiniBand (no interface; v1 here does not mean RoCE v1); no GID index is needed")
            continue
        usable = [entry for entry in entries if entry["version"] == "v2" and entry["ip"]]
        if usable:
            indices[device] = [int(str(entry["index"])) for entry in usable]
            words = ", ".join(f"{entry['index']} ({entry['ip']} on {entry['netdev']})" for entry in usable)
            facts.append(f"{device}: RoCE v2 with an IPv4 address at index {words}")
        else:
            facts.append(f"{device}: no RoCE v2 entry with an IPv4 address")
            findings.append(
                Finding(
                    "gid-no-address",
                    WARNING,
                    f"{device} has no RoCE v2 entry with an IPv4 address",
                    "its interface has no address in this namespace, so packets cannot be routed",
                    f"give {entries[0]['netdev'] or 'its interface'} an address, or leave {device} out of NCCL_IB_HCA",
                )
            )
    chosen = {tuple(found) for found in indices.values()}
    first = {found[0] for found in indices.values()}
    if len(first) > 1:
        words = ", ".join(f"{device}: {found[0]}" for device, found in sorted(indices.items()))
        findings.append(
            Finding(
                "gid-index-differs",
                WARNING,
                f"the cards need different GID indices ({words})",
                "one NCCL_IB_GID_INDEX cannot fit all of them",
                "unset NCCL_IB_GID_INDEX with NCCL 2.21 or newer, which finds the entry of each card by itself",
            )
        )
    elif len(first) == 1:
        findings.append(
            Finding(
                "gid-index",
                INFO,
                f"NCCL_IB_GID_INDEX={next(iter(first))} is right on this host"
                + (", if it must be set" if chosen else ""),
                "up to NCCL 2.20 the default is 0; newer ones find it",
                "check the other hosts too: the number may differ there",
            )
        )
    return Content("show_gids", tuple(facts), tuple(findings), {"roce_v2_ipv4_index": indices})


def _none() -> Content:
    """An empty table is an answer: typical of a pod whose network namespace has no RDMA address."""
    finding = Finding(
        "gid-none",
        WARNING,
        "no RDMA device has a GID here",
        "the container or pod was not given an RDMA device, or none of its interfaces has an address in this namespace",
        "give the pod an RDMA interface (a second network, host network), or expect NCCL to use sockets",
    )
    return Content("show_gids", ("no entry in any GID table",), (finding,), {})
