"""What a run's reports add up to, where they are not plain: losses that are no numbers, restarts, steps of epochs."""

import dataclasses
import json
import math
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from drumbeat.agent.member.progress import NodeMetrics
from drumbeat.metrics.layout import Layout
from drumbeat.metrics.printed import Reader
from drumbeat.report.gather import figures_of
from drumbeat.report.printed_log import figures_of_log
from drumbeat.report.text import rows
from drumbeat.runfolder.files import append
from drumbeat.runfolder.lines import closing_lines, loss_words, progress_line, trend
from drumbeat.runfolder.progress import Progress, RankPace, StepTimes, merged, speed, stands_out, step_times
from drumbeat.runfolder.records import Metric, parse_metric
from drumbeat.runfolder.state import Course
from drumbeat.runfolder.summary import Summary, moment, write_summary
from drumbeat.watch.prometheus import families
from drumbeat.watch.session import Session
from drumbeat.watch.text import screen
from tests.runfolder.folders import make_run, metrics


def added(*metrics):
    progress = Progress()
    for metric in metrics:
        progress.add(metric)
    return progress


def step(number, loss, t=None, rank=0, **more):
    return Metric(0, rank, float(number or 0) if t is None else t, "step", step=number, loss=loss, **more)


def to_nan():
    return [step(number, 10 / number if number < 6 else math.nan, printed=True) for number in range(1, 16)]


def write_metrics(run, metrics):
    with open(run.folder.node(0).metrics, "w") as file:
        for each in metrics:
            loss = each.loss if math.isfinite(each.loss) else str(each.loss)
            line = {"t": each.t, "rank": 0, "kind": "step", "step": each.step, "loss": loss, "printed": each.printed}
            file.write(json.dumps(line) + "\n")


def test_every_view_says_that_the_loss_is_nan(tmp_path):
    run = make_run(tmp_path / "r")
    write_metrics(run, to_nan())
    progress = run.progress()
    assert (
        progress == added(*to_nan()) == Progress.restored(json.loads(json.dumps(progress.snapshot(), allow_nan=False)))
    )
    assert "loss nan since step 6" in progress_line(progress)
    summary = Summary(run_id="r", outcome="finished", exit_code=0, seconds=9.0, nodes=1, ranks=1, progress=progress)
    write_summary(run.folder, summary)
    said = dict(closing_lines(run, summary))
    assert said["loss"] == "nan since step 6 (before that: fell from 10.000 to 2.000 over 5 steps)"
    assert said["warning"] == (
        "the last loss is nan; what was saved since step 6 may hold NaN: check it before you use it"
    )
    saved = added(*to_nan(), Metric(0, 0, 99.0, "checkpoint", step=8))
    words = "the last loss is nan; the checkpoint of step 8 may hold NaN: check it before you use it"
    assert dict(closing_lines(run, dataclasses.replace(summary, progress=saved)))["warning"] == words
    assert dict(rows(figures_of(run)))["loss"] == "nan since step 6 (10.000 to 2.000 before that)"
    session = Session(run)
    session.load()
    assert "loss nan since step 6" in "\n".join(screen(session, 120, 50)) and session.head().loss is None
    session.view.summary = dataclasses.replace(
        summary, progress=added(*to_nan(), Metric(0, 0, 99.0, "validation", loss=math.inf))
    )
    assert "validation inf" in "\n".join(screen(session, 120, 50))
    (family,) = [each for each in families(session.head(), ()) if each.name == "drumbeat_loss"]
    assert math.isnan(family.samples[0][1])


def test_a_loss_that_is_a_number_again_is_one():
    progress = added(step(1, 3.0), step(2, math.inf), step(3, 2.0))
    assert (progress.not_finite, loss_words(progress)) == ("", "fell from 3.000 to 2.000 over 3 steps")
    assert loss_words(added(step(1, math.nan))) == "nan since step 1"
    assert loss_words(added(step(1, math.inf), step(2, math.nan))) == "not finite since step 1 (now nan)"
    both = merged([(added(step(1, math.nan)), 0.0), (added(step(1, 4.0, rank=1)), 0.0)])
    assert loss_words(both) == "nan since step 1"  # the lowest rank's


