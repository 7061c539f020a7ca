"""Checks of the GPUs: all present, each listed once, free, and attached with the same width."""

from __future__ import annotations

import re
from typing import Dict, Iterator, List, Sequence, Tuple, Union

from drumbeat.base.text import memory as memory_text
from drumbeat.base.text import some
from drumbeat.doctor.case import Case, find, odd, seen
from drumbeat.findings.model import WARNING, Finding
from drumbeat.machine.model import CxiDevice, Gpu, RdmaDevice
from drumbeat.machine.parse import natural
from drumbeat.machine.topology import distance, nearest
from drumbeat.machine.vendors import of_program, off_the_bus

WHOLE = (None, "SPX", "N/A")  # partition modes that expose the whole GPU
FAST = ("NV", "XGMI")  # links faster than PCIe
MUCH = 0.1  # of a GPU's memory: more than the driver itself takes


def check(case: Case) -> Iterator[Finding]:
    return seen("the GPUs, as their driver and /sys show them", _check(case))


def _check(case: Case) -> Iterator[Finding]:
    gpus = case.gpus
    yield from _unreachable(case)
    if not gpus:
        if case.order.gpus:
            yield find("no-gpu", wanted=case.order.gpus)
        return
    names = sorted({gpu.name or f"unknown {gpu.vendor} GPU" for gpu in gpus})
    yield find("gpus", count=len(gpus), names=", ".join(names))
    yield from _twice(gpus)
    yield from _in_use(case, gpus)
    yield from _mixed(gpus)
    yield from _width(case, gpus)
    yield from _memory_errors(case, gpus)
    yield from _slowed(case, gpus)
    yield from _divided(case, gpus)
    yield from _between(gpus)
    yield from _numa(case, gpus)
    yield from seen("the PCI paths and NUMA nodes of GPUs and NICs", _beside(case, gpus))
    yield from _part_of_a_node(case, gpus)
    yield from seen("the kernel's log", _events(case))


def _twice(gpus: List[Gpu]) -> Iterator[Finding]:
    first: Dict[str, str] = {}  # PCI address or UUID -> its GPU
    for identity, gpu in [*((gpu.pci, gpu) for gpu in gpus), *((gpu.uuid, gpu) for gpu in gpus)]:
        if identity in first and gpu.partition in WHOLE:
            yield find("gpu-twice", first=first[identity], second=gpu.label, evidence=[identity])
            return
        if identity is not None:
            first[identity] = gpu.label


def _unreachable(case: Case) -> Iterator[Finding]:
    """Report GPUs that their driver does not reach, and a dump that shows fewer GPUs than are attached."""
    lost, labels = [], {gpu.label: gpu.title for gpu in case.gpus}
    for words in case.facts.driver_errors:
        address, colon, what = words.partition(": ")
        if colon and re.fullmatch(r"[\da-fA-F:.]{7,16}", address):
            lost.append(address)
            name = next((gpu.title for gpu in case.gpus if gpu.pci == address), f"GPU at {address}")
            yield find("gpu-lost", gpu=name, words=what, host=case.facts.host)
        elif address in labels:
            yield find("gpu-lost", "silent", gpu=labels[address], words=what, host=case.facts.host)
        else:
            yield find("gpu-driver-fails", words=words, host=case.facts.host)
    # A GPU that only a kernel log mentions is known by its address alone.
    shown = {gpu.pci for gpu in case.gpus if gpu.pci and gpu != Gpu(gpu.index, gpu.vendor, pci=gpu.pci)}
    attached = sum(case.facts.gpus_on_bus.values())
    if not case.live and attached > len(shown.union(lost)):
        yield find("gpus-missing", attached=attached, shown=len(shown), evidence=["Attached GPUs"])


def _in_use(case: Case, gpus: List[Gpu]) -> Iterator[Finding]:
    for gpu, health in ((gpu, gpu.health) for gpu in gpus if not gpu.pids and gpu.health):
        if not case.live and (health.memory_used or 0) > MUCH:
            yield find("gpu-in-use", "memory", gpu=gpu.title, share=100 * (health.memory_used or 0))
    known = [gpu for gpu in gpus if gpu.pids is not None]
    busy = [(gpu, gpu.pids) for gpu in known if gpu.pids]
    for gpu, pids in busy:
        about = {"gpu": gpu.title, "processes": "processes" if len(pids) > 1 else "process", "host": case.facts.host}
        yield find("gpu-in-use", "" if case.live else "pasted", pids=", ".join(map(str, pids)), **about)
    if known and not busy:
        yield find("gpus-free")


def _mixed(gpus: List[Gpu]) -> Iterator[Finding]:
    """Compare known names and memory; a name that a tool has cut off is not compared."""
    names = {gpu.label: gpu.name for gpu in gpus if gpu.name and not gpu.name.endswith("...")}
    sizes = {gpu.label: memory_text(gpu.memory_bytes) for gpu in gpus if gpu.memory_bytes}
    differ = next((known for known in (names, sizes) if len(set(known.values())) > 1), None)
    if differ:
        yield find("gpus-differ", evidence=[f"{gpu}: {value}" for gpu, value in differ.items()])


