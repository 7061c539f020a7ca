"""Ranks that hold the same parameters: their gradients, their running means, and whether they still agree.

A pipeline's schedule runs the backward pass in pieces, round the hooks on which DDP and FSDP rely, so its replicas add their
gradients once, after the whole schedule.

Replicated weights and buffers, and the batches of ranks that share data, are compared: a layer missing from a tensor-parallel
plan, a model that took another turn on one rank, a GPU that computes wrongly: training would go on, and the loss would look right
for a long time. Each tensor is hashed on its device; the hashes of all tensors travel in one small all-reduce per dimension of
the layout. Shards have no second copy, so nothing can be compared there.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from drumbeat.train.checkpoint.state import hash_on_device, named_buffers, named_parameters, own_part
from drumbeat.train.data.loaders import tensors_of
from drumbeat.train.layers.batch_norm import BATCH_NORMS
from drumbeat.train.parallel.meshes import Meshes, gathered
from drumbeat.train.refusal import Stopped

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


_FIRST = (1, 2, 10)  # steps of this process; a schedule may start with a learning rate of zero
_ROUNDING = 1e-3  # of a tensor's largest value: kernels chosen for each rank round differently
_PARTIAL = 0.1  # of a gradient's norm: more than rounding, even in bf16


class Equality:
    def __init__(self, parts: Sequence[nn.Module], meshes: Meshes, every: int) -> None:
        self.parts, self.meshes, self.every = list(parts), meshes, every
        self._steps = 0

    def next_step(self) -> bool:
        """Count a step of this process; True if this one is compared."""
        self._steps += 1
        periodic = self.every > 0 and self._steps % self.every == 0
        return self.meshes.root is not None and (self._steps in _FIRST or periodic)

    @property
    def first(self) -> bool:
        return self._steps == 1

    @torch.no_grad()
    def batches(self, batches: Any) -> None:
        """Check that the ranks of one tensor-parallel, context-parallel or pipeline group take the same samples."""
        held = {f"tensor {i}": tensor for i, tensor in enumerate(tensors_of(batches))}
        problems = []
        for name in ("tp", "cp", "pp"):
            mesh = self.meshes.one(name)
            if mesh is not None and _unequal(held, mesh, with_count=True):
                problems.append(f"the ranks of one {name} group were given different batches")
        fix = "let the data follow trainer.batches, or one seed for all ranks that share a batch"
        self._stop_together(problems, fix)

    @torch.no_grad()
    def gradients(self, summed: Sequence[Tensor]) -> None:
        """Check gradients under tensor parallelism: an unsharded parameter must get the whole gradient on every rank. If ranks
        saw only their own heads or columns, its gradient is a part: those in `summed` are added up already."""
        mesh = self.meshes.one("tp")
        if mesh is None:
            return
        done = {id(p) for p in summed}
        whole = {
            name: own_part(p.grad)
            for name, p in named_parameters(self.parts)
            if p.grad is not None and id(p) not in done and _replicated(p, "tp")
        }
        rows = [_norm_and_projection(grad) for grad in whole.values()]
        problems = []
        if rows:
            low, high = _least_and_most(torch.stack(rows), mesh)
            spread, norm = (high - low).abs().amax(1), high[:, 0]
            wrong = (spread > _PARTIAL * norm) & (norm > 1e-6 * norm.max())
            names = [name for name, bad in zip(whole, wrong.tolist()) if bad]
            if names:
                problems.append(f"the gradient of {_few(names)} is another one on each tensor-parallel rank")
        fix = (
            "its module sees only this rank's heads or columns: name it in the plan as 'replicated_with_grad_allreduce', "
            "which adds the parts up"
        )
        self._stop_together(problems, fix)

    @torch.no_grad()
    def weights(self) -> None:
        """Check the weights after an update: stop all ranks if a tensor differs between replicas."""
        held = self._held()
        problems, notes = [], []
        for name in ("dp_replicate", "dp_shard", "ep", "cp", "tp"):
            mesh = self.meshes.one(name)
            if mesh is None:
                continue
            alike = {key: tensor for key, tensor in held.items() if _replicated(tensor, name)}
            different = _unequal(alike, mesh)
            if different and name == "tp":
                drifted = [key for key in different if _made_equal(own_part(alike[key]), mesh)]
                notes += drifted
                different = [key for key in different if key not in drifted]
            if different:
                problems.append(f"{_few(different)} differs between the ranks of one {name} group")
        fix = (
            "every rank must update it alike: look for numbers drawn or branches taken per rank, parameters outside the "
            "optimizer, or a faulty device (drumbeat doctor)"
        )
        self._stop_together([f"{self._steps} steps after the start, {text}" for text in problems], fix)
        if self._anywhere(bool(notes)):
            names = sorted({name for names in gathered(notes) for name in names})
            if dist.get_rank() == 0:
                print(
                    f"{_few(names)} had drifted apart by rounding between tensor-parallel ranks: made equal", flush=True
                )

    def _held(self) -> Dict[str, Tensor]:
        own = {id(b) for part in self.parts for b in _running_statistics(part)}
        held = dict(named_parameters(self.parts))
        held.update({name: buffer for name, buffer in named_buffers(self.parts) if id(buffer) not in own})
        return held

    def _anywhere(self, so: bool) -> bool:
        assert self.meshes.root is not None
        flag = torch.tensor(int(so), device=self.meshes.root.device_type)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def _stop_together(self, problems: List[str], fix: str) -> None:
        if self._anywhere(bool(problems)):
            told = [text for texts in gathered(problems) for text in texts]
            raise Stopped(told[0], fix)


def summed_gradients(parts: Sequence[nn.Module]) -> List[Tensor]:
    """Return the parameters of modules that a tensor-parallel plan marks: each rank's gradient is a part of the whole."""
    marked = [module for part in parts for module in part.modules() if getattr(module, SUMMED, False)]
    return [p for module in marked for p in module.parameters()]


