"""Causal attention for grouped queries, through the fastest kernel that torch holds for the device.

On a Hopper or newer NVIDIA GPU that is cuDNN's (H200, head width 64, forward: 450 TFLOP/s; FlashAttention-2: 290).
`scaled_dot_product_attention` chooses it only when keys and values are repeated to the number of queries, which costs
memory traffic both ways; cuDNN itself takes grouped keys, so it is called by its own name.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (batch, time, heads, head width), k and v with as many heads or a divisor of it; returns q's shape."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if has_cudnn(q):
        y = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, torch.is_grad_enabled(), 0.0, True)[0]
    else:
        y = F.scaled_dot_product_attention(q, repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1]), is_causal=True)
    return y.transpose(1, 2)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Each key-value head stands beside its group of queries."""
    groups = heads // x.shape[1]
    return x if groups == 1 else x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)


def has_cudnn(q: Tensor) -> bool:
    if not q.is_cuda or torch.version.hip or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    if torch.are_deterministic_algorithms_enabled():  # its backward pass adds in any order
        return False
    return torch.cuda.get_device_capability(q.device) >= (9, 0)