def _width(case: Case, gpus: List[Gpu]) -> Iterator[Finding]:
    """Check PCIe widths. Speeds are not checked: an idle GPU slows its link down."""
    links = [(gpu, gpu.link) for gpu in gpus if gpu.link is not None and gpu.link.width]
    narrow = [(gpu, link) for gpu, link in links if link.most_width and link.width and link.width < link.most_width]
    if narrow:
        link, names = narrow[0][1], _names([gpu for gpu, _ in narrow])
        yield find("pcie-narrow", gpus=names, width=link.width, most=link.most_width, host=case.facts.host)
    elif len({link.width for _, link in links}) > 1:
        yield find("pcie-unequal", evidence=[f"{gpu.label}: {link.width} lanes" for gpu, link in links])


def _memory_errors(case: Case, gpus: List[Gpu]) -> Iterator[Finding]:
    known = [(gpu, gpu.health) for gpu in gpus if gpu.health is not None]
    looked = [health for _, health in known if health.ecc is not None]
    for gpu, health in known:
        identity, host = f", {gpu.uuid}," if gpu.uuid else "", case.facts.host
        if health.remap_failed or health.uncorrected_errors:
            what = (
                "could not replace a bad row or page"
                if health.remap_failed
                else f"{health.uncorrected_errors} error{'s' * (health.uncorrected_errors != 1)}"
            )
            yield find("gpu-memory-errors", gpu=gpu.title, what=what, id=identity, host=host, severity=case.unfit)
        if health.remap_pending and not health.remap_failed:
            yield find("gpu-remap-pending", gpu=gpu.title, id=identity, host=host)
        if health.ecc is False:
            yield find("ecc-off", gpu=gpu.title)
    if looked and all(health.ecc and not health.uncorrected_errors for health in looked):
        yield find("ecc", count=len(looked))


def _slowed(case: Case, gpus: List[Gpu]) -> Iterator[Finding]:
    """Check for a power limit below the GPU's own default or that of the others, for throttling not caused by the limit itself,
    and for a GPU whose settings differ from those of the others."""
    limits = {gpu.label: gpu.health.power_limit_w for gpu in gpus if gpu.health and gpu.health.power_limit_w}
    low, usual_limit = odd(limits)
    for gpu, health in ((gpu, gpu.health) for gpu in gpus if gpu.health is not None):
        limit, usual = health.power_limit_w, health.power_default_w
        if limit and usual and limit < 0.95 * usual:
            yield find("power-limit-low", gpu=gpu.title, limit=limit, usual=usual, host=case.facts.host)
        elif not usual and limit and gpu.label in low and limit < 0.95 * (usual_limit or 0):
            yield find("power-limit-low", "odd", gpu=gpu.title, limit=limit, usual=usual_limit, host=case.facts.host)
        reasons = [reason for reason in health.throttle or () if reason != "power limit"]
        if reasons:
            yield find("gpu-throttled", gpu=gpu.title, reasons=", ".join(reasons), host=case.facts.host)

    told: Dict[str, Dict[str, str]] = {}  # setting -> GPU -> value
    for gpu in gpus:
        for name, value in (gpu.health and gpu.health.settings) or ():
            told.setdefault(name, {})[gpu.label] = value
    for name, values in told.items():
        for label in odd(values)[0]:
            about = {"gpu": label, "setting": name, "value": values[label], "usual": odd(values)[1]}
            yield find("gpu-set-apart", host=case.facts.host, **about)


def _divided(case: Case, gpus: List[Gpu]) -> Iterator[Finding]:
    divided = [gpu for gpu in gpus if gpu.mig or gpu.partition not in WHOLE]
    if divided:
        ways = ", ".join(sorted({"MIG" if gpu.mig else str(gpu.partition) for gpu in divided}))
        variant, severity = ("mig", case.breaking) if divided[0].mig else ("", WARNING)
        yield find("gpu-divided", variant, gpus=_names(divided), ways=ways, severity=severity)


def _names(gpus: Sequence[Gpu]) -> str:
    return ", ".join(gpu.label if len(gpus) > 2 else gpu.title for gpu in gpus)


def _between(gpus: List[Gpu]) -> Iterator[Finding]:
    """Report fast links that only some GPU pairs have, and memory that another GPU cannot reach."""
    pairs = [(one, other) for one in gpus for other in gpus if one.index < other.index]
    words = [one.links.get(f"GPU {other.index}", "") for one, other in pairs]
    without = [pair for pair, word in zip(pairs, words) if word and not word.startswith(FAST)]
    if without and any(word.startswith(FAST) for word in words):
        lost = 2 * len(without) < sum(word.startswith(FAST) for word in words) or _alone(gpus)
        code = "xgmi-partial" if "XGMI" in words else "nvlink-partial"
        yield find(code, "lost" if lost else "", pairs=_pairs(without))
    closed = [(one, other) for one, other in pairs if other.index in one.no_access or one.index in other.no_access]
    if closed:
        yield find("gpu-peer-access-off", pairs=_pairs(closed))


