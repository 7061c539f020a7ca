"""The lead: node 0's agent decides on start, stop and restart, and which failure was the first. A state machine without I/O.

Messages of the members (its own included) come in; actions go out: tell members, record an event, end the run.
"""

from __future__ import annotations

import signal
from dataclasses import field, replace
from typing import Any, Callable, Collection, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from drumbeat.agent.lead.attempt import NODE_LOST, Attempt, concluded, failed_before, rank_end
from drumbeat.agent.lead.decide import Allowed, Decision, Requeue, Restart, decide, move, without_nodes
from drumbeat.agent.lead.model import (
    DOUBTFUL,
    END_NOW,
    FAILED,
    FINISHED,
    LAUNCHER,
    LIMIT,
    PORT_IN_USE,
    SIGNAL,
    Act,
    Assignment,
    Finish,
    Member,
    Outcome,
    Record,
    StopRequest,
    StopRequests,
    Tell,
    idle,
    record_finding,
    record_verdict,
    replacements,
)
from drumbeat.agent.watchers.kernel_log import FAULT
from drumbeat.agent.wire import messages as wire
from drumbeat.agent.wire.meet import FIRST_NOTICE, NOTICE_EVERY, doors_in
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.base.processes import IN_KERNEL
from drumbeat.base.ranges import fold, ranges
from drumbeat.base.signals import EXIT_MUSTER, EXIT_PREFLIGHT, EXIT_STORAGE
from drumbeat.causes.table import HARDWARE, cause_of
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import ERROR, UNKNOWN, WARNING, Finding
from drumbeat.plan.reach import judge
from drumbeat.runfolder.summary import AttemptEnd

# The muster: who may join, who is missing, when to begin without them, and what to report when it fails.


SPARES_AFTER = 60.0  # seconds after which a job starts without members that it does not need
MOST_RETURNS = 3  # per member
_AS_WRITTEN = {"ranks_per_node": "ranks-per-node", "time_limit": "time"}  # names in the job file, where they differ
_STARTS = {
    "ranks": "drumbeat starts the ranks",
    "tasks": "the scheduler starts one task per rank",
    "torchrun": "torchrun starts the ranks",
    "once": "the command starts its own ranks",
}