def test_epochs_are_named_before_the_lowest_rank_has_reported_one():
    """Rank 0 has told an accuracy, rank 1 two epochs."""
    epochs = [Metric(0, 1, float(t), step=t, steps=3, more={"step_is": "epoch"}, printed=True) for t in (1, 2)]
    progress = added(Metric(0, 0, 0.5, "validation", accuracy=0.5), *epochs)
    assert progress_line(progress, left=False).startswith("epoch 2/3")


def test_the_first_and_the_last_loss_are_of_one_rank(tmp_path):
    """Rank 1 happens to report its first steps before rank 0 does."""
    reports = [step(1, 28.289, rank=1), step(1, 35.0), step(2, 30.0, rank=1), step(2, 33.5)]
    reports.insert(0, Metric(0, 1, 0.5, "validation", loss=9.0))
    progress = added(*reports)
    assert (progress.first_loss, progress.last_loss, progress.first_validation) == (35.0, 33.5, None)
    run = make_run(tmp_path / "r")
    metrics(
        run,
        *(
            {"t": each.t, "rank": each.rank, "kind": each.kind, "step": each.step, "loss": each.loss}
            for each in reports
        ),
    )
    assert (run.progress().first_loss, run.losses()) == (35.0, [35.0, 33.5])
    assert figures_of(run).loss == (35.0, 33.5)


def test_a_validation_s_accuracy_counts_more_than_the_training_s():
    seen = added(step(1, 2.0, accuracy=0.9))
    assert seen.accuracy == 0.9
    seen.add(Metric(0, 0, 2.0, "validation", step=1, accuracy=0.6))
    seen.add(step(2, 1.9, accuracy=0.95))
    assert seen.accuracy == 0.6
    seen.add(Metric(0, 0, 4.0, "validation", step=3, accuracy=0.7))
    assert seen.accuracy == 0.7


def test_noise_is_no_trend(tmp_path):
    noise = [3.0, -2.0, 1.0, -1.0, 0.0] * 8
    flat = [17.0 + each for each in noise[2:]] + [20.4, 20.4]
    same = trend(flat)
    assert trend([2.03, 1.2, 2.4, 0.9, 2.2, 1.31]) == "too noisy to tell, 2.030 at first and 1.310 at the end"
    assert same.startswith("about the same, ") and same.endswith("(medians of 4 reports)")
    run = make_run(tmp_path / "r")
    write_metrics(run, [step(number, loss) for number, loss in enumerate(flat, 1)])
    summary = Summary(
        run_id="r", outcome="finished", exit_code=0, seconds=9.0, nodes=1, ranks=1, progress=run.progress()
    )
    assert dict(closing_lines(run, summary))["loss"] == dict(rows(figures_of(run)))["loss"] == same
    falls = [20.0 - n / 2 + each for n, each in enumerate(noise)]
    assert trend(falls) == "", "the first and the last loss say it: it fell"
    assert trend([-5.0, *falls]).startswith("fell from 18")
    assert trend([5.0] * 40) == trend([1.0, 3.0, 2.0]) == trend([]) == ""


