"""The summary of a run whose lead was killed before it could write one: the same record, from what the run folder holds."""

from __future__ import annotations

import os
import signal

from drumbeat.base.order import Order
from drumbeat.base.signals import EXIT_STORAGE
from drumbeat.findings.model import ERROR, Evidence, Finding
from drumbeat.runfolder.derived import replaced_nodes
from drumbeat.runfolder.hang import hang_of, hangs_of
from drumbeat.runfolder.ledger import ledger
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.summary import AttemptEnd, Summary, gpus_of_run, gpus_used, group, summarize
from drumbeat.runfolder.world import ranks_seen, world_of


def summary_without_lead(run: Run, order: Order, code: int, now: float, hung: str = "") -> Summary:
    """`code` is how the lead's agent ended, negative or above 128 for a signal; `now` is the wall clock; `hung` says why we
    ended it ourselves."""
    number = code - 128 if code > 128 else -code if code < 0 else 0
    finding = _hung(hung) if hung else _finding(number, code)
    attempts = run.attempt_ends()
    if attempts and attempts[-1].outcome == "cut off":
        attempts.pop()
        last = run.attempts()[-1:] or [len(attempts)]
    else:
        last = [attempts[-1].attempt + 1 if attempts else 0]
    attempts.append(AttemptEnd(last[0], "failed", 128 + number if number else code or 1, finding))
    affected = group((end.rank, end.words) for end in run.ranks().ended if end.failed)
    progress = run.progress()
    queued = os.path.exists(run.folder.script)
    events = run.run_events()
    parts, hang = ledger(order.created, now, events, queued, progress), hang_of(events)
    found = hang.finding if hang else None
    facts = [run.facts(node) for node in run.nodes()]
    known = [gpus_used(order, each) for each in facts if each]
    gpus = gpus_of_run(order, known) if len(known) == len(facts) else None
    replaced, world = replaced_nodes(events), world_of(events)
    hangs = hangs_of(events, now, progress)
    return summarize(
        order, attempts, run.members(), affected, progress, parts, found, replaced, gpus, world, hangs, ranks_seen(events)
    )  # fmt: skip


def _hung(why: str) -> Finding:
    return Finding(
        "lead-hung", ERROR, "the lead's agent stopped answering before the run ended", why,
        "it was stopped (SIGSTOP), or hung in the kernel: look at the kernel log and at the file system of the run folder",
        (Evidence(why),),
    )  # fmt: skip


def _finding(number: int, code: int) -> Finding:
    if number:
        return Finding(
            "lead-lost", ERROR, f"the lead's agent was killed by {signal.Signals(number).name} before the run ended",
            "something outside drumbeat ended it: a person, the out-of-memory killer, a scheduler",
            "look at the machine's kernel log for 'Out of memory'; start the run again",
        )  # fmt: skip
    if code == EXIT_STORAGE:
        return Finding(
            "storage", ERROR, "the run folder could not be written any more",
            "the disk is full, its storage does not answer, or the folder is gone",
            "make room, or choose another place with --runs; start the run again",
        )  # fmt: skip
    return Finding(
        "lead-lost", ERROR, f"the lead's agent ended with {code} before the run ended",
        "it says why above, or it has a fault", "fix what it names; if it names nothing, report the traceback",
    )  # fmt: skip
