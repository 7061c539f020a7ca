"""The Triton kernel behind `float8.quantize`: read a tile once, write it in 8 bits straight and transposed."""

from typing import Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _cast_both(
    source,
    scale,
    straight,
    turned,
    rows,
    columns,
    top: tl.constexpr,
    row_tile: tl.constexpr,
    column_tile: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * row_tile + tl.arange(0, row_tile)
    column = tl.program_id(1) * column_tile + tl.arange(0, column_tile)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(source + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    tile = tile * tl.load(scale)
    tile = tl.minimum(tl.maximum(tile, -top), top)
    small = tile.to(straight.dtype.element_ty)
    tl.store(straight + row[:, None] * columns + column[None, :], small, mask=inside)
    flipped = tl.trans(small)
    inside_flipped = (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(turned + column[:, None].to(tl.int64) * rows + row[None, :], flipped, mask=inside_flipped)


def cast_both(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tuple[Tensor, Tensor]:
    x = x.contiguous()
    rows, columns = x.shape
    straight = torch.empty((rows, columns), dtype=dtype, device=x.device)
    turned = torch.empty((columns, rows), dtype=dtype, device=x.device)
    tile = 128
    grid = (triton.cdiv(rows, tile), triton.cdiv(columns, tile))
    _cast_both[grid](x, scale, straight, turned, rows, columns, torch.finfo(dtype).max, tile, tile, num_warps=8)
    return straight, turned
