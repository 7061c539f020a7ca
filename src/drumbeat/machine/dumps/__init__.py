"""Facts from what people paste beside a log: the output of `ibstat`, `nvidia-smi topo -m`, `ip addr` and the like.

A text may hold several. A reader is tried when one of its marks stands in the text; what none recognises is left alone.
Readers give the same facts as a live node, in which None is unknown; `doctor` judges both.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import islice
from typing import Any, Callable, Dict, Iterable, Iterator, List, Tuple

from drumbeat.findings.model import Evidence
from drumbeat.machine.dumps import amd, network, nvidia, software
from drumbeat.machine.dumps.text import Dump, Text
from drumbeat.machine.model import Facts

MAX_BYTES = 4 << 20  # of a file that is looked at for dumps
MAX_DUMPS, MAX_DEVICES, MAX_PORTS = 64, 256, 16

# Reader -> words of which one must stand in the text.
READERS: Dict[Callable[[Text], Iterable[Dump]], Tuple[str, ...]] = {
    nvidia.topology: ("GPU0",),
    nvidia.query: ("Attached GPUs", "Product Name", "GPU UUID", "<nvidia_smi_log>"),
    amd.rocm_topology: ("ROCm S", "(Topology) Numa"),
    amd.smi: ("XGMI", "NUMA_NODE", "ACCESS TABLE", "LINK TYPE TABLE", "HOPS TABLE", "WEIGHT TABLE"),
    network.gids: ("n_gids_found", "INDEX"),
    network.links: ("physical_state", " ==> "),
    network.ports: ("CA '", "Infiniband device '", "hca_id"),
    network.devices: ("node GUID",),
    network.interfaces: ("link/ether", "link/infiniband", "link/loopback"),
    software.nccl_file: ("<system", "<graphs"),
    software.deepspeed: ("op name ......", "DeepSpeed general environment info"),
}


def read_dumps(text: str, file: str) -> Tuple[Dump, ...]:
    """Every dump in this text; one that repeats another is left out."""
    found: Dict[str, Dump] = {}
    for dump in islice(_read(Text(text[:MAX_BYTES])), MAX_DUMPS):
        lines = {name: replace(line, file=file) for name, line in islice(dump.lines.items(), 2 * MAX_DEVICES)}
        dump = replace(dump, facts=_bounded(dump.facts))
        found.setdefault(f"{dump.kind} {dump.facts!r} {dump.notes}", replace(dump, file=file, lines=lines))
    return tuple(found.values())


def _bounded(facts: Facts) -> Facts:
    """No node has more: untrusted text must not cost time that grows with the square of its length."""
    rdma = tuple(replace(device, ports=device.ports[:MAX_PORTS]) for device in facts.rdma[:MAX_DEVICES])
    return replace(facts, gpus=facts.gpus[:MAX_DEVICES], rdma=rdma, interfaces=facts.interfaces[:MAX_DEVICES])


def _read(text: Text) -> Iterator[Dump]:
    for reader, marks in READERS.items():
        if any(mark in text.whole for mark in marks):
            yield from reader(text)


def together(dumps: Iterable[Dump]) -> Dump:
    """Several dumps of one node as one: each device as all of them describe it."""
    found: Dump = Dump("", Facts(""))
    for dump in dumps:
        facts = _merged(found.facts, dump.facts)
        lines: Dict[str, Evidence] = {**dump.lines, **found.lines}
        notes, answers = found.notes + dump.notes, found.answers or dump.answers
        files = ", ".join(filter(None, (found.file, dump.file)))
        found = Dump("dumps", facts, lines, found.shown | dump.shown, notes, answers, files)
    return found


def _merged(one: Any, other: Any) -> Any:
    """Records field by field, devices by their name or number; the first that knows something is believed."""
    changes: Dict[str, Any] = {}
    for each in fields(one):
        mine, theirs = getattr(one, each.name), getattr(other, each.name)
        if isinstance(mine, dict):
            changes[each.name] = {**theirs, **mine}
        elif isinstance(mine, tuple) and each.name in ("gpus", "rdma", "interfaces", "ports"):
            changes[each.name] = _devices([*mine, *theirs])
        elif mine in (None, (), "") and theirs not in (None, (), ""):
            changes[each.name] = theirs
        elif hasattr(mine, "__dataclass_fields__") and theirs is not None:
            changes[each.name] = _merged(mine, theirs)
    return replace(one, **changes)


def _devices(devices: List[Any]) -> Tuple[Any, ...]:
    found: Dict[Any, Any] = {}
    for device in devices:
        key = next(getattr(device, name) for name in ("index", "port", "name") if hasattr(device, name))
        found[key] = _merged(found[key], device) if key in found else device
    return tuple(found.values())


__all__ = ["Dump", "read_dumps", "together"]
