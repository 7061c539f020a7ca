"""silu(gate) * up for a matrix whose columns are (gate, up) by parts, as one operation: see kernels/swiglu.py."""

from __future__ import annotations

from typing import Any, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GatedFeed(nn.Module):
    """The feed-forward part of a block: width -> (gate, up) -> width. `groups`: how often gate and up take turns."""

    def __init__(self, width: int, inner: int, groups: int) -> None:
        super().__init__()
        self.part = inner // groups
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x), self.part))  # type: ignore[no-any-return]


def swiglu(pairs: Tensor, part: int) -> Tensor:
    """(..., groups x (gate, up) x part) -> (..., groups x part)"""
    if pairs.is_cuda and part % 128 == 0:
        return gate_forward(pairs.contiguous(), part, False)[0]
    gate, up = _apart(pairs, part)
    return (F.silu(gate) * up).flatten(-2)


@torch.library.custom_op("drumbeat::gate_forward", mutates_args=())
def gate_forward(pairs: Tensor, part: int, with_peak: bool) -> Tuple[Tensor, Tensor]:
    """The product and, for who wants it, its largest value: 8-bit products scale by that."""
    if pairs.is_cuda:
        from drumbeat.train.kernels import swiglu as kernel

        out, peaks = kernel.forward(pairs, part)
        return out, peaks.amax() if with_peak else _nothing(pairs)
    gate, up = _apart(pairs.float(), part)
    out = (F.silu(gate) * up).flatten(-2)
    return out.to(pairs.dtype), out.abs().amax()


@torch.library.custom_op("drumbeat::gate_backward", mutates_args=())
def gate_backward(pairs: Tensor, d_out: Tensor, part: int, with_peak: bool) -> Tuple[Tensor, Tensor]:
    """The gradient by gates and ups and, for who wants it, its largest value."""
    if pairs.is_cuda:
        from drumbeat.train.kernels import swiglu as kernel

        d_pairs, peaks = kernel.backward(pairs, d_out, part)
        return d_pairs, peaks.amax() if with_peak else _nothing(pairs)
    gate, up = _apart(pairs.float(), part)
    slope, bend = d_out.float().unflatten(-1, (-1, part)), torch.sigmoid(gate)
    d_pairs = torch.stack((slope * up * bend * (1 + gate * (1 - bend)), slope * gate * bend), dim=-2).flatten(-3)
    return d_pairs.to(pairs.dtype), d_pairs.abs().amax()


def _apart(pairs: Tensor, part: int) -> Tuple[Tensor, Tensor]:
    gate, up = pairs.unflatten(-1, (-1, 2, part)).unbind(-2)
    return gate, up


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty((), dtype=torch.float32)


@gate_forward.register_fake
def _(pairs: Tensor, part: int, with_peak: bool) -> Tuple[Tensor, Tensor]:
    return pairs.new_empty((*pairs.shape[:-1], pairs.shape[-1] // 2)), _nothing(pairs)


@gate_backward.register_fake
def _(pairs: Tensor, d_out: Tensor, part: int, with_peak: bool) -> Tuple[Tensor, Tensor]:
    return torch.empty_like(pairs), _nothing(pairs)


def _keep(ctx: Any, inputs: Tuple[Tensor, int, bool], output: Tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.part = inputs[1]


def _gradient(ctx: Any, d_out: Tensor, d_peak: Tensor) -> Tuple[Tensor, None, None]:
    return gate_backward(ctx.saved_tensors[0], d_out, ctx.part, False)[0], None, None


gate_forward.register_autograd(_gradient, setup_context=_keep)
