"""One attempt as the lead sees it: which ranks took part, and which failure was the first."""

from __future__ import annotations

import re
import signal
from dataclasses import field, replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from drumbeat.agent.lead.model import (
    DOUBTFUL,
    FAILED,
    FINISHED,
    LAUNCHER,
    REQUEUE,
    TIME_LIMIT,
    Act,
    Assignment,
    Member,
    Outcome,
    Record,
    StopRequests,
    record_finding,
    record_verdict,
)
from drumbeat.agent.ranks.start import End
from drumbeat.agent.watchers.world import WorldCount
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.base.ranges import named_commands, named_ranks, ranges
from drumbeat.base.record import from_plain, to_plain
from drumbeat.base.regex import regex
from drumbeat.base.signals import EXIT_DOUBTFUL, EXIT_MUSTER, EXIT_REQUEUE, EXIT_STORAGE
from drumbeat.causes import events as order
from drumbeat.causes.events import First, abandoned, closers, first
from drumbeat.causes.table import CONSEQUENCES, GUESSED, NAN, NETWORK, NOT_ZERO, PROGRAM, UNCLEAR, cause_of, kind_of
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import CAUGHT, CERTAIN, ENDED_BY_US, ERROR, LIKELY, STOPPED, Evidence, Finding
from drumbeat.inspector.record import Row
from drumbeat.plan.argv import has_driver
from drumbeat.plan.world_seen import Planned
from drumbeat.runfolder.progress import Progress, merged
from drumbeat.runfolder.summary import Affected, group

# How one rank of an attempt ended, and whether that was only the consequence of another rank's end.


find = Catalog("lead")
NOISE = 2.0  # seconds by which node clocks may differ, and a busy agent may reap a process late
LINGERS = 8.0  # seconds that a process may take to exit after an exception
_AT_ONCE = (order.OUTSIDE, order.EXIT, order.LEFT)
_UNWINDS = 1.0  # seconds from an exception until it is recorded: unwinding may close connections meanwhile
_SHORTLY = 1.0  # seconds: a rank that raises this soon after a peer left, even with 0, raises because of that


@dataclass(frozen=True)
class RankEnd(End):
    """End of one rank, with all times on the lead's clock."""

    member: int = 0
    complete: bool = False  # it ended with 0 after the last step that the run had announced

    @property
    def when(self) -> float:
        return self.at if self.noted is None else self.noted

    @property
    def failed(self) -> bool:
        return self.exit_code != 0

    @property
    def code(self) -> int:
        """Return the exit code that a shell would report."""
        return 128 + self.signal if self.signal else int(self.exit_code or 0)

    @property
    def kind(self) -> str:
        """Return the kind of event of this end."""
        if self.by_us:
            return order.ENDED_BY_US
        if not self.failed:
            return order.LEFT
        return self.own_kind

    @property
    def own_kind(self) -> str:
        """Return the kind of event, whether or not we ended the rank."""
        found = self.finding
        bare = order.RAISED if self.own else order.EXIT
        if found is None:
            return order.OUTSIDE if self.signal else bare
        texts = (found.title, *(each.text for each in found.evidence))
        kinds = [kind_of(found.code, text, found.guessed) for text in texts]
        kind = next((kind for kind in kinds if kind in order.WAITS), kinds[0])
        return bare if kind == order.EXIT else kind

    @property
    def event(self) -> order.Event:
        """Return this end as an event with its earliest and latest time. A process is reaped some time after it raised, lost a
        peer or gave up waiting. If it recorded its own end, that is the time."""
        place = order.Place(self.rank, self.member)
        begin, end = self.at - (NOISE if self.kind in _AT_ONCE else LINGERS), self.at
        if self.since is not None:
            begin = self.since if self.kind == order.OUTSIDE else min(begin, self.since)
        if self.noted is not None:
            begin, end = self.noted - _UNWINDS, self.noted
        record = "drumbeat" if self.kind == order.OUTSIDE else ""
        return order.Event(self.kind, place, min(begin, end), end, finding=self.finding, record=record)

    @property
    def what(self) -> str:
        """Describe the end in a few words, for the summary. A rank that had lost a peer was failing by itself, even if we
        ended it."""
        ended_by_us = self.by_us and bool(self.signal or self.code > 128)
        if self.finding is None:
            return ENDED_BY_US if self.by_us else f"ended with {self.code}"
        if self.finding.code == STOPPED:
            return self.finding.title if self.by_us else f"ended with {self.code}"
        if is_consequence(self):
            title = self.finding.title.partition(", first seen by ")[0]  # the finding is about this rank
            return f"{title}, then {ENDED_BY_US}" if ended_by_us else title
        return ENDED_BY_US if ended_by_us else self.finding.title


