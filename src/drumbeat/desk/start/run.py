"""`drumbeat run`: from a job to a finished run, wherever it was typed."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Callable, Optional

from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.bundle.build import cached_bundle
from drumbeat.bundle.pinned import pinned
from drumbeat.desk.foreground import Foreground
from drumbeat.desk.start.create import create_run, forget_run
from drumbeat.desk.start.fanout import start_in_allocation
from drumbeat.desk.start.join import check_inside, join
from drumbeat.desk.start.make_order import make_order, site_of
from drumbeat.desk.start.named_hosts import on_hosts
from drumbeat.desk.start.named_in_command import named_in_command
from drumbeat.desk.start.no_effect import as_run_here
from drumbeat.desk.start.place import ALLOCATION, HERE, INSIDE, Place, check_all_nodes, check_not_login, find_place
from drumbeat.desk.start.surroundings import check_command
from drumbeat.desk.start.token import fresh_token, users_token
from drumbeat.jobfile.job import Job
from drumbeat.jobfile.site import Site
from drumbeat.machine.host import LiveHost
from drumbeat.runfolder.layout import RunFolder


def run_job(
    job: Job,
    job_file: Optional[str],
    node_rank: Optional[int],
    master: str,
    nodes: Optional[int],
    on_created: Optional[Callable[[RunFolder], None]] = None,
) -> int:
    """`on_created` is called with the run folder where it is made here: on the lead's machine, before anything starts."""
    environ = os.environ
    if job.hosts and node_rank is None:  # then --master is how the other hosts reach the first
        place = dataclasses.replace(find_place(LiveHost()), master=master)
    else:
        place = find_place(LiveHost(), node_rank, master, nodes)
    site = site_of(job, place, environ)
    if on_hosts(job, site):
        return _run_on_hosts(job, job_file, site, place, on_created)
    check_not_login(place, site)
    if place.kind not in (ALLOCATION, INSIDE):
        by_hand = place.node_rank, place.master, place.nodes
        if place.node_rank is None:
            by_hand = named_in_command(job, environ, nodes)
        place = Place(HERE, place.identity, "", *by_hand)
        check_all_nodes(place, job.site)
    if place.kind == INSIDE:
        return join(job, job_file, site, place, environ, on_created)
    order = make_order(job, site, place, environ)
    if place.kind == ALLOCATION:
        return start_in_allocation(order, job_file, place, environ, on_created)
    return _run_here(order, job_file, place, on_created)


def _run_on_hosts(
    job: Job, job_file: Optional[str], site: Site, place: Place, on_created: Optional[Callable[[RunFolder], None]]
) -> int:
    from drumbeat import backends
    from drumbeat.backends.ssh.request import handle_of
    from drumbeat.desk.start.hosts import Hosts

    if place.kind == INSIDE or place.node_rank is not None:
        who = place.identity.scheduler if place.kind == INSIDE else "--node-rank"
        raise Problem(
            f"{job.where('hosts')}: hosts are named, but {who} says that this is one node already",
            "leave hosts out, or type it elsewhere",
        )
    bundle = cached_bundle(os.environ)
    order = pinned(make_order(job, site, place, os.environ), bundle)
    for note in backends.get("ssh").notes(order):
        print(f"drumbeat run: {note}", file=sys.stderr)
    folder = create_run(order, job_file, bundle, os.environ, handle_of(order))
    if on_created:
        on_created(folder)
    hosts = Hosts(order, folder, bundle, fresh_token())
    try:
        return hosts.run(os.environ)
    finally:
        if not hosts.started:
            forget_run(order, os.environ)


def _run_here(
    order: Order, job_file: Optional[str], place: Place, on_created: Optional[Callable[[RunFolder], None]]
) -> int:
    """All nodes on this machine, or, typed by hand on each of several, this one's."""
    environ, node_rank = os.environ, place.node_rank
    order, ignored = as_run_here(order)
    if ignored and not node_rank:
        print(f"drumbeat run: no scheduler here, so these have no effect: {', '.join(ignored)}", file=sys.stderr)
    check_inside(order)
    check_command(order, environ)
    if node_rank is not None and node_rank >= order.members:
        raise Problem(f"node rank {node_rank} of {order.members} nodes: ranks count from 0 to {order.members - 1}")
    bundle = cached_bundle(environ)
    alone = node_rank is None or order.members == 1
    token = fresh_token() if alone else users_token(environ)
    if not alone and node_rank:
        return Foreground(order, [node_rank], bundle, token).run(environ)
    folder = create_run(order, job_file, bundle, environ)
    if on_created:
        on_created(folder)
    nodes = range(order.members) if alone else [0]
    return Foreground(order, nodes, bundle, token).run(environ)
