"""Gradients of replicas that no wrapper exchanges. A pipeline's schedule runs the backward pass in pieces, round the
hooks on which DDP and FSDP rely, so its replicas add their gradients once, after the whole schedule."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Dict, Iterator, List, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from drumbeat.train.checkpoint.state import named_buffers
from drumbeat.train.layers.batch_norm import BATCH_NORMS
from drumbeat.train.parallel.meshes import Meshes

_BUCKET_BYTES = 64 << 20  # large enough for the network's full rate, small beside a stage's gradients


def add_gradients(parameters: Sequence[Tensor], mesh: DeviceMesh) -> None:
    """Replace every gradient by the sum over the ranks of `mesh`."""
    for bucket in buckets([p.grad for p in parameters if p.grad is not None]):
        flat = torch.cat([x.flatten() for x in bucket])
        dist.all_reduce(flat, group=mesh.get_group())
        for part, x in zip(flat.split([x.numel() for x in bucket]), bucket):
            x.copy_(part.view_as(x))


def buckets(gradients: Sequence[Tensor]) -> List[List[Tensor]]:
    """Group gradients of one dtype, in the same order on every rank. Under tensor parallelism each rank groups its own slices."""
    full: List[List[Tensor]] = []
    filling: Dict[torch.dtype, List[Tensor]] = {}
    for gradient in gradients:
        x = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        bucket = filling.setdefault(x.dtype, [])
        bucket.append(x)
        if sum(y.numel() * y.element_size() for y in bucket) >= _BUCKET_BYTES:
            full.append(filling.pop(x.dtype))
    return full + list(filling.values())


# Running means of batch normalisation: each rank keeps those of its own images, and all agree where they are used or saved.


def mean_statistics(parts: Sequence[nn.Module], meshes: Meshes) -> Dict[str, Tensor]:
    """Return the running means of all ranks. Each rank keeps those of its own images; where they are used or saved, all
    ranks take the mean of them; what
    a rank holds stays its own, so neither a save nor a validation changes the training."""
    if meshes.tokens is None:
        return {}
    means = {name: buffer.clone() for name, buffer in _statistics(parts).items()}
    for buffer in means.values():
        dist.all_reduce(buffer, group=meshes.tokens.get_group())
        buffer /= meshes.tokens.size()
    return means


@contextmanager
def agreed_statistics(parts: Sequence[nn.Module], meshes: Meshes) -> Iterator[None]:
    """Let every rank compute, inside, with the mean of all ranks' running means; afterwards each has its own again."""
    own = _statistics(parts)
    before = {name: buffer.clone() for name, buffer in own.items()}
    for name, mean in mean_statistics(parts, meshes).items():
        own[name].copy_(mean)
    yield
    for name, value in before.items():
        own[name].copy_(value)


def _statistics(parts: Sequence[nn.Module]) -> Dict[str, Tensor]:
    """Return the running means of batch normalisation, under the names that they have in a checkpoint."""
    layers = [m for part in parts for m in part.modules() if isinstance(m, BATCH_NORMS)]
    running = {id(buffer) for layer in layers for buffer in (layer.running_mean, layer.running_var)}
    return {name: buffer for name, buffer in named_buffers(parts) if id(buffer) in running}
