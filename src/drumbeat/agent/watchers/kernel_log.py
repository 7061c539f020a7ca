"""Finds broken GPUs of this job in what GPU drivers write to the kernel's log during an attempt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from drumbeat.agent.watchers.contract import Action, Emit, Saw, Warn
from drumbeat.base.regex import regex
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import Finding
from drumbeat.inspector.kernel_log import KernelLogReader
from drumbeat.machine.model import Gpu
from drumbeat.machine.vendors import kernel_event
from drumbeat.machine.vendors.contract import GpuEvent, place

find = Catalog("watchers")
PCIE, FAULT = "pcie-error", "gpu-app-fault"
_PCIE = regex(
    r"\b([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2})\.[0-7]: (?:AER: )?PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Fatal\)"
)


def gpu_failure(text: str) -> Optional[GpuEvent]:
    """Return the event of a line that reports a broken GPU; None for any other line."""
    event = kernel_event(text)
    if event and event.code:
        return event
    pcie = _PCIE.search(text)
    return GpuEvent(text, place(pcie.group(1)), PCIE, "had a fatal PCIe error") if pcie else None


class GpuErrors:
    """Warns once per GPU and kind of error, and once per rank whose program the driver blames. The lead uses these warnings to
    decide which rank failed first and whether to restart."""

    def __init__(self, gpus: Sequence[Gpu], node: int, host: str, ranks: Mapping[int, int]) -> None:
        """Create the watcher. `ranks`: pid -> rank, as far as known."""
        self.node, self.host, self.ranks = node, host, ranks
        own = [gpu for gpu in gpus if not gpu.integrated]
        self.own_gpus = {place(gpu.pci): gpu for gpu in own if gpu.pci}
        self.gpu_behind = {
            place(part): gpu for gpu in own for part in (gpu.pci_path or "").split("/") if part.count(":") == 2
        }
        self.own_unknown = not own  # then every GPU may be ours
        self._reported: Set[Tuple[str, str]] = set()

    def on(self, saw: Saw, now: float) -> List[Action]:
        if saw.kind == "kernel-log":
            return [Emit("kernel-log", {"source": saw.data["source"], "why": saw.data["why"]})]
        if saw.kind != "kernel":
            return []
        text = saw.data["text"]
        error = gpu_failure(text)
        if error is None:
            return self._blame_rank(kernel_event(text), text)
        if (error.address, error.code) in self._reported:
            return []
        gpu = self.own_gpus.get(error.address)
        if gpu is None and error.code == PCIE:
            gpu = self.gpu_behind.get(error.address)
        if gpu is None and not self.own_unknown:
            return []  # the device is another job's GPU, or no GPU at all
        self._reported.add((error.address, error.code))
        return [Warn(self._finding(error, gpu, saw.data))]

    def _blame_rank(self, event: Optional[GpuEvent], text: str) -> List[Action]:
        """Warn that a GPU, itself well, has stopped the work of one of our ranks, for example after an illegal memory access."""
        rank = self.ranks.get(event.pid) if event else None
        if event is None or rank is None or (str(rank), FAULT) in self._reported:
            return []
        self._reported.add((str(rank), FAULT))
        gpu = self.own_gpus.get(event.address)
        finding = find(
            FAULT, rank=rank, gpu=f"GPU {gpu.index}" if gpu else "a GPU", number=event.number, evidence=[text],
            node=self.node, host=self.host, seen=(f"the kernel's log of {self.host}: the rank's process id",),
        )  # fmt: skip
        return [Warn(finding)]

    def _finding(self, error: GpuEvent, gpu: Optional[Gpu], about: Dict[str, Any]) -> Finding:
        name = f"GPU {gpu.index}" if gpu else "a GPU"
        finding = find(
            "gpu-error", gpu=name, address=error.address, what=error.what, number=error.number, text=about["text"],
            evidence=[about["text"]], node=self.node, host=self.host, rank=self.ranks.get(error.pid),
            seen=(f"the kernel's log of {self.host} ({about['source']}) since the attempt began",),
        )  # fmt: skip
        return replace(finding, code=error.code)


class KernelLog(KernelLogReader):
    """A sensor: first which log is read (`kernel-log`), then lines of drivers (`kernel`)."""

    def poll(self, now: float, final: bool = False) -> List[Saw]:
        return [Saw("kernel" if "text" in about else "kernel-log", about) for about in self.read(final)]
