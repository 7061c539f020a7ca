"""Input of a check: a node's facts, its job (or a stand-in for one), and the fabric as the plan sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import FrozenSet, Iterable, Iterator, List, Mapping, Optional, Tuple, TypeVar

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import ERROR, INFO, SEVERITIES, WARNING, Finding
from drumbeat.machine.model import Facts, Gpu, Peer, Peers
from drumbeat.plan.scene import Scene, scene

GIB = 1 << 30
T = TypeVar("T")
find = Catalog("doctor")


@dataclass(frozen=True)
class Case:
    facts: Facts
    order: Order
    here: Scene
    shown: Optional[FrozenSet[str]] = None  # subjects that a pasted dump shows fully; None: live node, all
    of_job: bool = False  # for a job that is about to start, not for any job

    @property
    def several_nodes(self) -> bool:
        return self.here.nodes == "many" and self.here.fabric != "loopback"

    @property
    def verbs(self) -> bool:
        """Return true if the job's traffic goes through libibverbs."""
        return self.several_nodes and self.here.fabric in ("infiniband", "roce")

    @property
    def gpus(self) -> List[Gpu]:
        return [gpu for gpu in self.facts.gpus if not gpu.integrated]

    @property
    def breaking(self) -> str:
        """Severity of faults that break only jobs on several nodes."""
        return ERROR if self.several_nodes and self.live else WARNING

    @property
    def handled(self) -> str:
        """Severity of faults that a plan works around; no plan is made from a dump."""
        return INFO if self.live else WARNING

    @property
    def unfit(self) -> str:
        """Severity of faults that make a node unfit, though a job may survive them: no run is stopped for these."""
        return WARNING if self.of_job else ERROR

    @property
    def live(self) -> bool:
        return self.shown is None


def make_case(
    facts: Facts, order: Optional[Order], peers: Optional[Peers] = None, shown: Optional[FrozenSet[str]] = None
) -> Case:
    wanted = order or stand_in(facts)
    return Case(facts, wanted, scene(wanted, facts, peers or alone(facts)), shown, order is not None)


def alone(facts: Facts, node: int = 0) -> Peers:
    return Peers((Peer(node, facts.host, "", facts),), "", 0)


def stand_in(facts: Facts) -> Order:
    """Make an order without a job: the scheduler's node count if there is one, else two nodes if the node has a fast network."""
    nodes = facts.identity.nodes or (2 if facts.rdma or facts.cxi else 1)
    return Order("", "", 0.0, (), nodes, 0, "ranks", "", "/", "/", "", "local")


def seen(what: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Add what a check examined to each of its findings: a finding without evidence is not certain."""
    return (finding if finding.seen else replace(finding, seen=(what,)) for finding in findings)


def odd(values: Mapping[str, T]) -> Tuple[List[str], Optional[T]]:
    """Return the names whose value differs from that of most others, and the usual value: two thirds and at least two have it."""
    usual = max(values.values(), key=[*values.values()].count, default=None)
    differ = [name for name, value in values.items() if value != usual]
    clear = len(values) - len(differ) >= max(2, 2 * len(differ))
    return (differ, usual) if differ and clear else ([], None)


def worst_first(findings: List[Finding]) -> List[Finding]:
    return sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))
