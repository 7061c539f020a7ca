"""Feeds the lead's watchers and turns what they ask for into acts of the lead."""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

from drumbeat.agent.lead.lead import Lead
from drumbeat.agent.lead.lead_acts import Act, Record, Tell, record_finding
from drumbeat.agent.watchers.contract import AskLook, Emit, Saw, Stop, Warn, Watcher
from drumbeat.agent.wire.messages import Beat, Look, Looked, RankEnded
from drumbeat.runfolder.hang import CODE as HANG


class LeadWatching:
    def __init__(self, lead: Lead, watchers: Sequence[Watcher]) -> None:
        self.lead, self.watchers = lead, watchers
        self._asked = 0  # looks so far
        self._asking: Dict[int, Watcher] = {}  # number of a look -> who asked for it; only the last one of each

    def beat(self, member: int, beat: Beat, now: float) -> List[Act]:
        return self._feed(Saw("beat", {"member": member, "beat": beat}), now)

    def rank_ended(self, member: int, ended: RankEnded, now: float) -> List[Act]:
        known = self.lead.members.get(member)
        about = {
            "rank": ended.rank, "exit_code": ended.exit_code, "by_us": ended.by_us,
            "node": self.lead.node_rank(member), "host": known.host if known else "", "of_command": ended.of_command,
            "words": ended.finding.evidence[0].text[:200] if ended.finding and ended.finding.evidence else "",
        }  # fmt: skip
        return self._feed(Saw("exited", about), now)

    def looked(self, member: int, answer: Looked, now: float) -> List[Act]:
        watcher = self._asking.get(answer.number)
        if watcher is None or not self.lead.is_current(answer.attempt):
            return []
        return self._one(
            watcher, Saw("looked", {"member": member, "looks": list(answer.looks), "ras": list(answer.ras)}), now
        )

    def tick(self, now: float) -> List[Act]:
        return self._feed(Saw("tick"), now)

    def recorded(self, kind: str, now: float) -> List[Act]:
        """The lead has decided something: an attempt begins, or its ranks are being ended."""
        if kind == "attempt-started":
            attempt = self.lead.attempts[-1]
            members = {
                number: {"node": node, "host": self.lead.members[number].host, "ranks": self.lead.members[number].ranks}
                for node, number in enumerate(attempt.assignment)
            }
            return self._feed(Saw("attempt", {"number": attempt.number, "members": members}), now)
        if kind in ("stopping", "attempt-ended"):
            return self._feed(Saw("stopping"), now)
        return []

    def _feed(self, saw: Saw, now: float) -> List[Act]:
        return [act for watcher in self.watchers for act in self._one(watcher, saw, now)]

    def _one(self, watcher: Watcher, saw: Saw, now: float) -> List[Act]:
        acts: List[Act] = []
        for action in watcher.on(saw, now):
            if isinstance(action, Emit):
                if action.kind == "resumed":
                    self.lead.suspect(None)
                acts.append(Record(action.kind, action.data))
            elif isinstance(action, AskLook):
                acts.append(self._ask(watcher, action.members))
            elif isinstance(action, (Warn, Stop)):
                if action.finding.code.startswith(HANG):
                    self.lead.suspect(action.finding)
                acts.append(record_finding(action.finding))
                if isinstance(action, Stop):
                    acts += self.lead.watcher_stop(action.finding, now)
        return acts

    def _ask(self, watcher: Watcher, members: Tuple[int, ...]) -> Tell:
        self._asked += 1
        self._asking = {number: who for number, who in self._asking.items() if who is not watcher}
        self._asking[self._asked] = watcher
        return Tell(members, Look(self.lead.attempts[-1].number, self._asked))
