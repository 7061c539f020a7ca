"""Census: which processes of this node carry a rank, and of which world. Read from outside, so it works for any command."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Callable, Dict, FrozenSet, Iterable, List, Optional, Sequence, Tuple

from drumbeat.agent.watchers.contract import Action, Emit, Saw, Warn, WatchedAttempt
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.proc import start_time
from drumbeat.base.processes import Asked
from drumbeat.base.ranges import named_ranks
from drumbeat.base.record import from_plain
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import CERTAIN, ERROR, LIKELY, UNKNOWN, WARNING, Finding, Verdict
from drumbeat.inspector.ranks import MOST_LINKS, added, look
from drumbeat.inspector.record import PLENTY, Row
from drumbeat.plan.world_seen import (
    AS_PLANNED,
    LITTLE,
    Begun,
    Planned,
    copies,
    ended_early,
    judge,
    made_groups,
    silent,
    unmet,
)

find = Catalog("watchers")
_SOONEST, _LATEST = 0.5, 20.0  # seconds between two looks
_OF_AGE = 0.1  # the interval, as a share of the time since the last change: each look costs 20 ms
_COST = 25.0  # seconds to wait per second of CPU time of a look: a node may have thousands of processes
_AGAIN = 5.0  # seconds after which an unchanged result is sent to the lead again
_SETTLED = 0.9  # seconds for which looks must agree: processes come and go while ranks start
_TWICE = 2  # times that a complete result is sent: one look is no proof
_LOOK_WITHIN = 5.0
_GIVE_UP = 600.0  # seconds after the start and the first step at which looks end,
_RARELY = 60.0  # or their interval, if ranks have met and sent nothing yet; at most that, if they have sent little
# Seconds of steps after which looks end, however little was sent: by then it is known how much a step sends.
_STEPPING = 20.0

_Process = Tuple[int, Optional[int], Optional[int]]  # pid, rank, world size


class CensusLooks:
    """A sensor: the rank processes below those that the agent started. It looks often while there are changes, then more and more
    rarely. It stops once all ranks of this node are seen and connected and have exchanged plenty; the first step begins
    another such time, as what was sent before may not have been gradients. What it has seen of a process is kept while that
    lives."""

    def __init__(self, scene: WatchedAttempt, shared_loopback: bool) -> None:
        self.scene, self.shared_loopback, self.asked = scene, shared_loopback, Asked(_LOOK_WITHIN)
        self._mains: Sequence[int] = ()  # at the last look: one that has ended since was still running then
        self._begin: Optional[float] = None
        self._next = 0.0
        self._news = 0.0  # when a look last showed something new
        self._seen: Dict[_Process, Row] = {}
        self._complete = 0  # consecutive looks that showed all ranks
        self._may_speak = False  # they have met, but have sent each other nothing yet
        self._complete_since = 0.0
        self._stepped: Optional[float] = None  # when the ranks reported something for the first time
        self._before: Optional[int] = None  # bytes that each rank had exchanged at the first look after that

    def look_soon(self, now: float) -> None:
        """Look soon, as the ranks have reported something: now they are all there."""
        self._stepped, self._complete = now, 0
        if self._begin is not None:
            self._news, self._next = now, min(self._next, now + _SOONEST)

    def poll(self, now: float, final: bool = False) -> List[Saw]:
        if self._begin is None:
            self._begin, self._news, self._next = now, now, now + _SOONEST
        late = now - max(self._begin, self._stepped or 0.0) > _GIVE_UP
        told = self._complete > 1 and now - self._complete_since > 2 * _SETTLED + _SOONEST  # by `Census`
        if final or told or (late and not self._may_speak):
            self.asked.end()
            return []
        if not self.asked.busy:
            if now >= self._next:
                self._next = now + (_RARELY if late else _LOOK_WITHIN)
                self._ask()
            return []
        answer = self.asked.take()
        if answer is None:
            return []
        rows, cost = [from_plain(Row, row) for row in answer[0]], answer[1]
        rows, before = self._with_earlier(rows), self._seen
        self._seen = {_process(row): row for row in rows}
        self._news = self._news if _steady(before.values()) == _steady(rows) else now
        all_here = len(rows) == self.scene.planned_ranks and all(row.rank is not None for row in rows)
        proven = all_here and all(row.joined for row in rows)
        whole = all_here and all((row.joined or row.alone is None) and not row.starts_others for row in rows)
        self._may_speak = whole and any(row.joined and not row.has_sent and row.world_size != 1 for row in rows)
        whole = whole and not self._may_speak
        pause = max(_SOONEST, min(_OF_AGE * (now - self._news), _RARELY if whole else _LATEST))
        self._next = now + max(_RARELY if late else pause, _COST * cost)
        whole = whole and self._is_enough(rows, now)
        self._complete_since = self._complete_since if self._complete else now
        self._complete = self._complete + 1 if whole else 0
        for row in rows:
            if row.rank is not None and not row.starts_others:
                self.scene.known.note(row.pid, row.rank, row.links)
        rows = [replace(row, links=() if row.joined else row.links[:MOST_LINKS]) for row in rows]  # enough as proof
        others = [row for row in rows if row.rank is not None and row.pid not in self._mains]
        launchers = self.scene.met() if others else None
        if launchers is not None and launchers > 1:
            rows = [replace(row, later=True) for row in rows]
        data = {"rows": rows, "complete": whole, "proven": whole and proven, "unmet": launchers == 0}
        return [Saw("census", data)]

    def _is_enough(self, rows: Sequence[Row], now: float) -> bool:
        """Return true if the ranks have exchanged plenty since the first report, or if they have had the time to."""
        if all(row.hidden or row.world_size == 1 for row in rows):
            return True
        exchanged = min(row.exchanged for row in rows)
        if self._stepped is None:
            return exchanged >= PLENTY
        self._before = exchanged if self._before is None else self._before
        return exchanged - self._before >= PLENTY or now - self._stepped >= _STEPPING

    def _with_earlier(self, rows: Sequence[Row]) -> List[Row]:
        """Add earlier observations of these processes, and of other live processes without a RANK: those are known only by
        their connections, which come and go."""
        found = {_process(row): added(row, self._seen.get(_process(row))) for row in rows}
        if all(row.rank is None for row in rows):
            kept = {key: row for key, row in self._seen.items() if row.rank is None and start_time(row.pid)}
            found = {**kept, **found}
        return sorted(found.values(), key=lambda row: row.pid)

    def _ask(self) -> None:
        """Start a look in a child, which returns the rows and the CPU time it took: a child's counts from its fork."""
        scene, mains = self.scene, self.scene.mains()
        self._mains = mains
        about = (scene.node, mains, scene.port, self.shared_loopback, () if scene.are_ranks() else mains)
        self.asked.ask(lambda: (look(*about), time.process_time()))


