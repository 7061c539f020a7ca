"""summary.json: how a run went, in one file. *Finished* and *target reached* are two things."""

from __future__ import annotations

import time
from typing import Any, Dict, Optional

from drumbeat.agent.decide import REQUEUE
from drumbeat.agent.lead import Lead
from drumbeat.agent.requeue import after_end
from drumbeat.record import to_plain
from drumbeat.runfolder.layout import SCHEMA, RunFolder
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.verdict import requeues, write_verdict
from drumbeat.runfolder.write import replace_json


def write_end(folder: RunFolder, lead: Lead, first_step: Optional[float]) -> None:
    last = lead.history[-1]
    after = after_end(
        last.outcome == REQUEUE, len(lead.lost), bool(lead.requests.outcome), lead.requests.cancelled, requeues(folder),
        lead.order.resources.requeues,
    )  # fmt: skip
    lost = [lead.order.hosts[node] for node in lead.lost if node < len(lead.order.hosts)]
    write_verdict(folder, last.exit_code, after.step, lost, after.counts)
    replace_json(folder.summary, summarize(lead, first_step, time.time(), time.monotonic()))


def summarize(lead: Lead, first_step: Optional[float], wall: float, now: float) -> Dict[str, Any]:
    """`first_step` and `wall` are wall-clock times of the lead, `now` is its monotonic clock."""
    order = lead.order
    progress = _progress(lead)
    last = lead.history[-1]
    rate = progress.rate()
    attempt = lead.attempts[-1] if lead.attempts else None
    consequences = lead.consequences(attempt, last.finding) if attempt else []
    return {
        "schema": SCHEMA,
        "run_id": order.run_id,
        "outcome": last.outcome,
        "exit_code": last.exit_code,
        "target_reached": progress.target_reached,
        "seconds": round(wall - order.created, 3),
        "start": order.start,
        "nodes": order.nodes,
        "ranks": sum(peer.ranks for peer in lead.peers.values()),
        "hosts": [lead.peers[node].host for node in sorted(lead.peers)],
        "launcher": order.launcher,
        "attempts": [
            *({name: each[name] for name in ("outcome", "exit_code", "finding")} for each in lead.earlier),
            *(
                {"outcome": outcome.outcome, "exit_code": outcome.exit_code, "finding": to_plain(outcome.finding)}
                for outcome in lead.history
            ),
        ],
        "failure": to_plain(last.finding) if last.finding else None,
        "consequences": [record.data for record in consequences if hasattr(record, "data")],
        "progress": progress.to_plain(),
        "throughput": {"value": round(rate[0], 3), "unit": rate[1]} if rate else None,
        "ledger": _ledger(lead, progress, first_step, wall, now),
    }


def _progress(lead: Lead) -> Progress:
    """Node 0's part first: its losses are the run's."""
    total = Progress()
    if not lead.attempts:
        return total
    done = lead.attempts[-1].done
    for number in sorted(done):
        part = done[number].get("progress")
        if part:
            total.merge(Progress.from_plain(part), lead.peers[number].clock_offset)
            if number == 0:
                total.accuracy = part.get("accuracy")
                total.target_reached = part.get("target_reached")
                total.spent = dict(part.get("spent") or {})
                total.reported_rate, total.reported_unit = part.get("reported_rate"), part.get("reported_unit") or ""
    return total


def _ledger(lead: Lead, progress: Progress, first_step: Optional[float], wall: float, now: float) -> Dict[str, float]:
    """Where the time went, from the command to the end; the parts add up to the whole."""
    total = wall - lead.order.created
    before_lead = max(0.0, total - (now - lead.started))
    parts = {"start agents": before_lead, "muster": lead.mustered_after}
    if first_step is None or progress.last_t is None:
        parts["ranks"] = total - sum(parts.values())
    else:
        parts["ranks to first step"] = first_step - lead.order.created - sum(parts.values())
        training = max(0.0, progress.last_t - first_step)
        for kind, seconds in progress.spent.items():
            if kind != "step" and seconds < training:
                parts[kind] = seconds
                training -= seconds
        parts["training"] = training
        parts["end"] = total - sum(parts.values())
    return {name: round(seconds, 3) for name, seconds in parts.items()}
