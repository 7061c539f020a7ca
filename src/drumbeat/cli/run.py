"""drumbeat run: start a job here, or be one node of a run that is typed on several machines."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any, List

from drumbeat.base.problem import Problem
from drumbeat.base.redact import printable


def add_arguments(parser: Any) -> None:
    from drumbeat.jobfile.flags import add_job_flags

    add_job_flags(parser)
    add_start(parser)


def add_start(parser: Any) -> None:
    """Add the arguments of commands that start a run at once."""
    parser.add_argument("--no-preflight", action="store_true", help="start even if a node fails its preflight checks")
    group = parser.add_argument_group("without a scheduler (type it on each machine)")
    group.add_argument("--node-rank", type=int, metavar="K", help="node rank of this machine, from 0")
    group.add_argument("--master", default="", metavar="HOST[:PORT]", help="address of node 0 as the others reach it")


def job_to_start(args: Any) -> Any:
    from drumbeat.jobfile.flags import load_job

    if args.node_rank is not None and args.node_rank < 0:
        raise Problem(f"--node-rank {args.node_rank}: node ranks count from 0")
    job = load_job(args.job, args)
    return (
        dataclasses.replace(job, checks=dataclasses.replace(job.checks, preflight="off")) if args.no_preflight else job
    )


def run(args: Any) -> int:
    from drumbeat.desk.start.run import run_job

    job = job_to_start(args)
    copies = _say_what_is_seen(job) if args.job is None and args.node_rank is None else ""
    folders: List[Any] = []
    code = run_job(job, args.job, args.node_rank, args.master, job.nodes, folders.append)
    if copies and code == 0 and folders:
        _say_again(copies, folders[0].path)
    return code


def _say_again(copies: str, folder: str) -> None:
    """Repeat after a successful end that the ranks are copies, unless more is known about them."""
    from drumbeat.runfolder.run import Run
    from drumbeat.runfolder.state import ranks_seen, world_of

    events = Run.open(folder).run_events()
    if ranks_seen(events) is None and world_of(events) is None:
        print(f"{'warning':<10} {copies}", file=sys.stderr)


def _say_what_is_seen(job: Any) -> str:
    """Describe in one line what the program looks like: if nothing was run here before, and always if ranks would be copies.
    Return the line in that case."""
    from drumbeat.commands.program import script_at

    text = script_at([str(word) for word in job.command], os.getcwd()).python if job.command else ""
    if not text:
        return ""
    from drumbeat.convert.folder import PROGRAM, first_look, kind_of
    from drumbeat.desk.start.place import HERE, find_place
    from drumbeat.machine.host import LiveHost

    if kind_of("program.py", text) != PROGRAM:
        return ""
    look = first_look(text)
    alone = job.ranks_per_node == 1 and (job.nodes or 1) == 1
    first = not os.path.isdir(job.runs or "runs")
    if find_place(LiveHost()).kind == HERE and (first if look.world else not alone):
        words = "; ".join(filter(None, (look.world and f"uses {look.world}", look.advice)))
        print(f"{'script':<10} {printable(words)}", file=sys.stderr)
    return "" if look.world or alone else printable(look.advice)