def _process(row: Row) -> _Process:
    return row.pid, row.rank, row.world_size


def _steady(rows: Iterable[Row]) -> Tuple[Row, ...]:
    """Return the rows without the values that change at every look."""
    return tuple(
        replace(
            row, cpu=0.0, mapped=0, met=0, sent=row.has_sent + (row.exchanged >= PLENTY), out=0, ends=(),
            links=() if row.joined else row.links,
        )
        for row in rows
    )  # fmt: skip


class Census:
    """A watcher: sends the census to the lead when looks have agreed for a second, or at once if connections prove it. It is
    repeated while it is incomplete. `on_step` is called at the first report of a rank."""

    def __init__(self, first: bool = True, on_step: Callable[[float], None] = lambda now: None) -> None:
        self.on_step = on_step
        self._stepped = False
        self._last: Optional[Tuple[Row, ...]] = None
        self._since = 0.0  # when that was first seen
        self._told: Optional[Tuple[Row, ...]] = None
        self._told_at = 0.0
        self._times = 0  # times it was sent
        self._unmet_told = not first  # the script is the same everywhere: the first node reports it

    def on(self, saw: Saw, now: float) -> List[Action]:
        if saw.kind == "metric" and not self._stepped:
            self._stepped = True
            self.on_step(now)
        if saw.kind != "census":
            return []
        rows = tuple(saw.data["rows"])
        steady = _steady(rows)
        plain = tuple(replace(row, links=()) for row in steady)  # connections come and go
        if plain != self._last:
            self._last, self._since = plain, now
        if now - self._since < _SETTLED and not saw.data.get("proven"):
            return []
        actions: List[Action] = []
        if saw.data.get("unmet") and not self._unmet_told:
            self._unmet_told = True
            actions.append(Warn(unmet_finding(rows)))
        again = now - self._told_at >= _AGAIN if not saw.data["complete"] else self._times < _TWICE
        if steady != self._told or again:
            self._times = self._times + 1 if steady == self._told else 1
            self._told, self._told_at = steady, now
            actions.append(Emit("census", {"rows": rows}))
        return actions