class Muster:
    """The muster. `members` is the lead's own table, in which members that join are entered."""

    def __init__(self, order: Order, members: Dict[int, Member]) -> None:
        self.order, self.members = order, members
        self.common = wire.Common()
        self.doors: Dict[int, Tuple[wire.Place, ...]] = {}  # where members listen for each other
        self.gone = 0  # members that ended before they could join
        self.starts = 0  # most earlier starts that any member knows of
        self.seconds = 0.0  # duration, once it is over
        self._next_notice = FIRST_NOTICE

    def refusal(self, hello: wire.Hello) -> str:
        """Return why this member may not join; '' if it may."""
        order, number, host = self.order, hello.member, hello.host
        differing = self._differing(hello)
        if self.is_of_another_run(hello):
            return f"{host} belongs to another run than {order.run_id}{': ' + differing if differing else ''}"
        if number is None or not 0 <= number < order.members:
            return f"node rank {number} is not one of 0 to {order.members - 1}: --nodes or NNODES is wrong somewhere"
        known = self.members.get(number)
        if known and not known.lost:
            return f"node rank {number} is taken by {known.host}, and {host} claims it too: give each its own"
        if known and known.losses > MOST_RETURNS:
            return f"{host} was lost {known.losses} times, and is not used again"
        return f"{host} was asked for another job than the lead: {differing}" if differing else ""

    def is_of_another_run(self, hello: wire.Hello) -> bool:
        return hello.run != self.order.identity

    def join(self, hello: wire.Hello, clock_offset: float) -> Tuple[List[Act], Optional[Finding]]:
        """Enter a member that may join (see `refusal`). Return the acts, and a finding if the run cannot begin with it."""
        assert hello.member is not None
        number, hosts = hello.member, self.order.hosts
        name = hosts[number] if number < len(hosts) else ""
        before = self.members.get(number)  # set if it was lost and returns
        member = Member(
            number, hello.host, hello.address, max(1, hello.ranks), clock_offset, name=name, gpus=hello.gpus,
            bad=before.bad if before else "", losses=before.losses if before else 0,
        )  # fmt: skip
        self.members[number] = member
        self.common.add(number, member.host, hello.network)
        self.doors[number] = hello.network.doors
        self.starts = max(self.starts, hello.start)
        joined = {"peer": number, "peer_host": member.host, "address": member.address, "name": name}
        joined_at = {**joined, "clock_offset": clock_offset}
        acts: List[Act] = [Record("node-joined", joined_at), *map(record_finding, hello.findings)]
        broken = next((finding for finding in hello.findings if finding.severity == ERROR), None)
        if broken is None or self.order.checks.get("preflight", "stop") != "stop":
            return acts, None
        self.members[number] = replace(member, bad=broken.title)
        if sum(1 for each in self.members.values() if each.bad) > self.order.dispensable:
            return acts, broken
        acts.append(Record("excluded", {"peer": number, "peer_host": member.host, "why": broken.title}))
        return acts, None

    def lose(self, why: str) -> Tuple[List[Act], Optional[Finding]]:
        """Count a member that ended before it could join. Return the acts, and a finding if the muster can no longer succeed."""
        self.gone += 1
        if self.gone <= self.order.dispensable:
            return [record_finding(find("node-lost", "spare", why=why, evidence=[why]))], None
        return [], find("node-lost", "unjoined", why=why, evidence=[why])

    @property
    def is_complete(self) -> bool:
        return len(self.members) == self.order.members

    def fit(self) -> Tuple[int, ...]:
        return tuple(number for number, member in sorted(self.members.items()) if member.fit)

    def is_enough(self, elapsed: float) -> bool:
        """Return true if the muster may end without all members: not long after the start, or at once if the missing ones are
        `gone`."""
        order, here = self.order, len(self.members)
        waited = elapsed > min(SPARES_AFTER, order.timing.muster / 2) or here + self.gone >= order.members
        return order.dispensable > 0 and len(self.fit()) >= order.members - order.dispensable and waited

    def notice(self, elapsed: float) -> List[Act]:
        """Record at intervals which nodes are still missing."""
        if elapsed < self._next_notice:
            return []
        self._next_notice = elapsed + NOTICE_EVERY
        about = {"missing": self.missing(), "seconds": round(elapsed, 1), "here": len(self.members)}
        return [Record("waiting", about)]

    def missing(self) -> str:
        """Name the nodes that have not joined yet, by host name if the order knows it."""
        order = self.order
        absent = [number for number in range(order.members) if number not in self.members]
        if len(order.hosts) == order.members and not order.emulated:
            return fold([order.hosts[number] for number in absent])
        text = ranges(absent)
        return f"node {text}" if text.isdigit() else f"nodes {text}"

    def _differing(self, hello: wire.Hello) -> str:
        """Describe the terms on which that member and the lead differ."""
        ours, theirs = self.order.terms(), hello.terms
        lead = f"the lead ({self.members[0].host})" if 0 in self.members else "the lead"
        parts = []
        for key in (key for key in ours if ours[key] != theirs.get(key)):
            if key == "launcher":
                parts.append(f"on {hello.host} {_starts(theirs.get(key))}, on {lead} {_starts(ours[key])}")
            else:
                there, here = _short(theirs.get(key)), _short(ours[key])
                parts.append(f"{_AS_WRITTEN.get(key, key)} is {there} on {hello.host}, {here} on {lead}")
        return "; ".join(parts)

    def timed_out(self) -> Finding:
        here = fold([member.host for _, member in sorted(self.members.items())]) if self.members else "none"
        return find(
            "muster-timeout", missing=self.missing(), limit=self.order.timing.muster, here=here,
            seen=("who connected to the lead",), unseen=(f"{self.missing()}: nothing was heard",),
        )  # fmt: skip


def _starts(launcher: Any) -> str:
    return _STARTS.get(str(launcher), f"the launcher is {_short(launcher)}")


def refused_finding(hello: wire.Hello, why: str) -> Finding:
    seen = (f"what node {hello.member} reported, and the lead's order",)
    return find("node-refused", why=why, evidence=[why], node=hello.member, host=hello.host, seen=seen)


def _short(value: Any) -> str:
    text = " ".join(value) if isinstance(value, list) and all(isinstance(word, str) for word in value) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


