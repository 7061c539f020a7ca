"""A site as text: for a person to read, and as a new profile made from a machine's facts."""

from __future__ import annotations

import json
from typing import Any, List, Sequence, Tuple

from drumbeat.jobfile.fields import keys_of
from drumbeat.jobfile.site import Detect, Site
from drumbeat.machine.model import Facts, Pool
from drumbeat.plan.network import candidates, slingshot_interfaces

_UNSET: Tuple[Any, ...] = (None, "", (), {}, False, Detect())


def site_lines(site: Site) -> List[str]:
    """Return every key that the profile sets, as it is spelled there, each with its reason."""
    lines = [f"{site.name}: {site.summary}"]
    for name, (field, key) in keys_of(Site).items():
        value = getattr(site, field)
        if name == "summary" or value in _UNSET:
            continue
        if key.kind == "tables":
            lines += ["", f"{name}:"]
            for entry, table in value.items():
                lines += _table(f"  {entry}", table)
        else:
            lines += ["", *_table(name, value)] if key.kind == "table" else [f"{name}: {_words(value)}"]
    return lines if site.detect != Detect() else [*lines, "", "never detected: name it with --site"]


def _table(title: str, table: Any) -> List[str]:
    values = {name: getattr(table, field) for name, (field, _) in keys_of(type(table)).items()}
    why, source = values.pop("why", ""), values.pop("source", None)
    told = [(name, _words(value)) for name, value in values.items() if value not in _UNSET]
    alone = len(told) == 1 and told[0][0] in ("value", "pattern")
    shown = f" = {told[0][1]}" if alone else f": {', '.join(f'{name} {words}' for name, words in told)}"
    reason = f"{why} ({source})" if source else why
    return [title + shown] + ([f"      {reason}"] if reason else [])


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else "true" if value is True else str(value)


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
