"""Ranks with more and with less data finish together, and nothing of it is lost or counted twice."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import pytest
import torch
from gloo_world import GlooWorld
from torch import Tensor, nn

# rank -> for each of its steps, how many samples each micro-batch has
SHARES: Dict[int, List[List[int]]] = {0: [[3], [2, 2]], 1: [[1, 4, 2]], 2: [[2], [1], [5]], 3: [[2, 2], [3]]}


def samples(rank: int, step: int) -> List[Tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(10 * rank + step)
    sizes = SHARES[rank][step] if step < len(SHARES[rank]) else []
    return [(torch.randn(n, 6, generator=made), torch.randn(n, generator=made)) for n in sizes]


def squares(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    counted = targets != -100
    return (((model(inputs).squeeze(-1) - targets) * counted) ** 2).sum()


def trained(layout: str) -> Any:
    import torch.distributed as dist

    from drumbeat.train.data.loaders import together
    from drumbeat.train.parallel import Layout
    from drumbeat.train.parallel.meshes import Meshes
    from drumbeat.train.parallel.parallelize import parallelize
    from drumbeat.train.precision import Precision
    from drumbeat.train.step import Step, full_tensor

    torch.manual_seed(0)
    meshes, precision, cpu = Meshes(Layout.parse(layout, 2).for_world(4), "cpu"), Precision("fp32"), torch.device("cpu")
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    model = parallelize(model, meshes, device=cpu, precision=precision)
    step = Step([model], torch.optim.SGD(model.parameters(), lr=0.1), squares, meshes, precision, cpu)
    rank = dist.get_rank()
    counts = [int(step(batches).targets) for batches in together(samples(rank, i) for i in range(len(SHARES[rank])))]
    return counts, torch.cat([full_tensor(p).detach().flatten() for p in model.parameters()]).tolist()


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "hsdp"])
def test_uneven_ranks_end_together_with_the_weights_of_one_process(world: GlooWorld, layout: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = []
    for i in range(3):
        pieces = [piece for rank in SHARES for piece in samples(rank, i)]
        inputs, targets = (torch.cat(x) for x in zip(*pieces))
        optimizer.zero_grad()
        (squares(model, inputs, targets) / len(targets)).backward()
        optimizer.step()
        wanted.append(len(targets))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    for counts, got in world.run(trained, layout):
        assert counts == wanted
        assert got == pytest.approx(weights, rel=1e-4, abs=1e-6)


def nothing_on_rank_two() -> str:
    import torch.distributed as dist

    from drumbeat.train.data.loaders import together
    from drumbeat.train.refusal import Refusal

    try:
        list(together([samples(0, 0)] if dist.get_rank() != 2 else []))
    except Refusal as refusal:
        return str(refusal)
    return "no refusal"


def test_a_rank_without_any_data_is_refused_on_all_ranks(world: GlooWorld) -> None:
    assert all("a rank has no data at all" in said for said in world.run(nothing_on_rank_two))
