"""What earlier runs say: the ledger, verify's rates, and a run beside its prediction."""

import dataclasses
from types import SimpleNamespace

import pytest

from drumbeat.predict.cost import Constants, Layout, Work
from drumbeat.predict.forecast import Case, forecast
from drumbeat.predict.frameworks import FRAMEWORKS
from drumbeat.predict.interval import MEASURED, UNCALIBRATED
from drumbeat.predict.job import line_of_command
from drumbeat.predict.machine import find_cluster
from drumbeat.predict.models import named
from drumbeat.predict.past import Seen, calibrated, error_words, ledger_path, recall, remember, with_verify
from drumbeat.report.figures import Phases
from drumbeat.report.predicted import _off, compared

LLAMA = ("drumbeat", "train", "llama", "--set")


def seen(run="a", slower=1.3, batch=64):
    framework = FRAMEWORKS["megatron"]
    layout = Layout(tp=2, dp=16, zero=1, sp=1)
    case = Case(
        named("llama3-8b").model,
        Work(8192, batch),
        layout,
        framework,
        find_cluster("h100"),
        "bf16",
        framework.constants,
    )
    predicted = forecast(case).seconds
    return Seen(run, case, predicted, predicted * slower)


def test_the_ledger_keeps_one_line_per_run_and_survives_damage(tmp_path):
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    assert recall("H100 SXM", environ) == []
    remember(seen("a", 1.5), environ)
    remember(seen("b"), environ)
    remember(seen("a", 1.2), environ)
    with open(ledger_path(environ), "a") as stream:
        stream.write('{"run": "c"}\nnot json\n[]\n')
    found = recall("H100 SXM", environ)
    assert sorted(each.run for each in found) == ["a", "b"]
    assert next(each for each in found if each.run == "a").measured == pytest.approx(seen("a", 1.2).measured)
    assert recall("A100", environ) == []
    assert "2 earlier predictions" in error_words(found)


def test_past_runs_move_the_prediction_towards_what_was_measured():
    rows = [seen(str(batch), 1.3, batch) for batch in (32, 64, 128)]
    constants, basis = calibrated(Constants(), rows, "megatron")
    assert basis.name == "past runs" and basis.high < UNCALIBRATED.high
    new = forecast(dataclasses.replace(seen("x", 1.0, 256).case, constants=constants)).seconds
    assert new / seen("x", 1.0, 256).predicted == pytest.approx(1.3, abs=0.12)
    assert calibrated(Constants(), rows, "torchtitan") == (Constants(), UNCALIBRATED)


def test_verify_replaces_usual_shares():
    cluster = find_cluster("h100")
    results = {
        "world_size": 16,
        "collectives": [{"op": "all_reduce", "busbw": 200.0}, {"op": "all_reduce", "busbw": 320.0}],
        "gemm": {"dtype": "bfloat16", "ranks": [{"tflops": 700.0}, {"tflops": 720.0}]},
    }
    constants, basis, told = with_verify(cluster, Constants(), results, 2)
    assert basis is MEASURED and constants.nic == pytest.approx(0.8) and len(told) == 2
    inside, _, _ = with_verify(cluster, Constants(), results, 1)
    assert inside.link == pytest.approx(320 / 450) and inside.nic == Constants().nic
    assert with_verify(cluster, Constants(), {"world_size": 1}, 1)[1] is UNCALIBRATED


@pytest.mark.parametrize(
    ("phases", "ledger", "measured", "term"),
    [
        (Phases(step=1000, input=5), {"training": 100.0}, 1.0, ""),
        (Phases(step=1000), {"training": 50.0, "lost": 40.0}, 1.0, "restarts"),
        (Phases(step=2000, input=900), {}, 2.0, "input"),
        (Phases(step=2000, communication=900), {}, 2.0, "communication"),
        (Phases(step=2000, waiting=800), {}, 2.0, "stragglers"),
        (Phases(step=2000), {}, 2.0, "compute"),
    ],
)
def test_the_term_that_is_off_is_named_from_what_was_measured(phases, ledger, measured, term):
    assert _off({"gradients": 0.1, "products": 0.9}, 1.0, 1.4, measured, phases, ledger) == term


def test_a_run_stands_beside_its_prediction():
    facts = SimpleNamespace(gpus=[SimpleNamespace(name="NVIDIA H200", integrated=False, memory_bytes=150 << 30)])
    command = [
        "drumbeat",
        "train",
        "llama",
        "--set",
        "model=1b",
        "precision=bf16-master",
        "batch=8",
        "accumulate=1",
        "recompute=none",
    ]
    order = SimpleNamespace(command=command)
    found = compared(order, facts, 1, 1, Phases(step=1100.0), {"training": 100.0})
    assert found.predicted == pytest.approx(1.1, rel=0.05) and found.term == "" and found.basis == "own runs"
    slow = compared(order, facts, 1, 1, Phases(step=2200.0, input=1000.0), {"training": 100.0})
    assert slow.term == "input" and "data" in slow.advice
    assert compared(SimpleNamespace(command=["python", "x.py"]), facts, 1, 1, Phases(step=1.0), {}) is None
    assert compared(order, SimpleNamespace(gpus=[]), 1, 1, Phases(step=1.0), {}) is None


def test_plan_and_watch_have_one_line():
    gpus = [SimpleNamespace(name="NVIDIA H200", integrated=False, memory_bytes=150 << 30)]
    line = line_of_command([*LLAMA, "model=1b", "batch=8"], gpus, 1, 1)
    assert "per step" in line and "tokens/s" in line and "memory fits" in line
    assert "not possible" in line_of_command([*LLAMA, "model=8b", "batch=64", "accumulate=7"], gpus * 8, 1, 8)
    assert line_of_command(["python", "train.py"], gpus, 1, 1) == "" and line_of_command(["drumbeat"], [], 1, 0) == ""
