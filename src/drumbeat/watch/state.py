"""What is known of a run at this moment, in memory that is bounded by the number of its ranks."""

from __future__ import annotations

from collections import deque
from typing import Deque, Dict, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.findings.model import Finding, Verdict
from drumbeat.runfolder.pace import SKEW
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.summary import Summary
from drumbeat.watch.curve import Curve
from drumbeat.watch.node_view import MOST_NODES, NodeView, RankView

_MOST_MARKS = 200
_MOST_FINDINGS = 50


@dataclass(frozen=True)
class Mark:
    """Something that happened, for the time axis."""

    t: float
    kind: str  # failed, lost, restart, stop, attempt, first step, end, checkpoint, validation, finding
    text: str


class RunState:
    def __init__(self, order: Optional[Order] = None) -> None:
        self.planned_nodes = order.nodes if order else 0
        self.planned_ranks = order.nodes * order.ranks_per_node if order and order.ranks_per_node else 0
        self.emulated = bool(order and order.emulated)  # its nodes are processes of this machine
        self.hosts: Tuple[str, ...] = tuple(order.hosts) if order and not order.emulated else ()
        self.nodes: Dict[int, NodeView] = {}
        self.ranks: Dict[int, RankView] = {}  # of the current attempt
        self.attempt = 0
        self.world: Optional[int] = None
        self.phase = "starting"
        self.summary: Optional[Summary] = None
        self.marks: Deque[Mark] = deque(maxlen=_MOST_MARKS)
        self.findings: Deque[Finding] = deque(maxlen=_MOST_FINDINGS)
        self.failure: Optional[Finding] = None
        self.replaced: Tuple[str, ...] = ()  # which spares took whose place, in words
        self.started: Optional[float] = None  # when the lead began, by its clock
        self.now = 0.0  # the latest time that any record is of
        self.skew = SKEW
        self.clock = float("inf")  # the reader's clock: records from much later than that cannot be right
        self.loss, self.validation = Curve(), Curve()
        self.work = Curve()  # tokens or samples of all ranks
        self.reported_rate = Curve()  # where a script prints its own throughput
        self.step_seconds = Curve()
        self.cluster = {"gpu_use": Curve(5.0), "power": Curve(5.0), "memory": Curve(5.0), "network": Curve(5.0)}
        self.ended_ranks = 0
        self.changes = 0  # goes up with every record
        self.hangs = False  # a hang was reported and is not over
        self._parts: Dict[int, Progress] = {}  # node -> what it has reported in this attempt
        self._total: Tuple[int, Progress] = (0, Progress())  # their sum, after so many changes
        self.verdicts: Dict[str, Dict[int, Verdict]] = {}
        self._reporter: Optional[int] = None  # the lowest rank that has reported
        self._announced: Optional[Tuple[str, Optional[int]]] = None  # kind and step of the work that it said begins
        self._marked: Optional[Tuple[str, Optional[int]]] = (
            None  # the last report that was marked; None if it had no step
        )
        self.offsets: Dict[int, float] = {}

    def node(self, number: int) -> NodeView:
        found = self.nodes.get(number)
        if found is None:
            found = NodeView(number)
            if 0 <= number < MOST_NODES:
                self.nodes[number] = found
            found.host = self.hosts[number] if 0 <= number < len(self.hosts) else ""
        return found

    def go_to(self, attempt: int) -> None:
        """Ranks of an earlier attempt are gone. Its nodes may speak of a new attempt before the lead is heard."""
        if attempt > self.attempt:
            self.attempt, self.ended_ranks, self._marked = attempt, 0, None
            self.ranks.clear()
            for node in self.nodes.values():
                node.ranks.clear()

    def mark(self, t: float, kind: str, text: str) -> None:
        self.marks.append(Mark(t, kind, text[:300]))
