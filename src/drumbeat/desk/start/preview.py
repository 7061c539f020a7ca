"""What a plan needs: the order, and the facts of the nodes it is for, from wherever they can be had."""

from __future__ import annotations

import dataclasses
import os
from typing import List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order, load_order
from drumbeat.base.problem import Problem
from drumbeat.base.record import RecordError, from_json
from drumbeat.desk.start.make_order import make_order, site_of
from drumbeat.desk.start.place import HERE, LOGIN, Place, find_place
from drumbeat.jobfile.job import Job
from drumbeat.machine.gather import gather
from drumbeat.machine.host import Host, LiveHost
from drumbeat.machine.model import Facts, Peer, Peers
from drumbeat.machine.replay import open_host
from drumbeat.runfolder.layout import RunFolder


@dataclass(frozen=True)
class Ready:
    order: Order
    facts: Tuple[Facts, ...]  # of the nodes that could be looked at, from node 0 on
    peers: Peers
    host: Optional[Host]  # node 0 itself, if its files can still be read
    away: bool  # this is no node of the job: its own facts say nothing about those


def prepare(job: Job, roots: Sequence[str], run: Optional[str], environ: Mapping[str, str]) -> Ready:
    hosts: List[Host] = [] if run else [open_host(root) for root in roots] or [LiveHost()]
    facts = facts_of_run(run) if run else [gather(host) for host in hosts]
    if run and _was_emulated(run):  # all its nodes were one machine, and that machine is meant again
        job = dataclasses.replace(job, nodes=job.nodes or len(facts))
        facts, run = facts[:1], None
    elsewhere = bool(roots or run)
    place = Place(HERE, facts[0].identity, machines=tuple(facts)) if elsewhere else find_place(LiveHost())
    site = site_of(job, place, environ)
    if place.kind == LOGIN and site.backend == "local":  # a site that was named to run on this very machine
        place = Place(HERE, place.identity)
    order = make_order(job, site, place, environ)
    if len(facts) > order.nodes:
        raise Problem(f"facts of {len(facts)} nodes for a job of {order.nodes} nodes", f"add --nodes {len(facts)}")
    if order.emulated:
        facts = facts * order.nodes
    away = place.kind == LOGIN or (not elsewhere and order.backend != "local" and facts[0].identity.node_rank is None)
    return Ready(order, tuple(facts), _peers(facts), hosts[0] if hosts else None, away)


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
