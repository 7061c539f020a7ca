"""Checks of the GPUs: are they all there, each once, free, and attached as wide as their neighbours?"""

from __future__ import annotations

import re
from typing import Dict, Iterator, List, Sequence, Tuple, Union

from drumbeat.doctor.case import Case, bad, ok, seen
from drumbeat.findings.model import ERROR, INFO, WARNING, Finding
from drumbeat.machine.distance import distance, nearest
from drumbeat.machine.model import CxiDevice, Gpu, RdmaDevice
from drumbeat.machine.vendors import of_program
from drumbeat.plan.network import natural

WHOLE = (None, "SPX", "N/A")  # partitions that are the whole GPU
FAST = ("NV", "XGMI")  # links that are faster than PCIe


def check(case: Case) -> Iterator[Finding]:
    return seen("the GPUs, as their driver and /sys show them", _check(case))


def _check(case: Case) -> Iterator[Finding]:
    gpus = case.gpus
    if not gpus:
        if case.order.gpus:
            words = f"the job asks for {case.order.gpus} GPUs per node, and none was found"
            yield bad("no-gpu", ERROR, words, "", "another partition, or start the container with GPUs (--nv, --rocm)")
        return
    names = sorted({gpu.name or f"unknown {gpu.vendor} GPU" for gpu in gpus})
    yield ok("gpus", f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}: {', '.join(names)}")
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
    for what in ("pci", "uuid"):
        seen: Dict[str, int] = {}
        for gpu in gpus:
            identity = getattr(gpu, what)
            if identity is not None and identity in seen and gpu.partition in WHOLE:
                yield bad(
                    "gpu-twice",
                    ERROR,
                    f"GPU {seen[identity]} and GPU {gpu.index} are one and the same",
                    "NCCL refuses two ranks on one GPU ('Duplicate GPU detected')",
                    "one rank per GPU; look at how the container or scheduler hands devices out",
                    identity,
                )
                return
            if identity is not None:
                seen[identity] = gpu.index


def _in_use(case: Case, gpus: List[Gpu]) -> Iterator[Finding]:
    known = [gpu for gpu in gpus if gpu.pids is not None]
    busy = [gpu for gpu in known if gpu.pids]
    for gpu in busy:
        pids, several = ", ".join(map(str, gpu.pids or ())), len(gpu.pids or ()) > 1
        yield bad(
            "gpu-in-use",
            WARNING,
            f"GPU {gpu.index} is used by {'processes' if several else 'process'} {pids} already",
            "its memory and time are shared: out of memory, or a slow rank",
            f"end {'them if they are' if several else 'it if it is'} yours, else leave this node out",
            support=f"foreign processes on the GPUs of {case.facts.host}: {pids}",
        )
    if known and not busy:
        yield ok("gpus-free", "no other process uses the GPUs")


def _mixed(gpus: List[Gpu]) -> Iterator[Finding]:
    kinds = sorted({f"{gpu.name or 'unknown'} {gpu.memory_bytes or 0}" for gpu in gpus})
    if len(kinds) > 1:
        yield bad(
            "gpus-differ",
            WARNING,
            "the GPUs of this node are not alike",
            "the slowest and smallest of them sets the pace and the batch size",
            "choose like ones with CUDA_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES",
            *(f"GPU {gpu.index}: {gpu.name or 'unknown'}" for gpu in gpus),
        )


def _width(case: Case, gpus: List[Gpu]) -> Iterator[Finding]:
    """Width, not speed: an idle GPU slows its link down."""
    links = [(gpu, gpu.link) for gpu in gpus if gpu.link is not None and gpu.link.width]
    narrow = [(gpu, link) for gpu, link in links if link.most_width and link.width and link.width < link.most_width]
    if narrow:
        gpu, link = narrow[0]
        yield bad(
            "pcie-narrow",
            WARNING,
            f"{_names([one for one, _ in narrow])} has {link.width} of {link.most_width} PCIe lanes",
            "copies to and from it take longer than the others'",
            support=f"look at the slots or risers of {case.facts.host}: lanes are missing",
        )
    elif len({link.width for _, link in links}) > 1:
        widths = [f"GPU {gpu.index}: {link.width} lanes" for gpu, link in links]
        yield bad("pcie-unequal", INFO, "the GPUs are attached with different numbers of lanes", "", "", *widths)


