"""The pure parts: what a command takes, which layouts come first, how an end is called, what the results mean."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumbeat.base.problem import Problem
from drumbeat.findings.model import ERROR, Finding
from drumbeat.jobfile.resources import fill, places
from drumbeat.runfolder.records import Metric
from drumbeat.runfolder.run import Run
from drumbeat.train.parallel import Layout
from drumbeat.tune.judge import ENDED, INTERRUPTED, SILENCE, STEPS, TIME, Ended, Judgement, Observed, classify, judge
from drumbeat.tune.search import (
    FAILED,
    HANG,
    NAN,
    OK,
    OOM,
    REFUSED,
    STOPPED,
    Done,
    Point,
    Result,
    cost,
    divisors,
    layouts,
    most_trials,
    ranked,
)
from drumbeat.tune.session import _used_gib, closing, table
from drumbeat.tune.trial_list import Plan, find_recipe, layout_text, own_batch, read_layout, tunable
from tests.runfolder.folders import make_run


def words(text):
    return tuple(text.split())


# -- commands ---------------------------------------------------------------------------------------------------------


def test_places_of_a_command():
    command = words("python t.py --b={batch} --a {accumulate}x{batch} {rank} ${batch} {other}")
    assert places(command) == ("batch", "accumulate")
    filled = fill(command, {"batch": "8"})
    assert filled == words("python t.py --b=8 --a {accumulate}x8 {rank} ${batch} {other}")


@pytest.mark.parametrize(
    "text, settings",
    [
        ("drumbeat train llama", {}),
        ("/opt/bin/drumbeat train llama --set batch=8 lr=1 --layout fsdp", {"batch": "8", "lr": "1", "layout": "fsdp"}),
        ("python -m drumbeat train llama --set batch=8 --set=batch=16", {"batch": "16"}),
        ("torchrun -m drumbeat train llama --layout=tp=2 --json", {"layout": "tp=2"}),
        ("drumbeat train llama --layout ddp --set layout=fsdp report-every=3", {"layout": "ddp", "report_every": "3"}),
    ],
)
def test_a_recipe_is_recognised(text, settings):
    recipe = find_recipe(words(text))
    assert recipe is not None and recipe.name == "llama" and recipe.settings == settings


@pytest.mark.parametrize("text", ["python train.py", "drumbeat run x.yaml", "drumbeat train", "echo drumbeat"])
def test_what_is_no_recipe(text):
    assert find_recipe(words(text)) is None


@pytest.mark.parametrize(
    "text, batch",
    [
        ("drumbeat train llama --set model=byte-tiny", 32),
        ("drumbeat train wide-resnet", 2048),
        ("drumbeat train resnet --set batch=64", 64),
        ("drumbeat train finetune --set lora=16", None),
    ],
)
def test_a_recipe_knows_its_batch(text, batch):
    assert find_recipe([*words(text), "--set", "steps=2"]).batch == batch


def make(text, kind="batch", given=None, world=4):
    command = words(text)
    return tunable(command, command, kind, given or {}, world, 2)


def test_a_recipe_gets_words_at_its_end():
    """The recipe's batch is that of all ranks: what a rank takes at once is said by accumulate."""
    takes = make("drumbeat train llama --set batch=64 checkpoint=/c")
    filled = takes.filled(Point(batch=8, accumulate=2), 25, 5, 64)
    recipe = find_recipe(filled)
    assert filled[: len(takes.command)] == takes.command
    assert recipe.settings["accumulate"] == "2" and recipe.settings["batch"] == "64"
    assert recipe.settings["checkpoint"] == "" and recipe.settings["steps"] == "25"
    assert takes.words(Point(batch=8, accumulate=2), 64) == "--set batch=64 accumulate=2"
    assert find_recipe(takes.filled(Point(layout="tp=2"), 25, 5, None)).settings["layout"] == "tp=2"
    # PowerSGD begins at once in a trial, and when the recipe says in training
    assert find_recipe(takes.filled(Point(hook="powersgd:4"), 25, 5, None)).settings["hook"] == "powersgd:4:2"
    assert takes.words(Point(hook="powersgd:4"), None) == "--set hook=powersgd:4"


