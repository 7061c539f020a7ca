"""How this node's processes ended. What the launcher and the logs say of it is read by a forked child: storage may hang."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Callable, List, Optional, Tuple

from drumbeat.agent.ranks.end import End, plain_end
from drumbeat.agent.ranks.explain import Explainer
from drumbeat.agent.ranks.launchers import Direct
from drumbeat.agent.ranks.stage_findings import STAGE_FAILED
from drumbeat.base import clock
from drumbeat.base.forked import Forked
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.record import from_plain, to_plain
from drumbeat.findings.model import INFO, STOPPED, Finding
from drumbeat.plan.argv import Process

READ_WITHIN = 10.0  # seconds
_BY_A_SIGNAL = ("terminated", "killed")  # codes of ends of which the signal is all that is known
ENDED_BY_LAUNCHER = Finding(STOPPED, INFO, "ended by its launcher", "another rank of the launcher had failed")


@dataclass(frozen=True)
class Exit:
    """A process that was started for this node has ended."""

    process: Process
    status: int  # as waitpid gives it
    at: float  # wall clock
    seconds: float  # after its start
    by_us: bool
    end: Optional[End] = None  # of one rank whose launcher goes on, where that is what has ended


@dataclass(frozen=True)
class RankExit:
    """What that says about one rank; `end.finding` is why."""

    end: End
    seconds: float
    by_us: bool


class Ends:
    """For one attempt. `done` gets every rank's end, in the order in which the processes ended."""

    def __init__(
        self, launcher: Direct, explainer: Explainer, attempt: int, done: Callable[[RankExit], None],
        within: float = READ_WITHIN,
    ) -> None:  # fmt: skip
        self.launcher, self.explainer, self.attempt, self.done, self.within = launcher, explainer, attempt, done, within
        self._waiting: List[Exit] = []
        self._reading: Tuple[Exit, ...] = ()
        self._child: Optional[Forked] = None
        self._began = clock.now()

    def __bool__(self) -> bool:
        """Whether an end is not told yet."""
        return bool(self._waiting or self._reading)

    @property
    def pid(self) -> int:
        """Of the child that reads; 0 where there is none."""
        return self._child.pid if self._child else 0

    def add(self, ended: Exit) -> None:
        self.hear(ended.process, ended.by_us)
        if ended.status == 0 and ended.by_us and not self.launcher.may_hide_failures and not self:
            end = replace(plain_end(ended.process.rank, 0, ended.at), of_command=not self.launcher.is_rank)
            self.done(RankExit(end, ended.seconds, ended.by_us))
        else:
            self._waiting.append(ended)

    def hear(self, launcher: Process, by_us: bool) -> None:
        """Ranks that ended with 0 while their launcher goes on, as its driver notes them."""
        for end in self.launcher.early_ends(self.attempt):
            self._waiting.append(Exit(launcher, 0, end.at, round(max(0.0, end.at - self._began), 3), by_us, end))

    def poll(self) -> None:
        if self._child is not None and self._child.poll():
            answer, exits = self._child.answer, self._reading
            self._child, self._reading = None, ()
            for each in _parse(answer) if answer else [self._unread(ended) for ended in exits]:
                self.done(each)
        if self._child is None and self._waiting:
            self._reading, self._waiting = tuple(self._waiting), []
            self._child = Forked(self._read, self.within)

    def give_up(self) -> None:
        """Tell what is left without reading anything."""
        if self._child is not None:
            self._child.end()
            self._child = None
        exits, self._reading, self._waiting = [*self._reading, *self._waiting], (), []
        for ended in exits:
            self.done(self._unread(ended))

    def _read(self) -> bytes:
        """In the child."""
        found = [
            each for ended in self._reading for each in read_exit(self.launcher, self.explainer, self.attempt, ended)
        ]
        return json.dumps(to_plain(found)).encode()

    def _unread(self, ended: Exit) -> RankExit:
        end = ended.end or plain_end(ended.process.rank, ended.status, ended.at)
        finding = self.explainer.unread(end, ended.by_us, self.within) if end.exit_code != 0 else None
        return RankExit(replace(end, finding=finding), ended.seconds, ended.by_us)


def read_exit(launcher: Direct, explainer: Explainer, attempt: int, ended: Exit) -> List[RankExit]:
    found = []
    ends = [ended.end] if ended.end else launcher.ends(attempt, ended.process, ended.status, ended.at)
    for end in ends:
        finding, by_us = end.finding, ended.by_us
        if finding is None and end.exit_code != 0:
            finding = explainer.explain(end, ended.by_us)
            if end.by_launcher and end.signal and finding.code in _BY_A_SIGNAL:
                finding, by_us = ENDED_BY_LAUNCHER, True
        elif finding is None and not ended.by_us:
            one_of_many = not (launcher.is_rank or end.of_command)  # its launcher's driver has seen its exit code
            look = explainer.doubt if launcher.may_hide_failures and not one_of_many else explainer.caught
            finding = look(end, launcher.once and not one_of_many)
        elif finding is not None and finding.code == STAGE_FAILED:
            finding = _with_cause(finding, launcher, explainer, end)
        found.append(RankExit(replace(end, finding=finding), ended.seconds, by_us))
    return found


def _with_cause(finding: Finding, launcher: Direct, explainer: Explainer, end: End) -> Finding:
    """Why a launcher in the script failed, before what became of the script."""
    failed = launcher.failed_rank()
    why = explainer.explain(failed, by_us=False) if failed else explainer.doubt(end, launcher.once)
    if why is None:
        return finding
    words = f"{why.title}: {why.cause}" if failed and why.cause else why.title
    return replace(finding, cause=f"{words}; {finding.cause}", evidence=why.evidence or finding.evidence)


def rank_meant(launcher: Direct, end: End, finding: Finding) -> Optional[int]:
    """The rank that a finding is about: a launcher names it in its own lines."""
    if end.exit_code == 0:
        return finding.rank if launcher.once else end.rank
    if end.of_command or (not launcher.starts_ranks and finding.rank is not None):
        return finding.rank
    return end.rank


def _parse(answer: bytes) -> List[RankExit]:
    return [from_plain(RankExit, each) for each in json.loads(answer)]
