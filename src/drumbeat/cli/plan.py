"""drumbeat plan: what would happen, with the reason of every setting."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import replace
from typing import Any, Dict, List

from drumbeat import backends
from drumbeat.backends.contract import Unreachable
from drumbeat.base.order import dump_order
from drumbeat.base.problem import Problem
from drumbeat.base.redact import visible
from drumbeat.base.text import count
from drumbeat.cli import add_json
from drumbeat.cli.output import print_json, warn, write_file
from drumbeat.desk.start.submit import ANY_COMMAND, prepare, queued_order, with_any_value
from drumbeat.doctor.case import worst_first
from drumbeat.doctor.examine import compare, judged_plan
from drumbeat.findings.model import ERROR, worst
from drumbeat.jobfile.flags import about_preset, add_job_flags, load_job
from drumbeat.jobfile.site import find_paths, site_lines
from drumbeat.metrics.trackers import shown_tracker
from drumbeat.plan.argv import AT_START, replaced_flags
from drumbeat.plan.binding import requested_without_gpu
from drumbeat.plan.show import (
    desk_lines,
    difference_lines,
    differences,
    exported_variables,
    finding_lines,
    passed_lines,
    plan_lines,
    plan_node,
    request_words,
    wrapped,
)
from drumbeat.predict.job import line_of_command
from drumbeat.runfolder.summary import gpus_used


def add_arguments(parser: Any) -> None:
    add_job_flags(parser)
    group = parser.add_argument_group("nodes to plan for")
    group.add_argument(
        "--root",
        action="append",
        default=[],
        metavar="DIR",
        help="plan for this node: a folder or a capture; repeat it for each node",
    )
    group.add_argument("--from-run", metavar="RUN", help="plan for the nodes of an earlier run, from its folder")
    group = parser.add_argument_group("what to print")
    group.add_argument(
        "--explain",
        action="store_true",
        help="also show the site's own settings and what is left unset, with reasons; needs no command",
    )
    group.add_argument(
        "--against", type=int, metavar="N", help="show only what changes compared with a job of N nodes, and why"
    )
    group.add_argument(
        "--render", action="store_true", help="print the batch script or manifest exactly as submit would send it"
    )
    group.add_argument("--save", metavar="ORDER.json", help="save this order; submit ORDER.json sends exactly this")
    add_json(group)
    parser.epilog = "Exit code: 0, or 1 when doctor or the plan finds an error: something that would break the job."


def run(args: Any) -> int:
    if args.against is not None and args.against < 1:
        raise Problem(f"--against {args.against}: a job has at least 1 node")
    if args.render or args.save:
        return _render(args)
    job = load_job(args.job, args)
    ready = prepare(job, args.root, args.from_run, os.environ, args.explain)
    order = ready.order
    _warn_passed(order)
    if job.preset and not args.json and args.against is None:
        print("\n".join(wrapped(f"preset    {job.preset}: {about_preset(job)}", _width())))
    if ready.away and args.against is not None:
        raise Problem(
            "this machine is not a node of the job, so the changes there are unknown", "add --root or --from-run"
        )
    if ready.away:
        if order.command != (ANY_COMMAND,):
            warn(order)
        code = _print_away(args, order, ready.facts[0])
        _print_site(args, ready.site)
        return code
    plans = [judged_plan(order, each, ready.peers, node) for node, each in enumerate(ready.facts)]
    if args.against is not None:
        other = plan_node(replace(order, nodes=args.against), ready.facts[0], ready.peers, 0)
        return _print_against(args, order, differences(other, plans[0]))
    # The site's paths are the host's: from inside a container they cannot be judged.
    looked = ready.host is not None and not ready.facts[0].container.inside
    paths, missing = find_paths(order.host_paths if looked else (), ready.host.list if ready.host else list, "")
    across = worst_first(compare(ready.peers))
    _print_plans(args, order, plans, paths, {"path findings": missing, "findings": across}, ready.facts[0])
    _print_site(args, ready.site)
    return 1 if worst([*missing, *across, *(finding for plan in plans for finding in plan.findings)]) == ERROR else 0


def _render(args: Any) -> int:
    job = load_job(args.job, args)
    order = queued_order(job, os.environ if args.save else with_any_value(job, os.environ))
    warn(order)
    _warn_passed(order)
    if args.save:
        write_file(args.save, dump_order(order))
    backend = backends.get(order.backend)
    try:
        request = backend.render(order)
    except Unreachable as unreachable:
        request = backend.draft(order, unreachable)
        print(
            f"drumbeat plan: {backend.title} was not asked ({unreachable.what}): submit may render it otherwise",
            file=sys.stderr,
        )
    if order.backend == "local" and not args.json:
        print(
            "drumbeat plan: no scheduler here; this is the order that submit would start on this machine",
            file=sys.stderr,
        )
    if args.json:
        print_json(request)
    else:
        print(visible(request.text), end="")
    return 1 if backend.missing(order) else 0


def _warn_passed(order: Any) -> None:
    for name in order.passed:
        if name not in os.environ:
            print(
                f"{'warning':<9} {name} is to be passed on, but is not exported here: run and submit refuse",
                file=sys.stderr,
            )


def _print_site(args: Any, site: Any) -> None:
    """Explain what the site's profile adds to every job, besides variables: those are in the plan."""
    if args.explain and not args.json and site.backend != "local":  # of this machine the plan says all
        lines = ["", "from the site's profile:", *site_lines(site, ("env", "detect"))]
        print("\n".join(part for line in lines for part in wrapped(line, _width())))


