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

    from drumbeat.train.settings import fill

    if metrics:
        os.environ["DRUMBEAT_METRICS"] = metrics
    recipe = importlib.import_module(f"drumbeat.train.recipes.{name}")
    result = recipe.run(fill(recipe.SettingsClass, texts))
    return result.losses, result.validation[-1]


RECIPES: Dict[str, List[str]] = {
    "bert": ["steps=40", "batch=8", "length=32", "validation=16", "lr=3e-3"],
    "resnet": ["depth=18", "size=32", "classes=4", "steps=4", "batch=16", "validation=16", "lr=0.5", "layout=fsdp"],
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


@pytest.mark.parametrize(("name", "ranks"), [("bert", 4), ("resnet", 2), ("wide_resnet", 2), ("wide_resnet", 4)])
def test_a_recipe_learns_and_reports(world: GlooWorld, tmp_path: Path, name: str, ranks: int) -> None:
    file = tmp_path / "metrics.jsonl"
    results = world.run(run, name, [*RECIPES[name], "report_every=2"], str(file), size=ranks)
    assert all(result == results[0] for result in results), "every rank must end with the same figures"
    losses, validation = results[0]
    assert losses[-1] < 0.95 * losses[0]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert {line["rank"] for line in steps} == set(range(ranks))
    reports = [line for line in steps if line["step"] % 2 == 0]  # between them ranks only say where they are
    assert all(("loss" in line) == (line["rank"] == 0) for line in reports), "the loss of all goes out once"
    assert not any("loss" in line for line in steps if line not in reports)
    (last,) = [line for line in lines if line["kind"] == "validation" and line["rank"] == 0][-1:]
    assert last["loss"] == validation["loss"]


HOOKS = ["all-reduce", "fp16", "bf16", "powersgd:2:3"]


def test_hooks_send_less_and_still_train(world: GlooWorld) -> None:
    small = ["model=byte-tiny", "steps=6", "batch=8", "report_every=6", "validation=0", "lr=1e-2"]
    ends = {hook: world.run(train_llama, [*small, f"hook={hook}"], size=2)[0][-1] for hook in HOOKS}
    assert ends["fp16"] == pytest.approx(ends["all-reduce"], rel=2e-3)
    assert ends["bf16"] == pytest.approx(ends["all-reduce"], rel=2e-2)
    assert ends["powersgd:2:3"] < 5.0 and ends["powersgd:2:3"] != ends["all-reduce"]


def test_powersgd_on_a_model_of_many_buckets(world: GlooWorld) -> None:
    """Its exchanges come from callbacks, and those of two buckets under way at once got mixed up between the ranks."""
    assert world.run(powersgd_on_many_buckets, size=2) == [True, True]


def powersgd_on_many_buckets() -> bool:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from drumbeat.train.parallel import hooks

    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(12)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.004)
    hooks.register(model, "powersgd:1:2")
    for _ in range(8):
        model.zero_grad()
        model(torch.randn(2, 8, 6, 6)).square().sum().backward()
    return all(torch.isfinite(p.grad).all() for p in model.parameters())  # type: ignore[arg-type]


def train_llama(texts: List[str]) -> List[float]:
    from drumbeat.train.recipes.llama import LlamaSettings, run
    from drumbeat.train.settings import fill

    return run(fill(LlamaSettings, texts)).losses


def in_fp8(texts: List[str]) -> List[float]:
    """fp8 on the CPU is slow and otherwise right, so what is around it can be tried here."""
    from drumbeat.train.layers import float8

    refusing, float8.supported = float8.supported, lambda _device: None  # type: ignore[assignment]
    try:
        return train_llama([*texts, "precision=fp8"])
    finally:
        float8.supported = refusing


def test_fp8_trains_alike_with_ddp_fsdp_and_a_pipeline(world: GlooWorld) -> None:
    small = ["model=byte-tiny", "steps=3", "batch=4", "length=16", "report_every=1", "validation=0", "lr=1e-2"]
    exact = world.run(train_llama, small)[0]
    for layout, accumulate in (("ddp", 1), ("fsdp", 1), ("pp=2,dp_replicate=2", 2)):
        for got in world.run(in_fp8, [*small, f"layout={layout}", f"accumulate={accumulate}"]):
            assert got == pytest.approx(exact, rel=2e-2), layout
            assert got != pytest.approx(exact, rel=1e-5), f"{layout}: this was not fp8"


@pytest.mark.parametrize(
    ("layout", "precision", "ranks"),
    [
        ("dp_shard=4", "fp32", 4),
        ("dp_replicate=2", "fp32", 2),
        ("dp_replicate=2", "fp16", 2),
        ("dp_shard=2", "bf16", 2),
    ],
)
def test_a_bad_number_on_one_rank_is_left_out_on_all(world: GlooWorld, layout: str, precision: str, ranks: int) -> None:
    for bad in ("nan", "inf"):
        assert world.run(bad_on_one_rank, layout, precision, bad, size=ranks) == ["left out, then went on"] * ranks


