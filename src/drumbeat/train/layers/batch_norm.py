"""Batch norm with its ReLU, and with the residual sum that ends a block, in as few passes over memory as possible.

On a GPU with Triton and in training mode they are kernels of our own (kernels/batch_norm.py); anywhere else, and inside
torch.compile, which fuses them itself, plain torch.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drumbeat.train.kernels import kernels_for

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_SMALLEST, _LARGEST = 16, 2048  # channels, powers of two


class Block(NamedTuple):
    """A block's output, three times the same tensor, so that the gradients of its uses arrive separately: they are added when
    they are used, which saves writing their sum and reading it again."""

    main: Tensor  # for the next block's first convolution
    projection: Tensor  # for the convolution of its shortcut, if it has one
    shortcut: Tensor  # for its sum


def block_of(x: Union[Tensor, Block]) -> Block:
    return x if isinstance(x, Block) else Block(x, x, x)


def norm_relu(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    if not fusable(norm, x):
        return F.relu(norm(x))
    return _NormRelu.apply(x, norm.weight, norm.bias, norm)  # type: ignore[no-any-return,no-untyped-call]


def norm_add_relu(
    norm: nn.BatchNorm2d, x: Tensor, shortcut: Tensor, shortcut_norm: Optional[nn.BatchNorm2d] = None
) -> Block:
    """Return relu(norm(x) + shortcut); the shortcut may have a norm of its own."""
    if not fusable(norm, x) or not (shortcut_norm is None or fusable(shortcut_norm, shortcut)):
        return block_of(F.relu(norm(x) + (shortcut if shortcut_norm is None else shortcut_norm(shortcut))))
    weight, bias = (None, None) if shortcut_norm is None else (shortcut_norm.weight, shortcut_norm.bias)
    return Block(*_NormAddRelu.apply(x, norm.weight, norm.bias, shortcut, weight, bias, norm, shortcut_norm))  # type: ignore[no-untyped-call]


def fusable(norm: nn.BatchNorm2d, x: Tensor) -> bool:
    """Return true if our kernels can compute this norm. They cannot if its parameters are DTensors, which FSDP has not gathered:
    the norm is then an FSDP unit of its own, and only calling it gathers them."""
    channels = x.shape[1]
    return (
        kernels_for(x)
        and isinstance(norm, nn.BatchNorm2d)  # not a pipeline stage that lacks it
        and not torch.compiler.is_compiling()
        and norm.training
        and norm.affine
        and norm.momentum is not None
        and not isinstance(norm.weight, DTensor)
        and _SMALLEST <= channels <= _LARGEST
        and not channels & (channels - 1)
    )


class _NormRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: nn.BatchNorm2d) -> Tensor:
        from drumbeat.train.kernels import batch_norm as kernel

        x = _channels_last(x)
        line = kernel.line_of(x, norm)
        ctx.save_for_backward(x, line)
        return kernel.norm_relu(x, line)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        from drumbeat.train.kernels import batch_norm as kernel

        x, line = ctx.saved_tensors
        return (*kernel.norm_relu_backward(_channels_last(grads[0]), x, line), None)


class _NormAddRelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        shortcut: Tensor,
        shortcut_weight: Optional[Tensor],
        shortcut_bias: Optional[Tensor],
        norm: nn.BatchNorm2d,
        shortcut_norm: Optional[nn.BatchNorm2d],
    ) -> Tuple[Tensor, Tensor, Tensor]:
        from drumbeat.train.kernels import batch_norm as kernel

        ctx.set_materialize_grads(False)  # most outputs are not used in all three ways
        x, shortcut = _channels_last(x), _channels_last(shortcut)
        line = kernel.line_of(x, norm)
        shortcut_line = None if shortcut_norm is None else kernel.line_of(shortcut, shortcut_norm)
        out, bits = kernel.norm_add_relu(x, line, shortcut, shortcut_line)
        # A shortcut without a norm passes its gradient on as it is: its values are not needed again.
        ctx.save_for_backward(x, line, bits, None if shortcut_norm is None else shortcut, shortcut_line)
        return out, out.view_as(out), out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        from drumbeat.train.kernels import batch_norm as kernel

        x, line, bits, shortcut, shortcut_line = ctx.saved_tensors
        used: List[Tensor] = [_channels_last(grad) for grad in grads if grad is not None]
        found = kernel.norm_add_relu_backward(used, bits, x, line, x if shortcut is None else shortcut, shortcut_line)
        return (*found, None, None)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


_POOLED = 256  # channels that one program of the pooling kernel holds


def norm_relu_pool(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """Return max_pool(relu(norm(x))), the end of a ResNet's stem: 3 x 3 windows, stride 2, padding 1."""
    if not fusable(norm, x) or x.shape[1] > _POOLED:
        return F.max_pool2d(F.relu(norm(x)), 3, stride=2, padding=1)
    return _NormReluPool.apply(x, norm.weight, norm.bias, norm)  # type: ignore[no-any-return,no-untyped-call]


class _NormReluPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: nn.BatchNorm2d) -> Tensor:
        from drumbeat.train.kernels import batch_norm as kernel

        x = x.contiguous(memory_format=torch.channels_last)
        line = kernel.line_of(x, norm)
        pooled, chosen = kernel.norm_relu_pool(x, line[2], line[3])
        ctx.save_for_backward(x, line, chosen)
        return pooled

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        from drumbeat.train.kernels import batch_norm as kernel

        x, line, chosen = ctx.saved_tensors
        d_pooled = grads[0].contiguous(memory_format=torch.channels_last)
        mean, rstd, gain, offset = line.unbind()
        return (*kernel.norm_relu_pool_backward(x, gain, offset, mean, rstd, d_pooled, chosen), None)