def test_any_other_command_by_its_places():
    takes = make("python t.py {batch} {accumulate} {hook}", given={"hook": "bf16"})
    assert takes.filled(Point(batch=8, accumulate=2), 25, 5, 64) == words("python t.py 8 2 bf16")
    takes = make("python t.py {tp} {dp_shard} {layout}", "layout")
    assert takes.filled(Point(layout="tp=2,dp_shard=2"), 25, 5, None) == words("python t.py 2 2 tp=2,dp_shard=2")
    takes = make("python t.py {batch} {tp} {dp_replicate}", given={"layout": "dp_replicate=-1,tp=2"})
    assert takes.filled(Point(batch=8), 25, 5, None) == words("python t.py 8 2 2")


@pytest.mark.parametrize(
    "text, kind, given, says",
    [
        ("python t.py", "batch", {}, "where the batch goes"),
        ("python t.py {batch}", "hook", {}, "where the hook goes"),
        ("python t.py {batch} {hook}", "batch", {}, "--with hook=VALUE"),
        ("python t.py {batch}", "batch", {"hook": "bf16"}, "has no {hook}"),
        ("drumbeat train llama --set batch={batch}", "batch", {}, "by its own settings"),
        ("drumbeat train llama --verify-resume", "batch", {}, "does not train"),
    ],
)
def test_what_a_command_cannot_take(text, kind, given, says):
    with pytest.raises(Problem) as caught:
        make(text, kind, given)
    assert says in str(caught.value)


# -- layouts ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 256))
def test_every_layout_once_and_each_of_them_whole(world):
    found = list(layouts(world))
    assert len(set(found)) == len(found) and all(each.ranks == world for each in found)
    for each in found:
        assert read_layout(layout_text(each), world, 1) == each


def test_the_order_of_layouts():
    first = [layout_text(each) for each in ranked(16, 8)]
    assert first[:3] == ["dp_replicate=16", "dp_replicate=2,dp_shard=8", "dp_shard=16"]
    assert first.index("dp_replicate=8,tp=2") < first.index("tp=16")  # tp stays in a node
    assert first.index("dp_replicate=2,dp_shard=8") < first.index("dp_replicate=8,dp_shard=2")
    assert set(first) == {layout_text(each) for each in layouts(16)}
    assert Layout.parse(first[0]).dp_replicate == 16


# -- ends -------------------------------------------------------------------------------------------------------------

GPU = Finding("gpu-out-of-memory", ERROR, "the GPU ran out of memory", rank=1)
KILLED = Finding("killed", ERROR, "killed by SIGKILL, not by drumbeat", rank=1)
WATCHDOG = Finding("collective-timeout", ERROR, "a collective timed out")
LOST = Finding("peer-lost", ERROR, "connection closed by peer", rank=0)


def seen(steps=0, loss=1.0):
    made = Observed(2)
    for step in range(1, steps + 1):
        made.add(Metric(0, 0, float(step), step=step, loss=loss))
    return made


@pytest.mark.parametrize(
    "ended, steps, must, outcome",
    [
        (Ended(STEPS, 9.0), 12, True, OK),
        (Ended(ENDED, 9.0, 0), 3, True, OK),
        (Ended(TIME, 120.0), 3, True, OK),
        (Ended(TIME, 120.0), 0, False, OK),  # it reports nothing: alive is all that can be said
        (Ended(TIME, 120.0), 0, True, HANG),  # others of its trials did report
        (Ended(TIME, 120.0, others=(GPU,)), 0, True, OOM),  # a rank said so and did not end
        (Ended(SILENCE, 90.0), 3, True, HANG),
        (Ended(SILENCE, 90.0, others=(WATCHDOG,)), 3, True, HANG),
        (Ended(ENDED, 9.0, 1, GPU), 0, True, OOM),
        (Ended(ENDED, 9.0, 1, LOST, (LOST, GPU)), 3, True, OOM),
        (Ended(ENDED, 9.0, 137, KILLED), 3, True, FAILED),  # by whom, nobody knows
        (Ended(ENDED, 9.0, 1, WATCHDOG), 3, True, HANG),
        (Ended(ENDED, 9.0, 1, Finding("exception", ERROR, "FloatingPointError: loss is nan")), 0, True, NAN),
        (Ended(ENDED, 9.0, 1, Finding("exception", ERROR, "ValueError: x")), 0, True, FAILED),
        (Ended(ENDED, 9.0, 2, refusal="tp 8 does not divide"), 0, True, REFUSED),
        (Ended(ENDED, 9.0, 1, refusal="tp 8 does not divide"), 0, True, FAILED),
        (Ended(INTERRUPTED, 9.0, 1, GPU), 3, True, STOPPED),
    ],
)
def test_ends(ended, steps, must, outcome):
    assert classify(ended, seen(steps), must, 60.0)[0] == outcome


