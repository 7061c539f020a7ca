"""To 8 bits: a matrix, or what a gated feed-forward makes of one, straight and transposed, in one pass over its source.

The scale must be known before anything is written, and finding the largest value takes a pass of its own. So it is
guessed: twice the largest value of every 32nd row. While the matrix is written its true largest value is found; where
that does not fit, which is rare, a last kernel writes everything again with the exact scale. Nothing is ever cut off, nothing is
carried from step to step, and the same input gives the same output.
"""

from typing import Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_EVERY = 32  # rows: the sample
# What is cast: the matrix itself; silu(gate) * up; the gradient of that by gate and up.
_PLAIN, _GATE, _GATE_GRADIENT = 0, 1, 2
_TILES = {
    _PLAIN: (32, 128, 4),
    _GATE: (64, 128, 8),
    _GATE_GRADIENT: (32, 128, 4),
}  # rows, columns, warps: the fastest on an H200


@triton.jit  # type: ignore[untyped-decorator]
def _gate_gradients(gate, up, d_out):
    sigmoid = tl.sigmoid(gate)
    return d_out * up * sigmoid * (1 + gate * (1 - sigmoid)), d_out * gate * sigmoid


@triton.jit  # type: ignore[untyped-decorator]
def _values(source, d_out, row, column, inside, width, part, kind: tl.constexpr):
    """Return the tile's values, and a second tile for a gate's gradient: `part` columns further on in the output."""
    row = row.to(tl.int64)
    if kind == 0:
        first = tl.load(source + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
        second = first
    else:
        gate_at = row[:, None] * (2 * width) + ((column // part) * (2 * part) + column % part)[None, :]
        gate = tl.load(source + gate_at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(source + gate_at + part, mask=inside, other=0.0).to(tl.float32)
        if kind == 1:
            first = gate * tl.sigmoid(gate) * up
            second = first
        else:
            grad = tl.load(d_out + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
            first, second = _gate_gradients(gate, up, grad)
    return first, second


@triton.jit  # type: ignore[untyped-decorator]
def keep_bits(small):
    """Return the same 8-bit values. The compiler cannot see that they are the same, so it transposes them as bytes instead of
    loading and computing everything a second time in the other order."""
    bits = small.to(tl.uint8, bitcast=True)
    bits = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [bits], dtype=tl.uint8, is_pure=False, pack=4)
    return bits.to(small.dtype, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _put(values, straight, turned, row, column, inside, rows, width, scale, top: tl.constexpr):
    # A NaN must stay one: it is how training notices.
    small = tl.clamp(values * scale, -top, top, propagate_nan=tl.PropagateNan.ALL).to(straight.dtype.element_ty)
    small = keep_bits(small)
    tl.store(straight + row.to(tl.int64)[:, None] * width + column[None, :], small, mask=inside)
    tl.store(turned + column.to(tl.int64)[:, None] * rows + row[None, :], tl.trans(small), mask=tl.trans(inside))


@triton.jit  # type: ignore[untyped-decorator]
def _put_tile(
    first,
    second,
    straight,
    turned,
    row,
    column,
    inside,
    rows,
    width,
    part,
    scale,
    top: tl.constexpr,
    kind: tl.constexpr,
):
    if kind == 2:
        place = (column // part) * (2 * part) + column % part
        _put(first, straight, turned, row, place, inside, rows, 2 * width, scale, top)
        _put(second, straight, turned, row, place + part, inside, rows, 2 * width, scale, top)
    else:
        _put(first, straight, turned, row, column, inside, rows, width, scale, top)


@triton.jit  # type: ignore[untyped-decorator]
def _largest(first, second):
    return tl.max(tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _cast_sample(
    source, d_out, peaks, rows, width, part, every: tl.constexpr, kind: tl.constexpr,
    row_tile: tl.constexpr, column_tile: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * row_tile + tl.arange(0, row_tile)) * every
    column = tl.program_id(1) * column_tile + tl.arange(0, column_tile)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    first, second = _values(source, d_out, row, column, inside, width, part, kind)
    tl.atomic_max(peaks, _largest(first, second))


@triton.jit  # type: ignore[untyped-decorator]
def _cast_both(
    source, d_out, peaks, straight, turned, rows, width, part, top: tl.constexpr, kind: tl.constexpr,
    row_tile: tl.constexpr, column_tile: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * row_tile + tl.arange(0, row_tile)
    column = tl.program_id(1) * column_tile + tl.arange(0, column_tile)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    first, second = _values(source, d_out, row, column, inside, width, part, kind)
    tl.atomic_max(peaks + 1, _largest(first, second))
    scale = top / tl.maximum(2 * tl.load(peaks), 1e-12)
    _put_tile(first, second, straight, turned, row, column, inside, rows, width, part, scale, top, kind)


@triton.jit  # type: ignore[untyped-decorator]
def _cast_again(
    source, d_out, peaks, back, straight, turned, rows, width, part, top: tl.constexpr, kind: tl.constexpr,
    row_tile: tl.constexpr, column_tile: tl.constexpr,
):  # fmt: skip
    """Write the factor that converts 8 bits back, and write the matrix again if the guessed scale was too small."""
    guess, true = 2 * tl.load(peaks), tl.load(peaks + 1)
    peak = tl.where(true > guess, true, guess)
    peak = tl.maximum(peak, 1e-12)
    if tl.program_id(0) == 0:
        tl.store(back, peak / top)
    if true > guess:
        columns = tl.cdiv(width, column_tile)
        for tile in range(tl.program_id(0), tl.cdiv(rows, row_tile) * columns, tl.num_programs(0)):
            row = (tile // columns) * row_tile + tl.arange(0, row_tile)
            column = (tile % columns) * column_tile + tl.arange(0, column_tile)
            inside = (row < rows)[:, None] & (column < width)[None, :]
            first, second = _values(source, d_out, row, column, inside, width, part, kind)
            _put_tile(first, second, straight, turned, row, column, inside, rows, width, part, top / peak, top, kind)


def _cast(source: Tensor, d_out: Tensor, part: int, kind: int, dtype: torch.dtype) -> Tuple[Tensor, Tensor, Tensor]:
    rows, columns = source.shape
    width = columns if kind == _PLAIN else columns // 2  # of a tile's matrix
    out = width if kind == _GATE else columns
    straight = torch.empty((rows, out), dtype=dtype, device=source.device)
    turned = torch.empty((out, rows), dtype=dtype, device=source.device)
    peaks = torch.zeros(2, dtype=torch.float32, device=source.device)  # of the sample, of all rows
    back = torch.empty((), dtype=torch.float32, device=source.device)
    top = torch.finfo(dtype).max
    row_tile, column_tile, warps = _TILES[kind]
    tile = (row_tile, column_tile)
    across = triton.cdiv(width, column_tile)
    few = triton.cdiv(triton.cdiv(rows, _EVERY), 16)
    _cast_sample[(few, across)](source, d_out, peaks, rows, width, part, _EVERY, kind, 16, column_tile, num_warps=4)
    grid = (triton.cdiv(rows, row_tile), across)
    _cast_both[grid](source, d_out, peaks, straight, turned, rows, width, part, top, kind, *tile, num_warps=warps)
    _cast_again[(min(264, grid[0] * grid[1]),)](
        source, d_out, peaks, back, straight, turned, rows, width, part, top, kind, *tile, num_warps=warps
    )
    return straight, turned, back


def cast_both(x: Tensor, dtype: torch.dtype) -> Tuple[Tensor, Tensor, Tensor]:
    """Return x in 8 bits, its transpose in 8 bits, and the factor that converts either back."""
    x = x.contiguous()
    return _cast(x, x, 1, _PLAIN, dtype)


def cast_gate(pairs: Tensor, part: int, dtype: torch.dtype) -> Tuple[Tensor, Tensor, Tensor]:
    """Return the same for silu(gate) * up, which is never written in 16 bits."""
    return _cast(pairs, pairs, part, _GATE, dtype)


def cast_gate_gradient(pairs: Tensor, d_out: Tensor, part: int, dtype: torch.dtype) -> Tuple[Tensor, Tensor, Tensor]:
    """Return the same for the gradient of silu(gate) * up by gates and ups."""
    return _cast(pairs, d_out.contiguous(), part, _GATE_GRADIENT, dtype)
