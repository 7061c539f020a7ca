"""Linear layers whose three products run in 8-bit floating point: `torch._scaled_mm`, one dynamic scale per tensor.

Weights and inputs are e4m3, gradients e5m2 (more range, less precision). The hardware multiplies only row-major by
column-major 8-bit matrices, and training needs each operand both ways round, so one kernel writes a matrix and its
transpose in one pass (kernels/transformer.py). A gated feed-forward is one function: silu(gate) * up and its gradient, the
largest matrices of a block, are written in 8 bits by the kernel that computes them and never exist in 16.
Backward products add in fp32. Hopper's fast sums have about 14 bits and cut off the rest: where numbers have a common part,
sums of 65,536 products came out 19 % short, of 8,192 1.6 %. The forward pass adds fast: that changed the loss of a trained
1B model by 0.01 %.
What stays in bf16: embedding, norms, attention, and the targets' part of the head's gradient (layers/cross_entropy.py).
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drumbeat.train.kernels import kernels_for
from drumbeat.train.layers.feed_forward import GatedMLP, gate_gradient, gate_product

Kinds = Tuple[torch.dtype, torch.dtype]  # of weights and inputs, of gradients
OCP: Kinds = (torch.float8_e4m3fn, torch.float8_e5m2)
FNUZ: Kinds = (
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)  # without infinities and a negative zero: half the largest e4m3
# AMD's generations; MI300X and MI325X multiply another kind than MI350X and NVIDIA. Chosen by name, measured on none of them.
_AMD = {"gfx942": FNUZ, "gfx950": OCP}
Quantized = Tuple[Tensor, Tensor, Tensor]  # in 8 bits, that transposed, and the factor that turns either back


def supported(device: torch.device) -> Optional[str]:
    """Return the reason why this device cannot compute in fp8; None if it can."""
    if device.type != "cuda":
        return f"fp8 products need a GPU; this is {device.type}"
    if torch.version.hip is not None:
        arch = _arch(device)
        return None if arch in _AMD else f"{arch} has no fp8 matrix products ({', '.join(_AMD)} have)"
    if torch.cuda.get_device_capability(device) < (8, 9):
        return f"{torch.cuda.get_device_name(device)} has no fp8 units (compute capability 8.9 and newer have)"
    return None


def kinds(device: torch.device) -> Kinds:
    """Return the 8-bit types that the device multiplies."""
    return OCP if device.type != "cuda" or torch.version.hip is None else _AMD.get(_arch(device), OCP)


def has_kernels(x: Tensor) -> bool:
    """Return true if our cast kernels run here: they contain NVIDIA assembly; elsewhere plain arithmetic does the same."""
    return kernels_for(x) and torch.version.hip is None


def _arch(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]


_MARK = "in_8_bits"
_ODDS_SCALE = 2.0**15  # probabilities times this are at most half of what e5m2 holds, and exact down to 2e-9


def mark(head: nn.Module) -> None:
    """Have a last layer computed in 8 bits where it is trained and its loss is `linear_cross_entropy`."""
    setattr(head, _MARK, True)


def is_marked(head: nn.Module) -> bool:
    return getattr(head, _MARK, False)


def odds(logits: Tensor, targets: Tensor, ignore: int) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return each row's loss, and the gradient by its logits in two parts: at the target (rows, 1), and everywhere else as
    e5m2, that transposed, and the factor that turns either back. Both parts are 0 where the target is `ignore`."""
    dtype = kinds(logits.device)[1]
    back = torch.full((), 1 / _ODDS_SCALE, device=logits.device)
    if has_kernels(logits):
        from drumbeat.train.kernels.transformer import cast_odds

        return (*cast_odds(logits, targets, ignore, dtype, _ODDS_SCALE), back)
    valid = (targets != ignore)[:, None]
    at = targets.clamp(min=0)[:, None]
    log_odds = logits.float().log_softmax(dim=-1)
    at_target = log_odds.gather(1, at)
    others = log_odds.exp().scatter_(1, at, 0.0) * valid * _ODDS_SCALE
    straight = others.to(dtype)
    return -(at_target * valid)[:, 0], at_target.expm1() * valid, straight, straight.t().contiguous(), back


@torch.library.custom_op("drumbeat::quantize", mutates_args=())
def quantize(x: Tensor, wide_range: bool) -> Quantized:
    """Quantize x (rows, columns) to e4m3, or to e5m2 if `wide_range`."""
    dtype = kinds(x.device)[wide_range]
    if has_kernels(x):
        from drumbeat.train.kernels.transformer import cast_both

        return cast_both(x, dtype)
    return _plain(x.float(), dtype)


@torch.library.custom_op("drumbeat::quantize_gate", mutates_args=())
def quantize_gate(pairs: Tensor, part: int) -> Quantized:
    """Quantize silu(gate) * up of (rows, groups x (gate, up) x part) to e4m3."""
    if has_kernels(pairs):
        from drumbeat.train.kernels.transformer import cast_gate

        return cast_gate(pairs, part, kinds(pairs.device)[0])
    return _plain(gate_product(pairs.float(), part), kinds(pairs.device)[0])


