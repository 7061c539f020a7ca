"""max_pool(relu(batch_norm(x))), the end of a ResNet's stem, as one operation: see kernels/norm_pool.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drumbeat.train.layers.batch_norm import fusable

_LARGEST = 256  # channels that one program holds


def norm_relu_pool(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """3 x 3 windows, stride 2, padding 1. Fused where batch norm is; otherwise plain torch."""
    if not fusable(norm, x) or x.shape[1] > _LARGEST:
        return F.max_pool2d(F.relu(norm(x)), 3, stride=2, padding=1)
    return _NormReluPool.apply(x, norm.weight, norm.bias, norm)  # type: ignore[no-any-return,no-untyped-call]


class _NormReluPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: nn.BatchNorm2d) -> Tensor:
        from drumbeat.train.kernels import batch_norm, norm_pool

        x = x.contiguous(memory_format=torch.channels_last)
        line = batch_norm.line_of(x, norm)
        pooled, chosen = norm_pool.forward(x, line[2], line[3])
        ctx.save_for_backward(x, line, chosen)
        return pooled

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        from drumbeat.train.kernels import norm_pool

        x, line, chosen = ctx.saved_tensors
        d_pooled = grads[0].contiguous(memory_format=torch.channels_last)
        mean, rstd, gain, offset = line.unbind()
        return (*norm_pool.backward(x, gain, offset, mean, rstd, d_pooled, chosen), None)
