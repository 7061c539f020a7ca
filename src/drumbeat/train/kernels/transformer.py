"""Kernels of transformers: cross-entropy, gated feed-forwards, and matrices cast to 8 bits.

Cross-entropy of one slice of logits writes its gradient over them. A row of 128,256 logits is 256 KB. One program reads it
twice: for the sum of the exponentials, and for the gradient.

silu(gate) * up and its gradient take one pass each: torch.compile writes the gradient of the interleaved (gate, up) matrix as a
masked stack that loads everything twice: 20 ms per step of the 1B model on an H200, against 10 here.

A cast to 8 bits writes a matrix, or what a gated feed-forward makes of one, straight and transposed, in one pass over its
source. The scale must be known before anything is written, and finding the largest value takes a pass of its own. So it is
guessed: twice the largest value of every 32nd row. While the matrix is written its true largest value is found; where
that does not fit, which is rare, a last kernel writes everything again with the exact scale. Nothing is ever cut off, nothing is
carried from step to step, and the same input gives the same output.
"""

from typing import Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _log_sum(start, width, place, block: tl.constexpr):
    top = tl.full((block,), -1e30, tl.float32)
    total = tl.zeros((block,), tl.float32)
    for at in range(0, width, block):  # each lane keeps its own running maximum and sum
        x = tl.load(start + at + place, mask=at + place < width, other=-1e30).to(tl.float32)
        new_top = tl.maximum(top, x)
        total = total * tl.exp(top - new_top) + tl.exp(x - new_top)
        top = new_top
    peak = tl.max(top, 0)
    return peak + tl.log(tl.sum(total * tl.exp(top - peak), 0))


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy(logits, targets, losses, width, ignore: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * width
    target = tl.load(targets + row)
    valid = target != ignore
    place = tl.arange(0, block)
    log_sum = _log_sum(start, width, place, block)
    chosen = tl.load(start + tl.where(valid, target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(valid, log_sum - chosen, 0.0))
    weight = tl.where(valid, 1.0, 0.0)
    tl.debug_barrier()  # the chosen logit is read before it is overwritten
    for at in range(0, width, block):
        inside = at + place < width
        x = tl.load(start + at + place, mask=inside, other=-1e30).to(tl.float32)
        d = (tl.exp(x - log_sum) - tl.where(at + place == target, 1.0, 0.0)) * weight
        tl.store(start + at + place, d.to(logits.dtype.element_ty), mask=inside)


def cross_entropy(logits: Tensor, targets: Tensor, ignore: int) -> Tuple[Tensor, Tensor]:
    """Return the sum of the losses, and the gradient of the logits, which overwrites them."""
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _cross_entropy[(rows,)](logits, targets, losses, width, ignore, 4096, num_warps=16)
    return losses.sum(), logits


@triton.jit  # type: ignore[untyped-decorator]
def _row_odds(logits, targets, losses, log_sums, at_target, width, ignore: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * width
    target = tl.load(targets + row)
    valid = target != ignore
    log_sum = _log_sum(start, width, tl.arange(0, block), block)
    chosen = tl.load(start + tl.where(valid, target, 0)).to(tl.float32)
    tl.store(log_sums + row, log_sum)
    tl.store(losses + row, tl.where(valid, log_sum - chosen, 0.0))
    tl.store(at_target + row, tl.where(valid, tl.exp(chosen - log_sum) - 1.0, 0.0))


@triton.jit  # type: ignore[untyped-decorator]
def _cast_odds(
    logits, targets, log_sums, straight, turned, rows, width, scale, ignore: tl.constexpr,
    row_tile: tl.constexpr, column_tile: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * row_tile + tl.arange(0, row_tile)
    column = tl.program_id(1) * column_tile + tl.arange(0, column_tile)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    target = tl.load(targets + row, mask=row < rows, other=ignore)
    log_sum = tl.load(log_sums + row, mask=row < rows, other=0.0)
    x = tl.load(logits + row.to(tl.int64)[:, None] * width + column[None, :], mask=inside, other=-1e30).to(tl.float32)
    other = (target != ignore)[:, None] & (column[None, :] != target[:, None])
    odds = tl.where(other, tl.exp(x - log_sum[:, None]), 0.0)
    _put(odds, straight, turned, row, column, inside, rows, width, scale, 57344.0)


def cast_odds(
    logits: Tensor, targets: Tensor, ignore: int, dtype: torch.dtype, scale: float
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return each row's loss, the gradient at its target (rows, 1), and the other probabilities times `scale` in 8 bits, straight
    and transposed."""
    rows, width = logits.shape
    losses, log_sums, at_target = torch.empty((3, rows), dtype=torch.float32, device=logits.device)
    _row_odds[(rows,)](logits, targets, losses, log_sums, at_target, width, ignore, 4096, num_warps=16)
    straight = torch.empty((rows, width), dtype=dtype, device=logits.device)
    turned = torch.empty((width, rows), dtype=dtype, device=logits.device)
    row_tile, column_tile, warps = 32, 256, 4  # the fastest on an H200
    grid = (triton.cdiv(rows, row_tile), triton.cdiv(width, column_tile))
    _cast_odds[grid](
        logits, targets, log_sums, straight, turned, rows, width, scale, ignore, row_tile, column_tile, num_warps=warps
    )
    return losses, at_target[:, None], straight, turned


@triton.jit  # type: ignore[untyped-decorator]
def _places(inner: tl.constexpr, part: tl.constexpr, block: tl.constexpr):
    """Return the places of a block of outputs and of its gate; the matching up lies `part` further on."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    row, column = at // inner, at % inner
    return at, row * (2 * inner) + (column // part) * (2 * part) + column % part


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu_forward(pairs, out, inner: tl.constexpr, part: tl.constexpr, block: tl.constexpr):
    at, gate_at = _places(inner, part, block)
    gate = tl.load(pairs + gate_at).to(tl.float32)
    up = tl.load(pairs + gate_at + part).to(tl.float32)
    tl.store(out + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu_backward(pairs, d_out, d_pairs, inner: tl.constexpr, part: tl.constexpr, block: tl.constexpr):
    at, gate_at = _places(inner, part, block)
    gate = tl.load(pairs + gate_at).to(tl.float32)
    up = tl.load(pairs + gate_at + part).to(tl.float32)
    grad = tl.load(d_out + at).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    d_gate, d_up = grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid
    tl.store(d_pairs + gate_at, d_gate.to(d_pairs.dtype.element_ty))
    tl.store(d_pairs + gate_at + part, d_up.to(d_pairs.dtype.element_ty))


def _shape(pairs: Tensor, part: int) -> Tuple[int, int, int]:
    """Return outputs per row, block size, number of blocks; a block never crosses the edge of a part."""
    inner = pairs.shape[-1] // 2
    block = min(2048, part & -part)
    return inner, block, pairs.numel() // 2 // block


def swiglu(pairs: Tensor, part: int) -> Tensor:
    inner, block, blocks = _shape(pairs, part)
    out = torch.empty((*pairs.shape[:-1], inner), dtype=pairs.dtype, device=pairs.device)
    _swiglu_forward[(blocks,)](pairs, out, inner, part, block, num_warps=4)
    return out


def swiglu_backward(pairs: Tensor, d_out: Tensor, part: int) -> Tensor:
    inner, block, blocks = _shape(pairs, part)
    d_pairs = torch.empty_like(pairs)
    _swiglu_backward[(blocks,)](pairs, d_out.contiguous(), d_pairs, inner, part, block, num_warps=4)
    return d_pairs


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
    """Return both 8-bit forms and the factor of silu(gate) * up, which is never written in 16 bits."""
    return _cast(pairs, pairs, part, _GATE, dtype)


def cast_gate_gradient(pairs: Tensor, d_out: Tensor, part: int, dtype: torch.dtype) -> Tuple[Tensor, Tensor, Tensor]:
    """Return both 8-bit forms and the factor of silu(gate) * up's gradient by gates and ups."""
    return _cast(pairs, d_out.contiguous(), part, _GATE_GRADIENT, dtype)