def rank_end(end: End, member: int, offset: float) -> RankEnd:
    """Return a member's record of an end; `offset` turns its clock into the lead's."""
    times = {name: vars(end)[name] for name in ("at", "noted", "since") if vars(end)[name] is not None}
    closed = tuple((here, there, at + offset) for here, there, at in end.closed)
    later = tuple((t + offset, finding) for t, finding in end.later)
    ours = {**vars(end), **{name: t + offset for name, t in times.items()}, "closed": closed, "later": later}
    return RankEnd(**ours, member=member)


def failed_before(end: RankEnd, asked: float) -> bool:
    """Return true if a rank's own words show that it failed before the run was asked to stop, even if we heard of it later. A
    rank that was signalled at the same time, say by a scheduler, leaves only an exit code, or words that name the signal."""
    words = end.finding is not None and end.finding.code not in _OUTSIDE and end.own_kind in order.OWN - {order.EXIT}
    return end.failed and words and end.when < asked and not _was_told(end)


def named(ends: Sequence[RankEnd]) -> str:
    """Name the ranks or commands: `rank 3`, `ranks 0-1`, `the command on node 1`."""
    if ends and all(end.of_command for end in ends):
        return named_commands(end.member for end in ends)
    return named_ranks((end.rank for end in ends), 8)


def is_consequence(end: RankEnd) -> bool:
    return end.finding is not None and end.finding.code in CONSEQUENCES


# Findings of the lead about members and ranks.


NODE_LOST = "node-lost"


def left_behind(ended: Set[int], all_of_them: Sequence[int], each: bool, seconds: float) -> Finding:
    """Report the ranks that still run, or the nodes if one command per node starts its ranks itself."""
    total, left = len(all_of_them), ranges(number for number in all_of_them if number not in ended)
    one, what = total - len(ended) == 1, "rank" if each else "node"
    return find(
        "ranks-left-behind", "" if each else "nodes", ended=len(ended), total=total, seconds=seconds,
        rest=f"{what} {left} still runs" if one else f"{what}s {left} still run", first=re.split("[-,]", left)[0],
    )  # fmt: skip


_TOLD = regex(
    r"(?i)\b(?:sig(?:term|int|usr\d)|signal|terminat\w+|interrupt\w*|KeyboardInterrupt|SystemExit|preempt\w*)\b"
)
_LEFT_BEHIND = 60.0  # seconds after a rank has ended well, after which ranks that still run are reported


