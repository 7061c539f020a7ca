"""Compare a resumed run with an uninterrupted one: N steps at once against k steps, a checkpoint, and N - k more.

Compared are bits, without a tolerance: the state that was saved against the state that was restored, then the losses and
the last state of both runs. All runs are deterministic, so that a difference means a mistake.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from dataclasses import replace
from typing import Any, List

import torch.distributed as dist

from drumbeat.train.loop import Result
from drumbeat.train.parallel.meshes import gathered
from drumbeat.train.settings import Settings


def verify_resume(recipe: Any, settings: Settings) -> bool:
    """Run in the ranks of this job, print the verdict, and leave no checkpoint behind."""
    folder = _agreed_folder(settings.checkpoint)
    plain = replace(settings, checkpoint="", report_every=1, deterministic=True)
    whole = _run(recipe, plain)
    half = max(1, len(whole.losses) // 2)  # a recipe may count epochs: what it did is the number of its steps
    try:
        saving = replace(plain, checkpoint=folder, save_every=half)
        first = _run(recipe, replace(saving, stop_after=half))
        second = _run(recipe, saving)
    finally:
        if dist.is_initialized():
            dist.barrier()
        if _lead():
            shutil.rmtree(folder, ignore_errors=True)
    mistakes = _mistakes(whole, first, second, half)
    if _lead():
        print(_verdict(mistakes, first, half, whole.step), flush=True)
    return not mistakes


def _run(recipe: Any, settings: Settings) -> Result:
    result: Result = recipe.run(settings)
    gc.collect()  # a model of gigabytes goes before the next one is made
    return result


def _mistakes(whole: Result, first: Result, second: Result, half: int) -> List[str]:
    """List what differs, in the order in which it happened; the same list on every rank."""
    found = [f"{name} is not restored" for name in first.digests[-1].differs_from(second.digests[0])]
    pieces = first.losses + second.losses
    found += [f"the loss of step {i + 1} differs" for i, (a, b) in enumerate(zip(whole.losses, pieces)) if a != b]
    if len(whole.losses) != len(pieces):
        found.append(f"{len(pieces)} steps were made instead of {len(whole.losses)}")
    found += [f"{name} differs after step {whole.step}" for name in whole.digests[-1].differs_from(second.digests[-1])]
    every = gathered(found)
    return [text if len(every) == 1 else f"rank {rank}: {text}" for rank, texts in enumerate(every) for text in texts]


def _verdict(mistakes: List[str], first: Result, half: int, steps: int) -> str:
    if not mistakes:
        count = len(first.digests[-1].entries)
        return (
            f"resume is exact: {count} tensors and numbers of rank 0 restored bit by bit after step {half}, and after step "
            f"{steps} all losses and the whole state of all ranks equal those of an uninterrupted run"
        )
    more = f"\n  and {len(mistakes) - 5} more" if len(mistakes) > 5 else ""
    return f"resume is NOT exact (interrupted after step {half}):\n  " + "\n  ".join(mistakes[:5]) + more


def _lead() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _agreed_folder(parent: str) -> str:
    if parent:
        os.makedirs(parent, exist_ok=True)
    box = [tempfile.mkdtemp(prefix="verify-resume-", dir=parent or None)]
    if dist.is_initialized():
        own = box[0]
        dist.broadcast_object_list(box, src=0)
        if box[0] != own:
            shutil.rmtree(own)
    return box[0]
