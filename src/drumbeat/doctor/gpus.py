"""Checks of the GPUs: are they all there, each once, free, and attached as wide as their neighbours?"""

from __future__ import annotations

from typing import Dict, Iterator, List

from drumbeat.doctor.case import Case, bad, ok
from drumbeat.facts.model import Gpu
from drumbeat.finding import ERROR, INFO, WARNING, Finding


def check(case: Case) -> Iterator[Finding]:
    gpus = case.gpus
    if not gpus:
        if case.order.gpus:
            words = f"the job asks for {case.order.gpus} GPUs a node, and none was found"
            yield bad("no-gpu", ERROR, words, "", "another partition, or start the container with GPUs (--nv, --rocm)")
        return
    names = sorted({gpu.name or f"unknown {gpu.vendor} GPU" for gpu in gpus})
    yield ok("gpus", f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}: {', '.join(names)}")
    yield from _twice(gpus)
    yield from _in_use(case, gpus)
    yield from _mixed(gpus)
    yield from _width(case, gpus)


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
                    "one rank a GPU; look at how the container or scheduler hands devices out",
                    identity,
                )
                return
            if identity is not None:
                seen[identity] = gpu.index


def _in_use(case: Case, gpus: List[Gpu]) -> Iterator[Finding]:
    known = [gpu for gpu in gpus if gpu.pids is not None]
    busy = [gpu for gpu in known if gpu.pids]
    for gpu in busy:
        yield bad(
            "gpu-in-use",
            WARNING,
            f"GPU {gpu.index} is used by process {', '.join(map(str, gpu.pids or ()))} already",
            "its memory and time are shared: out of memory, or a slow rank",
            "end it if it is yours, else leave this node out",
            support=f"foreign processes on the GPUs of {case.facts.host}: {', '.join(map(str, gpu.pids or ()))}",
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
    """S1-02: balanced lanes. Width, not speed: an idle GPU slows its link down."""
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
