"""Cross-entropy of one slice of logits, and its gradient written over them.

A row of 128,256 logits is 256 KB. One program reads it twice: for the sum of the exponentials, and for the gradient. With an
8-bit copy of the gradient, transposed for the product that makes the gradient of the weights, the second reading goes
over tiles.
"""

from typing import Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from drumbeat.train.kernels.cast import keep_bits


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


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy_sums(logits, targets, losses, log_sums, width, ignore: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * width
    target = tl.load(targets + row)
    valid = target != ignore
    log_sum = _log_sum(start, width, tl.arange(0, block), block)
    chosen = tl.load(start + tl.where(valid, target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(valid, log_sum - chosen, 0.0))
    tl.store(log_sums + row, tl.where(valid, log_sum, float("inf")))  # exp(x - inf) is 0: no gradient


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy_both(
    logits, targets, log_sums, turned, rows, width, top: tl.constexpr, row_tile: tl.constexpr, column_tile: tl.constexpr
):
    row = tl.program_id(0) * row_tile + tl.arange(0, row_tile)
    column = tl.program_id(1) * column_tile + tl.arange(0, column_tile)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = logits + row.to(tl.int64)[:, None] * width + column[None, :]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    log_sum = tl.load(log_sums + row, mask=row < rows, other=float("inf"))
    target = tl.load(targets + row, mask=row < rows, other=-1)  # one that does not count is negative: no column's
    d = tl.exp(x - log_sum[:, None]) - tl.where(column[None, :] == target[:, None], 1.0, 0.0)
    tl.store(at, d.to(logits.dtype.element_ty), mask=inside)
    small = keep_bits((d * top).to(turned.dtype.element_ty))
    tl.store(turned + column.to(tl.int64)[:, None] * rows + row[None, :], tl.trans(small), mask=tl.trans(inside))


def cross_entropy(logits: Tensor, targets: Tensor, ignore: int) -> Tuple[Tensor, Tensor]:
    """Sum of the losses; gradient by the logits, in their place."""
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _cross_entropy[(rows,)](logits, targets, losses, width, ignore, 4096, num_warps=16)
    return losses.sum(), logits


def cross_entropy_both(
    logits: Tensor, targets: Tensor, ignore: int, dtype: torch.dtype
) -> Tuple[Tensor, Tensor, Tensor, float]:
    """The same, and the gradient transposed in 8 bits with the factor that turns it back. It lies between -1 and 1, so
    nobody has to look for its largest value."""
    rows, width = logits.shape
    losses, log_sums = torch.empty((2, rows), dtype=torch.float32, device=logits.device).unbind()
    turned = torch.empty((width, rows), dtype=dtype, device=logits.device)
    _cross_entropy_sums[(rows,)](logits, targets, losses, log_sums, width, ignore, 4096, num_warps=16)
    top, tile = torch.finfo(dtype).max, (32, 128)
    grid = (triton.cdiv(rows, tile[0]), triton.cdiv(width, tile[1]))
    _cross_entropy_both[grid](logits, targets, log_sums, turned, rows, width, top, *tile, num_warps=4)
    return losses.sum(), logits, turned, 1 / top
