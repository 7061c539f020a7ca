"""The transport gate: a watcher that finds out which network carries the traffic, and compares it with the expected one. It
reads nothing itself.

It has two sources: NCCL's log shows the connections, the kernel's counters (traffic.py) the bytes. A log can be wrong, and
gloo has none.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Tuple

from drumbeat.agent.watchers.contract import Action, Emit, Saw, Sensor, Stop, Warn
from drumbeat.agent.watchers.nccl_log import Asked, LogFiles, private_log
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import EnvVar, Expect, Order
from drumbeat.base.text import traffic
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import CERTAIN, ERROR, LIKELY, UNKNOWN, Evidence, Finding, Verdict
from drumbeat.logs.nccl.paths import LOCAL, MIXED, OFI, RDMA, TCP, Path
from drumbeat.machine.host import Host, LiveHost
from drumbeat.machine.model import Facts
from drumbeat.machine.sample import read_counters

if TYPE_CHECKING:
    from drumbeat.logs.reader import Reader

find = Catalog("watchers")
_EVERY = 1.0  # seconds between two reads of the counters

# The expected network of a node: interfaces, the expected transport, and how the actual one differs. Pure.


def named(value: str, interface: str, prefixes: bool) -> bool:
    """Return true if a variable with this value names this interface. NCCL takes prefixes, `=` for whole names and `^` for
    all others; gloo takes whole names."""
    if prefixes and value.startswith("^"):
        return not named(value[1:], interface, True)
    exact = value.startswith("=") or not prefixes
    names = [name for name in value.lstrip("=").split(",") if name]
    return any(interface == name if exact else interface.startswith(name) for name in names)


@dataclass(frozen=True)
class Place:
    """The node, as the gate sees it."""

    node: int
    host: str
    nodes: int
    emulated: bool = False
    fast: Tuple[str, ...] = ()  # active RDMA ports and Slingshot NICs
    over_ib: Tuple[str, ...] = ()  # interfaces whose bytes an InfiniBand port counts too
    wanted: Tuple[Tuple[str, str], ...] = ()  # variables that name interfaces: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME
    gpus: bool = False  # if set, NCCL is expected: traffic before its log begins is not the ranks'

    @property
    def named(self) -> Dict[str, Any]:
        return {"node": self.node, "host": self.host}

    def takes(self, interface: str) -> bool:
        """Return true if the ranks' variables name this interface."""
        return any(named(value, interface, name.startswith("NCCL")) for name, value in self.wanted)

    @property
    def alone(self) -> bool:
        """Return true if all ranks are on this machine, so that no counter tells anything."""
        return self.emulated or self.nodes == 1


def mismatch(expect: Expect, path: Path, nodes: int) -> str:
    """Describe how the network differs from the expected one; '' if it does not, or is unknown."""
    if path.answer == UNKNOWN or (path.answer == LOCAL and nodes == 1):
        return ""
    accepted = {
        "any": (RDMA, OFI, TCP, MIXED, LOCAL), "rdma": (RDMA, OFI), "roce": (RDMA,), "ib": (RDMA,), "ofi": (OFI,),
        "tcp": (TCP,),
    }[expect.transport]  # fmt: skip
    if path.answer == LOCAL and nodes > 1:
        return ""  # not proved; reported as such
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


# The ranks' traffic, from the kernel's counters: the bytes exchanged between ranks, and their ports. Counters include other
# traffic, so only seconds count in which much goes out and comes in alike: downloads and checkpoints are one-sided, and a
# system's background traffic is small.


_ENOUGH = 8 << 20  # bytes each way that are enough to identify the port
_AGAINST_LOG = 64 << 20  # bytes each way that refute a log
_MORE = 10  # factor between two ports' traffic that makes it clear
_ALIKE = 0.2  # share of the busier direction: requests and acknowledgements of a download are a few per cent
_THIN = 1 << 20  # bytes per second each way: less is not training


