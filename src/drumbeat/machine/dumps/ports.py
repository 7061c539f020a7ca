"""RDMA ports, whichever tool printed them: which are usable, which are not, and what that means for NCCL."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.model import INFO, WARNING, Finding

ACTIVE, INITIALIZING, NOT_SHOWN = "ACTIVE", "INIT", "NOT SHOWN"
STATES = (ACTIVE, INITIALIZING, "INITIALIZE", "INITIALIZING", "DOWN", "ARMED", "ACTIVE_DEFER", "NOP", NOT_SHOWN)


@dataclass(frozen=True)
class Port:
    device: str
    port: int
    state: str  # ACTIVE, DOWN, INIT, ARMED, as the tools say it, in capitals; NOT_SHOWN where they do not
    physical: str = ""
    link: str = ""  # InfiniBand or Ethernet
    rate: Optional[float] = None  # Gb/s
    netdev: str = ""

    @property
    def words(self) -> str:
        state = "state not shown" if self.state == NOT_SHOWN else self.state.lower()
        if self.is_cut:
            state = f"cut here, at the state '{self.state.capitalize()}'"
        about = [state, self.link, f"{self.rate:g} Gb/s" if self.rate and self.usable else "", self.netdev]
        return f"{self.device} port {self.port}: {', '.join(part for part in about if part)}"

    @property
    def is_cut(self) -> bool:
        """Its state is no word that a tool prints: the text ends in the middle of one."""
        return self.state not in STATES

    @property
    def usable(self) -> bool:
        return self.state == ACTIVE


def findings(ports: Sequence[Port]) -> Tuple[Finding, ...]:
    found: List[Finding] = []
    for port in ports:
        if port.is_cut:
            continue
        if port.state.startswith(INITIALIZING):
            found.append(
                Finding(
                    "ib-no-subnet-manager",
                    WARNING,
                    f"{port.device} port {port.port} is up but was never initialised",
                    "the link is up, but no subnet manager has given the port an address",
                    "the fabric's administrator must start a subnet manager (opensm); NCCL does not use the port until then",
                )
            )
        elif port.state == NOT_SHOWN:
            found.append(
                Finding(
                    "rdma-port-not-shown",
                    INFO,
                    f"{port.device} port {port.port}: {port.netdev} is down, which says nothing of the InfiniBand port",
                    "an InfiniBand port carries NCCL's traffic whether its IP interface is up or not",
                    "ibstat shows the port's own state",
                )
            )
        elif not port.usable:
            why = f" ({port.physical})" if port.physical else ""
            found.append(
                Finding(
                    "rdma-port-down",
                    WARNING,
                    f"{port.device} port {port.port} is down{why}",
                    "no cable, a switch port that is off, or an interface that was set down",
                    f"NCCL does not use it; leave {port.device} out of NCCL_IB_HCA, and tell the support desk if it should be up",
                )
            )
    found += _mixed(ports) + _slow(ports)
    found += [_software(port) for port in ports if port.device.startswith(("rxe", "siw"))]
    return tuple(found)


def _mixed(ports: Sequence[Port]) -> List[Finding]:
    by_link: Dict[str, List[str]] = {}
    for port in ports:
        if port.usable and port.link:
            by_link.setdefault(port.link, []).append(port.device)
    if len(by_link) < 2:
        return []
    words = "; ".join(f"{link}: {', '.join(sorted(set(names)))}" for link, names in sorted(by_link.items()))
    return [
        Finding(
            "link-types-mixed",
            WARNING,
            f"InfiniBand and Ethernet ports are both active ({words})",
            "NCCL takes all of them, and a connection between the two kinds cannot work",
            f"NCCL_IB_HCA={','.join(sorted(set(by_link.get('InfiniBand', []))))} (the cards of the compute network only)",
        )
    ]


def _slow(ports: Sequence[Port]) -> List[Finding]:
    rates = {port.device: port.rate for port in ports if port.usable and port.rate}
    if not rates:
        return []
    best = max(rates.values())
    slow = sorted(device for device, rate in rates.items() if rate and rate < best / 2)
    if not slow:
        return []
    words = ", ".join(f"{device} ({rates[device]:g} Gb/s)" for device in slow)
    return [
        Finding(
            "rdma-port-slow",
            INFO,
            f"slower than the others ({best:g} Gb/s): {words}",
            "mostly a management or storage card",
            f"NCCL_IB_HCA=^{','.join(slow)} keeps NCCL off them",
        )
    ]


def _software(port: Port) -> Finding:
    return Finding(
        "software-rdma",
        WARNING,
        f"{port.device} is RDMA in software",
        "rxe and siw emulate RDMA on a normal interface: NCCL can use it, slowly",
        f"NCCL_IB_HCA=^{port.device}",
    )


def data(ports: Sequence[Port]) -> Dict[str, object]:
    return {
        "active": sorted({port.device for port in ports if port.usable}),
        "down": sorted({port.device for port in ports if not port.usable and not port.is_cut}),
    }
