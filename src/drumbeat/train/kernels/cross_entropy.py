"""Cross-entropy of one slice of logits, and its gradient written over them.

A row of 128,256 logits is 256 KB. One program reads it twice: for the sum of the exponentials, and for the gradient.
"""

from typing import Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _log_sum(start, width, place, block: tl.constexpr):
    top = tl.full((block,), -1e30, tl.float32)
    total = tl.zeros((block,), tl.float32)
    for at in range(0, width, block):  # each lane keeps its own running maximum and sum
        x = tl.load(start + at + place, mask=at + place < width, other=-1e30).to(tl.float32)
        new_top = tl.maximum(top, x)
        total = total * tl.exp(top - new_top) + tl.exp(x - new_top)
        top = new_top
    peak = tl.max(top, 0)
    return peak + tl.log(tl.sum(total * tl.exp(top - peak), 0))


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy(logits, targets, losses, width, ignore: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * width
    target = tl.load(targets + row)
    valid = target != ignore
    place = tl.arange(0, block)
    log_sum = _log_sum(start, width, place, block)
    chosen = tl.load(start + tl.where(valid, target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(valid, log_sum - chosen, 0.0))
    weight = tl.where(valid, 1.0, 0.0)
    tl.debug_barrier()  # the chosen logit is read before it is overwritten
    for at in range(0, width, block):
        inside = at + place < width
        x = tl.load(start + at + place, mask=inside, other=-1e30).to(tl.float32)
        d = (tl.exp(x - log_sum) - tl.where(at + place == target, 1.0, 0.0)) * weight
        tl.store(start + at + place, d.to(logits.dtype.element_ty), mask=inside)


def cross_entropy(logits: Tensor, targets: Tensor, ignore: int) -> Tuple[Tensor, Tensor]:
    """Return the sum of the losses, and the gradient of the logits, which overwrites them."""
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _cross_entropy[(rows,)](logits, targets, losses, width, ignore, 4096, num_warps=16)
    return losses.sum(), logits
