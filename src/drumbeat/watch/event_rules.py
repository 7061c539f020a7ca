"""What each event of a run changes in its view: phase, nodes, ranks, findings and marks."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from drumbeat.findings.model import INFO
from drumbeat.runfolder import events as kinds
from drumbeat.runfolder.events import Event
from drumbeat.runfolder.hang import CODE as HANG
from drumbeat.runfolder.summary import shortened
from drumbeat.watch.node_view import MOST_RANKS, RankView
from drumbeat.watch.state import RunState

_MOST_REPLACED = 100
_MOST_CHECKS = 30
_LONGEST = 300  # characters of a reason or a name


def apply_event(view: RunState, event: Event, t: float) -> None:
    """`t`: when it happened, by the lead's clock."""
    if isinstance(event, kinds.RunStarted):
        _run_started(view, event, t)
    elif isinstance(event, kinds.NodeJoined):
        _joined(view, event)
    elif isinstance(event, kinds.Mustered):
        view.phase = "starting ranks"
    elif isinstance(event, kinds.AttemptStarted):
        _attempt_started(view, event, t)
    elif isinstance(event, kinds.FirstStep):
        view.phase = "training"
        view.mark(t, "first step", f"first step after {event.seconds:.1f} s")
    elif isinstance(event, (kinds.RankStarted, kinds.RankExited)):
        _rank(view, event)
    elif isinstance(event, kinds.VerdictGiven):
        _verdict(view, event)
    elif isinstance(event, kinds.FindingMade):
        view.findings.append(shortened(event.finding))
        view.hangs = view.hangs or event.finding.code.startswith(HANG)
        view.mark(t, "finding", event.finding.title)
    else:
        _trouble(view, event, t)


def _trouble(view: RunState, event: Event, t: float) -> None:
    if isinstance(event, kinds.Failed):
        view.failure = shortened(event.finding)
        view.findings.append(view.failure)
        view.mark(t, "failed", event.finding.title)
    elif isinstance(event, kinds.NodeLost):
        view.node(event.peer).lost = event.why[:_LONGEST] or "lost"
        view.mark(t, "lost", f"lost {event.words}")
    elif isinstance(event, (kinds.NodeSilent, kinds.NodeHeard)):
        view.mark(t, "finding", event.words)
    elif isinstance(event, kinds.Excluded):
        view.node(event.peer).idle = f"excluded: {event.why}"[:_LONGEST]
        view.mark(t, "lost", f"node {event.peer} ({event.peer_host}) excluded: {event.why}")
    elif isinstance(event, kinds.Resumed):
        view.hangs = False
    elif isinstance(event, kinds.Stopping):
        view.phase = "stopping"
        view.mark(t, "stop", event.why)
    elif isinstance(event, kinds.Decided) and event.action in ("restart", "requeue"):
        view.phase = "restarting" if event.action == "restart" else "waiting to be queued again"
        view.replaced = (*view.replaced, *(words[:_LONGEST] for words in event.replaced))[-_MOST_REPLACED:]
        view.mark(t, "restart", event.why)
    elif isinstance(event, kinds.RunEnded):
        view.phase = "ended"
        view.mark(t, "end", f"{event.outcome}, exit code {event.exit_code}")


def _run_started(view: RunState, event: kinds.RunStarted, t: float) -> None:
    _failure_is_past(view, view.attempt + 1)
    view.started, view.summary = t, None
    view.phase = "waiting for nodes" if event.nodes > 1 else "starting ranks"
    view.planned_nodes = event.nodes
    view.planned_ranks = event.nodes * event.ranks_per_node or view.planned_ranks
    for node in view.nodes.values():
        node.joined, node.lost, node.idle = False, "", ""


def _joined(view: RunState, event: kinds.NodeJoined) -> None:
    node = view.node(event.peer)
    node.host, node.joined = event.peer_host[:_LONGEST], True
    view.offsets[event.peer] = event.clock_offset


def _attempt_started(view: RunState, event: kinds.AttemptStarted, t: float) -> None:
    view.go_to(event.attempt)
    _failure_is_past(view, event.attempt)
    view.world, view.hangs = event.world_size, False
    view.phase = "waiting for the first step"
    for node in view.nodes.values():
        if not node.idle.startswith("excluded"):
            node.idle = "spare" if node.node in event.spares else ""
    if event.attempt:
        view.mark(t, "attempt", f"attempt {event.attempt + 1} of the ranks")


def _failure_is_past(view: RunState, attempt: int) -> None:
    """That attempt, counted from 1, failed; the run goes on all the same."""
    if view.failure:
        past = replace(view.failure, severity=INFO, title=f"attempt {attempt} ended: {view.failure.title}")
        view.findings = deque((past if each == view.failure else each for each in view.findings), view.findings.maxlen)
        view.failure = None


def _verdict(view: RunState, event: kinds.VerdictGiven) -> None:
    verdict = event.verdict
    known = verdict.check in view.verdicts or (len(view.verdicts) < _MOST_CHECKS and len(verdict.check) <= _LONGEST)
    if event.peer is not None and known:
        view.verdicts.setdefault(verdict.check, {})[event.peer] = verdict
    if verdict.check == "world" and verdict.count:
        view.world = verdict.count


def _rank(view: RunState, event: Event) -> None:
    assert isinstance(event, (kinds.RankStarted, kinds.RankExited))
    if event.attempt < view.attempt or event.rank >= MOST_RANKS:
        return
    view.go_to(event.attempt)
    node = view.node(event.node)
    if event.of_command:  # no rank itself; those that it has started end with it
        ranks = list(node.ranks.values())
    elif event.rank in view.ranks:
        ranks = [view.ranks[event.rank]]
    else:
        ranks = [RankView(event.rank, event.node)]
        view.ranks[event.rank] = node.ranks[event.rank] = ranks[0]
    for rank in ranks:
        if isinstance(event, kinds.RankExited) and rank.ended is None:
            rank.ended = -event.signal if event.signal else event.exit_code if event.exit_code is not None else 1
            view.ended_ranks += 1
