"""Run with TRITON_INTERPRET=1: our batch norm kernels on a CPU, against plain torch in double precision.

Triton reads the variable when it is imported, so this needs a process of its own. Prints |ours - plain| / |plain| as JSON.
"""

from __future__ import annotations

import json
from typing import Any, Dict, List, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drumbeat.train.layers import batch_norm as layer
from drumbeat.train.models import resnet

Distances = Dict[str, float]


def far(got: Any, want: Any) -> float:
    return float(
        (got.detach().double() - want.detach().double()).norm() / want.detach().double().norm().clamp(min=1e-30)
    )


def norms(channels: int) -> Tuple[nn.BatchNorm2d, nn.BatchNorm2d]:
    ours = nn.BatchNorm2d(channels)
    with torch.no_grad():
        ours.weight.uniform_(0.5, 1.5)
        ours.bias.uniform_(-0.5, 0.5)
    plain = nn.BatchNorm2d(channels).double()
    plain.load_state_dict(ours.state_dict())
    return ours, plain


def image(channels: int, *shape: int, shift: float = 0.0) -> Tensor:
    made = (torch.randn(shape[0], channels, *shape[1:]) + shift).contiguous(memory_format=torch.channels_last)
    return made.requires_grad_()


def norm_relu(channels: int, *shape: int, shift: float = 0.0) -> Distances:
    ours, plain = norms(channels)
    x = image(channels, *shape, shift=shift)
    wide = x.detach().double().requires_grad_()
    up = torch.randn_like(x)
    got, want = layer.norm_relu(ours, x), F.relu(plain(wide))
    got_grads = torch.autograd.grad((got * up).sum(), (x, ours.weight, ours.bias))
    want_grads = torch.autograd.grad((want * up).sum(), (wide, plain.weight, plain.bias))
    found = {"out": far(got, want), "mean": far(ours.running_mean, plain.running_mean)}
    found["variance"] = far(ours.running_var, plain.running_var)
    found["batches"] = abs(float(ours.num_batches_tracked) - 1)  # type: ignore[arg-type]
    found["not channels last"] = float(not got.is_contiguous(memory_format=torch.channels_last))
    return {**found, **{f"d {name}": far(a, b) for name, a, b in zip(("x", "weight", "bias"), got_grads, want_grads)}}


def norm_add_relu(projected: bool, uses: int) -> Distances:
    """The sum is used in one to three ways, whose gradients arrive apart."""
    (ours, plain), (more, plain_more) = norms(64), norms(64)
    x, shortcut = image(64, 3, 7, 5), image(64, 3, 7, 5)
    wide, wide_shortcut = (t.detach().double().requires_grad_() for t in (x, shortcut))
    ups = [torch.randn_like(x) for _ in range(uses)]
    block = layer.norm_add_relu(ours, x, shortcut, more if projected else None)
    want = F.relu(plain(wide) + (plain_more(wide_shortcut) if projected else wide_shortcut))
    got_of, want_of = [x, shortcut, *ours.parameters()], [wide, wide_shortcut, *plain.parameters()]
    if projected:
        got_of, want_of = [*got_of, *more.parameters()], [*want_of, *plain_more.parameters()]
    got_grads = torch.autograd.grad(torch.stack([(use * up).sum() for use, up in zip(block, ups)]).sum(), got_of)
    want_grads = torch.autograd.grad((want * torch.stack(ups).sum(0)).sum(), want_of)
    found = {"out": far(block.main, want), "shortcut": far(block.shortcut, want)}
    return {**found, **{f"d {i}": far(a, b) for i, (a, b) in enumerate(zip(got_grads, want_grads))}}


def blocks_of_a_resnet() -> Distances:
    """Three blocks, two of which have a projection, so that all ways of a gradient meet."""

    def build() -> nn.Sequential:
        made: List[nn.Module] = []
        for inputs, stride in ((16, 1), (64, 1), (64, 2)):
            shortcut = nn.Sequential(resnet.convolution(inputs, 64, 1, stride), nn.BatchNorm2d(64))
            made.append(resnet.Bottleneck(inputs, 16, stride, shortcut if (inputs, stride) != (64, 1) else None))
        return nn.Sequential(*made)

    plain, fused = build().double(), build()
    fused.load_state_dict(plain.state_dict())
    images = torch.randn(4, 16, 8, 8)
    fused(images).main.square().sum().backward()
    fuse(False)
    plain(images.double()).main.square().sum().backward()
    fuse(True)
    grads = [far(a.grad, b.grad) for a, b in zip(fused.parameters(), plain.parameters())]
    return {"gradients": max(grads), "buffers": max(far(a, b) for a, b in zip(fused.buffers(), plain.buffers()))}


def fuse(wanted: bool) -> None:
    layer.fusable = resnet.fusable = lambda norm, x: wanted  # type: ignore[attr-defined]


if __name__ == "__main__":
    torch.manual_seed(0)
    fuse(True)
    print(
        json.dumps(
            {
                "mean far from zero": norm_relu(16, 2, 9, 9, shift=40.0),
                "2048 channels": norm_relu(2048, 3, 2, 1, shift=-3.0),
                "two uses": norm_add_relu(False, 2),
                "projected, three uses": norm_add_relu(True, 3),
                "blocks": blocks_of_a_resnet(),
            }
        )
    )
