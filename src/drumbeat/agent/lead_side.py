"""The lead's side of the run: passes the members' messages to the lead, and carries out its decisions."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import time
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

from drumbeat.agent.agent import Agent
from drumbeat.agent.folder.child import Earlier, earlier_starts, summary_at_the_end
from drumbeat.agent.guard import warn
from drumbeat.agent.lead.connections import Connections, Outbox, gather_files
from drumbeat.agent.lead.lead import Lead
from drumbeat.agent.lead.model import (
    CANCEL,
    LAUNCHER,
    NOTICE,
    NOW,
    SIGNAL,
    USER,
    Act,
    Finish,
    Record,
    StopRequest,
    Tell,
    record_finding,
    record_verdict,
)
from drumbeat.agent.lead.summary import Tracking, missing_packages, python_of, run_on_end, what_follows, write_end
from drumbeat.agent.ranks.start import End
from drumbeat.agent.watchers.build import build_lead_watchers
from drumbeat.agent.watchers.contract import AskLook, Emit, Saw, Stop, Warn, Watcher
from drumbeat.agent.wire import messages as wire
from drumbeat.agent.wire.meet import free_port, is_held, resolve
from drumbeat.agent.wire.messages import Message, WireError, take
from drumbeat.base import clock
from drumbeat.base.processes import in_child, on_storage
from drumbeat.base.record import from_plain, to_plain
from drumbeat.base.signals import EXIT_STORAGE
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import Finding
from drumbeat.machine.host import LiveHost
from drumbeat.machine.model import Facts
from drumbeat.machine.software import all_versions
from drumbeat.plan.scene import rendezvous
from drumbeat.runfolder.events import ORPHANED
from drumbeat.runfolder.files import EventLog, replace_json
from drumbeat.runfolder.layout import RunFolder, StopFile
from drumbeat.runfolder.state import CODE as HANG
from drumbeat.runfolder.summary import REQUEUE, Summary

find = Catalog("lead")

# Feeds the lead's watchers and turns their requests into acts of the lead.


class LeadWatching:
    def __init__(self, lead: Lead, watchers: Sequence[Watcher]) -> None:
        self.lead, self.watchers = lead, watchers
        self._asked = 0  # looks so far
        self._asking: Dict[int, Watcher] = {}  # number of a look -> its watcher; only the latest of each

    def beat(self, member: int, beat: wire.Beat, now: float) -> List[Act]:
        return self._feed(Saw("beat", {"member": member, "beat": beat}), now)

    def rank_ended(self, member: int, end: End, now: float) -> List[Act]:
        known = self.lead.members.get(member)
        about = {
            "rank": end.rank, "exit_code": end.exit_code, "by_us": end.by_us,
            "node": member, "host": known.host if known else "", "of_command": end.of_command,
            "words": end.finding.evidence[0].text[:200] if end.finding and end.finding.evidence else "",
        }  # fmt: skip
        return self._feed(Saw("exited", about), now)

    def looked(self, member: int, answer: wire.Looked, now: float) -> List[Act]:
        watcher = self._asking.get(answer.number)
        if watcher is None or not self.lead.is_current(answer.attempt):
            return []
        return self._one(
            watcher, Saw("looked", {"member": member, "looks": list(answer.looks), "ras": list(answer.ras)}), now
        )

    def tick(self, now: float) -> List[Act]:
        return self._feed(Saw("tick"), now)

    def recorded(self, kind: str, now: float) -> List[Act]:
        """Tell the watchers of the lead's decision: an attempt begins, or its ranks are being ended."""
        if kind == "attempt-started":
            attempt = self.lead.attempts[-1]
            taking_part = {number: self.lead.members[number] for number in attempt.assignment}
            members = {number: {"host": each.host, "ranks": each.ranks} for number, each in taking_part.items()}
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
                acts.append(record_finding(action.finding, seconds=action.seconds))
                if isinstance(action, Stop):
                    acts += self.lead.watcher_stop(action.finding, now)
        return acts

    def _ask(self, watcher: Watcher, members: Tuple[int, ...]) -> Tell:
        self._asked += 1
        self._asking = {number: who for number, who in self._asking.items() if who is not watcher}
        self._asking[self._asked] = watcher
        return Tell(members, wire.Look(self.lead.attempts[-1].number, self._asked))


