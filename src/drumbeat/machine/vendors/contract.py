"""The interface of a GPU vendor: what other rooms need to know of its GPUs, its driver and its runtime.

A new vendor is one file in this folder and one entry of VENDORS. Every default is empty, so `Vendor()` itself represents a
node without GPUs. Settings for one vendor are data with `when: {vendor: ...}`, and GPU names, peaks and links are tables;
neither is part of this interface.
"""

from __future__ import annotations

import itertools
import os
import time
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from drumbeat.base.data import load
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import EnvVar
from drumbeat.base.regex import regex
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import Finding
from drumbeat.machine.model import Gpu, GpuSample, Host
from drumbeat.machine.parse import bus_order, line, pci_address

find = Catalog("machine")
PCI = "/sys/bus/pci/devices"
_DISPLAY = ("0x0300", "0x0302", "0x0380", "0x1200")  # VGA, 3D, other display, processing accelerator
_SHARE = 0.008  # share of one core that vendor tools may use
_DIGITS = regex(r"\+*([0-9]{1,9})")

Users = Mapping[int, Tuple[int, ...]]  # process -> indices of the GPUs it uses


class ContainerFlags(NamedTuple):
    """Options that make a container runtime expose GPUs."""

    words: str = ""
    why: str = ""
    groups: str = ""  # device files, as shell patterns: the container's user joins the groups that own them


@dataclass(frozen=True)
class GpuEvent:
    """A kernel log line in which a driver reports an error."""

    text: str  # its text in facts
    address: str  # domain:bus:device, without the function
    code: str = ""  # code of the finding for it; empty: it does not break a GPU
    what: str = ""
    number: str = ""  # as in `Xid 79`
    pid: int = 0  # process id it concerns; 0: unknown