@dataclass
class Attempt:
    number: int
    started: float
    port: int
    assignment: Assignment
    ranks: int  # on all its nodes
    roles: Dict[int, int] = field(init=False)  # the inverse: member -> node rank
    ends: List[RankEnd] = field(default_factory=list)
    done: Dict[int, Dict[str, Any]] = field(default_factory=dict)  # member -> its progress when it was done
    short: Dict[int, int] = field(default_factory=dict)  # rank -> last step, if its reports end before its total
    first_failure: Optional[float] = None
    failed_unasked: bool = False  # a rank failed before anybody asked the run to stop
    suspected: Optional[Finding] = None  # the rank that holds up the others, from a watcher
    last_end: float = 0.0  # when a rank or a node's command last ended
    left_told: int = 0  # how many had ended at the last report of ranks that still run
    broken: List[Finding] = field(default_factory=list)  # hardware failures seen while the ranks ran
    accused: List[Finding] = field(default_factory=list)  # driver errors about single ranks
    finding: Optional[Finding] = None  # set if no rank is the cause: a lost node, a watcher, the time limit
    judged: bool = False  # `finding` is from a watcher, which ended the attempt before any stop request
    world: Optional[WorldCount] = None  # created with the first census

    def __post_init__(self) -> None:
        self.roles = {number: node for node, number in enumerate(self.assignment)}

    def rank_ended(self, end: RankEnd, now: float, running: bool) -> None:
        """Add the end of a rank. `running`: the ranks have not been asked to end."""
        self.ends.append(end)
        self.last_end = now
        if running and end.failed and not end.by_us and self.first_failure is None:
            self.first_failure = now

    @property
    def is_over(self) -> bool:
        return len(self.done) == len(self.assignment)

    def count(
        self, order: Order, node: int, rows: Tuple[Row, ...], at: float, first_step: Optional[float],
        last_step: Optional[float], step: Optional[int] = None,
    ) -> None:  # fmt: skip
        """Add a node's census of its rank processes, taken at `at`; nodes that report together are judged once."""
        if self.world is None:
            planned = Planned(self.ranks, len(self.assignment), _starts_each_rank(order))
            self.world = WorldCount(planned, order.checks.get("world", "off"))
        if first_step is not None:
            self.world.first_step, self.world.last_step = first_step, last_step
        self.world.add(node, rows, at, step)

    def notice(self, order: Order, now: float) -> Tuple[List[Act], Optional[Finding]]:
        """Judge whether the ranks form one world and none was left behind; return the records, and the finding to stop for."""
        if self.world is not None and self.world.is_due(now):
            verdict, findings, stop = self.world.judge()
            mixed = self.world.versions()
            acts: List[Act] = [record_verdict(each) for each in (verdict, mixed) if each]
            acts += map(record_finding, [*findings, *(mixed.findings if mixed else ())])
            if acts:
                return acts, findings[0] if stop else None
        left = self.left_behind(order, now)
        return [record_finding(left)] if left else [], None

    def left_behind(self, order: Order, now: float) -> Optional[Finding]:
        """Report ranks that still run long after others have ended well: they may be waiting for them until a timeout."""
        seconds = now - self.last_end
        if not self.ends or self.first_failure is not None or seconds < _LEFT_BEHIND:
            return None
        ranks = {end.rank for end in self.ends if not end.of_command}
        each = _starts_each_rank(order) or (bool(ranks) and has_driver(order))
        gone = ranks if each else {end.member for end in self.ends}
        all_of_them = range(self.ranks) if each else self.assignment
        if not self.left_told < len(gone) < len(all_of_them):
            return None
        self.left_told = len(gone)
        return left_behind(gone, all_of_them, each, seconds)

    def cause(self) -> Optional[RankEnd]:
        """Return the end that explains the others; None if no rank failed by itself."""
        return earliest(self.ends, self.accused)[1]

    def member_of(self, finding: Optional[Finding]) -> Optional[int]:
        """Return the member on the node that the finding names."""
        return finding.node if finding and finding.node in self.roles else None

    def progress(self, clock_offsets: Mapping[int, float]) -> Progress:
        """Merge the members' progress, on the lead's clock; node 0's losses are the run's."""
        parts = [(self.done.get(number), clock_offsets.get(number, 0.0)) for number in self.assignment]
        return merged((from_plain(Progress, part or {}), offset) for part, offset in parts)

    def note_complete(self, progress: Progress) -> None:
        """Mark the ranks that ended with 0 if the run made all its announced steps."""
        if progress.all_made:
            well = (end.kind == order.LEFT and end.rank not in self.short for end in self.ends)
            self.ends = [replace(end, complete=each) for end, each in zip(self.ends, well)]

    def forget_history(self, progress: Progress) -> None:
        """Explain each end by what its rank wrote after the words behind which the run made more steps than others may still
        make without it. An exception that it noted itself did end it, however long that took. So did that of a thread, which
        never comes back, if the rank then gave up waiting: by the name of its last exception, or after a silence."""
        reports = progress.reports or 0
        if not any(end.later for end in self.ends) or progress.last_t is None or reports < 2:
            return
        from drumbeat.logs.read.progress import FEW_STEPS

        last = progress.last_t - max(_SHORTLY, FEW_STEPS * progress.seconds / (reports - 1))
        for place, end in enumerate(self.ends):
            after = [found for t, found in end.later if t < min(last, end.when - _UNWINDS)]
            if after and end.of_thread and end.finding:
                gave_up = order.may_follow(after[-1].title) or progress.quiet(end.when) is not None
                then = f"{end.finding.cause}; it ended a thread, and then the rank with {after[-1].title}"
                after = [replace(end.finding, cause=then, confidence=LIKELY)] if gave_up else after
            self.ends[place] = replace(end, finding=after[-1]) if after else end

    def doubt(self, progress: Progress) -> Optional[Finding]:
        """Return the first sign of a failure although all exit codes are 0: ranks in separate groups, if the job asks for one
        world, or a failure in a rank's words. An error that a program caught counts only if the program did not reach its
        announced steps."""
        apart = self.world.apart if self.world and self.world.level == "stop" else None
        if apart is not None:  # not certain enough to end the run earlier
            return apart
        short = progress.short_of_steps
        doubtful = [end for end in self.ends if end.finding and not end.failed]
        doubtful = [end for end in doubtful if short or (end.finding and end.finding.code != CAUGHT)]
        # The others may have failed because one left them.
        left = {event.place.rank for event in closers([event for event, _ in _with_closed(self.ends)])}
        doubtful.sort(key=lambda end: (end.finding is None or end.finding.rank is None, end.rank not in left, end.when))
        found = doubtful[0].finding if doubtful else None
        if found is None and not short:
            return self._left_early(progress)
        if found is None or found.code != CAUGHT:
            return found
        where = f"it ended with exit code 0 at step {progress.step} of {progress.steps}"
        return replace(found, cause="; ".join(filter(None, (found.cause, where))), fix=found.fix or NOT_ZERO)

    def _left_early(self, progress: Progress) -> Optional[Finding]:
        """Report a rank that ended before its last step while the others made all of theirs."""
        last = progress.last_t
        if not self.short or progress.laps or progress.target_reached or progress.steps is None or last is None:
            return None
        gone = [end for end in self.ends if end.rank in self.short and not end.of_command and end.at < last]
        if not gone:
            return None
        one = min(gone, key=lambda end: end.at)
        return find(
            "early-exit", "short", who=named([one]), step=self.short[one.rank], steps=progress.steps, last=progress.step,
            not_zero=NOT_ZERO, node=one.member, rank=one.rank, confidence=LIKELY,
            seen=("the steps that each rank reported", "when each ended"),
        )  # fmt: skip

    def affected(self, finding: Optional[Finding]) -> Tuple[Affected, ...]:
        """Group the ranks that ended because of the first failure."""
        if finding is None:
            return ()
        one = next((end for end in self.ends if end.rank == finding.rank and end.finding is not None), None)
        _, chosen, ties = earliest(self.ends, self.accused)
        tied = set(map(id, ties)) if chosen is one else ()
        others = [end for end in self.ends if end.failed and end.rank != finding.rank]
        return group((end.rank, end.what + (" (at the same time)" if id(end) in tied else "")) for end in others)


