"""Communicators that never completed: the ranks that started, and those that are missing."""

from __future__ import annotations

from typing import Dict, List, Set, Tuple

from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import Evidence, Finding
from drumbeat.logs.nccl.communicators import Communicators, Member, group
from drumbeat.logs.read.attempts import GoodEnds
from drumbeat.logs.read.launchers import ranks

find = Catalog("logs")
MAX_FINDINGS = 8


def incomplete(state: Communicators, good_ends: GoodEnds) -> Tuple[List[Finding], List[Finding]]:
    """Find communicators with START but no COMPLETE (NCCL 2.18 and newer): those that hang, and those where the log may just
    end.

    If one rank is complete, or most ranks wait, other ranks are missing. A single START is normal in any log that was cut
    there. So are a few, if as many processes as ranks have printed something, or those of all ranks of one host. If the work
    was finished in the end, COMPLETE lines are missing and not ranks.
    """
    spoke = sum(bool(process.speaks_of_networks or process.members) for process in state.processes.values())
    hanging: List[Finding] = []
    maybe: List[Finding] = []
    for members in group(list(state.processes.values())):
        waiting = [member for member in members if member.started and not member.completed]
        alone = max(member.nranks for member in members) <= 1  # nobody to wait for
        if not waiting or alone or len(hanging) + len(maybe) >= MAX_FINDINGS:
            continue
        through = any(member.completed for member in members)
        nranks, hosts = max(member.nranks for member in members), {member.process.host for member in members}
        most = len(waiting) > 1 and 2 * len(waiting) >= nranks
        of_one_process = len(members) > 1 and all(member.process is members[0].process for member in members)
        all_came = len({member.rank for member in members}) == nranks or _all_came(members)
        cut = len(hosts) == 1 if all_came else spoke >= nranks or of_one_process
        finding = _finding(members, waiting, set(state.test_ranks))
        done = all(good_ends.last(each.file or "") > (each.line or 0) for each in finding.evidence)
        if not done:
            (hanging if through or most and not cut else maybe).append(finding)
    return hanging, maybe


def _all_came(members: List[Member]) -> bool:
    """Return True if a rank knows the node count or is complete: it does only after hearing from every rank."""
    return any(member.nnodes or member.completed for member in members)


def _finding(members: List[Member], waiting: List[Member], started: Set[int]) -> Finding:
    nranks = max(member.nranks for member in members)
    seen = {member.rank for member in members} | started
    absent = [] if _all_came(members) else [rank for rank in range(min(nranks, 100_000)) if rank not in seen]
    evidence = tuple(member.started for member in waiting[:2] if member.started)
    if absent:
        return find("ranks-missing", count=nranks, absent=ranks(absent), hosts=_hosts(members), evidence=evidence)
    names = ranks([member.rank for member in waiting])
    host = waiting[0].process.host if len({member.process.host for member in waiting}) == 1 else None
    hosts = _hosts(waiting)
    return find("init-incomplete", count=nranks, names=names, hosts=hosts, evidence=evidence, host=host or None)


def _hosts(members: List[Member]) -> str:
    hosts = sorted({member.process.host for member in members if member.process.host})
    return ", ".join(hosts[:16]) + (f" and {len(hosts) - 16} more" if len(hosts) > 16 else "") or "unknown hosts"


def lone_worlds(state: Communicators) -> List[Finding]:
    """Find processes that are each in a world of their own: the launcher's ranks never reached the program."""
    worlds = [member for process in state.processes.values() for member in process.members]
    hosts = {member.process.host for member in worlds}
    if len(worlds) < 2 or len(state.processes) < 2 or any(member.nranks != 1 for member in worlds):
        return []
    evidence = tuple(member.completed or member.started for member in worlds[:2])
    shown = [item for item in evidence if isinstance(item, Evidence)]
    return [find("lone-worlds", count=len(worlds), hosts=len(hosts), evidence=shown)]


def different_networks(state: Communicators) -> List[Finding]:
    """Find hosts that chose different networks, such as Socket and IB: NCCL picks per node and does not negotiate."""
    for members in group(list(state.processes.values())):
        by_network: Dict[str, List[str]] = {}
        evidence: List[Evidence] = []
        for process in (member.process for member in members):
            if process.network:
                hosts = by_network.setdefault(process.network, [])
                if not hosts and process.network_evidence:
                    evidence.append(process.network_evidence)
                if process.host not in hosts:
                    hosts.append(process.host)
        if len(by_network) > 1:
            return [_different(by_network, evidence)]
    return []


def _different(by_network: Dict[str, List[str]], evidence: List[Evidence]) -> Finding:
    words = "; ".join(f"{name} on {', '.join(sorted(hosts)[:8])}" for name, hosts in sorted(by_network.items()))
    return find("networks-differ", words=words, evidence=evidence[:4])


# NCCL_* settings that differ between processes of one job.


# These may legitimately differ from host to host.
_PER_HOST = ("NCCL_DEBUG_FILE", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE", "NCCL_HOSTID", "NCCL_COMM_ID")


def differences(state: Communicators) -> List[Finding]:
    """Return one finding for each variable with more than one value."""
    values: Dict[str, Dict[str, List[str]]] = {}
    evidence: Dict[str, List[Evidence]] = {}
    for process in state.processes.values():
        version = state.versions.get((process.library, process.version))
        own = {"NCCL version": (process.version, version)} if version else {}
        for name, (value, where) in {**process.settings, **own}.items():
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
        harmless = "harmless" if name in _PER_HOST else ""
        found.append(find("settings-differ", harmless, name=name, words=words, evidence=evidence[name][:4]))
    return found


def _some(hosts: List[str]) -> str:
    return ", ".join(sorted(hosts)[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