find = Catalog("lead")

# The start of an attempt: what every member must know about the others, and each member's orders.


def world_of(assignment: Assignment, members: Mapping[int, Member], common: wire.Common) -> wire.World:
    """Return the world without the address where the ranks meet, which is chosen from it."""
    ranks = [members[number].ranks for number in assignment]
    roles = {number: node for node, number in enumerate(assignment)}
    replaced = tuple((node, members[number].host) for node, number in enumerate(assignment) if node != number)
    return wire.make_world(ranks, common, roles, ("", 0), replaced)


def start_acts(attempt: Attempt, world: wire.World, members: Mapping[int, Member], order: Order) -> List[Act]:
    assignment = attempt.assignment
    started = {
        "world_size": attempt.ranks,
        "nodes": len(assignment),
        "spares": idle(assignment, members),
        "hosts": [members[number].host for number in assignment] if world.replaced else [],
        "master_addr": world.master_addr,
        "master_port": world.master_port,
        "resized": smaller_words(len(assignment), order) if order.fewest_nodes else "",
    }
    starts = [Tell((number,), wire.Start(attempt.number, node)) for node, number in enumerate(assignment)]
    # The lead's own ranks start last, because starting them blocks it for a while.
    return [Record("attempt-started", started), Tell(assignment, wire.Prepare(world)), *starts[1:], starts[0]]


def smaller_words(nodes: int, order: Order) -> str:
    """Explain what fewer nodes mean for the batch and the learning rate; '' if no node is missing."""
    most = max(order.nodes, order.wanted_nodes or 0)
    if nodes >= most:
        return ""
    return (
        f"{nodes} of {most} nodes: a batch that is set per rank makes a global batch of {nodes}/{most}, so accumulate "
        f"{most}/{nodes} as many micro-batches, or scale the learning rate by {nodes}/{most}; drumbeat.train keeps its "
        "global batch"
    )


# What follows an attempt, or the loss of a node between attempts: the decision, and its record. Pure functions.


def after_attempt(
    order: Order, history: Sequence[Outcome], members: Mapping[int, Member], returned: Collection[int] = ()
) -> Tuple[Decision, Record]:
    """Decide what follows an attempt. A scheduler that starts the run again leaves out all unfit machines, not only those of
    the last attempt. `returned`: members that count as lost in the decision, and are there again."""
    last = history[-1]
    decision = decide(history, members, _allowed(order))
    back = [members[number].words for number in sorted(returned)]
    if back and isinstance(decision, Restart):
        decision = replace(decision, why=f"{decision.why}; {', '.join(back)} came back, and may be used again")
    cause = last.cause.name if last.outcome == FAILED else ""
    decided: Dict[str, Any] = {"action": decision.action, "why": decision.why, "cause": cause}
    if isinstance(decision, Restart):
        decided["wait"] = decision.wait
        decided["replaced"] = replacements(last.assignment, decision.assignment, members)
    if isinstance(decision, Requeue):
        unfit = (member.machine for _, member in sorted(members.items()) if not member.fit)
        decision = replace(decision, exclude=tuple(dict.fromkeys((*decision.exclude, *unfit))))
    return decision, Record("decided", decided)


def between_attempts(order: Order, assignment: Assignment, members: Mapping[int, Member]) -> Tuple[Decision, Record]:
    """Decide what follows when a node is lost while the next attempt, with this assignment, waits to begin."""
    may = _allowed(order)
    moved = move(assignment, members, may)
    if moved:
        decided = {"action": "restart", "why": moved[1], "replaced": replacements(assignment, moved[0], members)}
        return Restart(moved[1], moved[0]), Record("decided", decided)
    decision = without_nodes(assignment, members, may)
    return decision, Record("decided", {"action": decision.action, "why": decision.why, "cause": HARDWARE.name})


def _allowed(order: Order) -> Allowed:
    can_requeue = order.queued and order.resources.requeues > 0
    return Allowed(order.restarts, order.fewest_nodes, can_requeue, order.spares)


_LONG = 30.0  # seconds: a command that ran this long may have trained, even if no step was recognised
_TRYING = 5.0  # seconds for all members to reach their partners
_HELD = 0.3  # seconds that a signal is held: mpirun ends its tasks about one second after its first signal
_ANSWER = 5.0  # seconds after a loss within which a launcher's signals count as its reaction


