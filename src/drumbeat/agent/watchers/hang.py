"""A watcher on the lead that notices when steps stop coming, has the agents look at their ranks, and names the rank that
hangs.

No step for max(5 s, 5 x the usual time between two reports) makes the agents look; in a program that reports no steps, a rank
that has hardly run for 5 s. A look alone is no verdict; see hang_verdict. A long pause that ended well (a validation, a
checkpoint) raises the limit; a phase that a rank announces is waited for.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Dict, List, Optional, Set, Tuple

from drumbeat.agent.watchers.contract import Action, AskLook, Emit, Saw, Stop, Warn
from drumbeat.agent.watchers.hang_verdict import (
    BUSY,
    MAY_COME,
    PATIENCE,
    WORKS,
    Ended,
    Silence,
    class_of,
    doing,
    judge,
    say_of,
    shows_work,
    with_ras,
)
from drumbeat.agent.wire.messages import Beat
from drumbeat.base.regex import regex
from drumbeat.findings.model import CERTAIN, ERROR, Finding
from drumbeat.inspector.ras import RasNote
from drumbeat.inspector.record import RankLook
from drumbeat.runfolder.progress import LATE, late_after, median

_LEARNED = 1.5  # or this factor on the longest pause that ended well
_UNKNOWN = 30.0  # seconds without a report while the usual time is unknown
_ANNOUNCED = 300.0  # seconds that an announced phase may take before the first look
_ANSWERS = 11.0  # seconds for all members to answer
_LOOKS = (10.0, 20.0, PATIENCE)  # seconds of silence at which the agents look again; then every half minute
_AGAIN = 30.0
_LASTS = 2.0  # seconds that a look takes
_OFTEN = 10  # looks at a silence of a program without steps; from then on they come more rarely
_NUMBERS = regex(r"\d+")
_EVERY = 60.0  # seconds between looks before the first step while all ranks run
_TELL_AGAIN = (
    60.0,
    120.0,
    300.0,
    600.0,
    1200.0,
)  # seconds of silence at which the same state of the ranks is reported again


class Hang:
    """The hang watcher. `level` is warn or stop."""

    def __init__(self, level: str) -> None:
        self.level = level
        self.members: Dict[int, Dict[str, Any]] = {}
        self._forget()

    def on(self, saw: Saw, now: float) -> List[Action]:
        if saw.kind == "attempt":
            self._forget()
            self.members, self._began, self._running = saw.data["members"], now, True
            self._looked = now
        elif saw.kind == "stopping":
            self._running = False
        elif saw.kind == "beat" and self._running and saw.data["member"] in self.members:
            self._take_beat(saw.data["member"], saw.data["beat"], now)
            return self._on_progress(now)
        elif saw.kind == "exited":
            rank = None if saw.data.get("of_command") else saw.data["rank"]
            ended = Ended(rank, saw.data["node"], saw.data["host"], now, saw.data.get("words", ""))
            if saw.data["exit_code"] != 0:
                self._failed = True
            self._ended[("node", ended.node) if rank is None else ("rank", rank)] = ended
        elif saw.kind == "looked" and self._waiting is not None:
            self._answers[saw.data["member"]] = saw.data["looks"]
            self._ras += saw.data.get("ras", [])
        elif saw.kind == "tick" and self._running:
            return self._tick(now)
        return []

    def _forget(self) -> None:
        self._running = False
        self._began = 0.0
        self._beats: Dict[int, Tuple[float, Beat]] = {}
        self._reported: Optional[float] = None  # when any rank last reported anything
        self._reporter: Optional[int] = None  # the member that reported it
        # A rank's end, or that of a node's command, which starts the ranks.
        self._ended: Dict[Tuple[str, int], Ended] = {}
        self._failed = False  # a rank has failed, which ends the attempt
        self._stepped = False  # the first step has come
        self._waiting: Optional[float] = None  # since when it has waited for answers
        self._answers: Dict[int, List[RankLook]] = {}
        self._ras: List[RasNote] = []
        self._next_look = 0.0
        self._looks = 0  # at this silence
        self._looked = 0.0  # when the last look began
        self._said: Optional[Finding] = None
        self._told: Set[str] = set()  # what the ranks do in this silence
        self._tell_again = 0.0  # at this silence
        self._alone: Tuple[int, ...] = ()  # ranks that were named while the others went on
        self._alone_for = 0.0  # seconds
        self._longest = 0.0  # seconds of the longest pause that ended well
        self._quietest = 0.0  # seconds of the current silence
        self._shown: Tuple[Tuple[int, int, str], ...] = ()  # result of the last look

    # -- time --------------------------------------------------------------------------------------------------------

    def _take_beat(self, member: int, beat: Beat, now: float) -> None:
        """Take a beat. The latest report of all members is searched only if this one turns out to be older than thought: beats
        of a large job come hundreds of times per second."""
        self._beats[member] = (now, beat)
        if beat.silent is not None and (self._reported is None or now - beat.silent >= self._reported):
            self._reported, self._reporter = now - beat.silent, member
        elif member == self._reporter:
            reports = [(at - one.silent, number) for number, (at, one) in self._beats.items() if one.silent is not None]
            self._reported, self._reporter = max(reports, default=(None, None))

    def _silence(self, now: float) -> Optional[float]:
        """Return the seconds since any rank reported anything; None before the first step."""
        return None if self._reported is None else now - self._reported

    def _rest(self, now: float) -> float:
        """Return the seconds for which a rank has rested that has not ended, before the first step."""
        rests = (beat.rests + now - at for at, beat in self._beats.values() if beat.rests is not None)
        return max(rests, default=0.0)

    def _stale(self, now: float) -> Dict[int, float]:
        """Return, for each member, its most overdue rank and the seconds since that rank's last report."""
        return {
            beat.stale_rank: beat.stale + now - at
            for at, beat in self._beats.values()
            if beat.stale is not None and beat.stale_rank is not None and ("rank", beat.stale_rank) not in self._ended
        }

    def _stalest(self, now: float) -> Tuple[float, Tuple[int, ...]]:
        """Return the longest silence of a single rank, and all ranks whose silence is over the limit."""
        stale, limit = self._stale(now), self._limit()
        return max(stale.values(), default=0.0), tuple(sorted(rank for rank, age in stale.items() if age > limit))

    def _limit(self) -> float:
        every = [beat.every for _, beat in self._beats.values() if beat.every is not None]
        usual = max(late_after(median(every)) if every else _UNKNOWN, _LEARNED * self._longest)
        announced = any(beat.phase for _, beat in self._beats.values())
        return max(usual, _ANNOUNCED) if announced else usual

    def _on_progress(self, now: float) -> List[Action]:
        """Check after a beat whether a pause is over."""
        silence = self._silence(now)
        if silence is not None and not self._stepped:
            self._stepped, paused, self._quietest = True, self._quietest, 0.0
            return self._over(paused)
        if self._alone:
            return self._after_alone(now)
        if silence is None or silence >= self._quietest - 0.5:
            self._quietest = max(self._quietest, silence or 0.0)
            return []
        paused, self._quietest = self._quietest, silence
        if paused <= LATE:
            return []  # the usual time between two reports
        self._longest = max(self._longest, paused)
        return self._over(paused)

    def _after_alone(self, now: float) -> List[Action]:
        """Check whether one of the ranks that were named while the others went on has reported again."""
        age, quiet = self._stalest(now)
        if any(rank in quiet for rank in self._alone):
            self._alone_for = max(self._alone_for, age)
            return []
        self._alone = ()
        return self._over(self._alone_for)

    def _over(self, seconds: float) -> List[Action]:
        about = {"seconds": round(seconds, 1), "stepped": self._stepped}
        clear: List[Action] = [Emit("activity", {**about, "what": ""})] if self._told and not self._stepped else []
        again: List[Action] = [Emit("resumed", about)] if self._said else []
        self._said, self._looks, self._shown, self._told = None, 0, (), set()
        self._waiting, self._next_look = None, 0.0
        return clear + again

    def _tick(self, now: float) -> List[Action]:
        if self._failed:
            return []
        if self._waiting is not None:
            whole = len(self._answers) == len(self.members)
            return self._judge(now) if whole or now - self._waiting > _ANSWERS else []
        silence = self._silence(now)
        if silence is None and self._quietest and self._rest(now) <= LATE:
            paused, self._quietest = self._quietest, 0.0
            return self._over(paused)
        if now < self._next_look:
            return []
        if silence is None:
            return self._look(now) if self._rest(now) > LATE or now - self._looked >= _EVERY else []
        longest = max((silence, *self._stale(now).values()))
        # The limit is expensive to compute with thousands of members, and never below LATE.
        if longest > LATE and longest > self._limit():
            self._quietest = max(self._quietest, silence)
            return self._look(now)
        return []

    def _look(self, now: float) -> List[Action]:
        self._waiting, self._looked, self._answers, self._ras = now, now, {}, []
        return [AskLook(tuple(self.members))]

    # -- verdicts ----------------------------------------------------------------------------------------------------

    def _judge(self, now: float) -> List[Action]:
        reported = self._silence(now)
        steps = reported is not None  # else the program has made none, and never ends for a verdict
        silent = self._rest(now) if reported is None else reported
        often, later = steps or self._looks < _OFTEN, [at for at in _LOOKS if at > silent + 2.0]
        self._next_look = now + (later[0] - silent if later else _AGAIN if often else _EVERY)
        due = [PATIENCE - look.still for each in self._answers.values() for look in each if look.still < PATIENCE]
        if often:
            self._next_look = min(self._next_look, now + max(1.0, min(due, default=_AGAIN) - _LASTS))
        self._looks += 1
        self._waiting = None
        looks = sorted((look for each in self._answers.values() for look in each), key=lambda look: look.rank)
        gone = [("node", look.node) if look.command or look.unnumbered else ("rank", look.rank) for look in looks]
        looks = with_ras([look for look, who in zip(looks, gone) if who not in self._ended], self._ras)
        stale, quiet = self._stalest(now)
        if steps and max(silent, stale) <= self._limit():
            return []  # progress was made meanwhile
        one_rank = steps and silent <= self._limit()
        seconds = stale if one_rank else silent
        self._quietest = self._quietest if steps else seconds
        ended = tuple(sorted(self._ended.values(), key=lambda each: each.at))
        shown = tuple((*look.key, doing(look)) for look in looks)
        same, self._shown = self._shown == shown, shown
        # A script may go on for as long as it likes after its ranks have ended.
        looks = [look for look in looks if not look.had_ranks]
        done = [beat.done for _, beat in self._beats.values() if beat.silent is not None]  # all steps are made
        all_done = bool(done) and all(done)
        silence = Silence(seconds, steps, quiet * one_rank, ended, now, same, all_done, self._longest)
        finding = judge(looks, silence)
        proven = finding is not None and finding.confidence == CERTAIN
        if one_rank or finding and (steps or same or proven):
            named = [look for look in looks if finding is not None and finding.rank in (None, look.rank)]
            left = 0.0 if proven else (WORKS if any(map(shows_work, named)) else MAY_COME) - seconds
            if left > 0:
                self._next_look = min(self._next_look, now + left)  # then it may end the run
            actions = self._say(finding, None if one_rank else seconds, may_stop=steps and left <= 0)
            if actions and one_rank:
                self._alone, self._alone_for = quiet, stale
            return actions
        again: List[Action] = []
        if self._said and not (steps or finding) and all(look.asked is not False for look in looks):  # it is refuted
            self._said, again = None, [Emit("resumed", {"seconds": round(seconds, 1), "stepped": False})]
        return self._state(looks, seconds, now, steps) + again

    def _state(self, looks: List[RankLook], seconds: float, now: float, steps: bool) -> List[Action]:
        """Report which ranks wait and what the others do, as a fact without a verdict: when it changes, and again after growing
        times. Not if all ranks work alike, except after a long time without a step."""
        words = in_words(looks)
        plain = _NUMBERS.sub("", words)  # changed rates and line numbers are no news
        alike = seconds < LATE or all(class_of(look) == BUSY for look in looks)
        told = not plain or (plain in self._told and seconds < self._tell_again)
        if told or alike and (steps or now - self._began < _EVERY):
            return []
        self._told.add(plain)
        self._tell_again = next((at for at in _TELL_AGAIN if at > seconds), math.inf)
        shown = round(seconds if steps else now - self._began, 1)
        return [Emit("activity", {"seconds": shown, "what": words, "stepped": steps})]

    def _say(self, finding: Optional[Finding], seconds: Optional[float], may_stop: bool = True) -> List[Action]:
        if finding is None:
            return []
        stops = may_stop and self.level == "stop"
        before = self._said
        again = before is not None and (before.code, before.rank) == (finding.code, finding.rank)
        if before and again and not (stops and before.severity != ERROR):
            return []
        self._said = replace(finding, severity=ERROR) if stops else finding
        return [(Stop if stops else Warn)(self._said, seconds)]


def in_words(looks: List[RankLook]) -> str:
    """Describe what all ranks do, in at most three groups; those that wait for another process come last."""
    groups: Dict[str, List[RankLook]] = {}
    for look in looks:
        groups.setdefault(doing(look), []).append(look)
    most = sorted(groups, key=lambda words: (all(look.waits_for for look in groups[words]), -len(groups[words])))
    shown = [say_of(groups[words], words) for words in most[:3]]
    return "; ".join(shown) + (f"; and {len(most) - 3} more" if len(most) > 3 else "")
