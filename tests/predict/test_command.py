"""drumbeat predict as a user types it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from drumbeat.base.data import load
from drumbeat.base.problem import Problem
from drumbeat.cli import main
from drumbeat.predict.job import node_counts


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def predict(capsys, *words):
    code = main(["predict", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_name_and_a_gpu_are_enough(capsys):
    code, out, _ = predict(capsys, "--model", "llama3-8b", "--gpu", "h100", "--nodes", "4")
    assert code == 0
    for word in ("fits", "step", "90 %", "tokens/s", "MFU", "basis", "not in it", "6 N + 12 L h s"):
        assert word in out


def test_what_was_not_said_is_named(capsys):
    _, out, _ = predict(capsys, "--model", "llama3-8b", "--gpu", "h100", "--nodes", "4")
    assert re.search(r"assumed +a batch of \d+, as none is given", out) and re.search(r"whole run +--tokens N", out)
    _, out, _ = predict(capsys, "--model", "llama3-8b", "--gpu", "h100", "--batch", "64", "--tokens", "1e9")
    assert "assumed" not in out and "--tokens" not in out
    code, _, err = predict(capsys, "--gpu", "h100", "--", "drumbeat", "train", "finetune", "--set", "lora=16")
    assert code == 2 and "not modelled" in err and "--model FOLDER" in err


def test_the_page_lists_every_model():
    page = (Path(__file__).parents[2] / "docs/predict.md").read_text(encoding="utf-8")
    listed = re.search("Names that `--model` knows: (.*)", page)[1].rstrip(".").replace("`", "").split(", ")
    family = [(each.partition("-")[0], each.partition("-")[2].split("/")) for each in listed]
    names = {f"{name}-{size}".rstrip("-") for name, sizes in family for size in sizes}
    assert {row["name"] for row in load("drumbeat.predict", "shapes")} <= names


def test_several_node_counts_stand_beside_the_naive_rule(capsys):
    code, out, _ = predict(capsys, "--model", "llama3-8b", "--gpu", "mi250x", "--nodes", "1,2,4,...,16")
    lines = out.splitlines()
    assert code == 0 and "naive" in lines[0] and "efficiency" in lines[0]
    assert [line.split()[0] for line in lines[1:6]] == ["1", "2", "4", "8", "16"]


def test_a_batch_that_grows_with_the_nodes_is_shown(capsys):
    _, out, _ = predict(capsys, "--model", "llama3-8b", "--gpu", "h100", "--nodes", "1,2")
    assert out.splitlines()[0].split()[:3] == ["nodes", "GPUs", "batch"]
    _, out, _ = predict(capsys, "--model", "llama3-8b", "--gpu", "h100", "--nodes", "1,2", "--batch", "64")
    assert "batch" not in out.splitlines()[0]


@pytest.mark.parametrize(
    "words, said",
    [
        (("--model", "7b"), "did you mean llama2-7b, mistral-7b, qwen2.5-7b, gemma-7b?"),
        (("--model", "lama3-8b"), "did you mean llama3-8b"),
        (("--model", "zzz"), "docs page predict lists the known names; or give a config.json"),
        (("--model", "llama3-8b", "--gpu", "h100", "--gpus", "16"), "--nodes 2: nodes of 8 GPUs"),
    ],
)
def test_what_was_probably_meant_is_named(capsys, words, said):
    code, _, err = predict(capsys, *words)
    assert code == 2 and said in err and len(err) < 300


def test_json_has_intervals_and_sources(capsys):
    code, out, _ = predict(
        capsys, "--model", "llama3-70b", "--gpu", "h100", "--nodes", "8,16", "--tokens", "1e9", "--json"
    )
    first, last = json.loads(out)
    assert code == 0 and first["whole_run"] is None and last["whole_run"]["gpu_hours"] > 0
    assert (
        last["step_s_90"][0] < last["step_s"] < last["step_s_90"][1] and last["sources"] and last["basis"] == "defaults"
    )


def test_what_does_not_fit_says_what_would(capsys):
    code, out, _ = predict(
        capsys, "--model", "llama3-70b", "--framework", "drumbeat", "--gpu", "h100", "--nodes", "8", "--layout", "ddp"
    )
    assert code == 1 and "does not fit" in out and "to make it fit: " in out


def test_the_search_prints_layouts_and_the_arguments_of_the_best(capsys):
    code, out, _ = predict(
        capsys,
        "--model",
        "llama3-70b",
        "--framework",
        "megatron",
        "--gpu",
        "h100",
        "--nodes",
        "8",
        "--batch",
        "128",
        "--search",
    )
    assert code == 0 and "--tensor-model-parallel-size" in out and "data parallelism alone: does not fit" in out
    assert len([line for line in out.splitlines() if line.strip()[:1].isdigit()]) >= 5


def test_the_kind_of_layout_that_won_is_not_called_slower(capsys):
    pytest.importorskip("numpy")
    code, out, _ = predict(capsys, "--model", "llama3-8b", "--gpu", "h100", "--nodes", "2", "--search")
    best = next(line.split() for line in out.splitlines()[4:] if line.split()[:1] == ["1"])
    assert code == 0 and best[6] == "3"
    assert "sharded data parallelism (ZeRO-3, FSDP): the best layout is one" in out


def test_a_budget_pays_for_tokens(capsys):
    words = ("--model", "llama3-8b", "--gpu", "h200", "--budget", "20000gpuh", "--tokens", "300e9")
    code, out, _ = predict(capsys, *words)
    assert code == 0 and "20,000 GPU-hours pay for" in out and "were asked for" in out and "--time=" in out


def test_a_page_needs_nothing_else(capsys, tmp_path):
    page = tmp_path / "page.html"
    code, _, _ = predict(capsys, "--model", "llama3-8b", "--gpu", "h100", "--nodes", "4", "--html", str(page))
    text = page.read_text()
    assert code == 0 and "<svg" in text and "naive" in text
    assert "http" not in text.replace("http://www.w3.org", "").replace("http-equiv", "")
    shares = re.findall(r'<td class="n">([0-9.]+)%</td></tr>', text)
    assert len(shares) > 3 and sum(map(float, shares)) == pytest.approx(100, abs=1), "the terms of a step"


def test_a_job_file_says_it_all(capsys, tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text("nodes: 2\ngpus: 8\ncommand: drumbeat train llama --layout fsdp --set model=8b batch=64 steps=100\n")
    code, out, _ = predict(capsys, str(job), "--gpu", "h100")
    assert code == 0 and "2 x 8 H100 SXM" in out and "time limit" in out and "drumbeat" in out


@pytest.mark.parametrize(
    "words",
    [
        ("--model", "nosuch", "--gpu", "h100"),
        ("--model", "llama3-8b", "--gpu", "tpu"),
        ("--model", "llama3-8b", "--gpu", "h100", "--fabric", "string"),
        ("--model", "/no/such/config.json", "--gpu", "h100"),
        ("--model", "llama3-8b", "--gpu", "h100", "--layout", "tp=3"),
        ("--model", "llama3-8b", "--gpu", "h100", "--layout", "pp=5,tp=2"),
        ("--model", "llama3-8b", "--gpu", "h100", "--layout", "tp=-2"),
        ("--model", "llama3-8b", "--gpu", "h100", "--batch", "7"),
        ("--model", "llama3-8b", "--gpu", "h100", "--batch", "-8"),
        ("--model", "llama3-8b", "--gpu", "h100", "--nodes", "0"),
        ("--model", "llama3-8b", "--gpu", "h100", "--nodes", "1,...,"),
        ("--model", "llama3-8b", "--gpu", "h100", "--tokens", "many"),
        ("--model", "llama3-8b", "--gpu", "h100", "--budget", "0gpuh"),
        ("--model", "llama3-8b", "--gpu", "v100", "--precision", "bf16"),
        ("--model", "llama3-8b", "--gpu", "h100", "--framework", "keras"),
        ("--model", "llama3-8b", "--gpu", "h100", "--calibrate", "/"),
        ("--model", "resnet-50", "--gpu", "h100", "--layout", "tp=2"),
        ("--gpu", "h100"),
        ("--gpu", "h100", "--", "python", "train.py"),
    ],
)
def test_bad_input_is_a_clear_message_and_code_2(capsys, words):
    code, out, err = predict(capsys, *words)
    assert code == 2 and not out and err.startswith("drumbeat predict: ") and "Traceback" not in err
    assert len(err.splitlines()) <= 2


@pytest.mark.parametrize("text", ["[]", "{", '"text"', "{}", '{"model_type": "llama"}', "\x00"])
def test_a_damaged_config_is_a_clear_message(capsys, tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    code, _, err = predict(capsys, "--model", str(path), "--gpu", "h100")
    assert code == 2 and err.startswith("drumbeat predict: ")


def test_one_layout_needs_no_numpy_and_the_search_says_that_it_does():
    script = (
        "import sys; sys.modules['numpy'] = None\nfrom drumbeat.cli import main\n"
        "a = main(['predict', '--model', 'llama3-8b', '--gpu', 'h100'])\n"
        "b = main(['predict', '--model', 'llama3-8b', '--gpu', 'h100', '--search'])\nsys.exit(10 * a + b)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2 and "tokens/s" in done.stdout and "numpy" in done.stderr


def test_node_counts():
    assert node_counts("4") == [4] and node_counts("1,2,4,...,32") == [1, 2, 4, 8, 16, 32]
    assert node_counts("10,15,...,27") == [10, 15, 20, 25, 27]
    for wrong in ("", "a", "...,4", "4,...,1", "-1"):
        with pytest.raises(Problem):
            node_counts(wrong)
