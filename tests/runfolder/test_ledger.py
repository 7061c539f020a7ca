"""Where a run's time went: the parts add up to the wall time, whatever happened."""

import random

import pytest

from drumbeat.findings.model import LIKELY, WARNING, Finding
from drumbeat.runfolder.events import (
    AttemptEnded,
    AttemptStarted,
    FindingMade,
    FirstStep,
    Resumed,
    RunEnded,
    RunStarted,
)
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.records import Metric
from drumbeat.runfolder.state import PARTS, ledger, training_share


def at(kind, t, attempt=0, **fields):
    return kind(kind.__name__, t, t, 0, "n0", 0, attempt, **fields)


def run_started(t, **more):
    return at(RunStarted, t, run_id="r", nodes=1, ranks_per_node=1, launcher="ranks", launcher_why="", **more)


def started(t, attempt=0):
    return at(AttemptStarted, t, attempt, world_size=1, master_addr="h", master_port=1)


def ended(t, attempt=0, outcome="finished", **progress):
    return at(AttemptEnded, t, attempt, outcome=outcome, exit_code=0, progress=Progress(**progress))


def seconds(parts):
    return {name: value for name, value in parts.items() if value}


def test_one_attempt():
    steps = {"first_t": 112.0, "last_t": 152.0, "first_step": 1, "step": 41, "spent": {"validation": 4.0, "step": 36.0}}
    over = at(RunEnded, 155.5, outcome="finished", exit_code=0)
    parts = ledger(100.0, 156.0, [run_started(101.0), started(102.0), ended(155.0, **steps), over])
    assert seconds(parts) == {
        "start": 2.0, "first step": 10.0, "training": 36.0, "validation": 4.0, "unknown": 3.0, "idle": 1.0,
    }  # fmt: skip
    assert list(parts) == list(PARTS) and sum(parts.values()) == 56.0
    assert training_share(parts) == round(36 / 56, 4)


def test_the_pause_between_two_stages_of_a_script():
    steps = {"first_t": 112.0, "last_t": 152.0, "first_step": 1, "step": 41, "spent": {"between stages": 25.0}}
    parts = ledger(100.0, 156.0, [run_started(101.0), started(102.0), ended(156.0, **steps)])
    assert seconds(parts) == {
        "start": 2.0,
        "first step": 10.0,
        "training": 15.0,
        "between stages": 25.0,
        "unknown": 4.0,
    }


def test_a_program_without_steps_is_unknown_and_has_no_share():
    parts = ledger(100.0, 130.0, [run_started(101.0), started(102.0), ended(130.0)])
    assert seconds(parts) == {"start": 2.0, "unknown": 28.0} and training_share(parts) is None


def test_steps_that_are_repeated_after_a_failure_are_lost():
    first = ended(62.0, 0, "failed", first_t=11.0, last_t=61.0, first_step=1, step=51)  # one step per second
    second = ended(112.0, 1, "finished", first_t=72.0, last_t=112.0, first_step=42, step=82)  # went on from step 41
    parts = ledger(0.0, 112.0, [run_started(0.5), started(1.0), first, started(64.0, 1), second])
    assert seconds(parts) == {"start": 1.0, "first step": 10.0, "training": 80.0, "lost": 10.0, "restart": 11.0}, (
        "the ranks ended a second after the last step"
    )


def test_without_a_checkpoint_all_of_the_first_attempt_is_lost():
    first = ended(61.0, 0, "failed", first_t=11.0, last_t=61.0, first_step=1, step=51)
    second = ended(112.0, 1, "finished", first_t=72.0, last_t=112.0, first_step=1, step=41)
    parts = ledger(0.0, 112.0, [run_started(1.0), started(1.0), first, started(62.0, 1), second])
    assert parts["lost"] == 50.0 and parts["training"] == 40.0
    parts = ledger(0.0, 112.0, [run_started(1.0), started(1.0), first, started(62.0, 1), ended(112.0, 1)])
    assert not parts["lost"] and parts["training"] == 50.0, "killed after the last step: nothing was repeated"


def test_time_in_the_queue_is_no_part_of_the_share():
    steps = {"first_t": 3610.0, "last_t": 3690.0, "first_step": 1, "step": 81}
    parts = ledger(0.0, 3700.0, [run_started(3600.0), started(3605.0), ended(3700.0, **steps)], queued=True)
    assert parts["queue"] == 3600.0 and training_share(parts) == 0.8
    known = run_started(3600.0, job_began=3500.0)  # the scheduler says when: pulling an image is no queue
    parts = ledger(0.0, 3700.0, [known, started(3605.0), ended(3700.0, **steps)], queued=True)
    assert parts["queue"] == 3500.0 and parts["start"] == 105.0
    again = [run_started(3600.0), started(3605.0), ended(3700.0, 0, "requeue", **steps), run_started(5000.0)]
    later = {"first_t": 5020.0, "last_t": 5100.0, "first_step": 82, "step": 162}
    parts = ledger(0.0, 5100.0, [*again, started(5010.0, 1), ended(5100.0, 1, **later)], queued=True)
    assert parts["queue"] == 3600.0 + 1300.0 and parts["restart"] == 30.0 and parts["training"] == 160.0