# Where the ranks meet (MASTER_ADDR, MASTER_PORT), and who takes part in an attempt, as recorded in peers.json.


class RanksMeeting:
    def __init__(self) -> None:
        self.address = "127.0.0.1"  # this machine's; replaced by a better one when a member has reached us by it

    def pick(self, lead: Lead, facts: Facts, world: wire.World, first: int) -> Tuple[str, int]:
        """Choose the ranks' meeting point on the machine of node 0, which is member `first`; on our own machine, its first
        free port."""
        order = lead.order
        planned = rendezvous(order, wire.peers_of(world, order, 0, self.address, facts))
        self.address = planned.address or self.address
        exported = os.environ.get("MASTER_PORT", "")
        if exported.isdigit() and not lead.attempts:
            return self.address, int(exported)  # the user's own choice wins, unless the port is in use
        used = {attempt.port for attempt in lead.attempts}
        ports = [port for port in planned.ports if port not in used] or list(planned.ports)
        if first and not order.emulated:
            return lead.members[first].address, ports[0]  # a spare is node 0: only it could tell which ports are free
        return self.address, free_port(self.address, ports)

    def is_taken(self, lead: Lead) -> bool:
        """Return true if another program has the port of the attempt that has just ended; false if that is on another machine."""
        attempt = lead.attempts[-1]
        return is_held(attempt.port) if lead.order.emulated or not attempt.assignment[0] else False

    def peers(self, lead: Lead) -> Dict[str, Any]:
        """Record the attempt's members and their node ranks; each node writes its own facts."""
        attempt, members = lead.attempts[-1], lead.members
        nodes = [
            {"node": node, "member": number, "host": member.host, "address": member.address,
             "clock_offset": member.clock_offset, "ranks": member.ranks}
            for node, number in enumerate(attempt.assignment)
            for member in [members[number]]
        ]  # fmt: skip
        spares = [
            {"member": number, "host": member.host}
            for number, member in sorted(members.items())
            if member.fit and number not in attempt.roles
        ]
        meeting = {"master_addr": self.address, "master_port": attempt.port}
        return {"nodes": nodes, "spares": spares, **meeting, "schema": "1.0"}


_LINES = {"TERM": SIGNAL, "INT": USER, "USR2": NOTICE, "CANCEL": CANCEL}  # the first word of a line in the `stop` file
_LOOK_EVERY = 1.0  # seconds between two checks whose cost grows with the members
_PACKAGES = 30.0  # seconds to list the installed packages
_LARGE = 250  # members
_SILENCE = 5.0  # seconds without data after which the lead no longer waits for members' files
_END = 60.0  # seconds for the writes before the summary, and for the summary
_LEAVE = 120.0  # seconds for all members' files


