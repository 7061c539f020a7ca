"""max_pool(relu(batch_norm(x))), the end of a ResNet's stem, as one operation: see kernels/norm_pool.py."""

from __future__ import annotations

from typing import Any, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def norm_relu_pool(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """3 x 3 windows, stride 2, padding 1. On a GPU and in training mode fused; otherwise plain torch."""
    channels = x.shape[1]
    fused = x.is_cuda and norm.training and norm.affine and norm.momentum is not None and not channels & (channels - 1)
    if not fused or channels > 256:
        return F.max_pool2d(F.relu(norm(x)), 3, stride=2, padding=1)
    assert norm.momentum is not None
    pooled, _, mean, variance = pool_forward(x, norm.weight, norm.bias, norm.eps)
    if norm.track_running_stats:
        assert norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None
        count = x.numel() // channels
        norm.num_batches_tracked.add_(1)
        norm.running_mean.lerp_(mean.detach(), norm.momentum)
        norm.running_var.lerp_(variance.detach() * (count / (count - 1)), norm.momentum)
    return pooled


@torch.library.custom_op("drumbeat::norm_relu_pool", mutates_args=())
def pool_forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """The pooled image, the tap that each value came from, and the channels' mean and variance."""
    from drumbeat.train.kernels import norm_pool as kernel

    x = x.contiguous(memory_format=torch.channels_last)
    mean, variance = kernel.statistics(x)
    gain, offset = _line(weight, bias, mean, torch.rsqrt(variance + eps))
    pooled, chosen = kernel.forward(x, gain, offset)
    return pooled, chosen, mean, variance


@torch.library.custom_op("drumbeat::norm_relu_pool_backward", mutates_args=())
def pool_backward(
    d_pooled: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    chosen: Tensor,
    mean: Tensor,
    variance: Tensor,
    eps: float,
) -> Tuple[Tensor, Tensor, Tensor]:
    from drumbeat.train.kernels import norm_pool as kernel

    x = x.contiguous(memory_format=torch.channels_last)
    rstd = torch.rsqrt(variance + eps)
    gain, offset = _line(weight, bias, mean, rstd)
    d_pooled = d_pooled.contiguous(memory_format=torch.channels_last)
    return kernel.backward(x, gain, offset, mean, rstd, d_pooled, chosen)


def _line(weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor) -> Tuple[Tensor, Tensor]:
    """Normalising as x * gain + offset."""
    gain = weight.float() * rstd
    return gain, bias.float() - mean * gain


@pool_forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    images, channels, height, width = x.shape
    shape = (images, channels, (height - 1) // 2 + 1, (width - 1) // 2 + 1)
    pooled = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    chosen = torch.empty(shape, dtype=torch.uint8, device=x.device, memory_format=torch.channels_last)
    mean = torch.empty(channels, dtype=torch.float32, device=x.device)
    return pooled, chosen, mean, torch.empty_like(mean)


@pool_backward.register_fake
def _(
    d_pooled: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    chosen: Tensor,
    mean: Tensor,
    variance: Tensor,
    eps: float,
) -> Tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.channels_last), torch.empty_like(mean), torch.empty_like(mean)


def _keep(ctx: Any, inputs: Tuple[Tensor, Tensor, Tensor, float], output: Tuple[Tensor, ...]) -> None:
    x, weight, bias, ctx.eps = inputs
    ctx.save_for_backward(x, weight, bias, *output[1:])


def _gradient(ctx: Any, d_pooled: Tensor, *_: Any) -> Tuple[Tensor, Tensor, Tensor, None]:
    x, weight, bias, chosen, mean, variance = ctx.saved_tensors
    d_x, d_weight, d_bias = pool_backward(d_pooled, x, weight, bias, chosen, mean, variance, ctx.eps)
    return d_x, d_weight.to(weight.dtype), d_bias.to(bias.dtype), None


pool_forward.register_autograd(_gradient, setup_context=_keep)