def test_the_judgement_of_a_loss_fits_its_number_of_reports():
    """Epochs that halve the loss have fallen, however few; random labels have not; a slow decay shows behind its noise."""
    for many in (2, 3, 5, 10, 50):
        halves = [10 * 0.5**n for n in range(1, many + 1)]
        words = loss_words(added(*(step(n, loss) for n, loss in enumerate(halves, 1))), halves)
        assert words.startswith("fell from 5.000 to ") and words.endswith(f"over {many} steps")
        rising = [1 / each for each in halves]
        words = loss_words(added(*(step(n, loss) for n, loss in enumerate(rising, 1))), rising)
        assert words.startswith("rose from 0.200 to ")
    chance = random.Random(5)
    assert trend([2.306, 2.3055, 2.305]) == "about the same, 2.306 at first and 2.305 at the end"
    for many in (10, 100, 1000):
        flat = [2.3 + chance.gauss(0, 0.1) for _ in range(many)]
        assert trend(flat).startswith("about the same, 2."), many
    slow = [2.0 - 0.4 * n / 1000 + chance.gauss(0, 0.3) for n in range(1000)]
    slow[0], slow[-1] = 1.0, 2.5
    assert trend(slow).startswith("fell from 1.9")
    early = [6.0] * 5 + [2.0 + chance.gauss(0, 0.1) for _ in range(35)]
    early[0], early[-1] = 1.0, 2.1
    assert trend(early).startswith("fell from 6.000 to ")


def test_the_two_losses_are_named_with_their_own_steps(tmp_path):
    run = make_run(tmp_path / "r")
    first, second = [step(n, 50.0 - n) for n in range(1, 21)], [step(n, 50.0 - n, t=100.0 + n) for n in range(11, 51)]
    write_metrics(run, first)
    snapshot = json.dumps({"t": 99.0, "kind": "so-far", "progress": Progress().snapshot()})
    before = Path(run.folder.node(0).metrics).read_text()
    write_metrics(run, second)
    after = Path(run.folder.node(0).metrics).read_text()
    with open(run.folder.node(0).metrics, "w") as file:
        file.write(before + snapshot + "\n" + after)
    assert (run.progress().first_step, run.progress().first_loss_step) == (11, 1)
    assert loss_words(run.progress()) == "fell from 49.000 to 0.000 over 50 steps"
    averages = added(step(None, 9.0), step(5, 44.7), step(6, 40.0), step(None, 0.12))  # epochs', between steps
    assert loss_words(averages) == "fell from 44.700 at step 5 to 40.000 at step 6"
    assert progress_line(averages).startswith("step 6  loss 40.000")


def test_the_speed_in_steps_is_that_of_one_rank():
    """Rank 1 is slower: its last report must not stretch the time of rank 0's steps."""
    fast = [step(n, 1.0, t=10.0 + 2 * n) for n in range(1, 6)]
    slow = [step(n, 1.0, rank=1, t=10.0 + 4 * n) for n in range(1, 6)]
    progress = added(*sorted([*fast, *slow], key=lambda metric: metric.t))
    assert progress.step_seconds == 2.0 and progress.rate() == (0.5, "steps/s")
    assert Progress.restored(progress.snapshot()).step_seconds == 2.0
    assert loss_words(added(step(5, 44.7), step(5, 44.7))) == "44.700 at step 5"


@pytest.mark.parametrize("named", [True, False])
def test_steps_that_are_counted_anew_in_each_epoch_give_no_speed(named):
    more = [{"more": {"epoch": float(epoch)}} if named else {} for epoch in range(3)]
    progress = added(*(step(n, 9.0 - 3 * e - n, t=3.0 * e + n, **more[e]) for e in range(3) for n in (1, 2, 3)))
    assert (progress.laps, progress.step, progress.rate(), progress.seconds_left()) == (2, 3, None, None)
    assert loss_words(progress) == "fell from 8.000 to 0.000; steps are counted anew in each epoch or stage"
    assert "step 3 of this epoch or stage" in progress_line(progress)


def stage(t):
    return Metric(0, 0, t, "stage", more={"stage": 2})


