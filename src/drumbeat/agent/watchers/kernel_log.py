"""Judges what GPU drivers write into the kernel's log during an attempt: which lines mean that a GPU of this job is broken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

from drumbeat.agent.watchers.contract import Action, Emit, Saw, Warn
from drumbeat.base.regex import regex
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import Finding
from drumbeat.inspector.kernel_log import KernelLogReader
from drumbeat.machine.model import Gpu
from drumbeat.machine.vendors import kernel_event
from drumbeat.machine.vendors.contract import GpuEvent, place

find = Catalog("watchers")
PCIE = "pcie-error"
_PID = regex(r"\bpid[= ](\d{1,9})\b")
_PCIE = regex(
    r"\b([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2})\.[0-7]: (?:AER: )?PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Fatal\)"
)


def read_line(text: str) -> Optional[GpuEvent]:
    """Return the event of a line that means a broken GPU; None for lines that break nothing."""
    event = kernel_event(text)
    if event and event.code:
        return event
    pcie = _PCIE.search(text)
    return GpuEvent(text, place(pcie.group(1)), PCIE, "had a fatal PCIe error") if pcie else None


class GpuErrors:
    """Warns once per GPU and kind of error. The lead takes it into account when it decides what follows a failure."""

    def __init__(self, gpus: Sequence[Gpu], node: int, host: str) -> None:
        self.node, self.host = node, host
        own = [gpu for gpu in gpus if not gpu.integrated]
        self.known = {place(gpu.pci): gpu for gpu in own if gpu.pci}
        self.bridges = {
            place(part): gpu for gpu in own for part in (gpu.pci_path or "").split("/") if part.count(":") == 2
        }
        self.any_counts = not own  # nobody knows which are ours
        self._told: Set[Tuple[str, str]] = set()

    def on(self, saw: Saw, now: float) -> List[Action]:
        if saw.kind == "kernel-log":
            return self._source(saw.data)
        if saw.kind != "kernel":
            return []
        error = read_line(saw.data["text"])
        if error is None or (error.address, error.code) in self._told:
            return []
        gpu = self.known.get(error.address)
        if gpu is None and error.code == PCIE:
            gpu = self.bridges.get(error.address)
        if gpu is None and not self.any_counts:
            return []  # another job's, or no GPU at all
        self._told.add((error.address, error.code))
        return [Warn(self._finding(error, gpu, saw.data))]

    def _source(self, about: Dict[str, Any]) -> List[Action]:
        """Record once in the node's events what is read, or why nothing is."""
        return [Emit("kernel-log", {"source": about["source"], "why": about["why"]})]

    def _finding(self, error: GpuEvent, gpu: Optional[Gpu], about: Dict[str, Any]) -> Finding:
        name = f"GPU {gpu.index}" if gpu else "a GPU"
        finding = find(
            "gpu-error", gpu=name, address=error.address, what=error.what, number=error.number, text=about["text"],
            evidence=[about["text"]], node=self.node, host=self.host,
            seen=(f"the kernel's log of {self.host} ({about['source']}) since the attempt began",),
        )  # fmt: skip
        return replace(finding, code=error.code)


class KernelLog(KernelLogReader):
    """A sensor: what is read of the kernel's log (`kernel-log`), then lines of drivers (`kernel`). `faults`: the last error in
    which a driver names a process of a rank, by rank."""

    def __init__(self, own: str = "", rank_of: Callable[[int], Optional[int]] = lambda pid: None) -> None:
        super().__init__(own)
        self.rank_of = rank_of
        self.faults: Dict[Optional[int], str] = {}

    def poll(self, now: float, final: bool = False) -> List[Saw]:
        read = self.read(final)
        for about in read:
            event = kernel_event(about.get("text", ""))
            named = _PID.search(event.text) if event else None
            if event and named:
                self.faults[self.rank_of(int(named[1]))] = event.text
        return [Saw("kernel" if "text" in about else "kernel-log", about) for about in read]
