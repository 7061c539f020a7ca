"""Batch normalisation for images stored channels last on a GPU: fewer and faster passes over them than torch.compile's.

`BatchNorm2d` takes its mean and variance from one kernel that reads at full speed (kernels/statistics.py); normalising, ReLU
and the sum with a shortcut stay torch.compile's, in one pass. `norm_relu_pool` is the end of a ResNet's stem as one
operation (kernels/norm_pool.py). On a CPU, and when not training, both are plain torch.
"""

from __future__ import annotations

from typing import Any, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BatchNorm2d(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        if not _fast(self, x):
            return super().forward(x)
        mean, variance = statistics(x)
        _remember(self, mean, variance, x)
        gain = self.weight.float() * torch.rsqrt(variance + self.eps)
        centred = x.float() - mean[None, :, None, None]
        return (centred * gain[None, :, None, None] + self.bias.float()[None, :, None, None]).to(x.dtype)


def norm_relu_pool(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """max_pool(relu(norm(x))): 3 x 3 windows, stride 2, padding 1."""
    if not _fast(norm, x) or x.shape[1] not in (64, 128, 256):
        return F.max_pool2d(F.relu(norm(x)), 3, stride=2, padding=1)
    pooled, _, mean, variance = pool_forward(x, norm.weight, norm.bias, norm.eps)
    _remember(norm, mean, variance, x)
    return pooled


def _fast(norm: nn.BatchNorm2d, x: Tensor) -> bool:
    plain = norm.affine and norm.track_running_stats and norm.momentum is not None
    return x.is_cuda and norm.training and plain and x.shape[1] % 64 == 0


def _remember(norm: nn.BatchNorm2d, mean: Tensor, variance: Tensor, x: Tensor) -> None:
    assert norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None
    assert norm.momentum is not None
    count = x.numel() // x.shape[1]
    norm.num_batches_tracked.add_(1)
    norm.running_mean.lerp_(mean.detach(), norm.momentum)
    norm.running_var.lerp_(variance.detach() * (count / (count - 1)), norm.momentum)


@torch.library.custom_op("drumbeat::channel_statistics", mutates_args=())
def statistics(x: Tensor) -> Tuple[Tensor, Tensor]:
    """Mean and variance (over the count, not one less) of each channel."""
    if x.is_cuda:
        from drumbeat.train.kernels.statistics import mean_and_variance

        return mean_and_variance(x.contiguous(memory_format=torch.channels_last))
    variance, mean = torch.var_mean(x.float(), dim=(0, 2, 3), correction=0)
    return mean, variance


@statistics.register_fake
def _(x: Tensor) -> Tuple[Tensor, Tensor]:
    mean = torch.empty(x.shape[1], dtype=torch.float32, device=x.device)
    return mean, torch.empty_like(mean)


def _keep_statistics(ctx: Any, inputs: Tuple[Tensor], output: Tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[0])


def _statistics_gradient(ctx: Any, d_mean: Tensor, d_variance: Tensor) -> Tensor:
    x, mean = ctx.saved_tensors
    count = x.numel() // x.shape[1]
    centred = x.float() - mean[None, :, None, None]
    grad = (d_mean / count)[None, :, None, None] + centred * (d_variance * (2 / count))[None, :, None, None]
    return grad.to(x.dtype)


statistics.register_autograd(_statistics_gradient, setup_context=_keep_statistics)


@torch.library.custom_op("drumbeat::norm_relu_pool", mutates_args=())
def pool_forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """The pooled image, the tap that each value came from, and the channels' mean and variance."""
    from drumbeat.train.kernels import norm_pool as kernel
    from drumbeat.train.kernels.statistics import mean_and_variance

    x = x.contiguous(memory_format=torch.channels_last)
    mean, variance = mean_and_variance(x)
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


def _keep_pool(ctx: Any, inputs: Tuple[Tensor, Tensor, Tensor, float], output: Tuple[Tensor, ...]) -> None:
    x, weight, bias, ctx.eps = inputs
    ctx.save_for_backward(x, weight, bias, *output[1:])


def _pool_gradient(ctx: Any, d_pooled: Tensor, *_: Any) -> Tuple[Tensor, Tensor, Tensor, None]:
    x, weight, bias, chosen, mean, variance = ctx.saved_tensors
    d_x, d_weight, d_bias = pool_backward(d_pooled, x, weight, bias, chosen, mean, variance, ctx.eps)
    return d_x, d_weight.to(weight.dtype), d_bias.to(bias.dtype), None


pool_forward.register_autograd(_pool_gradient, setup_context=_keep_pool)
