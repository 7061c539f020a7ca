"""silu(gate) * up for a matrix whose columns are (gate, up) by parts, as one operation: see kernels/swiglu.py."""

from __future__ import annotations

from typing import Any, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drumbeat.train.kernels import kernels_for


class GatedMLP(nn.Module):
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
    if kernels_for(pairs) and part % 128 == 0:
        return gate_forward(pairs.contiguous(), part)
    return gate_product(pairs, part)


def gate_product(pairs: Tensor, part: int) -> Tensor:
    """Compute the product in plain torch."""
    gate, up = _apart(pairs, part)
    return (F.silu(gate) * up).flatten(-2)


def gate_gradient(pairs: Tensor, d_out: Tensor, part: int) -> Tensor:
    """Compute the gradient by gates and ups in plain torch."""
    gate, up = _apart(pairs, part)
    grad, sigmoid = d_out.unflatten(-1, (-1, part)), torch.sigmoid(gate)
    d_gate, d_up = grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid
    return torch.stack((d_gate, d_up), dim=-2).flatten(-3)


@torch.library.custom_op("drumbeat::gate_forward", mutates_args=())
def gate_forward(pairs: Tensor, part: int) -> Tensor:
    if kernels_for(pairs):
        from drumbeat.train.kernels import swiglu as kernel

        return kernel.forward(pairs, part)
    return gate_product(pairs.float(), part).to(pairs.dtype)


@torch.library.custom_op("drumbeat::gate_backward", mutates_args=())
def gate_backward(pairs: Tensor, d_out: Tensor, part: int) -> Tensor:
    if kernels_for(pairs):
        from drumbeat.train.kernels import swiglu as kernel

        return kernel.backward(pairs, d_out, part)
    return gate_gradient(pairs.float(), d_out.float(), part).to(pairs.dtype)


def _apart(pairs: Tensor, part: int) -> Tuple[Tensor, Tensor]:
    gate, up = pairs.unflatten(-1, (-1, 2, part)).unbind(-2)
    return gate, up


@gate_forward.register_fake
def _(pairs: Tensor, part: int) -> Tensor:
    return pairs.new_empty((*pairs.shape[:-1], pairs.shape[-1] // 2))


@gate_backward.register_fake
def _(pairs: Tensor, d_out: Tensor, part: int) -> Tensor:
    return torch.empty_like(pairs)


def _keep(ctx: Any, inputs: Tuple[Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.part = inputs[1]


def _gradient(ctx: Any, d_out: Tensor) -> Tuple[Tensor, None]:
    return gate_backward(ctx.saved_tensors[0], d_out, ctx.part), None


gate_forward.register_autograd(_gradient, setup_context=_keep)
