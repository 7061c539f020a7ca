"""drumbeat plan: what would happen, with the reason of every setting."""

from __future__ import annotations

from typing import Any, List, Optional, Tuple


def add_arguments(parser: Any) -> None:
    from drumbeat.spec.flags import add_job_flags

    add_job_flags(parser)
    group = parser.add_argument_group("whose facts")
    group.add_argument(
        "--root", action="append", default=[], metavar="DIR", help="a node, as a folder or a capture; one for each node"
    )
    group.add_argument("--from-run", metavar="RUN", help="the nodes of an earlier run, from its folder")
    group = parser.add_argument_group("what to print")
    group.add_argument("--explain", action="store_true", help="every reason in full, and what is left alone and why")
    group.add_argument("--against", type=int, metavar="N", help="only what changes from a job of N nodes, and why")
    group.add_argument("--render", action="store_true", help="the batch script, byte for byte as submit would send it")
    group.add_argument("--save", metavar="ORDER.json", help="keep this order: submit ORDER.json sends exactly this")
    group.add_argument("--json", action="store_true", help="for programs")


def run(args: Any) -> int:
    import dataclasses
    import os

    from drumbeat.desk.around import look_around
    from drumbeat.facts.gather import gather
    from drumbeat.finding import ERROR, worst
    from drumbeat.plan.node import differences, plan_node
    from drumbeat.problem import Problem
    from drumbeat.spec.flags import load_job
    from drumbeat.spec.resolve import resolve
    from drumbeat.spec.sites import find_site

    if args.against is not None and args.against < 1:
        raise Problem(f"--against {args.against}: a job has at least 1 node")
    job = load_job(args.job, args)
    if args.render or args.save:
        return _render(args, job)
    hosts = _hosts(args)
    facts = _facts_of_run(args.from_run) if args.from_run else [gather(host) for host in hosts]
    if len(facts) > 1 and job.nodes is None:
        job = dataclasses.replace(job, nodes=len(facts))
    here = look_around(os.environ)
    cluster = facts[0].identity.cluster
    if args.root or args.from_run:  # the nodes are those machines: their names, cores and GPUs count, not this one's
        gpus = len([gpu for gpu in facts[0].gpus if not gpu.integrated]) or None
        names = tuple(each.host for each in facts) if len(facts) == (job.nodes or 1) else ()
        here = dataclasses.replace(
            here, hostname=facts[0].host, gpus=gpus, cpus=len(facts[0].cpus.allowed) or 1, hosts=names
        )
    site = find_site(job.site, os.environ, here.hostname, cluster, job.where("site"))
    emulated = site.emulated and not args.root and not args.from_run
    if not emulated and not here.hosts:
        here = dataclasses.replace(here, master=facts[0].host)
    order = resolve(job, site, here)
    if len(facts) > order.nodes:
        raise Problem(f"{len(facts)} nodes' facts for a job of {order.nodes} nodes", f"say --nodes {len(facts)}")
    if not args.root and not args.from_run and order.backend != "local" and facts[0].identity.node_rank is None:
        return _at_the_desk(args, order, facts[0])
    if order.emulated:
        facts = facts * order.nodes
    peers = _peers(facts)
    plans = [plan_node(order, each, peers, node) for node, each in enumerate(facts)]
    paths = _paths(order, hosts[0], facts[0]) if hosts else ({}, [])
    if args.against is not None:
        other = plan_node(dataclasses.replace(order, nodes=args.against), facts[0], peers, 0)
        return _print_against(args, order, differences(other, plans[0]))
    _print_plans(args, order, plans, paths)
    return 1 if worst([*paths[1], *(finding for plan in plans for finding in plan.findings)]) == ERROR else 0


def _hosts(args: Any) -> List[Any]:
    """The machines to look at; none for those of an earlier run, of which only the facts are left."""
    if args.from_run:
        return []
    from drumbeat.facts.host import LiveHost
    from drumbeat.facts.replay import open_host

    return [open_host(root) for root in args.root] or [LiveHost()]


def _paths(order: Any, host: Any, facts: Any) -> Tuple[Any, List[Any]]:
    """The site's paths on node 0. They are the host's: from inside a container they cannot be judged."""
    from drumbeat.spec.paths import find_paths

    return ({}, []) if facts.container.inside else find_paths(order.host_paths, host.list, facts.host)