def test_the_pause_between_two_stages_of_a_script_is_no_training():
    """A stage that was seen to start: what was printed before it may be read only later."""
    first, second = [step(n, 1.0 / n, t=float(n)) for n in (1, 2, 3)], [step(n, 1.0, t=20.0 + n) for n in (1, 2, 3)]
    progress = added(*first[:2], stage(5.0), first[2], *second)
    assert (progress.laps, progress.stages, progress.spent["between stages"]) == (1, 1, 18.0)
    assert "steps are counted anew in each stage" in loss_words(progress)
    assert "step 3 of this stage" in progress_line(progress)
    epochs = [step(n, 1.0, t=10.0 * e + n, more={"epoch": float(e)}) for e in (3, 4) for n in (1, 2, 3)]
    mixed = added(*first, stage(5.0), *epochs)
    assert (mixed.laps, mixed.stages, mixed.lap) == (2, 1, "epoch or stage")
    counted = added(
        *(step(n, 1.0, t=float(n), tokens=60.0) for n in (1, 2, 3)),
        stage(5.0),
        *(step(n, 1.0, t=20.0 + n, tokens=60.0) for n in (1, 2, 3)),
    )
    assert counted.rate() == (5 * 60.0 / 4.0, "tokens/s")
    snapshot = added(*first, stage(5.0)).snapshot()
    went_on = Progress.restored(json.loads(json.dumps(snapshot)))
    for each in second:
        went_on.add(each)
    assert (went_on.stages, went_on.spent["between stages"]) == (1, 18.0)
    other = added(*second)
    assert merged([(progress, 0.0), (other, 0.0)]).spent["between stages"] == 18.0


