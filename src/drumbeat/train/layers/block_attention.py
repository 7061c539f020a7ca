"""Attention of some queries over some keys, with what is needed to merge it with the attention over other keys: the
log-sum-exp of each row. Tensors are (batch, heads, time, width); k and v may have fewer heads, for groups of queries.

On a GPU in 16 bits torch's fused kernels do it, called by their own names since only those give the log-sum-exp:
cuDNN's, or FlashAttention where cuDNN's does not run. Everything else is computed plainly, in 32 bits or more.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from drumbeat.train.layers.attention import has_cudnn, repeat_heads

Gradients = Tuple[Tensor, Tensor, Tensor]


def block_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tuple[Tensor, Tensor]:
    """Return the result, in q's dtype or wider, and the log-sum-exp (batch, heads, time), in 32 bits or more."""
    if _fused(q):
        aten: Any = torch.ops.aten
        if has_cudnn(q):
            out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
        else:
            k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
            out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return out, lse.view(q.shape[:3])  # cuDNN's has a fourth dimension of one
    scores = _scores(q, k, causal)
    lse = scores.logsumexp(dim=-1)
    return (scores - lse[..., None]).exp() @ _wide(repeat_heads(v, q.shape[1])), lse


def block_attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    """Return the part of the gradients that comes from these keys. `out` and `lse` are those of the whole rows, over all keys."""
    if _fused(q):
        return _fused_backward(d_out, q, k, v, out, lse, causal)
    groups = k.shape[1]
    k, v = _wide(repeat_heads(k, q.shape[1])), _wide(repeat_heads(v, q.shape[1]))
    odds = (_scores(q, k, causal) - lse[..., None]).exp()
    d_out, scale = _wide(d_out), q.shape[-1] ** -0.5
    d_scores = odds * (d_out @ v.transpose(-1, -2) - (d_out * out).sum(-1, keepdim=True)) * scale
    d_k, d_v = d_scores.transpose(-1, -2) @ _wide(q), odds.transpose(-1, -2) @ d_out
    return d_scores @ k, _gathered(d_k, groups), _gathered(d_v, groups)


def _fused_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    aten: Any = torch.ops.aten
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of an unused random generator
    nested: Optional[Tensor] = None  # sequences of uneven length: not here
    # Parts of a row came from different calls, so strides differ: the kernels want them alike.
    d_out, out, lse = d_out.contiguous(), out.contiguous(), lse.contiguous()
    if has_cudnn(q):
        return aten._scaled_dot_product_cudnn_attention_backward(
            d_out, q, k, v, out, lse[..., None], no_dropout, no_dropout, None, nested, nested, q.shape[2], k.shape[2],
            0.0, causal,
        )  # fmt: skip
    groups = k.shape[1]
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    d_q, d_k, d_v = aten._scaled_dot_product_flash_attention_backward(
        d_out, q, k, v, out, lse, nested, nested, q.shape[2], k.shape[2], 0.0, causal, no_dropout, no_dropout
    )
    return d_q, _gathered(d_k, groups), _gathered(d_v, groups)


def _fused(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = _wide(q) @ _wide(repeat_heads(k, q.shape[1])).transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _gathered(x: Tensor, heads: int) -> Tensor:
    """Add the gradients of repeated heads into the heads that they were repeated from."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)