def bad_on_one_rank(layout: str, precision: str, bad: str) -> str:
    import torch
    import torch.distributed as dist
    from torch import nn

    from drumbeat.train.parallel import Layout
    from drumbeat.train.parallel.meshes import Meshes
    from drumbeat.train.parallel.parallelize import parallelize
    from drumbeat.train.precision import Precision
    from drumbeat.train.step import Step, full_tensor

    torch.manual_seed(0)
    meshes, how, cpu = Meshes(Layout.parse(layout), "cpu"), Precision(precision), torch.device("cpu")
    model = parallelize(nn.Linear(8, 8), meshes, device=cpu, precision=how)
    optimizer = torch.optim.AdamW(model.parameters())
    step = Step([model], optimizer, lambda m, x, y: ((m(x).float() - y) ** 2).sum(), meshes, how, cpu)
    now = lambda: [full_tensor(p.detach()).clone() for p in model.parameters()]  # noqa: E731
    before = now()
    targets = torch.ones(2, 8)
    if step.scaler is not None:
        step.scaler.load_state_dict(
            {**step.scaler.state_dict(), "scale": 1.0}
        )  # so low that a bad number is no overflow
    step([(torch.full((2, 8), float(bad) if dist.get_rank() == 1 else 1.0), targets)])
    if not all(torch.equal(p, q) for p, q in zip(now(), before)) or step.skipped != 1:
        return "applied"
    step([(torch.ones(2, 8), targets)])
    moved = not any(torch.equal(p, q) for p, q in zip(now(), before))
    return "left out, then went on" if moved and step.skipped == 1 else "stuck"


def test_an_infinite_loss_stops_the_run_or_is_skipped(world: GlooWorld) -> None:
    for values in world.run(train_to_infinity, "skip", size=2):
        assert values["skipped_steps"] >= 1 and values["step"] == 4
    for values in world.run(train_to_infinity, "stop", size=2):
        assert "not finite at or before step 2" in values["stopped"]


def train_to_infinity(on_nan: str) -> Dict[str, Any]:
    """Rank 1's loss is infinite in the second step."""
    import torch.distributed as dist

    from drumbeat.train.recipes.llama import LlamaSettings, run
    from drumbeat.train.settings import fill
    from drumbeat.train.step import Step

    loss, steps = Step._accumulated, 0

    def spoiled(self: Step, *args: Any) -> Any:
        nonlocal steps
        steps += 1
        total = loss(self, *args)
        if steps == 2 and dist.get_rank() == 1:
            total += float("inf")
            self.parameters[0].grad.fill_(float("inf"))  # type: ignore[union-attr]
        return total

    Step._accumulated = spoiled  # type: ignore[method-assign]
    texts = ["steps=4", "batch=4", "report_every=1", "validation=0", "layout=fsdp", f"on_nan={on_nan}"]
    try:
        result = run(fill(LlamaSettings, texts))
        return {"step": result.step, **result.figures}
    except FloatingPointError as error:
        return {"stopped": str(error)}
    finally:
        Step._accumulated = loss  # type: ignore[method-assign]


def test_profiles_are_written_for_the_chosen_ranks_only(world: GlooWorld, tmp_path: Path) -> None:
    small = ["steps=8", "batch=8", "validation=0", "profile=0+2:3:2", "report_every=4"]
    world.run(profiled, str(tmp_path), small)
    names = ["rank-0.pt.trace.json", "rank-0.txt", "rank-2.pt.trace.json", "rank-2.txt"]
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == names
    for rank in (0, 2):
        trace = json.loads((tmp_path / "profile" / f"rank-{rank}.pt.trace.json").read_text())
        spans = [event["name"] for event in trace["traceEvents"] if event.get("ph") == "X"]
        assert spans.count("forward") == 2 and any(name.startswith("ProfilerStep#") for name in spans), "two steps"
        stacks = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "python_function"]
        assert any("drumbeat/train/step.py" in name for name in stacks), "Python stacks"
        table = (tmp_path / "profile" / f"rank-{rank}.txt").read_text().splitlines()
        lines = [i for i, line in enumerate(table) if line and not line.strip("- ")]
        assert lines[2] - lines[1] - 1 == 10, "ten rows between the head and the end of the table"


def profiled(folder: str, texts: List[str]) -> None:
    os.environ["DRUMBEAT_FOLDER"] = folder
    try:
        train_llama(texts)
    finally:
        del os.environ["DRUMBEAT_FOLDER"]
