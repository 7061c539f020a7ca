"""Batch normalisation, ReLU and 3 x 3 max-pooling with stride 2 as one operation over images stored channels last.

The normalised image, four times the size of the pooled one, is never written: both directions compute it from the
convolution's output again. Going back, each input pixel collects from the at most four windows that it lies in.
"""

from typing import Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 1056  # of a reduction: eight per multiprocessor of an H200


@triton.jit  # type: ignore[untyped-decorator]
def _tap(source, row, ow, step: tl.constexpr, height, width, out_height, channels: tl.constexpr):
    """Return the input pixels under one tap of the windows of a row of outputs, and which of them lie inside the image."""
    channel = tl.arange(0, channels)
    ih = (row % out_height) * 2 - 1 + step // 3 + 0 * ow  # as many as there are columns
    iw = ow * 2 - 1 + step % 3
    inside = (ih >= 0) & (ih < height) & (iw >= 0) & (iw < width)
    at = (((row // out_height) * height + ih) * width + iw)[:, None] * channels + channel[None, :]
    return tl.load(source + at, mask=inside[:, None], other=0.0).to(tl.float32), inside[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def _norm_pool_forward(
    source, gain, offset, pooled, chosen, height, width, out_height, out_width,
    channels: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    row, channel = tl.program_id(0), tl.arange(0, channels)
    ow = (tl.program_id(1) * tile + tl.arange(0, tile)).to(tl.int64)
    a, b = tl.load(gain + channel)[None, :], tl.load(offset + channel)[None, :]
    best = tl.full((tile, channels), -1.0, tl.float32)
    index = tl.zeros((tile, channels), tl.int32)
    for step in tl.static_range(9):
        x, inside = _tap(source, row, ow, step, height, width, out_height, channels)
        value = x * a + b
        value = tl.where(value < 0, 0.0, value)  # a NaN stays one
        better = inside & ((value > best) | (value != value))
        best, index = tl.where(better, value, best), tl.where(better, step, index)
    at = (row * out_width + ow)[:, None] * channels + channel[None, :]
    exists = (ow < out_width)[:, None]
    tl.store(pooled + at, best.to(pooled.dtype.element_ty), mask=exists)
    tl.store(chosen + at, index.to(tl.uint8), mask=exists)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_pool_sums(
    source, gain, offset, mean, rstd, d_pooled, chosen, sums, rows, programs, height, width, out_height, out_width,
    channels: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Sum the gradient, and the gradient times the normalised value, over all pixels."""
    channel = tl.arange(0, channels)
    a, b = tl.load(gain + channel)[None, :], tl.load(offset + channel)[None, :]
    m, r = tl.load(mean + channel)[None, :], tl.load(rstd + channel)[None, :]
    total, scaled = tl.zeros((channels,), tl.float32), tl.zeros((channels,), tl.float32)
    for row in range(tl.program_id(0), rows, programs):
        for start in range(0, out_width, tile):
            ow = (start + tl.arange(0, tile)).to(tl.int64)
            at = (row * out_width + ow)[:, None] * channels + channel[None, :]
            exists = (ow < out_width)[:, None]
            grad = tl.load(d_pooled + at, mask=exists, other=0.0).to(tl.float32)
            index = tl.load(chosen + at, mask=exists, other=255).to(tl.int32)
            x = tl.zeros((tile, channels), tl.float32)  # the pixel that each window chose
            for step in tl.static_range(9):
                under, _ = _tap(source, row, ow, step, height, width, out_height, channels)
                x = tl.where(index == step, under, x)
            grad = tl.where(x * a + b > 0, grad, 0.0)
            total += tl.sum(grad, 0)
            scaled += tl.sum(grad * (x - m) * r, 0)
    at = tl.program_id(0) * 2 * channels + channel
    tl.store(sums + at, total)
    tl.store(sums + at + channels, scaled)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_pool_backward(
    source, gain, offset, mean, rstd, d_pooled, chosen, means, d_source, height, width, out_height, out_width,
    channels: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    row, channel = tl.program_id(0), tl.arange(0, channels)
    iw = (tl.program_id(1) * tile + tl.arange(0, tile)).to(tl.int64)
    image, ih = row // height, row % height + 0 * iw
    a, b = tl.load(gain + channel)[None, :], tl.load(offset + channel)[None, :]
    m, r = tl.load(mean + channel)[None, :], tl.load(rstd + channel)[None, :]
    grad = tl.zeros((tile, channels), tl.float32)
    for step in tl.static_range(4):
        oh, ow = (ih + 1) // 2 - step // 2, (iw + 1) // 2 - step % 2
        dy, dx = ih + 1 - 2 * oh, iw + 1 - 2 * ow  # the tap under which this pixel lies, if at most 2
        inside = (dy <= 2) & (oh >= 0) & (oh < out_height) & (dx <= 2) & (ow >= 0) & (ow < out_width)
        at = ((image * out_height + oh) * out_width + ow)[:, None] * channels + channel[None, :]
        index = tl.load(chosen + at, mask=inside[:, None], other=255).to(tl.int32)
        part = tl.load(d_pooled + at, mask=inside[:, None], other=0.0).to(tl.float32)
        grad += tl.where(index == (dy * 3 + dx)[:, None], part, 0.0)
    at = (row * width + iw)[:, None] * channels + channel[None, :]
    exists = (iw < width)[:, None]
    x = tl.load(source + at, mask=exists, other=0.0).to(tl.float32)
    grad = tl.where(x * a + b > 0, grad, 0.0)
    mean_grad, mean_scaled = tl.load(means + channel)[None, :], tl.load(means + channels + channel)[None, :]
    d_x = a * (grad - mean_grad - (x - m) * r * mean_scaled)
    tl.store(d_source + at, d_x.to(d_source.dtype.element_ty), mask=exists)


def _tile(width: int) -> int:
    return min(64, triton.next_power_of_2(width))


def forward(x: Tensor, gain: Tensor, offset: Tensor) -> Tuple[Tensor, Tensor]:
    """Return the pooled image, and for each value the tap (0 to 8) of its window where it was found."""
    images, channels, height, width = x.shape
    out_height, out_width = (height - 1) // 2 + 1, (width - 1) // 2 + 1
    shape = (images, channels, out_height, out_width)
    pooled = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    chosen = torch.empty(shape, dtype=torch.uint8, device=x.device, memory_format=torch.channels_last)
    tile = _tile(out_width)
    _norm_pool_forward[(images * out_height, triton.cdiv(out_width, tile))](
        x, gain, offset, pooled, chosen, height, width, out_height, out_width, channels, tile, num_warps=8
    )
    return pooled, chosen


def backward(
    x: Tensor, gain: Tensor, offset: Tensor, mean: Tensor, rstd: Tensor, d_pooled: Tensor, chosen: Tensor
) -> Tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the input, the norm's weight and its bias."""
    images, channels, height, width = x.shape
    out_height, out_width = d_pooled.shape[2:]
    sums = torch.empty((_PROGRAMS, 2, channels), dtype=torch.float32, device=x.device)
    rows, sizes = images * out_height, (height, width, out_height, out_width)
    _norm_pool_sums[(_PROGRAMS,)](
        x, gain, offset, mean, rstd, d_pooled, chosen, sums, rows, _PROGRAMS, *sizes, channels, _tile(out_width),
        num_warps=8,
    )  # fmt: skip
    summed = sums.sum(0)
    means = summed / (images * height * width)
    d_x = torch.empty_like(x)
    tile = _tile(width)
    _norm_pool_backward[(images * height, triton.cdiv(width, tile))](
        x, gain, offset, mean, rstd, d_pooled, chosen, means, d_x, *sizes, channels, tile, num_warps=8
    )
    return d_x, summed[1].clone(), summed[0].clone()
