"""Findings of a node about itself before ranks start; the lead gets them with the node's hello."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import os
from dataclasses import replace
from typing import List, Mapping, Sequence, Tuple

from drumbeat.agent.ranks.tasks import Tasks
from drumbeat.base import clock
from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex
from drumbeat.doctor.examine import preflight
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import ERROR, WARNING, Finding
from drumbeat.machine.model import Facts, Identity, Library
from drumbeat.runfolder.layout import RunFolder

find = Catalog("lead")
_HOST_PATHS = "host-paths.tsv"  # name, path, where it leads to, sha256: written on the host, before the container
_PROVIDER = regex(r"lib(bnxt_re|mlx5|ionic|irdma|efa)\b")


def check_node(
    order: Order, facts: Facts, node: int, tasks: Tasks, host_rows: Sequence[Sequence[str]]
) -> List[Finding]:
    """`host_rows`: see `read_host_paths`."""
    found = tasks.findings(node, facts.host)
    if order.checks.get("preflight") == "off":
        return found
    role = min(node, order.nodes - 1)  # a spare may get any
    judged = [
        replace(each, node=node, host=facts.host)
        for each in preflight(order, facts, node=role)
        if each.severity in (WARNING, ERROR)
    ]
    return [*found, *judged, *provider_findings(host_rows, facts.libraries, node, facts.host)]


def read_host_paths(order: Order, node: int) -> List[List[str]]:
    """Read what the host recorded about its own files before the container began. Reads the run folder: for a child."""
    path = os.path.join(RunFolder(order.folder).node(node).path, _HOST_PATHS)
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            rows = [line.rstrip("\n").split("\t") for line in file]
    except OSError:
        return []  # no container, or one that somebody else started
    return [row for row in rows if len(row) == 4]


def provider_findings(
    rows: Sequence[Sequence[str]], libraries: Sequence[Library], node: int, host: str
) -> List[Finding]:
    """An RDMA library must be the one that belongs to the host's driver, to the last byte."""
    found = []
    for _, path, real, digest in rows:
        name = _PROVIDER.match(os.path.basename(path))
        if name is None or digest == "-":
            continue
        others = [
            library
            for library in libraries
            if library.digest and library.digest != digest and library.name.startswith(name.group())
        ]
        if others:
            digests = [f"host {real} sha256 {digest[:12]}"]
            digests += [f"image {one.path} sha256 {(one.digest or '')[:12]}" for one in others[:4]]
            found.append(
                find(
                    "rdma-library-differs", library=name.group(), real=real, other=others[0].path, evidence=digests,
                    node=node, host=host,
                )
            )  # fmt: skip
    return found


# Where a node stands: what only the scheduler knows once the job runs, filled into the order.


def placed(order: Order, identity: Identity) -> Order:
    """An order that was made before the nodes were known gets them; the scheduler's order of hosts is kept."""
    order = dataclasses.replace(order, start=identity.starts)
    if order.resources.array and identity.array_task:
        folder = os.path.join(order.folder, "array", identity.array_task)
        alone = dataclasses.replace(order.resources, array="")
        run_id = f"{order.run_id}-{identity.array_task}"
        order = dataclasses.replace(order, run_id=run_id, folder=folder, resources=alone)
        if order.sweep:
            order = dataclasses.replace(order, command=_filled(order, int(identity.array_task)))
    if order.hosts or order.master:
        return order
    hosts = identity.hosts
    given = len(hosts) - order.spares
    if order.fewest_nodes and order.fewest_nodes <= given < order.nodes:
        order = dataclasses.replace(order, nodes=given, wanted_nodes=order.nodes)
    if len(hosts) != order.members:
        raise Problem(
            f"the order is for {order.members} nodes, but {identity.scheduler} says {len(hosts)}: {', '.join(hosts[:8])}",
            "ask the scheduler for as many nodes as the job does",
        )
    # The run's clock starts with the job, not in the queue.
    return dataclasses.replace(order, hosts=hosts, master=identity.master or hosts[0], created=clock.now())


def _filled(order: Order, task: int) -> Tuple[str, ...]:
    if task >= len(order.sweep):
        raise Problem(f"job {task} of an array of {len(order.sweep)}: the scheduler started one too many")
    words = list(order.command)
    for name, value in order.sweep[task].items():
        words = [word.replace("{" + name + "}", value) for word in words]
    return tuple(words)


def own_node(order: Order, identity: Identity) -> int:
    node = identity.node_rank
    if node is None or not 0 <= node < order.members:
        raise Problem(f"{identity.scheduler} does not say which of the {order.members} nodes this is (got {node})")
    return node


def task_meeting(identity: Identity, environ: Mapping[str, str], node: int, token: str) -> str:
    """The name under which the tasks of one node and one step find each other: an abstract socket, so that containers
    with folders of their own meet as well. Only who knows the token can work it out, so nobody else can take it first."""
    step = identity.step_id or environ.get("PMIX_NAMESPACE") or ""
    name = f"{os.getuid()}/{identity.job_id}/{step}/{node}"
    return "\0drumbeat-" + hmac.new(token.encode(), name.encode(), hashlib.sha256).hexdigest()[:24]
