"""PowerSGD: what it sends, what it keeps, and that a checkpoint brings both back."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import torch
from gloo_world import GlooWorld
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from drumbeat.train.parallel.hooks import orthogonal


def test_columns_become_orthogonal_and_empty_ones_stay_empty() -> None:
    torch.manual_seed(0)
    made = orthogonal(torch.randn(9, 3, dtype=torch.bfloat16).float())
    assert torch.allclose(made.t() @ made, torch.eye(3), atol=1e-5)
    assert torch.equal(orthogonal(torch.zeros(4, 2)), torch.zeros(4, 2))


def wrapped(hook: str) -> Tuple[DistributedDataParallel, Any]:
    from drumbeat.train.parallel import hooks

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)), gradient_as_bucket_view=True)
    hooks.register(model, hook)
    registered = hooks.registered(model)
    assert registered is not None
    return model, registered.powersgd


def gradients(model: DistributedDataParallel, inputs: Tensor) -> Dict[str, Tensor]:
    model.zero_grad()
    model(inputs).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.module.named_parameters() if p.grad is not None}


def sent_and_kept() -> List[bool]:
    """A gradient of rank 1, as that of the first layer, goes through whole. Of others, what was sent and what the ranks kept
    add up to the sum over all ranks."""
    import torch.distributed as dist

    rank, same = dist.get_rank(), torch.ones(1, 32)
    checks = []
    one, powersgd = wrapped("powersgd:1:0")
    plain, _ = wrapped("all-reduce")
    want, got = gradients(plain, same * (rank + 1)), gradients(one, same * (rank + 1))
    checks += [torch.allclose(want[name], got[name], rtol=1e-4, atol=1e-4) for name in want if name != "1.weight"]
    inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(rank))
    before = {name: error.clone() for name, error in powersgd.errors.items()}
    want, got = gradients(plain, inputs), gradients(one, inputs)
    for name, error in powersgd.errors.items():
        kept = error - before[name]
        dist.all_reduce(kept)
        checks.append(torch.allclose(want[name], got[name] + kept, rtol=1e-3, atol=1e-2))
        checks.append(float(kept.norm()) > 0)
    bad = {name: error.clone() for name, error in powersgd.errors.items()}
    gradients(one, inputs * (float("nan") if rank == 0 else 1.0))
    checks += [torch.equal(error, bad[name]) for name, error in powersgd.errors.items()]
    checks.append(len(powersgd.errors) == 2 and all(bool(torch.isfinite(r).all()) for r in powersgd.right.values()))
    return checks


def test_what_is_not_sent_is_kept_and_a_nan_leaves_no_trace(world: GlooWorld) -> None:
    for checks in world.run(sent_and_kept, size=2):
        assert all(checks), checks