@dataclass
class Lead:
    """The lead's state machine. `pick_port` chooses where the ranks meet: it gets the world without the address, and the
    member that is node 0; it returns address and port."""

    order: Order
    pick_port: Callable[[wire.World, int], Tuple[str, int]]
    started: float
    members: Dict[int, Member] = field(default_factory=dict)
    attempts: List[Attempt] = field(default_factory=list)
    history: List[Outcome] = field(default_factory=list)
    # muster, trying (can members reach each other), running, stopping, waiting (for the next attempt), ended
    phase: str = "muster"
    resume: Tuple[float, Assignment] = (0.0, ())  # while waiting: when the next attempt begins, and its members
    # member -> subnets in which it does not reach its partner
    answers: Dict[int, Dict[str, str]] = field(default_factory=dict)
    requests: StopRequests = field(default_factory=StopRequests)
    held: Optional[Tuple[float, StopRequest]] = None  # a signal, and when to pass it on to the ranks
    grace: float = 0.0  # grace period of the ranks that are being ended
    lost_at: float = 0.0  # when the last member was lost
    returned: Set[int] = field(default_factory=set)  # members that came back before the attempt that lost them was over
    progress: Dict[int, wire.Beat] = field(default_factory=dict)  # member -> its last reported progress
    without_storage: bool = False  # the run folder can no longer be written
    requeue: Optional[Requeue] = None  # why, and without which hosts, the scheduler should start the run again
    earlier: List[AttemptEnd] = field(default_factory=list)  # attempts before a scheduler started the job again
    requeues: int = 0  # requeues of this job by drumbeat so far that count
    first_step: Optional[Tuple[int, float]] = None  # its attempt, and its time on the lead's wall clock
    first_attempt: int = 0  # more than 0 if a scheduler started this job again
    # whether another program has the port given to the last attempt's ranks
    port_taken: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.muster = Muster(self.order, self.members)

    # -- muster ------------------------------------------------------------------------------------------------------

    def refuse(self, hello: wire.Hello) -> str:
        """Return why this member may not join; '' if it may."""
        may_come = self.phase == "muster" or (self.is_elastic and self.phase != "ended")
        return self.muster.refusal(hello) if may_come else "the run has already started"

    @property
    def is_gathering(self) -> bool:
        """Return true before the first attempt, unless it is being prepared."""
        return self.phase in ("muster", "trying")

    @property
    def is_elastic(self) -> bool:
        """Return true if members may join late or return: the next attempt uses them."""
        return self.order.fewest_nodes is not None

    def refused(self, hello: wire.Hello, why: str) -> List[Act]:
        """Fail the muster if one of this run's own members may not join. Members of other runs change nothing: two runs may
        share a token and a port."""
        if self.phase != "muster" or self.muster.is_of_another_run(hello):
            return []
        return self._end(Outcome(FAILED, EXIT_MUSTER, refused_finding(hello, why)))

    def hello(self, hello: wire.Hello, clock_offset: float, now: float) -> List[Act]:
        """Let a member join that may (see `refuse`)."""
        acts, broken = self.muster.join(hello, clock_offset)
        number = hello.member or 0
        if self.phase != "muster":
            if self.attempts and self.phase != "waiting" and number in self.attempts[-1].roles:
                self.returned.add(number)  # what follows its loss is decided first
                self.members[number] = replace(self.members[number], lost=True)
            return acts
        if broken:
            return acts + self._end(Outcome(FAILED, EXIT_PREFLIGHT, broken))
        return acts + (self._begin(now) if self.muster.is_complete else [])

    def waits_in_vain(self, why: str) -> List[Act]:
        """Handle a member that ended before it could join, as reported by the process that started it."""
        if self.phase != "muster":
            return []
        acts, failed = self.muster.lose(why)
        return acts + (self._end(Outcome(FAILED, EXIT_MUSTER, failed)) if failed else [])

    def _tick_muster(self, elapsed: float, now: float) -> List[Act]:
        if self.muster.is_enough(elapsed):
            return self._begin(now)
        if elapsed > self.order.timing.muster:
            return self._end(Outcome(FAILED, EXIT_MUSTER, self.muster.timed_out()))
        return self.muster.notice(elapsed)

    def _begin(self, now: float) -> List[Act]:
        """Begin the first attempt with the first fit members; the others are spares."""
        self.muster.seconds = now - self.started
        assignment = self.muster.fit()[: self.order.nodes]
        doors, reach = self.muster.doors, self.muster.common.compared.reach
        acts: List[Act] = []
        for finding in judge(reach) if len(assignment) > 1 else ():
            # Addresses alone prove nothing that would end a run: a router may connect them.
            acts += [record_finding(finding)] if finding.severity in (WARNING, ERROR) else []
        if len(assignment) < 2 or not all(doors.get(number) for number in assignment):
            return acts + self._start(assignment, now)
        self.phase, self.resume, self.answers = "trying", (now + _TRYING, assignment), {}
        partners = zip(assignment, assignment[1:] + assignment[:1])
        return acts + [
            Tell((number,), wire.Try(doors_in(reach.subnets or (), doors[other])))
            for number, other in sorted(partners, key=lambda pair: -pair[0])  # the lead's own takes long: last
        ]

    def tried(self, member: int, answer: wire.Tried, now: float) -> List[Act]:
        """Record which subnets lead a member to its partner; when all members have reported, the ranks start."""
        if self.phase != "trying":
            return []
        self.answers[member] = answer.unreached
        return self._start_tried(now) if set(self.resume[1]) <= set(self.answers) else []

    def _start_tried(self, now: float) -> List[Act]:
        """Drop, on all nodes alike, the subnets in which a member does not reach its partner, unless none would be left."""
        assignment, compared = self.resume[1], self.muster.common.compared
        apart: Dict[str, Dict[str, str]] = {}
        for number, other in zip(assignment, assignment[1:] + assignment[:1]):
            for subnet, why in sorted(self.answers.get(number, {}).items()):
                here, there = self.members[number].host, self.members[other].host
                apart.setdefault(subnet, {"here": here, "there": there, "why": why})
        others = set(compared.reach.subnets or ()) - set(apart)
        words = "others" if others else "only"
        acts: List[Act] = [
            record_finding(find("subnet-apart", words, subnet=subnet, **said)) for subnet, said in apart.items()
        ]
        if others:
            compared.leave_out(
                {subnet: "{here} does not reach {there} there".format(**said) for subnet, said in apart.items()}
            )
        return acts + self._start(assignment, now)

    # -- running -----------------------------------------------------------------------------------------------------

    def beat(self, member: int, beat: wire.Beat) -> None:
        if beat.step is not None:
            self.progress[member] = beat

    def rank_ended(self, member: int, ended: wire.RankEnded, now: float) -> List[Act]:
        if not self.is_current(ended.attempt):
            return []
        end = rank_end(ended.end, member, self.members[member].clock_offset)
        attempt, asked = self.attempts[-1], self.requests.at
        before = asked is not None and failed_before(end, asked)
        attempt.rank_ended(replace(end, by_us=False) if before else end, now, self.phase == "running")
        if before or (attempt.first_failure is not None and not self.requests.outcome and not self.held):
            attempt.failed_unasked = True
        return []

    def member_done(self, member: int, done: wire.Done, now: float) -> List[Act]:
        """Record that all processes of this member's attempt are gone, or cannot be ended."""
        if not self.is_current(done.attempt):
            return []
        attempt = self.attempts[-1]
        attempt.done[member] = done.progress
        attempt.short.update({int(rank): step for rank, step in done.short.items() if rank.isdigit()})
        acts: List[Act] = []
        if done.stuck:
            self.members[member] = replace(self.members[member], stuck=True)
            where = "" if IN_KERNEL in done.stuck else "elsewhere"
            host = self.members[member].host
            finding = find("process-stuck", where, node=member, host=host, stuck=done.stuck, evidence=[done.stuck])
            acts.append(record_finding(finding))
            if not self.requests.outcome and attempt.cause() is None:
                attempt.finding = attempt.finding or finding
        return acts + (self._conclude(now) if attempt.is_over else [])

    @property
    def patience(self) -> float:
        """Return the seconds of silence, on an unbroken connection, after which a member is lost. While ranks run, only the
        agents' network may have stalled, so healthy ranks get as long as they have to save."""
        return self.order.timing.lost_node + (self.order.stop_grace if self.phase == "running" else 0.0)

    def member_silent(self, number: int, seconds: float, again: bool = False) -> List[Act]:
        """Record that a member has been silent for a while; `again`: it is heard again."""
        member = self.members.get(number)
        if self.phase == "ended" or member is None:
            return []
        said = {"peer": number, "peer_host": member.host, "seconds": round(seconds, 1)}
        return [Record("node-heard", said) if again else Record("node-silent", {**said, "patience": self.patience})]

    def member_lost(self, number: int, why: str, now: float, silent: bool = False) -> List[Act]:
        """Handle the loss of a member. `silent`: its connection did not break, so its ranks may be healthy: all ranks get
        their time to save."""
        member = self.members.get(number)
        if number in self.returned:
            self.returned.discard(number)
            return []
        if self.phase == "ended" or member is None or member.lost:
            return []
        idle = not self.is_gathering and number not in self._assignment()
        lost = {"peer": number, "peer_host": member.host, "why": why, "spare": idle, "silent": silent}
        acts: List[Act] = [Record("node-lost", lost)]
        if self.is_gathering:
            del self.members[number]
            self.phase = "muster"
            return acts
        self.members[number] = replace(member, lost=True, losses=member.losses + 1)
        self.lost_at = now
        if self.phase == "waiting":
            return acts + self._plan_again()
        attempt = self.attempts[-1]
        if idle:
            return acts
        attempt.done[number] = {}
        if self.phase == "running":
            lost_node = find("node-lost", node=number, host=member.host, why=why, evidence=[why])
            attempt.finding = attempt.finding or lost_node
            with_signal, grace = int(signal.SIGTERM), self.order.timing.failure_grace
            # the run may have been asked to stop: then its ranks get their time to save
            if silent or self.held:
                with_signal, grace = self.order.stop_signal, self.order.stop_grace
            acts += self._stop_ranks("a node was lost", with_signal, grace)
        return acts + (self._conclude(now) if attempt.is_over else [])

    def give_up(self) -> List[Act]:
        """End the members with the lead's agent, instead of letting them wait for orders."""
        if self.phase == "ended":
            return []
        return self._end(Outcome(FAILED, 128 + signal.SIGTERM, find("guard-lost")))

    def storage_lost(self, finding: Finding) -> List[Act]:
        """React to a run folder that cannot be written: the ranks save and end, and no further attempt begins."""
        self.without_storage = True
        if self.is_gathering or self.phase == "waiting":
            return self._end(Outcome(FAILED, EXIT_STORAGE, finding))
        if self.phase != "running":
            return []
        self.attempts[-1].finding = self.attempts[-1].finding or finding
        return self._stop_ranks(finding.title, self.order.stop_signal, self.order.stop_grace)

    def watcher_stop(self, finding: Finding, now: float) -> List[Act]:
        """Stop because a watcher reports that the job does not run as it was meant to."""
        if self.phase != "running":
            return []
        attempt = self.attempts[-1]
        attempt.finding, attempt.judged = attempt.finding or finding, self.held is None
        return self._stop_ranks(finding.title, signal.SIGTERM, self.order.stop_grace)

    def found(self, member: int, finding: Finding) -> None:
        """Record a watcher's warning. Hardware that fails while the ranks run explains a later failure; a driver's errors
        about processes that are being ended do not."""
        if self.phase == "running" and finding.node == member and finding.code == FAULT:
            self.attempts[-1].accused.append(finding)
        elif self.phase == "running" and finding.node == member and cause_of(finding, 1) is HARDWARE:
            self.attempts[-1].broken.append(finding)

    def suspect(self, finding: Optional[Finding]) -> None:
        """Note the rank that a watcher says holds up the others; None: the run goes on again."""
        if self.attempts:
            self.attempts[-1].suspected = finding

    def counted(self, member: int, counted: wire.Counted) -> None:
        """Add a node's census of its rank processes; `tick` judges all nodes that report together."""
        if self.phase != "running" or not self.is_current(counted.attempt):
            return
        attempt = self.attempts[-1]
        first_step = self.first_step[1] if self.first_step and self.first_step[0] == attempt.number else None
        at = counted.t + self.members[member].clock_offset
        steps = [beat.t + self.members[each].clock_offset for each, beat in self.progress.items() if beat.t is not None]
        made = [beat.step for beat in self.progress.values() if beat.step is not None]
        last_step, step = max(steps, default=None), max(made, default=None) if first_step is not None else None
        attempt.count(self.order, member, counted.rows, at, first_step, last_step, step)

    def signalled(self, request: StopRequest, now: float) -> List[Act]:
        """Handle a signal to an agent. It may be the launcher's reaction to an end that we are about to see (an MPI_Abort, or
        an agent that died), so the ranks are not told at once."""
        # if the run survives a loss, its launcher does not end the others
        may_be_answer = request.way == LAUNCHER or (request.number == signal.SIGTERM and not self.order.survives_loss)
        if may_be_answer and self.phase == "running":
            self.held = self.held or (now + _HELD, request)
            return []
        return [] if may_be_answer and self._has_just_lost(now) else self.stop(request)

    def _has_just_lost(self, now: float) -> bool:
        """Return true if a node has just been lost: a launcher that now ends all agents asks for nothing new."""
        return self._lost_node and not self.requests.outcome and now - self.lost_at < _ANSWER

    @property
    def _lost_node(self) -> bool:
        """Return true if the ranks are being ended only because a node was lost: the remaining ones can save."""
        finding = self.attempts[-1].finding if self.phase == "stopping" else None
        return finding is not None and finding.code == NODE_LOST

    def stop(self, request: StopRequest) -> List[Act]:
        """Handle a request to end: by a signal, a line in the `stop` file, the scheduler or the time limit."""
        if self.phase == "ended":
            return []
        if self.held:
            (_, first), self.held = self.held, None
            return self.stop(first) + self.stop(request)
        step = self.requests.on(request)
        if self.is_gathering or self.phase == "waiting":
            asked = Record("stopping", {"why": request.why, "signal": int(request.number), "grace": 0.0})
            return [asked, *self._end(Outcome(self.requests.outcome, self.requests.exit_code))]
        if step == END_NOW:
            return self._stop_ranks(request.why, self.order.stop_signal, 0.0)
        if self.phase == "stopping" and not (self._lost_node and self.grace < self.order.stop_grace):
            return []  # they are ending already; the outcome now follows the request
        if step is None:
            return []
        passed_on = request.way == SIGNAL and request.number == signal.SIGUSR2  # the signal that the script chose
        number = signal.SIGUSR2 if passed_on else self.order.stop_signal
        return self._stop_ranks(request.why, number, self.order.stop_grace)

    def tick(self, now: float) -> List[Act]:
        timing, limit = self.order.timing, self.order.time_limit
        elapsed = now - self.started
        if limit and elapsed > limit and not self.requests.outcome and self.phase not in ("stopping", "ended"):
            return self.stop(StopRequest(LIMIT, self.order.stop_signal, f"the time limit of {limit:g} s is reached"))
        if self.held and now >= self.held[0]:
            (_, request), self.held = self.held, None
            return [] if self._has_just_lost(now) else self.stop(request)
        if self.phase == "muster":
            return self._tick_muster(elapsed, now)
        if self.phase == "trying" and now >= self.resume[0]:
            return self._start_tried(now)
        if self.phase == "waiting" and now >= self.resume[0]:
            return self._start(self.resume[1], now)
        if self.phase == "running":
            attempt = self.attempts[-1]
            if attempt.first_failure is not None and now - attempt.first_failure > timing.settle:
                return self._stop_ranks("a rank failed", signal.SIGTERM, timing.failure_grace)
            acts, stop = attempt.notice(self.order, now)
            return acts + (self.watcher_stop(stop, now) if stop else [])
        return []

    # -- inside ------------------------------------------------------------------------------------------------------

    def is_current(self, attempt: int) -> bool:
        return bool(self.attempts) and self.attempts[-1].number == attempt and self.phase in ("running", "stopping")

    def _start(self, assignment: Assignment, now: float) -> List[Act]:
        if self.is_elastic:  # members that came late or returned
            assignment += tuple(idle(assignment, self.members)[: self.order.nodes - len(assignment)])
        world = world_of(assignment, self.members, self.muster.common)
        address, port = self.pick_port(world, assignment[0])
        world = replace(world, master_addr=address, master_port=port)
        if not self.attempts:  # a lead that replaces a lost one does not know of the starts that its members remember
            ahead = max(0, self.muster.starts - self.order.start)
            self.first_attempt, self.requeues = self.first_attempt + ahead, self.requeues + ahead
        number, ranks = self.first_attempt + len(self.attempts), sum(world.ranks_per_node())
        self.attempts.append(Attempt(number, now, port, assignment, ranks))
        self.phase = "running"
        acts: List[Act] = []
        if len(self.attempts) == 1:
            about = {"seconds": round(self.muster.seconds, 3), "master_addr": address, "master_port": port}
            acts.append(Record("mustered", about))
        return acts + start_acts(self.attempts[-1], world, self.members, self.order)

    def _assignment(self) -> Assignment:
        """Return the members that have a role, now or in the next attempt."""
        return self.resume[1] if self.phase == "waiting" else self.attempts[-1].assignment

    def _present(self) -> Tuple[int, ...]:
        return tuple(number for number, member in sorted(self.members.items()) if not member.lost)

    def _stop_ranks(self, why: str, number: int, grace: float) -> List[Act]:
        self.phase, self.grace = "stopping", grace
        record = Record("stopping", {"why": why, "signal": int(number), "grace": grace})
        return [record, Tell(self._present(), wire.Stop(int(number), grace, why))]

    def _conclude(self, now: float) -> List[Act]:
        attempt = self.attempts[-1]
        if self.held and not self._has_just_lost(now):
            self.requests.on(self.held[1])  # the sender may have signalled the ranks as well
        self.held = None
        outcome, acts = concluded(attempt, self.requests, self.members, now, self.order.doubtful_ok)
        if outcome.finding is not None and outcome.finding.code == PORT_IN_USE:
            outcome = replace(outcome, port_taken=self.port_taken())
        trained = self.first_step is not None and self.first_step[0] == attempt.number
        well = outcome.outcome in (FINISHED, DOUBTFUL)
        verdict = attempt.world.at_end(well) if attempt.world else None
        if verdict and (trained or (well and now - attempt.started > _LONG) or verdict.answer != UNKNOWN):
            acts[:0] = [record_verdict(verdict), *map(record_finding, verdict.findings)]
        self.history.append(outcome)
        if self.without_storage or (self.requests.outcome and outcome.outcome == FAILED):
            return acts + self._end(outcome, concluded=True)
        decision, record = after_attempt(self.order, self.history, self.members, self.returned)
        acts.append(record)
        for number in self.returned:
            self.members[number] = replace(self.members[number], lost=False)
        self.returned.clear()
        if isinstance(decision, Restart):
            return acts + self._restart(decision, now)
        self.requeue = decision if isinstance(decision, Requeue) else None
        return acts + self._end(outcome, concluded=True)

    def _restart(self, decision: Restart, now: float) -> List[Act]:
        acts: List[Act] = []
        for number, why in decision.excluded.items():
            self.members[number] = replace(self.members[number], bad=why)
            acts.append(Record("excluded", {"peer": number, "peer_host": self.members[number].host, "why": why}))
        if not decision.wait:
            return acts + self._start(decision.assignment, now)
        self.phase = "waiting"
        self.resume = (now + decision.wait, decision.assignment)
        return acts

    def _plan_again(self) -> List[Act]:
        """Plan the next attempt again: a node was lost between two attempts."""
        at, assignment = self.resume
        decision, record = between_attempts(self.order, assignment, self.members)
        if isinstance(decision, Restart):
            self.resume = (at, decision.assignment)
            return [record] if decision.assignment != assignment else []
        self.requeue = decision if isinstance(decision, Requeue) else None
        return [record, *self._end(self.history[-1], concluded=True)]

    def _end(self, outcome: Outcome, concluded: bool = False) -> List[Act]:
        self.phase = "ended"
        acts: List[Act] = []
        if not concluded:
            self.history.append(outcome)
            if outcome.finding:
                acts.append(record_finding(outcome.finding, "failed"))
        acts.append(Record("run-ended", {"outcome": outcome.outcome, "exit_code": outcome.exit_code}))
        return [*acts, Tell(self._present(), wire.RunEnded(outcome.exit_code)), Finish(outcome.exit_code)]