def _facts_of_run(path: str) -> List[Any]:
    import os

    from drumbeat.facts.model import Facts
    from drumbeat.problem import Problem
    from drumbeat.record import RecordError, from_json
    from drumbeat.runfolder.layout import RunFolder

    folder = RunFolder(path)
    found: List[Any] = []
    try:
        while os.path.exists(folder.node(len(found)).facts):
            file = folder.node(len(found)).facts
            with open(file, encoding="utf-8") as handle:
                found.append(from_json(Facts, handle.read(), file))
    except (OSError, RecordError) as error:
        raise Problem(f"the facts of node {len(found)} cannot be read: {error}") from None
    if not found:
        raise Problem(f"{path} holds no facts of a node", f"a run folder has {folder.node(0).facts}")
    return found


def _peers(facts: List[Any]) -> Any:
    from drumbeat.facts.model import Peer, Peers
    from drumbeat.plan.interfaces import address_of, candidates

    nodes: List[Any] = []
    for node, each in enumerate(facts):
        reachable = candidates(each)
        nodes.append(Peer(node, each.host, (address_of(reachable[0]) if reachable else "") or "", each))
    return Peers(tuple(nodes), nodes[0].address, 0)


def _render(args: Any, job: Any) -> int:
    import os

    from drumbeat.backends.slurm import render
    from drumbeat.desk.submit import make_order
    from drumbeat.order import dump_order
    from drumbeat.problem import Problem

    order = make_order(job, os.environ)
    if args.save:
        try:
            with open(args.save, "w", encoding="utf-8") as file:
                file.write(dump_order(order))
        except OSError as error:
            raise Problem(f"cannot write {args.save}: {error.strerror}") from None
    request = render(order)
    if args.json:
        _dump(request)
    else:
        print(request.text, end="")
    return 0


def _at_the_desk(args: Any, order: Any, facts: Any) -> int:
    from drumbeat.order import EnvVar
    from drumbeat.plan.environment import EXPORTED
    from drumbeat.plan.known import FAMILIES
    from drumbeat.plan.text import desk_lines

    named = {variable.name for variable in order.env if variable.source == "user"}
    exported = [
        EnvVar(name, value, EXPORTED, "user")
        for name, value in facts.environment.items()
        if name.startswith(FAMILIES) and name not in named
    ]
    if args.json:
        _dump({"order": order, "decided here": [*order.env, *exported], "nodes": []})
        return 0
    print(_headline(order))
    print("\n".join(desk_lines(order, exported, args.explain, _width())))
    return 0


def _print_plans(args: Any, order: Any, plans: List[Any], paths: Tuple[Any, List[Any]]) -> None:
    from drumbeat.plan.node import differences
    from drumbeat.plan.text import difference_lines, finding_lines, plan_lines

    changes: List[Tuple[Any, List[Any]]] = [(plan, differences(plans[0], plan)) for plan in plans[1:]]
    if args.json:
        others = [{"node": plan.node, "host": plan.host, "changes": found} for plan, found in changes]
        _dump({"order": order, "nodes": plans, "differences": others, "paths": paths[0], "path findings": paths[1]})
        return
    print(_headline(order))
    print("\n".join(plan_lines(plans[0], args.explain, _width())))
    if paths[0]:
        print("\n" + "\n".join(f"{name}: {path}" for name, path in paths[0].items()))
    print("\n".join(finding_lines(paths[1])), end="\n" if paths[1] else "")
    for plan, found in changes:
        print(f"\nnode {plan.node} ({plan.host}) " + ("differs in:" if found else "is planned alike"))
        print("\n".join([*difference_lines(found), *finding_lines(plan.findings)]))
    if len(plans) < order.nodes:
        rest = order.nodes - len(plans)
        print(f"\n{rest} more node{'s' if rest > 1 else ''}: not looked at; each decides from its own facts")


def _print_against(args: Any, order: Any, changes: List[Any]) -> int:
    from drumbeat.plan.text import difference_lines

    if args.json:
        _dump({"from nodes": args.against, "to nodes": order.nodes, "changes": changes})
        return 0
    print(f"from {args.against} to {order.nodes} nodes x {order.ranks_per_node} ranks:")
    print("\n".join(difference_lines(changes)) or "nothing changes")
    return 0


def _headline(order: Any) -> str:
    kind = "emulated nodes" if order.emulated else "nodes"
    return f"{order.name} on {order.site}: {order.nodes} {kind} x {order.ranks_per_node} ranks, {order.launcher_why}"


def _dump(value: Any) -> None:
    from drumbeat.record import to_json

    print(to_json(value))


def _width() -> Optional[int]:
    import shutil
    import sys

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
