"""Feed-forwards of experts, on one rank or divided between several."""

from __future__ import annotations

import os
from typing import Any, Dict, List

import pytest
from gloo_world import GlooWorld

STEPS = 20 if "DRUMBEAT_PROOFS" in os.environ else 4


def losses(layout: str, *more: str, experts: int = 4) -> List[float]:
    from drumbeat.train.models import llama
    from drumbeat.train.recipes import experts as recipe
    from drumbeat.train.settings import fill

    llama.SHAPES["test"] = llama.LlamaShape(32, 2, 4, 2, 48, 256, 32, experts=experts)
    texts = [
        "model=test",
        f"layout={layout}",
        f"steps={STEPS}",
        "batch=16",
        "report_every=1",
        "lr=1e-2",
        "validation=16",
    ]
    result = recipe.run(fill(recipe.SettingsClass, [*texts, *more]))
    return [*result.losses, *(row["loss"] for row in result.validation)]


@pytest.fixture(scope="module")
def alone(world: GlooWorld) -> List[float]:
    found: List[float] = world.run(losses, "ddp", size=1)[0]
    assert found[0] > found[STEPS - 1] + 0.2, "the reference itself must learn"
    return found


LAYOUTS = [
    ("ep", ("accumulate=2", "recompute=selective"), 4),
    ("ep=2,tp=2", ("recompute=full",), 4),
]  # and ep=2,dp_shard=2 below, in the run that is resumed
MORE = [
    ("ep=2,dp_shard=2", (), 4),
    ("ep=2,cp=2", (), 4),
    ("ep=2,dp_replicate=2", (), 4),
    ("dp_shard=2,tp=2", (), 4),
    ("fsdp", (), 2),
    ("ep", ("precision=fp32",), 2),
]


@pytest.mark.parametrize(
    ("layout", "more", "ranks"), [*LAYOUTS, *(pytest.param(*each, marks=pytest.mark.proof) for each in MORE)], ids=str
)
def test_divided_experts_learn_what_one_process_learns(
    world: GlooWorld, alone: List[float], layout: str, more: tuple[str, ...], ranks: int
) -> None:
    for values in world.run(losses, layout, *more, size=ranks):
        assert values == pytest.approx(alone, rel=1e-5)


def test_a_run_on_divided_experts_is_resumed_by_one_process(
    world: GlooWorld, alone: List[float], tmp_path: Any
) -> None:
    saved = (f"checkpoint={tmp_path}", "save_every=2")
    first = world.run(losses, "ep=2,dp_shard=2", *saved, "stop_after=3", size=4)[0]
    rest = world.run(losses, "ddp", *saved, size=1)[0]
    assert first[:3] + rest == pytest.approx(alone, rel=1e-5)


def refusal(layout: str, experts: int) -> str:
    from drumbeat.train import Refusal

    try:
        losses(layout, experts=experts)
    except Refusal as words:
        return str(words)
    return ""


@pytest.mark.parametrize(
    ("layout", "experts", "ranks", "words"),
    [
        ("ep", 6, 4, "6 experts cannot be divided between 4 ranks"),
        ("ep=2,dp_shard=3", 4, 6, "matrices of 32 and 96 rows cannot be divided between 3 ranks"),
        ("pp=2,ep=2", 6, 4, "layout pp with experts"),
    ],
)
def test_what_cannot_be_divided_is_refused(world: GlooWorld, layout: str, experts: int, ranks: int, words: str) -> None:
    assert all(words in said for said in world.run(refusal, layout, experts, size=ranks))


def test_experts_that_get_no_token_and_ranks_without_any_take_part(world: GlooWorld) -> None:
    more = ("chosen=1", "length=1")  # each rank has four tokens, for sixteen experts
    one = world.run(few_tokens, "ddp", *more, size=1)[0]
    for values in world.run(few_tokens, "ep", *more):
        assert values == pytest.approx(one, rel=1e-5)


def few_tokens(layout: str, *more: str) -> List[float]:
    return losses(layout, *more, experts=16)


def test_uneven_use_costs_up_to_the_number_of_experts() -> None:
    import torch

    from drumbeat.train.layers.feed_forward import Mixture

    layer = Mixture(8, 16, 4, 1)
    token = torch.arange(8).expand(3, -1)  # eight tokens in each of three sequences
    even = torch.full((3, 8, 4), 0.25)
    assert float(layer.unevenness(even, token[..., None] % 4)) == pytest.approx(24)
    one = torch.tensor([1.0, 0, 0, 0]).expand(3, 8, 4)
    assert float(layer.unevenness(one, torch.zeros(3, 8, 1, dtype=torch.long))) == pytest.approx(4 * 24)


def test_a_feed_forward_of_experts_computes_what_mixtral_does() -> None:
    import torch

    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    from drumbeat.train.layers.feed_forward import Mixture

    shape = {"hidden_size": 16, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
    theirs = MixtralSparseMoeBlock(transformers.MixtralConfig(**shape, experts_implementation="eager"))
    ours = Mixture(16, 24, 4, 2)
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    state: Dict[str, Any] = theirs.state_dict()
    ours.load_state_dict({name.replace("gate.weight", "router.weight"): value for name, value in state.items()})
    x, up = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    grads = []
    for layer in (ours, theirs):
        own = x.clone().requires_grad_()
        out = layer(own)
        (out[0] if layer is ours else out).backward(up)
        grads.append([own.grad, *(p.grad for p in layer.parameters())])
    names = (
        [name for name, _ in ours.named_parameters()],
        [name.replace("gate.weight", "router.weight") for name, _ in theirs.named_parameters()],
    )
    got, want = (dict(zip(["x", *own], values)) for own, values in zip(names, grads))
    for name, grad in want.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=1e-5, msg=name)


def test_an_export_is_a_mixtral_of_transformers(tmp_path: Any) -> None:
    import torch

    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    from drumbeat import train
    from drumbeat.train.models.llama import Llama, LlamaShape

    torch.manual_seed(0)
    model = Llama(LlamaShape(32, 2, 4, 2, 48, 256, 32, experts=4))
    trainer = train.setup(model, torch.optim.AdamW(model.parameters()))
    trainer.export(str(tmp_path))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "MixtralForCausalLM"
    tokens = torch.randint(0, 256, (2, 16))
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-4, atol=1e-5)
