"""A plan as text for a person: a table of settings, the ranks' places, settings left alone, findings."""

from __future__ import annotations

import re
import textwrap
from typing import Dict, List, Optional, Sequence, Tuple

from drumbeat.base.order import EnvVar, Order
from drumbeat.base.text import columns
from drumbeat.findings.model import Finding
from drumbeat.machine.model import Facts
from drumbeat.machine.vendors import VENDORS
from drumbeat.plan.argv import AT_START
from drumbeat.plan.environment import EXPORTED
from drumbeat.plan.node_plan import Difference, NodePlan
from drumbeat.plan.variables import COMPUTED, Computed, steers


def request_words(order: Order) -> Dict[str, str]:
    """Return the resources requested from the scheduler for each node, by job and site, and the expected network."""
    request = order.resources
    asked = [f"{request.gpus} GPUs"] if request.gpus else []
    asked += [f"{request.cpus} cores"] if request.cpus else []
    asked += [f"{request.memory} memory"] if request.memory else []
    wanted = [] if order.expect.transport == "any" else [f"transport {order.expect.transport}"]
    wanted += {True: ["GPU-direct"], False: ["no GPU-direct"], None: []}[order.expect.gdr]
    ask = order.backend != "local" and asked
    words = {"per node": ", ".join(asked) if ask else "", "expects": ", ".join(wanted)}
    return {name: text for name, text in words.items() if text}


def plan_lines(plan: NodePlan, explain: bool = False, width: Optional[int] = None) -> List[str]:
    """Format a plan. `width` wraps the lines; `explain` adds the settings that are left alone, with reasons."""
    lines = [*wrapped(f"node {plan.node} ({plan.host}): {plan.fabric}, {plan.fabric_why}", width), ""]
    lines += variable_lines(plan.variables, width)
    lines += ["", *start_lines(explain, width)]
    lines += ["", *slot_lines(plan, width)]
    meeting = plan.rendezvous
    where = meeting.address or "an address decided on the node"
    lines += ["", *wrapped(f"ranks meet at {where}: {meeting.why}", width)]
    if explain:
        ports = ", ".join(str(port) for port in meeting.ports)
        lines += wrapped(f"  ports tried in turn, from job and step {meeting.run_id}: {ports}", width)
        lines += ["", "left alone:"] if plan.left else []
        lines += [line for left in plan.left for line in wrapped(f"  {left.name}: {left.why}", width)]
    return lines + finding_lines(plan.findings, width)


def wrapped(text: str, width: Optional[int]) -> List[str]:
    """Wrap a line at blanks, with later lines indented a little more. A long word stays whole."""
    if width is None or len(text) <= width:
        return [text]
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )


def variable_lines(variables: Sequence[EnvVar], width: Optional[int]) -> List[str]:
    """Return each variable that is set, followed by its reason."""
    return [
        line
        for variable in variables
        for line in (
            f"{variable.name}={variable.value}",
            *wrapped(f"    {variable.source}: {variable.why}", width),
        )
    ]


def passed_lines(order: Order) -> List[str]:
    return [f"{name}: handed on from your shell (pass); its value is written nowhere" for name in order.passed]


def start_lines(explain: bool, width: Optional[int]) -> List[str]:
    """List variables whose values are known only when the run starts."""
    if not explain:
        return wrapped(f"and, when the run starts: {', '.join(AT_START)} (--explain says why)", width)
    return [
        "set when the run starts:",
        *(line for each in AT_START.items() for line in wrapped("  {}: {}".format(*each), width)),
    ]


def slot_lines(plan: NodePlan, width: Optional[int]) -> List[str]:
    rows = [("local rank", "GPU", "NUMA", "cores", "NIC")]
    for slot in plan.binding.slots:
        rows.append(
            (
                str(slot.local_rank),
                ",".join(map(str, slot.gpus)) or "-",
                "-" if slot.numa is None else str(slot.numa),
                slot.cores or "any",
                slot.nic or "-",
            )
        )
    lines = columns(rows)
    lines += wrapped(f"  {plan.binding.threads_why}", width)
    if plan.binding.mask_cpu and plan.fabric != "loopback":
        lines.append(f"  for srun: --cpu-bind=mask_cpu:{plan.binding.mask_cpu}")
    return lines


def finding_lines(findings: Sequence[Finding], width: Optional[int] = None) -> List[str]:
    lines: List[str] = []
    for finding in findings:
        lines += ["", *wrapped(f"{finding.severity}: {finding.title}", width)]
        texts = ["  " + ": ".join(filter(None, (evidence.place, evidence.text))) for evidence in finding.evidence]
        texts += [f"  {word} {text}" for word, text in _parts(finding) if text]
        lines += [line for text in texts for line in wrapped(text, width)]
    return lines


def _parts(finding: Finding) -> Tuple[Tuple[str, str], ...]:
    return (("why:", finding.cause), ("do:", finding.fix), ("ask the support desk:", finding.support))


def difference_lines(changes: Sequence[Difference], width: Optional[int] = None) -> List[str]:
    lines = []
    for change in changes:
        if change.before is None:
            lines.append(f"+ {change.name}={change.after}")
        elif change.after is None:
            lines.append(f"- {change.name}={change.before}")
        else:
            lines.append(f"  {change.name}: {change.before} -> {change.after}")
        lines += wrapped(f"    {change.why}", width)
    return lines


def exported_variables(order: Order, facts: Facts) -> List[EnvVar]:
    """Return variables exported where the job is submitted that the job itself does not set."""
    named = {variable.name for variable in order.env if variable.source == "user"}
    return [
        EnvVar(name, value, EXPORTED, "user")
        for name, value in sorted(facts.environment.items())
        if steers(name) and name not in named
    ]


def desk_lines(order: Order, exported: Sequence[EnvVar], width: Optional[int]) -> List[str]:
    """List the settings decided at submission, and those that each node will decide."""
    settled = sorted([*order.env, *exported], key=lambda variable: variable.name)
    names = {variable.name for variable in settled}
    later = {entry.name: entry for entry in reversed(COMPUTED) if entry.name not in names and _possible(order, entry)}
    lines = ["decided here:", *(variable_lines(settled, width) or ["  nothing"]), *passed_lines(order), ""]
    lines.append("decided on each node, from what it has:")
    for name, entry in sorted(later.items()):
        lines += [*wrapped(f"{name}: {entry.when}", width), *wrapped(f"    {entry.why}", width)]
    lines += [
        "",
        *wrapped(
            "and what fits its fabric and GPUs (docs/environment.md). --root, or --from-run, brings a node's facts.",
            width,
        ),
    ]
    return lines


def _possible(order: Order, entry: Computed) -> bool:
    """Return true if this setting is possible on such nodes. If the site gives no GPUs or network, every setting is."""
    text = f"{entry.name} {entry.when}"
    others = [vendor for vendor in VENDORS if order.vendor and vendor.name != order.vendor]
    if any(re.search(rf"\b{other.title}\b", text) or entry.name.startswith(other.prefixes) for other in others):
        return False
    network = {"ofi": r"InfiniBand|RoCE"}.get(order.expect.transport)
    if order.expect.transport in ("ib", "roce", "rdma"):
        network = "Slingshot"
    return not (network and re.search(network, text))
