"""Losses that jump or are no numbers: said, stopped at, or gone back from, leaving out the samples that led there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, List, Optional, Tuple

import pytest
import torch
import torch.nn.functional as F
from gloo_world import GlooWorld
from torch import Tensor, nn

from drumbeat import train
from drumbeat.train import optim
from drumbeat.train.loop import Result
from drumbeat.train.loop import train as run
from drumbeat.train.refusal import NotFinite, Refusal, Stopped
from drumbeat.train.settings import Settings

BAD = 1200  # the sample that spoils its batch
STEPS, BATCH = 100, 32


class Noisy:
    """Lines with a known slope; one sample is wrong."""

    def __init__(self, wrong: float) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(STEPS * BATCH, 4, generator=generator)
        self.y = self.x.sum(1) + torch.randn(len(self.x), generator=generator)
        self.y[BAD] = wrong

    def __len__(self) -> int:
        return len(self.x)

    def read(self, indices: List[int], epochs: List[int]) -> Tuple[Tensor, Tensor]:
        return self.x[indices], self.y[indices]


def trained(
    wrong: float, spoiled: Optional[Callable[[int], float]] = None, **said: Any
) -> Tuple[Result, train.Trainer]:
    """`spoiled(step)`: what a step's loss is multiplied by, whatever its data."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    settings = Settings(**{"steps": STEPS, "batch": BATCH, "report_every": 1, "watch_communication": 0, **said})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    trainer = train.setup(model, optimizer, scheduler=optim.cosine(STEPS, 5))
    stream = trainer.stream(Noisy(wrong), BATCH)

    def mean(model: nn.Module, batch: Any) -> Tensor:
        value = F.mse_loss(model(batch[0]).squeeze(1), batch[1])
        return value * spoiled(trainer.steps) if spoiled is not None else value

    return run(settings, trainer, stream, mean, unit="samples"), trainer


def weights(trainer: train.Trainer) -> List[Any]:
    return [p.tolist() for p in trainer.model.parameters()]


@pytest.mark.parametrize(("wrong", "setting"), [(1e4, "on_spike"), (float("nan"), "on_nan")])
def test_going_back_leaves_out_the_batch_and_is_reproducible(tmp_path: Path, wrong: float, setting: str) -> None:
    runs = []
    for name in ("once", "again"):
        folder = tmp_path / name
        result, trainer = trained(wrong, checkpoint=str(folder), save_every=10, **{setting: "back"})
        (note,) = [json.loads(line) for line in (folder / "skipped.jsonl").read_text().splitlines()]
        first, last = note["samples"]
        assert note["back_to"] % 10 == 0 and note["step"] - note["back_to"] == (last + 1 - first) // BATCH >= 1
        assert len(result.losses) == STEPS + note["step"] - note["back_to"] and trainer.steps == STEPS
        assert result.losses[-1] < 3 and trainer.skipped == 0
        runs.append((result.losses[-1], note, weights(trainer)))
    assert runs[0] == runs[1]


def test_a_spike_is_said_or_stopped_at(capfd: pytest.CaptureFixture[str]) -> None:
    trained(1e4)
    assert capfd.readouterr().out.count("a spike: the loss of step") == 1
    with pytest.raises(Stopped, match=r"the loss of step \d+ is [\d.]+, and was \d"):
        trained(1e4, on_spike="stop")
    with pytest.raises(NotFinite, match=r"not finite at or before step \d+; 1 step left out"):
        trained(float("nan"))


def test_nothing_is_said_of_a_run_without_one(capfd: pytest.CaptureFixture[str]) -> None:
    trained(0.0)
    assert "spike" not in capfd.readouterr().out


def test_a_folder_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refusal, match="file cannot be written: File exists; make room, or name another folder"):
        trained(0.0, checkpoint=str(tmp_path / "file"))


def test_going_back_needs_checkpoints() -> None:
    with pytest.raises(Refusal, match="on_spike=back without checkpoints; give checkpoint=FOLDER and save_every"):
        trained(0.0, on_spike="back")


def test_a_checkpoint_never_holds_trouble_however_rare_reports_are(tmp_path: Path) -> None:
    result, trainer = trained(float("nan"), checkpoint=str(tmp_path), save_every=4, report_every=50, on_nan="back")
    (note,) = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    assert 0 < note["step"] - note["back_to"] <= 4 and trainer.skipped == 0
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000096", "step-00000100"]


@pytest.mark.parametrize("bad", [1e4, float("nan")])
def test_trouble_that_stays_ends_the_run(tmp_path: Path, bad: float) -> None:
    """The reports between the checkpoint and the trouble are fine each time."""
    with pytest.raises(Stopped, match=r"step 31.*; going back does not help: tried 5 times from step 20"):
        trained(
            0.0,
            lambda step: bad if step == 30 else 1.0,
            checkpoint=str(tmp_path),
            save_every=20,
            on_nan="back",
            on_spike="back",
        )
    assert len((tmp_path / "skipped.jsonl").read_text().splitlines()) == 5


