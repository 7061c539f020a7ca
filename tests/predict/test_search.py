"""The search over layouts agrees with single predictions; the benches run where their data or a GPU are missing."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from drumbeat.predict.arguments import arguments_of, from_command, with_arguments
from drumbeat.predict.cost import Layout, Work
from drumbeat.predict.forecast import Case, forecast
from drumbeat.predict.job import Wishes, make_case
from drumbeat.predict.machine import FRAMEWORKS, find_cluster
from drumbeat.predict.models import named
from drumbeat.predict.search import best, grid, pareto, rank, simplest
from drumbeat.predict.show import arguments_words, layout_words
from tests.conftest import need_torch

BENCH = Path(__file__).parent.parent.parent / "bench"


def case(model="llama3-8b", nodes=4, batch=64, framework="megatron"):
    chosen = FRAMEWORKS[framework]
    layout = Layout(dp=8 * nodes)
    return Case(named(model).model, Work(8192, batch), layout, chosen, find_cluster("h100"), "bf16", chosen.constants)


@pytest.mark.parametrize("framework", ["megatron", "drumbeat", "torchtitan"])
def test_every_layout_is_possible_and_the_first_is_the_fastest(framework):
    asked = case(framework=framework)
    layouts = grid(asked)
    ranking = rank(asked, layouts)
    assert 0 < ranking.fitting < ranking.tried == len(layouts.tp)
    assert list(ranking.seconds) == sorted(ranking.seconds)
    chosen, _ = best(asked)
    found = [forecast(each) for each in chosen]
    assert all(each.verdict == "fits" and each.case.gpus == 32 for each in found)
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    assert found[0].seconds == pytest.approx(float(ranking.seconds[0]))


def test_experts_are_spread_over_ranks():
    chosen, _ = best(case("mixtral-8x7b", nodes=8, batch=128))
    assert chosen and chosen[0].layout.ep > 1
    assert forecast(dataclasses.replace(chosen[0])).verdict == "fits"


def run(*words, **environ):
    kept = {name: value for name, value in os.environ.items() if name != "DRUMBEAT_SCALE"}
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, env={**kept, **environ})


def test_benches_end_well_without_data_or_gpu():
    done = run(BENCH / "predict.py")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1 and "DRUMBEAT_SCALE" in done.stdout
    done = run(BENCH / "predict_gpu.py", "--predict")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 13


MEGATRON = (
    "torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 --swiglu "
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size=2 --sequence-parallel --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1 --micro-batch-size 4 --global-batch-size 64 --seq-length 4096 --bf16 "
    "--vocab-size 32000 --lr 3e-4"
)
TITAN = (
    "torchrun -m torchtitan.train --model.name llama3 --model.flavor 8B --parallelism.tensor_parallel_degree 8 "
    "--training.local_batch_size 1 --training.seq_len 4096 --optimizer.lr 1e-4"
)
MAXTEXT = (
    "python3 -m MaxText.train base.yml model_name=llama3-8b per_device_batch_size=2 ici_tensor_parallelism=4 run_name=x"
)
OWN = "drumbeat train llama --layout tp=2 --set model=8b batch=32 length=4096 accumulate=4 lr=1e-4"


@pytest.mark.parametrize("command", [MEGATRON, TITAN, MAXTEXT, OWN])
def test_the_answer_is_a_command_that_reads_back_as_the_layout(command):
    case = make_case(from_command(command.split()), Wishes(), find_cluster("h100"), 2)
    chosen, _ = best(case)
    for each in chosen[:5]:
        words = with_arguments(command.split(), each)
        again = make_case(from_command(words), Wishes(), find_cluster("h100"), 2)
        same = ("tp", "pp", "cp", "vp", "dp", "zero", "micro", "recompute")
        assert {name: getattr(again.layout, name) for name in same} == {
            name: getattr(each.layout, name) for name in same
        }
        assert again.work == each.work
    kept = {"lr", "3e-4", "1e-4", "run_name=x", "lr=1e-4"} & set(command.replace("--", "").split())
    assert all(any(word in each for each in words) for word in kept)


def test_what_a_framework_cannot_be_told_is_not_searched_and_not_printed():
    described = named("llama3-8b")
    for framework, stages in (
        ("torchtitan", {0, 3}),
        ("drumbeat", {0, 3}),
        ("megatron", {0, 1}),
        ("deepspeed", {0, 1, 2, 3}),
    ):
        case = make_case(described, Wishes(framework=framework, batch=64), find_cluster("h100"), 2)
        found = grid(case)
        assert set(found.zero) <= stages and (framework != "deepspeed" or set(found.tp) == {1})
        assert all(arguments_of(each) for each in best(case)[0])
    one = make_case(described, Wishes(framework="torchtitan", zero="1", batch=64), find_cluster("h100"), 2)
    assert arguments_of(one) is None and "has no arguments" in arguments_words(one)


def test_pareto_and_the_simplest():
    assert pareto([(1, 4), (2, 2), (3, 3), (4, 1)]) == [True, True, False, True]
    layouts = [Layout(tp=4, pp=8), Layout(tp=4, pp=4), Layout(tp=1, pp=1)]
    assert simplest(layouts, [1.0, 1.02, 1.2]) == 1


def test_zero_bubble_schedules_take_the_bubble_and_keep_its_memory():
    wishes = Wishes(
        framework="torchtitan", layout="pp=8,tp=1", batch=32, micro_batch=1, recompute="none", precision="bf16"
    )
    plain, half, none = (
        forecast(make_case(named("llama3-8b"), dataclasses.replace(wishes, schedule=name), find_cluster("h100"), 1))
        for name in ("1f1b", "zb-h1", "zbv")
    )
    assert none.terms.get("bubble", 0) == 0 < half.terms["bubble"] == pytest.approx(plain.terms["bubble"] / 3)
    assert none.stages[-1]["activations"] > 4 * plain.stages[-1]["activations"] and plain.memory == half.memory
    assert "zbv" in layout_words(none.case.layout)


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_write_and_verify(drumbeat, tmp_path):
    """The best three of a tiny model's layouts on two ranks of this machine, 20 steps each, and the job file."""
    need_torch("needs torch")
    command = [
        sys.executable,
        "-m",
        "drumbeat",
        "train",
        "llama",
        "--set",
        "batch=4",
        "length=32",
        "validation=0",
        "data=synthetic",
    ]
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump({"name": "tiny", "ranks-per-node": 2, "command": command}))
    flags = ("--gpu", "h100", "--gpus-per-node", 2, "--search", "--verify", "--write", tmp_path / "best.yaml")
    done = drumbeat("predict", job, *flags, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    written = yaml.safe_load((tmp_path / "best.yaml").read_text())
    assert written["name"] == "tiny" and "--layout" in written["command"] and written["command"].count("--set") == 1
    assert "recommended" in done.stdout and done.stdout.count("tokens/s") >= 2
