"""Snapshots in memory that another process holds: the newest that is whole is loaded, bit by bit; damaged ones are not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Iterator, List, Tuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drumbeat import train
from drumbeat.train.checkpoint import snapshots
from drumbeat.train.loop import train as run
from drumbeat.train.settings import Settings


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[List[int]]:
    """What an agent holds for one rank."""
    files = [os.memfd_create("test") for _ in range(4)]
    monkeypatch.setenv(snapshots.VARIABLE, f"{os.getpid()}:{','.join(map(str, files))}")
    yield files
    for file in files:
        os.close(file)


def set_up() -> Tuple[train.Trainer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.2), nn.BatchNorm1d(32), nn.Linear(32, 1))
    trainer = train.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    points = torch.randn(400, 4, generator=torch.Generator().manual_seed(1))
    batches = trainer.batches(torch.utils.data.TensorDataset(points, points.sum(1, keepdim=True)), 9, batch_size=8)
    return trainer, batches


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def steps(trainer: train.Trainer, batches: Any, count: int, folder: str = "", every: int = 2) -> List[float]:
    losses, source = [], iter(batches)
    for _ in range(count):
        losses.append(float(trainer.step(next(source), loss).loss))
        if folder and trainer.steps % every == 0:
            trainer.snapshot(folder)
    return losses


@pytest.mark.parametrize(("damaged", "first"), [((), 8), ((8,), 6), ((8, 6), 0)])
def test_the_newest_whole_one_goes_on_bit_by_bit(
    memory: List[int], tmp_path: Path, damaged: Tuple[int, ...], first: int, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path)
    trainer, batches = set_up()
    want = steps(trainer, batches, 9, folder)
    trainer.close()
    for step in damaged:
        (file,) = [each for each in memory if f'"step": {step},'.encode() in os.pread(each, 4096, 0)]
        os.pwrite(file, bytes([os.pread(file, 1, 5000)[0] ^ 1]), 5000)
    again, batches = set_up()
    assert again.load(folder) == first and ("from memory" in again.loaded_from) == bool(first)
    assert ("the snapshot of step 8 is DAMAGED" in capfd.readouterr().out) == (damaged == (8,))
    assert steps(again, batches, 9 - first) == want[first:]


def test_storage_counts_if_it_is_newer_and_a_save_is_a_snapshot_too(memory: List[int], tmp_path: Path) -> None:
    folder = str(tmp_path)
    trainer, batches = set_up()
    want = steps(trainer, batches, 4, folder)
    trainer.save(folder)
    want += steps(trainer, batches, 1)
    trainer.close()
    again, batches = set_up()
    assert again.load(folder) == 4 and "from memory" in again.loaded_from
    other, _ = set_up()
    assert other.load(str(tmp_path / "other")) == 0, "the next training of the same command"
    again, batches = set_up()
    assert again.load(folder) == 4 and not again.loaded_from
    assert steps(again, batches, 1) == want[4:]


def test_training_goes_back_to_the_newest_snapshot(
    memory: List[int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer, _ = set_up()
    points = torch.randn(400, 4, generator=torch.Generator().manual_seed(1))

    class Points:
        def __len__(self) -> int:
            return len(points)

        def read(self, indices: List[int], epochs: List[int]) -> Tuple[Tensor, Tensor]:
            return points[indices], points[indices].sum(1, keepdim=True)

    def spoiled(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch) * (float("nan") if trainer.steps == 17 and not trainer.loaded_from else 1.0)

    settings = Settings(checkpoint=str(tmp_path), save_every=10, snapshot_every=3, steps=20, batch=8, on_nan="back")
    assert run(settings, trainer, trainer.stream(Points(), 8), spoiled, unit="samples").step == 20
    assert "not finite at or before step 18; 1 step left out" in (output := capfd.readouterr().out)
    assert "back to step 15, from memory, " in output and trainer.skipped == 0


def test_too_little_memory_is_refused_with_the_arithmetic(
    memory: List[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "free_bytes", lambda: 1024)
    trainer, batches = set_up()
    words = (
        r"need 0\.0 GiB of memory per node \(2 slots; .* per rank\), and .* can be used: 90% of the .* that are free"
    )
    with pytest.raises(train.Refusal, match=words):
        steps(trainer, batches, 2, str(tmp_path))


def test_where_no_agent_holds_memory(tmp_path: Path) -> None:
    trainer, batches = set_up()
    with pytest.raises(train.Refusal, match="start the ranks with drumbeat run"):
        steps(trainer, batches, 2, str(tmp_path))
    with pytest.raises(train.Refusal, match="snapshot_every without checkpoints"):
        run(Settings(snapshot_every=1), trainer, batches, loss)
