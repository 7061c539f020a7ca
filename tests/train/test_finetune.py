"""Fine-tuning: what counts in the loss, documents that do not see each other, mixtures, LoRA in and out, the recipe."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
import torch
from gloo_world import GlooWorld

transformers = pytest.importorskip("transformers", reason="a heavy development dependency: pip install transformers")

from drumbeat.train.data.conversations import Mixture, Packed, documents, lines_of, named  # noqa: E402
from drumbeat.train.layers.cross_entropy import IGNORE  # noqa: E402
from drumbeat.train.lora import add_lora, load_adapter  # noqa: E402
from drumbeat.train.refusal import Refusal  # noqa: E402

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def small(folder: Path) -> Any:
    """A model with a tokenizer of single letters and a chat template, as a download lies in a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = {chr(i): i for i in range(128)}
    plain = Tokenizer(models.WordLevel({**letters, "[UNK]": 128}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=chr(3), pad_token=chr(4))
    tokenizer.chat_template = TEMPLATE
    config = transformers.LlamaConfig(
        vocab_size=160, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Tuple[Path, Any, Any]:
    folder = tmp_path_factory.mktemp("base")
    return (folder, *small(folder))


def data(folder: Path) -> Path:
    folder.mkdir()
    rows: List[Dict[str, Any]] = []
    for i in range(60):
        asked, said = {"role": "user", "content": f"{i} more?"}, {"role": "assistant", "content": f"{i + 1}!"}
        rows.append({"messages": [asked, said]} if i % 2 else {"prompt": f"{i}+1=", "completion": str(i + 1)})
    (folder / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows[:30]))
    (folder / "b.jsonl").write_text("\n".join(json.dumps(row) for row in rows[30:]))
    return folder


def test_only_answers_count(base: Tuple[Path, Any, Any]) -> None:
    tokenizer = base[2]

    def counted(row: Dict[str, Any]) -> str:
        ((tokens, counts),) = documents(row, tokenizer)
        return "".join(chr(token) for token, so in zip(tokens, counts) if so)

    turns = [("system", "be"), ("user", "hi"), ("assistant", "hello"), ("user", "and?"), ("assistant", "bye")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert counted({"messages": messages}) == "hello</s>bye</s>"
    assert counted({"prompt": "1+1=", "completion": "2"}) == "2\x03" and counted({"text": "abc"}) == "abc\x03"
    with pytest.raises(Refusal, match="a row with question; rows have messages"):
        documents({"question": "?"}, tokenizer)


def test_an_answer_that_the_template_writes_otherwise_later_is_a_document_of_its_own(
    base: Tuple[Path, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Qwen 3: what the last answer thought is written, what earlier ones thought is not."""
    tokenizer = base[2]
    template = (
        "{% for m in messages %}{{ m['role'][0] + ':' }}{% if m['role'] == 'assistant' and loop.last %}{{ '(think)' }}"
        "{% endif %}{{ m['content'] + ';' }}{% endfor %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    turns = [("assistant", "hello"), ("user", "and?"), ("assistant", "bye")]
    found = documents({"messages": [{"role": role, "content": said} for role, said in turns]}, tokenizer)
    read = [
        ("".join(map(chr, tokens)), "".join(chr(t) for t, so in zip(tokens, counts) if so)) for tokens, counts in found
    ]
    assert read == [("a:hello;u:and?;a:(think)bye;", "(think)bye;"), ("a:(think)hello;", "a:(think)hello;")]


def test_packed_documents_do_not_see_each_other(base: Tuple[Path, Any, Any]) -> None:
    _, model, tokenizer = base
    texts = [documents({"text": text}, tokenizer)[0] for text in ("first one", "two", "the third of them", "x")]
    rows = Packed(texts, 24, 4)
    batch = named(*rows.read(list(range(len(rows))), [0] * len(rows)))
    with torch.no_grad():
        together = model(**batch).loss * (batch["labels"] != IGNORE).sum()
        apart = torch.zeros(())
        for tokens, _ in texts:
            ids = torch.tensor([tokens])
            apart += model(input_ids=ids, labels=ids).loss * (ids.numel() - 1)
    assert len(rows) == 2 and rows.inputs[0, 1].tolist()[8:12] == [8, 9, 0, 1]
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)


def test_a_mixture_takes_its_shares_and_every_row() -> None:
    sources = [Packed([([n, i], [1, 1]) for i in range(count)], 2, 0) for n, count in ((1, 30), (2, 10))]
    mixed = Mixture(list(zip(sources, [1, 3])))
    first = mixed.read(list(range(len(mixed))), [0] * len(mixed))[0][:, 0].numpy()
    assert len(mixed) == 40 and np.bincount(first[:, 0])[1:].tolist() == [10, 30]
    assert np.bincount(first[first[:, 0] == 2][:, 1]).tolist() == [3] * 10


def test_a_step_counts_all_tokens_of_its_documents_and_no_padding() -> None:
    from drumbeat.train.data.conversations import NamedStream

    documents = [([5] * size, [0] * (size - 1) + [1]) for size in (3, 7, 4, 6, 2, 5, 8)]
    sources = [Packed(documents[:4], 10, 0), Packed(documents[4:], 10, 0)]
    assert [source.sizes.tolist() for source in sources] == [[10, 10], [7, 8]]
    streams = [
        NamedStream(Mixture(list(zip(sources, [3, 1]))), 2, data_rank=rank, data_ranks=2, prefetch=0) for rank in (0, 1)
    ]
    for steps in (1, 3):
        seen = 0
        for stream in streams:
            for _ in range(steps):
                (batch,) = next(stream)
                seen += int((batch["input_ids"] != 0).sum())
        assert [stream.tokens(steps) for stream in streams] == [seen, seen], "of all ranks, on each"
    plain = NamedStream(sources[0], 2, prefetch=0)
    del sources[0].sizes
    assert plain.tokens(1) is None


def test_a_folder_is_read_by_name_and_a_bad_row_is_told_with_its_place(
    base: Tuple[Path, Any, Any], tmp_path: Path
) -> None:
    folder = data(tmp_path / "data")
    assert len(list(lines_of(str(folder)))) == 60
    for row, why in (
        (b"[1]", "not a JSON object"),
        (b'[["text", "a"]]', "not a JSON object"),
        (b"{", "not a JSON object"),
        (b'{"text": "\xff"}', "UnicodeDecodeError: .*; correct this row"),
        (b'{"text": 5}', "ValueError: "),
        (b'{"prompt": "a", "completion": null}', "a row with prompt; rows have"),
        (b'{"messages": "hello"}', "AttributeError: "),
        (b'{"messages": [{"content": "hello"}]}', ".*'role'"),
        (b"{}", "a row with nothing"),
    ):
        (folder / "c.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n' + row)
        with pytest.raises(Refusal, match=f"c.jsonl, line 3: {why}"):
            list(lines_of(str(folder), lambda row: documents(row, base[2])))
    (folder / "c.jsonl").rename(folder / "c.parquet")
    with pytest.raises(Refusal, match=r"c.parquet, row 1: "):
        list(lines_of(str(folder)))
    with pytest.raises(Refusal, match="no .jsonl or .parquet file"):
        list(lines_of(str(tmp_path / "none")))


def test_a_null_is_a_column_without_a_value(base: Tuple[Path, Any, Any], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a b", "prompt": null, "messages": null}\n{"text": "a b"}\n')
    first, second = lines_of(str(tmp_path), lambda row: documents(row, base[2]))
    assert first == second


@pytest.mark.parametrize(
    "text, why, fix",
    [
        ("\n\n", "no rows", "one JSON object per line"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n', "nothing to learn from", "message of the assistant"),
    ],
)
def test_data_that_teaches_nothing_is_refused_with_what_is_needed(
    text: str, why: str, fix: str, base: Tuple[Path, Any, Any], tmp_path: Path
) -> None:
    from drumbeat.train.recipes.finetune import FinetuneSettings, samples
    from drumbeat.train.settings import fill

    (tmp_path / "a.jsonl").write_text(text)
    settings = fill(FinetuneSettings, [f"weights={base[0]}", f"data={tmp_path}", "length=64"])
    with pytest.raises(Refusal, match=why) as refused:
        samples(settings, base[2])
    assert fix in refused.value.fix


def tune(weights: str, folder: str, *more: str) -> List[float]:
    from drumbeat.train.recipes.finetune import FinetuneSettings, run
    from drumbeat.train.settings import fill

    texts = [f"weights={weights}", f"data={folder}", "length=64", "batch=4", "steps=6", "lr=5e-2", "report_every=1"]
    result = run(fill(FinetuneSettings, [*texts, *more]))
    return [*result.losses, *(check["loss"] for check in result.validation)]


def test_lora_on_any_layout_in_and_out(world: GlooWorld, base: Tuple[Path, Any, Any], tmp_path: Path) -> None:
    from drumbeat.cli import main

    folder, rows = str(base[0]), str(data(tmp_path / "data"))
    out, saved = tmp_path / "merged", tmp_path / "saved"
    more = ("lora=4", "targets=q_proj,down_proj", f"export={out}")
    (alone,) = world.run(tune, folder, rows, *more, f"checkpoint={saved}", "save_every=3", size=1)
    assert alone[0] > alone[5] + 0.05
    for values in world.run(tune, folder, rows, "lora=4", "targets=q_proj,down_proj", "layout=fsdp", size=2):
        assert values == pytest.approx(alone, rel=1e-4)
    assert main(["train", "export", str(saved), "--to", str(tmp_path / "adapter"), "--adapter"]) == 0
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["target_modules"]) == ("LORA", 4, ["down_proj", "q_proj"])
    fresh = transformers.LlamaForCausalLM.from_pretrained(folder)
    adapted = load_adapter(fresh, str(tmp_path / "adapter"))
    merged = transformers.LlamaForCausalLM.from_pretrained(out)
    tokens = torch.randint(0, 128, (2, 16))
    with torch.no_grad():
        want, plain = merged(tokens).logits, base[1](tokens).logits
        torch.testing.assert_close(adapted(tokens).logits, want, rtol=1e-4, atol=1e-5)
    assert (want - plain).abs().max() > 1e-3 and "lora" not in json.loads((out / "config.json").read_text())
    assert transformers.AutoTokenizer.from_pretrained(out).chat_template == TEMPLATE


def test_parquet_files_hold_the_same_rows_as_jsonl(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pip install pyarrow")
    from pyarrow import parquet

    rows = list(lines_of(str(data(tmp_path / "data"))))
    (tmp_path / "columns").mkdir()
    names = [{"messages": None, "prompt": None, "completion": None, **row} for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(names), tmp_path / "columns" / "a.parquet", row_group_size=7)
    assert list(lines_of(str(tmp_path / "columns"))) == rows


def test_peft_reads_our_adapter_and_we_read_peft_s(base: Tuple[Path, Any, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="pip install peft")
    from drumbeat import train

    def fresh() -> Any:
        return transformers.LlamaForCausalLM.from_pretrained(base[0])

    tokens = torch.randint(0, 128, (2, 16))
    model = add_lora(fresh(), rank=4, alpha=8.0, targets=["q_proj", "down_proj"])
    learns = [p for p in model.parameters() if p.requires_grad]
    trainer = train.setup(model, torch.optim.AdamW(learns, lr=5e-2))
    for _ in range(3):
        trainer.step({"input_ids": tokens, "labels": tokens})
    trainer.export(str(tmp_path / "adapter"), adapter=True)
    trainer.export(str(tmp_path / "merged"))
    theirs = peft.PeftModel.from_pretrained(fresh(), str(tmp_path / "adapter"))
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    other = peft.get_peft_model(
        fresh(), peft.LoraConfig(r=2, lora_alpha=3, target_modules="all-linear", init_lora_weights=False)
    )
    other.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        got = trainer.module(tokens).logits
        assert (got - base[1](tokens).logits).abs().max() > 1e-3
        close = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(theirs(tokens).logits, got, **close)
        torch.testing.assert_close(theirs.merge_and_unload()(tokens).logits, got, **close)
        torch.testing.assert_close(merged(tokens).logits, got, **close)
        ours = load_adapter(fresh(), str(tmp_path / "theirs"))
        torch.testing.assert_close(ours(tokens).logits, other(tokens).logits, **close)


def resumed(weights: str, folder: str, place: str) -> bool:
    from drumbeat.train.recipes import finetune
    from drumbeat.train.settings import fill
    from drumbeat.train.verify_resume import verify_resume

    texts = [
        f"weights={weights}",
        f"data={folder}/a.jsonl:1,{folder}/b.jsonl:3",
        "length=64",
        "batch=2",
        "steps=4",
        "lora=2",
    ]
    return verify_resume(finetune, fill(finetune.FinetuneSettings, [*texts, f"checkpoint={place}"]))


def test_a_mixture_with_lora_resumes_exactly(world: GlooWorld, base: Tuple[Path, Any, Any], tmp_path: Path) -> None:
    assert world.run(resumed, str(base[0]), str(data(tmp_path / "data")), str(tmp_path / "saved"), size=1) == [True]


def test_a_folder_whose_weights_have_other_shapes_is_refused(base: Tuple[Path, Any, Any], tmp_path: Path) -> None:
    from drumbeat.train.recipes.finetune import loaded

    shutil.copytree(base[0], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(
        Refusal, match=r"weights=.* cannot be loaded: .*; check that its safetensors and tokenizer are complete"
    ):
        loaded(transformers.AutoModelForCausalLM, str(tmp_path))


def test_weights_that_are_damaged_are_refused() -> None:
    """A missing tensor would be initialized at random, and training cannot repair one that is not finite."""
    from drumbeat.train.recipes.finetune import refuse_damaged

    model = torch.nn.Linear(2, 2)
    refuse_damaged("m", model, [])
    with pytest.raises(Refusal, match="weights=m: b is missing, and 1 more"):
        refuse_damaged("m", model, ["c", "b"])
    torch.nn.init.constant_(model.bias, math.nan)
    with pytest.raises(Refusal, match="weights=m: bias is not finite"):
        refuse_damaged("m", model, [])


def test_a_tokenizer_of_another_model_is_refused(base: Tuple[Path, Any, Any], tmp_path: Path) -> None:
    shutil.copytree(base[0], tmp_path / "m")
    base[1].__class__(transformers.LlamaConfig(**{**base[1].config.to_dict(), "vocab_size": 50})).save_pretrained(
        tmp_path / "m"
    )
    with pytest.raises(Refusal, match="the tokenizer gives token 1.., and the model has 50 embeddings"):
        tune(str(tmp_path / "m"), str(data(tmp_path / "data")))


def test_lora_refuses_layers_that_are_not_there(base: Tuple[Path, Any, Any]) -> None:
    with pytest.raises(Refusal, match="no linear layer called qproj"):
        add_lora(transformers.LlamaForCausalLM(base[1].config), 2, 4, ["qproj"])


def test_all_weights_on_layouts_that_cut_the_model(
    world: GlooWorld, base: Tuple[Path, Any, Any], tmp_path: Path
) -> None:
    folder, rows = str(base[0]), str(data(tmp_path / "data"))
    (alone,) = world.run(tune, folder, rows, "lr=1e-3", "steps=4", size=1)
    for layout in (("layout=tp",), ("layout=pp", "accumulate=2", "schedule=1f1b")):
        for values in world.run(tune, folder, rows, "lr=1e-3", "steps=4", *layout, size=2):
            assert values == pytest.approx(alone, rel=2e-5), layout


def test_batch_and_steps_follow_from_the_data_unless_they_are_given() -> None:
    from drumbeat.train.recipes.finetune import FinetuneSettings, fitted

    def chosen(rows: int, ranks: int = 1, **given: Any) -> Tuple[int, int]:
        settings = fitted(FinetuneSettings(**given), rows, ranks)
        return settings.batch, settings.steps

    assert chosen(7) == (7, 3) and chosen(7, ranks=2) == (6, 4) and chosen(1, ranks=2) == (2, 2)
    assert chosen(6400) == (32, 600) and chosen(6400, ranks=3, accumulate=2) == (30, 640)
    assert chosen(7, batch=32, steps=5) == (32, 5) and chosen(64, epochs=0.5) == (32, 1)
