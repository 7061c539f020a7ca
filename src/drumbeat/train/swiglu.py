"""silu(gate) * up for a matrix whose columns are (gate, up) by parts, as one operation: see kernels/swiglu.py."""

from __future__ import annotations

from typing import Any, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(pairs: Tensor, part: int) -> Tensor:
    """(..., groups x (gate, up) x part) -> (..., groups x part)"""
    if pairs.is_cuda and part % 128 == 0:
        return _swiglu(pairs.contiguous(), part)
    gate, up = pairs.unflatten(-1, (-1, 2, part)).unbind(-2)
    return (F.silu(gate) * up).flatten(-2)


@torch.library.custom_op("drumbeat::swiglu", mutates_args=())
def _swiglu(pairs: Tensor, part: int) -> Tensor:
    from drumbeat.train.kernels import swiglu as kernel

    return kernel.forward(pairs, part)


@torch.library.custom_op("drumbeat::swiglu_backward", mutates_args=())
def _swiglu_backward(pairs: Tensor, d_out: Tensor, part: int) -> Tensor:
    from drumbeat.train.kernels import swiglu as kernel

    return kernel.backward(pairs, d_out, part)


@_swiglu.register_fake
def _(pairs: Tensor, part: int) -> Tensor:
    return pairs.new_empty((*pairs.shape[:-1], pairs.shape[-1] // 2))


@_swiglu_backward.register_fake
def _(pairs: Tensor, d_out: Tensor, part: int) -> Tensor:
    return torch.empty_like(pairs)


def _keep(ctx: Any, inputs: Tuple[Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.part = inputs[1]


def _gradient(ctx: Any, d_out: Tensor) -> Tuple[Tensor, None]:
    return _swiglu_backward(ctx.saved_tensors[0], d_out, ctx.part), None


_swiglu.register_autograd(_gradient, setup_context=_keep)