def _memory_errors(case: Case, gpus: List[Gpu]) -> Iterator[Finding]:
    looked = [gpu for gpu in gpus if gpu.health is not None and gpu.health.ecc is not None]
    for gpu in gpus:
        health = gpu.health
        if health is None:
            continue
        if health.remap_failed or health.uncorrected_errors:
            what = "could not replace a bad row" if health.remap_failed else f"{health.uncorrected_errors} errors"
            yield bad(
                "gpu-memory-errors", WARNING, f"GPU {gpu.index}: uncorrected memory errors ({what})",
                "a rank on it will die, or has died", "leave this node out",
                support=f"GPU {gpu.index} ({gpu.uuid or gpu.pci}) of {case.facts.host} has uncorrected memory errors",
            )  # fmt: skip
        elif health.remap_pending:
            yield bad(
                "gpu-remap-pending", WARNING, f"GPU {gpu.index}: a bad memory row is replaced at the next reset",
                "until then the row stays in use", "leave this node out if you can",
                support=f"GPU {gpu.index} ({gpu.uuid or gpu.pci}) of {case.facts.host} needs a reset: a row remap is pending",
            )  # fmt: skip
        if health.ecc is False:
            yield bad("ecc-off", INFO, f"GPU {gpu.index}: ECC is off", "memory errors go unnoticed")
    if looked and all(gpu.health and gpu.health.ecc and not gpu.health.uncorrected_errors for gpu in looked):
        yield ok("ecc", f"ECC is on, no uncorrected error on {len(looked)} GPU{'s' if len(looked) > 1 else ''}")


def _slowed(case: Case, gpus: List[Gpu]) -> Iterator[Finding]:
    """A power limit is only low beside the GPU's own default, and throttling counts where it is not the limit itself."""
    for gpu in gpus:
        health = gpu.health
        if health is None:
            continue
        limit, usual = health.power_limit_w, health.power_default_w
        if limit and usual and limit < 0.95 * usual:
            yield bad(
                "power-limit-low", WARNING, f"GPU {gpu.index} is limited to {limit:g} W; its default is {usual:g} W",
                "it runs slower than its neighbours, and all ranks wait for the slowest", "",
                support=f"GPU {gpu.index} of {case.facts.host}: power limit {limit:g} W, default {usual:g} W",
            )  # fmt: skip
        reasons = [reason for reason in health.throttle or () if reason != "power limit"]
        if reasons:
            yield bad(
                "gpu-throttled", WARNING, f"GPU {gpu.index} is slowed down now: {', '.join(reasons)}",
                "heat or a power supply; all ranks wait for the slowest", "leave this node out if it stays",
                support=f"GPU {gpu.index} of {case.facts.host} is throttled: {', '.join(reasons)}",
            )  # fmt: skip


def _divided(case: Case, gpus: List[Gpu]) -> Iterator[Finding]:
    divided = [gpu for gpu in gpus if gpu.mig or gpu.partition not in WHOLE]
    if divided:
        ways = ", ".join(sorted({"MIG" if gpu.mig else str(gpu.partition) for gpu in divided}))
        amd = not divided[0].mig
        yield bad(
            "gpu-divided", WARNING if amd else case.breaking, f"{_names(divided)} is divided ({ways})",
            "each part has some of the memory and of the compute units"
            + ("" if amd else "; NCCL cannot join instances of one GPU, nor use NVLink between them"),
            "count ranks by parts, or ask for SPX (amd-smi set --compute-partition, root only)"
            if amd
            else "ask for whole GPUs, or run one rank alone",
        )  # fmt: skip


def _names(gpus: Sequence[Gpu]) -> str:
    return ", ".join(f"GPU {gpu.index}" for gpu in gpus)


def _between(gpus: List[Gpu]) -> Iterator[Finding]:
    """Links that only some of the GPUs have, and memory that another GPU cannot reach."""
    pairs = [(one, other) for one in gpus for other in gpus if one.index < other.index]
    words = [one.links.get(f"GPU {other.index}", "") for one, other in pairs]
    without = [pair for pair, word in zip(pairs, words) if word and not word.startswith(FAST)]
    if without and any(word.startswith(FAST) for word in words):
        kind = "XGMI" if "XGMI" in words else "NVLink"
        named = f"no {kind} between {_pairs(without)}"
        yield bad(f"{kind.lower()}-partial", INFO, named, "these pairs talk over PCIe or the CPUs, which is slower")
    closed = [(one, other) for one, other in pairs if other.index in one.no_access or one.index in other.no_access]
    if closed:
        yield bad(
            "gpu-peer-access-off", WARNING, f"GPUs cannot access each other's memory: {_pairs(closed)}",
            "no XGMI link, and PCIe peer access is off (IOMMU, ACS, or large BAR disabled)",
            "RCCL goes through host memory between them; iommu=pt and large BAR in the firmware switch it on",
        )  # fmt: skip


def _pairs(pairs: Sequence[Tuple[Gpu, Gpu]]) -> str:
    some = ", ".join(f"GPU {one.index}-GPU {other.index}" for one, other in pairs[:6])
    return some + (f" and {len(pairs) - 6} more" if len(pairs) > 6 else "")


