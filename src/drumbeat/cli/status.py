"""drumbeat status: the state of a run, or how it ended."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any, List, Tuple

from drumbeat.backends.contract import QUEUED, RUNNING
from drumbeat.base.ranges import named_ranks
from drumbeat.base.redact import printable
from drumbeat.base.text import count, duration, labelled
from drumbeat.cli import add_json, add_run
from drumbeat.cli.output import print_json
from drumbeat.desk.runs import find_run
from drumbeat.desk.state import State, as_plain, output_of, placement_lines, state_of, unsaved_lines, with_ranks
from drumbeat.runfolder.lines import closing_lines, code_words, failure_lines, near, progress_line
from drumbeat.runfolder.run import Ranks, lead_now

_LAST_FILES = 5.0  # seconds to fetch the rest of a run that has ended elsewhere: only then is it tidied up there


def add_arguments(parser: Any) -> None:
    add_run(parser, "default: the newest here")
    parser.add_argument(
        "--placement", action="store_true", help="show each rank's GPU, cores, NUMA node and NIC, and whether they fit"
    )
    add_json(parser)


def run(args: Any) -> int:
    found = find_run(args.run, os.environ)
    if args.placement:
        print("\n".join(placement_lines(found)))
        return 0
    state = state_of(found)
    if state.summary and not state.goes_on:
        found.files.settle(_LAST_FILES)
    if args.json:
        print_json(as_plain(with_ranks(found, state)))
        return 0
    told, said = state.status, state.condition
    lines = [
        ("run", found.run_id),
        ("state", f"{said.word}: {said.detail}" if said.detail and not (state.hang or state.muster) else said.word),
    ]
    if state.summary:
        lines += closing_lines(found, state.summary)
    else:
        lines += failure_lines(found, state.failure) if state.failure else []
        lines += going_on(state, lead_now(found))
        lines += [("output", f"{found.path}/{name}") for name in output_of(found, told)[-1:] if not state.goes_on]
        lines.append(("folder", near(found.path)))
    lines[-1:-1] = unsaved_lines(found, not state.goes_on)
    lines.insert(len(lines) - 1, ("code", code_words(found) or "not known: no git checkout"))
    for task in told.tasks:
        number = task.handle.rpartition("_")[2]
        lines.append((f"task {number}", f"{task.state}{': ' + task.detail if task.detail else ''}"))
    width = shutil.get_terminal_size((80, 24)).columns
    shown = [(label, printable(text)) for label, text in lines]
    print("\n".join(labelled(shown, width if sys.stdout.isatty() else None)))
    return 0


def going_on(state: State, now: float) -> List[Tuple[str, str]]:
    """Return time, progress and ranks of a run that has not ended."""
    lines: List[Tuple[str, str]] = []
    if state.seconds is not None:
        rest = f", about {duration(state.seconds_left)} left" if state.seconds_left is not None else ""
        queued = state.status.state == QUEUED
        lines.append(("waiting" if queued else "elapsed", duration(state.seconds) + ("" if queued else rest)))
    if state.muster:
        lines.append(("waiting", f"{state.muster.words}, since {duration(max(0.0, now - state.muster.since))}"))
    if state.hang:
        finding = state.hang.finding
        lines.append(("hang", f"{finding.title} ({duration(max(0.0, now - state.hang.t))} ago)"))
        lines += [("cause", finding.cause), ("fix", finding.fix)]
    if state.before:
        begun = len(state.before) <= state.attempt  # else the last attempt has ended
        lines.append(("attempt", begun * f"{state.attempt + 1}; before it: " + "; ".join(state.before[-3:])))
        lines += [("progress", "no step in this attempt yet")] if begun and not state.progress.place else []
    if state.progress.place:
        lines.append(("progress", progress_line(state.progress, not state.hang and state.status.state == RUNNING, now)))
    if state.world:
        lines += [("warning", state.world.title), ("fix", state.world.fix)]
    if state.gpus:
        lines.append(("GPUs", state.gpus.words))
    if state.spares or state.replaced:
        lines.append(("spares", "; ".join([f"{state.spares} left", *state.replaced])))
    words = rank_words(state.ranks, now)
    return [*lines, ("ranks", words)] if words else lines


def rank_words(ranks: Ranks, now: float) -> str:
    """Describe how many ranks were started and which are known to have ended; empty before any start."""
    ended, commands = ranks.ended, count(ranks.commands, "node")
    ago = f"the last one {duration(max(0.0, now - ended[-1].t))} ago" if ended else ""
    failed = sorted({end.words for end in ended if end.failed})
    how = f" ({', '.join(failed[:3])})" if failed else ""
    if not ranks.counted:
        over = len({end.node for end in ended if end.of_command})
        state = f"has ended on {over} of them, {ago}{how}" if over else "is running"
        seen = "not counted" if ranks.seen is None else f"{ranks.seen} seen in one world"
        return f"{seen}: the command of {commands} starts them itself, and {state}"
    if ended:
        which = named_ranks((end.rank for end in ended), 8)
        return f"{len(ended)} of {ranks.started} have ended, {ago}: {which}{how}"
    if ranks.commands:
        seen = f"{ranks.started} started" if ranks.started else "none started yet"
        return f"{seen} by the command of {commands}, which is running"
    if ranks.seen is not None and ranks.seen > ranks.started:
        return f"{ranks.seen} seen in one world, started by {count(ranks.started, 'command')}"
    return f"all {ranks.started} running" if ranks.started else ""
