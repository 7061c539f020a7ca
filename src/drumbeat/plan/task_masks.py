"""Masks that somebody else chose: the job's own cpu-bind, or those of scheduler tasks. Which stay, which are set anew."""

from __future__ import annotations

from dataclasses import replace
from typing import List, Mapping, Sequence, Tuple

from drumbeat.base.order import Order
from drumbeat.findings.model import Evidence, Finding
from drumbeat.machine.model import Facts
from drumbeat.plan.binding import Binding, right_binding
from drumbeat.plan.masks import mask, ranges
from drumbeat.plan.placement import WRONG, RankSeen, rows


def task_binding(right: Binding, masks: Mapping[int, Sequence[int]], facts: Facts, by_user: bool) -> Binding:
    """`right`: the binding within all cores of the tasks. `masks`: local rank -> the cores its task was given.

    Masks that somebody wrote are the user's: they stay, and where they are wrong the right ones are said. A scheduler's
    default knows nothing of GPUs: where it is wrong, the ranks are bound again, inside the cores of the step.
    """
    sets = [set(cpus) for cpus in masks.values()]
    if len(sets) < 2 or not all(sets) or set(masks) != {slot.local_rank for slot in right.slots}:
        return right
    apart = sum(map(len, sets)) == len(set().union(*sets))
    wrong = [] if not apart else _wrong(right, masks, facts)
    if not by_user and (not apart or wrong):
        return replace(right, findings=(*right.findings, *_rebound(wrong, right, facts)))
    if not apart:
        words = "tasks overlap as the user's --cpu-bind set them"
        slots = tuple(replace(slot, cpus=tuple(masks[slot.local_rank]), why=words) for slot in right.slots)
        return replace(right, slots=slots, bound_by="the cpu-bind of the srun that started the tasks put them there")
    who = "the cpu-bind of the srun that started the tasks" if by_user else "the scheduler's default"
    why = "as the scheduler bound this task"
    slots = tuple(replace(slot, cpus=tuple(masks[slot.local_rank]), why=why) for slot in right.slots)
    fewest = min(len(slot.cpus) for slot in slots)
    words = f"the cores each task is bound to: {fewest}"
    findings = (*right.findings, *_kept("tasks-away-from-gpu", "tasks", wrong, right, who, facts))
    return replace(
        right, slots=slots, threads=fewest, threads_why=words, findings=findings, bound_by=f"{who} put them there"
    )


def question_cpu_bind(order: Order, facts: Facts, bound: Binding, node: int) -> List[Finding]:
    """Are the masks that the job names beside the GPUs of its ranks?"""
    if not order.cpu_bind or order.cpu_bind == ("none",) or order.emulated:
        return []
    right = right_binding(order, facts, node)
    masks = {slot.local_rank: slot.cpus for slot in bound.slots if slot.cpus}
    if set(masks) != {slot.local_rank for slot in right.slots}:
        return []
    wrong = _wrong(right, masks, facts)
    return _kept("cpu-bind-away-from-gpu", "ranks", wrong, right, "the job's own cpu-bind", facts)


def _wrong(right: Binding, masks: Mapping[int, Sequence[int]], facts: Facts) -> List[Tuple[int, str]]:
    """Local ranks whose task is away from the GPU that they will be given, and what shows it."""
    found = []
    seen = [RankSeen(slot.local_rank, 0, tuple(masks[slot.local_rank]), slot.gpus) for slot in right.slots]
    for row in rows(facts, right, right, seen):
        if row.verdict == WRONG and row.gpus and row.right and row.rank is not None:
            found.append((row.rank, f"local rank {row.rank}: GPU {ranges(row.gpus)}, cores {ranges(row.cpus or ())}, "
                          f"right are {ranges(row.right)}"))  # fmt: skip
    return found


def _rebound(wrong: Sequence[Tuple[int, str]], right: Binding, facts: Facts) -> List[Finding]:
    if not wrong:
        return []
    return [
        Finding(
            "tasks-bound-again",
            "info",
            f"the scheduler's default put {len(wrong)} of {len(right.slots)} tasks away from their GPU: bound again",
            "the default fills cores in order and knows nothing of GPUs",
            evidence=tuple(Evidence(text) for _, text in wrong[:8]),
            host=facts.host,
        )
    ]


def _kept(
    code: str, kind: str, wrong: Sequence[Tuple[int, str]], right: Binding, who: str, facts: Facts
) -> List[Finding]:
    if not wrong:
        return []
    return [
        Finding(
            code,
            "warning",
            f"{len(wrong)} of {len(right.slots)} {kind} are bound away from their GPU",
            f"{who} put them there, and it is kept",
            f"--cpu-bind=mask_cpu:{','.join(mask(slot.cpus) for slot in right.slots)}",
            tuple(Evidence(text) for _, text in wrong[:8]),
            host=facts.host,
        )
    ]
