"""Causal attention for grouped queries, through the fastest kernel that there is for the device.

On a Hopper GPU that is FlashAttention 4 where it is installed (flash4.py), else cuDNN's, which also serves newer ones (H200,
head width 64, forward: 494 and 435 TFLOP/s; FlashAttention-2: 290). `scaled_dot_product_attention` chooses cuDNN's only when keys
and values are repeated to the number of queries, which costs memory traffic both ways; cuDNN itself takes grouped keys, so it
is called by its own name.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from drumbeat.train.layers.flash4 import SHORTEST, flash4, refused

_HALVES = (torch.bfloat16, torch.float16)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (batch, time, heads, head width), k and v with as many heads or a divisor of it; returns q's shape."""
    if has_flash4(q, k):
        return flash4(q, k, v)[0]  # type: ignore[no-any-return]
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


def has_flash4(q: Tensor, k: Tensor) -> bool:
    if not q.is_cuda or torch.version.hip or q.dtype not in _HALVES or q.shape[1] < SHORTEST:
        return False
    return not refused(q.device.index or 0, q.dtype, q.shape[3], q.shape[2] // k.shape[2])


def has_cudnn(q: Tensor) -> bool:
    if not q.is_cuda or torch.version.hip or q.dtype not in _HALVES:
        return False
    if torch.are_deterministic_algorithms_enabled():  # its backward pass adds in any order
        return False
    return torch.cuda.get_device_capability(q.device) >= (9, 0)


def attention_kernel(
    device: torch.device, dtype: torch.dtype, length: int, head_width: int, group: int, in_order: bool
) -> str:
    """Return the kernel that `causal_attention` takes, and why not a faster one. `in_order`: whether runs must repeat
    themselves."""
    if device.type != "cuda" or torch.version.hip or dtype not in _HALVES:
        return "torch's (the faster kernels take an NVIDIA GPU and 16 bits)"
    short = f"FlashAttention 4 is used from {SHORTEST} tokens on" if length < SHORTEST else ""
    reason = short or refused(device.index or 0, dtype, head_width, group)
    if not reason:
        return "FlashAttention 4" + (", adding in a fixed order" if in_order else "")
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "torch's (the faster kernels take a Hopper GPU or newer)"
    return f"{'FlashAttention 2, adding in a fixed order' if in_order else 'cuDNN'} ({reason})"
