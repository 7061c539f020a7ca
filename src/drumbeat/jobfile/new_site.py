"""A site as text: for a person to read, and as a new profile made from a machine's facts."""

from __future__ import annotations

import json
from typing import List, Mapping, Optional, Sequence, Union

from drumbeat.jobfile.site import Site, SitePath, SiteVariable
from drumbeat.machine.model import Facts, Pool
from drumbeat.plan.network import candidates, slingshot_interfaces


def site_lines(site: Site) -> List[str]:
    lines = [f"{site.name}: {site.summary}", f"jobs are started by {site.backend}"]
    if site.gpus:
        lines.append(f"{site.gpus} GPUs per node")
    if site.emulated:
        lines.append("nodes are emulated on one machine")
    if site.cpus:
        reserved = f"cores {site.cpus.reserved} are reserved" if site.cpus.reserved else "no core is reserved"
        lines += ["", reserved, _reason(site.cpus.why, site.cpus.source)]
    if site.storage:
        lines += ["", f"caches: {site.storage.local} on each node, {site.storage.cache or 'no project storage known'}"]
        lines.append(_reason(site.storage.why, site.storage.source))
    lines += _entries("variables", site.env) + _entries("submitted with", site.submit) + _entries("paths", site.paths)
    known = [*site.detect.cluster, *site.detect.hosts]
    lines += ["", f"known by: {', '.join(known)}" if known else "never detected: name it with --site"]
    return lines


def _entries(title: str, entries: Mapping[str, Union[SiteVariable, SitePath]]) -> List[str]:
    if not entries:
        return []
    lines = ["", f"{title}:"]
    for name, entry in entries.items():
        value = entry.pattern if isinstance(entry, SitePath) else entry.value
        lines += [f"  {name} = {value}", "  " + _reason(entry.why, entry.source)]
    return lines


def _reason(why: str, source: Optional[str]) -> str:
    return f"    {why}{f' ({source})' if source else ''}"


def new_site(facts: Facts, backend: str, pools: Sequence[Pool] = (), cluster: str = "") -> str:
    """Write a profile to start from. What differs between nodes is left to the node; what was seen is stated. `pools`: asked
    on a login node, whose own devices are not those of the nodes."""
    lines = [
        f"# Made on {_plain(facts.host)} by: drumbeat site new. Check each line, then save it as NAME.yaml in",
        "# ~/.config/drumbeat/sites; drumbeat site check NAME.yaml says whether it is valid.",
    ]
    lines += _of_pools(pools, backend) if pools else _of_node(facts, backend)
    cluster = cluster or facts.identity.cluster or ""
    lines.append(f"detect: {{{'cluster' if cluster else 'hosts'}: [{json.dumps(cluster or facts.host)}]}}")
    return "\n".join(lines) + "\n"


def _of_pools(pools: Sequence[Pool], backend: str) -> List[str]:
    """Describe the nodes that most jobs should get: those with GPUs, of these the largest group."""
    best = max(pools, key=lambda pool: (pool.gpus > 0, pool.nodes, pool.usual))
    named = f"partition {best.name}: {best.nodes} nodes with {best.gpus or 'no'} GPUs, {best.cores} cores"
    lines = [
        *(
            f"# {backend} has {_plain(f'{p.name}: {p.nodes} nodes, {p.cores} cores, {p.gpus} GPUs')}"
            for p in pools[:16]
        ),
        f"summary: {json.dumps(named)}",
        f"backend: {backend}",
        *([f"gpus: {best.gpus}  # as the scheduler counts them"] if best.gpus else []),
        *([f"cores: {best.cores}"] if best.cores else []),
        *([f"memory: {best.memory}M"] if best.memory else []),
        "# Interfaces and NICs are looked up on each node. Where run folders go, and what every job must say:",
        "# runs: $SCRATCH/drumbeat/runs",
        "# needs: [account, time]",
    ]
    if not best.usual and any(pool.name != best.name for pool in pools):
        why = "its nodes have the GPUs" if best.gpus else "jobs that name no partition get none"
        lines += ["submit:", "  partition:", f"    value: {json.dumps('--partition=' + best.name)}", f"    why: {why}"]
        lines.append("    source: sinfo, asked by drumbeat site new")
    return lines


def _of_node(facts: Facts, backend: str) -> List[str]:
    gpus = [gpu for gpu in facts.gpus if not gpu.integrated]
    names = sorted({gpu.name or f"unknown {gpu.vendor} GPU" for gpu in gpus})
    nics = [device.name for device in (facts.cxi or facts.rdma)]
    parts = [f"{len(gpus)} {' and '.join(names)} per node" if gpus else "no GPU seen"]
    parts.append(f"{len(nics)} NICs: {', '.join(nics)}" if nics else "no RDMA device seen")
    lines = [f"summary: {json.dumps('; '.join(parts))}", f"backend: {backend}"]
    if gpus:
        lines.append(f"gpus: {len(gpus)}")
    fast = slingshot_interfaces(facts)
    if fast:
        value, why = ",".join(one.name for one in fast), "the Slingshot interfaces that were up"
    elif len(candidates(facts)) == 1:
        value, why = "=" + candidates(facts)[0].name, "the only interface that was up with an address others can reach"
    else:
        seen = ", ".join(one.name for one in candidates(facts)) or "none"
        return [*lines, f"# Interfaces that were up: {_plain(seen)}. Each node chooses, by the nodes' subnets."]
    lines += ["env:", "  NCCL_SOCKET_IFNAME:", f"    value: {json.dumps(value)}", f"    why: {json.dumps(why)}"]
    return [*lines, f"    source: {json.dumps('seen on ' + facts.host)}"]


def _plain(text: str) -> str:
    """Remove everything that could end a comment line."""
    return "".join(character for character in text if character.isprintable())[:200]
