"""What a plan needs: the order, and the facts of the nodes it is for, from wherever they can be had."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import List, Mapping, Optional, Sequence, Tuple

from drumbeat.desk.surroundings import look_around
from drumbeat.facts.gather import gather
from drumbeat.facts.host import Host, LiveHost
from drumbeat.facts.model import Facts, Peer, Peers
from drumbeat.facts.replay import open_host
from drumbeat.order import Order, load_order
from drumbeat.problem import Problem
from drumbeat.record import RecordError, from_json
from drumbeat.runfolder.layout import RunFolder
from drumbeat.spec.job import Job
from drumbeat.spec.resolve import resolve
from drumbeat.spec.sites import find_site


@dataclass(frozen=True)
class Ready:
    order: Order
    facts: Tuple[Facts, ...]  # of the nodes that could be looked at, from node 0 on
    peers: Peers
    host: Optional[Host]  # node 0 itself, if its files can still be read
    away: bool  # this is no node of the job: its own facts say nothing about those


def prepare(job: Job, roots: Sequence[str], run: Optional[str], environ: Mapping[str, str]) -> Ready:
    machines: List[Host] = [] if run else [open_host(root) for root in roots] or [LiveHost()]
    facts = facts_of_run(run) if run else [gather(machine) for machine in machines]
    if run and _was_emulated(run):  # all its nodes were one machine, and that machine is meant again
        job = dataclasses.replace(job, nodes=job.nodes or len(facts))
        facts = facts[:1]
    elsewhere = bool(roots or run and not _was_emulated(run))
    if len(facts) > 1 and job.nodes is None:
        job = dataclasses.replace(job, nodes=len(facts))
    here = look_around(environ)
    if elsewhere:  # the nodes are those machines: their names, cores and GPUs count, not this one's
        names = tuple(each.host for each in facts)
        here = dataclasses.replace(
            here,
            hostname=facts[0].host,
            gpus=len([gpu for gpu in facts[0].gpus if not gpu.integrated]) or None,
            cpus=len(facts[0].cpus.allowed) or 1,
            hosts=names if len(facts) == (job.nodes or 1) else (),
            master=names[0],
        )
    site = find_site(job.site, environ, here.hostname, facts[0].identity.cluster, job.where("site"))
    order = resolve(job, site, here)
    if len(facts) > order.nodes:
        raise Problem(f"{len(facts)} nodes' facts for a job of {order.nodes} nodes", f"say --nodes {len(facts)}")
    if order.emulated:
        facts = facts * order.nodes
    away = not elsewhere and order.backend != "local" and facts[0].identity.node_rank is None
    return Ready(order, tuple(facts), _peers(facts), machines[0] if machines else None, away)


def facts_of_run(path: str) -> List[Facts]:
    folder = RunFolder(path)
    found: List[Facts] = []
    try:
        while os.path.exists(folder.node(len(found)).facts):
            file = folder.node(len(found)).facts
            with open(file, encoding="utf-8") as handle:
                found.append(from_json(Facts, handle.read(), file))
    except (OSError, RecordError, UnicodeDecodeError) as error:
        raise Problem(f"the facts of node {len(found)} cannot be read: {error}") from None
    if not found:
        raise Problem(f"{path} holds no facts of a node", f"a run folder has {folder.node(0).facts}")
    return found


def _was_emulated(run: str) -> bool:
    try:
        with open(RunFolder(run).order, encoding="utf-8") as file:
            return load_order(file.read()).emulated
    except (OSError, RecordError, UnicodeDecodeError):
        return False


def _peers(facts: Sequence[Facts]) -> Peers:
    nodes = []
    for node, each in enumerate(facts):
        nodes.append(Peer(node, each.host, "", each))  # nobody has reached it: no address is known to lead there
    return Peers(tuple(nodes), nodes[0].address, 0)
