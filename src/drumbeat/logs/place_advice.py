"""Advice for the place where a run is: a scheduler's tools are no help on a machine without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, Tuple

from drumbeat.findings.model import Finding
from drumbeat.machine.model import Identity

# What a fix asks a tool of Slurm for -> the same in a pod, and on a machine without a scheduler.
_ELSEWHERE: Dict[str, Tuple[str, str]] = {
    "dmesg on that host, or sacct -j JOB -o State,MaxRSS": (
        "kubectl describe pod POD says whether it was memory (OOMKilled)",
        "dmesg on that host (it may need root) says whether it was memory",
    ),
    "sacct -j JOB -o State,Reason says whether it was a limit, a preemption or scancel": (
        "kubectl describe pod POD says whether it was evicted, preempted or deleted",
        "journalctl on that host may say who ended it",
    ),
}


def for_place(finding: Finding, identity: Identity) -> Finding:
    """The finding with a fix for the place that `identity` tells of."""
    started_by = (identity.scheduler, identity.batch)
    if "slurm" in started_by:
        return finding
    pod = any(name in ("kubernetes", "runai") for name in started_by)
    fix = finding.fix
    for words, (in_pod, alone) in _ELSEWHERE.items():
        fix = fix.replace(words, in_pod if pod else alone)
    return replace(finding, fix=fix)