def unmet_finding(rows: Sequence[Row]) -> Finding:
    """Report a script that starts its launcher past drumbeat's stand-in."""
    shown = [f"process {row.pid} on node {row.node} has RANK={row.rank}" for row in rows[:4]]
    return find("launcher-not-met", evidence=shown, seen=("RANK of the processes below the script",))


# The lead's side of the census: merges the counts of all nodes for one attempt.


_EVERY = 2.0  # seconds between two judgements
_READ_LATE = 5.0  # seconds by which the report of a step may be read late
_FRESH, _USUAL = 1.0, 1.5  # seconds, or times the usual time per step, for which the last known step is the last one
_SILENT = 40.0  # seconds for which ranks without a step must have computed without connections
_LIVED = 15.0  # the same where they have ended well
_LOADED = 9.0  # the last seconds of these, in which they must have imported nothing more
_COMPUTES = 0.1  # cores, of each rank
_MUTE = 20.0  # seconds of work, or
_MUTE_STEPS, _MUTE_STEPPING = 3, 10.0  # so many reports and seconds of steps, in which connected ranks send nothing
_KEPT_ALIVE = 100.0  # bytes per second that a framework's store may send to keep connections alive
_SAME_REPORTS = 2  # consecutive equal reports before a run is called wrong


@dataclass(frozen=True)
class Followed:
    """Processes without connections to each other, or that have met and send nothing, since they were first seen so."""

    processes: FrozenSet[Tuple[int, int]]
    since: float
    mapped: Tuple[int, ...]  # mapped files of each process
    loaded: float  # when that last changed
    cpu: Tuple[float, ...]  # CPU time of each at that time
    bytes: Tuple[int, ...]  # exchanged with other ranks
    met: Tuple[int, ...]  # bytes to the meeting point when they were first seen
    stepping: Optional[float] = None  # when they were first seen so after a reported step
    looks: int = 0  # further looks that showed the same
    steps: FrozenSet[float] = frozenset()  # times of the last step at each look

    @staticmethod
    def of(rows: Sequence[Row], at: float) -> Followed:
        return Followed(
            frozenset((row.node, row.pid) for row in rows), at, tuple(row.mapped for row in rows), at,
            tuple(row.cpu for row in rows), tuple(row.sent + row.out for row in rows), tuple(row.met for row in rows),
        )  # fmt: skip

    def again(self, now: Followed) -> Followed:
        """Return the record after a further look at the same processes. Importing more files is no work yet."""
        loading = {} if self.mapped == now.mapped else {"mapped": now.mapped, "loaded": now.since, "cpu": now.cpu}
        return replace(self, bytes=now.bytes, looks=self.looks + 1, **loading)  # type: ignore[arg-type]

    def computed(self, now: Followed) -> float:
        """Return the seconds in which each of them has computed with all libraries loaded; 0 if one has not."""
        seconds = now.since - self.loaded
        worked = all(cpu - then >= _COMPUTES * seconds for cpu, then in zip(now.cpu, self.cpu))
        return seconds if self.processes == now.processes and worked else 0.0