def test_a_run_that_goes_on_or_whose_lead_was_killed():
    steps = Progress(first_t=10.0, last_t=40.0, first_step=1, step=31)
    events = [run_started(1.0), started(2.0), at(FirstStep, 10.0, seconds=10.0)]
    parts = ledger(0.0, 42.0, events, current=steps)
    assert seconds(parts) == {"start": 2.0, "first step": 8.0, "training": 30.0, "unknown": 2.0}
    assert seconds(ledger(0.0, 42.0, [], queued=True)) == {"queue": 42.0}


def test_any_events_in_any_order_add_up_to_the_wall_time():
    dice = random.Random(4)
    for _ in range(2000):
        kinds = [run_started, started, lambda t: ended(t, first_t=dice.uniform(-9, 99), last_t=dice.uniform(-9, 99))]
        events = [dice.choice(kinds)(dice.uniform(-20, 120)) for _ in range(dice.randrange(8))]
        spent = {"validation": dice.uniform(-5, 90), "checkpoint": dice.uniform(0, 90)}
        current = Progress(first_t=dice.uniform(0, 99), last_t=dice.uniform(0, 99), spent=spent)
        parts = ledger(0.0, 100.0, events, dice.random() < 0.5, current)
        assert abs(sum(parts.values()) - 100.0) < 0.01 and min(parts.values()) >= 0, (parts, events)


def test_hangs_have_their_own_part():
    finding = Finding("hang-asleep", WARNING, "rank 1 is asleep", "it sleeps", "look at that line", confidence=LIKELY)
    hang, over = at(FindingMade, 40.0, finding=finding), at(Resumed, 52.0, seconds=20.0)
    steps = {"first_t": 12.0, "last_t": 72.0, "first_step": 1, "step": 41}
    parts = ledger(0.0, 100.0, [run_started(1.0), started(2.0), hang, over, ended(100.0, outcome="cancelled", **steps)])
    assert seconds(parts) == {"start": 2.0, "first step": 10.0, "training": 60.0, "unknown": 28.0}, (
        "no hang: it went on"
    )
    again = at(FindingMade, 80.0, finding=finding)
    events = [run_started(1.0), started(2.0), hang, over, again, ended(100.0, outcome="cancelled", **steps)]
    assert ledger(0.0, 100.0, events)["hang"] == 28.0


def test_a_pause_has_one_figure_whether_or_not_it_was_called_a_hang():
    finding = Finding("hang-asleep", WARNING, "rank 1 is asleep", "it sleeps", "look at that line", confidence=LIKELY)
    steps = Progress()
    for step in range(1, 25):
        steps.add(Metric(0, 0, 10.0 + 0.5 * step + (60.0 if step > 9 else 0.0), "step", step=step, steps=40))
    assert steps.rate() == (pytest.approx(2.0), "steps/s") and steps.step_seconds == pytest.approx(0.5)
    assert steps.seconds_left() == pytest.approx(8.0) and steps.paused() == pytest.approx(60.0)
    begun = [run_started(1.0), started(2.0)]
    warned = [at(FindingMade, 50.0, finding=finding), at(Resumed, 75.2, seconds=60.0)]
    for events in (begun, [*begun, *warned]):
        parts = ledger(0.0, 82.0, events, current=steps)
        assert (parts["paused"], parts["training"], parts["hang"]) == (60.0, 11.5, 0.0)
    assert Progress.restored(steps.snapshot()).pauses == steps.pauses == ((15.0, 75.0),)


def test_what_a_program_reports_or_does_often_is_no_pause():
    for kind, told in (("checkpoint", {"seconds": 60.0}), ("validation", {})):
        steps = Progress()
        for step in range(1, 25):
            steps.add(Metric(0, 0, 10.0 + 0.5 * step + (60.0 if step > 9 else 0.0), "step", step=step))
            if step == 9:
                steps.add(Metric(0, 0, 20.0, kind, **told))
        assert not steps.pauses
    often = Progress()
    for step in range(1, 60):
        often.add(Metric(0, 0, 10.0 + 0.5 * step + 30.0 * (step // 10), "step", step=step))
        assert bool(often.paused()) == (10 <= step < 30), "the third shows that it is the program's way"
    assert often.rate() == (pytest.approx(58 / (29.0 + 150.0)), "steps/s") and not often.paused()
