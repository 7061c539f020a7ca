"""Weights in and out: safetensors as transformers writes and reads them, each rank its own part."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, List

import pytest
import torch
from gloo_world import GlooWorld
from torch import nn

from drumbeat import train
from drumbeat.cli import main
from drumbeat.train import safetensors
from drumbeat.train.refusal import Refusal

transformers = pytest.importorskip("transformers", reason="a heavy development dependency: pip install transformers")
TOKENS = torch.randint(0, 64, (8, 12), generator=torch.Generator().manual_seed(5))


def small(tied: bool = False, vocabulary: int = 64) -> Any:
    return transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=tied,
    )  # fmt: skip


def saved(folder: Path, tied: bool = False) -> Path:
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(small(tied)).save_pretrained(folder, max_shard_size="20KB")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    return folder


def continued(source: str, target: str, layout: str, meta: bool, steps: int = 3) -> List[float]:
    """What a user's script does; the ranks build the model without memory."""
    torch.manual_seed(int(os.environ["RANK"]))
    config = transformers.LlamaConfig.from_pretrained(source)
    if meta:
        with train.on_meta():
            model = transformers.LlamaForCausalLM(config)
        assert all(p.is_meta for p in model.parameters())
    else:
        model = transformers.LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = train.setup(model, optimizer, layout=layout, weights=source if meta else "")
    losses = [
        float(trainer.step({"input_ids": x, "labels": x}).loss) for _ in range(steps) for x in trainer.batches([TOKENS])
    ]
    trainer.export(target)
    return losses


@pytest.mark.parametrize(
    "layout,size,tied",
    [("ddp", 2, True), ("fsdp", 2, False), ("tp", 2, True), ("dp_shard=2,tp=2", 4, False), ("hsdp", 4, True)],
)
def test_from_safetensors_to_safetensors(world: GlooWorld, tmp_path: Path, layout: str, size: int, tied: bool) -> None:
    source = saved(tmp_path / "source", tied)
    want = world.run(continued, str(source), str(tmp_path / "want"), "ddp", False, size=1)[0]
    for losses in world.run(continued, str(source), str(tmp_path / "got"), layout, True, size=size):
        assert losses == pytest.approx(want, rel=1e-5)
    theirs, ours = (transformers.LlamaForCausalLM.from_pretrained(tmp_path / name) for name in ("want", "got"))
    torch.testing.assert_close(ours(TOKENS).logits, theirs(TOKENS).logits, rtol=1e-4, atol=1e-5)
    assert sorted(path.name for path in (tmp_path / "got").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json",
    ]  # fmt: skip


SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
RENAMED = {
    "MixtralForCausalLM": {**SHAPE, "vocab_size": 64, "num_key_value_heads": 2, "num_local_experts": 11},
    "ViTForImageClassification": {**SHAPE, "image_size": 16, "patch_size": 4},
    "BertForMaskedLM": {**SHAPE, "vocab_size": 64},
}


def brought_and_exported(source: str, target: str) -> str:
    config = transformers.AutoConfig.from_pretrained(source)
    with train.on_meta():
        model = getattr(transformers, config.architectures[0])(config)
    trainer = train.setup(model, torch.optim.SGD(model.parameters()), layout="fsdp", weights=source)
    trainer.export(target)
    return refused_export(trainer, target + "-full")


def refused_export(trainer: Any, target: str) -> str:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # as on a disk that is full
    try:
        trainer.export(target)
        return ""
    except Refusal as refusal:
        return str(refusal)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("name", RENAMED)
def test_what_comes_back_is_what_save_pretrained_writes(world: GlooWorld, tmp_path: Path, name: str) -> None:
    kind, source, target = getattr(transformers, name), tmp_path / "source", tmp_path / "target"
    kind(kind.config_class(**RENAMED[name])).save_pretrained(source)
    for words in world.run(brought_and_exported, str(source), str(target), size=2):
        assert "cannot be written: File too large" in words, words
    assert list((tmp_path / "target-full").iterdir()) == [], "nothing of it is left"
    theirs, ours = safetensors.Tensors(str(source)), safetensors.Tensors(str(target))
    assert sorted(ours.places) == sorted(theirs.places)
    assert all(torch.equal(ours.read(each), theirs.read(each)) for each in theirs.places)
    assert json.loads((target / "config.json").read_text())["architectures"] == [name]


