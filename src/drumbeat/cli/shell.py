"""drumbeat shell: a shell, or one command, on a node of a running job."""

from __future__ import annotations

import os
from typing import Any

from drumbeat.base.problem import Problem
from drumbeat.cli import add_run


def add_arguments(parser: Any) -> None:
    add_run(parser, "default: the newest here")
    parser.add_argument("--node", type=int, default=0, metavar="K", help="the node's rank, from 0")
    parser.usage = "%(prog)s [RUN] [--node K] [-- COMMAND ...]"
    parser.epilog = "With a COMMAND no shell opens: it runs there without a terminal, and its exit code is returned."
    parser.set_defaults(takes_command=True, after=[])


def run(args: Any) -> int:
    from drumbeat import backends
    from drumbeat.backends.contract import CANCELLED, FAILED, FINISHED
    from drumbeat.desk.runs import find_run
    from drumbeat.desk.status import status

    found = find_run(args.run, os.environ)
    handle = found.record.handle
    backend = backends.of_handle(handle)
    if backend is None:
        raise Problem(f"{found.run_id} was not submitted to a scheduler that drumbeat knows here")
    state = status(found).state
    if state in (FINISHED, FAILED, CANCELLED):
        raise Problem(f"{found.run_id} has ended ({state}): no process of it is left", f"drumbeat logs {found.run_id}")
    hosts = {member.node: member.host for member in found.members()}
    if args.node not in hosts:
        known = f"it has nodes {min(hosts)} to {max(hosts)}" if hosts else "its nodes have not joined yet"
        raise Problem(f"{found.run_id} has no node {args.node}", known)
    argv = backend.shell(handle, hosts[args.node], os.environ, args.after)
    try:
        os.execvp(argv[0], argv)
    except FileNotFoundError:
        raise Problem(f"there is no {argv[0]} here", "log in to the cluster's login node") from None
