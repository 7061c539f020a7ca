"""Comparing runs: what the table says, and what keeps a comparison from being a fair one."""

import csv
import dataclasses
import io
import re
from dataclasses import replace

import pytest

from drumbeat.base.problem import Problem
from drumbeat.report.figures import Figures, Phases, Setting, Speed
from drumbeat.report.intervals import steps_at
from drumbeat.report.scaling import compare
from drumbeat.report.tables import cells, charts_of_comparison, csv_text, latex, markdown, page, said, text
from drumbeat.verify.chart import line_chart, ticks


def run(gpus, rate, batch=4096.0, error=None, phases=None, seconds=600.0, name=None, **setting):
    speed = Speed(rate, "tokens/s", "reported steps", 100, rate * 0.9, rate, rate * 1.1, error)
    return Figures(
        name or f"run-{gpus}", "/runs", "finished", 0, nodes=max(1, gpus // 4), ranks=gpus, gpus=gpus, seconds=seconds,
        training_s=seconds, speed=speed, batch=batch, batch_unit="tokens", phases=phases or Phases(), setting=Setting(**setting),
    )  # fmt: skip


def test_strong_and_weak_are_told_apart_by_the_batch():
    strong = compare([run(8, 7000.0), run(4, 4000.0)])
    assert (strong.kind, strong.baseline) == ("strong", "run-4") and "4,096 tokens per step" in strong.kind_why
    assert [(row.size, row.speedup, row.efficiency) for row in strong.rows] == [(4, 1.0, 1.0), (8, 1.75, 0.875)]
    weak = compare([run(4, 4000.0, 4096.0), run(8, 7600.0, 8192.0)])
    assert weak.kind == "weak" and "1,024 tokens per step and GPU" in weak.kind_why and weak.fair
    assert compare([run(4, 4000.0), run(4, 4100.0, name="again")]).kind == "repeated"


def test_a_changed_batch_is_flagged():
    found = compare([run(4, 4000.0, 4096.0), run(8, 7600.0, 6000.0)])
    assert found.kind == "neither" and not found.fair
    assert any("NOT A FAIR COMPARISON" in line for line in said(found))
    rates = [run(4, 4000.0, name=name, command=f"train.py --lr {name}") for name in ("0.1", "0.01")]
    varied = compare(rates)
    assert "Variants, not scaling" in "\n".join(said(varied)) and varied.fair is None and not varied.questions
    assert "differs: command: train.py --lr 0.1 (0.1); train.py --lr 0.01 (0.01)" in said(varied)
    assert [row[:2] for row in cells(varied)[1]] == [["0.1", "--lr 0.1"], ["0.01", "--lr 0.01"]]
    assert csv_text(varied).splitlines()[0].endswith(",source,command") and "--lr 0.01" in csv_text(varied)
    assert any(line == "differs: batch of a step: 4,096 tokens (run-4); 6,000 tokens (run-8)" for line in said(found))


def test_variants_show_their_losses_and_nothing_of_scaling():
    first = run(2, 8 / 1.5, 8.0, phases=Phases(step=1500.0))
    second = run(2, 16 / 4.725, 16.0, name="larger", phases=Phases(step=4725.0))
    curves = {"loss": [(1.0, 3.0), (9.0, 1.0)], "validation loss": [(5.0, 2.0), (9.0, 1.5)]}
    told = {"curves": curves, "steps_at": [(1.0, 10.0), (9.0, 90.0)]}
    found = compare([replace(first, loss=(3.0, 1.0), **told), replace(second, loss=(3.0, 0.5), **told)])
    assert found.losses["training loss"]["larger"] == [(10, 3.0), (90, 1.0)]
    assert found.losses["validation loss"]["run-2"] == [(50, 2.0), (90, 1.5)]
    by_epoch = [replace(each, step_is="epoch", **told) for each in (first, second)]
    assert (found.counts, compare(by_epoch).counts) == ("step", "epoch")
    shown = "\n".join([*said(found), *cells(found)[0], page(found)])
    assert "differs: batch of a step: 8 tokens (run-2); 16 tokens (larger)" in shown
    assert "lowest last loss: 0.5 (larger)" in shown and "Validation loss" in shown
    assert not any(word in shown for word in ("speed-up", "efficiency", "lost on", "ideal"))
    assert list(charts_of_comparison(found)) == ["training-loss", "validation-loss"]


def test_a_validation_belongs_to_the_step_before_it():
    """A run that reports every fourth step and validates after step 16 has its first point there, not on the way to step 20."""
    made, validations = [(4.0, 16.0), (1.0, 4.0), (8.0, 20.0)], [(6.0, 0.5), (9.0, 0.4)]
    curves = {"loss": [(1.0, 3.0), (8.0, 1.0)], "validation loss": validations}
    found = replace(run(2, 8.0), curves=curves, steps_at=steps_at(made, validations)).losses_by_step()
    assert found == {"loss": [(4, 3.0), (20, 1.0)], "validation loss": [(16, 0.5), (20, 0.4)]}
    assert steps_at([], validations) == []


def test_the_names_of_what_a_run_wrote_are_no_difference():
    named = {
        name: run(4, 4000.0, name=name, command=f"train.py --out {name}.pt", outputs=(f"{name}.pt",)) for name in "ab"
    }
    assert compare(list(named.values())).differences == () and len(compare(list(named.values())).repeats) == 1


def test_a_batch_that_is_not_reported_is_not_guessed():
    found = compare([run(4, 4000.0, None), run(8, 7600.0, None)])
    assert found.kind == "not known" and "run-4, run-8" in found.kind_why and found.rows[1].lost_ms is None


@pytest.mark.parametrize(
    "what, first, second",
    [
        ("precision", {"precision": "fp32"}, {"precision": "bf16"}),
        ("code", {"code": "abc"}, {"code": "abc, changed (1234)"}),
        ("software: torch", {"software": {"torch": "2.9"}}, {"software": {"torch": "2.13"}}),
        ("hardware: GPU", {"hardware": {"GPU": "A100"}}, {"hardware": {"GPU": "H100"}}),
        ("command", {"command": "python a.py --workers 0"}, {"command": "python a.py --workers 8"}),
    ],
)
def test_runs_that_differ_are_not_compared_in_silence(what, first, second):
    found = compare([run(4, 4000.0, **first), run(8, 7600.0, **second)])
    assert [each.what for each in found.differences] == [what] and not found.fair
    assert compare([run(4, 4000.0, **first), run(8, 7600.0, **first)]).fair


def test_what_only_says_the_size_is_no_difference_and_an_unknown_value_breaks_nothing():
    commands = [f"torchrun --nnodes {n} --nproc-per-node=4 --rdzv-endpoint=h:1 t.py" for n in (1, 2)]
    assert compare([run(4, 4000.0, command=commands[0]), run(8, 7600.0, command=commands[1])]).differences == ()
    found = compare([run(4, 4000.0, precision="bf16"), run(8, 7600.0)])
    assert found.fair and found.differences[0].text() == "precision: bf16 (run-4); not known (run-8)"


def test_long_commands_keep_where_they_differ():
    """The options that differ keep their names; values that changed places differ too."""
    begin = "python train.py --data /scratch/project/tokens/of/everything --epochs 30"
    told = {
        "a": f"{begin} --lr 0.1 --wd 0.2 --seed 1",
        "b": f"{begin} --lr 0.2 --wd 0.1 --seed 2",
        "c": f"{begin} --ema",
    }
    found = compare(
        [run(size, 1000.0 * size, name=name, command=told[name]) for size, name in ((4, "a"), (8, "b"), (16, "c"))]
    )
    assert found.differences[0].values == {"a": "... --lr 0.1 --wd 0.2", "b": "... --lr 0.2 --wd 0.1", "c": "... --ema"}


def test_more_than_linear_is_questioned():
    found = compare([run(1, 5100.0, None), run(8, 63190.0, None)])
    assert (
        found.rows[1].speedup == pytest.approx(12.39, abs=0.01) and "more than the hardware grew" in found.questions[0]
    )
    assert not compare([run(1, 5100.0), run(8, 40000.0)]).questions


def test_ranks_that_share_the_cores_of_the_baseline_do_not_scale():
    runs = [
        dataclasses.replace(run(ranks, rate), gpus=0, ranks=ranks, cores=2)
        for ranks, rate in ((1, 100.0), (2, 190.0), (4, 358.0))
    ]
    found = compare(runs)
    assert [each.partition(":")[0] for each in found.questions] == ["run-2", "run-4"]
    assert "its 4 ranks had no more cores (2) than the 1 of run-1, so a speed-up of 3.58 is not" in found.questions[1]
    assert not compare([dataclasses.replace(each, cores=2 * each.ranks) for each in runs]).questions


def test_the_causes_of_a_speed_up_on_the_same_cores_leave_out_what_the_records_exclude():
    runs = [
        dataclasses.replace(run(ranks, rate), gpus=0, ranks=ranks, cores=2)
        for ranks, rate in ((1, 100.0), (2, 152.0), (4, 119.0))
    ]
    asked = compare(runs).questions
    assert [each.partition(":")[0] for each in asked] == ["run-2"], "1.19 is within what a busy machine does"
    assert "OMP_NUM_THREADS" in asked[0] and "a copy of its own" in asked[0] and "busy with other work" in asked[0]
    known = [dataclasses.replace(each, threads=2, one_world=True) for each in runs]
    asked = compare(known).questions
    assert "OMP_NUM_THREADS" not in asked[0] and "copy" not in asked[0] and "busy with other work" in asked[0]
    idle = [dataclasses.replace(each, threads=1) for each in runs]
    assert "left cores idle (OMP_NUM_THREADS: 1 in all)" in compare(idle).questions[0]


@pytest.mark.parametrize("unit", ["samples/s as printed", "epochs/s", "steps/s"])
def test_speeds_that_may_be_of_one_rank_or_of_an_unknown_batch_are_not_compared_across_sizes(unit):
    def printed(ranks, value, name=""):
        return Figures(
            name or f"r{ranks}", f"/{ranks}", "finished", ranks=ranks, speed=Speed(value, unit, "", error=1.0)
        )

    found = compare([printed(1, 4143.0), printed(2, 11690.0)])
    assert {(row.speedup, row.efficiency, row.ideal, row.error) for row in found.rows} == {(None, None, None, None)}
    assert "efficiency |" not in markdown(found) and "speed-up" not in markdown(found)
    words = " ".join(said(found))
    assert "efficiency is not known" in words and words.count("metrics.report(step, samples=...)") == 1
    again = compare([printed(2, 400.0), printed(2, 300.0, "again")])
    assert again.rows[1].efficiency == 0.75, "the same size: both figures count the same"


def test_runs_of_one_size_stay_in_their_order_and_lose_what_the_efficiency_says():
    """Steps of one rank and the throughput of all of them may have been measured over other times."""
    single = dataclasses.replace(run(2, 1000.0, name="single", phases=Phases(step=900.0)), world="2 copies")
    train = run(2, 623.0, name="train", phases=Phases(step=770.0))
    found = compare([train, single])
    assert found.baseline == "train" and "single is not one training: 2 copies" in found.questions
    slower = compare([single, train])
    assert slower.rows[1].efficiency == 0.623 and slower.rows[1].lost_ms == pytest.approx(770 * 0.377)


def test_what_was_seen_of_a_world_that_is_not_proven_is_carried_into_the_comparison():
    short = dataclasses.replace(run(2, 1000.0, name="short"), world_unproven="2 ranks connected")
    asked = compare([run(1, 600.0, name="one"), short]).questions
    assert "short is not proven to be one training: 2 ranks connected" in asked


def test_losses_are_labelled_with_their_counter():
    alone = Phases(step=80.0, input=8.0)
    eight = Phases(step=15.0, input=2.0, communication=2.5, waiting=0.5)
    found = compare([run(1, 1000.0, phases=alone), run(8, 16000 / 3, phases=eight)])
    row = found.rows[1]
    assert row.lost_ms == pytest.approx(5.0)
    assert {each.kind: each.ms for each in row.losses} == pytest.approx(
        {"communication": 2.5, "input": 1.0, "imbalance": 0.5, "compute": 1.0}
    )
    assert all(each.source for each in row.losses)
    blind = compare([run(1, 1000.0, phases=Phases(step=80.0)), run(8, 5333.0, phases=Phases(step=15.0))])
    assert "communication, input, imbalance and compute not measured" in " ".join(said(blind))


def test_an_interval_comes_from_both_runs():
    found = compare([run(4, 4000.0, error=40.0), run(8, 7000.0, error=140.0)])
    assert found.rows[1].error == pytest.approx(0.875 * (0.01**2 + 0.02**2) ** 0.5) and found.rows[0].error == 0.0
    assert compare([run(4, 4000.0), run(8, 7000.0, error=1.0)]).rows[1].error is None


def test_what_cannot_be_compared():
    with pytest.raises(Problem, match="fewer than two runs"):
        compare([run(4, 4000.0)])
    nothing = Figures("none", "/x", "failed", ranks=4)
    with pytest.raises(Problem, match="none: no throughput is known"):
        compare([run(4, 4000.0), nothing])
    assert compare([run(4, 4000.0), run(8, 7000.0), nothing]).left_out == {"none": "no throughput is known"}
    printed = Figures("printed", "/x", "finished", ranks=8, speed=Speed(7000.0, "tokens/s as printed", ""))
    both = compare([run(4, 4000.0), printed])
    assert both.unit == "tokens/s" and any("printed: the program does not say" in text for text in both.questions)
    steps = Figures("steps", "/x", "finished", ranks=4, speed=Speed(3.0, "steps/s", ""))
    with pytest.raises(Problem, match=r"count different things: steps/s \(steps\); tokens/s \(run-4\)"):
        compare([run(4, 4000.0), steps])


def test_the_table_in_every_form():
    found = compare([run(4, 4000.0, error=20.0), run(8, 7000.0, error=70.0)])
    assert markdown(found).splitlines()[2:] == [
        "| run-4 | 1 | 4 | 4,000 | 1.00 | 100.0 % | 10 m 00 s |",
        "| run-8 | 2 | 8 | 7,000 | 1.75 | 87.5 ± 1.0 % | 10 m 00 s |",
    ]
    rows = list(csv.DictReader(io.StringIO(csv_text(found))))
    assert rows[1]["gpus"] == "8" and float(rows[1]["efficiency"]) == 0.875 and rows[1]["target_reached"] == ""
    assert r"run-8 & 2 & 8 & 7,000 & 1.75 & 87.5 $\pm$ 1.0 \% & 10 m 00 s \\" in latex(found)
    reached = compare([run(4, 4000.0), dataclasses.replace(run(8, 7000.0), target_reached=True)])
    assert [line.split()[-1] for line in text(reached)[:3]] == ["TARGET", "known", "yes"]
    assert max(map(len, text(found, 80))) <= 80
    assert "<polyline" in page(found) and "<script" not in page(found)


def test_an_interval_that_says_nothing_is_not_printed():
    found = compare([run(4, 4000.0, error=40.0), run(8, 7000.0, error=9e6)])
    assert found.rows[1].error is None and "±" not in markdown(found)
    assert "efficiency of run-8: the spread within the runs is too large to give an interval" in said(found)


def test_a_run_that_failed_is_marked():
    failed = dataclasses.replace(run(8, 7000.0), outcome="failed", exit_code=1)
    found = compare([run(4, 4000.0), failed])
    assert [line.split()[-1] for line in text(found)[:3]] == ["END", "finished", "failed"]
    assert any("run-8 did not finish (failed)" in line for line in said(found))


def test_as_many_ranks_on_more_nodes_are_not_the_same_size():
    found = compare([run(4, 4000.0), dataclasses.replace(run(4, 3000.0, name="spread"), nodes=2)])
    assert "on 1 or 2 nodes" in found.kind_why and "same size" not in found.kind_why


def test_intervals_are_drawn():
    """Two runs of one size keep an interval each; a run without one has no bar."""
    made = compare([run(4, 4000.0, error=40.0), run(8, 7000.0, error=100.0), run(8, 6800.0, error=90.0, name="again")])
    charts = charts_of_comparison(made)
    assert [chart.count('class="e"') for chart in charts.values()] == [2, 2]
    bare = charts_of_comparison(compare([run(4, 4000.0), run(8, 7000.0)]))
    assert 'class="e"' not in "".join(bare.values()) and "interval" not in "".join(bare.values())
    head = page(made).partition("<table>")[0]
    assert 'class="verdict ok"' in head and "Strong scaling" in head and "on 8 GPUs as on 4" in head


def test_steps_per_second_without_a_batch_say_nothing_about_efficiency():
    runs = [
        Figures(f"r{ranks}", f"/{ranks}", "finished", ranks=ranks, speed=Speed(value, "steps/s", ""))
        for ranks, value in ((1, 4.6), (2, 4.4))
    ]
    found = compare(runs)
    first, second = found.rows
    assert {(row.speedup, row.efficiency, row.ideal) for row in (first, second)} == {(None, None, None)}
    assert "1.00" not in markdown(found) and "efficiency" not in markdown(found)
    assert any("efficiency is not known" in each for each in found.questions)
    assert "efficiency" in charts_of_comparison(found)


def test_steps_and_nodes_have_whole_numbers_on_their_axis():
    for high in (1, 3, 5, 10, 60, 1000):
        marks = ticks(0, high, whole=True)
        assert all(mark == round(mark) for mark in marks) and marks[0] == 0 and marks[-1] >= high
    drawn = line_chart("Loss", {"": [(1, 3.0), (2, 2.5), (5, 2.0)]}, "step", "loss")
    assert re.findall(r'text-anchor="middle" class="t">([\d.]+)<', drawn) == ["1", "2", "3", "4", "5"]


def test_the_last_losses_are_a_column_and_repeated_runs_have_a_mean_with_its_interval():
    def told(name, gpus, loss, **setting):
        return dataclasses.replace(run(gpus, 1000.0 * gpus, name=name, **setting), loss=(5.0, loss), step=100)

    seeds = [told(f"a{seed}", 4, 2.0 + seed / 10, command=f"python t.py --lr 1 --seed {seed}") for seed in (1, 2, 3)]
    other, larger = told("b", 4, 1.5, command="python t.py --lr 2"), told("c", 8, 2.2, command="python t.py --lr 1")
    found = compare([*seeds, larger])
    assert found.fair and [each.runs for each in found.repeats] == [("a1", "a2", "a3")]
    assert found.repeats[0].loss == pytest.approx(2.2) and found.repeats[0].loss_error == pytest.approx(
        0.2484, abs=1e-3
    )
    shown = markdown(found)
    assert "| loss |" in shown.splitlines()[0] and "accuracy" not in shown and "target" not in shown
    assert "| mean of a1 and 2 more | 1 | 4 | 4,000 ± 0 |  |  |  | 2.2 ± 0.25 |" in shown
    assert any(line.startswith("means of repeated runs") for line in said(found))
    assert list(csv.DictReader(io.StringIO(csv_text(found))))[0]["loss"] == "2.1"
    apart = compare([seeds[0], other])
    assert not apart.fair and not apart.repeats and "mean of" not in page(apart)
    assert not any("after different steps" in each for each in apart.questions)
    early = compare([seeds[0], dataclasses.replace(seeds[1], step=50)])
    assert "losses after different steps: 100 (a1), 50 (a2)" in early.questions
    assert not compare([run(4, 4000.0), run(4, 4100.0, name="again")]).repeats  # nobody knows what they ran
