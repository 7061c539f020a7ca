"""Every layout computes what one process computes: the same losses over 20 steps with the same global batch."""

from __future__ import annotations

from typing import List

import pytest
from gloo_world import GlooWorld

STEPS = 20
# fp32 sums in another order differ in the last bits, and training magnifies that; a wrong gradient is off by far more.
TOLERANCE = 2e-4

LAYOUTS = [
    ("ddp", ()),
    ("ddp", ("accumulate=2",)),
    ("fsdp", ()),
    ("fsdp", ("accumulate=2", "recompute=selective")),
    ("hsdp", ("accumulate=2",)),
    ("tp=2,dp_shard=2", ()),
    ("tp=2,dp_replicate=2", ("recompute=full",)),
    ("cp=2,dp_replicate=2", ()),
    ("cp=2,dp_shard=2", ()),
    ("pp", ("accumulate=4", "schedule=1f1b")),
    ("pp=2,dp_replicate=2", ("accumulate=4", "schedule=gpipe")),
    ("pp=2,dp_shard=2", ("accumulate=4", "schedule=interleaved")),
    ("pp=2,tp=2", ("accumulate=4", "schedule=1f1b")),
    ("pp=2,dp_replicate=2", ("accumulate=4", "schedule=zero-bubble")),
    ("pp=2,dp_replicate=2", ("accumulate=4", "schedule=zbv")),
]


def losses(layout: str, more: "tuple[str, ...]") -> List[float]:
    from drumbeat.train.recipes.llama import LlamaSettings, run
    from drumbeat.train.settings import fill
    from drumbeat.train.models import llama

    llama.SHAPES["test"] = llama.LlamaShape(32, 4, 4, 2, 64, 256, 32)
    texts = ["model=test", f"layout={layout}", f"steps={STEPS}", "batch=16", "report_every=1", "lr=1e-2", "validation=16"]
    result = run(fill(LlamaSettings, [*texts, *more]))
    return [*result.losses, result.validation[-1]["loss"]]


@pytest.fixture(scope="module")
def alone(world: GlooWorld) -> List[float]:
    (values,) = world.run(losses, "ddp", (), size=1)
    assert values[0] > values[19] + 0.5, "the reference itself must learn"
    return values


@pytest.mark.parametrize(("layout", "more"), LAYOUTS, ids=lambda value: " ".join(value) if isinstance(value, tuple) else value)
def test_a_layout_computes_what_one_process_computes(world: GlooWorld, alone: List[float], layout: str, more: "tuple[str, ...]") -> None:
    for values in world.run(losses, layout, more):
        assert values == pytest.approx(alone, rel=TOLERANCE)
