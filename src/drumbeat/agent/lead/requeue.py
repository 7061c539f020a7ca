"""After a run has ended: is its job queued again, and does that count? One pure function, called by the lead alone."""

from __future__ import annotations

from drumbeat.base.light_dataclass import dataclass
from drumbeat.runfolder.verdict import END, REQUEUE


@dataclass(frozen=True)
class Next:
    step: str  # END or REQUEUE
    why: str
    counts: bool = False  # against `requeues` of the job


def after_end(
    saved: bool, wanted: str, asked_to_stop: bool, cancelled: bool, requeues_so_far: int, allowed: int
) -> Next:
    """`saved`: the ranks ended with 75, which asks for another start. `wanted`: why the lead wants one (a node was lost, say);
    empty: it does not.

    A rank that ends with 75 because it was told to stop (the notice before a time limit, a preemption) may come back as
    often as that happens: each start had its time. Everything else is bounded by `allowed`.
    """
    if cancelled:
        return Next(END, "it was cancelled")
    if saved and asked_to_stop:
        return Next(REQUEUE, "its ranks ask to be started again (exit code 75)")
    if asked_to_stop or not (saved or wanted):
        return Next(END, "it has ended")
    why = wanted or "its ranks ask to be started again"
    if requeues_so_far >= allowed:
        return Next(END, f"{why}, but the job was queued again {requeues_so_far} times already (requeues: {allowed})")
    return Next(REQUEUE, f"{why}: requeue {requeues_so_far + 1} of {allowed}", counts=True)
