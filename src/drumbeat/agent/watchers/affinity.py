"""Placement of the ranks: a sensor that reads /proc, and a watcher that judges once each rank has a GPU open or has stepped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from drumbeat.agent.watchers.contract import Action, Emit, Saw, Stop, Warn, WatchedAttempt
from drumbeat.base.processes import Asked
from drumbeat.base.record import from_plain
from drumbeat.findings.model import ERROR, WARNING
from drumbeat.inspector.gpu import compute_users, look_at_ranks
from drumbeat.inspector.record import RankSeen
from drumbeat.machine.model import Facts, Gpu
from drumbeat.machine.vendors import vendor_of
from drumbeat.machine.vendors.contract import Users
from drumbeat.plan.placement import UNKNOWN, changed, environment, rows, text_table, verdict
from drumbeat.plan.variables import steers

_FIRST = 1.0  # seconds from the start to the first look
_SLOWER = 1.3  # factor on the interval after each look that shows nothing new
_LONGEST = 15.0
_APART = 0.9  # seconds between two looks that must agree
_REFUTED = 60.0  # seconds in which a later look may refute a mismatch
_ANSWER_WITHIN = 30.0  # seconds for the driver to answer
_LOOK_WITHIN = 5.0
_PATIENCE = 2.0  # seconds without an answer after which the driver is taken to list none of our processes
_UNNUMBERED = 60.0  # seconds for which the processes of a command without steps must look alike


class RankLooks:
    """A sensor: reads this node's ranks from /proc, less often as time passes, at once after the first step."""

    def __init__(
        self, run_id: str, node: int, facts: Facts, wanted: Callable[[], bool],
        commands: Callable[[], Sequence[int]] = tuple,
    ) -> None:  # fmt: skip
        """Create the sensor. `commands`: processes of the agent that start ranks, and are not ranks."""
        self.run_id, self.node, self.wanted, self.commands = run_id, node, wanted, commands
        self.gpus = [gpu for gpu in facts.gpus if not gpu.integrated]
        self._users, self.asked = _GpuUsers(self.gpus), Asked(_LOOK_WITHIN)
        self._next: Optional[float] = None
        self._wait = _FIRST
        self._last: List[Tuple[Any, ...]] = []

    def look_soon(self, now: float) -> None:
        if self._next is not None:
            self._next, self._wait = min(self._next, now), _FIRST

    def poll(self, now: float, final: bool = False) -> List[Saw]:
        if final or not self.wanted():
            self.asked.end()
            return []
        if self._next is None:
            self._next = now + self._wait
        if not self.asked.busy:
            if now >= self._next:
                self._next = now + _LONGEST
                about = (self.run_id, self.node, self.gpus, self._users.read(now), self.commands())
                self.asked.ask(lambda: look_at_ranks(*about))
            return []
        answer = self.asked.take()
        if answer is None:
            return []
        seen = [(from_plain(RankSeen, about), environ) for about, environ in answer]
        shown = [(about.rank, about.pid, *_facts_of(about)) for about, _ in seen]
        self._wait = min(self._wait * _SLOWER, _LONGEST) if shown == self._last else _FIRST
        self._next, self._last = now + self._wait, shown
        if any(each.open and (each.gpus is None or each.rank is None) for each, _ in seen):
            self._users.ask(now)
        # Only the driver can tell whether a process without a number computes on the one GPU that it has open.
        unknown = [about for about, _ in seen if about.rank is None and len(about.open) == 1 and about.gpus is None]
        seen = [each for each in seen if each[0] not in unknown]
        return [Saw("ranks", {"seen": seen})] if seen else []


class _GpuUsers:
    """Asks the driver which processes compute on a GPU."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self.gpus, self.asked = gpus, Asked(_ANSWER_WITHIN)
        self._since: Optional[float] = None  # when it was first asked
        self._found: Optional[Users] = None

    def ask(self, now: float) -> None:
        self._since = now if self._since is None else self._since
        if vendor_of(self.gpus).users_command:
            self.asked.ask(lambda: list(compute_users(self.gpus).items()))

    def read(self, now: float) -> Optional[Users]:
        """Return the driver's last answer; None if there is none yet."""
        answer = self.asked.take()
        self._found = self._found if answer is None else {pid: tuple(gpus) for pid, gpus in answer}
        late = self._since is not None and (not self.asked.busy or now - self._since >= _PATIENCE)
        return {} if self._found is None and late else self._found


