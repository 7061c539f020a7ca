"""What the lead writes when a run ends: summary.json, and the verdict for whatever started the agents."""

from __future__ import annotations

import os
import time
from typing import List, Optional

from drumbeat.agent.decide import REQUEUE
from drumbeat.agent.lead import Lead
from drumbeat.agent.requeue import after_end
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.records import Member
from drumbeat.runfolder.summary import AttemptEnd, Summary, Times, summarize, write_summary
from drumbeat.runfolder.verdict import requeues, write_verdict


def write_end(folder: RunFolder, lead: Lead, first_step: Optional[float]) -> None:
    last, allowed = lead.history[-1], lead.order.resources.requeues
    asked = lead.requests
    after = after_end(
        last.outcome == REQUEUE, len(lead.lost), bool(asked.outcome), asked.cancelled, requeues(folder), allowed
    )
    lost = [lead.order.hosts[node] for node in lead.lost if node < len(lead.order.hosts)]
    write_verdict(folder, last.exit_code, after.step, lost, after.counts)
    queued = os.path.exists(folder.script)
    write_summary(folder, summary_of(lead, first_step, time.time(), time.monotonic(), queued))


def summary_of(lead: Lead, first_step: Optional[float], wall: float, now: float, queued: bool = False) -> Summary:
    """`first_step` and `wall` are wall-clock times of the lead, `now` is its monotonic clock."""
    last = lead.history[-1]
    total = wall - lead.order.created
    times = Times(total, max(0.0, total - (now - lead.started)), lead.mustered_after, first_step, queued)
    affected = lead.affected(lead.attempts[-1], last.finding) if lead.attempts else ()
    members = [
        Member(peer.node, peer.host, peer.address, peer.clock_offset, peer.ranks)
        for _, peer in sorted(lead.peers.items())
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
    done = lead.attempts[-1].done
    for number in sorted(done):
        part = done[number].get("progress")
        if part:
            node = Progress.from_plain(part)
            total.merge(node, lead.peers[number].clock_offset)
            if number == 0:
                total.accuracy, total.target_reached, total.spent = node.accuracy, node.target_reached, node.spent
                total.reported_rate, total.reported_unit = node.reported_rate, node.reported_unit
    return total
