"""Every layout computes what one process computes: the same losses, step by step, with the same global batch."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Sequence

import pytest
from gloo_world import GlooWorld

STEPS = 20 if "DRUMBEAT_PROOFS" in os.environ else 4  # a wrong gradient shows in the second
# fp32 sums in another order differ in the last bits (measured: up to 3e-7); a wrong gradient is off by far more.
TOLERANCE = 5e-6

LAYOUTS = [
    # layout, more settings, ranks; start=meta: the weights are made after cutting, as for the large shapes
    ("ddp", ("start=meta", "accumulate=2", "recompute=lean"), 4),
    ("fsdp", ("start=meta", "accumulate=2", "recompute=selective"), 4),
    ("hsdp", ("accumulate=2",), 4),
    ("tp=2,dp_shard=2", ("start=meta", "recompute=full"), 4),
    ("tp=2,dp_replicate=2", (), 4),
    ("cp=2,dp_replicate=2", (), 4),
    ("pp=2,cp=2", ("accumulate=2", "schedule=zero-bubble", "context=ring"), 4),
    ("pp=2,dp_shard=2", ("accumulate=4", "schedule=zbv"), 4),
]
# The same code on other meshes: `make proofs`.
MORE_LAYOUTS = [
    ("pp=2,tp=2", ("start=meta", "accumulate=2", "schedule=1f1b"), 4),  # BERT's on these ranks is below
    ("cp=2,dp_shard=2", ("context=ulysses",), 4),
    ("cp=2,dp_shard=2", ("context=ring",), 4),
    ("cp=2,dp_replicate=2", ("context=ring", "recompute=selective"), 4),
    ("cp=2,tp=2", ("context=ring",), 4),  # one key-value head a rank: Ulysses has none to cut
    ("pp=2,cp=2", ("accumulate=4", "schedule=interleaved", "context=ring"), 4),
    ("pp=2,cp=2", ("accumulate=4", "schedule=1f1b", "context=ulysses"), 4),
    ("pp=2,dp_replicate=2", ("accumulate=4", "schedule=zero-bubble"), 4),
    ("pp=2,dp_shard=2", ("accumulate=4", "schedule=zero-bubble"), 4),
    ("pp=2,dp_replicate=2", ("accumulate=4", "schedule=zbv"), 4),
    ("pp=2,dp_shard=2", ("start=meta", "accumulate=4", "schedule=interleaved"), 4),
    ("pp=2,tp=2", ("accumulate=4", "schedule=zbv"), 4),
    ("pp=2,cp=2", ("accumulate=4", "schedule=zbv", "context=ring", "recompute=full"), 4),
    ("pp=2,dp_shard=2", ("accumulate=4", "schedule=zero-bubble", "recompute=full"), 4),
    ("pp=2,dp_shard=2", ("accumulate=4", "schedule=1f1b", "offload=yes"), 4),
    ("pp=4", ("accumulate=4", "schedule=1f1b"), 4),
    ("pp=2,dp_replicate=2", ("accumulate=4", "schedule=1f1b"), 4),
    ("fsdp", ("offload=yes",), 4),
    ("ddp", ("hook=fp16",), 4),
    ("pp", ("accumulate=1", "schedule=gpipe"), 2),
    ("pp", ("accumulate=4", "schedule=zero-bubble"), 2),
]
# Three degrees at once, on eight ranks.
EIGHT_RANKS = [
    ("pp=2,tp=2,dp_shard=2", ("accumulate=2", "schedule=interleaved"), 8),
    ("pp=2,tp=2,dp_replicate=2", ("accumulate=2", "schedule=zero-bubble"), 8),
    ("pp=2,tp=2,cp=2", ("accumulate=2", "schedule=1f1b", "context=ring"), 8),
    ("pp=2,cp=2,dp_shard=2", ("accumulate=2", "schedule=zbv", "context=ulysses"), 8),
    ("cp=2,dp_replicate=2,dp_shard=2", ("context=ring",), 8),
    ("cp=2,dp_replicate=2,tp=2", ("context=ring",), 8),
    ("cp=4,dp_shard=2", (), 8),
]

BERT_LAYOUTS = [("pp=2,tp=2", ("untie=yes", "accumulate=2", "schedule=interleaved"), 4)]
MORE_BERT = [("tp=2,dp_shard=2", (), 4), ("pp=2,dp_replicate=2", ("untie=yes", "accumulate=2"), 4)]
WIDE = ("wide_resnet", "depth=10", "widening=1", "images=64", "batch=32", "epochs=2", "warmup=1", "base_lr=0.2")
SMALL = ("resnet", "depth=18", "size=64", "batch=16", "steps=4", "validation=8", "lr=0.01")


def proofs(cases: Sequence[tuple[Any, ...]]) -> List[Any]:
    return [pytest.param(*case, marks=pytest.mark.proof) for case in cases]


def losses(layout: str, more: tuple[str, ...], recipe: str = "llama") -> List[float]:
    import importlib

    from drumbeat.train.models import bert, llama
    from drumbeat.train.recipes import llama as llama_recipe
    from drumbeat.train.settings import fill

    llama.SHAPES["test"] = llama.LlamaShape(32, 4, 4, 2, 64, 256, 32)
    bert.SHAPES["test"] = bert.BertShape(32, 4, 4, 64, 264, 32, dropout=0.0)
    llama_recipe.LARGE = 0 if "start=meta" in more else 2_000_000_000
    module = importlib.import_module(f"drumbeat.train.recipes.{recipe}")
    texts = [
        "model=test",
        f"layout={layout}",
        f"steps={STEPS}",
        "batch=16",
        "report_every=1",
        "lr=1e-2",
        "validation=16",
    ]
    result = module.run(fill(module.SettingsClass, [*texts, *(text for text in more if text != "start=meta")]))
    return [*result.losses, result.validation[-1]["loss"]]


@pytest.fixture(scope="module")
def alone(world: GlooWorld) -> Dict[str, List[float]]:
    """What one process computes."""
    kinds = {"llama": ("llama",), "bert, untied": ("bert", "untie=yes")}
    images = [WIDE]
    if "DRUMBEAT_PROOFS" in os.environ:
        kinds["bert"], images = ("bert",), [WIDE, SMALL]
    made = {name: world.run(losses, "ddp", more, recipe, size=1)[0] for name, (recipe, *more) in kinds.items()}
    for values in made.values():
        assert values[0] > values[STEPS - 1] + 0.2, "the reference itself must learn"
    return {**made, **{recipe[0]: world.run(image_losses, *recipe, size=1)[0] for recipe in images}}


@pytest.mark.parametrize(("layout", "more", "ranks"), [*LAYOUTS, *proofs(MORE_LAYOUTS + EIGHT_RANKS)], ids=str)
def test_a_layout_computes_what_one_process_computes(
    world: GlooWorld, alone: Dict[str, List[float]], layout: str, more: tuple[str, ...], ranks: int
) -> None:
    tolerance = 5e-3 if "hook=fp16" in more else TOLERANCE
    for values in world.run(losses, layout, more, size=ranks):
        assert values == pytest.approx(alone["llama"], rel=tolerance)


@pytest.mark.parametrize(("layout", "more", "ranks"), [*BERT_LAYOUTS, *proofs(MORE_BERT)], ids=str)
def test_so_does_bert(
    world: GlooWorld, alone: Dict[str, List[float]], layout: str, more: tuple[str, ...], ranks: int
) -> None:
    want = alone["bert, untied" if "untie=yes" in more else "bert"]
    for values in world.run(losses, layout, more, "bert", size=ranks):
        assert values == pytest.approx(want, rel=TOLERANCE)


def image_losses(recipe: str, *texts: str) -> List[float]:
    import importlib

    from drumbeat.train.settings import fill

    module = importlib.import_module(f"drumbeat.train.recipes.{recipe}")
    result = module.run(fill(module.SettingsClass, ["classes=4", "report_every=1", *texts]))
    return [*result.losses, result.validation[-1]["loss"], result.validation[-1]["accuracy"]]


@pytest.mark.parametrize("recipe", [WIDE, *proofs([(SMALL,)])], ids=lambda recipe: recipe[0])
def test_images_over_two_devices(world: GlooWorld, alone: Dict[str, List[float]], recipe: tuple[str, ...]) -> None:
    """Plain model parallelism: the first half of the layers on one device, the second on another."""
    for values in world.run(image_losses, *recipe, "layout=pp", "schedule=gpipe", size=2):
        assert values == pytest.approx(alone[recipe[0]], rel=1e-4)