def _alone(gpus: List[Gpu]) -> bool:
    """Return true if one GPU has no fast link while three others or more are all joined: boards are bridged in pairs or fours."""
    links = {gpu.index: sum(word.startswith(FAST) for word in gpu.links.values()) for gpu in gpus}
    joined = [count for count in links.values() if count]
    return len(joined) == len(links) - 1 >= 3 and all(count == len(joined) - 1 for count in joined)


def _pairs(pairs: Sequence[Tuple[Gpu, Gpu]]) -> str:
    return some([f"{one.label}-{other.label}" for one, other in pairs], 6)


def _numa(case: Case, gpus: List[Gpu]) -> Iterator[Finding]:
    several = len([node for node, cpus in case.facts.cpus.numa.items() if cpus]) > 1
    unknown = [gpu for gpu in gpus if gpu.numa == -1 or (gpu.numa is None and several)]
    if unknown:
        yield find("gpu-numa-unknown", gpus=_names(unknown), severity=case.handled)
    gpus = [gpu for gpu in gpus if gpu.index >= 0]
    order = [gpu.numa for gpu in sorted(gpus, key=lambda gpu: gpu.index) if gpu.numa is not None and gpu.numa >= 0]
    if len(order) == len(gpus) and order != sorted(order) and not _from_file(case):
        yield find("gpu-order-not-numa-order", first=order[0], order=", ".join(map(str, order)))


def _from_file(case: Case) -> bool:
    """Return true for NCCL's own topology file, which may have neither GPU numbers nor card names."""
    return "nccl-file" in (case.shown or ())


def _beside(case: Case, gpus: List[Gpu]) -> Iterator[Finding]:
    """Report GPUs far from any NIC, and NICs near no GPU."""
    facts = case.facts
    paths = [gpu.pci_path.split("/") for gpu in gpus if gpu.pci_path]
    alike = len(paths) == len(gpus) > 1 and len({gpu.numa for gpu in gpus}) == 1
    if alike and all(len(path) < 3 for path in paths) and len(facts.rdma) > 1 and not facts.virtual_machine:
        yield find("topology-flat")
    nics: Sequence[Union[RdmaDevice, CxiDevice]] = facts.cxi or (case.here.nics.devices if case.live else facts.rdma)
    if case.live and not case.several_nodes:
        return
    near = {gpu.index: nearest(gpu, nics) for gpu in gpus}
    places = {gpu.index: distance(gpu, near[gpu.index][0]) for gpu in gpus if near[gpu.index]}
    far = [gpu for gpu in gpus if places.get(gpu.index) == "SYS"]
    if far:
        yield find("gpu-far-from-nic", gpus=_names(far), severity=case.handled)
    used = {one.name for gpu in gpus if gpu not in far and places.get(gpu.index) for one in near[gpu.index]}
    known = [device.name for device in nics if any(distance(gpu, device) for gpu in gpus)]
    idle = [name for name in known if name not in used]
    cut = any(words.startswith("gpus:") for words in facts.unknown)  # an unread GPU may have the NIC beside it
    if used and idle and not cut and not _from_file(case):
        unnamed = any(re.fullmatch(r"NIC\d+", name) for name in used)
        keep = ",".join(sorted(used, key=natural))
        yield find("nic-near-no-gpu", "unnamed" if unnamed else "", nics=", ".join(idle), keep=keep)


def _part_of_a_node(case: Case, gpus: List[Gpu]) -> Iterator[Finding]:
    """Warn if a pod has only some of its machine's GPUs: other pods of the job may be on the same machine."""
    if not case.facts.identity.own_home or not case.several_nodes:
        return
    for vendor, whole in case.facts.gpus_on_bus.items():
        here = len([gpu for gpu in gpus if gpu.vendor == vendor])
        if 0 < here < whole:
            yield find("part-of-a-node", here=here, whole=whole)


def _events(case: Case) -> Iterator[Finding]:
    mine = [(gpu, gpu.pci[:-2].lower()) for gpu in case.gpus if gpu.pci]  # Xid lines omit the PCI function
    events = [(text, gpu) for text in case.facts.gpu_events or () for gpu, address in mine if address in text]
    ours, faults = ([each for each in events if of_program(each[0]) == own] for own in (False, True))
    for code, found, most in (("gpu-events", ours, 8), ("gpu-program-faults", faults, 4)):
        if found:
            texts, gpus = [text for text, _ in found], [*{gpu.index: gpu for _, gpu in found}.values()]
            about = {"count": len(texts), "gpus": _names(gpus), "last": texts[-1], "host": case.facts.host}
            lost = [(text, gpu) for text, gpu in found if off_the_bus(text)]
            if lost:
                gone = _names([*{gpu.index: gpu for _, gpu in lost}.values()])
                yield find("gpu-lost", "event", gpu=gone, host=case.facts.host, last=lost[-1][0], severity=case.unfit,
                           evidence=[text for text, _ in lost[-most:]])  # fmt: skip
            if len(lost) < len(found):
                yield find(code, evidence=texts[-most:], **about)
