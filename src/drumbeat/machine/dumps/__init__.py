"""Dumps that people paste beside a log: topology, ports, GIDs, jobs. Each reader knows one command's output.

A text may hold several. Readers are tried when one of their marks stands in it; what is not recognised is left alone.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Dict, List, Tuple

from drumbeat.findings.model import Evidence
from drumbeat.machine.dumps.content import Content, Dump

MAX_BYTES = 4 << 20  # of a file that is looked at for dumps

# Reader -> words of which one must stand in the text.
READERS: Dict[str, Tuple[str, ...]] = {
    "nvidia_topo": ("GPU0",),
    "nvidia_query": ("Attached GPUs", "Product Name", "GPU UUID", "<nvidia_smi_log>"),
    "rocm_topo": ("ROCm S", "(Topology) Numa"),
    "amd_smi": ("XGMI", "NUMA_NODE", "ACCESS TABLE", "LINK TYPE TABLE", "HOPS TABLE", "WEIGHT TABLE"),
    "gids": ("n_gids_found", "INDEX"),
    "rdma_link": ("physical_state", " ==> "),
    "ibstat": ("CA '", "Infiniband device '"),
    "ibv": ("hca_id", "node GUID"),
    "nccl_xml": ("<system", "<graphs"),
    "ds_report": ("op name ......", "DeepSpeed general environment info"),
    "ip_addr": ("link/ether", "link/infiniband", "link/loopback"),
    "scontrol": ("JobId=", "NodeName="),
}


def read_dumps(text: str, file: str) -> Tuple[Dump, ...]:
    """Every dump in this text."""
    found: List[Dump] = []
    text = text[:MAX_BYTES]
    for name, marks in READERS.items():
        if not any(mark in text for mark in marks):
            continue
        content = importlib.import_module(f"drumbeat.machine.dumps.{name}").read(text)
        if content is not None:
            found.append(_located(content, file))
    return tuple(found)


def _located(content: Content, file: str) -> Dump:
    findings = tuple(
        replace(
            finding, evidence=finding.evidence or (Evidence(finding.title, file),), seen=(f"{content.kind}: {file}",)
        )
        for finding in content.findings
    )
    return Dump(content.kind, file, content.facts, findings, content.data)


__all__ = ["Dump", "read_dumps"]
