"""Findings about the launchers that a script has started: one that failed, was not there, or had not ended."""

from __future__ import annotations

from dataclasses import replace
from typing import Optional

from drumbeat.agent.ranks.stages import Stage
from drumbeat.base.signals import EXIT_NOT_FOUND
from drumbeat.findings.model import CERTAIN, ERROR, WARNING, Evidence, Finding, shown

STAGE_FAILED = "stage-failed"  # a doubt: a launcher in the script failed, and the script ended with 0
_FIND_IT = "activate the environment that has it, in the script or in `setup:` of the job file, or write its full path"


def unended(stage: Stage, code: str, severity: str, cause: str) -> Finding:
    return Finding(
        code, severity, f"the script ended while its {shown(stage.command)[:200]} had not reported its end", cause,
        "wait for it at the end of the script: `wait`; or leave out the &. If it was killed, look for memory that ran out",
        confidence=CERTAIN, seen=("the launchers that the script called", "the script's exit code"),
    )  # fmt: skip


def stage_failed(stage: Stage, later: str) -> Finding:
    """`later`: what ran after it and ended well; '' where nothing is known to have."""
    first = stage.failures[0] if stage.failures else {}
    code = int(first.get("exit_code", stage.exit_code))
    went_on = f"what ran after it ended well: {shown(later)[:200]}" if later else "ended with exit code 0"
    return Finding(
        STAGE_FAILED, WARNING, f"the script's {shown(stage.command)[:200]} {_words(code, bool(stage.failures))}",
        f"the script went on, and {went_on}",
        "look at its log; if the run should end at such a failure, leave out what follows it in the script",
        confidence=CERTAIN, seen=("the launchers that the script called", "the script's exit code"), rank=first.get("rank"),
    )  # fmt: skip


def _words(code: int, of_rank: bool) -> str:
    """A launcher that was told to stop says so by its exit code; a rank's code may be its own."""
    if not of_rank and code > 128:
        return f"was told to stop (signal {code - 128})"
    return f"failed (exit code {code})" if code >= 0 else f"failed (signal {-code})"


def missing(stage: Stage, exit_code: Optional[int]) -> Finding:
    name = stage.command.partition(" ")[0]
    return Finding(
        "command-not-found", ERROR if exit_code else WARNING, f"the script's {name} was not found",
        "it is not in the PATH that the script had", _FIND_IT, (Evidence(f"{name}: command not found"),),
        confidence=CERTAIN, seen=("the launchers that the script called",),
    )  # fmt: skip


def no_rank(stage: Stage) -> Finding:
    """The script's own exit code says nothing: it is that of a pipe into tee, or of a last echo."""
    if stage.missing:
        found = missing(stage, EXIT_NOT_FOUND)
        return replace(found, cause=f"{found.cause}; the script went on without it, and no rank was started")
    return Finding(
        "no-rank-started", ERROR, "the launcher in the script started no rank",
        "it ended before its first rank; the script went on, and ended with exit code 0",
        "look at what it printed; `set -o pipefail` in the script passes its exit code on",
        (Evidence(shown(stage.command)[:200]),), confidence=CERTAIN, seen=("the launchers that the script called", "rank logs"),
    )  # fmt: skip
