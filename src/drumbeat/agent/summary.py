"""What the lead writes when a run ends: summary.json, and the verdict for whatever started the agents."""

from __future__ import annotations

import os
import time
from typing import List, Optional

from drumbeat.agent.decide import REQUEUE
from drumbeat.agent.lead import Lead
from drumbeat.agent.requeue import Next, after_end
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.records import Member
from drumbeat.runfolder.summary import AttemptEnd, Summary, Times, summarize, write_summary
from drumbeat.runfolder.verdict import requeues, write_verdict


def what_follows(folder: RunFolder, lead: Lead) -> Next:
    """After the last attempt, before its end is written."""
    asked, saved = lead.requests, lead.history[-1].outcome == REQUEUE
    allowed = lead.order.resources.requeues
    return after_end(saved, len(lead.exclude), bool(asked.outcome), asked.cancelled, requeues(folder), allowed)


def write_end(folder: RunFolder, lead: Lead, first_step: Optional[float]) -> None:
    after = what_follows(folder, lead)
    write_verdict(folder, lead.history[-1].exit_code, after.step, lead.exclude, after.counts)
    queued = os.path.exists(folder.script)
    write_summary(folder, summary_of(lead, first_step, time.time(), time.monotonic(), queued))


def summary_of(lead: Lead, first_step: Optional[float], wall: float, now: float, queued: bool = False) -> Summary:
    """`first_step` and `wall` are wall-clock times of the lead, `now` is its monotonic clock."""
    last = lead.history[-1]
    total = wall - lead.order.created
    times = Times(total, max(0.0, total - (now - lead.started)), lead.mustered_after, first_step, queued)
    affected = lead.attempts[-1].affected(last.finding) if lead.attempts else ()
    members = [
        Member(member.number, member.host, member.address, member.clock_offset, member.ranks)
        for _, member in sorted(lead.members.items())
    ]
    return summarize(lead.order, _attempts(lead), members, affected, _progress(lead), times)


def _attempts(lead: Lead) -> List[AttemptEnd]:
    """Those of earlier starts of this job, then our own; one that never started ranks has the next number."""
    first = lead.first_attempt
    own = [
        AttemptEnd(first + index, outcome.outcome, outcome.exit_code, outcome.finding)
        for index, outcome in enumerate(lead.history)
    ]
    return [*lead.earlier, *own]


def _progress(lead: Lead) -> Progress:
    """Node 0's part first: its losses are the run's."""
    total = Progress()
    if not lead.attempts:
        return total
    attempt = lead.attempts[-1]
    for node, number in enumerate(attempt.assignment):
        part = attempt.done.get(number)
        if part:
            progress = Progress.from_plain(part)
            total.merge(progress, lead.members[number].clock_offset)
            if node == 0:
                total.accuracy, total.target_reached = progress.accuracy, progress.target_reached
                total.spent = progress.spent
                total.reported_rate, total.reported_unit = progress.reported_rate, progress.reported_unit
    return total
