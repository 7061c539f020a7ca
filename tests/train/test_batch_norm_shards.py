"""Batch norm with shards in bf16."""

from __future__ import annotations

from typing import List

import pytest
import torch
import torch.nn.functional as F
from gloo_world import GlooWorld
from torch import Tensor, nn


def losses_of(layout: str) -> List[float]:
    """Batch norm without convolutions: those are very slow in bf16 on some CPUs."""
    from drumbeat import train

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))
    trainer = train.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), layout=layout, precision="bf16")
    data = torch.randn(16, 6, generator=torch.Generator().manual_seed(2))
    batch = trainer.meshes.data_rank

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return F.cross_entropy(m(x).float(), x[:, :3].argmax(1))

    return [float(trainer.step(data[batch::2], loss).loss) for _ in range(4)]


def test_batch_norm_trains_in_bf16_with_shards_as_without(world: GlooWorld) -> None:
    """FSDP's own policy would cast the weights of batch norms to bf16, which they refuse."""
    plain = world.run(losses_of, "ddp", size=2)[0]
    assert world.run(losses_of, "fsdp", size=2)[0] == pytest.approx(plain, rel=1e-6)
    assert plain[-1] < plain[0]
