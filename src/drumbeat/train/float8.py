"""Linear layers whose three products run in 8-bit floating point: `torch._scaled_mm`, one dynamic scale a tensor.

Weights and inputs are e4m3, gradients e5m2 (more range, less precision). The hardware multiplies only row-major by
column-major 8-bit matrices, and training needs each operand both ways round, so one kernel writes a matrix and its
transpose in one pass: 2 bytes read, 2 written an element. A gated feed-forward is one function, because the kernel that
multiplies gates and ups knows the largest value of what it writes: nobody has to read those largest matrices to find it.
What is left in bf16: embedding, norms, attention, the head.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drumbeat.train.swiglu import GatedFeed, gate_backward, gate_forward

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def supported(device: torch.device) -> Optional[str]:
    """None, or the reason why this device cannot."""
    if device.type != "cuda":
        return f"fp8 products need a GPU; this is {device.type}"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 9):
        return f"{torch.cuda.get_device_name(device)} has no fp8 units (compute capability 8.9 and newer have)"
    return None


@torch.library.custom_op("drumbeat::quantize", mutates_args=())
def quantize(x: Tensor, wide_range: bool, peak: Optional[Tensor] = None) -> Tuple[Tensor, Tensor, Tensor]:
    """x (rows, columns) -> its fp8 form, that form transposed, and the factor that turns either back.

    `peak`: the largest absolute value of x, where it is known."""
    dtype = E5M2 if wide_range else E4M3
    top = torch.finfo(dtype).max
    if peak is None:
        peak = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)
    peak = peak.clamp(min=1e-12)
    scale, back = top / peak, peak / top
    if x.is_cuda:
        from drumbeat.train.kernels.cast import cast_both

        straight, turned = cast_both(x, scale, dtype)
    else:
        straight = (x.float() * scale).to(dtype)
        turned = straight.t().contiguous()
    return straight, turned, back


@quantize.register_fake
def _(x: Tensor, wide_range: bool, peak: Optional[Tensor] = None) -> Tuple[Tensor, Tensor, Tensor]:
    dtype = E5M2 if wide_range else E4M3
    rows, columns = x.shape
    return (
        x.new_empty((rows, columns), dtype=dtype),
        x.new_empty((columns, rows), dtype=dtype),
        x.new_empty((), dtype=torch.float32),
    )


def _product(a: Tensor, b_turned: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    return torch._scaled_mm(a, b_turned.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=True)


class _Float8Product(torch.autograd.Function):
    """x @ weight.T; x is two-dimensional."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, x8_turned, x_scale = quantize(x, False)
        w8, w8_turned, w_scale = quantize(weight, False)
        ctx.save_for_backward(x8_turned, x_scale, w8_turned, w_scale)
        return _product(x8, w8, x_scale, w_scale, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tuple[Tensor, Tensor]:
        x8_turned, x_scale, w8_turned, w_scale = ctx.saved_tensors
        g8, g8_turned, g_scale = quantize(grads[0].contiguous(), True)
        d_x = _product(g8, w8_turned, g_scale, w_scale, grads[0].dtype)
        d_weight = _product(g8_turned, x8_turned, g_scale, x_scale, grads[0].dtype)
        return d_x, d_weight


class Float8Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = _Float8Product.apply(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


class _Float8Feed(torch.autograd.Function):
    """down(swiglu(gate_up(x))); x is two-dimensional."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, part: int) -> Tensor:
        x8, x8_turned, x_scale = quantize(x, False)
        g8, g8_turned, g_scale = quantize(gate_up, False)
        pairs = _product(x8, g8, x_scale, g_scale, x.dtype)
        gated, peak = gate_forward(pairs, part, True)
        a8, a8_turned, a_scale = quantize(gated, False, peak)
        d8, d8_turned, d_scale = quantize(down, False)
        ctx.save_for_backward(x8_turned, x_scale, g8_turned, g_scale, pairs, a8_turned, a_scale, d8_turned, d_scale)
        ctx.part = part
        return _product(a8, d8, a_scale, d_scale, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tuple[Tensor, Tensor, Tensor, None]:
        x8_turned, x_scale, g8_turned, g_scale, pairs, a8_turned, a_scale, d8_turned, d_scale = ctx.saved_tensors
        dtype = grads[0].dtype
        y8, y8_turned, y_scale = quantize(grads[0].contiguous(), True)
        d_down = _product(y8_turned, a8_turned, y_scale, a_scale, dtype)
        d_gated = _product(y8, d8_turned, y_scale, d_scale, dtype)
        d_pairs, peak = gate_backward(pairs, d_gated, ctx.part, True)
        p8, p8_turned, p_scale = quantize(d_pairs, True, peak)
        d_gate_up = _product(p8_turned, x8_turned, p_scale, x_scale, dtype)
        return _product(p8, g8_turned, p_scale, g_scale, dtype), d_gate_up, d_down, None


class Float8GatedFeed(GatedFeed):
    def forward(self, x: Tensor) -> Tensor:
        y = _Float8Feed.apply(x.flatten(0, -2), self.gate_up.weight, self.down.weight, self.part)
        return y.unflatten(0, x.shape[:-1])  # type: ignore[no-any-return]


def convert_linears(model: nn.Module, wanted: Callable[[str, nn.Linear], bool]) -> int:
    """Turn the wanted linear layers of `model` into fp8 ones, in place; the hardware needs sizes divisible by 16."""
    count = 0
    for name, module in model.named_modules():
        if type(module) is nn.Linear and wanted(name, module):
            if module.in_features % 16 or module.out_features % 16:
                continue
            module.__class__ = Float8Linear
            count += 1
    return count


def join_feeds(model: nn.Module) -> None:
    """Gated feed-forwards whose layers are fp8 become one function. It takes the layers' weights as they are, so who
    gathers weights layer by layer (FSDP without named blocks) must not use it."""
    for module in model.modules():
        if type(module) is GatedFeed and type(module.gate_up) is type(module.down) is Float8Linear:
            module.__class__ = Float8GatedFeed


def reference_product(x: Tensor, weight: Tensor) -> Tensor:
    """What the forward product should give, in plain arithmetic: the check of the kernels on a new device."""
    x8, _, x_scale = quantize(x, False)
    w8, _, w_scale = quantize(weight, False)
    return F.linear(x8.float() * x_scale, w8.float() * w_scale)
