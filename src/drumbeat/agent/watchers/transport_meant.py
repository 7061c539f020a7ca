"""What was meant for the traffic of a node: interfaces, the expected transport, and how what is differs from it. Pure."""

from __future__ import annotations

from typing import Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Expect
from drumbeat.findings.model import UNKNOWN, WARNING, Evidence, Finding
from drumbeat.logs.nccl.paths import LOCAL, MIXED, OFI, RDMA, TCP, Path


@dataclass(frozen=True)
class Wanted:
    """Interfaces that variables name for the ranks: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME."""

    variables: Tuple[Tuple[str, str], ...] = ()

    def takes(self, interface: str) -> bool:
        return any(named(value, interface, name.startswith("NCCL")) for name, value in self.variables)

    @property
    def words(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.variables)


def named(value: str, interface: str, prefixes: bool) -> bool:
    """NCCL takes prefixes, `=` for whole names and `^` for all others; gloo takes whole names."""
    if prefixes and value.startswith("^"):
        return not named(value[1:], interface, True)
    exact = value.startswith("=") or not prefixes
    names = [name for name in value.lstrip("=").split(",") if name]
    return any(interface == name if exact else interface.startswith(name) for name in names)


@dataclass(frozen=True)
class Place:
    """What the gate must know of this node."""

    node: int
    host: str
    nodes: int
    emulated: bool = False
    fast: Tuple[str, ...] = ()  # active RDMA ports and Slingshot NICs
    over_ib: Tuple[str, ...] = ()  # interfaces whose bytes an InfiniBand port counts as well
    wanted: Wanted = Wanted()
    gpus: bool = False  # then NCCL is awaited: traffic before its log begins is somebody else's

    def finding(self, code: str, title: str, cause: str, fix: str, evidence: Tuple[Evidence, ...]) -> Finding:
        """A warning about the traffic of this node."""
        return Finding(code, WARNING, title, cause, fix, evidence[:4], node=self.node, host=self.host)


def mismatch(expect: Expect, path: Path, nodes: int) -> str:
    """How what is differs from what was meant, in words; '' where it does not, or is not known."""
    if path.answer == UNKNOWN or (path.answer == LOCAL and nodes == 1):
        return ""
    accepted = {
        "any": (RDMA, OFI, TCP, MIXED, LOCAL), "rdma": (RDMA, OFI), "roce": (RDMA,), "ib": (RDMA,), "ofi": (OFI,),
        "tcp": (TCP,),
    }[expect.transport]  # fmt: skip
    if path.answer == LOCAL and nodes > 1:
        return ""  # not proved; said as that
    if path.answer not in accepted:
        return f"the traffic between nodes goes over {path.words}"
    link = {"roce": "RoCE", "ib": "IB"}.get(expect.transport, "")
    if link and path.link and path.link != link:
        return f"the RDMA ports are {path.link}"
    if expect.gdr is not None and path.gdr is not None and path.answer in (RDMA, OFI) and path.gdr != expect.gdr:
        return f"the traffic between nodes goes over {path.words}"
    if expect.gdr and path.answer == TCP:
        return "the traffic between nodes goes over TCP"
    return ""