def test_epochs_of_different_length_give_no_steps_of_the_run():
    """Read as they are printed: a step is never above its total, and no speed is worked out from what was not seen."""

    def read(*epochs, every=1, form="Epoch [{e}/{of}], Step [{i}/{n}], Loss: 0.5\n"):
        lines, progress, t = Layout(), Progress(), 0.0
        reader = Reader(layout=lines)
        for e, n in enumerate(epochs, 1):
            for i in range(every, n + 1, every):
                t += 1.0
                for record in reader.feed(form.format(e=e, of=len(epochs), i=i, n=n, part=100 * i // n).encode()):
                    metric = parse_metric({"t": t, **record, "rank": 0, "printed": True}, 0)
                    assert metric is not None
                    progress.add(metric)
                    assert progress.steps is None or progress.step <= progress.steps, (e, i)
                lines.stamp(t)  # of one that is held back until the next line
        return progress

    bar = "Epoch {e}: {part}%|###   | {i}/{n} [00:01<00:10,  5.00it/s, loss=0.5]\n"
    for form in ("Epoch [{e}/{of}], Step [{i}/{n}], Loss: 0.5\n", bar):
        even = read(10, 10, 10, form=form)
        assert (even.step, even.laps, even.rate()) == (30, 0, (1.0, "steps/s"))
        for lengths, every, last in (((10, 20, 5), 1, 5), ((5, 20), 5, 20), ((10, 10, 20), 10, 20), ((20, 8), 3, 6)):
            progress = read(*lengths, every=every, form=form)
            assert (progress.step, progress.steps, progress.rate()) == (last, lengths[-1], None), lengths
            assert progress.laps and progress.seconds_left() is None and not progress.short_of_steps
            assert f"step {last}/{lengths[-1]} of this epoch or stage" in progress_line(progress)


def test_a_script_that_prints_epochs_alone_has_progress_and_a_speed():
    reader, progress = Reader(), Progress()
    records = reader.feed(b"".join(b"epoch %d loss %.1f\n" % (epoch, 1 / epoch) for epoch in range(1, 12)))
    for t, record in enumerate(records):
        progress.add(parse_metric({**record, "t": 2.0 * t, "rank": 0, "printed": True}, 0))
    assert (progress.step, progress.counts, progress.rate()) == (11, "epoch", (0.5, "epochs/s"))
    assert progress_line(progress).startswith("epoch 11  loss 0.1")
    total = merged([(Progress(), 0.0), (progress, 0.0)])
    assert (total.step, total.counts) == (11, "epoch")


def test_a_total_below_the_step_is_none():
    progress = added(step(40, 1.0, steps=50), step(41, 1.0, steps=15))
    assert (progress.step, progress.steps) == (41, None)
    ahead = added(*(step(n, 1.0, steps=3) for n in (1, 2, 3, 1)), step(2, 1.0, rank=1, steps=2))
    assert (ahead.step, ahead.steps) == (1, 3), "another rank's total is not that of the step shown"


def test_the_time_per_step_is_that_of_steps():
    """Not that of lines, nor of epochs; a single step after a validation weighs as one step, not as the ten before it."""

    def pace(*numbers, of=0):
        rank = RankPace(0, 0)
        for t, number in numbers:
            more = {"step_of": "epoch", "epoch": float(t // of)} if of else {}
            rank.add_step(Metric(0, 0, float(t), step=number, printed=True, more=more), float(t))
        return rank.step_seconds

    assert pace((1, None), (2, None), (3, None)) is None  # only a loss per line, or per epoch
    assert pace((0, 10), (3, 20), (4, None), (6, 30)) == pytest.approx(0.3)
    assert pace((0, 10), (1, 10), (3, 20)) == pytest.approx(0.3)  # the same step on both streams
    assert pace((0, 8), (2, 10), (4, 2), (6, 4)) == pytest.approx(1.0)  # counted anew
    assert pace((0, 5), (10, 10), (14, 14), of=10) == pytest.approx(1.0)  # ten steps lay between 5 and 10
    lines = [
        (0, 0),
        *((3 + 3 * n, 10 + 10 * n) for n in range(5)),
        (27, 51),
        *((30 + 3 * n, 61 + 10 * n) for n in range(5)),
    ]
    assert pace(*lines) == pytest.approx(0.3, rel=0.35)


@pytest.mark.parametrize(
    "steps,total,short",
    [
        ((1, 2, 8), 50, True),
        ((1,), 50, True),
        ((0, 1, 49), 50, False),  # counted from 0
        ((10, 20, 90), 99, False),  # every 10 steps, the last ones between two reports
        ((10, 20, 30), 99, True),
        ((50,), 99, False),  # how far reports are apart is not known
        ((1, 2, 3, 1, 2, 3), 9, False),  # counted per epoch
        ((1, 2, 3), None, False),
    ],
)
def test_whether_the_announced_steps_were_made(steps, total, short):
    assert added(*(step(n, 1.0, t=float(t), steps=total) for t, n in enumerate(steps))).short_of_steps is short


def test_no_time_is_left_once_no_step_comes():
    fast = added(*(step(number, 1.0, steps=30) for number in range(1, 11)))
    assert fast.seconds_left() == 20.0 and fast.quiet(13.0) is None
    left = [moment("running", "", None, Course(), fast, 0.0, now).seconds_left for now in (13.0, 40.0)]
    assert left == [20.0, None] and fast.quiet(40.0) == 30.0
    assert progress_line(fast, now=40.0).endswith("1.00 steps/s  no step for 30 s")
    assert progress_line(fast, now=13.0).endswith("1.00 steps/s  20 s left")
    assert Progress.restored(fast.snapshot()).quiet(40.0) == 30.0
    seldom = added(*(step(number, 1.0, steps=200) for number in range(10, 101, 10)))  # every tenth step is reported
    assert seldom.seconds_left() == 100.0 and seldom.quiet(145.0) is None and seldom.quiet(155.0)
    over = added(*(step(number, 1.0, steps=10) for number in range(1, 11)))
    assert over.quiet(1000.0) is over.seconds_left() is None, "it saves, or validates"
    assert added(step(1, 1.0, steps=9)).quiet(1000.0) is None, "how far apart steps are is not known yet"


def test_a_loss_is_named_with_its_step_where_that_is_not_the_last_one(tmp_path):
    ahead = added(step(9, 2.0), step(10, 1.5), step(12, None, rank=1))
    assert progress_line(ahead).startswith("step 12  loss 1.500 (step 10)")
    assert progress_line(added(step(9, 2.0), step(10, 1.5))).startswith("step 10  loss 1.500  ")
    run = make_run(tmp_path / "r")
    metrics(run, {"t": 1.0, "rank": 0, "step": 10, "loss": 1.5}, {"t": 2.0, "rank": 0, "step": 11})
    session = Session(run)
    session.load()
    assert "step 11  loss 1.500 (step 10)" in "\n".join(screen(session, 80, 24)), "watch says the same"


def test_a_loss_that_is_reported_and_printed_has_not_risen():
    told = added(
        Metric(0, 0, 1.0, "validation", loss=5.60959), Metric(0, 0, 1.0, "validation", loss=5.61, printed=True)
    )
    assert loss_words(told) == "validation loss 5.610"
    assert loss_words(added(step(1, 2.00001), step(9, 2.0))) == "stayed at 2.000 over 9 steps"


def test_the_speed_of_a_few_printed_lines_is_only_about_right(tmp_path):
    run = make_run(tmp_path / "r")
    metrics = [step(n, 1.0 + n, t=0.25 * (n // 2), printed=True) for n in range(1, 32)]
    assert added(*metrics[:8]).rate() is None and added(*metrics[:8]).no_rate == "printed steps must span at least 2 s"
    write_metrics(run, metrics)
    assert run.progress().rough and "about 8 steps/s" in progress_line(run.progress())
    said = dict(rows(figures_of(run)))
    assert (
        said["throughput"]
        == "about 8 steps/s (reported steps, first to last; times of printed lines, to about 0.25 s on an idle node)"
    )
    too_fast = "not measured: printed lines are read every 0.25 s, too coarse for steps of less than 1 s"
    assert said["spread"] == too_fast
    write_metrics(run, metrics[:8])
    assert dict(rows(figures_of(run)))["throughput"] == "not measured: printed steps must span at least 2 s"
    assert speed(1234.5, "steps/s", rough=True) == "about 1,200 steps/s"


def test_the_paces_of_many_ranks_are_written_seldom_and_found(tmp_path):
    """200 ranks on one node: their paces are larger than the metrics between two sums, and most sums go without them."""
    run, ranks, steps = make_run(tmp_path / "run"), 200, 40
    wrote = SimpleNamespace(append_if_room=lambda path, data: append(path, data), take_records=list)
    node = NodeMetrics(run.folder.node(0), str(tmp_path), None, wrote)
    begin = time.time() - 100.0
    for step in range(1, steps + 1):
        with open(node.path, "a") as file:
            for rank in range(ranks):
                record = {"t": begin + step + rank / 1000, "rank": rank, "step": step, "tokens": 8}
                file.write(json.dumps(record) + "\n")
        node.ship(0)
    lines = [line for line in (tmp_path / "run/nodes/0/metrics.jsonl").read_text().splitlines() if "so-far" in line]
    assert len(lines) > 2 * sum('"paces"' in line for line in lines) > 0
    part = run.parts(paced=True)[0]
    assert {pace.reports for pace in part.paces.values()} == {steps} and len(part.paces) == ranks
    assert part.tokens == run.progress().tokens == 8 * ranks * (steps - 1)
    means = [part.paces[rank].mean_t - part.paces[0].mean_t for rank in (0, 100, 199)]
    assert means == pytest.approx([0.0, 0.1, 0.199], abs=1e-4)


def _steps(rank, steps, slow=range(0), node=0):
    """Steps of one second each, half as long again in `slow`."""
    return [Metric(node, rank, 1000.0 + step, step=step, seconds=1.5 if step in slow else 1.0) for step in steps]


def test_step_times_of_all_ranks_are_added_up_by_spans_that_widen():
    """A rank that was slow for a while, and is not any more, is found in what snapshots of several nodes hold."""
    nodes = []
    for node in (0, 1):
        part = Progress()
        reports = [
            _steps(2 * node + each, range(1000), range(300, 600) if node and each else (), node) for each in (0, 1)
        ]
        for together in zip(*reports):
            for metric in together:
                part.add(metric)
        nodes.append(Progress.restored(json.loads(json.dumps(part.snapshot()))).times)
    width, spans = step_times(nodes)
    assert width == 16 and len(spans) == 63 and {span.ranks for span in spans} == {4}
    assert {(span.least, span.median) for span in spans} == {(1.0, 1.0)}
    slow = [span for span in spans if stands_out(span)]
    assert {span.slowest for span in slow} == {3} and {span.most for span in slow[1:-1]} == {1.5}
    assert (slow[0].number * width, slow[-1].number * width) == (288, 592)
    assert len(json.dumps(part.snapshot())) < 5000
    assert StepTimes.restored([1, [["x"] * 6]]).spans() == StepTimes.restored(None).spans() == []


def test_few_steps_are_kept_one_by_one_and_late_ones_are_left_out():
    times = StepTimes()
    for step in range(5):
        for rank in range(3):
            times.add(rank, step, 2.0 if (rank, step) == (2, 3) else 1.0)
    times.add(1, 0, 99.0)
    assert [span[:5] for span in times.spans()] == [(step, 1.0, 1.0, 2.0 if step == 3 else 1.0, 2) for step in range(5)]


def rated(n, rate, t, rank=0, kind="step", unit="samples/s", node=0):
    return Metric(node, rank, t, kind, step=n, rate=rate, unit=unit, printed=True)


def test_a_printed_speed_is_the_mean_over_the_steps_that_its_values_stand_for(tmp_path):
    values = [50.0, *[1000.0] * 8, 400.0]  # warm-up first; the last one is no more than one of ten
    told = [rated(10 * n, value, 100.0 + n) for n, value in enumerate(values, 1)]
    mean = 9 / (8 / 1000 + 1 / 400)
    assert added(*told).rate() == (pytest.approx(mean), "samples/s")
    halves = Progress.restored(added(*told[:5]).snapshot())
    for each in told[5:]:
        halves.add(each)
    assert halves.rate() == (pytest.approx(mean), "samples/s"), "an agent's sum goes on where it was"
    uneven = added(rated(10, 9.0, 1.0), rated(20, 100.0, 1.0), rated(110, 300.0, 1.0))
    assert uneven.rate()[0] == pytest.approx(100 / (10 / 100 + 90 / 300)), "read at one time, the steps weigh them"
    assert added(told[0]).rate()[0] == 50.0, "the only one so far"
    assert added(*told, rated(100, 3.0, 120.0, rank=1)).rate()[0] == pytest.approx(mean), "of the lowest rank"
    assert added(*told, rated(None, 750.0, 121.0, kind="summary")).rate()[0] == 750.0, "the program's own total"
    for broken in ({"steps": -1.0, "step": -7}, {"step": 10**400}):
        restored = Progress.restored({**added(*told).snapshot(), "stated": broken})
        restored.add(rated(11, 5.0, 1.0))
    other = merged([(added(step(1, 2.0)), 0.0), (added(*told), 0.0)])
    assert other.rate()[0] == pytest.approx(mean), "rates that only a later node prints, as Megatron's"


def test_run_report_and_a_log_agree_about_a_printed_speed(tmp_path):
    values = [500.0, 1000.0, 2000.0, 1000.0, 250.0]
    run = make_run(tmp_path / "r")
    records = [
        {"t": 100.0 + n, "rank": 0, "kind": "step", "step": n, "rate": value, "unit": "samples/s", "printed": True}
        for n, value in enumerate(values, 1)
    ]
    metrics(run, *records)
    log = tmp_path / "printed.out"
    log.write_text("".join(f"step {n} loss 1.5 {value} samples/s\n" for n, value in enumerate(values, 1)))
    mean = 4 / (2 / 1000 + 1 / 2000 + 1 / 250)
    assert run.progress().rate() == (pytest.approx(mean), "samples/s")
    for figures in (figures_of(run), figures_of_log(str(log))):
        assert figures.speed.value == pytest.approx(mean), figures.source
        assert figures.speed.how == "mean of what the program prints"
