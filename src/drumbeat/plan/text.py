"""A plan as text for a person: a table of settings, the places of the ranks, what is left alone, what is wrong."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

from drumbeat.facts.model import Facts
from drumbeat.finding import Finding
from drumbeat.order import EnvVar, Order
from drumbeat.plan.environment import EXPORTED
from drumbeat.plan.known_variables import steers
from drumbeat.plan.node_plan import Difference, NodePlan
from drumbeat.plan.variables import COMPUTED


def plan_lines(plan: NodePlan, explain: bool = False, width: Optional[int] = None) -> List[str]:
    """`width` cuts the reasons to the terminal; with `explain` they are given in full, and what is not set too."""
    lines = [f"node {plan.node} ({plan.host}): {plan.fabric}, {plan.fabric_why}", ""]
    lines += variable_lines(plan.variables, explain, width)
    lines += ["", *slot_lines(plan)]
    meeting = plan.rendezvous
    lines += ["", f"ranks meet at {meeting.address or 'an address decided on the node'}: {meeting.why}"]
    if explain:
        ports = ", ".join(str(port) for port in meeting.ports)
        lines.append(f"  ports tried in turn, from job and step {meeting.run_id}: {ports}")
        lines += ["", "left alone:", *(f"  {left.name}: {left.why}" for left in plan.left)]
    return lines + finding_lines(plan.findings)


def variable_lines(variables: Sequence[EnvVar], explain: bool, width: Optional[int]) -> List[str]:
    if explain:
        return [
            line
            for variable in variables
            for line in (f"{variable.name}={variable.value}", f"    {variable.source}: {variable.why}")
        ]
    rows = [(f"{variable.name}={variable.value}", variable.source, variable.why) for variable in variables]
    return columns(rows, width)


def slot_lines(plan: NodePlan) -> List[str]:
    rows = [("local rank", "GPU", "NUMA", "cores", "mask", "NIC")]
    for slot in plan.binding.slots:
        rows.append(
            (
                str(slot.local_rank),
                ",".join(map(str, slot.gpus)) or "-",
                "-" if slot.numa is None else str(slot.numa),
                slot.cores or "any",
                slot.mask if slot.cpus else "-",
                slot.nic or "-",
            )
        )
    lines = columns(rows, None)
    lines.append(f"  {plan.binding.threads_why}")
    if plan.binding.mask_cpu and plan.fabric != "loopback":
        lines.append(f"  for srun: --cpu-bind=mask_cpu:{plan.binding.mask_cpu}")
    return lines


def finding_lines(findings: Sequence[Finding]) -> List[str]:
    lines: List[str] = []
    for finding in findings:
        lines += ["", f"{finding.severity}: {finding.title}"]
        lines += [f"  {evidence.text}" for evidence in finding.evidence]
        lines += [f"  {word} {text}" for word, text in _parts(finding) if text]
    return lines


def _parts(finding: Finding) -> Tuple[Tuple[str, str], ...]:
    return (("why:", finding.cause), ("do:", finding.fix), ("ask the support desk:", finding.support))


def difference_lines(changes: Sequence[Difference]) -> List[str]:
    lines = []
    for change in changes:
        if change.before is None:
            lines.append(f"+ {change.name}={change.after}")
        elif change.after is None:
            lines.append(f"- {change.name}={change.before}")
        else:
            lines.append(f"  {change.name}: {change.before} -> {change.after}")
        lines.append(f"    {change.why}")
    return lines


def exported_variables(order: Order, facts: Facts) -> List[EnvVar]:
    """What is exported where the job is submitted, and not named by the job itself."""
    named = {variable.name for variable in order.env if variable.source == "user"}
    return [
        EnvVar(name, value, EXPORTED, "user")
        for name, value in sorted(facts.environment.items())
        if steers(name) and name not in named
    ]


def desk_lines(order: Order, exported: Sequence[EnvVar], explain: bool, width: Optional[int]) -> List[str]:
    """Away from the nodes: what is settled already, and what each node will settle for itself."""
    settled = sorted([*order.env, *exported], key=lambda variable: variable.name)
    names = {variable.name for variable in settled}
    later = {entry.name: entry for entry in reversed(COMPUTED) if entry.name not in names}
    lines = ["decided here:", *(variable_lines(settled, explain, width) or ["  nothing"]), ""]
    lines.append("decided on each node, from what it has:")
    rows = [(name, entry.when, entry.why) for name, entry in sorted(later.items())]
    lines += columns(rows, width)
    lines += [
        "",
        "and what fits its fabric and GPUs (docs/environment.md). --root, or --from-run, brings a node's facts.",
    ]
    return lines


def columns(rows: Sequence[Sequence[str]], width: Optional[int]) -> List[str]:
    if not rows:
        return []
    widths = [min(60, max(len(row[place]) for row in rows)) for place in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(size) for cell, size in zip(row, widths)).rstrip() for row in rows]
    return [line if width is None or len(line) <= width else line[: width - 1] + "…" for line in lines]
