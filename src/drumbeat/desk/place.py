"""Fan out or join: where `drumbeat run` was typed decides what it does.

here         a laptop, a workstation, machines one types on by hand: the agents start here
login        a login node of a cluster: nothing may run there; the user is told what to do
allocation   a batch script or an salloc shell: one agent a node through srun
join         inside a job step, an MPI task or a pod: only this node's agent starts here; no launcher is nested
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import List, Mapping

from drumbeat.facts import identity as identities
from drumbeat.facts.host import Host
from drumbeat.facts.model import Identity
from drumbeat.problem import Problem

# salloc's own shell may be a step (LaunchParameters=use_interactive_step); batch scripts are step -5 in Slurm's own count.
_SHELL_STEPS = ("4294967290", "4294967291")
_SLURM_CONF = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/var/spool/slurmd/conf-cache/slurm.conf")


@dataclass(frozen=True)
class Where:
    kind: str  # here, login, allocation, join
    identity: Identity


def where(host: Host) -> Where:
    notes: List[str] = []
    identity = identities.read(host, notes)
    kind = _kind(identity, host.environ)
    if kind == "allocation" and identity.step_id:
        identity = identities.whole_job(host, notes)
    return Where(kind, identity)


def _kind(identity: Identity, environ: Mapping[str, str]) -> str:
    if identity.scheduler == "slurm":
        return "join" if identity.step_id and identity.step_id not in _SHELL_STEPS else "allocation"
    if identity.scheduler in ("openmpi", "mpich"):
        return "join"
    if identity.scheduler in ("kubernetes", "runai"):
        # A pod by itself is a machine like any other; one of several says so.
        return "join" if (identity.nodes or 1) > 1 else "here"
    if identity.scheduler == "pbs":
        return "join" if identity.local_id is not None else "here"
    return "login" if _has_slurm(environ) else "here"


def _has_slurm(environ: Mapping[str, str]) -> bool:
    """Slurm's tools alone may come with any image; with a configuration they lead to a cluster."""
    if shutil.which("sbatch", path=environ.get("PATH", os.defpath)) is None:
        return False
    return bool(environ.get("SLURM_CONF")) or any(map(os.path.exists, _SLURM_CONF))


def check_joinable(identity: Identity) -> None:
    """What joining needs to know, or a Problem that says how to give it."""
    who = identity.scheduler
    nodes = identity.nodes
    if nodes is None or identity.node_rank is None:
        raise Problem(
            f"this is a task of {who}, but it does not say which node of how many this is",
            "start as many tasks on every node (--ntasks-per-node, mpirun --map-by ppr:K:node), or export NNODES and "
            "NODE_RANK",
        )
    if nodes > 1 and not identity.master:
        raise Problem(
            f"{nodes} nodes, and {who} does not say which one is node 0",
            "export MASTER_ADDR, the name of node 0, to all of them (mpirun: -x MASTER_ADDR)",
        )
