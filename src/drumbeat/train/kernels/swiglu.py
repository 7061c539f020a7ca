"""silu(gate) * up and its gradient, one pass each.

torch.compile writes the gradient of the interleaved (gate, up) matrix as a masked stack that loads everything twice:
20 ms per step of the 1B model on an H200, against 10 here.
"""

from typing import Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor


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


def forward(pairs: Tensor, part: int) -> Tensor:
    inner, block, blocks = _shape(pairs, part)
    out = torch.empty((*pairs.shape[:-1], inner), dtype=pairs.dtype, device=pairs.device)
    _swiglu_forward[(blocks,)](pairs, out, inner, part, block, num_warps=4)
    return out


def backward(pairs: Tensor, d_out: Tensor, part: int) -> Tensor:
    inner, block, blocks = _shape(pairs, part)
    d_pairs = torch.empty_like(pairs)
    _swiglu_backward[(blocks,)](pairs, d_out.contiguous(), d_pairs, inner, part, block, num_warps=4)
    return d_pairs