class Traffic:
    def __init__(self) -> None:
        self.talk: Dict[str, Dict[str, int]] = {"net": {}, "rdma": {}}  # bytes each way, by name
        self._counted: Optional[Tuple[float, Mapping[str, Any]]] = None

    @property
    def by_port(self) -> Dict[str, int]:
        """Return the bytes each way of each RDMA port, without ports that had none."""
        return {name: amount for name, amount in self.talk["rdma"].items() if amount}

    def forget(self) -> None:
        self.talk = {"net": {}, "rdma": {}}

    def count(self, counters: Mapping[str, Any], now: float) -> None:
        """Add the traffic between ranks since the last reading."""
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
        """Name the port that carried the traffic, and what that refutes; None if too little was seen. `path`: the transport
        from the log."""
        net, rdma = dict(self.talk["net"]), self.talk["rdma"]
        looped = net.pop("lo", 0)
        below = sum(net.get(name, 0) for name in place.over_ib)
        direct = max(0, sum(rdma.values()) - below)
        total = sum(net.values()) + direct
        says_rdma = path is not None and path.answer in (RDMA, OFI)
        if place.alone or total < (_AGAINST_LOG if says_rdma else _ENOUGH):
            if not final:
                return None
            words = "too little crossed the network to say where it goes"
            if place.alone or looped >= _ENOUGH:
                words = "the ranks are on one machine: nothing has to cross a network"
            return Verdict("traffic", UNKNOWN, UNKNOWN, words), None
        top = max(net, key=lambda name: net[name], default="")
        carried = net.get(top, 0)
        if direct >= carried:
            words = f"RDMA ports carried {traffic(direct)} each way, interfaces {traffic(carried)}"
            return Verdict("traffic", RDMA, LIKELY, words), None
        words = f"{top} carried {traffic(carried)} each way" + (f", RDMA ports {traffic(direct)}" if rdma else "")
        verdict = Verdict("traffic", top, LIKELY, words)
        counted = bool(self._counted and self._counted[1].get("rdma"))
        return verdict, _contradiction(place, path, verdict, net, direct if counted else None)


def _contradiction(
    place: Place, path: Optional[Path], verdict: Verdict, net: Dict[str, int], direct: Optional[int]
) -> Optional[Finding]:
    """Find what the counters refute: the log's RDMA, or the interface that a variable names.

    `direct`: bytes that bypassed the kernel; 0 if the ports are not counted.
    """
    top, carried = verdict.answer, net[verdict.answer]
    shown = (Evidence(verdict.summary, "/sys/class/net/*/statistics"),)
    says_rdma, here = path is not None and path.answer == RDMA, place.named
    if says_rdma and direct is not None and carried >= _MORE * direct:
        return find("rdma-not-used", interface=top, summary=verdict.summary, evidence=shown, **here)
    right = sum(amount for name, amount in net.items() if place.takes(name))
    if place.wanted and not place.takes(top) and carried >= _MORE * right:
        wanted = ", ".join(f"{name}={value}" for name, value in place.wanted)
        return find("wrong-interface", interface=top, wanted=wanted, evidence=shown, **here)
    return None


_QUIET = 1.0  # seconds without a new line after which the log is complete for now
_PATIENCE = 120.0  # seconds after which a likely result is reported as such
_FORMED = ("Init COMPLETE", " via ", "Connected all")


