"""Batch normalisation with the ReLU, and the residual sum, that follow it, over images stored channels last.

A step of a ResNet spends as much time on moving activations as on convolutions, so these kernels touch each as rarely as
they can: the ReLU's gradient is known from the convolution's output, or from one bit per value; the gradients that reach a
block's output by several ways are added while they are read. Sums over pixels are added in a fixed order.

An image is read as rows of `WIDTH` values, of which each column belongs to one channel: channels must divide it.

With 3 x 3 max-pooling of stride 2 the normalised image, four times the size of the pooled one, is never written: both
directions compute it from the convolution's output again. Going back, each input pixel collects from the at most four windows
that it lies in.
"""

from typing import List, Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

WIDTH = 2048  # values of a row; 8 per thread, 16 bytes
ROWS = 2  # rows that a program without sums reads at once
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
    """Store sums per channel: add the columns that belong to the same channel."""
    folded = tl.sum(tl.reshape(values, (width // channels, channels)), 0)
    tl.store(sums + place * channels + tl.arange(0, channels), folded)


@triton.jit  # type: ignore[untyped-decorator]
def row_of(source, row, size, column, width: tl.constexpr):
    """Return one row, and which of its values exist. Sums are kept per row: adding up over a third dimension would exchange
    values between threads in every iteration."""
    first = row.to(tl.int64) * width
    exists = column < tl.minimum(size - first, width).to(tl.int32)
    return tl.load(source + first + column, mask=exists, other=0.0).to(tl.float32), exists


@triton.jit  # type: ignore[untyped-decorator]
def _statistics(source, sums, size, height, programs, channels: tl.constexpr, width: tl.constexpr):
    """Sum the values and their squares, both relative to the first pixel's values: squares far from zero lose digits."""
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
    """Return two kinds of partial sums, the first and `kind`, each added over all programs."""
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
    """Normalise, add and apply the ReLU. `bits`: one per value, set if it is above zero; eight of them are a byte."""
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
    """Return the number of programs for a sum over all pixels: four per multiprocessor, each with about as much to read."""
    rows = rows_of(x)
    most = 4 * (torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1)
    return triton.cdiv(rows, triton.cdiv(rows, most))


def line_of(x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    """Return normalisation as x * gain + offset: per channel the mean, 1 / deviation, gain and offset. Updates the
    running means."""
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
    """Return the sum after its ReLU, and one bit per value that tells if it is above zero."""
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


# The gradients of these operations.


@triton.jit  # type: ignore[untyped-decorator]
def _relu_sums(d_out, source, line, sums, size, height, programs, channels: tl.constexpr, width: tl.constexpr):
    """Sum the gradient, and the gradient times the distance from the mean."""
    program = tl.program_id(0)
    total, scaled = tl.zeros((width // 8, 8), tl.float32), tl.zeros((width // 8, 8), tl.float32)
    column = tl.arange(0, width // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    channel = column % channels
    mean = tl.load(line + channel)
    gain, offset = tl.load(line + 2 * channels + channel), tl.load(line + 3 * channels + channel)
    for row in range(program, height, programs * 2):
        x, _ = row_of(source, row + program * 0, size, column, width)
        grad, _ = row_of(d_out, row + program * 0, size, column, width)
        more_x, _ = row_of(source, row + programs, size, column, width)
        more, _ = row_of(d_out, row + programs, size, column, width)
        grad = tl.where(x * gain + offset > 0, grad, 0.0)
        more = tl.where(more_x * gain + offset > 0, more, 0.0)
        total += grad + more
        scaled += grad * (x - mean) + more * (more_x - mean)
    store_sums(sums, program * 2, total, channels, width)
    store_sums(sums, program * 2 + 1, scaled, channels, width)


@triton.jit  # type: ignore[untyped-decorator]
def _added_grads(
    d_one, d_two, d_three, bits, row, size, column, ways: tl.constexpr, width: tl.constexpr
):  # fmt: skip
    """Return the added gradients of one row, passed through the ReLU."""
    grad, exists = row_of(d_one, row, size, column, width)
    if ways > 1:
        grad += row_of(d_two, row, size, column, width)[0]
    if ways > 2:
        grad += row_of(d_three, row, size, column, width)[0]
    byte = tl.load(bits + row.to(tl.int64) * (width // 8) + column // 8, mask=exists, other=0).to(tl.int32)
    return tl.where((byte >> (column % 8)) & 1 != 0, grad, 0.0), exists


@triton.jit  # type: ignore[untyped-decorator]
def _add_relu_sums(
    d_one, d_two, d_three, bits, source, line, shortcut, shortcut_line, d_sum, sums, size, height, programs,
    ways: tl.constexpr, normalised: tl.constexpr, channels: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a block's output, pass them through its ReLU into `d_sum`, and sum them up."""
    program = tl.program_id(0)
    total, scaled = tl.zeros((width // 8, 8), tl.float32), tl.zeros((width // 8, 8), tl.float32)
    more_scaled = tl.zeros((width // 8, 8), tl.float32)
    column = tl.arange(0, width // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    mean = tl.load(line + column % channels)
    more_mean = tl.load((shortcut_line if normalised else line) + column % channels)
    for row in range(program, height, programs * 2):
        this, that = row + program * 0, row + programs
        x, _ = row_of(source, this, size, column, width)
        y, _ = row_of(source, that, size, column, width)
        one, exists = _added_grads(d_one, d_two, d_three, bits, this, size, column, ways, width)
        two, also_exists = _added_grads(d_one, d_two, d_three, bits, that, size, column, ways, width)
        rounded, also_rounded = one.to(d_sum.dtype.element_ty), two.to(d_sum.dtype.element_ty)
        one, two = rounded.to(tl.float32), also_rounded.to(tl.float32)
        total += one + two
        scaled += one * (x - mean) + two * (y - mean)
        if normalised:
            x, _ = row_of(shortcut, this, size, column, width)
            y, _ = row_of(shortcut, that, size, column, width)
            more_scaled += one * (x - more_mean) + two * (y - more_mean)
        tl.store(d_sum + this.to(tl.int64) * width + column, rounded, mask=exists)
        tl.store(d_sum + that.to(tl.int64) * width + column, also_rounded, mask=also_exists)
    kinds: tl.constexpr = 3 if normalised else 2
    store_sums(sums, program * kinds, total, channels, width)
    store_sums(sums, program * kinds + 1, scaled, channels, width)
    if normalised:
        store_sums(sums, program * kinds + 2, more_scaled, channels, width)


@triton.jit  # type: ignore[untyped-decorator]
def _terms(
    sums, line, out, programs, channels, count, kinds: tl.constexpr, kind: tl.constexpr, block: tl.constexpr,
    tile: tl.constexpr,
):  # fmt: skip
    """Compute per channel: gradients of weight and bias, and the factors of the input's gradient, gain * grad + slope * x +
    level."""
    channel = tl.program_id(0) * block + tl.arange(0, block)
    total, scaled = added(sums, programs, kinds, kind, channel, channels, tile)
    mean, rstd = tl.load(line + channel), tl.load(line + channels + channel)
    gain = tl.load(line + 2 * channels + channel)
    slope = -gain * rstd * rstd * scaled / count
    tl.store(out + channel, scaled * rstd)
    tl.store(out + channels + channel, total)
    tl.store(out + 2 * channels + channel, slope)
    tl.store(out + 3 * channels + channel, -gain * total / count - slope * mean)


@triton.jit  # type: ignore[untyped-decorator]
def _relu_backward(
    d_out, source, line, terms, d_source, size, channels, width: tl.constexpr, rows: tl.constexpr
):  # fmt: skip
    first, at, exists, column = place(tl.program_id(0) * rows, size, width, rows)
    channel = column % channels
    gain, offset = tl.load(line + 2 * channels + channel), tl.load(line + 3 * channels + channel)
    slope, level = tl.load(terms + 2 * channels + channel), tl.load(terms + 3 * channels + channel)
    x = tl.load(source + first + at, mask=exists, other=0.0).to(tl.float32)
    grad = tl.load(d_out + first + at, mask=exists, other=0.0).to(tl.float32)
    value = tl.where(x * gain + offset > 0, grad, 0.0) * gain + x * slope + level
    tl.store(d_source + first + at, value.to(d_source.dtype.element_ty), mask=exists)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_backward(
    d_sum, source, line, terms, d_source, shortcut, shortcut_line, shortcut_terms, d_shortcut, size, channels,
    normalised: tl.constexpr, width: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    first, at, exists, column = place(tl.program_id(0) * rows, size, width, rows)
    channel = column % channels
    grad = tl.load(d_sum + first + at, mask=exists, other=0.0).to(tl.float32)
    x = tl.load(source + first + at, mask=exists, other=0.0).to(tl.float32)
    value = grad * tl.load(line + 2 * channels + channel) + x * tl.load(terms + 2 * channels + channel)
    value += tl.load(terms + 3 * channels + channel)
    tl.store(d_source + first + at, value.to(d_source.dtype.element_ty), mask=exists)
    if normalised:
        x = tl.load(shortcut + first + at, mask=exists, other=0.0).to(tl.float32)
        value = grad * tl.load(shortcut_line + 2 * channels + channel)
        value += x * tl.load(shortcut_terms + 2 * channels + channel) + tl.load(shortcut_terms + 3 * channels + channel)
        tl.store(d_shortcut + first + at, value.to(d_shortcut.dtype.element_ty), mask=exists)


def norm_relu_backward(d_out: Tensor, x: Tensor, line: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the input, the norm's weight and its bias."""
    channels, programs = x.shape[1], programs_for(x)
    sums = torch.empty((programs, 2, channels), dtype=torch.float32, device=x.device)
    _relu_sums[(programs,)](d_out, x, line, sums, x.numel(), rows_of(x), programs, channels, WIDTH, num_warps=WARPS)
    terms = _terms_of(sums, line, x, 1)
    d_x = torch.empty_like(x)
    _relu_backward[grid(x)](d_out, x, line, terms, d_x, x.numel(), channels, WIDTH, ROWS, num_warps=WARPS)
    return d_x, terms[0], terms[1]


def norm_add_relu_backward(
    grads: List[Tensor], bits: Tensor, x: Tensor, line: Tensor, shortcut: Tensor, shortcut_line: Optional[Tensor]
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Optional[Tensor], Optional[Tensor]]:
    """Return the gradients of input, weight, bias, shortcut and, if the shortcut is normalised too, its weight and bias. `grads`:
    the gradients from the one to three uses of the sum."""
    channels, programs, normalised = x.shape[1], programs_for(x), shortcut_line is not None
    d_sum = torch.empty_like(x)
    sums = torch.empty((programs, 3 if normalised else 2, channels), dtype=torch.float32, device=x.device)
    other_line = shortcut_line if shortcut_line is not None else line
    _add_relu_sums[(programs,)](
        grads[0], grads[min(1, len(grads) - 1)], grads[-1], bits, x, line, shortcut, other_line, d_sum, sums, x.numel(),
        rows_of(x), programs, len(grads), normalised, channels, WIDTH, num_warps=WARPS,
    )  # fmt: skip
    terms = _terms_of(sums, line, x, 1)
    more = _terms_of(sums, other_line, x, 2) if normalised else terms
    d_x = torch.empty_like(x)
    d_shortcut = torch.empty_like(x) if normalised else d_sum
    _norm_backward[grid(x)](
        d_sum, x, line, terms, d_x, shortcut, other_line, more, d_shortcut, x.numel(), channels, normalised, WIDTH, ROWS,
        num_warps=WARPS,
    )  # fmt: skip
    return d_x, terms[0], terms[1], d_shortcut, more[0] if normalised else None, more[1] if normalised else None


def _terms_of(sums: Tensor, line: Tensor, x: Tensor, kind: int) -> Tensor:
    programs, kinds, channels = sums.shape
    out = torch.empty_like(line)
    block = min(BLOCK, channels)
    _terms[(channels // block,)](
        sums, line, out, programs, channels, x.numel() // channels, kinds, kind, block, TILE, num_warps=WARPS
    )  # fmt: skip
    return out


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


def norm_relu_pool(x: Tensor, gain: Tensor, offset: Tensor) -> Tuple[Tensor, Tensor]:
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


def norm_relu_pool_backward(
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
