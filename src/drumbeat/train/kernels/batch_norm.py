"""Batch normalisation with the ReLU, and the residual sum, that follow it, over images stored channels last.

A step of a ResNet spends as much time on moving activations as on convolutions, so these kernels touch each as rarely as
they can: the ReLU's gradient is known from the convolution's output, or from one bit per value; the gradients that reach a
block's output by several ways are added while they are read. Sums over pixels are added in a fixed order.

An image is read as rows of `WIDTH` values, of which each column belongs to one channel: channels must divide it.
"""

from typing import Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

WIDTH = 2048  # values of a row; 8 per thread, 16 bytes
ROWS = 2  # that a program without sums reads at once
WARPS = 8
BLOCK, TILE = 16, 256  # of the kernels that add partial sums up: channels, and sums read at once


@triton.jit  # type: ignore[untyped-decorator]
def place(row, size, width: tl.constexpr, rows: tl.constexpr):
    """Return where the values of some rows are, from the first of them; whether they exist; and their columns."""
    column = tl.arange(0, width // 8)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    at = tl.arange(0, rows)[:, None, None] * width + column
    first = row.to(tl.int64) * width
    left = tl.minimum(size - first, width * rows).to(tl.int32)
    return first, at, at < left, column


@triton.jit  # type: ignore[untyped-decorator]
def store_sums(sums, place, values, channels: tl.constexpr, width: tl.constexpr):
    """Columns of one channel together."""
    folded = tl.sum(tl.reshape(values, (width // channels, channels)), 0)
    tl.store(sums + place * channels + tl.arange(0, channels), folded)


@triton.jit  # type: ignore[untyped-decorator]
def row_of(source, row, size, column, width: tl.constexpr):
    """One row, and which of its values exist. Sums keep to rows: adding up over a third dimension would exchange values
    between threads in every turn."""
    first = row.to(tl.int64) * width
    exists = column < tl.minimum(size - first, width).to(tl.int32)
    return tl.load(source + first + column, mask=exists, other=0.0).to(tl.float32), exists


@triton.jit  # type: ignore[untyped-decorator]
def _statistics(source, sums, size, height, programs, channels: tl.constexpr, width: tl.constexpr):
    """Sums of the values and of their squares, both from the first pixel's values on: far from zero squares lose digits."""
    program = tl.program_id(0)
    total, squares = tl.zeros((width // 8, 8), tl.float32), tl.zeros((width // 8, 8), tl.float32)
    column = tl.arange(0, width // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    pivot = tl.load(source + column % channels).to(tl.float32)
    for row in range(program, height, programs * 4):  # four loads under way at once
        a, a_exists = row_of(source, row + program * 0, size, column, width)
        b, b_exists = row_of(source, row + programs, size, column, width)
        c, c_exists = row_of(source, row + programs * 2, size, column, width)
        d, d_exists = row_of(source, row + programs * 3, size, column, width)
        a, b = tl.where(a_exists, a - pivot, 0.0), tl.where(b_exists, b - pivot, 0.0)
        c, d = tl.where(c_exists, c - pivot, 0.0), tl.where(d_exists, d - pivot, 0.0)
        total += (a + b) + (c + d)
        squares += (a * a + b * b) + (c * c + d * d)
    store_sums(sums, program * 2, total, channels, width)
    store_sums(sums, program * 2 + 1, squares, channels, width)


@triton.jit  # type: ignore[untyped-decorator]
def added(sums, programs, kinds: tl.constexpr, kind: tl.constexpr, channel, channels, tile: tl.constexpr):
    """Two kinds of partial sums, the first and `kind`, each over all programs."""
    one, two = tl.zeros((tile, channel.shape[0]), tl.float32), tl.zeros((tile, channel.shape[0]), tl.float32)
    for start in range(0, programs, tile):
        program = start + tl.arange(0, tile)
        at = (program * kinds)[:, None] * channels + channel[None, :]
        exists = (program < programs)[:, None]
        one += tl.load(sums + at, mask=exists, other=0.0)
        two += tl.load(sums + kind * channels + at, mask=exists, other=0.0)
    return tl.sum(one, 0), tl.sum(two, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _line(
    source, sums, weight, bias, running_mean, running_variance, batches, line, programs, channels, count, momentum, eps,
    tracks: tl.constexpr, block: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * block + tl.arange(0, block)
    total, squares = added(sums, programs, 2, 1, channel, channels, tile)
    shift = total / count
    variance = squares / count - shift * shift
    variance = tl.where(variance < 0, 0.0, variance)
    mean = tl.load(source + channel).to(tl.float32) + shift
    rstd = 1.0 / tl.sqrt(variance + eps)
    gain = tl.load(weight + channel).to(tl.float32) * rstd
    tl.store(line + channel, mean)
    tl.store(line + channels + channel, rstd)
    tl.store(line + 2 * channels + channel, gain)
    tl.store(line + 3 * channels + channel, tl.load(bias + channel).to(tl.float32) - mean * gain)
    if tracks:
        before = tl.load(running_mean + channel)
        tl.store(running_mean + channel, before + momentum * (mean - before))
        before = tl.load(running_variance + channel)
        tl.store(running_variance + channel, before + momentum * (variance * (count / (count - 1)) - before))
        if tl.program_id(0) == 0:
            tl.store(batches, tl.load(batches) + 1)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_relu(source, line, out, size, channels, width: tl.constexpr, rows: tl.constexpr):
    first, at, exists, column = place(tl.program_id(0) * rows, size, width, rows)
    gain, offset = tl.load(line + 2 * channels + column % channels), tl.load(line + 3 * channels + column % channels)
    value = tl.load(source + first + at, mask=exists, other=0.0).to(tl.float32) * gain + offset
    value = tl.where(value < 0, 0.0, value)  # a NaN stays one
    tl.store(out + first + at, value.to(out.dtype.element_ty), mask=exists)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_add_relu(
    source, line, shortcut, shortcut_line, out, bits, size, channels,
    normalised: tl.constexpr, width: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """`bits`: one per value, whether it is above zero; eight of them are a byte."""
    first, at, exists, column = place(tl.program_id(0) * rows, size, width, rows)
    channel = column % channels
    gain, offset = tl.load(line + 2 * channels + channel), tl.load(line + 3 * channels + channel)
    value = tl.load(source + first + at, mask=exists, other=0.0).to(tl.float32) * gain + offset
    more = tl.load(shortcut + first + at, mask=exists, other=0.0).to(tl.float32)
    if normalised:
        more = more * tl.load(shortcut_line + 2 * channels + channel)
        more += tl.load(shortcut_line + 3 * channels + channel)
    value += more
    byte = tl.sum((value > 0).to(tl.int32) << tl.arange(0, 8)[None, None, :], 2)
    value = tl.where(value < 0, 0.0, value)
    tl.store(out + first + at, value.to(out.dtype.element_ty), mask=exists)
    group = tl.arange(0, rows)[:, None] * (width // 8) + tl.arange(0, width // 8)[None, :]
    tl.store(bits + first // 8 + group, byte.to(tl.uint8), mask=group < (size - first) // 8)


def rows_of(x: Tensor) -> int:
    return triton.cdiv(x.numel(), WIDTH)


def programs_for(x: Tensor) -> int:
    """Of a sum over all pixels: four per multiprocessor, each with about as much to read."""
    rows = rows_of(x)
    most = 4 * (torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1)
    return triton.cdiv(rows, triton.cdiv(rows, most))


def line_of(x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    """Normalising as x * gain + offset: by channel the mean, 1 / deviation, gain and offset. Updates the running means."""
    channels, programs = x.shape[1], programs_for(x)
    sums = torch.empty((programs, 2, channels), dtype=torch.float32, device=x.device)
    _statistics[(programs,)](x, sums, x.numel(), rows_of(x), programs, channels, WIDTH, num_warps=WARPS)
    line = torch.empty((4, channels), dtype=torch.float32, device=x.device)
    tracks = norm.track_running_stats
    mean, variance, batches = (norm.running_mean, norm.running_var, norm.num_batches_tracked) if tracks else (x, x, x)
    block = min(BLOCK, channels)
    _line[(channels // block,)](
        x, sums, norm.weight, norm.bias, mean, variance, batches, line, programs, channels, x.numel() // channels,
        norm.momentum or 0.0, norm.eps, tracks, block, TILE, num_warps=WARPS,
    )  # fmt: skip
    return line


def norm_relu(x: Tensor, line: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _norm_relu[grid(x)](x, line, out, x.numel(), x.shape[1], WIDTH, ROWS, num_warps=WARPS)
    return out


def norm_add_relu(x: Tensor, line: Tensor, shortcut: Tensor, shortcut_line: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
    """The sum after its ReLU, and one bit per value that tells whether it is above zero."""
    out = torch.empty_like(x)
    bits = torch.empty(x.numel() // 8, dtype=torch.uint8, device=x.device)
    normalised = shortcut_line is not None
    _norm_add_relu[grid(x)](
        x, line, shortcut, shortcut_line if normalised else line, out, bits, x.numel(), x.shape[1], normalised, WIDTH,
        ROWS, num_warps=WARPS,
    )  # fmt: skip
    return out, bits


def grid(x: Tensor) -> Tuple[int]:
    return (triton.cdiv(rows_of(x), ROWS),)
