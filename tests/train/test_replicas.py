"""Gradients travel in buckets, each once."""

from __future__ import annotations

import pytest
import torch
from gloo_world import GlooWorld

from drumbeat.train.parallel import replicas


def test_buckets_hold_every_gradient_once_and_one_dtype_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_BUCKET_BYTES", 40)
    kinds = [torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    gradients = [torch.zeros(7, dtype=kind) for kind in kinds]
    made = replicas.buckets(gradients)
    assert sorted(id(x) for bucket in made for x in bucket) == sorted(id(x) for x in gradients)
    assert [[x.dtype for x in bucket] for bucket in made] == [
        [torch.float32] * 2,
        [torch.bfloat16] * 2,
        [torch.float32],
    ]


def summed() -> list[list[float]]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    usual, replicas._BUCKET_BYTES = replicas._BUCKET_BYTES, 8
    parameters = [torch.zeros(size, requires_grad=True) for size in (3, 1, 2)]
    for number, p in enumerate(parameters):
        p.grad = torch.full_like(p, 10.0**number * (dist.get_rank() + 1)) if number != 1 else None
    replicas.add_gradients(parameters, init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"])
    replicas._BUCKET_BYTES = usual
    return [p.grad.tolist() for p in parameters if p.grad is not None]


def test_gradients_are_added_over_the_ranks_of_one_group(world: GlooWorld) -> None:
    first, second = [[3.0] * 3, [300.0] * 2], [[7.0] * 3, [700.0] * 2]
    assert world.run(summed) == [first, first, second, second]
