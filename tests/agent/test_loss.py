"""A loss that is not a number, or that leaves its course, is told once; a bad batch is not."""

import pytest

from drumbeat.agent.watchers.contract import Saw, Stop, Warn
from drumbeat.agent.watchers.loss import Loss


def fed(losses, level="warn", **more):
    watcher, actions = Loss(level, 0, "h"), []
    for step, loss in enumerate(losses, 1):
        record = {"t": 1.0, "rank": 0, "kind": "step", "step": step, "loss": loss, "grad_norm": 0.5, "lr": 1e-3, **more}
        actions += watcher.on(Saw("metric", record), float(step))
    return actions


COURSE = [3.0 - 0.01 * step + (0.05 if step % 3 else -0.05) for step in range(60)]


def test_a_loss_that_is_no_number():
    (action,) = fed([*COURSE, "nan", "nan", "nan", "nan"])
    assert isinstance(action, Warn) and action.finding.code == "nan-loss"
    assert "since step 61" in action.finding.title and action.finding.severity == "warning"
    assert [each.text for each in action.finding.evidence[:2]] == ["loss nan at step 61", "loss nan at step 62"]
    (action,) = fed([2.0, "nan", "inf", "nan"], "stop")
    assert isinstance(action, Stop) and action.finding.severity == "error"


def test_a_loss_that_leaves_its_course_and_stays_there():
    (action,) = fed([*COURSE, 9.0, 9.5, 9.1, 9.2])
    finding = action.finding
    assert finding.code == "loss-spike" and "9.1 since step 61" in finding.title and finding.rank == 0
    assert any("gradient norm 0.5, before 0.5" in each.text for each in finding.evidence)


@pytest.mark.parametrize(
    "losses",
    [
        COURSE,
        [*COURSE, 9.0, 2.5, 2.4, 2.5],  # one bad batch
        [*COURSE[:10], 50.0, 51.0, 52.0],  # its course is not known yet
        [*COURSE, "inf", 2.4, "inf", 2.4],  # steps that the scaler skips
        [0.0] * 40,
        [1.0 + (step % 7) for step in range(200)],  # noisy
        [10.0 * 0.97**step for step in range(200)],
    ],
)
def test_what_is_left_alone(losses):
    assert fed(losses) == []


def test_only_the_lowest_rank_and_only_steps_count():
    watcher = Loss("stop", 0, "h")
    for step in range(40):
        for rank, loss in ((0, 2.0), (1, "nan")):
            assert watcher.on(Saw("metric", {"rank": rank, "kind": "step", "step": step, "loss": loss}), 1.0) == []
        assert watcher.on(Saw("metric", {"rank": 0, "kind": "validation", "loss": "nan"}), 1.0) == []
