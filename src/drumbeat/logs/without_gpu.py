"""Words about a GPU on nodes that have none: they are quoted, and never believed."""

from __future__ import annotations

from dataclasses import replace
from typing import Tuple

from drumbeat.findings.model import UNKNOWN, Finding
from drumbeat.logs.failure import Failure

# Failures that only a GPU can have. Not among them: what a program says because there is none.
_OF_GPU = frozenset((
    "gpu-out-of-memory", "gpu-memory-taken", "gpu-lost", "gpu-ecc", "gpu-app-fault", "gpu-xid", "gpu-hang", "gpu-busy",
    "gpu-ipc", "gpu-launch-failure", "amdgpu-reset", "nvlink-down", "device-assert", "illegal-memory-access",
))  # fmt: skip


def quoted(finding: Finding) -> Finding:
    """The finding as no more than what a log says, if it is about a GPU."""
    if finding.code not in _OF_GPU:
        return finding
    title = f'the log says "{finding.title}", but no GPU was seen on this node'
    cause = "not known: a message that the program made or passed on, or a GPU that could not be seen"
    return replace(finding, title=title, cause=cause, fix="", confidence=UNKNOWN)


def all_quoted(failure: Failure) -> Failure:
    """The same for everything that was read in the logs of such nodes."""
    found = quoted(failure.finding) if failure.finding else None
    return replace(
        failure, finding=found, confidence=UNKNOWN if found != failure.finding else failure.confidence,
        others=_each(failure.others), consequences=_each(failure.consequences), notes=_each(failure.notes),
    )  # fmt: skip


def _each(findings: Tuple[Finding, ...]) -> Tuple[Finding, ...]:
    return tuple(map(quoted, findings))
