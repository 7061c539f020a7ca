"""docs/environment.md, from the tables that plans are made with."""

from __future__ import annotations

from typing import Dict, Iterable, List, Mapping, Tuple

from drumbeat.plan.argv import WHO
from drumbeat.plan.scene import FABRICS
from drumbeat.plan.variables import COMPUTED, DEAD, DEBUGGING, OLD, SETTINGS

_INTRO = """\
---
tags: [environment variable, environment variables]
---
<!-- Made by: python -m tools.reference. The words are in the tables of src/drumbeat/plan. -->
# Environment variables

Every variable that drumbeat can set for a rank: when, to what, and why. [Who wins](plan.md) says whose value is taken;
`drumbeat plan --explain` shows it for a job, with its source and what was left alone. A run keeps the same list in its folder.

# Identity of a rank

Set for every rank when the run starts; they belong to drumbeat.
"""
_TASKS = """
Those of JAX are left alone if you set JAX_COORDINATOR_ADDRESS, or a launcher starts the ranks.
Where one task of a scheduler or of mpirun starts several ranks, each gets that task's variables with its own numbers
([run.md](run.md)). Below torchrun and accelerate `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` keeps the store of one attempt from the
next.

# What fits the job and the node
"""

_JAX = "; unless you set JAX_COORDINATOR_ADDRESS, or a launcher starts the ranks"
_WORDS = {
    "fabric": "{}",
    "vendor": "{} GPUs",
    "arch": "{}",
    "nic-driver": "{} NICs",
    "rocm": "ROCm {}",
    "kernel": "kernel {}",
    "nccl": "NCCL {}",
    "rccl": "RCCL {}",
    "gpus-used": "{} GPUs per node",
    "net-plugin": "NCCL's network plug-in {}",
    "mpi": "started by {}",
    "library": "{} found",
    "visibility": "visibility: {}",
    "caches": "the site or job says where the project's storage is",
    "hang": "unless the job says checks: {{hang: off}}",
    "trace": "trace",
    "transport": "unless the job says checks: {{transport: off}}; also with trace",
}


def page() -> str:
    entries: Dict[str, List[Tuple[str, str, str]]] = {}
    together: Dict[str, List[Tuple[str, str, str]]] = {}  # settings that are the only one of their name, by condition
    for made in COMPUTED:
        row = (
            made.value,
            ", ".join(filter(None, [made.needs and _condition(made.needs), made.rest])) or "always",
            made.why,
        )
        entries.setdefault(made.name, []).append(row)
    for fixed in SETTINGS:
        row = (f"`{fixed.value}`", _condition(fixed.when), fixed.why)
        entries.setdefault(fixed.name, []).append(row)
    for name, rows in list(entries.items()):
        if len(rows) == 1 and sum(_condition(fixed.when) == rows[0][1] for fixed in SETTINGS) > 1:
            together.setdefault(rows[0][1], []).append((name, *rows[0][::2]))
            del entries[name]
    lines = [_INTRO, "| variable | what it is |", "|---|---|"]
    lines += [f"| `{name}` | {why.replace(_JAX, '')} |" for name, why in WHO.items()]
    lines.append(_TASKS)
    for name in sorted(entries):
        lines.append(f"## `{name}`\n")
        for value, when, why in entries[name]:
            lines.append(f"- {value} ({when})\n  {why[0].upper() + why[1:]}.")
        lines.append("")
    for when, settings in together.items():
        lines.append(f"## {when}\n")
        lines += [f"- `{name}={value.strip('`')}`: {why}" for name, value, why in sorted(settings)]
        lines.append("")
    lines += ["# Your variables that are checked\n"]
    lines += _grouped(
        (
            name,
            f" ({_condition(dead.when)})" if dead.when else "",
            dead.why + (f"; use `{dead.use}`" if dead.use else ""),
        )
        for name, dead in sorted(DEAD.items())
    )
    old = ", ".join(f"`{name}` (now `{OLD[name]}`)" for name in sorted(OLD))
    lines.append(f"- Old names that are still read: {old}")
    lines.append("\nLeft on after debugging:\n")
    off = {name: ", ".join(f"`{value}`" for value in entry.harmless if value) for name, entry in DEBUGGING.items()}
    lines += _grouped(
        (name, f" (not {off[name]})" if off[name] else "", entry.cost) for name, entry in sorted(DEBUGGING.items())
    )
    return "\n".join(lines) + "\n"


def _grouped(rows: Iterable[Tuple[str, str, str]]) -> List[str]:
    """Return one line for all variables of which the same is said."""
    found: Dict[Tuple[str, str], List[str]] = {}
    for name, condition, why in rows:
        found.setdefault((condition, why), []).append(f"`{name}`")
    return [f"- {', '.join(names)}{condition}: {why}" for (condition, why), names in found.items()]


def _condition(when: Mapping[str, str]) -> str:
    nodes = {"many": "several nodes", "one": "one node"}
    most = {"|".join(sorted({*FABRICS} - {each})): f"another network than {each}" for each in FABRICS}
    texts = [
        (key, most.get("|".join(sorted(value.split("|")))) or value.replace("|", " or ")) for key, value in when.items()
    ]
    parts = [nodes.get(text) or _WORDS[key].format(text) for key, text in texts]
    words = ", ".join(parts) or "always"
    return words.replace("amd", "AMD").replace("nvidia", "NVIDIA")
