"""Context parallelism after Ulysses: each rank holds a part of every sequence; for attention, ranks exchange parts of
the sequence for parts of the heads, so each attends over the whole sequence with some of the heads, and back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh

from drumbeat.train.attention import causal_attention
from drumbeat.train.refusal import Refusal


def apply_context(model: nn.Module, mesh: DeviceMesh, heads: int, kv_heads: int) -> None:
    """Let every attention layer (a module with an `attend` attribute) attend across the ranks of `mesh`."""
    if kv_heads % mesh.size() or heads % mesh.size():
        raise Refusal(
            f"context parallelism {mesh.size()}: {heads} heads and {kv_heads} key-value heads do not divide by it",
            "each rank takes whole heads: choose a degree that divides both",
        )
    for module in model.modules():
        if hasattr(module, "attend"):
            module.attend = Ulysses(mesh)  # type: ignore[assignment]


class Ulysses:
    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.size = mesh.get_group(), mesh.size()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = causal_attention(*(self._gather_time(x) for x in (q, k, v)))
        return self._gather_heads(y)

    def _gather_time(self, x: Tensor) -> Tensor:
        """(batch, time / n, heads, width) -> (batch, time, heads / n, width)"""
        parts = torch.stack(x.chunk(self.size, dim=2))
        return torch.cat(self._exchange(parts).unbind(0), dim=1)

    def _gather_heads(self, x: Tensor) -> Tensor:
        parts = torch.stack(x.chunk(self.size, dim=1))
        return torch.cat(self._exchange(parts).unbind(0), dim=2)

    def _exchange(self, parts: Tensor) -> Tensor:
        even = [1] * self.size
        flat: Any = all_to_all_single_autograd(parts.flatten(1), even, even, self.group)
        return torch.ops._c10d_functional.wait_tensor(flat).view_as(parts) if _waits(flat) else flat.view_as(parts)


def _waits(x: Any) -> bool:
    return isinstance(x, torch.distributed._functional_collectives.AsyncCollectiveTensor)


def time_slice(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's part of (batch, time, ...)."""
    if x.shape[1] % mesh.size():
        raise Refusal(f"context parallelism {mesh.size()} does not divide a sequence of {x.shape[1]}")
    return x.chunk(mesh.size(), dim=1)[mesh.get_local_rank()]


def positions(length: int, mesh: DeviceMesh, device: torch.device) -> Tensor:
    own = length // mesh.size()
    return torch.arange(mesh.get_local_rank() * own, (mesh.get_local_rank() + 1) * own, device=device)
