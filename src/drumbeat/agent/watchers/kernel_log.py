"""Judges what GPU drivers write into the kernel's log during an attempt: which lines mean that a GPU of this job is broken.

Xid numbers: NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors). Counted are those whose immediate action is to reset or
restart the GPU, and uncorrectable memory errors. Not counted: what the program itself causes (13, 31, 43, 45, ...), what the
driver has dealt with (63, 92), NVLink errors that may be harmless (144 to 150: the driver follows a serious one up with 154).
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

from drumbeat.agent.watchers.contract import Action, Emit, Saw, Warn
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.findings.model import WARNING, Evidence, Finding
from drumbeat.inspector.kernel_log import KernelLogReader
from drumbeat.machine.model import Gpu

LOST, ECC, XID, HANG, RESET, PCIE = "gpu-lost", "gpu-ecc", "gpu-xid", "gpu-hang", "amdgpu-reset", "pcie-error"

# Xid -> code of the finding, what happened.
XIDS = {
    46: (HANG, "stopped working"),
    48: (ECC, "had an uncorrectable memory error"),
    62: (XID, "has an internal micro-controller that halted"),
    64: (ECC, "could not remap a bad row of its memory"),
    74: (XID, "lost an NVLink connection"),
    79: (LOST, "fell off the bus"),
    94: (ECC, "had an uncorrectable memory error, contained to one process"),
    95: (ECC, "had an uncorrectable memory error that may affect all its processes"),
    109: (XID, "did not switch between processes in time"),
    110: (XID, "had a security fault"),
    119: (XID, "has firmware that does not answer"),
    120: (XID, "had an error in its firmware"),
    136: (XID, "could not bring up an NVLink connection"),
    140: (ECC, "had an uncorrectable memory error"),
    143: (XID, "could not be initialised"),
    156: (XID, "had to retire a part of itself"),
    158: (XID, "did not answer in time"),
    167: (PCIE, "had a fatal time-out on PCIe"),
    169: (XID, "has an internal micro-controller that halted"),
    171: (ECC, "had an uncorrectable error in its DRAM"),
    172: (ECC, "had an uncorrectable error in its SRAM"),
}
_ACTION_CHANGED = 154  # the driver names what has to be done; 'None' is all clear

_XID = regex(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-7])?\): (\d{1,4})\b(.*)")
_NEEDS = regex(r"action changed from .* to 0x[0-9a-fA-F]+ \(([^)]{1,60})\)")
_AMD = regex(r"\bamdgpu ([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2})\.[0-7]: (.*)")
_AMD_RESET = regex(r"\bGPU reset begin|\bGPU reset(?:\(\d+\))? failed|\bGPU [Rr]ecovery [Ff]ailed")
_AMD_ECC = regex(r"(?<![\d.])([1-9]\d*) (?:new )?uncorrectable hardware errors? detected in (?!total)(\w+) block")
_PCIE = regex(
    r"\b([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2})\.[0-7]: (?:AER: )?PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Fatal\)"
)


@dataclass(frozen=True)
class GpuError:
    """One line of a driver that means a broken GPU."""

    code: str
    what: str
    address: str  # domain:bus:device, without the function
    number: str = ""  # as in `Xid 79`


def read_line(text: str) -> Optional[GpuError]:
    """Pure; None for lines that break nothing."""
    xid = _XID.search(text)
    if xid:
        return _of_xid(int(xid.group(2)), xid.group(3), _place(xid.group(1)))
    amd = _AMD.search(text)
    if amd:
        address, words = _place(amd.group(1)), amd.group(2)
        if _AMD_RESET.search(words):
            return GpuError(RESET, "was reset by its driver", address)
        errors = _AMD_ECC.search(words)
        if errors:
            many = "an uncorrectable memory error" if errors.group(1) == "1" else "uncorrectable memory errors"
            return GpuError(ECC, f"had {many} ({errors.group(2)} block)", address)
    pcie = _PCIE.search(text)
    return GpuError(PCIE, "had a fatal PCIe error", _place(pcie.group(1))) if pcie else None


def _of_xid(number: int, words: str, address: str) -> Optional[GpuError]:
    if number == _ACTION_CHANGED:
        needs = _NEEDS.search(words)
        if not needs or needs.group(1).strip().lower() == "none":
            return None
        return GpuError(XID, f"cannot be used until somebody acts ({needs.group(1)})", address, "Xid 154")
    known = XIDS.get(number)
    return GpuError(known[0], known[1], address, f"Xid {number}") if known else None


def _place(address: str) -> str:
    """`00000000:4E:00` and `0000:4e:00.0` are one place: the domain has four digits here, the function is left out."""
    domain, bus, device = address.lower().partition(".")[0].split(":")
    return f"{domain[-4:]}:{bus}:{device}"


class GpuErrors:
    """Warns once per GPU and kind of error. The lead takes it into account when it decides what follows a failure."""

    def __init__(self, gpus: Sequence[Gpu], node: int, host: str) -> None:
        self.node, self.host = node, host
        own = [gpu for gpu in gpus if not gpu.integrated]
        self.known = {_place(gpu.pci): gpu for gpu in own if gpu.pci}
        self.bridges = {
            _place(part): gpu for gpu in own for part in (gpu.pci_path or "").split("/") if part.count(":") == 2
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
        """What is read, or why nothing is: said once in the node's events."""
        return [Emit("kernel-log", {"source": about["source"], "why": about["why"]})]

    def _finding(self, error: GpuError, gpu: Optional[Gpu], about: Dict[str, Any]) -> Finding:
        name = f"GPU {gpu.index}" if gpu else "a GPU"
        number = f" ({error.number})" if error.number else ""
        return Finding(
            error.code, WARNING, f"{name} ({error.address}) of node {self.node} ({self.host}) {error.what}{number}",
            "the driver wrote it into the kernel's log during this attempt",
            f"leave {self.host} out; support desk: reset the GPU, run diagnostics, exchange it if it happens again",
            (Evidence(about["text"]),), node=self.node, host=self.host,
            seen=(f"the kernel's log of {self.host} ({about['source']}) since the attempt began",),
            support=f"{self.host}: {about['text']}",
        )  # fmt: skip


class KernelLog(KernelLogReader):
    """A sensor: what is read of the kernel's log (`kernel-log`), then lines of drivers (`kernel`)."""

    def poll(self, now: float, final: bool = False) -> List[Saw]:
        return [Saw("kernel" if "text" in about else "kernel-log", about) for about in self.read(final)]