class WorldCount:
    """Judges the census of one attempt. `level`: off, warn or stop. Times are the lead's wall clock."""

    def __init__(self, planned: Planned, level: str) -> None:
        self.planned, self.level = planned, level
        self.rows: Dict[int, Tuple[float, Tuple[Row, ...]]] = {}  # node -> when, and its last rows
        self.most: Dict[int, Tuple[Row, ...]] = {}  # node -> the look that showed most of its ranks
        self.first_step: Optional[float] = None
        self.last_step: Optional[float] = None
        # node -> the step and its rows at its first report with steps
        self._begun: Dict[int, Tuple[int, Tuple[Row, ...]]] = {}
        # node -> steps since then, by its last report, and whether that is fresh
        self._steps: Dict[int, Tuple[int, bool]] = {}
        self.apart: Optional[Finding] = None  # ranks that train in groups of their own, as far as known
        self._alone: Optional[Followed] = None
        self._mute: Optional[Followed] = None
        self._mute_told = self._moved = False  # it was reported; bytes were sent since then
        self._same: Dict[int, int] = {}  # node -> how many of its last reports showed the same ranks
        self._said = ""  # the last verdict's answer
        self._count = 0  # ranks that it named
        self._confidence = ""
        self._summary = ""
        self._versions_said = False
        self._little = False  # it said that the ranks exchange little per step
        self._changed = False
        self._next = 0.0

    def add(self, node: int, rows: Tuple[Row, ...], at: float, step: Optional[int] = None) -> None:
        """Add a node's census, taken at `at`. `step`: the last step that is known by then."""
        before = self.rows[node][1] if node in self.rows else ()
        same = node in self.rows and [_rank_of(row) for row in before] == [_rank_of(row) for row in rows]
        self._same[node] = self._same[node] + 1 if same else 1
        self.rows[node] = (at, rows)
        if len(rows) >= len(self.most.get(node, ())):
            self.most[node] = rows
        if step is not None:
            if node not in self._begun or {row.pid for row in rows} != {row.pid for row in self._begun[node][1]}:
                self._begun[node] = step, rows
            made = max(0, step - self._begun[node][0])
            self._steps[node] = made, self._is_fresh(at, made)
        self._changed = True

    def _is_fresh(self, at: float, made: int) -> bool:
        """Return true if the steps known at `at` are about those made by then. On a busy machine they are read late, and bytes
        of later steps would be counted as theirs."""
        if self.first_step is None or self.last_step is None:
            return True
        return at - self.last_step <= max(_FRESH, _USUAL * (self.last_step - self.first_step) / max(1, made))

    def is_due(self, now: float) -> bool:
        """Return true if there is something new to judge. Not at every report, since each node sends one and a judgement
        covers all."""
        if not self._changed or now < self._next or len(self.rows) < self.planned.nodes:
            return False
        self._changed, self._next = False, now + _EVERY
        return True

    def judge(self) -> Tuple[Optional[Verdict], List[Finding], bool]:
        """Return a new verdict or None, findings for the user, and whether to stop the run for them."""
        if self.level == "off" or len(self.rows) < self.planned.nodes:
            return None, [], False
        rows = [row for node in sorted(self.rows) for row in self.rows[node][1]]
        training = self.first_step is not None and all(at > self.first_step for at, _ in self.rows.values())
        training = training and not any(row.later for row in rows)
        verdict = judge(rows, self.planned, training, self._since_first_step())
        mute = self._exchange_nothing(rows)
        if mute is not None:
            verdict = unmet(mute)
        elif self._mute_told and not self._moved and verdict:
            met = (verdict.answer, verdict.confidence) == (AS_PLANNED, LIKELY)
            verdict = None if met else verdict  # a meeting is no news
        lonely = copies(rows, self.planned, training)
        if not self._train_alone(rows, lonely is not None, training):
            if lonely and verdict is not None and verdict.answer == UNKNOWN:
                verdict = None
            lonely = None
        if lonely:
            verdict = unmet(lonely)
        # Between two stages of a script, or at its end, more ranks have been seen than are there now.
        between = any(len(self.rows[node][1]) < len(most) for node, most in self.most.items())
        if verdict is not None and (self._is_known(verdict) or (verdict.answer == UNKNOWN and between)):
            verdict = None
        if verdict is not None and verdict.findings and min(self._same.values()) < _SAME_REPORTS:
            verdict = None
        findings = list(verdict.findings) if verdict else []
        if verdict:
            verdict = self._withdrawing(verdict)
            self._said, self._count, self._confidence = verdict.answer, verdict.count or 0, verdict.confidence
            self._summary, self._little = verdict.summary, LITTLE in verdict.seen
            if lonely:
                self.apart = lonely if training and made_groups(rows, self.planned) else None
        stop = self.level == "stop" and any(finding.severity == ERROR for finding in findings)
        if not stop:
            findings = [replace(each, severity=WARNING) if each.severity == ERROR else each for each in findings]
        return verdict, findings, stop

    def _is_known(self, verdict: Verdict) -> bool:
        """Return true if this verdict is known. A world that some ranks have left since was complete; ranks without a number
        may turn out to be more, and a certain verdict may become doubtful."""
        if verdict.answer == self._said:
            changed = self._confidence != verdict.confidence and (verdict.count == 1 or verdict.confidence == CERTAIN)
            changed = changed or (LITTLE in verdict.seen and not self._little)
            words = bool(verdict.unseen) and verdict.summary != self._summary and verdict.confidence == self._confidence
            return (verdict.count or 0) <= self._count and not changed and not words
        return bool(self._said) and verdict.answer == UNKNOWN

    def _since_first_step(self) -> Begun:
        begun = ((node, row) for node, (_, rows) in self._begun.items() if node in self._steps for row in rows)
        return {(node, row.pid): (*self._steps[node], row) for node, row in begun}

    def _withdrawing(self, verdict: Verdict) -> Verdict:
        """Add a withdrawal to the verdict if it refutes an earlier one."""
        was_certain = self._said == AS_PLANNED and self._confidence == CERTAIN
        if was_certain and verdict.answer == AS_PLANNED and verdict.confidence != CERTAIN:
            refuted = f"the earlier verdict (certain: {self._summary}) no longer holds"
            return replace(verdict, summary=f"{verdict.summary}; {refuted}")
        before = self._said if self._said != UNKNOWN else ""
        if verdict.answer != AS_PLANNED or before in ("", AS_PLANNED):
            return verdict
        self.apart = None
        self._mute_told = False
        return replace(verdict, summary=f"{verdict.summary}; the earlier warning ({before}) no longer holds")

    def _train_alone(self, rows: Sequence[Row], alone: bool, training: bool) -> bool:
        """Return true if these same processes, seen twice without a connection, went on training. Proof is a step reported
        later (at its end a program may have closed its connections), or the time that they computed with all libraries loaded."""
        if not alone:
            self._alone = None
            return False
        now, before = self._followed(rows), self._alone
        self._alone = before.again(now) if before and before.processes == now.processes else now
        if training and self._alone.stepping is None:  # observations before the first step do not count
            self._alone = replace(self._alone, stepping=now.since)
        began = self._alone.stepping
        if training and began is not None and min(now.since, self.last_step or 0.0) > began + _READ_LATE:
            return True
        return self._computed_alone(rows, _SILENT)

    def _followed(self, rows: Sequence[Row]) -> Followed:
        return Followed.of(rows, max(at for at, _ in self.rows.values()))

    def _computed_alone(self, rows: Sequence[Row], least: float) -> bool:
        """Return true if the processes without connections computed, at least this many seconds after they were seen."""
        now, alone = self._followed(rows), self._alone
        return alone is not None and alone.computed(now) >= _LOADED and now.since - alone.since >= least

    def _exchange_nothing(self, rows: Sequence[Row]) -> Optional[Finding]:
        """Report ranks that have met, but trained on without sending each other a byte. Proof of training is steps reported in
        this time, or the time that they computed with all libraries loaded."""
        everyone, rows = rows, [row for row in rows if row.joined]
        if not rows:
            return None
        now, before = self._followed(rows), self._mute
        same = before is not None and before.processes == now.processes
        if before is None or not same or self._speak(now, before, rows):
            self._mute, self._moved = now, self._moved or same
            return None
        before = before.again(now)
        if self.last_step is not None and self.last_step >= before.since:
            before = replace(before, steps=before.steps | {self.last_step})
        self._mute, seconds, steps = before, now.since - before.since, len(before.steps)
        stepping = steps >= _MUTE_STEPS and seconds >= _MUTE_STEPPING
        if self._mute_told or before.looks < _TWICE or not (stepping or before.computed(now) >= _MUTE):
            return None
        found = silent(everyone, self.planned, seconds, steps)
        self._mute_told, self._moved = found is not None, False
        return found

    def _speak(self, now: Followed, before: Followed, rows: Sequence[Row]) -> bool:
        """Return true if bytes went to other ranks, or more to the meeting point than a store's keep-alive messages."""
        most = _KEPT_ALIVE * (now.since - before.since)
        return any(more > then for more, then in zip(now.bytes, before.bytes)) or any(
            row.met - then > (most if row.framework else 0) for row, then in zip(rows, before.met)
        )

    def versions(self) -> Optional[Verdict]:
        """Return the verdict, once, that ranks have loaded different versions of torch or NCCL."""
        rows = [row for _, each in self.rows.values() for row in each if row.rank is not None]
        usual: Dict[str, str] = {}  # package -> the version of most ranks; not loaded yet is unknown
        for version, _ in Counter(each for row in rows for each in row.versions).most_common():
            usual.setdefault(version.split()[0], version)
        loaded = [(row.rank or 0, each) for row in rows for each in row.versions]
        odd = sorted((rank, each) for rank, each in loaded if each != usual[each.split()[0]])
        if self._versions_said or not odd or self.level == "off":
            return None
        self._versions_said = True
        shown = [f"rank {rank}: {versions}" for rank, versions in odd[:8]]
        who = named_ranks([rank for rank, versions in odd if versions == odd[0][1]], 8)
        rank, version = odd[0]
        found = find(
            "versions-differ", who=who, versions=version, usual=usual[version.split()[0]], evidence=shown, rank=rank
        )
        seen = ("the packages from which the ranks have loaded their libraries",)
        return Verdict("environment", "mismatch", CERTAIN, found.title, (found,), seen)

    def at_end(self, well: bool) -> Optional[Verdict]:
        """Return the verdict after all ranks have ended, if none was given before. `well`: with 0; they never connected then."""
        rows = [row for node in sorted(self.most) for row in self.most[node]]
        if self._said or self.level == "off" or not rows:
            return None
        lonely = copies(rows, self.planned)
        if well and lonely and self._computed_alone(rows, _LIVED):
            return unmet(lonely)
        verdict = judge(rows, self.planned, True, self._since_first_step())
        if verdict is None or verdict.answer not in (AS_PLANNED, UNKNOWN):
            return None  # seen only once
        if verdict.answer == AS_PLANNED or all(row.rank is None for row in rows):
            return verdict
        return replace(verdict, summary=ended_early(rows, self.planned, well))


def _rank_of(row: Row) -> Tuple[object, ...]:
    return row.pid, row.rank, row.world, row.starts_others, row.complete
