"""Batch normalisation, ReLU and 3 x 3 max-pooling with stride 2 as one operation over images stored channels last.

The normalised image, four times the size of the pooled one, is never written: both directions compute it from the
convolution's output again. Going back, each input pixel collects from the at most four windows that it lies in.
"""

from typing import Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from drumbeat.train.kernels.statistics import PROGRAMS


@triton.jit  # type: ignore[untyped-decorator]
def _tap(image, oh, ow, channel, step: tl.constexpr, height, width, channels: tl.constexpr):
    """The input pixels under one tap of the windows of a row of outputs, and which of them lie inside the image."""
    ih = oh * 2 - 1 + step // 3 + 0 * ow  # as many as there are columns
    iw = ow * 2 - 1 + step % 3
    inside = (ih >= 0) & (ih < height) & (iw >= 0) & (iw < width)
    at = ((ih * width + iw) * channels)[:, None] + channel[None, :]
    return tl.load(image + at, mask=inside[:, None], other=0.0).to(tl.float32), inside[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def _norm_pool_forward(
    source, gain, offset, pooled, chosen, height, width, out_height, out_width,
    channels: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    channel, ow = tl.arange(0, channels), tl.program_id(1) * tile + tl.arange(0, tile)
    number, oh = tl.program_id(0) // out_height, tl.program_id(0) % out_height
    image = source + number.to(tl.int64) * height * width * channels
    a, b = tl.load(gain + channel)[None, :], tl.load(offset + channel)[None, :]
    best = tl.full((tile, channels), -1.0, tl.float32)
    index = tl.zeros((tile, channels), tl.int32)
    for step in tl.static_range(9):
        x, inside = _tap(image, oh, ow, channel, step, height, width, channels)
        value = x * a + b
        value = tl.where(value < 0, 0.0, value)  # a NaN stays one
        better = inside & ((value > best) | (value != value))
        best, index = tl.where(better, value, best), tl.where(better, step, index)
    start = tl.program_id(0).to(tl.int64) * out_width * channels
    at = (ow * channels)[:, None] + channel[None, :]
    exists = (ow < out_width)[:, None]
    tl.store(pooled + start + at, best.to(pooled.dtype.element_ty), mask=exists)
    tl.store(chosen + start + at, index.to(tl.uint8), mask=exists)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_pool_sums(
    source, gain, offset, mean, rstd, d_pooled, chosen, sums, rows, height, width, out_height, out_width,
    channels: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Sums of the gradient, and of the gradient times the normalised value, over all pixels."""
    channel = tl.arange(0, channels)
    a, b = tl.load(gain + channel)[None, :], tl.load(offset + channel)[None, :]
    m, r = tl.load(mean + channel)[None, :], tl.load(rstd + channel)[None, :]
    total, scaled = tl.zeros((tile, channels), tl.float32), tl.zeros((tile, channels), tl.float32)
    size = height * width * channels
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        image = source + (row // out_height) * tl.cast(size, tl.int64)
        start = row * tl.cast(out_width * channels, tl.int64)
        for first in range(0, out_width, tile):
            ow = first + tl.arange(0, tile)
            at = (ow * channels)[:, None] + channel[None, :]
            exists = (ow < out_width)[:, None]
            grad = tl.load(d_pooled + start + at, mask=exists, other=0.0).to(tl.float32)
            index = tl.load(chosen + start + at, mask=exists, other=255).to(tl.int32)
            x = tl.zeros((tile, channels), tl.float32)  # the pixel that each window chose
            for step in tl.static_range(9):
                under, _ = _tap(image, row % out_height, ow, channel, step, height, width, channels)
                x = tl.where(index == step, under, x)
            grad = tl.where(x * a + b > 0, grad, 0.0)
            total += grad
            scaled += grad * (x - m) * r
    at = tl.program_id(0) * 2 * channels + channel
    tl.store(sums + at, tl.sum(total, 0))
    tl.store(sums + at + channels, tl.sum(scaled, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _norm_pool_backward(
    source, gain, offset, mean, rstd, d_pooled, chosen, means, d_source, height, width, out_height, out_width,
    channels: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    channel, iw = tl.arange(0, channels), tl.program_id(1) * tile + tl.arange(0, tile)
    number, ih = tl.program_id(0) // height, tl.program_id(0) % height + 0 * iw
    pooled_start = number.to(tl.int64) * out_height * out_width * channels
    a, b = tl.load(gain + channel)[None, :], tl.load(offset + channel)[None, :]
    m, r = tl.load(mean + channel)[None, :], tl.load(rstd + channel)[None, :]
    grad = tl.zeros((tile, channels), tl.float32)
    for step in tl.static_range(4):
        oh, ow = (ih + 1) // 2 - step // 2, (iw + 1) // 2 - step % 2
        dy, dx = ih + 1 - 2 * oh, iw + 1 - 2 * ow  # the tap under which this pixel lies, if at most 2
        inside = (dy <= 2) & (oh >= 0) & (oh < out_height) & (dx <= 2) & (ow >= 0) & (ow < out_width)
        at = ((oh * out_width + ow) * channels)[:, None] + channel[None, :]
        index = tl.load(chosen + pooled_start + at, mask=inside[:, None], other=255).to(tl.int32)
        part = tl.load(d_pooled + pooled_start + at, mask=inside[:, None], other=0.0).to(tl.float32)
        grad += tl.where(index == (dy * 3 + dx)[:, None], part, 0.0)
    start = tl.program_id(0).to(tl.int64) * width * channels
    at = (iw * channels)[:, None] + channel[None, :]
    exists = (iw < width)[:, None]
    x = tl.load(source + start + at, mask=exists, other=0.0).to(tl.float32)
    grad = tl.where(x * a + b > 0, grad, 0.0)
    mean_grad, mean_scaled = tl.load(means + channel)[None, :], tl.load(means + channels + channel)[None, :]
    d_x = a * (grad - mean_grad - (x - m) * r * mean_scaled)
    tl.store(d_source + start + at, d_x.to(d_source.dtype.element_ty), mask=exists)


def _tile(width: int) -> int:
    return min(32, triton.next_power_of_2(width))


def forward(x: Tensor, gain: Tensor, offset: Tensor) -> Tuple[Tensor, Tensor]:
    """The pooled image, and under which tap (0 to 8) of its window each value lay."""
    images, channels, height, width = x.shape
    out_height, out_width = (height - 1) // 2 + 1, (width - 1) // 2 + 1
    shape = (images, channels, out_height, out_width)
    pooled = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    chosen = torch.empty(shape, dtype=torch.uint8, device=x.device, memory_format=torch.channels_last)
    tile = _tile(out_width)
    _norm_pool_forward[(images * out_height, triton.cdiv(out_width, tile))](
        x, gain, offset, pooled, chosen, height, width, out_height, out_width, channels, tile, num_warps=4
    )
    return pooled, chosen


def backward(
    x: Tensor, gain: Tensor, offset: Tensor, mean: Tensor, rstd: Tensor, d_pooled: Tensor, chosen: Tensor
) -> Tuple[Tensor, Tensor, Tensor]:
    """Gradients by the input, the norm's weight and its bias."""
    images, channels, height, width = x.shape
    out_height, out_width = d_pooled.shape[2:]
    rows, sizes = images * out_height, (height, width, out_height, out_width)
    programs = min(PROGRAMS, rows)
    sums = torch.empty((programs, 2, channels), dtype=torch.float32, device=x.device)
    _norm_pool_sums[(programs,)](
        x, gain, offset, mean, rstd, d_pooled, chosen, sums, rows, *sizes, channels, _tile(out_width), num_warps=4
    )
    summed = sums.sum(0)
    means = summed / (images * height * width)
    d_x = torch.empty_like(x)
    tile = _tile(width)
    _norm_pool_backward[(images * height, triton.cdiv(width, tile))](
        x, gain, offset, mean, rstd, d_pooled, chosen, means, d_x, *sizes, channels, tile, num_warps=4
    )
    return d_x, summed[1].clone(), summed[0].clone()
