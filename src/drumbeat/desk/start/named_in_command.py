"""A launch command that was written for several machines says which of them this is."""

from __future__ import annotations

from typing import Mapping, Optional, Tuple

from drumbeat.base.problem import Problem
from drumbeat.commands.find import find_launcher
from drumbeat.jobfile.expand import expand
from drumbeat.jobfile.job import Job


def named_in_command(
    job: Job, environ: Mapping[str, str], nodes: Optional[int]
) -> Tuple[Optional[int], str, Optional[int]]:
    """Node rank, master and number of nodes of a command that was written for several machines.

    `torchrun --nnodes=2 --node_rank=1 --master_addr=HOST`, typed on each of them, is one job; emulating all its nodes on
    each machine would make several. A named site that emulates nodes (--site localhost) still does.
    """
    if job.site is not None:
        return None, "", nodes
    found = find_launcher([expand(word, environ, job.where("command")) for word in job.command])
    count = job.nodes or nodes or (found.nodes if found else None) or 1
    if found is None or count < 2:
        return None, "", nodes
    host = found.master.rpartition(":")[0] if found.master.count(":") == 1 else found.master
    elsewhere = bool(host) and host not in ("localhost", "::1") and not host.startswith("127.")
    if elsewhere and found.node_rank is not None:
        return found.node_rank, host, count
    emulate = f"--site localhost emulates all {count} nodes on this machine"
    if elsewhere:
        raise Problem(
            f"the command is for {count} machines that meet at {host}, but nothing says which of them this one is",
            f"add --node-rank K on each of them; {emulate}",
        )
    if found.node_rank is not None:
        raise Problem(
            f"the command is node {found.node_rank} of {count}, but names no machine at which the others find node 0",
            f"say --master HOST --node-rank {found.node_rank}, with a name that the others know; {emulate}",
        )
    return None, "", nodes