class Gate:
    def __init__(self, expect: Expect, level: str, place: Place) -> None:
        self.expect, self.level, self.place = expect, level, place
        self._reader: Optional[Reader] = None
        self.path: Optional[Path] = None  # set once it was reported
        self.traffic_said = False
        self.mismatch = False
        self._started: Optional[float] = None
        self._first_line: Optional[float] = None
        self._last_line = 0.0
        self._changed = False
        self._formed = False  # a communicator was created
        self._traffic = Traffic()

    @property
    def done(self) -> bool:
        return self.path is not None and self.traffic_said

    @property
    def reader(self) -> Reader:
        """Create the log reader at the first line: loading its rules takes half a second, which a job without NCCL does not
        need."""
        if self._reader is None:
            from drumbeat.logs.reader import Reader

            self._reader = Reader()
        return self._reader

    def on(self, saw: Saw, now: float) -> List[Action]:
        if self.done:
            return []
        if saw.kind == "started":
            self._started = now
        elif saw.kind == "line" and saw.data.get("stream") == "nccl":
            self.reader.feed(str(saw.data["file"]), int(saw.data["number"]), str(saw.data["text"]).encode())
            self._first_line = now if self._first_line is None else self._first_line
            self._last_line, self._changed = now, True
            self._formed = self._formed or any(word in str(saw.data["text"]) for word in _FORMED)
        elif saw.kind == "counters":
            self._traffic.count(saw.data, now)
        elif saw.kind in ("tick", "ended") and self._started is not None:
            return self._judge(now, saw.kind == "ended")
        return []

    def _judge(self, now: float, final: bool) -> List[Action]:
        actions = self._judge_log(now, final)
        # While a log grows, or is expected, only it can tell what the counters mean.
        awaited = self._first_line is not None or self.place.gpus
        if not self.traffic_said and (self.path is not None or final or not awaited):
            judged = self._traffic.judge(self.place, self.path, final)
            actions += [] if judged is None else self._say_traffic(*judged, now)
        return actions

    # -- the log -----------------------------------------------------------------------------------------------------

    def _judge_log(self, now: float, final: bool) -> List[Action]:
        if self.path is not None or self._first_line is None or self._started is None:
            return []
        if not self._formed:  # a transport that was only chosen carries nothing yet
            words = "unknown: no communicator formed"
            return self._say_transport(Path(UNKNOWN, confidence=UNKNOWN), now, words) if final else []
        late = final or now - self._started > _PATIENCE
        if not late and not (self._changed and now - self._last_line >= _QUIET):
            return []
        self._changed = False
        transport = self.reader.transport()
        path = transport.path
        over_network = path.answer in (RDMA, OFI, TCP, MIXED)
        settled = path.confidence == CERTAIN and (over_network or (path.answer == LOCAL and self.place.nodes == 1))
        if not settled and not late:
            return []  # NCCL connects lazily: there may be more to come
        if not final:
            self._traffic.forget()  # earlier traffic was not NCCL's
        return self._say_transport(path, now)

    def _say_transport(self, path: Path, now: float, words: str = "") -> List[Action]:
        self.path = path
        wrong = mismatch(self.expect, path, self.place.nodes)
        findings, shown, here = [], path.evidence[:4], self.place.named
        if wrong:
            why, advice = self._cause(path)
            findings.append(
                find(
                    "transport-mismatch",
                    wrong=wrong,
                    meant=self._meant(),
                    why=why,
                    advice=advice,
                    evidence=shown,
                    **here,
                )
            )
        elif self._unproved(path):
            meant = self._meant()
            findings.append(find("transport-unproved", meant=meant, words=path.words, evidence=shown, **here))
        elif self._asked() and self.place.emulated and self.place.nodes > 1:
            findings.append(find("expectation-not-checked", meant=self._meant(), **here))
        elif path.answer == TCP and self.place.fast and self.expect.transport == "any" and self.place.nodes > 1:
            (why, advice), fast = self._cause(path), ", ".join(self.place.fast)
            findings.append(find("fast-network-unused", fast=fast, why=why, advice=advice, evidence=shown, **here))
        seen = tuple(item.place or item.text for item in path.evidence)
        verdict = Verdict("transport", path.answer, path.confidence, words or path.words, tuple(findings), seen)
        stopping = bool(wrong)
        used = self._reader.transport().nics if self._reader is not None else ()
        more = {"nics": {str(rank): names for rank, names in used}} if used else {}
        return [self._verdict(verdict, now, **more), *(self._act(finding, stopping) for finding in findings)]

    def _unproved(self, path: Path) -> bool:
        silent = path.answer == UNKNOWN or (path.answer == LOCAL and self.place.nodes > 1)
        gdr = self.expect.gdr is not None and path.gdr is None and path.answer in (RDMA, OFI)
        return self._asked() and (silent or gdr) and not self.place.emulated

    def _asked(self) -> bool:
        return self.expect.transport != "any" or self.expect.gdr is not None

    def _cause(self, path: Path) -> Tuple[str, str]:
        """Return cause and fix from the log's own lines, with the rules of `drumbeat diagnose`."""
        if self._reader is not None:
            question = "gpudirect" if path.answer in (RDMA, OFI) else "network"
            codes = [rule.code for rule in self._reader.rules.rules if rule.explains == question]
            for note in self._reader.report().failure.notes:
                if note.code in codes and note.fix:
                    return f"{note.title}: {note.cause}", note.fix
        return (
            f"the log shows {path.words}",
            "drumbeat diagnose RUN/nodes/*/attempt-*/nccl-*.log says more; drumbeat doctor",
        )

    def _meant(self) -> str:
        words = [] if self.expect.transport == "any" else [self.expect.transport]
        if self.expect.gdr is not None:
            words.append("with GPUDirect" if self.expect.gdr else "without GPUDirect")
        return " ".join(words)

    # -- the counters ------------------------------------------------------------------------------------------------

    def _say_traffic(self, verdict: Verdict, finding: Optional[Finding], now: float) -> List[Action]:
        self.traffic_said = True
        actions: List[Action] = []
        if finding:
            verdict = replace(verdict, findings=(finding,))
        carried = self._traffic.by_port
        actions.append(self._verdict(verdict, now, **({"carried": carried} if carried else {})))
        if finding:
            actions.append(self._act(finding, True))
        if self.path is None:  # no NCCL here: the counters are the only source
            answer = UNKNOWN if self.place.gpus else {RDMA: RDMA, UNKNOWN: UNKNOWN}.get(verdict.answer, TCP)
            confidence = UNKNOWN if answer == UNKNOWN else LIKELY
            words = f"{answer}, by the counters" if answer != UNKNOWN else "unknown: NCCL wrote no log here"
            actions += self._say_transport(Path(answer, confidence=confidence), now, words)
        return actions

    # -- reports -----------------------------------------------------------------------------------------------------

    def _verdict(self, verdict: Verdict, now: float, **more: Any) -> Action:
        seconds = round(now - (self._started or now), 3)
        return Emit("verdict", {"verdict": verdict, "seconds": seconds, **more})

    def _act(self, finding: Finding, stopping: bool) -> Action:
        self.mismatch = True
        if stopping and self.level == "stop":
            return Stop(replace(finding, severity=ERROR))
        return Warn(finding)


