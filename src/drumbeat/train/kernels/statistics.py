"""Mean and variance of each channel of images stored channels last, in one reading.

torch.compile's reductions over such images run at half of an H200's memory bandwidth: each of their programs adds up after
every load. Here a program keeps one sum per pixel of its tile until it has seen all its pixels.
"""

from typing import Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1056  # of a reduction: eight per multiprocessor of an H200


@triton.jit  # type: ignore[untyped-decorator]
def _channel_sums(source, sums, rows, channels, block: tl.constexpr, tile: tl.constexpr):
    channel = tl.program_id(1) * block + tl.arange(0, block)
    total, squares = tl.zeros((tile, block), tl.float32), tl.zeros((tile, block), tl.float32)
    for start in range(tl.program_id(0) * tile, rows, tl.num_programs(0) * tile):
        row = start + tl.arange(0, tile)
        at = row.to(tl.int64)[:, None] * channels + channel[None, :]
        x = tl.load(source + at, mask=(row < rows)[:, None], other=0.0).to(tl.float32)
        total += x
        squares += x * x
    at = tl.program_id(0) * 2 * channels + channel
    tl.store(sums + at, tl.sum(total, 0))
    tl.store(sums + at + channels, tl.sum(squares, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _mean_and_variance(sums, mean, variance, count, rows, channels, block: tl.constexpr, tile: tl.constexpr):
    channel = tl.program_id(0) * block + tl.arange(0, block)
    total, squares = tl.zeros((tile, block), tl.float32), tl.zeros((tile, block), tl.float32)
    for start in range(0, count, tile):
        row = start + tl.arange(0, tile)
        at = sums + row[:, None] * 2 * channels + channel[None, :]
        total += tl.load(at, mask=(row < count)[:, None], other=0.0)
        squares += tl.load(at + channels, mask=(row < count)[:, None], other=0.0)
    middle = tl.sum(total, 0) / rows
    tl.store(mean + channel, middle)
    tl.store(variance + channel, tl.maximum(tl.sum(squares, 0) / rows - middle * middle, 0.0))


def mean_and_variance(x: Tensor) -> Tuple[Tensor, Tensor]:
    """x: (images, channels, height, width), channels last in memory, a multiple of 64 channels. The variance is over the
    count, not one less."""
    channels = x.shape[1]
    rows, block = x.numel() // channels, 128 if channels % 128 == 0 else 64
    across, tile = channels // block, 32
    programs = max(1, min(PROGRAMS // across, triton.cdiv(rows, tile)))
    sums = torch.empty((programs, 2, channels), dtype=torch.float32, device=x.device)
    mean, variance = (torch.empty(channels, dtype=torch.float32, device=x.device) for _ in range(2))
    _channel_sums[(programs, across)](x, sums, rows, channels, block, tile, num_warps=4)
    _mean_and_variance[(channels // 64,)](sums, mean, variance, programs, rows, channels, 64, 32, num_warps=4)
    return mean, variance
