"""How a trial ended, as one word. Pure: what was seen goes in. Memory is blamed only where something says so."""

from __future__ import annotations

import re
from typing import Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.findings.model import Finding
from drumbeat.tune.observe import Observed
from drumbeat.tune.point import FAILED, HANG, NAN, OK, OOM, REFUSED, STOPPED

# Why a trial was over: enough steps were seen, its time was up, no step came any more, the loss is no number, memory ran out
# though its process stayed, its ranks ended by themselves, somebody ended the tuning.
STEPS, TIME, SILENCE, NOT_FINITE, NO_MEMORY, ENDED, INTERRUPTED = (
    "steps", "time", "silence", "not finite", "no memory", "ended", "interrupted",
)  # fmt: skip

OUT_OF_MEMORY = frozenset({"gpu-out-of-memory", "host-out-of-memory", "oom-kill"})
WAITED = frozenset({"collective-timeout", "dataloader-stuck"})
_NOT_A_NUMBER = regex(r"FloatingPointError\b|.{0,200}\bloss is (?:nan|inf)\b", re.IGNORECASE)
_REFUSAL_EXIT = 2  # a recipe's own


@dataclass(frozen=True)
class Ended:
    """What is known when a trial is over."""

    why: str  # one of the words above
    seconds: float
    exit_code: Optional[int] = None
    finding: Optional[Finding] = None  # why it failed, as the run's lead says
    others: Tuple[Finding, ...] = ()  # what else the ranks' logs hold
    refusal: str = ""  # what a recipe would not do
    outcome: str = ""  # the run's own word


def classify(ended: Ended, seen: Observed, must_report: bool, silence: float) -> Tuple[str, str]:
    """One of OUTCOMES, and why. `must_report`: the program is known to report its steps."""
    if ended.why == INTERRUPTED:
        return STOPPED, "the tuning was ended"
    if seen.not_finite:
        return NAN, seen.not_finite
    memory = out_of_memory(ended.finding, *ended.others)
    if memory:
        return OOM, _words(memory)
    if ended.why == STEPS:
        return OK, ""
    if ended.why == SILENCE:
        return HANG, f"no step for {silence:g} s after step {seen.steps}"
    if ended.why == TIME:
        if must_report and not seen.reporting:
            return HANG, f"no step within {ended.seconds:.0f} s; --seconds gives a slow start more time"
        return OK, "" if seen.reporting else f"alive for {ended.seconds:.0f} s; it reports no steps"
    if ended.exit_code == 0:
        return OK, "" if seen.reporting else "it ended by itself, and reported no steps"
    return _failed(ended)


def _failed(ended: Ended) -> Tuple[str, str]:
    if ended.refusal and ended.exit_code == _REFUSAL_EXIT:
        return REFUSED, ended.refusal
    finding = ended.finding or next(iter(ended.others), None)
    if finding is None:
        return FAILED, f"{ended.outcome or 'ended'} with exit code {ended.exit_code}"
    if _NOT_A_NUMBER.match(finding.title):
        return NAN, _words(finding)
    return HANG if finding.code in WAITED else FAILED, _words(finding)


def out_of_memory(*findings: Optional[Finding]) -> Optional[Finding]:
    return next((each for each in findings if each is not None and each.code in OUT_OF_MEMORY), None)


def _words(finding: Finding) -> str:
    return (f"rank {finding.rank}: " if finding.rank is not None else "") + finding.title