def _starts_each_rank(order: Order) -> bool:
    """Return true if each end is a rank's; otherwise it is the end of a node's command, which starts its ranks itself."""
    return order.launcher in ("ranks", "tasks")


_WITHOUT_MEANING = ("exception", "exit-code", "unknown")
_DIGITS = regex(r"\d+")
_DRIVER = "the GPU's driver"
_NOBODY = "hang-all-idle"  # the hang in which no rank stands out
# Failures that look like a bug of the program, but that a broken GPU causes as well.
_OF_GPU = ("gpu-app-fault", "illegal-memory-access", "device-assert", "nccl-abort", "nccl-warning")


def earliest(
    ends: Sequence[RankEnd], accused: Sequence[Finding] = ()
) -> Tuple[First, Optional[RankEnd], List[RankEnd]]:
    """Return the first end, which explains the others, and those so close in time that they may have been first; None if no
    rank failed by itself. `accused`: driver errors about single ranks, in order.

    A rank that ended well after the last step is no cause of a silent failure, though its connections were closed by then. A
    rank that was asked to stop while it was failing counts only if all other failures are lost peers or timeouts."""
    if not any(end.failed and not end.by_us for end in ends):
        return First(None), None, []
    if not any(end.kind in order.WAITS for end in ends):  # no rank reported a missing peer
        ends = [end for end in ends if not end.complete]
    alike = set(map(id, _alike(ends)))
    events = _with_closed(ends)
    seen = [event for event, _ in events]
    left = abandoned(seen) if any(event.kind not in order.WAITS for event in closers(seen)) else ()
    failed_alone = any(end.failed and not (end.by_us or end.left) for end in ends)
    for place, (event, end) in enumerate(events):
        soon = not end.own and any(age < _SHORTLY for _, _, age in end.left)
        if end.left and event.kind in order.OWN and (failed_alone or soon):
            events[place] = replace(event, kind=order.LOST_PEER), end
        elif id(end) in alike or end.rank in left and _may_follow(end):
            events[place] = replace(event, kind=order.RAISED_IN_COMMUNICATION), end
    named_first = [
        order.Event(order.RECORD, order.Place(one.rank), record=_DRIVER, named_first=True) for one in accused[:1]
    ]
    found = first([*(event for event, _ in events), *named_first], NOISE)
    failing = [
        end
        for end in ends
        if end.by_us and (end.exit_code or end.own) and end.own_kind == order.RAISED and not _was_told(end)
    ]
    if found.event is not None and found.event.kind in order.WAITS:
        events += [(replace(end, by_us=False).event, end) for end in failing]
        found = first([event for event, _ in events], NOISE)
    elif failing and found.event is not None and found.event.kind != order.RAISED:
        found = replace(found, confidence=LIKELY)
    tied = set(map(id, found.tied))
    one = next((end for event, end in events if event is found.event), None)
    return found, one, [end for event, end in events if id(event) in tied]


