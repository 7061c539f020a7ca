"""Which GPU each local rank drives, the cores beside it and its nearest NIC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional, Tuple

from drumbeat.facts.model import Facts, Gpu
from drumbeat.finding import Finding
from drumbeat.order import Order
from drumbeat.plan.cores import divide, mask, ranges, usable_cores


@dataclass(frozen=True)
class Slot:
    """The place of one local rank on its node."""

    local_rank: int
    gpu: Optional[int] = None  # as the vendor's runtime counts them
    cpus: Tuple[int, ...] = ()  # empty: no affinity is set
    nic: Optional[str] = None
    why: str = ""

    @property
    def mask(self) -> str:
        return mask(self.cpus)

    @property
    def cores(self) -> str:
        return ranges(self.cpus)


@dataclass(frozen=True)
class Binding:
    slots: Tuple[Slot, ...]
    threads: int  # for OMP_NUM_THREADS: cores of the smallest slot
    threads_why: str
    findings: Tuple[Finding, ...] = ()


def binding(order: Order, facts: Facts, node: int) -> Binding:
    gpus = [gpu for gpu in facts.gpus if not gpu.integrated]
    ranks = order.ranks_per_node or len(gpus) or 1
    # Emulated nodes are processes of one machine: its cores and GPUs are shared out among all of them.
    first, total = (node * ranks, order.nodes * ranks) if order.emulated else (0, ranks)
    cores = usable_cores(facts.cpus)
    if len(cores) < total:
        each = max(1, len(cores) // total)
        words = f"{total} ranks on {len(cores)} cores: they share them, so no affinity is set"
        slots = [Slot(i, _gpu(gpus, first + i), why=words) for i in range(ranks)]
        return Binding(tuple(slots), each, words)
    shares = divide(cores, total)[first : first + ranks]
    slots = []
    for i, share in enumerate(shares):
        cpus = tuple(sorted(cpu for core in share for cpu in core.cpus))
        slots.append(Slot(i, _gpu(gpus, first + i), cpus, why=f"share {first + i + 1} of {total} of the usable cores"))
    each = min(len(share) for share in shares)
    return Binding(tuple(slots), each, f"the cores each rank is bound to: {each}")


def _gpu(gpus: List[Gpu], position: int) -> Optional[int]:
    return gpus[position].index if position < len(gpus) else None