class Placement:
    """A watcher: reports the placement of the ranks, as far as two consecutive looks agree. A mismatch ends a run only if the
    next look shows it too, and is withdrawn if a later one refutes it."""

    def __init__(self, scene: WatchedAttempt, level: str) -> None:
        self.facts, self.bound, self.right, self.expected = scene.facts, scene.bound, scene.right, scene.variables
        self.first_rank, self.level, self.node, self.ranks = scene.first_rank, level, scene.node, scene.ranks
        self.gpus = any(not gpu.integrated for gpu in self.facts.gpus)
        self.done = False
        self.stepped = False
        self.on_first_step: Callable[[float], None] = lambda now: None
        self._seen: Dict[Tuple[Optional[int], int], RankSeen] = {}
        self._since: Dict[Tuple[Optional[int], int], float] = {}
        self._environ: Dict[int, Mapping[str, str]] = {}
        self._ended: Set[int] = set()  # ranks; what was seen of them still counts
        self._wrong: Tuple[str, ...] = ()  # codes of the last mismatch
        self._mismatches: Set[str] = set()  # checks that were reported as mismatches
        self._said_at: Optional[float] = None  # when it was reported

    def on(self, saw: Saw, now: float) -> List[Action]:
        if self.done:
            return []
        if saw.kind == "metric" and not self.stepped:
            self.stepped = True
            self.on_first_step(now)
        elif saw.kind == "ranks":
            self._note(saw.data["seen"], now)
            if self._complete(now):
                return self._say(now)
        elif saw.kind == "exited" and isinstance(saw.data.get("rank"), int):
            self._ended.add(saw.data["rank"])
        elif saw.kind == "ended" and self._said_at is None and (self.ranks or self._seen):
            return self._say(now, ended=True)
        return []

    def _numbered(self, about: RankSeen, alone: bool) -> Optional[RankSeen]:
        """Drop processes without a number if a launcher must number its ranks: they belong to the launcher, or are the only
        rank of one that numbers none (accelerate's). If the command starts the ranks itself, they may be ranks."""
        if not self.ranks or about.rank is not None:
            return about
        return replace(about, rank=self.first_rank) if alone and self.ranks == 1 and self.stepped else None

    def _note(self, looks: Sequence[Tuple[RankSeen, Mapping[str, str]]], now: float) -> None:
        known = [(self._numbered(about, len(looks) == 1), environ) for about, environ in looks]
        seen = [(about, environ) for about, environ in known if about is not None]
        alive = {about.rank for about, _ in seen}
        fresh = {key: each for key, each in self._seen.items() if key[0] in self._ended and key[0] not in alive}
        kept = {rank: environ for rank, environ in self._environ.items() if rank in self._ended}
        self._environ = {**kept, **{about.rank: environ for about, environ in looks if about.rank is not None}}
        for about, _ in seen:
            key = (about.rank, about.pid)
            before = self._seen.get(key)
            same = before is not None and _facts_of(before) == _facts_of(about)
            if not same:
                self._since[key] = now
            settled = same and now - self._since[key] >= _APART
            fresh[key] = replace(about, stepped=self.stepped, settled=settled)
        self._seen = fresh

    def _complete(self, now: float) -> bool:
        """Return true if two looks at every rank that still runs agree, with a GPU open or (without GPUs) after a step. A
        process without a number may still be about to start the ranks: only a step, or time, shows that it is a rank."""
        ready = [
            each for key, each in self._seen.items()
            if each.settled and each.cpus is not None and (not self.gpus or each.open or each.stepped)
            and (each.rank is not None or each.stepped or now - self._since[key] >= _UNNUMBERED)
        ]  # fmt: skip
        going_on = [each for each in self._seen.values() if each.rank not in self._ended]
        enough = len(ready) + len(self._ended - {each.rank for each in ready}) >= max(1, self.ranks)
        return bool(ready) and enough and all(each in ready for each in going_on)

    def _say(self, now: float, ended: bool = False) -> List[Action]:
        table = rows(self.facts, self.bound, self.right, list(self._seen.values()), self.first_rank, self._ended)
        # A command that starts the ranks itself sets their addresses, numbers and cores.
        expected = self.expected if self.ranks else [each for each in self.expected if steers(each.name)]
        more = changed(self._environ, expected, self.bound, self.first_rank)
        answer, variables = verdict(table, self.facts, self.bound), environment(more)
        wrong = [each for each in (*answer.findings, *more) if each.severity in (WARNING, ERROR)]
        before, self._wrong = self._wrong, tuple(each.code for each in wrong)
        stops = self.level == "stop" and not ended
        if stops and wrong and self._wrong != before:
            return []  # the next look decides
        if self._said_at is not None:
            self.done = not wrong or now - self._said_at > _REFUTED
            if wrong or answer.answer == UNKNOWN:
                return []
            refuted = "the earlier warning (mismatch) no longer holds"
            words = [f"; {refuted}" if each.check in self._mismatches else "" for each in (answer, variables)]
            answer = replace(answer, summary=answer.summary + words[0])
            variables = replace(variables, summary=variables.summary + words[1])
        told = {each.check for each in (answer, variables) if each.answer == "mismatch"}
        about_variables = bool(more) or variables.check in self._mismatches
        self._said_at, self._mismatches = now, told
        self.done = self.done or ended or stops or not wrong
        actions: List[Action] = [Emit("verdict", {"verdict": answer, "table": text_table(table), "rows": table})]
        actions += [Emit("verdict", {"verdict": variables})] if about_variables else []
        for finding in wrong:
            located = replace(finding, node=self.node, host=self.facts.host)
            actions.append(Stop(located) if stops else Warn(located))
        return actions


def _facts_of(about: RankSeen) -> Tuple[Any, ...]:
    return about.cpus, about.gpus, about.open, about.instances