def _with_closed(ends: Sequence[RankEnd]) -> List[Tuple[order.Event, RankEnd]]:
    """Return the ends as events, each with the ranks that lost it: a connection that it had closed was still open on their
    side until they failed. A rank that had lost a peer before we ended it does not count; two ranks that closed each other's
    connections cancel out."""
    owner = {link: end for end in ends for link in end.links}
    at_port: Dict[int, List[RankEnd]] = {}  # ranks by remote port: a reset connection has lost its peer's
    for (_, there), end in owner.items():
        at_port.setdefault(there, []).append(end)
    left: Dict[int, Set[int]] = {}
    for end in ends:
        for here, there, at in () if end.by_us and is_consequence(end) else end.closed:
            peer = owner.get((there, here))
            if peer is not None and at > peer.at - LINGERS:
                left.setdefault(end.rank, set()).add(peer.rank)
        for here, _, _ in () if end.by_us else end.left:
            others = at_port.get(here, [])
            if len(others) == 1 and not (others[0].by_us and is_consequence(others[0])):
                left.setdefault(others[0].rank, set()).add(end.rank)
    events = []
    for end in ends:
        peers = [rank for rank in left.get(end.rank, ()) if end.rank not in left.get(rank, ())]
        events.append((replace(end.event, closed=tuple(sorted(peers))), end))
    return events


def _may_follow(end: RankEnd) -> bool:
    """Return true if a lost connection may have ended it: it exited silently, or by a signal of unknown origin."""
    return end.kind == order.EXIT or end.kind == order.OUTSIDE and not (end.finding and end.finding.code == "oom-kill")