class LeadSide:
    lead: Lead  # these three are set by `begin`
    watching: LeadWatching
    events: EventLog

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.folder = RunFolder(agent.order.folder)
        self.stop_file = StopFile(self.folder.stop)
        self.connections = Connections(agent.order, agent.selector, agent.token, self)
        self.meeting = RanksMeeting()
        self.last_look = 0.0
        self.outbox = Outbox(self._deliver)
        self.exit_code: Optional[int] = None  # of the run, once decided
        self.tracking: Optional[Tracking] = None
        self.untracked: List[str] = []  # trackers that are not installed
        self.asked: List[List[str]] = []  # lines of the `stop` file from before our start that apply to it

    def skip_old_stops(self) -> None:
        again, events = self.agent.order.start > 0, self.folder.events

        def first_look() -> Any:
            self.stop_file.position = self.stop_file.skip(again, events)
            return self.stop_file.look(), self.stop_file.position

        self.asked, self.stop_file.position = self.agent.on_storage(first_look, self.folder.path)

    def begin(self) -> None:
        """Open the run folder: from now on stop requests are obeyed and recorded."""
        agent, order = self.agent, self.agent.order
        child = agent.open_folder(self.folder, self.stop_file, self.folder.run_json)
        found = agent.on_storage(lambda: to_plain(earlier_starts(self.folder)), self.folder.path)
        earlier = from_plain(Earlier, found)
        self.events = EventLog(self.folder.events, 0, child.append)
        self.lead = Lead(
            order,
            lambda world, first: self.meeting.pick(self.lead, agent.facts, world, first),
            time.monotonic(),
            earlier=list(earlier.ends),
            requeues=earlier.requeues,
            port_taken=lambda: self.meeting.is_taken(self.lead),
        )
        self.watching = LeadWatching(self.lead, build_lead_watchers(order))
        self.lead.first_attempt = max(order.start, 1 + max((each.attempt for each in earlier.ends), default=-1))
        started = {
            "run_id": order.run_id, "nodes": order.nodes, "ranks_per_node": order.ranks_per_node,
            "launcher": order.launcher, "launcher_why": order.launcher_why,
            "job_began": agent.facts.identity.began_at,
        }  # fmt: skip
        self.events.write("run-started", started)
        self.events.attempt = self.lead.first_attempt
        self._obey_lines(self.asked)  # before any rank starts
        try:
            agent.on_storage(
                lambda: replace_json(self.folder.packages, all_versions(LiveHost(), order.command[0], order.workdir)),
                order.workdir, _PACKAGES,
            )  # fmt: skip
        except TimeoutError as error:
            agent.complain(f"versions of installed packages are not recorded: {error}")
        if order.track:
            self._begin_tracking()

    def _begin_tracking(self) -> None:
        """Start the trackers; a missing package is found before any rank starts."""
        agent = self.agent
        self.untracked = agent.on_storage(lambda: missing_packages(agent.order), agent.order.workdir, _PACKAGES * 2)
        if not self.untracked:
            assert agent.node
            self.tracking = Tracking(agent.order, self.folder, agent.bundle, agent.node.beside)

    def open(self) -> None:
        agent, order = self.agent, self.agent.order
        if self.lead.phase == "ended":
            return
        if order.members > 1:
            self.connections.open()
            self.meeting.address = resolve(order.master, agent.wait_politely) or self.meeting.address
        hello = agent.hello(self.meeting.address)
        if self.untracked:
            names, python = " ".join(self.untracked), python_of(order)
            missing = find("tracker-missing", names=names, python=python, node=0, host=hello.host)
            hello = dataclasses.replace(hello, findings=(*hello.findings, missing))
        self._do(self.lead.hello(hello, 0.0, time.monotonic()))

    def tell(self, message: Message) -> None:
        """Pass this node's own messages to the lead like any other's."""
        self.from_member(0, message)

    def beat(self) -> None:
        if self.agent.node and hasattr(self, "watching"):
            self.from_member(0, self.agent.node.progress_beat())

    def tick(self, now: float) -> None:
        self._do(self.lead.tick(now))
        self.send_some()
        self.connections.send_rest()
        if self.lead.phase == "ended" or not (self.lead.is_gathering or self.lead.is_elastic):
            self.connections.close_door()
        if now - self.last_look >= _LOOK_EVERY:
            self.connections.tick(now, now - self.last_look - _LOOK_EVERY)
            self._do(self.watching.tick(now))
            self.last_look = now
        self.look_for_stop(now)

    @property
    def busy(self) -> bool:
        return bool(self.outbox)

    @property
    def calm(self) -> bool:
        node = self.agent.node
        going = node is not None and node.calm and self.lead.phase == "running" and not self.outbox
        return going and self.lead.attempts[-1].first_failure is None

    @property
    def patient(self) -> bool:
        """Return true while the ranks of a large job run: most messages are heartbeats. In the muster clocks are compared, so
        no delay."""
        return self.lead.phase == "running" and self.agent.order.members > _LARGE

    def give_up(self) -> None:
        """End the run on all nodes now, because this agent has lost its guard."""
        self._do(self.lead.give_up())
        while self.outbox:
            self.outbox.send_some()

    def storage_lost(self, finding: Finding) -> None:
        self.events.muted = True
        self._do(self.lead.storage_lost(finding))

    def look_for_stop(self, now: float) -> None:
        self._obey_lines(self.agent.child.take_stops() if self.agent.child else ())

    def _obey_lines(self, lines: Iterable[Sequence[str]]) -> None:
        for name, why in lines:
            if name == "LOST":
                self._do(self.lead.waits_in_vain(why))
                continue
            number = signal.SIGINT if name == "INT" else signal.SIGTERM
            self._do(self.lead.stop(StopRequest(_LINES[name], number, why, clock.now())))

    def send_some(self) -> None:
        """Send members as many messages as fit into one turn; the run ends when all were sent."""
        self.outbox.send_some()
        if self.exit_code is not None and not self.outbox:
            self.agent.exit_code = self.exit_code

    def leave(self) -> None:
        """Leave last: files that members still send must get into the run folder. Writing may block, so a child does it, while
        the guard keeps getting beats."""
        if self.connections.by_socket:

            def gather() -> bytes:
                gather_files(self.connections.by_socket, self.folder, _LEAVE, _SILENCE)
                return b"done"

            in_child(gather, _LEAVE + _SILENCE, self.agent.beat)
        until = self.tracking.end() if self.tracking else 0.0
        if self.agent.order.on_end:
            self._run_on_end()
        for log in self.tracking.wait(until, self.agent.beat) if self.tracking else ():
            self.agent.complain(
                f"not all metrics reached a tracker, {log} says why: drumbeat report --export sends them again"
            )

    def _run_on_end(self) -> None:
        agent = self.agent
        try:
            plain = agent.on_storage(lambda: to_plain(summary_at_the_end(self.folder)), self.folder.path)
        except OSError as error:
            agent.complain(f"on-end was not run: {error}")
            return
        problem = run_on_end(agent.order, self.folder, from_plain(Summary, plain), agent.beat) if plain else ""
        if problem:
            agent.complain(problem)

    # -- what arrives on the connections -----------------------------------------------------------------------------

    def refuse(self, hello: wire.Hello) -> Optional[wire.Refuse]:
        """Return why this member may not join; None if it may."""
        why = self.lead.refuse(hello)
        return wire.Refuse(why, self.lead.muster.is_of_another_run(hello)) if why else None

    def refused(self, hello: wire.Hello, why: str) -> None:
        self._do(self.lead.refused(hello, why))

    def joined(self, hello: wire.Hello, clock_offset: float) -> None:
        if not self.agent.order.emulated:
            self.meeting.address = self.connections.reached  # a member has reached us by it
        self._do(self.lead.hello(hello, clock_offset, time.monotonic()))

    def broken(self, why: str) -> None:
        """Report a node that knows the token but cannot join, because its messages arrive changed."""
        warn(why)
        self._do(self.lead.waits_in_vain(why))

    def from_member(self, member: int, message: Message) -> None:
        self._do(self._acts(member, message, time.monotonic()))

    def _acts(self, member: int, message: Message, now: float) -> List[Act]:
        """Return the lead's acts for a message of a member, or of this node itself."""
        lead, watching = self.lead, self.watching
        if isinstance(message, wire.Beat):
            lead.beat(member, message)
            return watching.beat(member, message, now)
        if isinstance(message, wire.RankEnded):
            seen = watching.rank_ended(member, message.end, now) if lead.is_current(message.attempt) else []
            return seen + lead.rank_ended(member, message, now)
        if isinstance(message, wire.Done):
            return lead.member_done(member, message, now)
        if isinstance(message, wire.StopAsked):
            return self._stop_asked(member, message, now)
        if isinstance(message, wire.FirstStep):
            return self._first_step(message.t + lead.members[member].clock_offset)
        if isinstance(message, wire.Judged):
            return [record_verdict(message.verdict, member)]
        if isinstance(message, wire.Found):
            lead.found(member, message.finding)
            return [record_finding(message.finding), *(lead.watcher_stop(message.finding, now) if message.stop else ())]
        if isinstance(message, wire.Looked):
            return watching.looked(member, message, now)
        if isinstance(message, wire.Tried):
            return lead.tried(member, message, now)
        if isinstance(message, wire.Counted):
            lead.counted(member, message)
        elif isinstance(message, wire.FilePart) and self.agent.child:
            take(self.folder.node(member), message, self.agent.child.create, self.agent.child.append)
        else:
            raise WireError(f"a member does not send {type(message).__name__}")
        return []

    def _stop_asked(self, member: int, message: wire.StopAsked, now: float) -> List[Act]:
        number = message.signal
        why = f"node {member}: {ORPHANED}"
        if not message.orphaned:
            why = f"node {member} was asked to stop by {signal.Signals(number).name}"
        if number == signal.SIGQUIT:
            return self.lead.stop(StopRequest(NOW, number, why, clock.now()))
        way = LAUNCHER if self.agent.facts.identity.by_mpirun else SIGNAL
        return self.lead.signalled(StopRequest(way, number, why, clock.now()), now)

    def _first_step(self, t: float) -> List[Act]:
        """Record the first step of each attempt. `t` is on the lead's clock."""
        attempt = self.lead.attempts[-1].number if self.lead.attempts else -1
        if attempt <= (self.lead.first_step[0] if self.lead.first_step else -1):
            return []
        self.lead.first_step = (attempt, t)
        return [Record("first-step", {"seconds": round(t - self.lead.order.created, 3)})]

    @property
    def patience(self) -> float:
        """Return the seconds of silence after which a member is lost even if its connection is not broken."""
        return self.lead.patience

    def silent(self, member: int, seconds: float, again: bool = False) -> None:
        """Report that a member was silent for `Timing.lost_node`, once. `again`: it is heard again."""
        self._do(self.lead.member_silent(member, seconds, again))

    def lost(self, member: int, why: str, silent: bool = False) -> None:
        self._do(self.lead.member_lost(member, why, time.monotonic(), silent))

    # -- the lead's decisions, carried out ---------------------------------------------------------------------------

    def _do(self, acts: List[Act]) -> None:
        for act in acts:
            if isinstance(act, Record):
                self._record(act)
                self._do(self.watching.recorded(act.kind, time.monotonic()))
            elif isinstance(act, Tell):
                others, message = tuple(number for number in act.members if number != 0), act.message
                if isinstance(message, wire.RunEnded):  # it says whether another start follows
                    message = dataclasses.replace(message, again=what_follows(self.lead).step == REQUEUE)
                self.outbox.put(message, (*others, 0) if 0 in act.members else others)
            elif isinstance(act, Finish):
                self.exit_code = act.exit_code
                self._write_end()

    def _record(self, record: Record) -> None:
        starts = record.kind == "attempt-started"
        if starts:  # earlier records of the same turn belong to the previous attempt's end
            self.events.attempt = self.lead.attempts[-1].number
        self.events.write(record.kind, record.data)
        if starts:
            assert self.agent.child
            self.agent.child.replace(self.folder.peers, json.dumps(self.meeting.peers(self.lead)) + "\n")

    def _deliver(self, member: int, message: Message, data: bytes) -> None:
        if member == 0:
            self.agent.obey(message)
        else:
            self.connections.deliver(member, message, data)

    def _write_end(self) -> None:
        """Write the run's end, in a child: it reads the run's events again, and storage may hang."""
        agent = self.agent
        try:
            if not agent.flush(_END):
                raise OSError(errno.ETIMEDOUT, "the run folder does not answer", self.folder.path)
            on_storage(lambda: write_end(self.folder, self.lead), _END, agent.beat, self.folder.path)
        except OSError as error:
            self.exit_code = EXIT_STORAGE
            warn(f"how the run ended could not be written: {error}")
            finding = find("storage", why=str(error), evidence=[str(error)], node=0, host=agent.facts.host)
            agent.report({"failed": 0, "finding": to_plain(finding)})