def _numa(case: Case, gpus: List[Gpu]) -> Iterator[Finding]:
    several = len([node for node, cpus in case.facts.cpus.numa.items() if cpus]) > 1
    unknown = [gpu for gpu in gpus if gpu.numa == -1 or (gpu.numa is None and several)]
    if unknown:
        yield bad(
            "gpu-numa-unknown", case.handled, f"the NUMA node of {_names(unknown)} is not known",
            "a virtual machine or a firmware setting hides it",
            "ranks cannot be bound beside these GPUs by what the system says",
        )  # fmt: skip
    order = [gpu.numa for gpu in sorted(gpus, key=lambda gpu: gpu.index) if gpu.numa is not None and gpu.numa >= 0]
    if len(order) == len(gpus) and order != sorted(order) and not _from_file(case):
        yield bad(
            "gpu-order-not-numa-order", INFO, f"GPU 0 is on NUMA {order[0]}: the order of the GPUs is not that of the cores",
            "binding rank 0 to the first cores puts it far from its GPU",
            f"NUMA nodes for ranks 0, 1, ...: {', '.join(map(str, order))}",
        )  # fmt: skip


def _from_file(case: Case) -> bool:
    """NCCL's own topology file: it need not number the GPUs, nor name the cards."""
    return "nccl-file" in (case.shown or ())


def _beside(case: Case, gpus: List[Gpu]) -> Iterator[Finding]:
    """GPUs without a NIC on their side, and NICs without a GPU on theirs."""
    facts = case.facts
    paths = [gpu.pci_path.split("/") for gpu in gpus if gpu.pci_path]
    alike = len(paths) == len(gpus) > 1 and len({gpu.numa for gpu in gpus}) == 1
    if alike and all(len(path) < 3 for path in paths) and len(facts.rdma) > 1 and not facts.virtual_machine:
        yield bad(
            "topology-flat", INFO, "no PCIe switches: every GPU hangs directly below one CPU",
            "a board without any, or a virtual machine that hides them: NCCL cannot tell which NIC is near which GPU",
            "in a virtual machine, give NCCL_TOPO_FILE the provider's file for this kind of machine",
        )  # fmt: skip
    nics: Sequence[Union[RdmaDevice, CxiDevice]] = facts.cxi or (case.here.nics.devices if case.live else facts.rdma)
    if case.live and not case.several_nodes:
        return
    near = {gpu.index: nearest(gpu, nics) for gpu in gpus}
    places = {gpu.index: distance(gpu, near[gpu.index][0]) for gpu in gpus if near[gpu.index]}
    far = [gpu for gpu in gpus if places.get(gpu.index) == "SYS"]
    if far:
        yield bad(
            "gpu-far-from-nic", case.handled, f"no NIC is on the side of {_names(far)}",
            "their traffic crosses the link between the CPUs, and GPUDirect RDMA is off by default over it",
            "NCCL goes through another GPU's NIC over NVLink (PXN) where there is NVLink; else expect less bandwidth",
        )  # fmt: skip
    used = {one.name for gpu in gpus if gpu not in far and places.get(gpu.index) for one in near[gpu.index]}
    known = [device.name for device in nics if any(distance(gpu, device) for gpu in gpus)]
    idle = [name for name in known if name not in used]
    cut = any(words.startswith("gpus:") for words in facts.unknown)  # another GPU may have the NIC beside it
    if used and idle and not cut and not _from_file(case):
        named = not any(re.fullmatch(r"NIC\d+", name) for name in used)
        keep = ",".join(sorted(used, key=natural))
        yield bad(
            "nic-near-no-gpu", INFO, f"nearest to no GPU: {', '.join(idle)}",
            "mostly cards for storage or management",
            f"NCCL_IB_HCA={keep} uses the cards beside the GPUs only"
            if named
            else "the NIC legend below the table names the devices; it is not in this text",
        )  # fmt: skip


def _part_of_a_node(case: Case, gpus: List[Gpu]) -> Iterator[Finding]:
    """Pods of one job may be put on one machine or on several, and nobody says which."""
    if not case.facts.identity.own_home or not case.several_nodes:
        return
    for vendor, whole in case.facts.gpus_on_bus.items():
        here = len([gpu for gpu in gpus if gpu.vendor == vendor])
        if 0 < here < whole:
            yield bad(
                "part-of-a-node",
                WARNING,
                f"this pod has {here} of its machine's {whole} GPUs",
                "GPUs of two pods talk over the network, also where both pods are on one machine",
                f"pods with all {whole} GPUs, and fewer of them",
            )


def _events(case: Case) -> Iterator[Finding]:
    mine = {(gpu.pci or "")[:-2].lower() for gpu in case.gpus if gpu.pci}  # Xid lines leave the function out
    ours = [text for text in case.facts.gpu_events or () if any(address and address in text for address in mine)]
    faults = [text for text in ours if of_program(text)]
    ours = [text for text in ours if text not in faults]
    if ours:
        yield bad(
            "gpu-events", WARNING, f"the driver reported {len(ours)} errors of these GPUs since the machine was started",
            "they may be old; the kernel's log does not say which job met them", "leave this node out if a rank dies here",
            *ours[-8:], support=f"{case.facts.host}: {ours[-1]}",
        )  # fmt: skip
    if faults:
        yield bad(
            "gpu-program-faults", INFO, "programs have made errors on these GPUs since the machine was started",
            "an illegal access or a process that was killed: mostly the program's fault, and not the GPU's",
            "a GPU is suspect if other programs meet the same on it", *faults[-4:],
        )  # fmt: skip
