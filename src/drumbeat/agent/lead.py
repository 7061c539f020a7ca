"""The lead: node 0's agent decides start, stop, restart and which failure was the first. A state machine without I/O.

Messages of the nodes come in (its own node's too), actions go out: tell a node, record an event, end the run.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

from drumbeat.agent.decide import FAILED, FINISHED, REQUEUE, TIME_LIMIT, Outcome, decide
from drumbeat.agent.stop_requests import END_NOW, LIMIT, SIGNAL, StopRequest, StopRequests
from drumbeat.facts.model import Facts, Peer, Peers
from drumbeat.finding import ERROR, Evidence, Finding
from drumbeat.order import Order
from drumbeat.record import from_plain, to_plain
from drumbeat.runfolder.summary import Affected, AttemptEnd, group
from drumbeat.signals import EXIT_MUSTER, EXIT_PREFLIGHT, EXIT_REQUEUE

_STAND_FOR_ALL = 64  # nodes whose network the others are told of
CONSEQUENCE = "peer-lost"  # code of a failure that only says that another rank went away


@dataclass(frozen=True)
class Tell:
    node: int
    message: Dict[str, Any]


@dataclass(frozen=True)
class Record:
    kind: str
    data: Dict[str, Any]


@dataclass(frozen=True)
class Finish:
    exit_code: int


Act = Union[Tell, Record, Finish]


@dataclass
class RankEnd:
    rank: int
    node: int
    exit_code: Optional[int]
    signal: Optional[int]
    at: float  # on the lead's clock
    finding: Optional[Finding]
    by_us: bool

    @property
    def failed(self) -> bool:
        return self.exit_code != 0

    @property
    def code(self) -> int:
        """As a shell would say it."""
        return 128 + self.signal if self.signal else int(self.exit_code or 0)


@dataclass
class Attempt:
    number: int
    started: float
    port: int
    ends: List[RankEnd] = field(default_factory=list)
    done: Dict[int, Dict[str, Any]] = field(default_factory=dict)  # node -> what it reported at its end
    first_failure: Optional[float] = None
    finding: Optional[Finding] = None  # set where the cause is no rank: a lost node, a watcher, the time limit


@dataclass
class Lead:
    order: Order
    pick_port: Callable[[], int]
    started: float
    peers: Dict[int, Peer] = field(default_factory=dict)
    lost: List[int] = field(default_factory=list)
    attempts: List[Attempt] = field(default_factory=list)
    history: List[Outcome] = field(default_factory=list)
    phase: str = "muster"  # muster, running, stopping, ended
    requests: StopRequests = field(default_factory=StopRequests)
    mustered_after: float = 0.0
    master_addr: str = "127.0.0.1"
    earlier: List[AttemptEnd] = field(default_factory=list)  # attempts of before a scheduler started the job again
    first_attempt: int = 0  # more than 0 where a scheduler started this job again

    # -- muster ------------------------------------------------------------------------------------------------------

    def refuse(self, hello: Dict[str, Any]) -> str:
        """Why this node may not join; '' if it may."""
        node, host = hello.get("node"), hello.get("host")
        if self.phase != "muster":
            return "the run has already started"
        if not isinstance(node, int) or not 0 <= node < self.order.nodes:
            return f"node rank {node} is not one of 0 to {self.order.nodes - 1}: --nodes or NNODES is wrong somewhere"
        if node in self.peers:
            return f"node rank {node} is taken by {self.peers[node].host}, and {host} claims it too: give each its own"
        ours, theirs = self.order.terms(), hello.get("terms") or {}
        differing = [key for key in ours if ours[key] != theirs.get(key)]
        if differing:
            said = "; ".join(f"{key} is {_short(theirs.get(key))} there, {_short(ours[key])} here" for key in differing)
            return f"{host} was asked for another job than the lead: {said}"
        return ""

    def hello(self, hello: Dict[str, Any], now: float) -> List[Act]:
        """A node that may join (see `refuse`)."""
        node = hello["node"]
        facts = from_plain(Facts, hello["facts"])
        ranks = self.order.ranks_per_node or sum(1 for gpu in facts.gpus if not gpu.integrated)
        peer = Peer(node, hello["host"], hello["address"], facts, hello.get("clock_offset", 0.0), max(1, ranks))
        self.peers[node] = peer
        joined = {"peer": node, "peer_host": peer.host, "address": peer.address, "clock_offset": peer.clock_offset}
        acts: List[Act] = [Record("node-joined", joined)]
        findings = [from_plain(Finding, finding) for finding in hello.get("findings", ())]
        acts += [Record("finding", {"finding": to_plain(finding)}) for finding in findings]
        broken = next((finding for finding in findings if finding.severity == ERROR), None)
        if broken and self.order.checks.get("preflight", "stop") == "stop":
            return acts + self._end(Outcome(FAILED, EXIT_PREFLIGHT, broken))
        if len(self.peers) == self.order.nodes:
            self.mustered_after = now - self.started
            acts += self._start(now)
        return acts

    def all_peers(self) -> Peers:
        nodes = tuple(self.peers[node] for node in sorted(self.peers))
        return Peers(nodes, self.master_addr, self.attempts[-1].port if self.attempts else 0)

    # -- running -----------------------------------------------------------------------------------------------------

    def rank_ended(self, node: int, message: Dict[str, Any], now: float) -> List[Act]:
        attempt = self.attempts[-1]
        finding = from_plain(Finding, message["finding"]) if message.get("finding") else None
        offset = self.peers[node].clock_offset
        end = RankEnd(
            message["rank"],
            node,
            message["exit_code"],
            message["signal"],
            message["t"] + offset,
            finding,
            message["by_us"],
        )
        attempt.ends.append(end)
        if end.failed and not end.by_us and attempt.first_failure is None and self.phase == "running":
            attempt.first_failure = now
        return []

    def node_done(self, node: int, report: Dict[str, Any], now: float) -> List[Act]:
        """All processes of this node's attempt are gone."""
        attempt = self.attempts[-1]
        attempt.done[node] = report
        return self._conclude(now) if self._all_done(attempt) else []

    def node_lost(self, node: int, why: str, now: float) -> List[Act]:
        if self.phase == "ended" or node in self.lost or node not in self.peers:
            return []
        self.lost.append(node)
        host = self.peers[node].host
        acts: List[Act] = [Record("node-lost", {"peer": node, "peer_host": host, "why": why})]
        finding = Finding(
            "node-lost", ERROR, f"node {node} ({host}) was lost", why, f"look at {host}; exclude it if this happens again",
            (Evidence(why),), node=node, host=host,
        )  # fmt: skip
        if self.phase == "muster":
            del self.peers[node]
            return acts
        attempt = self.attempts[-1]
        attempt.done[node] = {}
        if self.phase == "running":
            attempt.finding = attempt.finding or finding
            acts += self._stop_ranks("a node was lost", signal.SIGTERM, self.order.timing.failure_grace)
        return acts + (self._conclude(now) if self._all_done(attempt) else [])

    def watcher_stop(self, finding: Finding, now: float) -> List[Act]:
        """A watcher says that the job does not run the way it was meant to."""
        if self.phase != "running":
            return []
        self.attempts[-1].finding = self.attempts[-1].finding or finding
        return self._stop_ranks(finding.title, signal.SIGTERM, self.order.stop_grace)

    def stop(self, request: StopRequest) -> List[Act]:
        """Asked to end: by a signal, a line in the `stop` file, the scheduler, the time limit."""
        if self.phase == "ended":
            return []
        step = self.requests.on(request)
        if self.phase == "muster":
            return self._end(Outcome(self.requests.outcome, self.requests.exit_code))
        if step == END_NOW:
            return self._stop_ranks(request.why, self.order.stop_signal, 0.0)
        if step is None or self.phase == "stopping":
            return []  # they are ending already; the outcome is now the request's
        passed_on = request.way == SIGNAL and request.number == signal.SIGUSR2  # the script's own choice of signal
        number = signal.SIGUSR2 if passed_on else self.order.stop_signal
        return self._stop_ranks(request.why, number, self.order.stop_grace)

    def tick(self, now: float) -> List[Act]:
        timing, limit = self.order.timing, self.order.time_limit
        if limit and now - self.started > limit and not self.requests.outcome and self.phase in ("muster", "running"):
            return self.stop(StopRequest(LIMIT, self.order.stop_signal, f"the time limit of {limit:g} s is reached"))
        if self.phase == "muster" and now - self.started > timing.muster:
            missing = sorted(set(range(self.order.nodes)) - set(self.peers))
            here = ", ".join(f"{peer.node} ({peer.host})" for _, peer in sorted(self.peers.items())) or "none"
            finding = Finding(
                "muster-timeout", ERROR, f"nodes {missing} did not come within {timing.muster:g} s", f"only {here} came",
                "look at the other nodes' output; check that they reach the lead's address and port",
            )  # fmt: skip
            return self._end(Outcome(FAILED, EXIT_MUSTER, finding))
        if self.phase == "running":
            attempt = self.attempts[-1]
            if attempt.first_failure is not None and now - attempt.first_failure > timing.settle:
                return self._stop_ranks("a rank failed", signal.SIGTERM, timing.failure_grace)
        return []

    # -- inside ------------------------------------------------------------------------------------------------------

    def _start(self, now: float) -> List[Act]:
        attempt = Attempt(self.first_attempt + len(self.attempts), now, self.pick_port())
        self.attempts.append(attempt)
        self.phase = "running"
        peers = self.all_peers()
        acts: List[Act] = []
        if len(self.attempts) == 1:
            seconds = round(self.mustered_after, 3)
            acts.append(
                Record("mustered", {"seconds": seconds, "master_addr": self.master_addr, "master_port": attempt.port})
            )
        where = {"world_size": peers.world_size, "master_addr": self.master_addr, "master_port": attempt.port}
        acts.append(Record("attempt-started", where))
        message = {"do": "start", "attempt": attempt.number, "peers": for_nodes(peers)}
        return acts + [Tell(node, message) for node in sorted(self.peers)]

    def _stop_ranks(self, why: str, number: int, grace: float) -> List[Act]:
        self.phase = "stopping"
        message = {"do": "stop", "signal": int(number), "grace": grace, "why": why}
        record = Record("stopping", {"why": why, "signal": int(number), "grace": grace})
        return [record, *(Tell(node, message) for node in sorted(self.peers) if node not in self.lost)]

    def _all_done(self, attempt: Attempt) -> bool:
        return set(attempt.done) | set(self.lost) == set(self.peers)

    def _conclude(self, now: float) -> List[Act]:
        attempt = self.attempts[-1]
        outcome = self._outcome(attempt)
        self.history.append(outcome)
        acts: List[Act] = []
        if outcome.finding:
            acts.append(Record("failed", {"finding": to_plain(outcome.finding)}))
        acts += [Record("consequence", to_plain(each)) for each in self.affected(attempt, outcome.finding)]
        acts.append(Record("attempt-ended", {"outcome": outcome.outcome, "exit_code": outcome.exit_code}))
        decision = decide(self.history, self.order.restarts)
        acts.append(Record("decided", {"action": decision.action, "why": decision.why}))
        if decision.action == "restart":
            return acts + self._start(now)
        return acts + self._end(outcome, concluded=True)

    def _outcome(self, attempt: Attempt) -> Outcome:
        if self.requests.outcome:
            codes = [end.exit_code for end in attempt.ends]
            if EXIT_REQUEUE in codes and not self.requests.cancelled:
                return Outcome(REQUEUE, EXIT_REQUEUE)
            ranks = sum(peer.ranks for peer in self.peers.values())
            if self.requests.outcome == TIME_LIMIT and codes == [0] * ranks:
                return Outcome(FINISHED, 0)  # the signal came while they were ending: who is cut short says 75
            return Outcome(self.requests.outcome, self.requests.exit_code)
        if attempt.finding:
            lost = len(self.lost)
            return Outcome(FAILED, EXIT_MUSTER if lost else 1, attempt.finding, lost)
        first = self.first_failure(attempt)
        if first is None:
            return Outcome(FINISHED, 0)
        if first.exit_code == EXIT_REQUEUE:
            return Outcome(REQUEUE, EXIT_REQUEUE)
        finding = first.finding or Finding(
            "unknown", ERROR, f"rank {first.rank} ended with {first.code}", rank=first.rank
        )
        return Outcome(FAILED, first.code, finding)

    @staticmethod
    def first_failure(attempt: Attempt) -> Optional[RankEnd]:
        """The earliest end that is a cause. A rank that lost its peer may well be gone before the peer that failed."""
        failed = [end for end in attempt.ends if end.failed and not end.by_us]
        causes = [end for end in failed if not (end.finding and end.finding.code == CONSEQUENCE)]
        return min(causes or failed, key=lambda end: end.at, default=None)

    @staticmethod
    def affected(attempt: Attempt, finding: Optional[Finding]) -> Tuple[Affected, ...]:
        """Ranks that ended because of the first failure, in groups."""
        if finding is None:
            return ()
        others = [end for end in attempt.ends if end.failed and end.rank != finding.rank]
        return group((end.rank, "ended by drumbeat" if end.by_us else _title(end)) for end in others)

    def _end(self, outcome: Outcome, concluded: bool = False) -> List[Act]:
        self.phase = "ended"
        acts: List[Act] = []
        if not concluded:
            self.history.append(outcome)
            if outcome.finding:
                acts.append(Record("failed", {"finding": to_plain(outcome.finding)}))
        acts.append(Record("run-ended", {"outcome": outcome.outcome, "exit_code": outcome.exit_code}))
        message = {"do": "end", "exit_code": outcome.exit_code}
        acts += [Tell(node, message) for node in sorted(self.peers) if node not in self.lost]
        return [*acts, Finish(outcome.exit_code)]


def for_nodes(peers: Peers) -> Dict[str, Any]:
    """What a node must know of the others to plan, as plain data: how they are reached, and their network. In a large
    job the first nodes' networks stand for all, or the lead would have to send gigabytes."""
    nodes = []
    for peer in peers.nodes:
        seen: Dict[str, Any] = {"host": peer.facts.host}
        if peer.node < _STAND_FOR_ALL:
            seen.update((name, to_plain(getattr(peer.facts, name))) for name in ("interfaces", "rdma", "cxi"))
        about = {name: getattr(peer, name) for name in ("node", "host", "address", "clock_offset", "ranks")}
        nodes.append({**about, "facts": seen})
    return {"nodes": nodes, "master_addr": peers.master_addr, "master_port": peers.master_port}


def _title(end: RankEnd) -> str:
    return end.finding.title if end.finding else f"ended with {end.code}"


def _short(value: Any) -> str:
    text = " ".join(value) if isinstance(value, list) and all(isinstance(word, str) for word in value) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


__all__ = ["Act", "Finish", "Lead", "Record", "Tell"]
