"""Losses that jump or are no numbers: said, stopped at, or gone back from, leaving out the samples that led there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, List, Tuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drumbeat import train
from drumbeat.train import schedules
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


def trained(wrong: float, **said: Any) -> Tuple[Result, train.Trainer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    settings = Settings(steps=STEPS, batch=BATCH, report_every=1, watch_communication=0, **said)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    trainer = train.setup(model, optimizer, scheduler=schedules.cosine(STEPS, 5))
    stream = trainer.stream(Noisy(wrong), BATCH)
    mean = lambda model, batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1])  # noqa: E731
    return run(settings, trainer, stream, mean, unit="samples"), trainer


@pytest.mark.parametrize(("wrong", "setting"), [(1e4, "on_spike"), (float("nan"), "on_nan")])
def test_going_back_leaves_out_the_batch_and_is_reproducible(tmp_path: Path, wrong: float, setting: str) -> None:
    runs = []
    for name in ("once", "again"):
        folder = tmp_path / name
        result, trainer = trained(wrong, checkpoint=str(folder), save_every=4, **{setting: "back"})
        (note,) = [json.loads(line) for line in (folder / "skipped.jsonl").read_text().splitlines()]
        first, last = note["samples"]
        assert note["back_to"] % 4 == 0 and note["step"] - note["back_to"] == (last + 1 - first) // BATCH >= 1
        assert len(result.losses) == STEPS + note["step"] - note["back_to"] and trainer.steps == STEPS
        assert result.losses[-1] < 3 and trainer.skipped == 0
        runs.append((result.losses[-1], note, [p.tolist() for p in trainer.model.parameters()]))
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


def test_going_back_needs_checkpoints() -> None:
    with pytest.raises(Refusal, match="on_spike=back without checkpoints; give checkpoint=FOLDER and save_every"):
        trained(0.0, on_spike="back")
