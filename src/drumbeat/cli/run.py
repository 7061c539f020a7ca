"""drumbeat run: start a job here, or be one node of a run that is typed on several machines."""

from __future__ import annotations

from typing import Any


def add_arguments(parser: Any) -> None:
    from drumbeat.jobfile.flags import add_job_flags

    add_job_flags(parser)
    parser.add_argument("--no-preflight", action="store_true", help="start even if a node fails its preflight checks")
    group = parser.add_argument_group("without a scheduler, typed once on each machine")
    group.add_argument("--node-rank", type=int, metavar="K", help="node rank of this machine, from 0")
    group.add_argument("--master", default="", metavar="HOST[:PORT]", help="address of node 0 as the others reach it")


def run(args: Any) -> int:
    import dataclasses

    from drumbeat.base.problem import Problem
    from drumbeat.desk.start.run import run_job
    from drumbeat.jobfile.flags import load_job

    if args.node_rank is not None and args.node_rank < 0:
        raise Problem(f"--node-rank {args.node_rank}: node ranks count from 0")
    job = load_job(args.job, args)
    if args.no_preflight:
        job = dataclasses.replace(job, checks=dataclasses.replace(job.checks, preflight="off"))
    return run_job(job, args.job, args.node_rank, args.master, job.nodes)
