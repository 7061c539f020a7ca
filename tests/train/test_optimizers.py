"""Muon, running means of weights, and schedules: right in one process, the same on several ranks, exact after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from gloo_world import GlooWorld
from torch import nn

from drumbeat import train
from drumbeat.train import schedules
from drumbeat.train.optim import Muon

TEXT = ["model=test", "steps=6", "batch=8", "report_every=1", "validation=8", "lr=1e-2"]


def test_muon_is_torchs_for_matrices_and_adamw_for_the_rest() -> None:
    torch.manual_seed(0)
    both = [nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 4)) for _ in range(2)]
    both[1].load_state_dict(both[0].state_dict())
    split = [([p for p in m.parameters() if p.ndim == 2], [p for p in m.parameters() if p.ndim < 2]) for m in both]
    ours = Muon(split[0][0], split[0][1], lr=0.02)
    theirs: List[Any] = [
        torch.optim.Muon(split[1][0], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(split[1][1], lr=0.02, weight_decay=0.1, betas=(0.9, 0.95)),
    ]
    for i in range(5):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(i))
        for model in both:
            model.zero_grad()
            model(x).square().sum().backward()
        for optimizer in (ours, *theirs):
            optimizer.step()
    for a, b in zip(both[0].parameters(), both[1].parameters()):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def losses(*more: str) -> List[float]:
    from drumbeat.train.models import llama
    from drumbeat.train.recipes.llama import LlamaSettings, run
    from drumbeat.train.settings import fill

    llama.SHAPES["test"] = llama.LlamaShape(32, 2, 4, 2, 64, 256, 32)
    result = run(fill(LlamaSettings, [*TEXT, *more]))
    return [*result.losses, result.validation[-1]["loss"]]


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_muon_and_running_means_on_several_ranks_are_those_of_one(world: GlooWorld, layout: str) -> None:
    more = ("optimizer=muon", "ema=0.5", "rate=cosine")
    (alone,) = world.run(losses, *more, size=1)
    assert alone[0] > alone[-2] + 0.3 and alone[-1] != alone[-2]
    for values in world.run(losses, *more, f"layout={layout}", size=2):
        assert values == pytest.approx(
            alone, rel=2e-3
        )  # Muon rounds to bf16: a sum in another order may round otherwise


def resumed(folder: str, more: List[str]) -> bool:
    from drumbeat.train.models import llama
    from drumbeat.train.recipes import llama as recipe
    from drumbeat.train.settings import fill
    from drumbeat.train.verify_resume import verify_resume

    llama.SHAPES["test"] = llama.LlamaShape(32, 2, 4, 2, 64, 256, 32)
    return verify_resume(recipe, fill(recipe.LlamaSettings, [*TEXT, *more, f"checkpoint={folder}"]))


def test_they_resume_exactly(world: GlooWorld, tmp_path: Path) -> None:
    alone = [["optimizer=muon", "rate=cosine"], ["ema=0.9", "rate=linear", "precision=bf16-master"]]
    for more in alone:
        assert world.run(resumed, str(tmp_path), more, size=1) == [True]
    assert world.run(resumed, str(tmp_path), ["optimizer=muon", "ema=0.9", "layout=fsdp"], size=2) == [True, True]


def test_a_running_mean_is_that_of_the_weights_and_leaves_them() -> None:
    model = nn.Linear(2, 1)
    trainer = train.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), ema=0.75)
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    seen: List[torch.Tensor] = []
    for _ in range(3):
        trainer.step(torch.ones(4, 2), loss)
        seen.append(model.weight.detach().clone())
    mean = (seen[0] * 0.75 + seen[1] * 0.25) * 0.75 + seen[2] * 0.25
    with trainer.averaged():
        torch.testing.assert_close(model.weight.detach(), mean)
    assert torch.equal(model.weight.detach(), seen[-1])
    with pytest.raises(train.Refusal, match="ema=1.5; the share of the old mean"):
        train.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), ema=1.5)


def test_schedules_by_step() -> None:
    made: Dict[str, Any] = {name: make(100, 10) for name, make in schedules.SCHEDULES.items()}
    assert {factor(0) for factor in made.values()} == {0.1} and {factor(9) for factor in made.values()} == {1.0}
    assert made["wsd"](69) == 1.0 and made["wsd"](85) == pytest.approx(0.5)
    assert made["cosine"](55) == pytest.approx(0.5) and made["linear"](55) == pytest.approx(0.5)
    assert made["constant"](99) == 1.0 and made["cosine"](100) == made["linear"](100) == 0.0
