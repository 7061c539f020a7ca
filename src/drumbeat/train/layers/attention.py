"""Causal attention for grouped queries, through the fastest kernel that there is for the device.

On a Hopper GPU that is FlashAttention 4 where it is installed (below), else cuDNN's, which also serves newer ones (H200,
head width 64, forward: 494 and 435 TFLOP/s; FlashAttention-2: 290). `scaled_dot_product_attention` chooses cuDNN's only when keys
and values are repeated to the number of queries, which costs memory traffic both ways; cuDNN itself takes grouped keys, so it
is called by its own name.

For context parallelism: attention of some queries over some keys, with what is needed to merge it with the attention over other
keys, the log-sum-exp of each row. Tensors are (batch, heads, time, width); k and v may have fewer heads, for groups of queries.
On a GPU in 16 bits torch's fused kernels do it, called by their own names since only those give the log-sum-exp: cuDNN's, or
FlashAttention where cuDNN's does not run. Everything else is computed plainly, in 32 bits or more.
"""

from __future__ import annotations

import functools
import importlib.metadata
import threading
from typing import Any, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from drumbeat.base.problem import pip_install

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
    """Repeat each key-value head for its group of queries, next to each other."""
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


# FlashAttention 4 (the package flash-attn-4, which is optional), as operations that torch.compile takes as they are.
# On an H200 at head width 64 it takes 12 % less time and energy than cuDNN's forward and 17 % less backward, and its backward
# pass can add in a fixed order for 5 % (measured/gpu.md). The package is young and its inner functions may change. So
# before a kind of attention is used for the first time it is tried on a few numbers and compared with plain attention; where
# that fails, cuDNN's takes its place.


PACKAGE = "flash-attn-4"
WIDTHS = (64, 128)  # of a head: those that were measured
SHORTEST = 384  # tokens of a sequence: those of the trial
_ERROR = 0.02  # most that a result in bf16 may be off, of its norm; 0.002 to 0.003 is usual


@torch.library.custom_op("drumbeat::flash4", mutates_args=())
def flash4(q: Tensor, k: Tensor, v: Tensor) -> Tuple[Tensor, Tensor]:
    """Run FlashAttention 4 on tensors (batch, time, heads, head width); return the result and the log-sum-exp (batch, heads,
    time)."""
    out, lse, *_ = _package()._flash_attn_fwd(q, k, v, causal=True, return_lse=True)
    return out, lse


@torch.library.custom_op("drumbeat::flash4_backward", mutates_args=())
def flash4_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Tuple[Tensor, Tensor, Tensor]:
    d_q, d_k, d_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    in_order = torch.are_deterministic_algorithms_enabled()
    _package()._flash_attn_bwd(
        q, k, v, out, d_out.contiguous(), lse, causal=True, deterministic=in_order, dq=d_q, dk=d_k, dv=d_v
    )
    return d_q, d_k, d_v


@flash4.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tuple[Tensor, Tensor]:
    batch, time, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, time), dtype=torch.float32)


@flash4_backward.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: Tuple[Tensor, ...], output: Tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx: Any, d_out: Tensor, _d_lse: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    return flash4_backward(d_out, *ctx.saved_tensors)  # type: ignore[no-any-return]


flash4.register_autograd(_gradients, setup_context=_keep)

FLASH4: Any = torch.ops.drumbeat.flash4.default


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def refused(index: int, dtype: torch.dtype, head_width: int, group: int) -> str:
    """Return why FlashAttention 4 does not compute attention of this kind on GPU `index`, at any length; '' if it does.

    `group`: how many heads of queries share one of keys."""
    return _refused(index, dtype, head_width, group)


@functools.lru_cache
def _refused(index: int, dtype: torch.dtype, head_width: int, group: int) -> str:
    if torch.cuda.get_device_capability(index)[0] != 9:
        return f"{PACKAGE} was measured on Hopper GPUs only"
    if head_width not in WIDTHS:
        return f"{PACKAGE} was measured for heads of {' and '.join(map(str, WIDTHS))} numbers only, not of {head_width}"
    try:
        importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed: {pip_install('fast')}"
    said: List[str] = []
    # A thread of its own: modes in which the caller may be (tracing, recomputation) do not hold there.
    thread = threading.Thread(target=lambda: said.append(_tried(index, dtype, head_width, group)))
    thread.start()
    thread.join()
    return said[0] if said else f"{PACKAGE} could not be tried"


def _tried(index: int, dtype: torch.dtype, head_width: int, group: int) -> str:
    try:
        with torch.cuda.device(index):  # a new thread begins with GPU 0, and kernels start on the thread's own
            found = trial(torch.device("cuda", index), dtype, head_width, group)
    except Exception as error:  # whatever a package of another version raises
        first = (str(error).strip().splitlines() or [""])[0][:150]
        return f"{PACKAGE} does not work here: {type(error).__name__}: {first}".rstrip(": ")
    return "" if found < _ERROR else f"{PACKAGE} gives wrong numbers here, off by {found:.3f}"


def trial(device: torch.device, dtype: torch.dtype, head_width: int, group: int) -> float:
    """Return the largest error of results and gradients against plain attention in 32 bits, relative to their norms."""
    own = torch.Generator(device).manual_seed(0)  # the run's generators are left alone
    shapes = [(1, SHORTEST, heads, head_width) for heads in (2 * group, 2, 2, 2 * group)]
    q, k, v, up = (torch.randn(s, generator=own, device=device).to(dtype) for s in shapes)
    out, lse = flash4(q, k, v)
    got = (out, *flash4_backward(up, q, k, v, out, lse))
    wide = [x.float().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(group, 1) for x in wide[1:])
    later = torch.ones(SHORTEST, SHORTEST, dtype=torch.bool, device=device).triu(1)
    scores = (wide[0] @ keys.transpose(-1, -2) * head_width**-0.5).masked_fill(later, float("-inf"))
    plain = scores.softmax(-1) @ values
    want = (plain, *torch.autograd.grad(plain, wide, up.float().transpose(1, 2)))
    errors = [(a.transpose(1, 2) - b.detach()).norm() / b.detach().norm() for a, b in zip(got, want)]
    return float(torch.stack(errors).max())  # not a number if one of them is not


@functools.lru_cache
def _package() -> Any:
    import flash_attn.cute.interface as package  # type: ignore[import-not-found,unused-ignore]

    return package


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
