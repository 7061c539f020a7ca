"""Ranks that should hold the same: gradients of parts are added, and a difference stops the run with the tensor's name."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Optional, Tuple

import pytest
import torch
from gloo_world import GlooWorld
from torch import Tensor, nn

from drumbeat import train
from drumbeat.train.refusal import Refusal, Stopped

TOKENS = torch.randint(0, 64, (16, 12), generator=torch.Generator().manual_seed(5))
PLAN = {
    **{f"model.layers.*.{name}": "colwise" for name in ("self_attn.[qkv]_proj", "mlp.gate_proj", "mlp.up_proj")},
    **{f"model.layers.*.{name}": "rowwise" for name in ("self_attn.o_proj", "mlp.down_proj")},
}


def qwen3(layout: str, plan: Optional[Dict[str, str]], accumulate: int = 1) -> Tuple[List[float], float]:
    """Losses of a transformers model whose norms of queries and keys see only their rank's heads, and the norms' spread."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = train.setup(model, optimizer, layout=layout, plan=plan, accumulate=accumulate)
    losses = []
    for rows in TOKENS.view(4, 4, 12):
        share = trainer.batches([rows])
        losses += [float(trainer.step({"input_ids": x, "labels": x}).loss) for x in share]
    norm = model.model.layers[0].self_attn.q_norm.weight.detach()
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return losses, float(norm.double().square().sum())


@pytest.mark.parametrize(
    "layout,size,own_plan,accumulate", [("tp", 2, True, 1), ("tp", 2, False, 2), ("dp_shard=2,tp=2", 4, True, 2)]
)
def test_norms_that_see_only_some_heads_get_the_whole_gradient(
    world: GlooWorld, layout: str, size: int, own_plan: bool, accumulate: int
) -> None:
    pytest.importorskip("transformers", reason="a heavy development dependency: pip install transformers")
    want = world.run(qwen3, "ddp", None, size=1)[0]
    for got in world.run(qwen3, layout, None if own_plan else PLAN, accumulate, size=size):
        assert got[0] == pytest.approx(want[0], rel=1e-5)
        assert got[1] == pytest.approx(want[1], rel=1e-5)


class Heads(nn.Module):
    """A layer between the two halves of a cut: whole, but seeing this rank's columns only."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.down = nn.Linear(4, 8), nn.LayerNorm(2), nn.Linear(8, 4)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.scale(self.up(x).unflatten(-1, (-1, 2))).flatten(-2))  # type: ignore[no-any-return]


def stopped(case: str) -> str:
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layout = "ddp" if case in ("weight", "buffer") else "tp"
    plan: Any = {"up": "colwise", "down": "rowwise"}
    plan.update({"no such layer": {"*.up": "colwise"}, "wrong kind": {"scale": "colwise"}}.get(case, {}))
    if case in ("only marks", "unknown"):
        plan = {"up": "replicated_with_grad_allreduce" if case == "only marks" else "diagonal"}
    if case in ("marked", "batches"):
        plan["scale"] = "replicated_with_grad_allreduce"
    try:
        trainer = train.setup(model, optimizer, layout=layout, plan=plan, compare_every=4)
        for step in range(6):
            x = torch.full((2, 4), float(step + 1)) + torch.arange(8.0).view(2, 4)
            if case == "batches":
                x += rank
            trainer.step(x, lambda m, x: m(x).square().mean())
            with torch.no_grad():
                if case == "weight" and step == 2 and rank == 1:
                    model.up.weight[1, 1] += 1e-6
                if case == "buffer" and step == 0:
                    model.get_buffer("count").add_(rank)
    except (Refusal, Stopped) as problem:
        return f"{type(problem).__name__}: {problem}"
    return "trained"


@pytest.mark.parametrize(
    "case,words",
    [
        ("weight", "Stopped: 4 steps after the start, up.weight differs between the ranks of one dp_replicate group"),
        ("buffer", "Stopped: 2 steps after the start, count differs between the ranks of one dp_replicate group"),
        ("unmarked", "Stopped: the gradient of scale.weight (and 1 more) is another one on each tensor-parallel rank"),
        ("marked", "trained"),
        ("batches", "Stopped: the ranks of one tp group were given different batches"),
        ("no such layer", "Refusal: plan: no module is called '*.up'; the nearest is up"),
        ("wrong kind", "Refusal: plan: scale is a LayerNorm; only Linear and Embedding"),
        ("only marks", "Refusal: the plan cuts no parameter"),
        ("unknown", "Refusal: plan: 'diagonal' for up is not built; use another layout"),
    ],
)
def test_a_difference_stops_all_ranks_and_names_it(world: GlooWorld, case: str, words: str) -> None:
    for said in world.run(stopped, case, size=2):
        assert said.startswith(words), said


def drifting() -> Tuple[str, float]:
    """Kernels chosen for each rank round differently: that is no divergence, but it must not grow either."""
    import contextlib
    import io

    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4))
    plan = {"1": "colwise", "2": "rowwise"}
    trainer = train.setup(model, torch.optim.SGD(model.parameters(), lr=0.0), layout="tp", plan=plan)
    with torch.no_grad():
        model[0].weight[0] += rank * 1e-6
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        trainer.step(torch.ones(2, 4), lambda m, x: m(x).square().mean())
    return said.getvalue(), float(model[0].weight[0])


def test_rounding_between_tensor_parallel_ranks_is_made_equal_and_said(world: GlooWorld) -> None:
    (said, first), (_, second) = world.run(drifting, size=2)
    assert "0.weight had drifted apart by rounding" in said and first == second