@torch.library.custom_op("drumbeat::quantize_gate_gradient", mutates_args=())
def quantize_gate_gradient(pairs: Tensor, d_out: Tensor, part: int) -> Quantized:
    """Quantize the gradient of silu(gate) * up by gates and ups to e5m2."""
    if has_kernels(pairs):
        from drumbeat.train.kernels.transformer import cast_gate_gradient

        return cast_gate_gradient(pairs, d_out, part, kinds(pairs.device)[1])
    return _plain(gate_gradient(pairs.float(), d_out.float(), part), kinds(pairs.device)[1])


def _plain(x: Tensor, dtype: torch.dtype) -> Quantized:
    """Quantize in plain arithmetic, with the exact scale."""
    top = torch.finfo(dtype).max
    peak = x.abs().amax().clamp(min=1e-12)
    straight = (x * (top / peak)).clamp(-top, top).to(dtype)
    return straight, straight.t().contiguous(), peak / top


def _shapes(like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Quantized:
    straight, turned = like.new_empty((rows, columns), dtype=dtype), like.new_empty((columns, rows), dtype=dtype)
    return straight, turned, like.new_empty((), dtype=torch.float32)


@quantize.register_fake
def _(x: Tensor, wide_range: bool) -> Quantized:
    return _shapes(x, x.shape[0], x.shape[1], kinds(x.device)[wide_range])


@quantize_gate.register_fake
def _(pairs: Tensor, part: int) -> Quantized:
    return _shapes(pairs, pairs.shape[0], pairs.shape[1] // 2, kinds(pairs.device)[0])


@quantize_gate_gradient.register_fake
def _(pairs: Tensor, d_out: Tensor, part: int) -> Quantized:
    return _shapes(pairs, pairs.shape[0], pairs.shape[1], kinds(pairs.device)[1])


def product(
    a: Tensor, b_turned: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool,
    bias: Optional[Tensor] = None,
) -> Tensor:  # fmt: skip
    """Multiply in fp8. `fast`: sums of about 14 bits."""
    return torch._scaled_mm(
        a, b_turned.t(), bias=bias, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast
    )


class _Float8Product(torch.autograd.Function):
    """Compute x @ weight.T in fp8; x is two-dimensional."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, x8_turned, x_scale = quantize(x, False)
        w8, w8_turned, w_scale = quantize(weight, False)
        ctx.save_for_backward(x8_turned, x_scale, w8_turned, w_scale)
        return product(x8, w8, x_scale, w_scale, x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tuple[Tensor, Tensor]:
        x8_turned, x_scale, w8_turned, w_scale = ctx.saved_tensors
        g8, g8_turned, g_scale = quantize(grads[0].contiguous(), True)
        d_x = product(g8, w8_turned, g_scale, w_scale, grads[0].dtype, fast=False)
        d_weight = product(g8_turned, x8_turned, g_scale, x_scale, grads[0].dtype, fast=False)
        return d_x, d_weight


class Float8Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = _Float8Product.apply(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


class _Float8MLP(torch.autograd.Function):
    """Compute down(swiglu(gate_up(x))) in fp8; x is two-dimensional."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, part: int) -> Tensor:
        x8, x8_turned, x_scale = quantize(x, False)
        g8, g8_turned, g_scale = quantize(gate_up, False)
        pairs = product(x8, g8, x_scale, g_scale, x.dtype, fast=True)
        a8, a8_turned, a_scale = quantize_gate(pairs, part)
        d8, d8_turned, d_scale = quantize(down, False)
        ctx.save_for_backward(x8_turned, x_scale, g8_turned, g_scale, pairs, a8_turned, a_scale, d8_turned, d_scale)
        ctx.part = part
        return product(a8, d8, a_scale, d_scale, x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tuple[Tensor, Tensor, Tensor, None]:
        x8_turned, x_scale, g8_turned, g_scale, pairs, a8_turned, a_scale, d8_turned, d_scale = ctx.saved_tensors
        dtype = grads[0].dtype
        y8, y8_turned, y_scale = quantize(grads[0].contiguous(), True)
        d_down = product(y8_turned, a8_turned, y_scale, a_scale, dtype, fast=False)
        d_gated = product(y8, d8_turned, y_scale, d_scale, dtype, fast=False)
        p8, p8_turned, p_scale = quantize_gate_gradient(pairs, d_gated, ctx.part)
        d_gate_up = product(p8_turned, x8_turned, p_scale, x_scale, dtype, fast=False)
        return product(p8, g8_turned, p_scale, g_scale, dtype, fast=False), d_gate_up, d_down, None


class Float8GatedMLP(GatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        y = _Float8MLP.apply(x.flatten(0, -2), self.gate_up.weight, self.down.weight, self.part)
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


def fuse_mlps(model: nn.Module) -> None:
    """Fuse each gated feed-forward whose layers are fp8 into one function. It reads the layers' weights directly, so it must not
    be used if weights are gathered layer by layer (FSDP without named blocks)."""
    for module in model.modules():
        if type(module) is GatedMLP and type(module.gate_up) is type(module.down) is Float8Linear:
            module.__class__ = Float8GatedMLP


def reference_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return what the forward product should give, in plain arithmetic: the check of the kernels on a new device."""
    x8, _, x_scale = quantize(x, False)
    w8, _, w_scale = quantize(weight, False)
    return F.linear(x8.float() * x_scale, w8.float() * w_scale)
