"""What people type: names of GPUs with their memory, degrees with dp, published configs, short samples, sweeps of nodes."""

import json

import pytest

from drumbeat.cli import main
from drumbeat.predict.machine import find_cluster
from drumbeat.predict.models import config_model
from drumbeat.predict.shapes import parameters
from drumbeat.predict.show import amount


@pytest.mark.parametrize(
    ("gpu", "name", "gib"),
    [
        ("a100-40", "A100 40GB", 39.6), ("a100_40", "A100 40GB", 39.6), ("A100-SXM4-40GB", "A100 40GB", 39.6),
        ("a100-80", "A100", 79.2), ("NVIDIA A100 80GB PCIe", "A100", 79.2), ("v100-16gb", "V100", 15.84),
        ("Tesla V100-SXM2-32GB", "V100", 31.68), ("NVIDIA H100 80GB HBM3", "H100 SXM", 79.2),
        ("NVIDIA GH200 480GB", "GH200", 95.04),
    ],
)  # fmt: skip
def test_the_memory_in_a_gpus_name(gpu, name, gib):
    found = find_cluster(gpu)
    assert (found.gpu, found.memory_gib) == (name, pytest.approx(gib, abs=0.1))


def test_gemma_3_as_published():
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    model, _ = config_model({"model_type": "gemma3", "text_config": {**text, "sliding_window": 1024}}, "gemma")
    assert parameters(model) == 3_880_263_168


def ask(capsys, *words):
    code = main(["predict", "--gpu", "h100", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_file_goes_by_its_own_name(capsys, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": -1}))
    assert ask(capsys, "--model", str(path))[2].startswith("drumbeat predict: mine.json: hidden_size is '-1'")


def test_dp_is_a_degree_that_must_be_the_rest(capsys):
    words = ("--model", "llama3-8b", "--nodes", "2", "--layout")
    assert ", dp 8, " in ask(capsys, *words, "tp=2,dp=8")[1]
    code, _, error = ask(capsys, *words, "tp=2,dp=4")
    assert code == 2 and "16 GPUs = dp 8 x tp 2 x pp 1 x cp 1, not dp 4" in error
    assert ask(capsys, *words, "tp=2,dp=0")[0] == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("llama3-8b", "--layout", "ep=4"), "llama3-8b has no experts"),
        (("gpt2", "--seq", "8192"), "gpt2 has learned positions for 1024 tokens, not 8192"),
    ],
)
def test_what_the_model_has_no_place_for(capsys, words, said):
    code, _, error = ask(capsys, "--model", *words)
    assert code == 2 and said in error


def test_short_samples_come_in_large_micro_batches(capsys):
    (found,) = json.loads(ask(capsys, "--model", "vit-b16", "--json")[1])
    assert found["layout"]["micro"] >= 32 and found["mfu"] > 0.1


def test_a_sweep_leaves_out_what_does_not_divide(capsys):
    code, out, error = ask(capsys, "--model", "llama3-8b", "--nodes", "1,2,4", "--batch", "16")
    assert code == 0 and "4 nodes left out: a batch of 16 does not divide by 32 replicas" in error
    assert "2 x 8 H100" in out


def test_a_sweep_says_where_its_rows_differ(capsys):
    out = ask(capsys, "--model", "llama3-70b", "--nodes", "4,8,16", "--gpu", "mi300x")[1]
    assert "rows differ by what fits: " in out and "recompute selective on 8, 16 nodes" in out


def test_too_long_sequences_need_no_more_gpus(capsys):
    assert "to make it fit: shorter sequences" in ask(capsys, "--model", "llama3-8b", "--seq", "1000000")[1]


def test_large_numbers_are_words():
    assert [amount(each) for each in (86.6e6, 999.9e6, 8.03e9, 15e12)] == ["86.6 M", "1 B", "8.03 B", "15 T"]
