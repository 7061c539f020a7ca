"""Facts from what people paste beside a log: the output of `ibstat`, `nvidia-smi`, `ip addr` and the like.

A text may hold several. A reader is tried when one of its marks stands in the text; what none recognises is named as not read.
Readers give the same facts as a live node, in which None is unknown; `doctor` judges both.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import chain, islice
from typing import Any, Callable, Dict, Iterable, List, Tuple

from drumbeat.findings.model import Evidence
from drumbeat.machine.dumps import amd, network, nvidia, reports
from drumbeat.machine.dumps.text import Dump, Text
from drumbeat.machine.model import Facts

MAX_BYTES = 4 << 20  # of a file that is looked at for dumps
MAX_DUMPS, MAX_DEVICES, MAX_PORTS = 64, 256, 16
MAX_LINES = 8 * MAX_DEVICES

# Reader -> words of which one must stand in the text.
READERS: Dict[Callable[[Text], Iterable[Dump]], Tuple[str, ...]] = {
    nvidia.topology: ("GPU0",),
    nvidia.query: ("Attached GPUs", "Product Name", "GPU UUID", "<nvidia_smi_log>"),
    nvidia.table: ("NVIDIA-SMI",),
    nvidia.refused: (
        "Unable to determine the device handle",
        "NVIDIA-SMI has failed",
        "Failed to initialize NVML",
        "No devices",
    ),
    amd.rocm: ("ROCm S", "(Topology) Numa", "Concise Info", "RAS Info"),
    amd.smi: ("GPU: ", "ACCESS TABLE", "LINK TYPE TABLE", "HOPS TABLE", "WEIGHT TABLE", "NUMA BW TABLE"),
    network.gids: ("n_gids_found", "INDEX"),
    network.links: ("physical_state", " ==> "),
    network.ports: ("CA '", "Infiniband device '", "hca_id"),
    network.devices: ("node GUID",),
    network.interfaces: ("link/ether", "link/infiniband", "link/loopback"),
    reports.nccl_file: ("<system", "<graphs"),
    reports.deepspeed: ("op name ......", "DeepSpeed general environment info"),
}


def read_dumps(text: str, file: str) -> Tuple[Dump, ...]:
    """Read every dump in this text; one that repeats another is left out."""
    return read(text, file)[0]


def read(text: str, file: str) -> Tuple[Tuple[Dump, ...], Tuple[Tuple[Evidence, int], ...]]:
    """Read every dump in this text; also return each passage that no reader understood: its first line, and how many it has."""
    found: Dict[str, Dump] = {}
    whole = Text(text[:MAX_BYTES])
    fitting = (reader(whole) for reader, marks in READERS.items() if any(mark in whole.whole for mark in marks))
    for dump in islice(chain.from_iterable(fitting), MAX_DUMPS):
        lines = {name: replace(line, file=file) for name, line in islice(dump.lines.items(), MAX_LINES)}
        dump = replace(dump, facts=_bounded(dump.facts))
        found.setdefault(f"{dump.kind} {dump.facts!r} {dump.notes}", replace(dump, file=file, lines=lines))
    unread = islice(whole.unread(), MAX_DUMPS)
    return tuple(found.values()), tuple((replace(line, file=file), count) for line, count in unread)


def _bounded(facts: Facts) -> Facts:
    """Limit what one node can have: untrusted text must not cost time that grows with the square of its length."""
    rdma = tuple(replace(device, ports=device.ports[:MAX_PORTS]) for device in facts.rdma[:MAX_DEVICES])
    return replace(facts, gpus=facts.gpus[:MAX_DEVICES], rdma=rdma, interfaces=facts.interfaces[:MAX_DEVICES])


def together(dumps: Iterable[Dump]) -> Dump:
    """Combine several dumps of one node: each device as all of them describe it."""
    found: Dump = Dump("", Facts(""))
    for dump in dumps:
        facts = _merged(found.facts, dump.facts)
        lines: Dict[str, Evidence] = {**dump.lines, **found.lines}
        notes, answers = found.notes + dump.notes, found.answers or dump.answers
        files = ", ".join(filter(None, (found.file, dump.file)))
        found = Dump("dumps", facts, lines, found.shown | dump.shown, notes, answers, files)
    return found


ERRORS = ("uncorrected_errors", "remapped_rows", "remap_pending", "remap_failed")  # of two dumps the later shows more


def _merged(one: Any, other: Any) -> Any:
    """Merge records field by field, devices by their name or number; the first that knows is believed, but of errors."""
    changes: Dict[str, Any] = {}
    for each in fields(one):
        mine, theirs = getattr(one, each.name), getattr(other, each.name)
        if isinstance(mine, dict):
            changes[each.name] = {**theirs, **mine}
        elif isinstance(mine, tuple) and each.name in ("gpus", "rdma", "interfaces", "ports"):
            changes[each.name] = _devices([*mine, *theirs])
        elif isinstance(mine, tuple) and each.name in ("unknown", "driver_errors"):
            changes[each.name] = tuple(dict.fromkeys((*mine, *theirs)))
        elif each.name in ERRORS and None not in (mine, theirs):
            changes[each.name] = max(mine, theirs)
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
