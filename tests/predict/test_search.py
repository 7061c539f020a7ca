"""The search over layouts agrees with single predictions; the benches run where their data or a GPU are missing."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drumbeat.predict.cost import Layout, Work
from drumbeat.predict.forecast import Case, forecast
from drumbeat.predict.frameworks import FRAMEWORKS
from drumbeat.predict.machine import find_cluster
from drumbeat.predict.models import named
from drumbeat.predict.search import best, grid, rank

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