def test_a_loss_that_is_no_number():
    assert classify(Ended(STEPS, 9.0), seen(3, math.nan), True, 60.0)[0] == NAN


# -- meaning ----------------------------------------------------------------------------------------------------------


def result(batch, speed=None, outcome=OK, long=False, unit="samples/s", memory=None):
    return Result(Point(batch=batch), outcome, "", 1.0, speed=speed, unit=unit, long=long, memory_gib=memory)


def test_fastest_and_largest():
    found = judge("batch", [result(1, 10.0), result(2, 30.0), result(4, 20.0), result(8, outcome=OOM)])
    assert (found.largest.point.batch, found.fastest.point.batch, found.recommended.point.batch) == (4, 2, 2)


def test_the_largest_needs_room():
    """Where the next smaller one is as fast, take that; else say what is left."""
    near = judge("batch", [result(2, 99.0), result(4, 100.0)])
    assert near.recommended.point.batch == 2 and "1.0% slower" in near.why
    far = judge("batch", [result(2, 50.0), result(4, 100.0, memory=70.0)], gpu_gib=80.0)
    assert far.recommended.point.batch == 4 and "10.0 of 80 GiB left" in far.why
    assert "the largest tried; how much memory was left is unknown" in judge("batch", [result(4, 100.0)]).why
    assert "the largest that fits" in judge("batch", [result(4, 100.0), result(8, outcome=OOM)]).why


def hook(name, speed, spread=None, loss=None):
    return Result(Point(hook=name), OK, "", 1.0, speed=speed, unit="tokens/s", spread=spread, loss=loss)


def test_a_difference_within_the_noise_is_none():
    """The plain hook stays unless another is faster by more than these trials can tell apart."""
    same = judge("hooks", [hook("all-reduce", 100.0, 0.02), hook("bf16", 104.0, 0.02)])
    assert same.fastest.point.hook == "bf16" and same.recommended.point.hook == "all-reduce"
    assert same.why == (
        "no difference above the noise: bf16 was 3.8% faster, and 5.7% is what these trials can tell apart"
    )
    real = judge("hooks", [hook("all-reduce", 100.0, 0.01, 3.0), hook("bf16", 120.0, 0.01, 3.5)])
    assert real.recommended.point.hook == "bf16" and "3.5000 where all-reduce has 3.0000" in real.why
    assert judge("hooks", [hook("all-reduce", 100.0), hook("bf16", 101.9)]).recommended.point.hook == "all-reduce"
    short = judge("hooks", [hook("all-reduce", 100.0), hook("bf16", 110.0, 0.01)])
    assert short.recommended.point.hook == "all-reduce" and "20.1% (assumed: too few steps" in short.why
    noisy = judge(
        "batch",
        [Result(Point(batch=b), OK, "", 1.0, speed=s, unit="x", spread=0.1) for b, s in ((2, 80.0), (4, 100.0))],
    )
    assert noisy.recommended.point.batch == 2 and "(noise 28.3%)" in noisy.why


def test_speed_is_never_made_up():
    found = judge("batch", [result(1), result(2)])
    assert found.largest.point.batch == 2 and found.fastest is None and found.recommended is None
    mixed = judge("batch", [result(1, 5.0, unit="steps/s"), result(2, 9.0)])
    assert mixed.fastest is None and "cannot be compared" in mixed.why


def test_the_longer_trial_counts():
    found = judge("batch", [result(1, 10.0), result(2, 30.0), result(2, 5.0, long=True)])
    assert found.fastest.point.batch == 1
    refuted = judge("batch", [result(1, 10.0), result(2, 30.0), result(2, outcome=OOM, long=True)])
    assert refuted.largest.point.batch == 1
    assert judge("batch", [result(1, outcome=HANG)]).largest is None


