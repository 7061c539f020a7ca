"""Checks of the GPUs: are they all there, each once, free, and attached as wide as their neighbours?"""

from __future__ import annotations

from typing import Dict, Iterator, List

from drumbeat.doctor.case import Case, bad, ok, seen
from drumbeat.findings.model import ERROR, INFO, WARNING, Finding
from drumbeat.machine.model import Gpu, of_program


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
    yield from _part_of_a_node(case, gpus)
    yield from seen("the kernel's log", _events(case))


def _twice(gpus: List[Gpu]) -> Iterator[Finding]:
    for what in ("pci", "uuid"):
        seen: Dict[str, int] = {}
        for gpu in gpus:
            identity = getattr(gpu, what)
            if identity is not None and identity in seen:
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
            f"GPU {', '.join(str(one.index) for one, _ in narrow)} has {link.width} of {link.most_width} PCIe lanes",
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
    divided = [gpu.index for gpu in gpus if gpu.mig]
    if divided:
        yield bad(
            "gpu-divided", case.breaking, f"GPU {', '.join(map(str, divided))} is divided into instances (MIG)",
            "a process sees one instance; NCCL cannot join instances of one GPU, nor use NVLink between them",
            "ask for whole GPUs, or run one rank alone",
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