def test_files_are_those_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("safetensors.torch")
    tensors = {
        "a": torch.randn(5, 7),
        "b": torch.arange(6).view(2, 3),
        "c": torch.randn(4, 4).bfloat16(),
        "d": torch.zeros(0, 3),
    }
    library.save_file(tensors, str(tmp_path / "model.safetensors"))
    read = safetensors.Tensors(str(tmp_path))
    assert all(torch.equal(read.read(name), tensor) for name, tensor in tensors.items())
    assert torch.equal(read.read("a", (slice(1, 4), slice(2, 6))), tensors["a"][1:4, 2:6])
    monkeypatch.setattr(safetensors, "_FILE_BYTES", 100)
    entries = {name: safetensors.Entry(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    (tmp_path / "out").mkdir()
    files = safetensors.write(str(tmp_path / "out"), entries, tensors.__getitem__)
    assert len(files) > 1
    again = {name: tensor for file in files for name, tensor in library.load_file(tmp_path / "out" / file).items()}
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    (tmp_path / "out" / files[0]).unlink()
    with pytest.raises(Refusal, match="is not there, and model.safetensors.index.json names it"):
        safetensors.Tensors(str(tmp_path / "out"))


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{}x", b"\x01\0\0\0\0\0\0\0[", (10**6).to_bytes(8, "little") + b"{"]
)
def test_a_damaged_file_is_one_line(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    try:
        assert safetensors.Tensors(str(tmp_path)).places == {}
    except Refusal as refusal:
        assert "cannot be read" in str(refusal)
    entry = json.dumps({"x": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(entry).to_bytes(8, "little") + entry + b"short")
    with pytest.raises(Refusal, match="x does not lie inside the file"):
        safetensors.Tensors(str(tmp_path))


def test_a_new_head_or_another_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "source")
    theirs = transformers.LlamaForCausalLM.from_pretrained(source)
    model = transformers.LlamaForCausalLM(small(vocabulary=70))
    first = model.lm_head.weight.detach().clone()
    train.setup(model, torch.optim.SGD(model.parameters()), weights=str(source))
    assert "21 of 21 tensors from" in (said := capsys.readouterr().out)
    assert "the rows that both have: model.embed_tokens.weight, lm_head.weight" in said
    assert torch.equal(model.lm_head.weight[:64], theirs.lm_head.weight) and torch.equal(
        model.lm_head.weight[64:], first[64:]
    )
    headed = transformers.LlamaForSequenceClassification(small())
    train.setup(headed, torch.optim.SGD(headed.parameters()), weights=str(source))
    assert "20 of 21 tensors from" in (said := capsys.readouterr().out) and "as they were: score.weight" in said
    with pytest.raises(Refusal, match="has no tensor of this model"):
        train.setup(other := nn.Linear(2, 2), torch.optim.SGD(other.parameters()), weights=str(source))
    with train.on_meta():
        empty = transformers.LlamaForCausalLM(small(vocabulary=70))
    with pytest.raises(Refusal, match="pass weights=FOLDER"):
        train.setup(empty, torch.optim.SGD(empty.parameters()))
    with pytest.raises(Refusal, match="is not in .* with this shape"):
        train.setup(empty, torch.optim.SGD(empty.parameters()), weights=str(source))


def test_a_recipe_goes_on_from_downloaded_weights_and_gives_them_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path / "source", tied=True)
    run = [
        f"weights={source}",
        f"checkpoint={tmp_path / 'run'}",
        "steps=2",
        "batch=4",
        "save_every=2",
        "validation=0",
        "length=16",
    ]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(bytes(range(33, 63)) * 100)
    run.append(f"data={tmp_path / 'text'}")
    assert main(["train", "llama", "--set", *run, "lr=1e-9"]) == 0, capsys.readouterr()
    assert "weights: 14 of 14 tensors" in capsys.readouterr().out
    assert main(["train", "export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    assert "tensors, 0.00 GiB, in 1 file in" in capsys.readouterr().out
    theirs, ours = (transformers.LlamaForCausalLM.from_pretrained(tmp_path / name) for name in ("source", "out"))
    torch.testing.assert_close(ours(TOKENS).logits, theirs(TOKENS).logits, rtol=1e-4, atol=1e-5)
    assert (tmp_path / "out" / "tokenizer_config.json").exists() and not list((tmp_path / "out").glob("*.py"))
    assert main(["train", "export", str(tmp_path / "run"), "--to", str(tmp_path / "half"), "--dtype", "bf16"]) == 0
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "words,said",
    [
        (["export", "{}"], "no folder to write to"),
        (["export", "{}/none", "--to", "{}/out"], "none"),
        (["export", "{}/run", "--to", "{}/out", "--step", "7"], "no checkpoint of step 7; there are 2"),
        (
            ["llama", "--set", "weights={}/nowhere"],
            "/nowhere: no such file or folder; weights takes: folder with config.json",
        ),
        (["llama", "--set", "weights={}"], "there is no config.json in it"),
        (["llama", "--set", "weights={}", "model=1b"], "weights and model=1b together"),
        (["llama", "extra"], "'extra' after the recipe llama"),
    ],
)
def test_what_cannot_be_exported_or_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: List[str], said: str
) -> None:
    if "--step" in words:
        settings = ["steps=2", "batch=2", "validation=0", "save_every=2", f"checkpoint={tmp_path / 'run'}"]
        assert main(["train", "llama", "--set", *settings]) == 0
    if "model=1b" in words:
        (tmp_path / "config.json").write_text("{}")
    assert main(["train", *(word.format(tmp_path) for word in words)]) == 2
    assert said in capsys.readouterr().err.replace("\n  ", "; ")


def test_a_shape_that_the_recipe_does_not_compute() -> None:
    from drumbeat.train.models.llama import shape_from

    plain = small().to_dict()
    for change, words in (
        ({"model_type": "qwen3"}, "model_type qwen3"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0}}, "rope_type dynamic"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0}}, "yarn with mscale"),
        ({"attention_bias": True}, "biases"),
    ):
        with pytest.raises(Refusal, match=words):
            shape_from({**plain, **change})