def _alike(ends: Sequence[RankEnd]) -> List[RankEnd]:
    """Return the ranks that failed in the same way, with words that no rule knows, if they outnumber the ranks that ended
    otherwise and no later: the many probably failed because they lost the few."""
    groups: Dict[Tuple[int, str], List[RankEnd]] = {}
    for end in ends:
        if (
            end.failed
            and not (end.by_us or end.signal)
            and (end.finding is None or end.finding.code in _WITHOUT_MEANING)
        ):
            words = _DIGITS.sub("", end.finding.title) if end.finding else ""
            groups.setdefault((end.code, words), []).append(end)
    many = max(groups.values(), key=len, default=[])
    few = [end for end in ends if not end.by_us and end not in many]
    if not few or len(many) <= len(few) or any(end.at > min(one.at for one in many) + NOISE for end in few):
        return []
    return many


def _was_told(end: RankEnd) -> bool:
    """Return true if its exit code or words show that it only obeyed a request to stop."""
    text = end.finding.title if end.finding else ""
    return (end.code > 128 and not end.own) or end.code == EXIT_REQUEUE or bool(_TOLD.search(text))


def blame(
    ends: Sequence[RankEnd],
    suspected: Optional[Finding],
    host_of: Callable[[int], str],
    accused: Sequence[Finding] = (),
) -> Optional[Finding]:
    """Return the cause behind the failures if it is a rank that did not fail by itself: one that a watcher had named, one that
    ended with 0 before the others, or one that was still running and had to be ended. None if a failure is its own cause."""
    found, one, _ = earliest(ends, accused)
    failed = sorted((end for end in ends if end.failed and not end.by_us), key=lambda end: end.at)
    if one is None or found.event is None or found.event.kind in order.OWN:
        return None
    if suspected is not None and suspected.code != _NOBODY:
        return suspected
    if one.kind == order.LEFT:
        early = [end for end in ends if end.kind == order.LEFT and end.at <= failed[0].at + NOISE]
        lost = [end for end in failed if end.rank in found.event.closed or len(ends) == 2]
        early.sort(key=lambda end: (end is not one, end.at))
        return _early_exit(early, lost[0] if lost else failed[0], bool(lost), host_of)
    failed_ranks = {end.rank for end in failed}
    waited = [end for end in ends if end.by_us and end.rank not in failed_ranks and not is_consequence(end)]
    events = [event for event, _ in _with_closed(ends)]
    who, closed = (
        {each.place.rank: each for each in closers(events) if each.kind == order.ENDED_BY_US},
        abandoned(events),
    )
    if waited and len(waited) < len(ends) and all(map(is_consequence, failed)):
        closing = [end for end in waited if end.rank in who]
        return _absent(closing or waited, failed, host_of, "closed" if closing else "")
    if who and any(end.rank in closed and _may_follow(end) for end in failed):
        left = _absent([end for end in ends if end.rank in who], failed, host_of, "closed")
        return replace(left, seen=_closed(list(who.values())[:8]))
    return suspected


def hardware_behind(finding: Optional[Finding], exit_code: int, broken: Sequence[Finding]) -> Optional[Finding]:
    """Return the hardware failure, among those seen before, that explains this failure; None if there is none.

    On the failure's own node it explains whatever a GPU can cause; on another node only a failure without a cause of its own."""
    cause = cause_of(finding, exit_code)
    of_gpu = finding is not None and finding.code in _OF_GPU
    near = [each for each in broken if finding is not None and each.node == finding.node]
    if near and (cause in (UNCLEAR, GUESSED, NETWORK, NAN) or (cause is PROGRAM and of_gpu)):
        chosen = near[0]
    elif broken and cause in (UNCLEAR, GUESSED, NETWORK):
        chosen = broken[0]
    else:
        return None
    shown = finding.evidence[:1] if finding else ()
    what = f"{chosen.cause}; after it: {finding.title}" if finding else chosen.cause
    return replace(chosen, severity=ERROR, cause=what, evidence=(*chosen.evidence, *shown), confidence=LIKELY)


