"""Site: what a cluster is. A profile is a YAML file with these fields; its file name is the site's name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Optional, Tuple

from drumbeat.spec.check import check
from drumbeat.spec.fields import key, origins_field
from drumbeat.spec.job import JobExpect
from drumbeat.spec.yamlfile import load_text


@dataclass(frozen=True)
class SiteVariable:
    value: str = key("text", "The value; `$NAME` is filled in from the user's environment.", "hsn0,hsn1")
    why: str = key("text", "Why ranks here need it; shown wherever the variable is.", "the only routed interfaces")
    source: Optional[str] = key("text", "Where that is documented.", "https://docs.example.org/nccl", None)


@dataclass(frozen=True)
class SiteFloor:
    busbw: int = key("number", "The least bus bandwidth of a healthy machine, in GB/s.", "340", minimum=1)
    nodes: Optional[int] = key(
        "number", "The number of nodes it was measured with.", "2", None, minimum=1, default_text="any number"
    )
    source: Optional[str] = key("text", "Where that number is from.", "measured after the upgrade in May", None)


@dataclass(frozen=True)
class Detect:
    cluster: Tuple[str, ...] = key("words", "Names that the scheduler may call this cluster.", "[lumi]", ())
    hosts: Tuple[str, ...] = key("words", "Patterns of host names (`*` and `?`).", '["uan*", "nid??????"]', ())


@dataclass(frozen=True)
class Site:
    name: str  # of its file
    summary: str = key("text", "The cluster in one line.", "4 MI250X a node, Slingshot 11")
    backend: str = key("choice", "What starts jobs there.", "local", "local", allowed=("local",))
    emulated: bool = key(
        "switch", "Nodes are processes of one machine, each with its own loopback address.", "true", False
    )
    nodes: Optional[int] = key("number", "How many nodes a job gets that does not say.", "1", None, minimum=1)
    ranks_per_node: Optional[int] = key(
        "number", "How many ranks a node gets where neither the job nor its GPUs say.", "8", None, minimum=1
    )
    runs: Optional[str] = key(
        "path",
        "The folder in which run folders are made, on storage that all nodes share.",
        "$SCRATCH/drumbeat/runs",
        None,
        default_text="./runs",
    )
    env: Dict[str, SiteVariable] = key(
        "tables",
        "Variables that every rank gets here, each with its reason. A job's own value wins.",
        "{GLOO_SOCKET_IFNAME: {value: lo, why: nodes share one machine}}",
        {},
        inner=SiteVariable,
        default_text="none",
    )
    expect: Optional[JobExpect] = key(
        "table",
        "Which network carries the traffic between nodes here. A job that says nothing itself is warned, never stopped.",
        "{transport: ofi, gdr: true}",
        None,
        inner=JobExpect,
        default_text="any",
    )
    floors: Dict[str, SiteFloor] = key(
        "tables",
        "What `drumbeat verify` must at least measure here at its largest size, by operation: all_reduce, all_gather, "
        "reduce_scatter, all_to_all, broadcast, send_recv.",
        "{all_reduce: {busbw: 340, nodes: 2}}",
        {},
        inner=SiteFloor,
        default_text="none",
    )
    detect: Detect = key(
        "table",
        "How to know this cluster; the cluster's name is asked before the host's.",
        "{cluster: [lumi], hosts: [uan*]}",
        Detect(),
        inner=Detect,
        default_text="never detected, only named",
    )
    origins: Dict[str, str] = origins_field()

    def where(self, path: str) -> str:
        return self.origins.get(path, path)


def site_from_text(text: str, name: str, file: str) -> Site:
    return check(Site, load_text(text, file, "a site profile"), file, "the site", name=name)
