"""A tensor-parallel plan that the model's code does not allow is refused before the first step, though every shape fits."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any, List

import pytest
import torch
import torch.nn.functional as F
from gloo_world import GlooWorld
from torch import Tensor, nn

from drumbeat import train

HEADS, WIDTH = 4, 32
PLAN = {"layers.*.q": "colwise", "layers.*.k": "colwise", "layers.*.v": "colwise", "layers.*.out": "rowwise"}


class Attention(nn.Module):
    def __init__(self, fixed: bool, dropout: float) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.fixed, self.dropout = nn.Linear(WIDTH, WIDTH), fixed, dropout

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        shape = (rows, length, HEADS, -1) if self.fixed else (rows, length, -1, WIDTH // HEADS)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return x + self.out(y.transpose(1, 2).reshape(rows, length, -1))


class Words(nn.Module):
    def __init__(self, fixed: bool, scale: float, dropout: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64)
        self.layers = nn.ModuleList(Attention(fixed, dropout) for _ in range(2))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=scale)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def trained(fixed: bool, scale: float = 0.3, layout: str = "tp", dropout: float = 0.0, **more: Any) -> Any:
    torch.manual_seed(0)
    model = Words(fixed, scale, dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = train.setup(model, optimizer, layout=layout, plan=PLAN, **more)
    tokens = torch.randint(0, 64, (3, 8, 17), generator=torch.Generator().manual_seed(1))
    batches = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in tokens]
    try:
        losses = []
        for batch in trainer.batches(batches):
            result = trainer.step(batch)
            trainer.report(result, every=1)
            losses.append(float(result.loss))
        return losses
    except train.Refusal as refusal:
        return str(refusal)


def refused(*args: Any) -> Any:
    fixed, scale, layout, precision = args
    return trained(fixed, scale, layout, precision=precision)


def unchecked() -> Any:
    return trained(True, check_plan=False)


def with_dropout() -> Any:
    return trained(False, dropout=0.5)


@pytest.mark.parametrize(
    ("layout", "size", "precision", "scale"),
    [
        ("tp", 2, "fp32", 0.3),
        ("tp", 2, "fp32", 0.02),  # attention is nearly even: another number of heads hardly changes the loss
        ("tp", 2, "bf16", 0.02),
        pytest.param("dp_replicate=2,tp=2", 4, "fp32", 0.02, marks=pytest.mark.proof),
        ("dp_shard=2,tp=2", 4, "fp32", 0.02),
        pytest.param("dp_shard=2,tp=2", 4, "bf16", 0.3, marks=pytest.mark.proof),
    ],
)
def test_heads_of_another_width_are_refused(
    world: GlooWorld, scale: float, layout: str, size: int, precision: str
) -> None:
    for said in world.run(refused, True, scale, layout, precision, size=size):
        assert "is not that of the uncut model" in said and "head_width" in said, said
    (alone,) = world.run(refused, False, scale, "ddp", precision, size=1)
    for losses in world.run(refused, False, scale, layout, precision, size=size):
        assert losses == pytest.approx(alone, rel=1e-5 if precision == "fp32" else 1e-2)


def test_the_comparison_can_be_left_out_and_lets_random_models_pass(world: GlooWorld) -> None:
    for losses in [*world.run(unchecked, size=2), *world.run(with_dropout, size=2)]:
        assert isinstance(losses, list) and len(losses) == 3, losses


def reported(layout: str, folder: str) -> None:
    os.environ["DRUMBEAT_METRICS"] = os.path.join(folder, os.environ["RANK"] + ".jsonl")
    trained(False, layout=layout)


@pytest.mark.parametrize(("layout", "size"), [("tp", 2), ("dp_replicate=2,tp=2", 4), ("ddp", 2)])
def test_ranks_that_share_a_batch_count_its_samples_once(
    world: GlooWorld, tmp_path: Path, layout: str, size: int
) -> None:
    world.run(reported, layout, str(tmp_path), size=size)
    lines: List[Any] = [json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
    assert sum(line["samples"] for line in lines) == 3 * 8


class Views(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y.view(-1), y.square().mean()


def warned() -> List[str]:
    model = Views(4, 4)
    trainer = train.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), layout="fsdp")
    with warnings.catch_warnings(record=True) as told:
        trainer.step(torch.ones(2, 4))
    return [str(each.message) for each in told if "returned a view" in str(each.message)]


def test_a_view_that_nobody_writes_into_is_no_warning(world: GlooWorld) -> None:
    assert world.run(warned, size=2) == [[], []]
