"""What members tell the lead while ranks run: one place for each type of message."""

from __future__ import annotations

import signal
import time
from typing import Any, Callable, Dict, List, Type

from drumbeat.agent.folder.folder_child import FolderChild
from drumbeat.agent.lead.lead import Lead
from drumbeat.agent.lead.lead_acts import Act, Record, record_finding
from drumbeat.agent.lead.stop_requests import LAUNCHER, NOW, SIGNAL, StopRequest
from drumbeat.agent.lead_watch import LeadWatching
from drumbeat.agent.wire.files import take
from drumbeat.agent.wire.messages import (
    Beat,
    Counted,
    Done,
    FilePart,
    FirstStep,
    Found,
    Judged,
    Looked,
    Message,
    RankEnded,
    StopAsked,
    WireError,
)
from drumbeat.base.record import to_plain
from drumbeat.runfolder.layout import RunFolder


class MemberMessages:
    """`do` carries out what the lead decides."""

    def __init__(
        self,
        lead: Lead,
        watching: LeadWatching,
        do: Callable[[List[Act]], None],
        folder: RunFolder,
        child: FolderChild,
        by_mpirun: bool,
    ) -> None:
        self.lead, self.watching, self.do, self.folder, self.child = lead, watching, do, folder, child
        self.by_mpirun = by_mpirun
        self._first_step_of = -1  # the attempt whose first step is recorded
        self._handlers: Dict[Type[Any], Callable[[int, Any], None]] = {
            Beat: self._beat, RankEnded: self._rank_ended, Done: self._done, StopAsked: self._stop_asked,
            FirstStep: self._first_step, Judged: self._judged, Found: self._found, Looked: self._looked,
            FilePart: self._file, Counted: self._counted,
        }  # fmt: skip

    def handle(self, member: int, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            raise WireError(f"a member does not send {type(message).__name__}")
        handler(member, message)

    def _beat(self, member: int, message: Beat) -> None:
        self.lead.beat(member, message)
        self.do(self.watching.beat(member, message, time.monotonic()))

    def _rank_ended(self, member: int, message: RankEnded) -> None:
        now = time.monotonic()
        self.do(self.watching.rank_ended(member, message, now) if self.lead.is_current(message.attempt) else [])
        self.do(self.lead.rank_ended(member, message, now))

    def _done(self, member: int, message: Done) -> None:
        self.do(self.lead.member_done(member, message, time.monotonic()))

    def _stop_asked(self, member: int, message: StopAsked) -> None:
        number = message.signal
        why = f"node {member} was asked to stop by {signal.Signals(number).name}"
        if number == signal.SIGQUIT:
            self.do(self.lead.stop(StopRequest(NOW, number, why)))
        else:
            way = LAUNCHER if self.by_mpirun else SIGNAL
            self.do(self.lead.signalled(StopRequest(way, number, why), time.monotonic()))

    def _first_step(self, member: int, message: FirstStep) -> None:
        attempt = self.lead.attempts[-1].number if self.lead.attempts else -1
        if attempt > self._first_step_of:
            self._first_step_of = attempt
            first = message.t + self.lead.members[member].clock_offset
            self.lead.first_step = (attempt, first)
            self.do([Record("first-step", {"seconds": round(first - self.lead.order.created, 3)})])

    def _judged(self, member: int, message: Judged) -> None:
        self.do([Record("verdict", {"verdict": to_plain(message.verdict), "peer": member})])

    def _found(self, member: int, message: Found) -> None:
        self.do([record_finding(message.finding)])
        self.lead.found(member, message.finding)
        if message.stop:
            self.do(self.lead.watcher_stop(message.finding, time.monotonic()))

    def _looked(self, member: int, message: Looked) -> None:
        self.do(self.watching.looked(member, message, time.monotonic()))

    def _counted(self, member: int, message: Counted) -> None:
        self.lead.counted(member, message)

    def _file(self, member: int, message: FilePart) -> None:
        take(self.folder.node(member), message, self.child.create, self.child.append)
