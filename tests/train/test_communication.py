"""How long ranks talk, and how much of it is not hidden."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Dict, List

import pytest
from gloo_world import GlooWorld

from drumbeat.train.measure import Event, host_spans, lengths


def test_exposed_is_what_no_computing_covers() -> None:
    assert lengths([(0, 10), (5, 20), (30, 40)], [(8, 12), (10, 15), (35, 50), (60, 70)]) == (30, 18)
    assert lengths([(0, 10)], []) == (10, 10)
    assert lengths([], [(0, 10)]) == (0, 0)
    assert lengths([(2, 4), (6, 8)], [(0, 10)]) == (4, 0)


def test_an_operator_that_waits_for_an_exchange_is_not_computing() -> None:
    events = [
        Event("aten::linear", 0, 100, 1),  # of a cut tensor: it holds a collective and the product
        Event("_c10d_functional::wait_tensor", 10, 60, 1),
        Event("aten::mm", 60 + 1, 90, 1),
        Event("gloo:all_gather", 10, 60, 2),
        Event("aten::mul", 40, 50, 3),  # another thread computes meanwhile
        Event("autograd::engine", 0, 100, 1),
    ]
    collectives, computing = host_spans(events)
    assert collectives == [(10, 60)] and sorted(computing) == [(40, 50), (61, 90)]
    assert lengths(collectives, computing) == (50, 40)


def figures(file: str, layout: str, sleep: float = 0.0) -> Dict[str, Any]:
    """What this rank reports about a short run; rank 1 comes `sleep` seconds late to every collective."""
    import torch
    import torch.distributed as dist

    from drumbeat.train.models import llama
    from drumbeat.train.recipes.llama import LlamaSettings, run
    from drumbeat.train.settings import fill
    from drumbeat.train.step import Step

    llama.SHAPES["test"] = llama.LlamaShape(32, 2, 4, 2, 64, 256, 32)
    os.environ["DRUMBEAT_METRICS"] = file
    count = Step._count

    def late(self: Step, batches: Any) -> torch.Tensor:
        if dist.is_initialized() and dist.get_rank() == 1:
            time.sleep(sleep)
        return count(self, batches)

    Step._count = late  # type: ignore[method-assign]
    try:
        texts = [f"layout={layout}", "model=test", "steps=8", "batch=8", "accumulate=2", "validation=0"]
        return run(fill(LlamaSettings, [*texts, "report_every=4"])).figures
    finally:
        Step._count = count  # type: ignore[method-assign]


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp", "pp"])
def test_every_rank_reports_its_communication(world: GlooWorld, tmp_path: Path, layout: str) -> None:
    file = tmp_path / "metrics.jsonl"
    for values in world.run(figures, str(file), layout, size=2):
        assert 0 < values["communication_exposed_ms"] <= values["communication_ms"] < values["watched_step_ms"]
        assert values["watching_ms"] > 0
    lines: List[Dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    watched = [(line["rank"], line["step"]) for line in lines if "communication_ms" in line]
    assert sorted(watched) == [(0, 8), (1, 8)], "after the warm-up, at a report, once"


def test_waiting_for_a_late_rank_is_exposed_on_the_one_that_waits(world: GlooWorld, tmp_path: Path) -> None:
    waits, _ = world.run(figures, str(tmp_path / "m"), "ddp", 0.5, size=2)
    assert waits["communication_exposed_ms"] > 400


def test_one_rank_has_no_communication(world: GlooWorld, tmp_path: Path) -> None:
    (values,) = world.run(figures, str(tmp_path / "m"), "ddp", size=1)
    assert "communication_ms" not in values and values["loss"] > 0


def reported_seconds(layout: str, slow_rank: int) -> List[Dict[str, Any]]:
    """What a rank reports; one of them sleeps in every forward pass."""
    import os

    from drumbeat import metrics
    from drumbeat.train.models import llama
    from drumbeat.train.recipes.llama import LlamaSettings, run
    from drumbeat.train.settings import fill

    lines: List[Dict[str, Any]] = []
    forward, report = llama.Llama.forward, metrics.report

    def slow(self: Any, *args: Any, **more: Any) -> Any:
        if int(os.environ["RANK"]) == slow_rank and self.training:
            time.sleep(1.5)
        return forward(self, *args, **more)

    llama.SHAPES["test"] = llama.LlamaShape(32, 2, 4, 2, 64, 256, 32)
    llama.Llama.forward = slow  # type: ignore[method-assign]
    metrics.report = lambda step=None, **more: lines.append({"step": step, **more})  # type: ignore[assignment]
    try:
        texts = ["steps=8", "batch=4", "length=8", "validation=4", "model=test", "data=synthetic", "report_every=3"]
        run(fill(LlamaSettings, [*texts, f"layout={layout}"]))
    finally:
        llama.Llama.forward = forward  # type: ignore[method-assign]
        metrics.report = report
    return [line for line in lines if line.get("kind") == "step"]


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_slow_rank_is_seen_in_its_own_seconds(world: GlooWorld, layout: str) -> None:
    """Both ranks take equally long for a step, for the fast one waits. ddp tells in every report after the warm-up, shards
    where communication was watched."""
    fast, slow = world.run(reported_seconds, layout, 1, size=2)
    own = [[line["seconds"] for line in lines if "seconds" in line] for lines in (fast, slow)]
    assert all(own), "every rank says how long it took itself"
    assert min(own[1]) >= 1.5
    assert min(own[0]) < min(own[1])
