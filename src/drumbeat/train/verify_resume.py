"""Does a resumed run equal an uninterrupted one? N steps at once against k steps, a checkpoint, and N - k more."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from typing import Any, List

import torch.distributed as dist

from drumbeat.train.settings import Settings


def verify_resume(recipe: Any, settings: Settings) -> bool:
    """Runs in the ranks that are there, prints the verdict, and leaves no checkpoint behind. Bitwise: no tolerance."""
    lead = not dist.is_initialized() or dist.get_rank() == 0
    folder = _agreed_folder(settings.checkpoint)
    plain = replace(settings, checkpoint="", report_every=1)
    whole: List[float] = recipe.run(plain).losses
    half = max(1, len(whole) // 2)  # a recipe may count epochs: what it did is the number of its steps
    try:
        saving = replace(plain, checkpoint=folder, save_every=half, report_every=1)
        first: List[float] = recipe.run(replace(saving, steps=settings.steps, stop_after=half)).losses
        second: List[float] = recipe.run(saving).losses
    finally:
        if dist.is_initialized():
            dist.barrier()
        if lead:
            shutil.rmtree(folder, ignore_errors=True)
    pieces = first + second
    different = [i + 1 for i, (a, b) in enumerate(zip(whole, pieces)) if a != b]
    same = not different and len(whole) == len(pieces)
    if lead:
        if same:
            print(f"resume is exact: {len(whole)} losses, interrupted after step {half}, bitwise equal")
        else:
            at = different[0] if different else min(len(whole), len(pieces)) + 1
            print(f"resume is NOT exact: step {at} is the first that differs (interrupted after step {half})")
    return same


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
