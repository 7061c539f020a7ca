"""Context parallelism: each rank holds a part of every sequence. Only attention looks across parts, in one of two ways.

Ulysses: ranks exchange parts of the sequence for parts of the heads, so each attends over the whole sequence with some
of the heads, and back. Four all-to-alls per layer; the heads must divide by the number of ranks.
Ring: keys and values go round the ranks (ring.py). As many rounds as ranks; any number of heads.
"""

from __future__ import annotations

from typing import Any, Callable, Tuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from drumbeat.train.layers.attention import causal_attention
from drumbeat.train.parallel.meshes import GROUPS, name_of
from drumbeat.train.parallel.ring import Ring, zigzag
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
            raise Refusal(f"context={self.kind} over {ranks} ranks: {length} tokens do not divide into {pieces} pieces")
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
        """(batch, time / n, heads, width) -> (batch, time, heads / n, width)"""
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