def test_trouble_before_the_first_save_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(NotFinite, match="going back does not help: nothing is saved yet"):
        trained(
            0.0, lambda step: float("nan") if step == 2 else 1.0, checkpoint=str(tmp_path), save_every=20, on_nan="back"
        )


@pytest.mark.parametrize(("wrong", "every", "late"), [(1e4, 1, 0), (float("nan"), 4, 1)])
def test_a_run_stopped_beside_trouble_equals_one_that_was_not(
    tmp_path: Path, wrong: float, every: int, late: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Just before a spike; and after a NaN that no report has seen yet."""
    both = {"save_every": 10, "report_every": every, "on_spike": "back", "on_nan": "back"}
    _, want = trained(wrong, checkpoint=str(tmp_path / "whole"), **both)
    note = json.loads((tmp_path / "whole" / "skipped.jsonl").read_text().splitlines()[0])
    parts = {"checkpoint": str(tmp_path / "parts"), **both}
    at = note["step"] - 1 if late else note["back_to"]
    assert trained(wrong, stop_after=at, **parts)[0].stopped
    assert ("; not saved, so that a resumed run goes back" in capfd.readouterr().out) == bool(late)
    _, trainer = trained(wrong, **parts)
    assert (tmp_path / "parts" / "skipped.jsonl").read_text() == (tmp_path / "whole" / "skipped.jsonl").read_text()
    assert weights(trainer) == weights(want)


def test_steps_that_were_left_out_before_a_resume_stop_nothing(tmp_path: Path) -> None:
    result, trainer = trained(float("nan"), checkpoint=str(tmp_path), save_every=50, steps=90, on_nan="skip")
    assert trainer.skipped == 1
    assert trained(float("nan"), checkpoint=str(tmp_path), on_nan="stop")[0].step == STEPS


def test_a_loss_that_stays_high_becomes_usual(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    worse = lambda step: 1.0 if step < 40 else float("nan") if step == 99 else 50.0  # noqa: E731
    with pytest.raises(NotFinite, match="tried 5 times from step 98"):
        trained(0.0, worse, checkpoint=str(tmp_path), save_every=7, on_nan="back")
    assert 1 <= capfd.readouterr().out.count("a spike: ") <= 50


def gone_back(folder: str) -> Tuple[List[Any], int]:
    _, trainer = trained(1e4, checkpoint=folder, save_every=4, on_spike="back")
    return weights(trainer), trainer.steps


def test_all_ranks_go_back_together(world: GlooWorld, tmp_path: Path) -> None:
    first, second = world.run(gone_back, str(tmp_path), size=2)
    assert first == second and first[1] == STEPS
    assert len((tmp_path / "skipped.jsonl").read_text().splitlines()) == 1


def own_loop(bad: Callable[[int], bool], folder: Path, **said: Any) -> train.Trainer:
    """A loop of one's own, as the docs have it; the losses of `bad` steps are no numbers."""
    model = nn.Linear(4, 1)
    trainer = train.setup(model, torch.optim.SGD(model.parameters(), lr=0.01), **said)
    trainer.load(str(folder))
    for batch in trainer.batches([torch.ones(2, 4)] * 10):
        wrong = float("nan") if bad(trainer.steps + 1) else 1.0
        result = trainer.step(batch, lambda model, x, wrong=wrong: model(x).mean() * wrong)
        trainer.report(result, every=5)
        if result.step == 5:
            trainer.save(str(folder), wait=True)
    return trainer


def test_an_own_loop_says_which_steps_it_leaves_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = own_loop(lambda step: step in (7, 8), tmp_path)
    said = capfd.readouterr().out
    assert said.count("not finite") == 1 and "at or before step 10; 2 steps left out of the weights" in said
    assert trainer.skipped == 2 and "resumed" not in said
    own_loop(lambda step: False, tmp_path)
    said = capfd.readouterr().out
    assert f"resumed: step 5 from {tmp_path}" in said and "left out" not in said


def test_an_own_loop_stops_where_it_is_told_to(tmp_path: Path) -> None:
    with pytest.raises(NotFinite, match="at or before step 10"):
        own_loop(lambda step: step > 6, tmp_path, on_nan="stop")
    for said, words in (({"on_nan": "back"}, "skip"), ({"on_spike": "hope"}, "warn")):
        with pytest.raises(Refusal, match=f"known: .*{words}"):
            own_loop(lambda step: False, tmp_path / "none", **said)


def test_a_second_start_says_what_has_changed_and_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    trained(0.0, checkpoint=str(tmp_path), save_every=50)
    assert "changed" not in capfd.readouterr().out
    monkeypatch.setattr(f"{__name__}.STEPS", 90)
    trained(0.0, checkpoint=str(tmp_path))
    said = capfd.readouterr().out
    assert "\nchanged since it was saved: samples=2880 (was 3200)\n" in said
    assert "\nnothing left to train: 100 of 90 steps are made\n" in said