def test_cost():
    said = cost(10, 1, 120, 2, 16, 16)
    assert said.seconds == 10 * 150 + 120 and round(said.gpu_hours, 2) == 7.2
    assert "7.20 GPU-hours" in said.says() and "16 GPUs" in said.says()
    assert "not known" in cost(1, 0, 1, 1, 1, None).says() and "no GPU" in cost(1, 0, 1, 1, 1, 0).says()


def test_the_largest_batch_is_compared_with_smaller_ones_where_there_are_speeds():
    batches = divisors(64)
    plan = Plan("batch", most_trials(batches, 64), 1, 64, start=64, batches=batches)
    for speed, order in ((100.0, [64, 64, 32, 16]), (None, [64, 64])):
        results: list = []
        while not isinstance(trial := plan.next(results), Done):
            results.append(Result(trial.point, OK, "", 1.0, speed=speed, unit="tokens/s", long=trial.long))
        assert [each.point.batch for each in results] == order
        assert [each.point.accumulate for each in results][-1] == 64 // order[-1]


@pytest.mark.parametrize(
    "declared, command, batch",
    [
        ('p.add_argument("-b", "--batch-size", type=int, default=64)', "python t.py --batch-size {batch}", 64),
        ('p.add_argument("-b", "--batch-size", type=int, default=64)', "torchrun t.py -b={batch}", 64),
        ('@click.option("--batch", default=32)\ndef main(): pass', "python t.py --batch {batch} --lr 1", 32),
        ('p.add_argument("--batch-size", default=SIZE)', "python t.py --batch-size {batch}", None),
        ('p.add_argument("--batch-size", default=True)', "python t.py --batch-size {batch}", None),
        ('p.add_argument("--batch-size", default=64)', "python t.py {batch}", None),
        ("this is (no Python", "python t.py --batch-size {batch}", None),
    ],
)
def test_the_scripts_own_batch(tmp_path, monkeypatch, declared, command, batch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text(f"import argparse\np = argparse.ArgumentParser()\n{declared}\n")
    assert own_batch(words(command), words(command)) == batch
    assert own_batch(words(command), words("python elsewhere.py")) is None


def test_a_batch_that_grows_says_what_else_changes():
    plan = Plan("batch", 9, 2, None, start=64, batches=range(1, 1025), own_batch=64)
    assert plan.next([]).point.batch == 64
    assert plan.changes(result(1024, 9.0)) == "Global batch becomes 2048 (it was 128): retune the learning rate."
    assert "nothing else changes" in plan.changes(result(64, 9.0))
    (line,) = [text for label, text in closing(Judgement(None, None, result(1024, 9.0), "the fastest"), "w",
               plan.changes(result(1024, 9.0)), "", "f", False, None) if label == "recommended"]  # fmt: skip
    assert line == "batch 1024 (fastest). Global batch becomes 2048 (it was 128): retune the learning rate."
    assert Plan("batch", 9, 2, 128).changes(result(8, 9.0)) == ""


def test_the_memory_of_a_program_that_reports_none_is_what_its_gpus_held(tmp_path):
    run = make_run(tmp_path / "run")
    with open(run.folder.node(0).telemetry, "w") as file:
        for t, used in ((1.0, 3), (2.0, 9), (3.0, 5)):
            gpus = [{"index": 0, "memory_used": used << 30}, {"index": 1}]
            file.write(json.dumps({"t": t, "host": "h", "gpus": gpus}) + "\n")
    assert _used_gib(Run.open(run.path)) == 9.0 and _used_gib(None) is None


def test_the_table_leaves_out_what_no_trial_knows():
    trials = [
        Result(Point(batch=batch), OK, "", 20.0, speed=100.0 * batch, unit="samples/s", run="r") for batch in (4, 8)
    ]
    assert table("batch", trials, ())[0].split() == ["batch", "outcome", "speed", "seconds", "run"]
    assert "memory" in table("batch", [*trials, Result(Point(batch=16), OK, "", 20.0, memory_gib=3.0)], ())[0]
