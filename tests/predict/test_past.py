"""What earlier runs say: the ledger, verify's rates, and a run beside its prediction."""

import dataclasses
from types import SimpleNamespace

import pytest

from drumbeat.cli import main
from drumbeat.desk.nodes import LOST, Sighting, Store
from drumbeat.predict.arguments import from_command
from drumbeat.predict.cost import Constants, Layout, Work
from drumbeat.predict.forecast import GPU_HOURS_PER_FAILURE, Case, forecast
from drumbeat.predict.job import Wishes, line_of_command, make_case
from drumbeat.predict.machine import FRAMEWORKS, MEASURED, UNCALIBRATED, find_cluster
from drumbeat.predict.models import named
from drumbeat.predict.past import (
    Seen,
    calibrated,
    error_words,
    ledger_path,
    measured_rate,
    products_of,
    recall,
    remember,
    share_of,
    with_verify,
)
from drumbeat.report import prediction
from drumbeat.report.figures import Phases
from drumbeat.report.prediction import failure_rate
from drumbeat.report.setting import _off, compared
from tests.conftest import need_torch

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


def test_the_products_of_a_model_are_measured_and_predicted_at_that_rate():
    need_torch("needs torch")
    described = from_command(["drumbeat", "train", "llama", "--set", "batch=4", "length=32"])
    case = make_case(described, Wishes(), find_cluster("h100", 2), 1)
    assert products_of(case)[0][1:] == (64, 64, 128)
    assert 1e6 < measured_rate(case, "cpu", each=0.01) < 1e15
    large = dataclasses.replace(seen().case, layout=Layout(tp=2, dp=16, micro=4, zero=1, sp=1))
    for rate in (300e12, 500e12, 600e12):
        constants = dataclasses.replace(large.constants, product=share_of(large, rate))
        changed = forecast(dataclasses.replace(large, constants=constants)).terms["products"]
        flops = sum(count * 2 * m * k * n for count, m, k, n in products_of(large))
        layers, times = large.model.layers, large.work.batch / large.layout.dp / large.layout.micro
        head = changed - 3 * layers * times * flops / rate
        assert 0 < head < 0.15 * changed


def test_here_without_a_gpu_is_said(capsys):
    pytest.importorskip("torch")
    assert main(["predict", "--model", "llama3-8b", "--gpu", "h100", "--calibrate", "here"]) == 2
    assert "no GPU here" in capsys.readouterr().err


def test_failures_seen_here_move_the_published_rate(tmp_path, monkeypatch):
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    assert failure_rate(environ)[0] == GPU_HOURS_PER_FAILURE
    sightings = tuple(Sighting(0.0, "site", f"n{i}", "run", LOST) for i in range(4))
    monkeypatch.setattr(prediction, "read_store", lambda _: Store(sightings))
    event = SimpleNamespace(t=0.0), SimpleNamespace(t=3600 * 100.0)
    run = SimpleNamespace(order=lambda: SimpleNamespace(emulated=False, world_size=512), run_events=lambda: event)
    monkeypatch.setattr(prediction, "all_runs", lambda _: SimpleNamespace(runs=(run,)))
    hours, source = failure_rate(environ)
    assert hours == pytest.approx((51_200 + 50_000) / 5) and "4 failures of nodes in 51,200 GPU-hours" in source