class Vendor:
    name = ""  # as in facts.json and in site files
    title = ""  # display name
    pci_id = ""
    prefixes: Tuple[str, ...] = ()  # prefixes of the environment variables that its driver and libraries read
    visibility: Tuple[str, ...] = ()  # variables that hide GPUs, in the order in which the runtime applies them
    collectives = "nccl"  # key of Facts.versions
    net_plugin = "libnccl-net.so"  # file name of the plug-in that its collectives load
    peer_module = ""  # kernel module through which a NIC accesses GPU memory
    needs_iommu_off = False  # the IOMMU must be off or in passthrough mode: copies between its GPUs are slow otherwise
    caches: Tuple[Tuple[str, str, str], ...] = ()  # caches of compiled kernels: variable, name of the folder, reason
    pod_resource = ""
    kernel_mark = ""  # text that is in each kernel message of its driver
    program_faults: Tuple[str, ...] = ()  # beginnings of events that are mostly caused by programs
    lost_faults: Tuple[str, ...] = ()  # beginnings of events after which the GPU is gone until it is reset
    users_command: Tuple[str, ...] = ()  # command that prints the processes that compute on GPUs

    def detect(self, host: Host) -> List[Gpu]:
        """Return the GPUs that a process here can open, in the runtime's order."""
        return []

    def versions(self, host: Host) -> Dict[str, Optional[str]]:
        """Return versions of driver and toolkit, as far as files show them."""
        return {}

    def health(self, host: Host, gpus: Sequence[Gpu]) -> List[Gpu]:
        """Add the health that the driver reports without root to the GPUs."""
        return list(gpus)

    def sampler(self, host: Host, gpus: Sequence[Gpu]) -> Callable[[], List[GpuSample]]:
        """Return a function that samples these GPUs; it is called every few seconds."""
        return list

    def users(self, host: Host, gpus: Sequence[Gpu]) -> Optional[Users]:
        """Return the processes that use these GPUs now; None if unknown."""
        text = host.command(self.users_command) if self.users_command else None
        return None if text is None else self.parse_users(text, gpus)

    def parse_users(self, text: str, gpus: Sequence[Gpu]) -> Users:
        """Parse the output of `users_command`."""
        return {}

    def peer_memory(self, host: Host) -> Optional[bool]:
        """Return true if the module through which a NIC accesses GPU memory is loaded; None without its driver."""
        return None

    def visible(self, gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Tuple[List[Gpu], List[Finding]]:
        """Return the GPUs in torch's order under these variables, and findings on the variables."""
        seen = list(gpus)
        findings: List[Finding] = []
        for name in self.visibility:
            if name in environ:
                seen = pick(seen, name, environ[name], findings)
        return seen, findings

    def show(self, gpus: Sequence[Gpu], why: str) -> Tuple[EnvVar, ...]:
        """Return variables that show all ranks of a node these GPUs, in this order."""
        words = f"{why}; device i of torch is the GPU of local rank i"
        return tuple(EnvVar(name, indices(gpus), words, "detected") for name in self.visibility[:1])

    def show_own(self, gpus: Sequence[Gpu], node: Sequence[Gpu], environ: Mapping[str, str]) -> Tuple[EnvVar, ...]:
        """Return variables that show one rank only its own GPUs of the node, given the filters in `environ`."""
        words = "the rank's own GPU, as visibility: own asks"
        return tuple(EnvVar(name, indices(gpus), words, "user") for name in self.visibility[:1])

    def container_flags(self, runtime: str) -> ContainerFlags:
        return ContainerFlags()

    def software(self, versions: Mapping[str, str]) -> List[Finding]:
        """Return the doctor's findings on the driver and toolkit of a node with such GPUs."""
        return []

    def absence(self, versions: Mapping[str, str]) -> str:
        """Return the doctor's explanation if a node shows none of its GPUs; '' for nothing."""
        return ""

    def kernel_event(self, text: str) -> Optional[GpuEvent]:
        """Read one line of the kernel's log; None if the driver reports no error in it."""
        return None


class Rarely:
    """Calls a tool rarely enough to stay under 1 % of a core; returns nothing in between."""

    def __init__(self, ask: Callable[[], List[GpuSample]]) -> None:
        self._ask, self.due = ask, 0.0

    def __call__(self) -> List[GpuSample]:
        if time.monotonic() < self.due:
            return []
        before = os.times()
        samples = self._ask()
        spent = sum(os.times()[:4]) - sum(before[:4])  # CPU time of us and the tool
        self.due = time.monotonic() + spent / _SHARE
        return samples


def names() -> Any:
    """Return the table of GPU names."""
    return load("drumbeat.machine", "gpu_names")


def on_bus(host: Host) -> Dict[str, str]:
    """Return PCI address -> vendor id of each display or accelerator, in bus order."""
    found: Dict[str, str] = {}
    for name in sorted(host.list(PCI), key=bus_order):
        kind = line(host, f"{PCI}/{name}/class")
        if kind and kind.startswith(_DISPLAY) and pci_address(name):
            found[name] = line(host, f"{PCI}/{name}/vendor") or ""
    return found


def place(address: str) -> str:
    """Normalise `00000000:4E:00` and `0000:4e:00.0`, which are the same place: four digits of domain, no function."""
    domain, bus, device = address.lower().partition(".")[0].split(":")
    return f"{domain[-4:]}:{bus}:{device}"


def scaled(value: Optional[int], by: float) -> Optional[float]:
    return None if value is None else value / by


def indices(gpus: Sequence[Gpu]) -> str:
    return ",".join(str(gpu.index) for gpu in gpus)


# How torch and the runtimes interpret variables that select GPUs.


def pick(gpus: List[Gpu], name: str, value: str, findings: List[Finding]) -> List[Gpu]:
    """Return the GPUs that one variable leaves; add its faults to the findings."""
    shown = [f"{name}={value}"]
    wanted = entries(value)
    if len(set(wanted)) != len(wanted):
        findings.append(find("visibility-repeated", name=name, evidence=shown))
        return []
    if value.startswith(("GPU-", "MIG-")):
        by_uuid = {gpu.uuid: gpu for gpu in gpus if gpu.uuid}
        if value.startswith("MIG-") or not by_uuid:
            return gpus[: len(wanted)]  # parts of a GPU, or no identity to compare: only the count is known
        return [by_uuid[uuid] for uuid in wanted if uuid in by_uuid]
    chosen = list(itertools.takewhile(lambda number: number < len(gpus), numbers(value)))
    if len(chosen) < len(wanted):
        device, advice = wanted[len(chosen)], f"use 0 to {len(gpus) - 1}" if gpus else "unset it"
        about = {"name": name, "device": device, "count": len(gpus), "advice": advice}
        findings.append(find("visibility-out-of-range", evidence=shown, **about))
    return [gpus[number] for number in chosen]


def entries(value: str) -> Sequence[Union[int, str]]:
    """Parse a variable's entries: ids of GPUs or of parts of them, or numbers."""
    return value.split(",") if value.startswith(("GPU-", "MIG-")) else numbers(value)


def numbers(value: str) -> List[int]:
    """Parse numbers as torch does: leading digits of each entry; a negative or non-numeric one ends the list."""
    found: List[int] = []
    for entry in value.split(","):
        digits = _DIGITS.match(entry.strip())
        if not digits:
            break
        found.append(int(digits.group(1)))
    return found
