"""Ring attention: each rank keeps its queries, keys and values go round. Exact: partial results are merged by their
log-sum-exp, and in the backward pass the gradients of a block of keys and values travel round with that block.

The sequence lies in zigzag order: cut into 2 n pieces, rank r holds pieces r and 2 n - 1 - r. An early piece has little
to attend to and a late one much, so each rank has the same work in every round: causal attention over its own two
pieces, then either all its queries over one early piece, or its late queries over both pieces of a later rank.
"""

from __future__ import annotations

from typing import Any, List, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from drumbeat.train.layers.block_attention import block_attention, block_attention_backward
from drumbeat.train.parallel.meshes import GROUPS, name_of


def zigzag(length: int, rank: int, ranks: int) -> Tensor:
    """Return the places of a sequence that a rank holds, in its order."""
    early, late = torch.arange(length).view(2 * ranks, -1)[[rank, 2 * ranks - 1 - rank]]
    return torch.cat((early, late))


class Ring:
    """Causal attention over the ranks of a group; takes and gives (batch, own time, heads, width)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group_name = name_of(group)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return ring_attention(q, k, v, self.group_name)[0].transpose(1, 2)


def _round(number: int, rank: int, ranks: int, half: int) -> Tuple[slice, slice, bool]:
    """Return which queries meet which keys in a round, and whether causally."""
    if number == 0:
        return slice(None), slice(None), True
    if number <= rank:  # keys of an earlier rank: their late piece is later than all our queries
        return slice(None), slice(0, half), False
    return slice(half, None), slice(None), False


# An operator of its own: the compiler takes it as one node, and selective recomputation can keep its result.
@torch.library.custom_op("drumbeat::ring_attention", mutates_args=())
def ring_attention(q: Tensor, k: Tensor, v: Tensor, group_name: str) -> Tuple[Tensor, Tensor]:
    """q, k, v (batch, heads, own time, width) -> the result and its log-sum-exp (batch, heads, own time)."""
    group = GROUPS[group_name]
    rank, ranks, half = group.rank(), group.size(), q.shape[2] // 2
    held = torch.stack((k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    total, weight = torch.empty_like(q, dtype=wide), q.new_empty(q.shape[:3], dtype=wide)
    for number in range(ranks):
        coming = _Passing(held, group, tag=0) if number < ranks - 1 else None
        rows, columns, causal = _round(number, rank, ranks, half)
        part, lse = block_attention(q[:, :, rows], held[0, :, :, columns], held[1, :, :, columns], causal)
        if number == 0:
            total.copy_(part)
            weight.copy_(lse)
        else:
            both = torch.logaddexp(weight[:, :, rows], lse)
            keep, add = (weight[:, :, rows] - both).exp()[..., None], (lse - both).exp()[..., None]
            total[:, :, rows] = total[:, :, rows] * keep + part * add
            weight[:, :, rows] = both
        if coming is not None:
            held = coming.wait()
    return total.to(q.dtype), weight


@torch.library.custom_op("drumbeat::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, weight: Tensor, group_name: str
) -> Tuple[Tensor, Tensor]:
    """The gradients of q, and of k and v as one tensor. With the log-sum-exp of the whole row, each block's share of them
    is exact by itself."""
    group = GROUPS[group_name]
    rank, ranks, half = group.rank(), group.size(), q.shape[2] // 2
    held = torch.stack((k, v))
    d_q = torch.zeros_like(q, dtype=weight.dtype)
    going = None
    for number in range(ranks):
        coming = _Passing(held, group, tag=0) if number < ranks - 1 else None
        rows, columns, causal = _round(number, rank, ranks, half)
        d_own, own_q, own_out, own_weight = (x[:, :, rows] for x in (d_out, q, out, weight))
        its_k, its_v = held[0, :, :, columns], held[1, :, :, columns]
        d_rows, d_k, d_v = block_attention_backward(d_own, own_q, its_k, its_v, own_out, own_weight, causal)
        d_q[:, :, rows] += d_rows
        # What earlier ranks found for this block arrives only now, when ours is ready: it was under way meanwhile.
        d_held = going.wait() if going is not None else torch.zeros_like(held, dtype=weight.dtype)
        d_held[0, :, :, columns] += d_k
        d_held[1, :, :, columns] += d_v
        going = _Passing(d_held, group, tag=1)
        if coming is not None:
            held = coming.wait()
    assert going is not None
    return d_q.to(q.dtype), going.wait().to(k.dtype)  # the last pass brings our own block home


class _Passing:
    """A tensor on its way to the next rank, and the previous rank's on its way here."""

    def __init__(self, x: Tensor, group: dist.ProcessGroup, tag: int) -> None:
        self.sent, self.received = x, torch.empty_like(x)
        ahead, behind = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
        self.works: List[Any] = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, group=group, group_peer=ahead, tag=tag),
                dist.P2POp(dist.irecv, self.received, group=group, group_peer=behind, tag=tag),
            ]
        )

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


@ring_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, group_name: str) -> Tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=wide)


@ring_attention_backward.register_fake
def _(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, weight: Tensor, group_name: str
) -> Tuple[Tensor, Tensor]:
    return torch.empty_like(q), k.new_empty((2, *k.shape))


def _keep(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.group_name = inputs
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, d_out: Tensor, _d_weight: Any) -> Tuple[Tensor, Tensor, Tensor, None]:
    d_q, (d_k, d_v) = ring_attention_backward(d_out, *ctx.saved_tensors, ctx.group_name)
    return d_q, d_k, d_v, None


ring_attention.register_autograd(_backward, setup_context=_keep)
RING_ATTENTION: Any = torch.ops.drumbeat.ring_attention.default
