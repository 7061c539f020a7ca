"""Every recipe trains on several ranks, and what each says can be read back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, List

import pytest
from gloo_world import GlooWorld


def run(name: str, texts: List[str], metrics: str = "") -> Any:
    import importlib

    from drumbeat import metrics as own
    from drumbeat.train.settings import fill

    own._fd = None  # a process reports to one file for life; these processes live through several tests

    if metrics:
        os.environ["DRUMBEAT_METRICS"] = metrics
    else:
        os.environ.pop("DRUMBEAT_METRICS", None)
    recipe = importlib.import_module(f"drumbeat.train.recipes.{name}")
    result = recipe.run(fill(recipe.SettingsClass, texts))
    return result.losses, result.validation[-1]


RECIPES: Dict[str, List[str]] = {
    "bert": ["steps=40", "batch=8", "length=32", "validation=16", "lr=3e-3"],
    "resnet": ["depth=18", "size=32", "classes=4", "steps=8", "batch=16", "validation=32", "lr=0.5", "layout=fsdp"],
    "wide_resnet": [
        "depth=10",
        "widening=1",
        "classes=4",
        "images=64",
        "batch=32",
        "epochs=4",
        "warmup=1",
        "base_lr=1.0",
    ],
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_learns_on_four_ranks_and_reports(world: GlooWorld, tmp_path: Path, name: str) -> None:
    file = tmp_path / "metrics.jsonl"
    results = world.run(run, name, [*RECIPES[name], "report_every=2"], str(file))
    assert all(result == results[0] for result in results), "every rank must end with the same figures"
    losses, validation = results[0]
    assert losses[-1] < 0.95 * losses[0]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert {line["rank"] for line in steps} == {0, 1, 2, 3}
    assert all(("loss" in line) == (line["rank"] == 0) for line in steps), "the loss of all goes out once"
    (last,) = [line for line in lines if line["kind"] == "validation" and line["rank"] == 0][-1:]
    assert last["loss"] == validation["loss"]


HOOKS = ["all-reduce", "fp16", "bf16", "powersgd:2:3"]


def test_hooks_send_less_and_still_train(world: GlooWorld) -> None:
    small = ["model=byte-tiny", "steps=12", "batch=8", "report_every=12", "validation=0", "lr=1e-2"]
    ends = {hook: world.run(train_llama, [*small, f"hook={hook}"])[0][-1] for hook in HOOKS}
    assert ends["fp16"] == pytest.approx(ends["all-reduce"], rel=2e-3)
    assert ends["bf16"] == pytest.approx(ends["all-reduce"], rel=2e-2)
    assert ends["powersgd:2:3"] < 5.0 and ends["powersgd:2:3"] != ends["all-reduce"]


def train_llama(texts: List[str]) -> List[float]:
    from drumbeat.train.recipes.llama import LlamaSettings, run
    from drumbeat.train.settings import fill

    return run(fill(LlamaSettings, texts)).losses


def in_fp8(texts: List[str]) -> List[float]:
    """fp8 on the CPU is slow and otherwise right, so what is around it can be tried here."""
    from drumbeat.train import float8

    refusing, float8.supported = float8.supported, lambda _device: None  # type: ignore[assignment]
    try:
        return train_llama([*texts, "precision=fp8"])
    finally:
        float8.supported = refusing


def test_fp8_trains_alike_with_ddp_fsdp_and_a_pipeline(world: GlooWorld) -> None:
    small = ["model=byte-tiny", "steps=6", "batch=4", "length=16", "report_every=6", "validation=0", "lr=1e-2"]
    exact = world.run(train_llama, small)[0][-1]
    for layout, accumulate in (("ddp", 1), ("fsdp", 1), ("pp=2,dp_replicate=2", 2)):
        for got in world.run(in_fp8, [*small, f"layout={layout}", f"accumulate={accumulate}"]):
            assert got[-1] == pytest.approx(exact, rel=2e-2), layout
            assert got[-1] != pytest.approx(exact, rel=1e-5), f"{layout}: this was not fp8"


def test_a_nan_stops_every_rank_before_the_weights(world: GlooWorld) -> None:
    assert world.run(nan_on_one_rank) == ["left out"] * 4


def nan_on_one_rank() -> str:
    import torch
    import torch.distributed as dist
    from torch import nn

    from drumbeat.train.layout import Layout
    from drumbeat.train.meshes import Meshes
    from drumbeat.train.parallelize import parallelize
    from drumbeat.train.precision import Precision
    from drumbeat.train.step import Step

    torch.manual_seed(0)
    meshes, precision, cpu = Meshes(Layout(dp_shard=4), "cpu"), Precision("fp32"), torch.device("cpu")
    model = parallelize(nn.Linear(8, 8), meshes, device=cpu, precision=precision)
    optimizer = torch.optim.AdamW(model.parameters())
    step = Step([model], optimizer, lambda m, x, y: ((m(x) - y) ** 2).sum(), meshes, precision, cpu)
    before = [p.full_tensor().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    bad = float("nan") if dist.get_rank() == 2 else 1.0
    step([(torch.full((2, 8), bad), torch.ones(2, 8))])
    same = all(torch.equal(p.full_tensor(), q) for p, q in zip(model.parameters(), before))  # type: ignore[attr-defined]
    return "left out" if same and step.skipped == 1 else "applied"


def test_a_profile_is_written_for_the_chosen_rank_only(world: GlooWorld, tmp_path: Path) -> None:
    small = ["steps=8", "batch=8", "validation=0", "profile=1:3:2"]
    world.run(profiled, str(tmp_path), small)
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["rank-1.json", "rank-1.txt"]
    assert json.loads((tmp_path / "profile" / "rank-1.json").read_text())["traceEvents"]


def profiled(folder: str, texts: List[str]) -> None:
    here = os.getcwd()
    os.chdir(folder)
    try:
        train_llama(texts)
    finally:
        os.chdir(here)
