"""Subject of a check: a node's facts, the job (or a stand-in for one), and the fabric the plan sees."""

from __future__ import annotations

from dataclasses import replace
from typing import FrozenSet, Iterable, Iterator, List, Optional, Sequence

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import ERROR, INFO, SEVERITIES, WARNING, Finding
from drumbeat.machine.model import Facts, Gpu, Peer, Peers
from drumbeat.plan.scene import Scene, scene

GIB = 1 << 30
find = Catalog("doctor")


@dataclass(frozen=True)
class Case:
    facts: Facts
    order: Order
    here: Scene
    shown: Optional[FrozenSet[str]] = None  # subjects that a pasted dump shows whole; None: a live node, all of them
    of_job: bool = False  # a job that is about to start, not any

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
        """Severity of what breaks a job on several nodes, and no other."""
        return ERROR if self.several_nodes and self.live else WARNING

    @property
    def handled(self) -> str:
        """Severity of what a plan takes into account by itself; nobody plans from a dump."""
        return INFO if self.live else WARNING

    @property
    def unfit(self) -> str:
        """Severity of what makes a node unfit, though a job may get through on it: no run is stopped for that."""
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
    """Make an order without a job: the scheduler's, if we are in one; else a node with a fast network is one of several."""
    nodes = facts.identity.nodes or (2 if facts.rdma or facts.cxi else 1)
    return Order("", "", 0.0, (), nodes, 0, "ranks", "", "/", "/", "", "local")


def seen(what: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Add to each finding of a check what the check looked at: a finding that names nothing is not certain."""
    return (finding if finding.seen else replace(finding, seen=(what,)) for finding in findings)


def gib(size: int) -> str:
    if size < 0:
        return "unlimited"
    amount, unit = (size / GIB, "GiB") if size >= GIB else (size / (1 << 20), "MiB")
    return f"{amount:.0f} {unit}" if amount >= 100 else f"{amount:.3g} {unit}"


def some(words: Sequence[str], most: int, between: str = ", ") -> str:
    """List the first `most` words, and count the others."""
    return between.join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def worst_first(findings: List[Finding]) -> List[Finding]:
    return sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))