# The gate of one attempt, with its sensors: NCCL's log if NCCL may be used, the kernel's counters everywhere.


_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Counters:
    """A sensor: the counters once per second, while the gate needs them."""

    def __init__(self, host: Host, wanted: Callable[[], bool]) -> None:
        self.host, self.wanted = host, wanted
        self._last: Optional[float] = None

    def poll(self, now: float, final: bool = False) -> List[Saw]:
        if not self.wanted() or (self._last is not None and now - self._last < _EVERY and not final):
            return []
        self._last = now
        data: Dict[str, Any] = dict(read_counters(self.host))
        return [Saw("counters", data)]


class OpenGate:
    def __init__(
        self, order: Order, node: int, facts: Facts, local: str, rank_of: Callable[[int], Optional[int]],
        out_of: Callable[[Optional[int]], str],
    ) -> None:  # fmt: skip
        self.order, self.node, self.facts, self.local = order, node, facts, local
        self.rank_of, self.out_of = rank_of, out_of
        self.failed = False
        self.watcher = Gate(order.expect, order.checks["transport"], Place(node, facts.host, order.nodes))
        self.sensors: List[Sensor] = []
        self.log: Optional[LogFiles] = None

    def open(self, variables: List[EnvVar], attempt_folder: str) -> List[EnvVar]:
        """Return the ranks' variables, with NCCL's private log added."""
        known: Dict[str, str] = {**os.environ, **{variable.name: variable.value for variable in variables}}
        self.watcher.place = place_of(self.order, self.node, self.facts, known)
        if self.facts.gpus or self.order.expect != Expect():
            folder, asked = attempt_folder, Asked()
            if not self.order.trace:  # a trace already writes all of it into the run folder
                folder = os.path.join(self.local, os.path.basename(attempt_folder))
                os.makedirs(folder, exist_ok=True)
                variables, asked = private_log(variables, os.environ, folder, self.order.workdir)
            shown_in = f"nodes/{self.node}/{os.path.basename(attempt_folder)}"
            self.log = LogFiles(folder, asked, self.rank_of, self.out_of, self._wanted, shown_in)
            self.sensors.append(self.log)
        self.sensors.append(Counters(LiveHost(), lambda: self._wanted() and not self.watcher.place.alone))
        return variables

    @property
    def keeps_log(self) -> bool:
        """Return true if NCCL's own log helps to explain a failure and is on the node's own disk."""
        private = self.log is not None and self.log.folder.startswith(self.local)
        return private and (self.failed or self.watcher.mismatch)

    def _wanted(self) -> bool:
        return not self.watcher.done


def place_of(order: Order, node: int, facts: Facts, variables: Dict[str, str]) -> Place:
    active = [
        (device, port) for device in facts.rdma for port in device.ports if port.state == "ACTIVE" and not device.bond
    ]
    fast = [f"{device.name} ({port.link_layer or 'unknown link'})" for device, port in active]
    fast += [device.name for device in facts.cxi]
    over_ib = [name for device, port in active if port.link_layer == "InfiniBand" for name in device.netdevs]
    wanted = tuple((name, variables[name]) for name in _INTERFACES if variables.get(name))
    gpus = any(not gpu.integrated for gpu in facts.gpus)
    return Place(node, facts.host, order.nodes, order.emulated, tuple(fast), tuple(over_ib), wanted, gpus)
