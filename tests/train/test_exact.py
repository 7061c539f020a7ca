"""--verify-resume, in every precision and layout that a CPU can do: what was saved comes back bit by bit, and a resumed run
equals an uninterrupted one."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
from gloo_world import GlooWorld

Case = Tuple[str, List[str]]

TEXT = ["steps=3", "batch=4", "length=8", "validation=4", "model=test", "data=synthetic"]
BERT = [text for text in TEXT if text != "data=synthetic"]
IMAGES = ["classes=4", "images=32", "batch=16", "epochs=1", "warmup=1", "depth=10", "widening=1", "base_lr=0.2"]

ONE: List[Case] = [
    ("llama", [*TEXT, "precision=fp32"]),
    ("llama", [*TEXT, "precision=bf16-master"]),
    ("llama", [*TEXT, "precision=fp8"]),
    ("llama", [*TEXT, "precision=fp16"]),
]
TWO: List[Case] = [
    ("llama", [*TEXT, "layout=ddp", "precision=fp32", "hook=powersgd:1:0"]),  # what ranks have not sent yet
    ("llama", [*TEXT, "layout=fsdp", "precision=fp8"]),
    ("llama", [*TEXT, "layout=pp", "precision=bf16-master", "accumulate=2", "untie=yes"]),
    ("bert", [*BERT, "layout=ddp", "precision=bf16"]),  # dropout draws from each rank's own generator
    ("wide_resnet", [*IMAGES, "layout=ddp"]),  # running means differ between the ranks
]
MORE_TWO: List[Case] = [
    ("llama", [*TEXT, "layout=ddp", "precision=bf16-master", "accumulate=2"]),
    ("llama", [*TEXT, "layout=ddp", "precision=fp16"]),
    ("llama", [*TEXT, "layout=fsdp", "precision=fp32", "offload=yes"]),
    ("llama", [*TEXT, "layout=tp", "precision=bf16-master"]),
    ("llama", [*TEXT, "layout=cp", "precision=bf16"]),
    ("wide_resnet", [*IMAGES, "layout=fsdp", "recompute=full"]),
]
FOUR: List[Case] = [
    ("llama", [*TEXT, "layout=ddp", "precision=fp32"]),  # three sums or more depend on their order
    ("llama", [*TEXT, "layout=tp=2,dp_shard=2", "precision=bf16"]),
]
MORE_FOUR: List[Case] = [
    ("llama", [*TEXT, "layout=hsdp", "precision=bf16"]),
    ("llama", [*TEXT, "layout=pp=2,dp_shard=2", "precision=fp32", "accumulate=2", "schedule=zbv", "model=four"]),
]


def verified(cases: List[Case], folder: str) -> List[Tuple[str, bool]]:
    from drumbeat.train.layers import float8
    from drumbeat.train.models import bert, llama
    from drumbeat.train.settings import fill
    from drumbeat.train.verify_resume import verify_resume

    llama.SHAPES["test"] = llama.LlamaShape(32, 2, 4, 2, 64, 256, 32)
    llama.SHAPES["four"] = llama.LlamaShape(32, 4, 4, 2, 64, 256, 32)
    bert.SHAPES["test"] = bert.BertShape(32, 2, 4, 64, 264, 32, dropout=0.1)
    refusing, float8.supported = float8.supported, lambda _device: None  # fp8 on a CPU is slow and otherwise right
    try:
        answers = []
        for name, texts in cases:
            recipe = importlib.import_module(f"drumbeat.train.recipes.{name}")
            settings = fill(recipe.SettingsClass, [*texts, f"checkpoint={folder}"])
            answers.append((" ".join([name, *texts]), verify_resume(recipe, settings)))
        return answers
    finally:
        float8.supported = refusing


@pytest.mark.parametrize(
    ("cases", "ranks"),
    [
        pytest.param(ONE, 1, id="one"),
        pytest.param(TWO, 2, id="two"),
        pytest.param(FOUR, 4, id="four", marks=pytest.mark.proof),
        pytest.param(MORE_TWO, 2, id="more-two", marks=pytest.mark.proof),
        pytest.param(MORE_FOUR, 4, id="more-four", marks=pytest.mark.proof),
    ],
)
def test_resume_is_exact(world: GlooWorld, tmp_path: Path, cases: List[Case], ranks: int) -> None:
    for answers in world.run(verified, cases, str(tmp_path), size=ranks, seconds=850):
        assert [case for case, exact in answers if not exact] == []
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"


def test_a_state_that_is_not_restored_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """As torch's own loading did: the optimizer's state in the dtype of the parameters."""
    import torch

    from drumbeat.train.checkpoint.state import TrainingState

    restore = TrainingState.restore

    def rounded(self: TrainingState, state: Dict[str, Any]) -> None:
        restore(self, state)
        for values in self.optimizer.state.values():
            values["master"].copy_(values["master"].to(torch.bfloat16))

    monkeypatch.setattr(TrainingState, "restore", rounded)
    ((_, exact),) = verified([("llama", [*TEXT, "precision=bf16-master"])], str(tmp_path))
    said = capsys.readouterr().out
    assert not exact and "resume is NOT exact (interrupted after step 1):" in said
    assert "optimizer.state.blocks.0.attention.out.weight.master is not restored" in said


def whole_state(folder: str, layout: str, precision: str, *more: str) -> Dict[str, str]:
    """Hashes of the whole tensors, however they are cut, of a model and its optimizer after resuming (or training)."""
    from torch import Tensor

    from drumbeat.train import loop
    from drumbeat.train.checkpoint.state import TrainingState, tensor_hash
    from drumbeat.train.models import llama
    from drumbeat.train.recipes.llama import LlamaSettings, run
    from drumbeat.train.settings import fill
    from drumbeat.train.step import full_tensor

    llama.SHAPES["test"] = llama.LlamaShape(32, 2, 4, 2, 64, 256, 32)
    trainers: List[Any] = []
    made = loop._train

    def kept(settings: Any, trainer: Any, *args: Any) -> Any:
        trainers.append(trainer)
        return made(settings, trainer, *args)

    loop._train = kept
    try:
        run(
            fill(
                LlamaSettings,
                [*TEXT, "steps=2", f"layout={layout}", f"precision={precision}", f"checkpoint={folder}", *more],
            )
        )
    finally:
        loop._train = made
    state = TrainingState(trainers[0].parts, trainers[0].optimizer).now()
    tensors = {f"{kind}.{name}": value for kind in ("model", "optimizer") for name, value in state[kind].items()}
    return {name: tensor_hash(full_tensor(value)) for name, value in tensors.items() if isinstance(value, Tensor)}


def test_on_another_number_of_ranks_weights_and_optimizer_are_still_exact(world: GlooWorld, tmp_path: Path) -> None:
    sharded, master = str(tmp_path / "sharded"), str(tmp_path / "master")
    want = world.run(whole_state, sharded, "fsdp", "bf16", "save_every=1")[0]  # by four ranks
    assert world.run(whole_state, sharded, "tp", "bf16", size=2)[0] == want
    want_master = world.run(whole_state, master, "ddp", "bf16-master", "save_every=1", size=2)[0]
    assert world.run(whole_state, sharded, "ddp", "bf16", size=1)[0] == want
    assert world.run(whole_state, master, "ddp", "bf16-master", size=1)[0] == want_master
    assert any("float32" in value for name, value in want_master.items() if name.endswith("master"))