def _early_exit(early: List[RankEnd], first: RankEnd, lost: bool, host_of: Callable[[int], str]) -> Finding:
    spoke = next((end for end in early if end.finding and end.finding.evidence), None)
    one, words = spoke or early[0], spoke.finding if spoke else None  # an error that it caught
    about = {"words": words.evidence[0].text[:200], "own": words.fix, "not_zero": NOT_ZERO} if words else {}
    return find(
        "early-exit", "caught" if words else "", who=named([one] if words else early), first=named([first]), **about,
        then="lost its connection to it" if lost else "failed after it",
        evidence=(*(words.evidence[:1] if words else ()), *_shown(first)), node=one.member, host=host_of(one.member),
        rank=(words.rank if words else None) if one.of_command else one.rank, confidence=LIKELY,
        seen=(f"exit codes{', times and last lines' if words else ' and times'} of all ranks",),
    )  # fmt: skip


def _absent(absent: List[RankEnd], failed: List[RankEnd], host_of: Callable[[int], str], how: str = "") -> Finding:
    one = absent[0]
    return find(
        "rank-absent", how, failed=named(failed), absent=named(absent), evidence=_shown(failed[0]),
        node=one.member, host=host_of(one.member),
        rank=one.rank if len(absent) == 1 and not one.of_command else None, confidence=LIKELY,
        seen=("exit codes, times and last lines of all ranks",),
    )  # fmt: skip


def _closed(events: Sequence[order.Event]) -> Tuple[str, ...]:
    words = "TCP connections: rank {} closed those to {}"
    return tuple(words.format(each.place.rank, named_ranks(each.closed, 8)) for each in events if each.closed)


def _shown(end: RankEnd) -> tuple[Evidence, ...]:
    return end.finding.evidence[:2] if end.finding else ()


# How an attempt ended, from its ranks' ends and from requests to stop. Pure functions.


_OUTSIDE = frozenset((STOPPED, "killed", "terminated", "interrupted", "time-limit"))  # codes of ends that others caused


def concluded(
    attempt: Attempt, requests: StopRequests, members: Mapping[int, Member], now: float, doubtful_ok: bool = False
) -> Tuple[Outcome, List[Act]]:
    """Return the outcome and its records: a false hang alarm, the first failure, its consequences, and the attempt's progress."""
    progress = attempt.progress({number: member.clock_offset for number, member in members.items()})
    attempt.note_complete(progress)
    attempt.forget_history(progress)
    outcome = replace(
        attempt_outcome(attempt, requests, members, progress), assignment=attempt.assignment, port=attempt.port,
        t=now, step=progress.step, nan_since=progress.not_finite_since, saved=progress.saved,
    )  # fmt: skip
    if outcome.outcome == FAILED:
        behind = hardware_behind(outcome.finding, outcome.exit_code, attempt.broken)
        outcome = replace(outcome, finding=behind or outcome.finding)
    outcome = replace(outcome, member=attempt.member_of(outcome.finding))
    if outcome.outcome == DOUBTFUL and doubtful_ok:
        outcome = replace(outcome, exit_code=0)
    acts: List[Act] = []
    if attempt.suspected and outcome.outcome in (FINISHED, DOUBTFUL):
        attempt.suspected = None
        acts.append(Record("resumed", {"seconds": 0.0, "ended": True}))
    if outcome.finding and outcome.outcome != DOUBTFUL:
        acts.append(record_finding(outcome.finding, "failed"))
    acts += [Record("consequence", to_plain(each)) for each in attempt.affected(outcome.finding)]
    acts += [
        record_finding(each) for each in (_not_saved(attempt, members, outcome, requests) if requests.outcome else ())
    ]
    ended = {"outcome": outcome.outcome, "exit_code": outcome.exit_code, "progress": to_plain(progress)}
    return outcome, [*acts, Record("attempt-ended", ended)]


