"""`drumbeat submit`: turn a job, or an order saved by `plan --save`, into a job in a scheduler's queue."""

from __future__ import annotations

import dataclasses
import os
from contextlib import suppress
from dataclasses import replace
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat import backends
from drumbeat.backends.contract import FINISHED
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import SCHEMA, Order, read_order
from drumbeat.base.problem import Problem
from drumbeat.base.record import RecordError, from_json
from drumbeat.bundle.build import cached_bundle
from drumbeat.bundle.pinned import pinned
from drumbeat.containers.image import check_image
from drumbeat.desk.cancel import exit_code, wait_for_end
from drumbeat.desk.nodes import avoiding
from drumbeat.desk.start.create import create_run, forget_run, no_place
from drumbeat.desk.start.make_order import make_order, site_of
from drumbeat.desk.start.place import HERE, LOGIN, Place, check_command, find_place, to_queue
from drumbeat.desk.start.site_check import refuse_mistakes
from drumbeat.desk.state import state_of
from drumbeat.jobfile.job import Job
from drumbeat.jobfile.resolve import combinations, separate
from drumbeat.jobfile.site import Site
from drumbeat.machine.gather import gather
from drumbeat.machine.host import Host, LiveHost
from drumbeat.machine.model import Facts, Peer, Peers
from drumbeat.machine.replay import open_host
from drumbeat.plan.network import with_reach
from drumbeat.runfolder.files import create_private
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.summary import write_run_record


def queued_order(job: Job, environ: Mapping[str, str]) -> Order:
    """Return the order of a job that a scheduler will start."""
    place = to_queue(find_place(LiveHost()))
    site = site_of(job, place, environ)
    refuse_mistakes(site, environ)
    order = make_order(job, site, place, environ)
    order = avoiding(order, environ) if job.bad_nodes == "avoid" else order
    return pinned(order, cached_bundle(environ))


def queued_orders(job: Job, environ: Mapping[str, str]) -> List[Order]:
    """Return the orders to submit: one, or one for each value of a sweep in this machine's own queue, which has no arrays."""
    here = job.sweep and site_of(job, to_queue(find_place(LiveHost())), environ).backend == "local"
    if not here:
        return [queued_order(job, environ)]
    orders = [queued_order(each, environ) for each in separate(job)]
    return [dataclasses.replace(order, sweep=(values,)) for order, values in zip(orders, combinations(job.sweep))]


def saved_order(path: str) -> Order:
    try:
        order = read_order(path)
    except (OSError, RecordError) as error:
        raise Problem(f"{path}: {error}") from None
    if order.schema.partition(".")[0] != SCHEMA.partition(".")[0]:
        raise Problem(
            f"{path}: made by an older drumbeat (schema {order.schema}, this one writes {SCHEMA})",
            "make it again: drumbeat plan --save",
        )
    return order


def order_after(order: Order, runs: Sequence[Run], say: Callable[[str], None]) -> Order:
    """Return the order, to be started only after these runs have succeeded. A scheduler with dependencies between its own jobs
    ensures that; otherwise this function waits, and raises a Problem if a run did not succeed. `say` reports what it waits for.
    """
    if not runs:
        return order
    backend = backends.get(order.backend)
    handles = [run.record.handle for run in runs]
    text = backend.after(handles) if all(backends.of_handle(handle) is backend for handle in handles) else ""
    if not text:
        for run in runs:
            _wait_for_success(run, say)
        return order
    specific = order.resources.specific
    joined = ",".join(part for part in (specific.get("dependency", ""), text) if part)
    return replace(order, resources=replace(order.resources, specific={**specific, "dependency": joined}))


def _wait_for_success(run: Run, say: Callable[[str], None]) -> None:
    state = state_of(run)
    if state.goes_on:
        now = f"{run.run_id} is {state.status.state}"
        say(f"{now}; this waits here for its end, and submits then (Ctrl-C: nothing is submitted)")
        state = wait_for_end(run)
    code = exit_code(state)
    if state.status.state != FINISHED or code:
        ended = f"ended with {code}" if state.status.state == FINISHED else f"is {state.status.state}"
        raise Problem(f"{run.run_id} {ended}, so nothing was submitted after it", f"drumbeat status {run.run_id}")
    say(f"{run.run_id} has succeeded")


