"""The loss on sequences that were kept back, in any layout."""

from __future__ import annotations

from typing import Any, Dict, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from drumbeat.train.assemble import Assembly
from drumbeat.train.data.stream import Samples
from drumbeat.train.layers.cross_entropy import IGNORE
from drumbeat.train.parallel.stages import StagedPipeline
from drumbeat.train.step import Loss, full_tensor, loss_parallelism


@torch.no_grad()
def mean_loss(parts: Assembly, kept: Samples, count: int, loss: Loss, at_once: int) -> Dict[str, float]:
    """Over the first `count` kept sequences; each data-parallel rank takes its share of them, `at_once` at a time: as many
    as in training, so validation never needs more memory than a training step."""
    own = max(1, min(count, len(kept)) // parts.meshes.layout.data_ranks)
    device, step = parts.world.device, parts.step
    assert not isinstance(step.pipeline, StagedPipeline)
    if step.pipeline is not None:  # its micro-batches are equally long
        own = own - own % step.pipeline.micro_batches or step.pipeline.micro_batches
    first = parts.meshes.data_rank * own
    indices = [i % len(kept) for i in range(first, first + own)]
    tokens, targets = step.share(tuple(x.to(device) for x in kept.read(indices, [0] * own)))
    totals = torch.zeros(2, device=device)
    for part in parts.parts:
        part.eval()
    with parts.precision.autocast(device, step.cast_by_fsdp), loss_parallelism(parts.meshes):
        if step.pipeline is None:
            for x, y in zip(tokens.split(at_once), targets.split(at_once)):
                totals[0] += full_tensor(loss(parts.parts[0], x, y))
        else:
            totals[0] += sum(step.pipeline.evaluate(tokens, targets)[1], torch.zeros((), device=device))
    for part in parts.parts:
        part.train()
    totals[1] = (targets != IGNORE).sum()
    pipe = parts.meshes.one("pp")
    if pipe is not None:
        dist.all_reduce(totals[0], group=pipe.get_group())
    return {"loss": float(average(totals, parts.meshes.tokens))}


def average(values: Tensor, group: Optional[Any]) -> Tensor:
    """Sums over ranks of (total, count) pairs -> total / count."""
    if group is not None:
        dist.all_reduce(values, group=group.get_group())
    return values[..., 0] / values[..., 1].clamp(min=1)
