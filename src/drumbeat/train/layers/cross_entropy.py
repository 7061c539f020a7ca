"""The loss of a language model without its largest tensor.

With a vocabulary of 128,256 the logits of 16,384 tokens are 4.2 GB in bf16 and twice that in fp32, several times over.
Here they are made a slice at a time: a slice's loss, its gradient and that gradient's two products are finished
before the next slice starts, in the forward pass, since the gradient of a sum of losses needs nothing from later.
"""

from __future__ import annotations

from typing import Any, List, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drumbeat.train.kernels import kernels_for
from drumbeat.train.layers import float8

IGNORE = -100
_SLICE_BYTES = 2 << 30  # of bf16 logits: large enough for full-speed products, small beside the activations


def linear_cross_entropy(hidden: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    """Return the sum of the cross-entropy of `head(hidden)` over all targets except IGNORE."""
    weight = head.weight
    if isinstance(weight, DTensor):  # tensor parallel: a rank holds a slice already
        return cross_entropy_sum(head(hidden), targets)
    if torch.is_autocast_enabled(hidden.device.type):  # autocast does not look inside our function
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    if not torch.is_grad_enabled():
        losses = [_loss_and_gradient(hidden[part] @ weight.t(), targets[part])[0] for part in _slices(hidden, weight)]
        return torch.stack(losses).sum()
    slices = [len(hidden[part]) for part in _slices(hidden, weight)]
    fits = all(size % 16 == 0 for size in (*slices, *weight.shape))  # what 8-bit products take
    if float8.is_marked(head) and fits:
        return _Float8CrossEntropy.apply(hidden, weight, targets)  # type: ignore[no-any-return]
    return _LinearCrossEntropy.apply(hidden, weight, targets)  # type: ignore[no-any-return]


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum")


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), device=hidden.device, dtype=torch.float32)
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.empty_like(weight)
        for part in _slices(hidden, weight):
            logits = hidden[part] @ weight.t()
            loss, d_logits = _loss_and_gradient(logits, targets[part])
            if part.start == 0:
                torch.mm(d_logits.t(), hidden[part], out=d_weight)
            else:
                d_weight.addmm_(d_logits.t(), hidden[part])
            total += loss
            torch.mm(d_logits, weight, out=d_hidden[part])
            del logits, d_logits  # before the next slice's logits are made
        ctx.save_for_backward(d_hidden, d_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tuple[Tensor, Tensor, None]:
        d_hidden, d_weight = ctx.saved_tensors
        if not hasattr(
            ctx, "scaled"
        ):  # zero-bubble pipelines come twice: for the input's gradient and for the weight's
            ctx.scaled = True
            for gradient in (d_hidden, d_weight):
                gradient.data.mul_(
                    grads[0]
                )  # in place; `.data`: unseen by autograd, which would refuse the second time
        return d_hidden, d_weight, None


class _Float8CrossEntropy(_LinearCrossEntropy):
    """The same with products in 8 bits; the logits themselves are written in 16.

    An error of rounding does harm only if it is the same in every row and batch: it is then a constant push. Two things make one.

    The gradient of a row of logits is its probabilities, less 1 at the target. There the two nearly cancel, or nearly do not, and
    two bits of fraction would round both to the same few values in every row. So the target's part is a row of the weight and
    a row of the input, times a number that stays in 16 bits; only the other probabilities go through the 8-bit products.

    In the mean over all rows a word is the target as often as it is predicted. The gradient of the input is then the same sum
    of words' rows twice, once exact with a minus, once rounded: what remains is the mean error of the rounded rows. That is large
    where all words' rows have a part in common, which is rounded alike in all of them. But a softmax, and its gradient, stay
    the same if every word's row loses the same vector. So the rows lose their mean, weighed by how often a word is the target,
    before they are rounded; their errors are then smaller and differ from word to word. What all inputs have in common likewise
    adds one number per word to the logits, which is computed in 16 bits.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), device=hidden.device, dtype=torch.float32)
        at_target = torch.empty(len(hidden), 1, device=hidden.device, dtype=torch.float32)
        d_hidden, d_weight = torch.empty_like(hidden), weight  # replaced by the first slice's share
        at, counts = targets.clamp(min=0), targets != IGNORE
        common_x = _mean(hidden, counts)
        words = weight - _mean(weight[at], counts)
        bias = words @ common_x
        w8, w8_turned, w_scale = float8.quantize(words, False)
        for part in _slices(hidden, weight):
            x8, _, scale = float8.quantize(hidden[part] - common_x, False)
            logits = float8.product(x8, w8, scale, w_scale, hidden.dtype, fast=False, bias=bias)
            losses, at_target[part], odds8, odds8_turned, scale = float8.odds(logits, targets[part], IGNORE)
            total += losses.sum()
            del logits, x8  # before more is made: each of these is a large part of the memory
            d_hidden[part] = float8.product(odds8, w8_turned, scale, w_scale, hidden.dtype, fast=False)
            del odds8
            _, x8_turned, x_scale = float8.quantize(hidden[part], False)
            share = float8.product(odds8_turned, x8_turned, scale, x_scale, weight.dtype, fast=False)
            del odds8_turned, x8_turned
            d_weight = share if part.start == 0 else d_weight.add_(share)
        at_target = at_target.to(hidden.dtype)
        d_hidden.addcmul_(words[at], at_target)
        d_weight.add_(torch.ops.aten.embedding_dense_backward(hidden * at_target, at, len(weight), -1, False))
        ctx.save_for_backward(d_hidden, d_weight)
        return total


def _mean(rows: Tensor, counts: Tensor) -> Tensor:
    """Return the mean of the rows that count; zeros if none does."""
    total = (rows * counts[:, None]).sum(0, dtype=torch.float32)
    return (total / counts.sum().clamp(min=1)).to(rows.dtype)


def _slices(hidden: Tensor, weight: Tensor) -> List[slice]:
    """Return slices of equal size: the rows whose logits are made together."""
    rows = max(1, _SLICE_BYTES // (2 * weight.shape[0]))
    if rows < hidden.shape[0]:
        rows = -(-hidden.shape[0] // -(-hidden.shape[0] // rows))
    return [slice(at, at + rows) for at in range(0, hidden.shape[0], rows)]


def _loss_and_gradient(logits: Tensor, targets: Tensor) -> Tuple[Tensor, Tensor]:
    """Return the sum of the losses and its gradient by the logits."""
    if kernels_for(logits):
        from drumbeat.train.kernels.transformer import cross_entropy

        return cross_entropy(logits, targets, IGNORE)
    valid = targets != IGNORE
    at = targets.clamp(min=0)[:, None]
    log_odds = logits.float().log_softmax(dim=-1)
    loss = -(log_odds.gather(1, at).squeeze(1) * valid).sum()
    d_logits = log_odds.exp_()
    d_logits.scatter_add_(1, at, torch.full_like(at, -1, dtype=d_logits.dtype))
    return loss, (d_logits * valid[:, None]).to(logits.dtype)
