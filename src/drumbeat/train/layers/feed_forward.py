"""Gated feed-forwards, of a block and of experts.

silu(gate) * up for a matrix whose columns are (gate, up) by parts is one operation: see kernels/transformer.py.

Of experts, a router gives each token to a few of many, and none of the tokens is dropped. Tokens are sorted by expert, so that
the products of all experts are one grouped product. Where experts lie on several ranks, the tokens travel there and back
(parallel/parallelize.py).
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drumbeat.train.kernels import kernels_for


class GatedMLP(nn.Module):
    """The feed-forward part of a block: width -> (gate, up) -> width. `groups`: how often gate and up take turns."""

    def __init__(self, width: int, inner: int, groups: int) -> None:
        super().__init__()
        self.part = inner // groups
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x), self.part))  # type: ignore[no-any-return]


def swiglu(pairs: Tensor, part: int) -> Tensor:
    """(..., groups x (gate, up) x part) -> (..., groups x part)"""
    if kernels_for(pairs) and part % 128 == 0:
        return gate_forward(pairs.contiguous(), part)
    return gate_product(pairs, part)


def gate_product(pairs: Tensor, part: int) -> Tensor:
    """Compute the product in plain torch."""
    gate, up = _apart(pairs, part)
    return (F.silu(gate) * up).flatten(-2)


def gate_gradient(pairs: Tensor, d_out: Tensor, part: int) -> Tensor:
    """Compute the gradient by gates and ups in plain torch."""
    gate, up = _apart(pairs, part)
    grad, sigmoid = d_out.unflatten(-1, (-1, part)), torch.sigmoid(gate)
    d_gate, d_up = grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid
    return torch.stack((d_gate, d_up), dim=-2).flatten(-3)


@torch.library.custom_op("drumbeat::gate_forward", mutates_args=())
def gate_forward(pairs: Tensor, part: int) -> Tensor:
    if kernels_for(pairs):
        from drumbeat.train.kernels import transformer as kernel

        return kernel.swiglu(pairs, part)
    return gate_product(pairs.float(), part).to(pairs.dtype)


@torch.library.custom_op("drumbeat::gate_backward", mutates_args=())
def gate_backward(pairs: Tensor, d_out: Tensor, part: int) -> Tensor:
    if kernels_for(pairs):
        from drumbeat.train.kernels import transformer as kernel

        return kernel.swiglu_backward(pairs, d_out, part)
    return gate_gradient(pairs.float(), d_out.float(), part).to(pairs.dtype)


def _apart(pairs: Tensor, part: int) -> Tuple[Tensor, Tensor]:
    gate, up = pairs.unflatten(-1, (-1, 2, part)).unbind(-2)
    return gate, up


@gate_forward.register_fake
def _(pairs: Tensor, part: int) -> Tensor:
    return pairs.new_empty((*pairs.shape[:-1], pairs.shape[-1] // 2))


@gate_backward.register_fake
def _(pairs: Tensor, d_out: Tensor, part: int) -> Tensor:
    return torch.empty_like(pairs)


def _keep(ctx: Any, inputs: Tuple[Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.part = inputs[1]


def _gradient(ctx: Any, d_out: Tensor) -> Tuple[Tensor, None]:
    return gate_backward(ctx.saved_tensors[0], d_out, ctx.part), None


gate_forward.register_autograd(_gradient, setup_context=_keep)


Group = Optional[dist.ProcessGroup]


class Experts(nn.Module):
    """Weights as transformers' models hold them: gate and up of all experts in one tensor, down in another."""

    def __init__(self, width: int, inner: int, count: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(count, width, inner))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return mix(self, None, x, index, weights)

    def _apply_gate(self, pairs: Tensor) -> Tensor:
        return swiglu(pairs, pairs.shape[-1] // 2)


class Router(nn.Linear):
    """Scores of a token for each expert; a class of its own, so that it is never computed in 8 bits."""


class Mixture(nn.Module):
    """The feed-forward part of a block with experts: its result, and how unevenly it has used them."""

    def __init__(self, width: int, inner: int, count: int, top: int) -> None:
        super().__init__()
        self.top = top
        self.router = Router(width, count, bias=False)
        self.experts = Experts(width, inner, count)
        self.sequence: Sequence[
            Tuple[dist.ProcessGroup, bool]
        ] = ()  # ranks with the rest of the sequences, and whether
        # their losses are one (tensor parallelism) or add up (context parallelism)

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        odds = self.router(x).float().softmax(-1)
        weights, index = odds.topk(self.top, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        y = self.experts(x.flatten(0, 1), index.flatten(0, 1), weights.flatten(0, 1))
        return y.view_as(x), self.unevenness(odds, index)

    def unevenness(self, odds: Tensor, index: Tensor) -> Tensor:
        """Sum the unevenness over all tokens: 1 per token if a sequence uses all experts alike, up to the number of experts if it
        uses only one.

        It is computed within each sequence, so that neither ranks nor micro-batches change it.
        """
        count, tokens = odds.shape[-1], index.shape[1] * self.top
        chosen = F.one_hot(index.flatten(1), count).sum(1).float()
        for group, _ in self.sequence:
            dist.all_reduce(chosen, group=group)
            tokens *= dist.get_world_size(group)
        total = count * (chosen / tokens * odds.sum(1)).sum()
        for group, one_loss in self.sequence:
            total = _Sum.apply(total, group) if one_loss else total
        return total


@torch.compiler.disable  # type: ignore[untyped-decorator]
def mix(experts: Any, group: Group, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the chosen experts' results for each token. x: (tokens, width); index, weights: (tokens,
    chosen).

    `group`: the ranks between which the experts are divided, in their order.
    """
    gate_up, down = (_own(weight).to(x.dtype) for weight in (experts.gate_up_proj, experts.down_proj))
    order = index.flatten().argsort(stable=True)
    rows = x.repeat_interleave(index.shape[1], 0)[order]
    ranks = 1 if group is None else dist.get_world_size(group)
    counts = torch.bincount(index.flatten(), minlength=ranks * len(gate_up)).view(ranks, -1)
    there, places = counts, torch.empty(0)
    if group is not None:
        there = torch.empty_like(counts)
        dist.all_to_all_single(there, counts, group=group)
        ways: Tuple[List[int], List[int]] = (counts.sum(1).tolist(), there.sum(1).tolist())
        rows = _Exchange.apply(rows, *ways, group)
        # Rows arrive rank by rank, and by expert within each rank.
        experts_of = torch.arange(len(gate_up), device=x.device).repeat(ranks).repeat_interleave(there.flatten())
        places = experts_of.argsort(stable=True)
        rows = rows[places]
    done = grouped_product(experts._apply_gate(grouped_product(rows, gate_up, there.sum(0))), down, there.sum(0))
    if group is not None:
        done = _Exchange.apply(done[places.argsort()], ways[1], ways[0], group)
    return (done[order.argsort()].view(*index.shape, -1) * weights[..., None]).sum(1).to(x.dtype)


def grouped_product(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply each weight (out, in) by its own `counts` rows of x; the rows of one weight are consecutive."""
    if x.is_cuda and x.dtype is torch.bfloat16 and hasattr(F, "grouped_mm"):
        return F.grouped_mm(x, weights.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    return torch.cat([F.linear(rows, weight) for rows, weight in zip(x.split(counts.tolist()), weights)])


class _Exchange(torch.autograd.Function):
    """Exchange rows between the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: List[int], received: List[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way = sent, received, group
        out = x.new_empty((sum(received), x.shape[1]))
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tuple[Tensor, None, None, None]:
        sent, received, group = ctx.way
        return _Exchange.apply(grads[0], received, sent, group), None, None, None  # type: ignore[return-value]


class _Sum(torch.autograd.Function):
    """Sum over ranks that all continue with the sum: each rank's gradient is the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tuple[Tensor, None]:
        return grads[0], None


def _own(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight
