"""Facts from output that people paste beside a log: `ibstat`, `nvidia-smi`, `ip addr` and the like.

A text may hold several dumps. A reader runs if one of its marks occurs in the text; passages that no reader recognises are
reported as unread. Readers give the same facts as a live node (None is unknown); `doctor` judges both.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from itertools import chain, count, islice
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from drumbeat.findings.model import Evidence
from drumbeat.machine.dumps import amd, network, nvidia
from drumbeat.machine.dumps.text import Dump, Text
from drumbeat.machine.model import Facts, Gpu, Limits, RdmaDevice
from drumbeat.machine.parse import pci_address
from drumbeat.machine.software import FrameworkAnswers
from drumbeat.machine.vendors import VENDORS, recent

# NCCL's topology file, the kernel's log, and ds_report.
#
# The file (NCCL_TOPO_FILE, NCCL_TOPO_DUMP_FILE) is read with a small scanner, not an XML parser: the text is untrusted, and
# entities have no business in it.


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
    for number, match in enumerate(_TAG.finditer(text, start)):
        closing, tag, rest, empty = match.groups()
        if number > _MAX_TAGS or (closing and tag == "system"):
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


MAX_BYTES = 4 << 20  # part of a file that is searched for dumps
MAX_DUMPS, MAX_DEVICES, MAX_PORTS = 64, 256, 16
MAX_LINES = 8 * MAX_DEVICES

# Reader -> words, one of which must occur in the text.
READERS: Dict[Callable[[Text], Iterable[Dump]], Tuple[str, ...]] = {
    nvidia.topology: ("GPU0",),
    nvidia.query: ("Attached GPUs", "Product Name", "GPU UUID", "<nvidia_smi_log>"),
    nvidia.table: ("NVIDIA-SMI",),
    nvidia.rows: ("pci.bus_id", "gpu_bus_id", "uuid, ", "index, "),
    nvidia.listed: ("(UUID: GPU-",),
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
    nccl_file: ("<system", "<graphs"),
    kernel_log: tuple(vendor.kernel_mark for vendor in VENDORS if vendor.kernel_mark),
    deepspeed: ("op name ......", "DeepSpeed general environment info"),
}


def read_dumps(text: str, file: str) -> Tuple[Dump, ...]:
    """Read every dump in this text but a kernel log, which `diagnose` reads as a log; repeated dumps are left out."""
    return tuple(dump for dump in read(text, file)[0] if dump.kind != KERNEL_LOG)


def read(text: str, file: str) -> Tuple[Tuple[Dump, ...], Tuple[Tuple[Evidence, int], ...]]:
    """Read every dump in this text; also return each passage that no reader understood: its first line and line count."""
    parts = _by_host(text[:MAX_BYTES]) or [("", text, range(text.count("\n") + 1))]
    each = [_read(part, file, host, numbers) for host, part, numbers in parts]
    return tuple(chain.from_iterable(dumps for dumps, _ in each)), tuple(chain.from_iterable(rest for _, rest in each))


_PREFIX = re.compile(r"([A-Za-z][\w.-]{0,60}): ?(?=.*\S)")
MAX_HOSTS = 16


def _by_host(text: str) -> List[Tuple[str, str, Sequence[int]]]:
    """Split output of pdsh or clush (`host: line`) by host, with the original line numbers; [] for other texts."""
    lines = text.split("\n")
    heads = [_PREFIX.match(line) for line in lines]
    own: Dict[str, List[int]] = {}
    for number, head in enumerate(heads):
        if head:
            own.setdefault(head[1], []).append(number)
        elif len(lines[number].split()) > 1:
            return []
    if len(own) > MAX_HOSTS or min(map(len, own.values()), default=0) < 3:
        return []
    return [
        (host, "\n".join(lines[n][head.end() :] for n in numbers if (head := heads[n])), numbers)
        for host, numbers in own.items()
    ]


def _read(
    text: str, file: str, host: str, numbers: Sequence[int]
) -> Tuple[Tuple[Dump, ...], Tuple[Tuple[Evidence, int], ...]]:
    def placed(line: Evidence) -> Evidence:
        return replace(line, file=file, line=numbers[line.line - 1] + 1 if line.line else None)

    found: Dict[str, Dump] = {}
    whole = Text(text[:MAX_BYTES])
    fitting = (reader(whole) for reader, marks in READERS.items() if any(mark in whole.whole for mark in marks))
    for dump in islice(chain.from_iterable(fitting), MAX_DUMPS):
        lines = {name: placed(line) for name, line in islice(dump.lines.items(), MAX_LINES)}
        first = min((line.line or 1 for line in dump.lines.values()), default=1)
        facts = dump.facts  # untrusted text must not cause quadratic run time: the devices of one node are limited
        rdma = tuple(replace(device, ports=device.ports[:MAX_PORTS]) for device in facts.rdma[:MAX_DEVICES])
        gpus, interfaces = facts.gpus[:MAX_DEVICES], facts.interfaces[:MAX_DEVICES]
        facts = replace(facts, host=host or whole.host(first), gpus=gpus, rdma=rdma, interfaces=interfaces)
        dump = replace(dump, facts=facts)
        found.setdefault(f"{dump.kind} {dump.facts!r} {dump.notes}", replace(dump, file=file, lines=lines))
    unread = islice(whole.unread(), MAX_DUMPS)
    return tuple(found.values()), tuple((placed(line), count) for line, count in unread)


def by_node(dumps: Sequence[Dump]) -> List[List[Dump]]:
    """Group dumps that are judged together: those of one node, with GPUs numbered alike.

    A second dump of the same kind is another node, or another moment. A dump whose GPUs cannot be matched stays alone.
    """
    hosts = [dump.facts.host for dump in dumps]
    if len({*hosts} - {""}) > 1:
        return [group for host in dict.fromkeys(hosts) for group in by_node([d for d in dumps if d.facts.host == host])]
    dumps, rest = list(dumps), []
    groups: List[List[int]] = []

    def identified(n: int) -> Tuple[int, bool, int]:
        gpus = dumps[n].facts.gpus
        return -sum(bool(gpu.pci or gpu.uuid) for gpu in gpus), any(gpu.index < 0 for gpu in gpus), -len(gpus)

    for n in sorted(range(len(dumps)), key=identified):  # the first dump's numbers are kept
        if not dumps[n].facts.gpus:
            rest.append(n)
            continue
        for group in groups:
            known = together(dumps[other] for other in group).facts.gpus
            numbers = same_gpus(known, dumps[n].facts.gpus)
            if numbers is not None and dumps[n].kind not in [dumps[other].kind for other in group]:
                dumps[n] = _renumbered(dumps[n], numbers, known)
                group.append(n)
                break
        else:
            groups.append([n])
    kinds = [dump.kind for dump in dumps]
    if len(set(kinds)) < len(kinds):  # nothing shows which node a list of NICs belongs to
        groups += [[n] for n in rest]
    else:
        main = max(groups, key=lambda group: max(len(dumps[n].facts.gpus) for n in group), default=[])
        main += rest
        groups += [main] if main and main not in groups else []
    return [[dumps[n] for n in sorted(group)] for group in sorted(groups, key=min)]


def same_gpus(known: Sequence[Gpu], others: Sequence[Gpu]) -> Optional[Dict[int, int]]:
    """Match the GPUs of two dumps by PCI address, then by UUID: number of each -> its number in `known`. None: no match.

    Numbers decide only if one side shows neither. A program that sees some of the GPUs (CUDA_VISIBLE_DEVICES, a container)
    counts from 0, so numbers from 0 on are the node's only if both sides have as many.
    """
    if {gpu.vendor for gpu in (*known, *others)} - {"unknown", known[0].vendor}:
        return None
    if all(gpu.pci or gpu.uuid for gpu in known) and all(gpu.pci or gpu.uuid for gpu in others):
        keys = {key: gpu for gpu in known for key in (gpu.pci, gpu.uuid) if key}
        pairs = [(keys.get(other.pci or "") or keys.get(other.uuid or ""), other) for other in others]
        if not any(mine for mine, _ in pairs):
            return None
        if any(mine and mine.uuid and other.uuid and mine.uuid != other.uuid for mine, other in pairs):
            return None  # another node with the same GPU model
        free = count(min(0, *(gpu.index for gpu in known)) - 1, -1)
        return {other.index: mine.index if mine else next(free) for mine, other in pairs}
    mine, theirs = ({gpu.index for gpu in each} for each in (known, others))
    few, many = sorted((mine, theirs), key=len)
    if min(few | many) < 0 or not (few == many or (few < many and few != set(range(len(few))))):
        return None
    return {index: index for index in theirs}


def _renumbered(dump: Dump, numbers: Dict[int, int], known: Sequence[Gpu]) -> Dump:
    places = {gpu.index: gpu for gpu in known}
    gpus = [replace(gpu, index=numbers[gpu.index]) for gpu in dump.facts.gpus]
    labels = {old.label: new.label for old, new in zip(dump.facts.gpus, gpus)}

    def name(text: str) -> str:
        return _GPU_NAME.sub(lambda match: labels.get(match[0], match[0]), text)

    gpus = [
        replace(
            gpu,
            pci=gpu.pci or (places[gpu.index].pci if gpu.index in places else None),
            links={name(key): word for key, word in gpu.links.items()},
            no_access=tuple(numbers.get(index, index) for index in gpu.no_access),
        )
        for gpu in gpus
    ]
    errors, unknown = (tuple(map(name, words)) for words in (dump.facts.driver_errors, dump.facts.unknown))
    facts = replace(dump.facts, gpus=tuple(gpus), driver_errors=errors, unknown=unknown)
    lines = {name(key): line for key, line in dump.lines.items()}
    return replace(dump, facts=facts, lines=lines, notes=tuple(map(name, dump.notes)))


_GPU_NAME = re.compile(r"(?<![\w-])GPU (?:\d+|at [0-9a-fA-F:.]{7,16}|at GPU-[\w-]+)(?![\w])")


def together(dumps: Iterable[Dump]) -> Dump:
    """Combine several dumps of one node: each device gets the fields of all of them."""
    found: Dump = Dump("", Facts(""))
    for dump in dumps:
        facts = _merged(found.facts, dump.facts)
        lines: Dict[str, Evidence] = {**dump.lines, **found.lines}
        notes, answers = found.notes + dump.notes, found.answers or dump.answers
        files = ", ".join(filter(None, (found.file, dump.file)))
        found = Dump("dumps", facts, lines, found.shown | dump.shown, notes, answers, files)
    return found


ERRORS = ("uncorrected_errors", "remapped_rows", "remap_pending", "remap_failed")  # the larger of two counts wins


def _merged(one: Any, other: Any) -> Any:
    """Merge records field by field, and devices by name or number. The first known value wins; of error counts, the larger
    one."""
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
