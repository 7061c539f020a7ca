"""Wrong input: one clear line, exit code 2, nothing started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, List, Tuple

import pytest
import torch
from gloo_world import GlooWorld
from torch.distributed.pipelining import PipelineStage

from drumbeat.cli import main
from drumbeat.train.parallel import Layout
from drumbeat.train.parallel.context import KINDS
from drumbeat.train.parallel.pipeline import SCHEDULES, Pipeline
from drumbeat.train.refusal import Refusal
from drumbeat.train.settings import WORDS

SMALL = ["steps=2", "batch=2", "validation=0", "report_every=1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lama"], ["no recipe 'lama'", "did you mean 'llama'?"]),
        (["llama", "--set", "stepz=3"], ["no setting 'stepz'", "did you mean steps?"]),
        (["llama", "--set", "steps=many"], ["steps=many", "a whole number"]),
        (["llama", "--set", "steps=-1"], ["steps=-1", "a whole number of at least 0"]),
        (["llama", "--set", "lr=nan"], ["lr=nan", "a number of at least 0"]),
        (["bert", "--set", "lr=-1"], ["lr=-1", "a number of at least 0"]),
        (["resnet", "--set", "lr=1e400"], ["lr=1e400", "a number of at least 0"]),
        (["resnet", "--set", "batch=0"], ["batch=0", "a whole number of at least 1"]),
        (["wide-resnet", "--set", "keep=-1"], ["keep=-1", "a whole number of at least 0"]),
        (["wide-resnet", "--set", "save_every=-5"], ["save_every=-5", "a whole number of at least 0"]),
        (["llama", "--set", "report_every=-1"], ["report_every=-1", "a whole number of at least 0"]),
        (["llama", "--set", "warmup=-2"], ["warmup=-2", "a whole number of at least -1"]),
        (["llama", "--set", "compile=maybe"], ["compile=maybe", "yes or no"]),
        (["llama", "--set", "steps"], ["'steps' is no setting", "key=value"]),
        (["llama", "--set", "model=2b"], ["no llama shape '2b'", "byte-tiny"]),
        (["llama", "--layout", "zebra"], ["cannot read 'zebra'", "dp_shard=4,tp=2"]),
        (["llama", "--layout", "tp=2"], ["pp 1 x dp_replicate 1 x dp_shard 1 x cp 1 x tp 2 = 2", "there is 1 rank"]),
        (["llama", "--set", "precision=fp4"], ["precision 'fp4' is unknown", "bf16"]),
        (["llama", "--set", "precision=fp8"], ["fp8 products need a GPU"]),
        (["llama", "--set", "hook=bf16"], ["no data-parallel ranks"]),
        (["llama", "--set", "offload=yes"], ["only shards can live in CPU memory"]),
        (["llama", "--set", "recompute=some"], ["recompute 'some' is unknown"]),
        (["llama", "--set", "batch=3", "accumulate=2"], ["batch of 3", "1 data-parallel ranks x 2 micro-batches"]),
        (["llama", "--set", "on_nan=hope"], ["on_nan 'hope' is unknown"]),
        (["llama", "--set", "context=rign"], ["context 'rign' is unknown", "ulysses"]),
        (["llama", "--set", "schedule=2f2b"], ["schedule '2f2b' is unknown", "zbv"]),
        (["llama", "--set", "profile=0:soon"], ["profile=0:soon cannot be read", "0:10:3"]),
        (["llama", "--set", "figures=paper"], ["'paper' is no place for figures"]),
        (["llama", "--set", "data=/nowhere/at/all"], ["/nowhere/at/all: no such file or folder"]),
        (["bert", "--set", "data=tokens.bin"], ["tokens.bin: no such file or folder"]),
        (["resnet", "--set", "depth=34"], ["no ResNet-34"]),
        (["wide-resnet", "--set", "data=/usr"], ["train.bin: not there", "cifar-100-python/train"]),
        (["llama", "--set", "smallest=9"], ["this recipe does not use 'smallest'", "its blocks are FSDP's units"]),
        (["wide-resnet", "--set", "lr=0.1"], ["this recipe does not use 'lr'", "base_lr sets the learning rate"]),
    ],
)
def test_one_clear_line(arguments: List[str], words: List[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") <= 2, said
    for word in words:
        assert word in said, said


def test_a_loss_that_is_no_number_is_one_clear_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "llama", "--set", *SMALL, "lr=1e30", "clip=0", "warmup=0", "steps=4"]) == 1
    said = capsys.readouterr().err
    assert (
        "FloatingPointError: loss or gradients are not finite at or before step 2" in said and "Traceback" not in said
    )


def test_the_words_of_settings_are_those_that_the_layouts_know() -> None:
    assert (WORDS["schedule"], WORDS["context"]) == (tuple(SCHEDULES), KINDS)


@pytest.mark.parametrize(
    ("recipe", "texts", "words"),
    [
        ("finetune", ["weights=Llama-3.2-1B", "data=chat"], "weights=Llama-3.2-1B: no such file or folder"),
        ("finetune", ["weights=HERE", "data=chat"], "weights=HERE: there is no config.json in it"),
        ("finetune", ["weights=MODEL", "data=HERE:0.7,chat:0.3"], "data=chat: no such file or folder"),
        ("finetune", ["weights=MODEL", "data=HERE", "adapter=HERE"], "there is no adapter_config.json in it"),
        ("llama", ["weights=HERE"], "weights=HERE: there is no config.json in it"),
        ("llama", ["data=tokens.bin"], "data=tokens.bin: no such file or folder"),
        ("bert", ["data=texts"], "data=texts: no such file or folder"),
        ("resnet", ["data=~/no/images"], "/no/images: no such file or folder"),
        ("wide-resnet", ["data=cifar"], "data=cifar: no such file or folder"),
    ],
)
def test_a_path_that_is_not_there_is_refused_before_anything_is_loaded(
    recipe: str, texts: List[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, model = tmp_path / "here", tmp_path / "model"
    here.mkdir()
    model.mkdir()
    (model / "config.json").write_text("{}")
    filled = [text.replace("HERE", str(here)).replace("MODEL", str(model)) for text in texts]
    assert main(["train", recipe, "--set", *filled]) == 2
    said = capsys.readouterr().err
    assert words.replace("HERE", str(here)) in said and " takes: " in said and said.count("\n") == 2, said


def test_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "llama", "--set", f"data={tmp_path}", *SMALL]) == 2
    assert "no text in it" in capsys.readouterr().err


def test_a_checkpoint_of_another_model_and_a_corrupt_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [*SMALL, f"checkpoint={tmp_path}", "save_every=2"]
    assert main(["train", "llama", "--set", *settings]) == 0
    capsys.readouterr()
    assert main(["train", "bert", "--set", *settings]) == 2
    assert "was saved from another model (131,392 parameters)" in capsys.readouterr().err
    (shard,) = (tmp_path / "step-00000002").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    assert main(["train", "llama", "--set", *settings, "steps=4"]) == 2
    assert "cannot be read" in capsys.readouterr().err
    (tmp_path / "step-00000002" / "commit.json").write_text(json.dumps({"step": 2}))
    assert main(["train", "llama", "--set", *settings]) == 2
    assert "delete this checkpoint" in capsys.readouterr().err


def test_layout_equations() -> None:
    assert Layout(dp_replicate=-1, dp_shard=4).for_world(16) == Layout(dp_replicate=4, dp_shard=4)
    assert Layout.parse("hsdp", ranks_per_node=8).for_world(16) == Layout(dp_replicate=2, dp_shard=8)
    with pytest.raises(Refusal, match="both -1"):
        Layout(dp_shard=-1, tp=-1).for_world(4)
    with pytest.raises(Refusal, match=r"dp_shard n x cp 1 x tp 3 = 3 x n, but there are 4 ranks"):
        Layout(dp_shard=-1, tp=3).for_world(4)
    with pytest.raises(Refusal, match="twice"):
        Layout.parse("tp=2,tp=2")
    with pytest.raises(Refusal, match="tp is 0"):
        Layout(tp=0).for_world(4)


LAYOUTS = [
    ("llama", ["layout=cp=2,tp=2", "context=ulysses"], "1 key-value heads do not divide by 2"),
    ("llama", ["layout=cp=4", "length=36", "context=ring"], "36 tokens do not divide into 8 pieces"),
    ("llama", ["layout=cp=2,tp=2", "length=34"], "17 tokens"),
    ("llama", ["layout=cp", "context=circle"], "context 'circle' is unknown"),
    ("llama", ["layout=pp=2,dp_shard=2", "schedule=zbv", "recompute=selective"], "asks for it twice"),
    ("llama", ["layout=pp=2,dp_replicate=2", "schedule=1f1b", "hook=fp16"], "this is a pipeline"),
    ("llama", ["layout=tp=4"], "tensor parallelism 4: it must divide 2 key-value heads"),
    ("bert", ["layout=pp=2,dp_shard=2"], "are one matrix"),
    ("bert", ["layout=cp"], "too few to be worth cutting"),
    ("bert", ["layout=tp=4", "length=30"], "30 tokens"),
    ("resnet", ["layout=tp"], "the filters of an image model are small"),
    ("wide_resnet", ["layout=cp"], "an image is none"),
]


def refused(cases: List[Tuple[str, List[str], str]]) -> List[str]:
    import importlib

    from drumbeat.train.settings import fill

    said = []
    for recipe, texts, _ in cases:
        module = importlib.import_module(f"drumbeat.train.recipes.{recipe}")
        with pytest.raises(Refusal) as caught:
            module.run(fill(module.SettingsClass, texts))
        said.append(str(caught.value))
    return said


def test_a_layout_that_cannot_work_is_refused_on_every_rank_with_the_reason(world: GlooWorld) -> None:
    for said in world.run(refused, LAYOUTS):
        for sentence, (_, _, words) in zip(said, LAYOUTS):
            assert words in sentence, sentence


@pytest.mark.parametrize("recipe,layout", [("resnet", "tp"), ("wide_resnet", "cp"), ("resnet", "dp_shard=4")])
def test_one_process_refuses_before_any_data_is_made(recipe: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    from drumbeat.train.settings import fill

    module = importlib.import_module(f"drumbeat.train.recipes.{recipe}")
    monkeypatch.setattr(module, "samples", lambda *_: pytest.fail("data was made first"))
    with pytest.raises(Refusal):
        module.run(fill(module.SettingsClass, [f"layout={layout}"]))


def test_a_pipeline_is_refused_where_torch_is_too_old_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(PipelineStage, "_compute_outputs")  # as before torch 2.13
    mesh: Any = None
    with pytest.raises(Refusal, match="over gloo"):
        Pipeline([], mesh, torch.device("cpu"), "1f1b", 2)
