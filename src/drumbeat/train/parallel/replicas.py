"""Gradients of replicas that no wrapper exchanges. A pipeline's schedule runs the backward pass in pieces, round the
hooks on which DDP and FSDP rely, so its replicas add their gradients once, after the whole schedule."""

from __future__ import annotations

from typing import Dict, List, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_BUCKET_BYTES = 64 << 20  # large enough for the network's full rate, small beside a stage's gradients


def add_gradients(parameters: Sequence[Tensor], mesh: DeviceMesh) -> None:
    """Every gradient becomes the sum over the ranks of `mesh`."""
    for bucket in buckets([p.grad for p in parameters if p.grad is not None]):
        flat = torch.cat([x.flatten() for x in bucket])
        dist.all_reduce(flat, group=mesh.get_group())
        for part, x in zip(flat.split([x.numel() for x in bucket]), bucket):
            x.copy_(part.view_as(x))


def buckets(gradients: Sequence[Tensor]) -> List[List[Tensor]]:
    """Of one dtype each, in the same order on every rank. Tensor parallelism: each rank its own slices."""
    full: List[List[Tensor]] = []
    filling: Dict[torch.dtype, List[Tensor]] = {}
    for gradient in gradients:
        x = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        bucket = filling.setdefault(x.dtype, [])
        bucket.append(x)
        if sum(y.numel() * y.element_size() for y in bucket) >= _BUCKET_BYTES:
            full.append(filling.pop(x.dtype))
    return full + list(filling.values())
