"""NCCL_* settings that differ between processes of one job."""

from __future__ import annotations

from typing import Dict, List

from drumbeat.findings.model import INFO, WARNING, Evidence, Finding
from drumbeat.logs.nccl.communicators import Communicators

# These may differ from host to host with good reason.
_PER_HOST = ("NCCL_DEBUG_FILE", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE", "NCCL_HOSTID", "NCCL_COMM_ID")


def differences(state: Communicators) -> List[Finding]:
    """One finding for each variable with more than one value."""
    values: Dict[str, Dict[str, List[str]]] = {}
    evidence: Dict[str, List[Evidence]] = {}
    for process in state.processes.values():
        for name, (value, where) in process.settings.items():
            hosts = values.setdefault(name, {}).setdefault(value, [])
            if not hosts:
                evidence.setdefault(name, []).append(where)
            label = process.host or (where.file or "?")
            if label not in hosts:
                hosts.append(label)
    found = []
    for name, by_value in sorted(values.items()):
        if len(by_value) < 2:
            continue
        words = "; ".join(f"{value or '(empty)'} on {_some(hosts)}" for value, hosts in sorted(by_value.items())[:6])
        harmless = name in _PER_HOST
        found.append(
            Finding(
                "settings-differ",
                INFO if harmless else WARNING,
                f"{name} differs between processes: {words}",
                "normal where interfaces or devices have other names on other hosts"
                if harmless
                else "ranks with other settings can hang or exchange wrong sizes",
                "" if harmless else f"give every rank the same {name}",
                tuple(evidence[name][:4]),
            )
        )
    return found


def _some(hosts: List[str]) -> str:
    return ", ".join(sorted(hosts)[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
