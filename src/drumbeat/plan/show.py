"""The whole plan of one node, and as text for a person: settings, the ranks' places, settings left alone, findings."""

from __future__ import annotations

import datetime
import textwrap
from dataclasses import replace
from typing import Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import EnvVar, Order
from drumbeat.base.regex import regex
from drumbeat.base.text import columns
from drumbeat.commands.program import ABOUT_MPI
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import Finding
from drumbeat.machine.model import Facts, Peers
from drumbeat.machine.vendors import vendor_named
from drumbeat.plan.argv import AT_START
from drumbeat.plan.binding import Binding, binding
from drumbeat.plan.environment import EXPORTED, Left, decide, project_caches
from drumbeat.plan.exported import ALT_READ, NO_RDZV_GET, question
from drumbeat.plan.placement import question_cpu_bind
from drumbeat.plan.scene import Rendezvous, known_early, rendezvous, scene, still_open
from drumbeat.plan.variables import COMPUTED, SETTINGS, steers

find = Catalog("plan")


@dataclass(frozen=True)
class NodePlan:
    node: int
    host: str
    fabric: str
    fabric_why: str
    variables: Tuple[EnvVar, ...]
    left: Tuple[Left, ...]
    binding: Binding
    rendezvous: Rendezvous
    findings: Tuple[Finding, ...]


@dataclass(frozen=True)
class Difference:
    """One difference between two plans; None if one plan lacks the setting."""

    name: str
    before: Optional[str]
    after: Optional[str]
    why: str


def plan_node(order: Order, facts: Facts, peers: Peers, node: int) -> NodePlan:
    bound = binding(order, facts, node, peers)
    decision = decide(order, facts, peers, node, bound)
    meeting = rendezvous(order, peers)
    here = scene(order, facts, peers)
    final = {variable.name: variable for variable in decision.variables}
    findings = [
        *bound.findings,
        *question_cpu_bind(order, facts, bound, node),
        *decision.findings,
        *question(facts, here, final),
    ]
    if node == 0:
        findings += meeting.findings
        many = order.nodes * len(bound.slots)
        findings += [find("mpi-without-mpirun", ranks=many)] if ABOUT_MPI in order.launcher_why and many > 1 else []
    located = tuple(replace(finding, node=node, host=finding.host or facts.host) for finding in findings)
    return NodePlan(
        node, facts.host, here.fabric, here.fabric_why, decision.variables, decision.left, bound, meeting, located
    )


def differences(before: NodePlan, after: NodePlan) -> List[Difference]:
    """List the changes from one plan to the other, with the reason from the plan that has the setting."""
    ours, theirs = _settings(before), _settings(after)
    changes = []
    for name in [*theirs, *(name for name in ours if name not in theirs)]:
        old, new = ours.get(name), theirs.get(name)
        if (old and old[0]) != (new and new[0]):
            why = new[1] if new else next((left.why for left in after.left if left.name == name), "not needed any more")
            changes.append(Difference(name, old[0] if old else None, new[0] if new else None, why))
    return changes


def _settings(plan: NodePlan) -> Dict[str, Tuple[str, str]]:
    found = {variable.name: (variable.value, variable.why) for variable in plan.variables}
    found["fabric"] = (plan.fabric, plan.fabric_why)
    found["rendezvous"] = (plan.rendezvous.address or "decided on the node", plan.rendezvous.why)
    for slot in plan.binding.slots:
        place = f"cores {slot.cores or 'any'}, GPU {'-' if slot.gpu is None else slot.gpu}, NIC {slot.nic or '-'}"
        found[f"local rank {slot.local_rank}"] = (place, slot.why)
    return found