SUMMED = "_drumbeat_summed_gradients"


def _running_statistics(part: nn.Module) -> List[Tensor]:
    """Return the running statistics: each rank has its own, and they are averaged when they are used."""
    layers = [module for module in part.modules() if isinstance(module, BATCH_NORMS)]
    return [b for layer in layers for b in (layer.running_mean, layer.running_var) if b is not None]


def _replicated(tensor: Tensor, dimension: str) -> bool:
    if not isinstance(tensor, DTensor):
        return True
    for name, placement in zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements):
        if f"_{dimension}_" in f"_{name}_" and not placement.is_replicate():  # joined dimensions have joined names
            return False
    return True


def _unequal(held: Dict[str, Tensor], mesh: DeviceMesh, with_count: bool = False) -> List[str]:
    if not held and not with_count:
        return []
    device = mesh.device_type
    hashes = [hash_on_device(tensor).sum().to(device) for tensor in held.values()]
    if with_count:  # ranks may hold another number of tensors: one hash of all
        hashes = [sum(hashes, torch.tensor(len(hashes), device=device))]
    low, high = _least_and_most(torch.stack(hashes), mesh)
    return [name for name, differs in zip(held or ["all"], (low != high).tolist()) if differs]


def _least_and_most(values: Tensor, mesh: DeviceMesh) -> Tuple[Tensor, Tensor]:
    low, high = values.clone(), values.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=mesh.get_group())
    dist.all_reduce(high, dist.ReduceOp.MAX, group=mesh.get_group())
    return low, high


def _made_equal(tensor: Tensor, mesh: DeviceMesh) -> bool:
    """Give a tensor that differs by rounding its first rank's values."""
    first = tensor.detach().clone().contiguous()
    dist.broadcast(first, group=mesh.get_group(), group_src=0)
    apart = (first.double() - tensor.double()).abs().max() / first.double().abs().max().clamp(min=1e-30)
    dist.all_reduce(apart, dist.ReduceOp.MAX, group=mesh.get_group())
    if not float(apart) <= _ROUNDING:
        return False
    tensor.copy_(first)
    return True


def _norm_and_projection(grad: Tensor) -> Tensor:
    flat = grad.detach().reshape(-1).float()
    signs = 1 - 2 * (torch.arange(flat.numel(), device=flat.device) * 2654435761 >> 7 & 1)
    return torch.stack((flat.norm(), (flat * signs).sum())).double()


def _few(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
