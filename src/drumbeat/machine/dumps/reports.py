"""NCCL's topology file, the kernel's log, and ds_report.

The file (NCCL_TOPO_FILE, NCCL_TOPO_DUMP_FILE) is read with a small scanner, not an XML parser: the text is untrusted, and
entities have no business in it.
"""

from __future__ import annotations

import re
from typing import Dict, Iterator, List, Optional, Tuple

from drumbeat.findings.model import Evidence
from drumbeat.machine.dumps.text import Dump, Text
from drumbeat.machine.frameworks import FrameworkAnswers
from drumbeat.machine.model import Facts, Gpu, Limits, RdmaDevice
from drumbeat.machine.parse import pci_address
from drumbeat.machine.vendors import VENDORS, recent

_TAG = re.compile(r"<(/?)(\w+)((?:\s+[\w:-]+=\"[^\"]*\")*)\s*(/?)>")
_ATTRIBUTE = re.compile(r"([\w:-]+)=\"([^\"]*)\"")
_MAX_TAGS = 200_000


def nccl_file(text: Text) -> Iterator[Dump]:
    start = text.whole.find("<system")
    if start < 0:
        note = "search results of NCCL, not a topology: nothing in it says what is beside what"
        yield Dump("NCCL graph file", Facts(""), notes=(note,))
        return
    gpus: Dict[int, Gpu] = {}
    nets: Dict[str, RdmaDevice] = {}
    lines: Dict[str, Evidence] = {}
    numa_nodes: List[str] = []
    for tag, attributes, path, closed, position in _tags(text.whole, start):
        bus, kind = attributes.get("busid"), attributes.get("class", "")
        if tag == "cpu":
            numa_nodes.append(attributes.get("numaid", "?"))
        # A tag that contains nothing is a card that NCCL has not filled in yet.
        is_gpu, is_net = tag == "gpu", tag == "net"
        if tag == "pci" and closed:
            is_gpu, is_net, path = kind.startswith("0x0302"), kind.startswith("0x0207"), [*path, ("pci", bus or "?")]
        if not (is_gpu or is_net):
            continue
        numa = next((name for above, name in path if above == "cpu"), "")
        place = [f"numa{name}" if above == "cpu" else name for above, name in path if above in ("cpu", "pci")]
        node = int(numa) if re.fullmatch(r"-?\d{1,6}", numa) else None
        pci, tree = (pci_address(place[-1]) or place[-1]) if len(place) > 1 else None, "/".join(place)
        if is_gpu:
            number = attributes.get("dev", "")
            index = int(number) if re.fullmatch(r"\d{1,6}", number) else len(gpus)
            gpus[index] = Gpu(index, "unknown", pci=pci, numa=node, pci_path=tree)
            lines[f"GPU {index}"] = text.at(position)
        else:
            name = attributes.get("name", "?") if tag == "net" else f"card at {bus or '?'}"
            if name in nets and pci is None:
                node, tree = None, ""  # an interface without a card, listed below several CPUs
            nets[name] = RdmaDevice(name, pci=pci, numa=node, pci_path=tree or None)
            lines[name] = text.at(position)
    facts = Facts("", gpus=tuple(gpus.values()), rdma=tuple(nets.values()))
    note = f"NUMA nodes {', '.join(numa_nodes)}; {len(gpus)} GPUs, {len(nets)} network devices"
    yield Dump("NCCL topology file", facts, lines, frozenset({"nics", "nccl-file"}), (note,))


def _tags(text: str, start: int) -> Iterator[Tuple[str, Dict[str, str], List[Tuple[str, str]], bool, int]]:
    """Yield each opening tag, with its attributes, its parent, True if it is empty, and its position."""
    path: List[Tuple[str, str]] = []  # tag, busid or NUMA node
    for count, match in enumerate(_TAG.finditer(text, start)):
        closing, tag, rest, empty = match.groups()
        if count > _MAX_TAGS or (closing and tag == "system"):
            return
        if closing:
            while path and path.pop()[0] != tag:
                pass
            continue
        attributes = dict(_ATTRIBUTE.findall(rest))
        yield tag, attributes, path, bool(empty), match.start()
        if not empty:
            path.append((tag, attributes.get("numaid") or attributes.get("busid") or ""))


KERNEL_LOG = "kernel log"


def kernel_log(text: Text) -> Iterator[Dump]:
    """Read the GPU drivers' error reports in a kernel log; `drumbeat diagnose` reads the other lines as a log."""
    gpus: Dict[str, Gpu] = {}
    lines: Dict[str, Evidence] = {}
    for number, line in enumerate(text.lines):
        for vendor in VENDORS:
            event = vendor.kernel_event(line) if vendor.kernel_mark and vendor.kernel_mark in line else None
            if event:
                text.claim(number, number + 1)
                lines[event.text] = text.line(number)
                gpus.setdefault(event.address, Gpu(-1 - len(gpus), vendor.name, pci=f"{event.address}.0"))
    if gpus:
        yield Dump(KERNEL_LOG, Facts("", gpus=tuple(gpus.values()), gpu_events=recent([*lines])), lines)


_DS_FIELD = re.compile(r"^(torch version|torch cuda version|torch hip version|nvcc version|deepspeed info|"
                    r"deepspeed wheel compiled w\.|shared memory \(/dev/shm\) size) \.+ (.+?)\s*$", re.MULTILINE)  # fmt: skip
_OPERATOR = re.compile(r"^\w+ \.+ \S*\[(?:YES|NO)\]\S* \.+ \S*\[(?:OKAY|NO)\]\S*", re.MULTILINE)


def deepspeed(text: Text) -> Iterator[Dump]:
    """Read ds_report: what `doctor --framework deepspeed` asks for on a live node."""
    fields: Dict[str, str] = dict(_DS_FIELD.findall(text.whole))
    first: Optional[re.Match[str]] = _OPERATOR.search(text.whole) or _DS_FIELD.search(text.whole)
    if first is None:
        return
    size = re.match(r"(\d{1,9}(?:\.\d{1,9})?) GB", fields.get("shared memory (/dev/shm) size", ""))
    limits = Limits(shm_bytes=int(float(size[1]) * (1 << 30)) if size else None)
    versions = {"torch": fields.get("torch version", ""), "deepspeed": fields.get("deepspeed info", "").split(",")[0]}
    modules = {name: {"version": version} for name, version in versions.items()}
    answers = FrameworkAnswers("deepspeed", "ds_report", {"modules": modules}, {"ds_report": text.whole})
    notes = tuple(f"{name}: {value}" for name, value in fields.items())
    lines = {"ds_report": text.at(first.start())}
    yield Dump("ds_report", Facts("", limits=limits), lines, notes=notes, answers=answers)