def request_words(order: Order) -> Dict[str, str]:
    """Return what job and site ask of the scheduler and its nodes: resources, account, time, image, and the expected network."""
    request, used = order.resources, order.container
    asked = [f"{request.gpus} GPUs"] if request.gpus else []
    asked += [f"{request.cpus} cores"] if request.cpus else []
    asked += [f"{'all' if request.memory == '0' else request.memory} memory"] if request.memory else []
    wanted = [] if order.expect.transport == "any" else [f"transport {order.expect.transport}"]
    wanted += {True: ["GPU-direct"], False: ["no GPU-direct"], None: []}[order.expect.gdr]
    queue = order.backend != "local"
    after = "; comes back after it only if its ranks end with 75" if queue and request.requeues else ""
    words = {
        "per node": ", ".join(asked) if queue else "",
        "account": request.account if queue else "",
        "partition": request.partition if queue else "",
        "options": " ".join(option.text for option in request.options) if queue else "",
        "time": f"{datetime.timedelta(seconds=int(order.time_limit))}{after}" if order.time_limit else "",
        "image": f"{used.image}, started with {used.runtime}" if used else "",
        "binds": ", ".join([*used.binds, *(path.pattern for path in order.host_paths)]) if used else "",
        "expects": ", ".join(wanted),
    }
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
    """List the settings decided at submission, and those that each node will decide, with the condition if there is one."""
    weakest_first = (*project_caches(order), *exported, *order.env)
    chosen = {variable.name: variable for variable in weakest_first}
    settled = [chosen[name] for name in sorted(chosen)]
    lines = ["decided here:", *(variable_lines(settled, width) or ["  nothing"]), *passed_lines(order), ""]
    lines.append("decided on each node, from what it has:")
    for name, value, condition, why in sorted(_later(order, {variable.name for variable in settled})):
        lines += wrapped(f"{name}: {value}", width)
        texts = [f"if {condition}" if condition else "", "" if why == value else why]
        lines += [line for text in texts if text for line in wrapped(f"    {text}", width)]
    return [*lines, "", *wrapped("--root, or --from-run, brings a node's facts: then these are decided, too.", width)]


def _later(order: Order, settled: Set[str]) -> Iterator[Tuple[str, str, str, str]]:
    """Yield name, value, condition and reason of what nodes may set; without a condition if order and site decide it."""
    known = known_early(order)
    local = f"{order.local_dir}/{order.user or order.run_id}"
    for entry in COMPUTED:
        rest = still_open(entry.needs, known)
        if rest is not None and entry.name not in settled:
            condition = ", and ".join(filter(None, [_condition(rest), entry.rest]))
            yield entry.name, entry.value.replace("LOCAL/USER", local).replace("`", ""), condition, entry.why
    options = [option.text for option in order.resources.options]
    for rule in SETTINGS:
        rest = still_open(rule.when, known)
        if rest is None or rule.name in settled:
            continue
        condition = _condition(rest)
        if rule.name == ALT_READ and not any(NO_RDZV_GET in text for text in options):
            condition = ", and ".join(filter(None, [condition, f"the job is started with --network={NO_RDZV_GET}"]))
        yield rule.name, rule.value, condition, f"{rule.why} ({rule.reference})"


_VERSION = regex(r"(<|>=)([\d.]+)( or unknown)?")
_IF = {
    "fabric": "the network is {}",
    "arch": "the GPUs are {}",
    "nic-driver": "the NICs' driver is {}",
    "gpus-used": "the number of GPUs used per node is {}",
    "rocm": "ROCm is {}",
    "kernel": "the kernel is {}",
    "net-plugin": "NCCL's network plug-in is {}",
    "library": "{} is found",
}


def _condition(rest: Mapping[str, str]) -> str:
    """Put the open part of a condition into words that follow an `if`."""
    words = []
    for key, wanted in rest.items():
        version = _VERSION.fullmatch(wanted)
        if key == "vendor":
            said = "the node has GPUs" if "|" in wanted else f"the GPUs are {vendor_named(wanted).title}'s"
        elif version:
            said = _IF[key].format(f"older than {version[2]}" if version[1] == "<" else f"{version[2]} or newer")
        else:
            said = _IF[key].format(wanted.replace("|", " or "))
        words.append(said + " or unknown" * (version is not None and bool(version[3])))
    return ", and ".join(words)
