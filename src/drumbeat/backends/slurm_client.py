"""Talking to Slurm by its own tools, each call with a deadline."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from typing import Dict, List, Mapping, Optional, Sequence

from drumbeat.backends.contract import Status
from drumbeat.problem import Problem

_SECONDS = 30.0
_HANDLE = re.compile(r"slurm://([^/]*)/(\d+)")
# Slurm's words for a job's state -> ours.
_STATES = {
    "PENDING": "queued", "CONFIGURING": "queued", "REQUEUED": "queued", "REQUEUE_HOLD": "queued", "REQUEUE_FED": "queued",
    "SPECIAL_EXIT": "queued", "SUSPENDED": "running", "RUNNING": "running", "COMPLETING": "running", "STAGE_OUT": "running",
    "COMPLETED": "finished", "CANCELLED": "cancelled", "PREEMPTED": "cancelled",
}  # fmt: skip


@dataclass(frozen=True)
class Handle:
    cluster: str
    job: str

    def __str__(self) -> str:
        return f"slurm://{self.cluster}/{self.job}"


def parse_handle(text: str) -> Optional[Handle]:
    found = _HANDLE.fullmatch(text)
    return Handle(found.group(1), found.group(2)) if found else None


def test_only(script: str, environ: Mapping[str, str]) -> str:
    """What Slurm says to the request, before anything is queued; its complaint is raised as ours."""
    done = _call(["sbatch", "--test-only", script], environ)
    if done.returncode != 0:
        raise Problem(f"Slurm refuses this job: {_complaint(done.stderr)}", _advice(done.stderr))
    return _plain(done.stderr)


def submit(script: str, environ: Mapping[str, str]) -> Handle:
    done = _call(["sbatch", "--parsable", script], environ)
    if done.returncode != 0:
        raise Problem(f"Slurm refuses this job: {_complaint(done.stderr)}", _advice(done.stderr))
    job, _, cluster = done.stdout.strip().partition(";")
    if not job.isdigit():
        raise Problem(f"sbatch answered {done.stdout.strip()[:80]!r} instead of a job's number")
    return Handle(cluster or cluster_name(environ), job)


def sbatch_environment(environ: Mapping[str, str]) -> Dict[str, str]:
    """sbatch's own variables would win over the script, and a surrounding job's SLURM_* would leak into the new one."""
    settled = ("SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION", "SBATCH_CONSTRAINT")
    kept = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT")
    return {
        name: value
        for name, value in environ.items()
        if name not in settled and (not name.startswith("SLURM_") or name in kept)
    }


def cluster_name(environ: Mapping[str, str]) -> str:
    done = _call(["scontrol", "show", "config"], environ)
    found = re.search(r"^ClusterName\s*=\s*(\S+)", done.stdout, re.MULTILINE)
    return found.group(1) if found else "cluster"


def status(handle: Handle, environ: Mapping[str, str]) -> Status:
    """As Slurm says; `unknown` where it has forgotten the job and keeps no accounts."""
    done = _call(["squeue", "--noheader", "--states=all", f"--jobs={handle.job}", "--format=%T|%r|%N"], environ)
    line = done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""
    if line:
        state, reason, nodes = (line.split("|") + ["", ""])[:3]
        where = f" on {nodes}" if nodes else ""
        said = f"{state.lower()}{where}" + (f" ({reason})" if reason not in ("None", "") else "")
        return Status(str(handle), _STATES.get(state, "failed"), said)
    return _from_accounts(handle, environ)


def _from_accounts(handle: Handle, environ: Mapping[str, str]) -> Status:
    argv = ["sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={handle.job}", "--format=State,ExitCode"]
    done = _call(argv, environ)
    line = done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""
    if not line:
        return Status(str(handle), "unknown", "Slurm no longer knows this job")
    state, _, code = line.partition("|")
    word = state.split()[0]
    number = code.partition(":")[0]
    return Status(str(handle), _STATES.get(word, "failed"), state.lower(), int(number) if number.isdigit() else None)


def cancel(handle: Handle, environ: Mapping[str, str]) -> None:
    done = _call(["scancel", handle.job], environ)
    if done.returncode != 0:
        raise Problem(f"Slurm does not cancel job {handle.job}: {_complaint(done.stderr)}")


def _call(argv: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            list(argv), env={**environ, "LC_ALL": "C"}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=_SECONDS, check=False, cwd=os.path.sep,
        )  # fmt: skip
    except FileNotFoundError:
        raise Problem(f"there is no {argv[0]} here", "log in to the cluster's login node, or load its module") from None
    except subprocess.TimeoutExpired:
        raise Problem(
            f"{argv[0]} has not answered for {_SECONDS:g} s", "Slurm's controller may be busy: try again"
        ) from None


def _plain(text: str) -> str:
    lines: List[str] = []
    for line in text.strip().splitlines():
        line = re.sub(r"^\w+: (error: |fatal: )?", "", line).strip()
        if line and line not in lines:
            lines.append(line)
    return "; ".join(lines)[:500]


def _complaint(text: str) -> str:
    """sbatch says the same thing twice, in other words."""
    plain = [
        line for line in _plain(text).split("; ") if not line.startswith(("allocation failure", "Batch job submission"))
    ]
    return "; ".join(plain) or _plain(text) or "it does not say why"


def _advice(text: str) -> str:
    lowered = text.lower()
    for words, advice in (
        ("invalid partition", "sinfo -s lists the partitions; say --partition NAME"),
        ("invalid account", "sacctmgr show associations user=$USER lists yours; say --account NAME"),
        ("time limit", "sinfo -o '%P %l' shows the longest times; say --time"),
        ("node configuration", "no node has all that is asked for: fewer GPUs, cores or less memory a node"),
        ("more processors", "the partition has no such number of nodes or cores: fewer nodes, or --cpus"),
        ("node count", "sinfo -o '%P %D' shows how many nodes a partition has"),
        ("invalid qos", "say --qos NAME, or leave it out"),
    ):
        if words in lowered:
            return advice
    return "drumbeat plan --render JOB.yaml shows what was asked for"


def shell_argv(handle: Handle, host: str) -> List[str]:
    """A step of its own beside the one that trains; without --overlap it would wait for that one's end."""
    where = [f"--jobid={handle.job}", f"--nodelist={host}", "--nodes=1", "--ntasks=1"]
    return ["srun", *where, "--overlap", "--cpu-bind=none", "--pty", os.environ.get("SHELL", "/bin/bash")]
