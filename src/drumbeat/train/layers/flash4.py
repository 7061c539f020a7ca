"""Causal attention by FlashAttention 4 (the package flash-attn-4, which is optional), as operations that torch.compile takes
as they are.

On an H200 at head width 64 it takes 12 % less time and energy than cuDNN's forward and 17 % less backward, and its backward
pass can add in a fixed order for 5 % (measured/gpu.md). The package is young and its inner functions may change. So
before a kind of attention is used for the first time it is tried on a few numbers and compared with plain attention; where
that fails, cuDNN's takes its place.
"""

from __future__ import annotations

import functools
import importlib.metadata
import threading
from typing import Any, List, Tuple

import torch
from torch import Tensor

from drumbeat.base.problem import pip_install

PACKAGE = "flash-attn-4"
WIDTHS = (64, 128)  # of a head: those that were measured
SHORTEST = 384  # tokens of a sequence: those of the trial
_ERROR = 0.02  # most that a result in bf16 may be off, of its norm; 0.002 to 0.003 is usual


@torch.library.custom_op("drumbeat::flash4", mutates_args=())
def flash4(q: Tensor, k: Tensor, v: Tensor) -> Tuple[Tensor, Tensor]:
    """Tensors (batch, time, heads, head width); the result, and the log-sum-exp (batch, heads, time)."""
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
