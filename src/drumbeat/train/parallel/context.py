"""Context parallelism: each rank holds a part of every sequence. Only attention looks across parts, in one of two ways.

Ulysses: ranks exchange parts of the sequence for parts of the heads, so each attends over the whole sequence with some
of the heads, and back. Four all-to-alls per layer; the heads must divide by the number of ranks.
Ring: keys and values go round the ranks (below). As many rounds as ranks; any number of heads.
"""

from __future__ import annotations

from typing import Any, Callable, List, Tuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from drumbeat.train.layers.attention import block_attention, block_attention_backward, causal_attention
from drumbeat.train.parallel.meshes import GROUPS, name_of
from drumbeat.train.refusal import Refusal

KINDS = ("auto", "ulysses", "ring")


class Context:
    """Split of sequences of one length over the ranks of a mesh, and attention that sees them whole."""

    def __init__(self, mesh: DeviceMesh, kind: str, length: int, heads: int, kv_heads: int) -> None:
        """`heads` and `kv_heads`: those that one rank holds, after tensor parallelism."""
        ranks = mesh.size()
        divide = not (heads % ranks or kv_heads % ranks)
        counted = f"{heads} heads and {kv_heads} key-value heads {'' if divide else 'do not '}divide by {ranks}"
        if kind not in KINDS:
            raise Refusal(f"context '{kind}' is unknown", f"known: {', '.join(KINDS)}")
        if kind == "ulysses" and not divide:
            raise Refusal(f"context=ulysses: {counted}, and each rank takes whole heads", "use context=ring")
        self.kind = ("ulysses" if divide else "ring") if kind == "auto" else kind
        self.why = counted if kind == "auto" else "as asked"
        pieces = ranks if self.kind == "ulysses" else 2 * ranks
        if length % pieces:
            what = f"context={self.kind} over {ranks} ranks: {length} tokens do not divide into {pieces} pieces"
            raise Refusal(what, f"make sequences of a multiple of {pieces} tokens")
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor]
        if self.kind == "ulysses":
            places, self.attend = torch.arange(length).chunk(ranks)[mesh.get_local_rank()], Ulysses(mesh)
        else:
            places, self.attend = zigzag(length, mesh.get_local_rank(), ranks), Ring(mesh.get_group())
        self.places = places.to(mesh.device_type)  # there once, not sent in every step


class Ulysses:
    def __init__(self, mesh: DeviceMesh) -> None:
        self.group_name, self.size = name_of(mesh.get_group()), mesh.size()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = causal_attention(*(self._gather_time(x) for x in (q, k, v)))
        return self._gather_heads(y)

    def _gather_time(self, x: Tensor) -> Tensor:
        """Turn (batch, time / n, heads, width) into (batch, time, heads / n, width)."""
        parts = torch.stack(x.chunk(self.size, dim=2))
        return torch.cat(all_to_all(parts, self.group_name).unbind(0), dim=1)

    def _gather_heads(self, x: Tensor) -> Tensor:
        parts = torch.stack(x.chunk(self.size, dim=1))
        return torch.cat(all_to_all(parts, self.group_name).unbind(0), dim=2)


@torch.library.custom_op("drumbeat::all_to_all", mutates_args=())
def all_to_all(parts: Tensor, group_name: str) -> Tensor:
    """Send the i-th part to rank i, and return what the ranks have sent, in their order."""
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=GROUPS[group_name])
    return received


@all_to_all.register_fake
def _(parts: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(parts, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: Tuple[Tensor, str], output: Tensor) -> None:
    ctx.group_name = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None]:
    return all_to_all(grad, ctx.group_name), None


all_to_all.register_autograd(_backward, setup_context=_keep)


# Ring attention: each rank keeps its queries, keys and values go round. Exact: partial results are merged by their
# log-sum-exp, and in the backward pass the gradients of a block of keys and values travel round with that block.
# The sequence lies in zigzag order: cut into 2 n pieces, rank r holds pieces r and 2 n - 1 - r. An early piece has little
# to attend to and a late one much, so each rank has the same work in every round: causal attention over its own two
# pieces, then either all its queries over one early piece, or its late queries over both pieces of a later rank.


def zigzag(length: int, rank: int, ranks: int) -> Tensor:
    """Return the places of a sequence that a rank holds, in its order."""
    early, late = torch.arange(length).view(2 * ranks, -1)[[rank, 2 * ranks - 1 - rank]]
    return torch.cat((early, late))


class Ring:
    """Causal attention over the ranks of a group; takes and returns (batch, own time, heads, width)."""

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
    """Return the gradient of q, and those of k and v as one tensor. Since the log-sum-exp covers the whole row, each block's part
    of them is exact by itself."""
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
        # The sums of earlier ranks for this block arrive only now, when ours is ready: they were in transit meanwhile.
        d_held = going.wait() if going is not None else torch.zeros_like(held, dtype=weight.dtype)
        d_held[0, :, :, columns] += d_k
        d_held[1, :, :, columns] += d_v
        going = _Passing(d_held, group, tag=1)
        if coming is not None:
            held = coming.wait()
    assert going is not None
    return d_q.to(q.dtype), going.wait().to(k.dtype)  # the last pass brings our own block home


class _Passing:
    """A tensor being sent to the next rank, and the previous rank's being received."""

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


def _keep_for_ring(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.group_name = inputs
    ctx.save_for_backward(q, k, v, *output)


def _ring_backward(ctx: Any, d_out: Tensor, _d_weight: Any) -> Tuple[Tensor, Tensor, Tensor, None]:
    d_q, (d_k, d_v) = ring_attention_backward(d_out, *ctx.saved_tensors, ctx.group_name)
    return d_q, d_k, d_v, None


ring_attention.register_autograd(_ring_backward, setup_context=_keep_for_ring)
RING_ATTENTION: Any = torch.ops.drumbeat.ring_attention.default
