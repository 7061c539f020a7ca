"""Findings of a node about itself before ranks start; the lead gets them with the node's hello."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import List, Sequence

from drumbeat.agent.ranks.tasks import Tasks
from drumbeat.base.order import Order
from drumbeat.base.regex import regex
from drumbeat.doctor.examine import preflight
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import ERROR, WARNING, Finding
from drumbeat.machine.model import Facts, Library
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
        for each in preflight(order, tasks.facts(facts), node=role)
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
