"""What to do after an attempt: one pure function, called by the lead alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Sequence

from drumbeat.finding import Finding

FINISHED, FAILED, STOPPED, TIME_LIMIT, REQUEUE = "finished", "failed", "stopped", "time-limit", "requeue"

_FREE_RETRIES = 3
_SAME_AGAIN = ("transport-mismatch", "wrong-interface", "rdma-not-used")  # what the gate stops for


@dataclass(frozen=True)
class Outcome:
    """How one attempt ended."""

    outcome: str
    exit_code: int
    finding: Optional[Finding] = None
    lost_nodes: int = 0


@dataclass(frozen=True)
class Decision:
    action: str  # stop, restart
    why: str


def decide(history: Sequence[Outcome], restarts: int) -> Decision:
    """`history` holds every attempt so far, the last one last."""
    last = history[-1]
    if last.outcome != FAILED:
        return Decision("stop", f"the attempt ended: {last.outcome}")
    if last.lost_nodes:
        return Decision("stop", "a node is lost, and this job cannot run with fewer")
    if _is_free(last):
        if sum(map(_is_free, history)) <= _FREE_RETRIES:
            return Decision("restart", "the rendezvous port was taken meanwhile; another one costs no restart")
        return Decision("stop", f"{_FREE_RETRIES} other rendezvous ports were taken too")
    if last.finding and last.finding.code in _SAME_AGAIN:
        return Decision("stop", f"{last.finding.code}: another start would run the same way")
    if last.exit_code in (126, 127):
        return Decision("stop", "the command cannot be started; starting it again would not help")
    spent = sum(1 for outcome in history if not _is_free(outcome))
    if spent <= restarts:
        return Decision("restart", f"restart {spent} of {restarts}")
    return Decision("stop", f"all {restarts} restarts are spent" if restarts else "the job asks for no restart")


def _is_free(outcome: Outcome) -> bool:
    return outcome.outcome == FAILED and outcome.finding is not None and outcome.finding.code == "port-in-use"
