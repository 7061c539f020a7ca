"""What the kernel's counters say of the ranks' traffic: how much was talk between them, and over which ports.

Counters also hold traffic of others, so only seconds in which much goes out and comes in alike count: downloads and
checkpoints are one-sided, the chatter of a system is thin.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Tuple

from drumbeat.agent.watchers.transport_meant import Place
from drumbeat.findings.model import LIKELY, UNKNOWN, Evidence, Finding, Verdict
from drumbeat.logs.nccl.paths import OFI, RDMA, Path

_ENOUGH = 8 << 20  # bytes each way that show where traffic goes
_AGAINST_LOG = 64 << 20  # bytes each way that refute a log
_MORE = 10  # times as much: clearly the one, and not the other
_ALIKE = 0.2  # of the busier direction: a download sends requests and acknowledgements of a few hundredths
_THIN = 1 << 20  # bytes per second each way: less is not training


class Traffic:
    def __init__(self) -> None:
        self.talk: Dict[str, Dict[str, int]] = {"net": {}, "rdma": {}}  # bytes each way, by name
        self._counted: Optional[Tuple[float, Mapping[str, Any]]] = None

    @property
    def by_port(self) -> Dict[str, int]:
        """Bytes each way that each RDMA port carried, those without any left out."""
        return {name: amount for name, amount in self.talk["rdma"].items() if amount}

    def forget(self) -> None:
        self.talk = {"net": {}, "rdma": {}}

    def count(self, counters: Mapping[str, Any], now: float) -> None:
        """Add what was talk since the last reading."""
        before, self._counted = self._counted, (now, counters)
        if before is None:
            return
        thin = _THIN * max(0.1, now - before[0])
        for kind, talk in self.talk.items():
            for name, (sent, received) in (counters.get(kind) or {}).items():
                base = (before[1].get(kind) or {}).get(name, (sent, received))
                low, high = sorted((sent - base[0], received - base[1]))
                if low >= thin and low >= _ALIKE * high:
                    talk[name] = talk.get(name, 0) + low

    def judge(self, place: Place, path: Optional[Path], final: bool) -> Optional[Tuple[Verdict, Optional[Finding]]]:
        """Which port carried the traffic, and what that refutes; none while too little was seen. `path`: the log's answer."""
        net, rdma = dict(self.talk["net"]), self.talk["rdma"]
        looped = net.pop("lo", 0)
        below = sum(net.get(name, 0) for name in place.over_ib)
        direct = max(0, sum(rdma.values()) - below)
        total = sum(net.values()) + direct
        here = place.emulated or place.nodes == 1
        says_rdma = path is not None and path.answer in (RDMA, OFI)
        if here or total < (_AGAINST_LOG if says_rdma else _ENOUGH):
            if not final:
                return None
            words = "too little crossed the network to say where it goes"
            if here or looped >= _ENOUGH:
                words = "the ranks are on one machine: nothing has to cross a network"
            return Verdict("traffic", UNKNOWN, UNKNOWN, words), None
        top = max(net, key=lambda name: net[name], default="")
        carried = net.get(top, 0)
        if direct >= carried:
            words = f"RDMA ports carried {_size(direct)} each way, interfaces {_size(carried)}"
            return Verdict("traffic", RDMA, LIKELY, words), None
        words = f"{top} carried {_size(carried)} each way" + (f", RDMA ports {_size(direct)}" if rdma else "")
        verdict = Verdict("traffic", top, LIKELY, words)
        counted = bool(self._counted and self._counted[1].get("rdma"))
        return verdict, _contradiction(place, path, verdict, net, direct if counted else None)


def _contradiction(
    place: Place, path: Optional[Path], verdict: Verdict, net: Dict[str, int], direct: Optional[int]
) -> Optional[Finding]:
    """What the counters refute: the log's RDMA, or the interface that a variable names.

    `direct`: bytes that went past the kernel; none where the ports are not counted.
    """
    top, carried = verdict.answer, net[verdict.answer]
    shown = (Evidence(verdict.summary, "/sys/class/net/*/statistics"),)
    says_rdma = path is not None and path.answer == RDMA
    if says_rdma and direct is not None and carried >= _MORE * direct:
        return place.finding(
            "rdma-not-used", f"NCCL's log says RDMA, but {top} carries the bytes", verdict.summary,
            "look for a second library or process that talks over TCP (gloo, MPI); drumbeat verify measures the pairs",
            shown,
        )  # fmt: skip
    wanted = place.wanted
    right = sum(amount for name, amount in net.items() if wanted.takes(name))
    if wanted.variables and not wanted.takes(top) and carried >= _MORE * right:
        return place.finding(
            "wrong-interface", f"the traffic goes over {top}, but {wanted.words}",
            "the script or a launcher chose another interface or address after drumbeat set the variable",
            "look for GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, MASTER_ADDR or tcp:// in the script and its setup",
            shown,
        )  # fmt: skip
    return None


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