def submit(
    order: Order,
    job_file: Optional[str],
    environ: Mapping[str, str],
    files: Optional[Mapping[str, bytes]] = None,
    now: bool = False,
) -> str:
    """Submit and return the handle of the queued job. A job that is refused leaves nothing behind. `files` are put into
    the run folder, readable by this user alone. `now`: past this machine's queue."""
    backend = backends.get(order.backend)
    if not backend.takes_hosts:  # other machines' files are not looked for here
        check_image(order)
        if not (order.container or order.modules):
            check_command(order, environ)
    bundle = cached_bundle(environ)
    order = pinned(order, bundle)  # a saved order may be from another version
    request = replace(backend.render(order), now=now)
    if os.path.exists(order.folder):
        raise Problem(
            f"{order.run_id} has been submitted already: {order.folder} is there", "make a new order: drumbeat plan"
        )
    folder = create_run(order, job_file, bundle, environ)
    record = Run.open(folder.path).record
    try:
        known = backend.handle(order, environ)
        if known:
            write_run_record(folder, replace(record, handle=known, submitting=True))
        for name, data in (files or {}).items():
            create_private(folder.at(name), data)
        handle = backend.submit(request, environ)
    except (Problem, OSError) as error:
        forget_run(order, environ)
        raise no_place(folder.path, error) if isinstance(error, OSError) else error from None
    write_run_record(folder, replace(record, desk=backend.desk(handle), handle=handle))
    return handle


ANY_COMMAND = "COMMAND"  # in a plan that explains a site rather than a job

# Inputs of a plan: the order, and the facts of its nodes, from wherever they are available.


@dataclass(frozen=True)
class Ready:
    order: Order
    facts: Tuple[Facts, ...]  # of the nodes that could be inspected, from node 0 on
    peers: Peers
    host: Optional[Host]  # node 0 itself, if its files can still be read
    away: bool  # this machine is not a node of the job, so its own facts do not apply
    site: Site


def with_any_value(job: Job, environ: Mapping[str, str]) -> Dict[str, str]:
    """Return the environment with something for each variable that the job passes on and nobody exports here: a plan writes no
    value of them, and on a laptop they need not be set. `submit` and `run` refuse."""
    return {**{name: "" for name, text in job.env.items() if text is None}, **environ}


def prepare(
    job: Job, roots: Sequence[str], run: Optional[str], environ: Mapping[str, str], any_command: bool = False
) -> Ready:
    """Gather what a plan is made from. `any_command`: a job without one is planned as one of two nodes of a cluster."""
    environ = with_any_value(job, environ)
    hosts: List[Host] = [] if run else [open_host(root) for root in roots] or [open_host(None)]
    facts = facts_of_run(run) if run else [gather(host) for host in hosts]
    emulated = False
    with suppress(OSError, RecordError):
        emulated = bool(run) and read_order(RunFolder(run or "").order).emulated
    if emulated:  # all its nodes were one machine, which is meant again
        job = dataclasses.replace(job, nodes=job.nodes or len(facts))
        facts, run = facts[:1], None
    elsewhere = bool(roots or run)
    place = Place(HERE, facts[0].identity, machines=tuple(facts)) if elsewhere else find_place(LiveHost())
    site = site_of(job, place, environ)
    refuse_mistakes(site, environ)
    if any_command and not job.command:
        nodes = len(facts) if elsewhere else 1 if site.backend == "local" else 2
        job = dataclasses.replace(job, command=(ANY_COMMAND,), name=job.name or "any", nodes=job.nodes or nodes)
    order = make_order(job, site, place, environ)
    if len(facts) > order.nodes:
        raise Problem(f"facts of {len(facts)} nodes for a job of {order.nodes} nodes", f"add --nodes {len(facts)}")
    if order.emulated:
        facts = facts * order.nodes
    unknown = not elsewhere and facts[0].identity.node_rank is None
    away = order.backend != "local" and (place.kind == LOGIN or unknown)
    peers = Peers(
        tuple(Peer(node, each.host, "", each) for node, each in enumerate(facts)), "", 0
    )  # none was contacted
    return Ready(order, tuple(facts), with_reach(peers), hosts[0] if hosts else None, away, site)


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
