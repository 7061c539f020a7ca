"""Ranks whose data end at different times, or who cut a step into more micro-batches than others. Each forward pass of a
sharded model is a conversation of all ranks, so a rank that has nothing left must still take part: it repeats its last
inputs with no targets, which adds nothing to the loss, to the gradients or to what the loss is divided by.

    for batches in together(my_steps):  # instead of: for batches in my_steps
        step(batches)

The recipes do not need it: their Stream gives every rank equally much.
"""

from __future__ import annotations

from typing import Iterable, Iterator, List, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from drumbeat.train.layers.cross_entropy import IGNORE
from drumbeat.train.refusal import Refusal

Batch = Tuple[Tensor, Tensor]


def together(steps: Iterable[List[Batch]]) -> Iterator[List[Batch]]:
    """The lists of micro-batches of `steps`, until the last rank's end, equally long on all ranks."""
    source = iter(steps)
    empty: List[Batch] = []
    while True:
        own = next(source, [])
        if own:
            inputs, targets = own[-1]
            empty = [(inputs, torch.full_like(targets, IGNORE))]
        most, has_none = _largest(len(own), int(not empty))
        if most == 0:
            return
        if has_none:  # every rank sees this, so every rank stops
            raise Refusal("a rank has no data at all", "give every rank at least one micro-batch in the first step")
        yield own + empty * (most - len(own))


def _largest(*numbers: int) -> List[int]:
    """Over all ranks."""
    agreed = torch.tensor(numbers)  # on the CPU: the device is not waited for
    if dist.is_initialized():
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return agreed.tolist()
