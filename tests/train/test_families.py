"""Models of transformers through `train.setup` on every layout: the losses of one process. `make layouts` tries all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
from families import LAYOUTS, VARIANTS, largest_difference, trained_with
from gloo_world import GlooWorld

pytest.importorskip("transformers", reason="a heavy development dependency: pip install transformers")

_alone: Dict[str, List[float]] = {}


def one_process(world: GlooWorld, family: str, more: Dict[str, Any]) -> List[float]:
    """What the same settings give in one process, without what only layouts know."""
    plain = {name: value for name, value in more.items() if name in ("tied", "freeze")}
    key = f"{family} {plain}"
    if key not in _alone:
        words, _alone[key] = world.run(trained_with, family, "ddp", plain, size=1)[0]
        assert not words and min(_alone[key]) < _alone[key][0], "the reference itself must learn"
    return _alone[key]


CASES = [
    ("GPT-2", "pp", {}),
    ("BERT", "fsdp", {}),
    ("Qwen 3 MoE", "ep+fsdp", {"recompute": "full"}),
    ("ViT", "pp", {"accumulate": 2}),
    ("Qwen 3", "cp", {"context": "ring", "accumulate": 2}),
    ("Llama", "cp", {"context": "ulysses", "accumulate": 4}),  # a rank may hold no label of a micro-batch that counts
    ("Llama", "pp", {"schedule": "interleaved"}),
    ("Llama", "pp", {"schedule": "zbv", "recompute": "full"}),
    ("Llama", "fsdp", VARIANTS["tied embedding"]),
    ("Llama", "tp", VARIANTS["frozen embedding"]),
]
# The same layouts with less in their way; GPT-2 with ddp is in test_api.py, and experts with ep in test_experts.py.
MORE: List[Tuple[str, str, Dict[str, Any]]] = [
    *(("Llama", name, {}) for name in ("tp", "pp", "cp", "fsdp")),
    ("GPT-2", "ddp", {}),
    ("Mixtral", "ep", {"accumulate": 2}),
]


@pytest.mark.parametrize("family,name,more", [*CASES, *(pytest.param(*each, marks=pytest.mark.proof) for each in MORE)])
def test_a_layout_gives_the_losses_of_one_process(
    world: GlooWorld, family: str, name: str, more: Dict[str, Any]
) -> None:
    want = one_process(world, family, dict(more))
    layout, size, own = LAYOUTS[name]
    for words, losses in world.run(trained_with, family, layout, {**own, **more}, size=size):
        assert not words and largest_difference(losses, want) < 1e-5, (words, losses[-3:], want[-3:])


REFUSED = [
    ("Mixtral", "tp", {}, "'packed_colwise'"),
    ("Llama", "ep", {}, "the model has no experts"),
    ("GPT-2", "tp", {}, "tensor parallelism needs a plan"),
    ("BERT", "cp", {}, "only causal language models"),
    ("Gemma 2", "cp", {}, "capped attention"),
    ("Llama", "pp", {"tied": True}, "are one matrix"),
    ("Llama", "pp", {"schedule": "zbv", "accumulate": 1}, "1 micro-batches for 2 ranks"),
    ("ViT", "pp", {"accumulate": 3}, "cannot be cut into 3 equal micro-batches"),
]


@pytest.mark.parametrize("family,name,more,words", REFUSED)
def test_what_cannot_be_exact_is_refused(
    world: GlooWorld, family: str, name: str, more: Dict[str, Any], words: str
) -> None:
    layout, size, own = LAYOUTS[name]
    for said, _ in world.run(trained_with, family, layout, {**own, **more}, size=size):
        assert words in said


def resumed(folder: str, layout: str, stop_after: int, more: Dict[str, Any]) -> List[float]:
    """Losses of the steps that this start made, and then those of an evaluation."""
    import torch
    from families import FAMILIES, ROWS, data_of

    from drumbeat import train

    torch.manual_seed(0)
    model = FAMILIES["Llama"](False)
    trainer = train.setup(model, torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-5), layout=layout, **more)
    trainer.load(folder)
    losses = []
    for batch in trainer.batches(data_of("Llama"), batch_size=ROWS):
        losses.append(float(trainer.step(batch).loss))
        if trainer.steps == stop_after:
            trainer.save(folder, wait=True)
            return losses
    return [*losses, trainer.evaluate(data_of("Llama"), batch_size=ROWS)["loss"]]


def test_a_pipeline_resumes_as_shards_and_a_cut_sequence_as_a_pipeline(world: GlooWorld, tmp_path: Path) -> None:
    whole = world.run(resumed, str(tmp_path / "whole"), "ddp", 0, {}, size=1)[0]
    for number, (first, second) in enumerate((("pp", "fsdp"), ("cp", "pp"))):
        folder, own = str(tmp_path / str(number)), {"pp": {"accumulate": 2, "schedule": "interleaved"}}
        begun = world.run(resumed, folder, first, 4, own.get(first, {}), size=2)[1]
        ended = world.run(resumed, folder, second, 0, own.get(second, {}), size=2)[1]
        assert begun + ended == pytest.approx(whole, rel=1e-5), (first, second)


def test_our_attention_is_the_models_own_and_compiles_in_one_piece() -> None:
    import torch
    from families import FAMILIES, data_of

    from drumbeat.train.hugging_face import Attention

    data = data_of("Llama")
    padded = {name: torch.stack([data[i][name] for i in range(4)]) for name in data[0]}
    whole = {name: padded[name] for name in ("input_ids", "labels")}
    for family in ("Qwen 3", "Phi", "Llama"):
        model = FAMILIES[family](False)
        want = [float(model(**batch, use_cache=False).loss.detach()) for batch in (padded, whole)]
        Attention(model, None)
        got = [float(model(**batch, use_cache=False).loss.detach()) for batch in (padded, whole)]
        assert got == pytest.approx(want, rel=1e-6), family
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.compile(fullgraph=True, backend="eager")
    assert float(model(**whole, use_cache=False).loss.detach()) == pytest.approx(want[1], rel=1e-6)