def attempt_outcome(
    attempt: Attempt, requests: StopRequests, members: Mapping[int, Member], progress: Progress
) -> Outcome:
    own = _own_failure(attempt) if requests.way == LAUNCHER or (requests.outcome and attempt.failed_unasked) else None
    if own:  # if its guard was killed with it, its exit code is unknown
        return Outcome(FAILED, own.exit_code or 1, own.finding)
    if requests.outcome and not attempt.judged:
        return _stopped(attempt, requests)
    if attempt.finding:
        lost = any(members[number].lost for number in attempt.assignment)
        code = EXIT_MUSTER if lost else EXIT_STORAGE if attempt.finding.code == "storage" else 1
        return Outcome(FAILED, code, attempt.finding)
    found, one, tied = earliest(attempt.ends, attempt.accused)
    if one is None:
        doubt = attempt.doubt(progress)
        return Outcome(DOUBTFUL, EXIT_DOUBTFUL, doubt) if doubt else Outcome(FINISHED, 0)
    if one.exit_code == EXIT_REQUEUE:
        return Outcome(REQUEUE, EXIT_REQUEUE)
    cause = blame(attempt.ends, attempt.suspected, lambda number: members[number].host, attempt.accused)
    if cause is not None:
        code = one.code or next(end.code for end in attempt.ends if end.failed and not end.by_us)
        return Outcome(FAILED, code, cause)
    finding = one.finding or find("unknown", who=named([one]), code=one.code, rank=None if one.of_command else one.rank)
    seen = _closed([*found.unexplained, *filter(None, [found.event])])
    finding = replace(finding, seen=(*finding.seen, *seen))
    if found.confidence != CERTAIN == finding.confidence:
        finding = replace(finding, confidence=LIKELY)
    if tied:
        alike = all(end.finding and end.finding.title == finding.title for end in tied)
        words = f"{named(tied)} failed {'in the same way' if alike else 'too'}, so close in time that either may have been first"
        confidence = finding.confidence if alike else LIKELY
        finding = replace(finding, cause="; ".join(filter(None, (finding.cause, words))), confidence=confidence)
    told = (text for each in attempt.accused if each.rank == finding.rank is not None for text in each.evidence)
    finding = replace(finding, evidence=(*finding.evidence, *told))
    return Outcome(FAILED, one.code, finding)


def _stopped(attempt: Attempt, requests: StopRequests) -> Outcome:
    codes = [end.exit_code for end in attempt.ends]
    if EXIT_REQUEUE in codes and not requests.cancelled:
        return Outcome(REQUEUE, EXIT_REQUEUE)
    commands = sum(1 for end in attempt.ends if end.of_command)
    whole = commands == len(attempt.assignment) if commands else len(codes) == attempt.ranks
    if requests.outcome == TIME_LIMIT and whole and not any(end.failed for end in attempt.ends):
        return Outcome(FINISHED, 0)  # the signal came while they were ending; a rank that is cut short exits with 75
    return Outcome(requests.outcome, requests.exit_code, resumable=EXIT_REQUEUE in codes)


def _not_saved(
    attempt: Attempt, members: Mapping[int, Member], outcome: Outcome, requests: StopRequests
) -> List[Finding]:
    """Report ranks that were asked to save and end, but were killed, failed or were lost with their node."""
    killed = [end for end in attempt.ends if end.by_us and end.signal == signal.SIGKILL]
    failed = [
        (end.rank, end.finding)
        for end in attempt.ends
        if end.exit_code not in (None, 0, EXIT_REQUEUE) and end.finding and end.finding != outcome.finding
        if end.finding.code not in _OUTSIDE and not is_consequence(end)
    ]
    lost = [members[number] for number in attempt.assignment if members[number].lost]
    return [
        *([find("not-saved", "hurried" if requests.hurried else "", ranks=named(killed))] if killed else ()),
        *(find("not-saved", "failed", rank=rank, title=why.title, evidence=why.evidence) for rank, why in failed[:1]),
        *(find("not-saved", "lost", node=member.number, host=member.host) for member in lost[:1]),
    ]


def _own_failure(attempt: Attempt) -> Optional[RankEnd]:
    """Return the first rank that failed by itself, by its words or its exit code, before it was told to stop. If words could
    not be read, an exit code proves nothing beside a rank that was killed: that one may have failed, and this one lost it."""
    failed = [end for end in attempt.ends if end.failed and not end.by_us and not is_consequence(end)]
    killed = any(end.signal for end in failed)
    own = [end for end in failed if end.exit_code != EXIT_REQUEUE and end.finding and end.finding.code not in _OUTSIDE]
    return earliest([end for end in own if not (killed and end.finding and end.finding.unseen)])[1]
