"""Muon, smaller AdamWs, running means of weights and schedules: right in one process, alike on several ranks, exact after a
resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from gloo_world import GlooWorld
from torch import nn

from drumbeat import train
from drumbeat.train import optim
from drumbeat.train.optim import AdamW8, Muon, OffloadedAdamW

TEXT = ["model=test", "steps=4", "batch=8", "report_every=1", "validation=8", "lr=1e-2"]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_smaller_adamws_learn_as_adamw_does(dtype: torch.dtype) -> None:
    kinds: List[Any] = [torch.optim.AdamW, OffloadedAdamW, AdamW8]
    last = {}
    for kind in kinds:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 300), nn.GELU(), nn.Linear(300, 16))
        model.to(torch.float32 if kind is torch.optim.AdamW else dtype)
        optimizer = kind(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
        for i in range(60):
            x = torch.randn(128, 64, generator=torch.Generator().manual_seed(i))
            loss = (model(x.to(model[0].weight.dtype)).float() - x[:, :16]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        last[kind] = loss.item()
        state = optimizer.state[model[0].weight]
    assert last[torch.optim.AdamW] < 0.1
    assert last[OffloadedAdamW] == pytest.approx(last[torch.optim.AdamW], rel=1e-4 if dtype == torch.float32 else 0.05)
    assert last[AdamW8] == pytest.approx(last[torch.optim.AdamW], rel=0.05)
    moments = sum(value.nbytes for name, value in state.items() if name != "master")
    assert moments < 2.2 * model[0].weight.numel()
    assert ("master" in state) == (dtype != torch.float32)


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
    assert alone[0] > alone[-2] + 0.1 and alone[-1] != alone[-2]
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
    alone += [["optimizer=adamw-offload"], ["optimizer=adamw-8bit", "precision=bf16-master"]]
    for more in alone:  # few samples: a CPU without bf16 takes a second for a step of eight
        assert world.run(resumed, str(tmp_path), [*more, "batch=2"], size=1) == [True]
    for more in (["optimizer=muon", "ema=0.9", "layout=fsdp"], ["optimizer=adamw-8bit", "layout=fsdp"]):
        assert world.run(resumed, str(tmp_path), [*more, "batch=2"], size=2) == [True, True]


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
    made: Dict[str, Any] = {name: make(100, 10) for name, make in optim.SCHEDULES.items()}
    assert {factor(0) for factor in made.values()} == {0.1} and {factor(9) for factor in made.values()} == {1.0}
    assert made["wsd"](69) == 1.0 and made["wsd"](85) == pytest.approx(0.5)
    assert made["cosine"](55) == pytest.approx(0.5) and made["linear"](55) == pytest.approx(0.5)
    assert made["constant"](99) == 1.0 and made["cosine"](100) == made["linear"](100) == 0.0