def _print_away(args: Any, order: Any, facts: Any) -> int:
    exported = exported_variables(order, facts)
    refused = bool(requested_without_gpu(order))
    if args.json:
        print_json({"order": order, "decided here": [*order.env, *exported], "nodes": []})
        return int(refused)
    print("\n".join([*_headline(order), *_gpus_requested(order)]))
    print("\n".join(desk_lines(order, exported, _width())))
    return int(refused)


def _print_plans(args: Any, order: Any, plans: List[Any], paths: Any, beside: Dict[str, Any], facts: Any) -> None:
    """Print the plans; `beside` has what is wrong with paths and between nodes."""
    changes = [(plan, differences(plans[0], plan)) for plan in plans[1:]]
    predicted = line_of_command(order.command, facts.gpus, order.nodes, gpus_used(order, facts))
    if args.json:
        others = [{"node": plan.node, "host": plan.host, "changes": found} for plan, found in changes]
        shown = replace(order, emulated=order.nodes_emulated)
        print_json(
            {
                "order": shown,
                "nodes": plans,
                "set at the start": AT_START,
                "differences": others,
                "paths": paths,
                **beside,
                "predicted": predicted or None,
            }
        )
        return
    lines = [*_headline(order), *(wrapped(f"predicted {predicted}", _width()) if predicted else ())]
    lines += [*passed_lines(order), *plan_lines(plans[0], args.explain, _width())]
    if paths:
        lines += ["", *(f"{name}: {path}" for name, path in paths.items())]
    lines += finding_lines([each for found in beside.values() for each in found], _width())
    for plan, found in changes:
        lines += ["", f"node {plan.node} ({plan.host}) " + ("differs in:" if found else "is planned alike")]
        lines += [*difference_lines(found, _width()), *finding_lines(plan.findings, _width())]
    if len(plans) < order.nodes:
        rest = order.nodes - len(plans)
        lines += ["", f"{rest} more node{'s' if rest > 1 else ''}: not looked at; each decides from its own facts"]
    print("\n".join(lines))


def _print_against(args: Any, order: Any, changes: List[Any]) -> int:
    if args.json:
        print_json({"from nodes": args.against, "to nodes": order.nodes, "changes": changes})
        return 0
    ranks = f"{order.ranks_per_node} rank{'' if order.ranks_per_node == 1 else 's'}"
    print(f"from {args.against} to {order.nodes} node{'' if order.nodes == 1 else 's'} x {ranks}:")
    print("\n".join(difference_lines(changes, _width())) or "nothing changes")
    return 0


def _headline(order: Any) -> List[str]:
    kind = "emulated node" if order.nodes_emulated else "node"
    nodes = count(order.nodes, kind)
    ranks = count(order.ranks_per_node, "rank") if order.ranks_per_node else "one rank per GPU"
    launcher = f"launcher {order.launcher} ({order.launcher_why})"
    if order.spares:
        ranks += f", {count(order.spares, 'spare node')}"
    lines = [f"{order.name} on {order.site}: {nodes} x {ranks}, {launcher}", f"command   {shlex.join(order.command)}"]
    if order.command == (ANY_COMMAND,):
        lines = [f"every job on {order.site}, shown for {nodes} x {ranks} (no command was given)"]
    replaced = replaced_flags(order.command)
    if replaced:
        lines.append(f"replaced  {replaced}: each node gets its own from the muster")
    lines += [f"{name:<9} {words}" for name, words in request_words(order).items()]
    lines += [f"tracker   {shown_tracker(each, order)}" for each in order.track]
    return [part for line in lines for part in wrapped(line, _width())]


def _gpus_requested(order: Any) -> List[str]:
    if backends.get(order.backend).takes_hosts:
        return []
    count = order.resources.gpus
    return [f"GPUs      {count} per node requested" if count else "GPUs      none requested"]


def _width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 80
