"""Slow ranks: a watcher on the lead that names the rank that has held the others up for a while.

There are two signs, both in the members' beats: a rank reports that its own part of a step takes three times as long as usual
(`metrics.report(..., seconds=...)`); or, in any program, the others wait for their peers for much of the time and this rank
hardly does (inspector/activity.py). Then one look at all ranks shows why.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

from drumbeat.agent.watchers.contract import Action, AskLook, Emit, Saw, Warn
from drumbeat.agent.watchers.hang_verdict import doing
from drumbeat.agent.wire.messages import Beat
from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import LIKELY
from drumbeat.inspector.activity import READS, SENDS, in_loader
from drumbeat.inspector.record import RankLook
from drumbeat.runfolder.progress import late_after, median

find = Catalog("watchers")
_TIMES = 3.0  # factor on the others' time, or divisor of their waiting
_FOR = 62.0  # seconds: at least two looks in a row
_ANSWERS = 11.0  # seconds for all members to answer
_CLOCK = 0.8  # share of the others' clock; below it a GPU is throttled
_WAITS = 0.25  # share of the time that is worth reporting
_GRANTED = 0.5  # share of the CPU time wanted, compared with the others' share
_TELL = 60.0  # seconds between two records of the time lost


@dataclass(frozen=True)
class Slow:
    """One slow rank, or all ranks of one slow node, from the beats."""

    rank: int
    own: float  # its seconds per step, or its share of time waiting
    usual: float  # the same of the others
    waited_for: bool = False  # found by shares of waiting
    whole_node: bool = False


class Straggler:
    def __init__(self) -> None:
        self.members: Dict[int, Dict[str, Any]] = {}
        self._forget()

    def _forget(self) -> None:
        self._running = False
        self._beats: Dict[int, Beat] = {}
        self._since: Dict[int, float] = {}  # rank -> when it began to be slow
        self._named: Dict[int, Optional[Slow]] = {}  # None: it has caught up
        self._stalled: Dict[int, float] = {}  # rank -> seconds that the others have waited for it
        self._told = self._ticked = 0.0
        self._waiting: Optional[Tuple[float, Slow]] = None  # when the looks were requested, and for whom
        self._looks: Dict[int, List[RankLook]] = {}

    def on(self, saw: Saw, now: float) -> List[Action]:
        if saw.kind == "attempt":
            self._forget()
            self.members, self._running, self._ticked = saw.data["members"], True, now
        elif saw.kind == "stopping" and self._running:
            self._running = False
            return [self._tell(slow, 0.0) for slow in self._named.values() if slow and slow.waited_for]
        elif saw.kind == "beat":
            self._beats[saw.data["member"]] = saw.data["beat"]
        elif saw.kind == "looked" and self._waiting:
            self._looks[saw.data["member"]] = saw.data["looks"]
        elif saw.kind == "tick" and self._running:
            return self._tick(now)
        return []

    def _tick(self, now: float) -> List[Action]:
        if self._waiting:
            since, slow = self._waiting
            return self._name(slow, now) if len(self._looks) == len(self.members) or now - since > _ANSWERS else []
        if now - self._ticked < 1.0:
            return []
        passed, self._ticked = now - self._ticked, now
        found = {slow.rank: slow for slow in (*self._by_steps(), *self._by_waiting())}
        self._since = {rank: self._since.get(rank, now) for rank in found}
        actions = self._lost_time(found, passed, now)
        for rank, slow in found.items():
            if now - self._since[rank] >= _FOR and rank not in self._named:
                self._waiting, self._looks, self._named[rank] = (now, slow), {}, slow
                return [*actions, AskLook(tuple(self.members))]
        return actions

    def _by_steps(self) -> List[Slow]:
        usual = [beat.usual for beat in self._beats.values() if beat.usual is not None]
        if not usual:
            return []
        common = min(usual) if len(usual) == 2 else median(usual)  # of two nodes, the slow rank may be half of one
        paces = [beat.slowest for beat in self._beats.values() if beat.slowest is not None]
        slow = [pace for pace in paces if common > 0 and pace.seconds >= _TIMES * common]
        return [Slow(pace.rank, pace.seconds, common) for pace in slow]

    def _by_waiting(self) -> List[Slow]:
        """Return the rank that waits least, if the others wait often, steps come, and no other work is announced."""
        silent = (
            beat.silent is not None and beat.silent > late_after(beat.every or 0.0) for beat in self._beats.values()
        )
        if any(beat.phase for beat in self._beats.values()) or any(silent):
            return []
        least = {member: beat.waits_least for member, beat in self._beats.items() if beat.waits_least is not None}
        if not least:
            return []
        member = min(least, key=lambda each: least[each].seconds)
        others = [pace.seconds for each, pace in least.items() if each != member]
        others += [beat.waits for beat in self._beats.values() if beat.waits is not None]
        own, common, beside = least[member], median(others or [0.0]), self._beats[member].waits
        if common < _WAITS or own.seconds * _TIMES > common:
            return []
        return [Slow(own.rank, own.seconds, common, True, beside is not None and beside * _TIMES <= common)]

    def _lost_time(self, found: Dict[int, Slow], passed: float, now: float) -> List[Action]:
        """Add up how long the others have waited; record it every minute, and when a named rank has caught up."""
        actions: List[Action] = []
        waited_for = {rank: slow for rank, slow in found.items() if slow.waited_for}
        for rank, slow in waited_for.items():
            self._stalled[rank] = self._stalled.get(rank, 0.0) + passed * (slow.usual - slow.own)
        for rank, known in list(self._named.items()):
            if known and known.waited_for and rank not in found:
                self._named[rank] = None
                actions.append(self._tell(known, 0.0))
            elif rank in waited_for and now - self._told >= _TELL:
                self._named[rank], self._told = waited_for[rank], now
                actions.append(self._tell(waited_for[rank]))
        return actions

    def _tell(self, slow: Slow, share: Optional[float] = None) -> Emit:
        share, seconds = slow.usual if share is None else share, self._stalled.get(slow.rank, 0.0)
        return Emit("stalled", {"rank": slow.rank, "seconds": round(seconds, 1), "share": round(share, 2)})

    def _name(self, slow: Slow, now: float) -> List[Action]:
        self._waiting, self._told = None, now
        looks = [look for each in self._looks.values() for look in each]
        own = next((look for look in looks if look.rank == slow.rank), None)
        node, host = (own.node, own.host) if own else (None, None)
        device = f", GPU {own.device}" if own and own.device is not None else ""
        who = f"rank {slow.rank}" + (f" on {host} (node {node}{device})" if own else "")
        if slow.waited_for:
            who = f"all ranks of {host} (node {node}) hold" if slow.whole_node and own else f"{who} holds"
            title = f"{who} the others up, which wait {slow.usual:.0%} of the time"
        else:
            times = f"{slow.own / slow.usual:.1f} times as long per step as the others"
            title = f"{who} takes {times}: {slow.own:.3g} s instead of {slow.usual:.3g} s"
        cause, values = reason(own, looks, slow) if own else ("unseen", {})
        finding = find(
            "slow-rank", cause, title=title, **{"own": None, "others": None, "words": "", **values},
            evidence=[f"rank {slow.rank}: {doing(own)}, {own.cpu:.0%} of a core"] if own else (),
            node=node, host=host, rank=None if slow.whole_node else slow.rank, confidence=LIKELY,
            seen=("the ranks' CPU time, sockets and GPUs" if slow.waited_for else "the ranks' own times per step",
                  "one look at all ranks"),
        )  # fmt: skip
        return [Warn(finding), *([self._tell(slow)] if slow.waited_for else [])]


def reason(own: RankLook, looks: Sequence[RankLook], slow: Slow) -> Tuple[str, Dict[str, Any]]:
    """Return the likely cause, from one look, with the values that its words need."""
    others = [look for look in looks if look.rank != own.rank]
    clocks = [look.clock for look in others if look.clock is not None]
    if own.clock is not None and clocks and own.clock < _CLOCK * median(clocks):
        return "clock", {"own": own.clock, "others": median(clocks)}
    if own.ails and all(look.ails != own.ails for look in others):
        return "gpu", {"words": own.ails}
    granted = [look.granted for look in others if look.granted is not None]
    if own.granted is not None and granted and own.granted < _GRANTED * median(granted):
        return "cpu", {"own": own.granted, "others": median(granted)}
    if in_loader(own.stack) or own.doing == READS:
        return "input", {}
    if own.doing == SENDS:
        return "network", {}
    at = f" at {own.place}" if own.place else ""
    return ("work" if slow.waited_for and own.doing else ""), {"words": f"it {own.doing}{at}"}
