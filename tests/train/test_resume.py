"""Stopping and going on changes nothing: not the losses, not the samples, not on another number of ranks."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any, List

import pytest
from gloo_world import GlooWorld
from tests.conftest import wait_for

STEPS = 5


def train(folder: str, layout: str, *more: str) -> List[float]:
    from drumbeat.train.models import llama
    from drumbeat.train.recipes.llama import LlamaSettings, run
    from drumbeat.train.settings import fill

    llama.SHAPES["test"] = llama.LlamaShape(32, 2, 4, 2, 64, 256, 32)
    texts = ["model=test", f"layout={layout}", f"steps={STEPS}", "batch=8", "report_every=1", "lr=1e-2", "validation=0"]
    return run(fill(LlamaSettings, [*texts, f"checkpoint={folder}", *more])).losses


def test_a_resumed_run_equals_an_uninterrupted_one(world: GlooWorld, tmp_path: Path) -> None:
    """Bit by bit on the ranks that saved it; on half as many and another layout but for the order of sums."""
    saved, other = str(tmp_path / "saved"), str(tmp_path / "other")
    whole = world.run(train, "", "fsdp")[0]
    first = world.run(train, saved, "fsdp", "save_every=2", "stop_after=3")[0]
    shutil.copytree(saved, other)
    second = world.run(train, saved, "fsdp")[0]
    assert (len(first), len(second)) == (3, 2)
    assert first + second == whole
    assert first + world.run(train, other, "tp", size=2)[0] == pytest.approx(whole, rel=2e-4)


def exact(folder: str) -> Any:
    """A stage of a pipeline and its optimizer, saved and restored under another cut."""
    from drumbeat.train.recipes import llama
    from drumbeat.train.settings import fill
    from drumbeat.train.verify_resume import verify_resume

    texts = ["steps=4", "layout=pp", "accumulate=4", "schedule=interleaved", "batch=8", "validation=0", "model=test"]
    from drumbeat.train.models import llama as model

    model.SHAPES["test"] = model.LlamaShape(32, 4, 4, 2, 64, 256, 32)
    return verify_resume(llama, fill(llama.LlamaSettings, [*texts, f"checkpoint={folder}"]))


def test_verify_resume_says_so_for_a_pipeline(world: GlooWorld, tmp_path: Path) -> None:
    assert world.run(exact, str(tmp_path), size=2) == [True, True]
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"


def save(folder: str, slow: bool, stop: int) -> int:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    from drumbeat.cli import main

    finish = FileSystemWriter.finish

    def slowly(self: Any, *args: Any, **more: Any) -> Any:
        print("saving", flush=True)
        if slow:
            time.sleep(600)
        return finish(self, *args, **more)

    FileSystemWriter.finish = slowly  # type: ignore[method-assign]
    texts = ["steps=8", "save_every=4", "batch=2", "validation=0", "report_every=1"]
    return main(["train", "llama", "--set", *texts, f"checkpoint={folder}", f"stop_after={stop}"])


def test_kill_9_during_a_save_loses_only_that_save(world: GlooWorld, tmp_path: Path) -> None:
    from drumbeat.train.checkpoint.folder import committed

    output, folder = tmp_path / "output", tmp_path / "checkpoints"
    done = world.start(output, save, str(folder), False, 5)
    done.join(300)
    assert done.exitcode == 75, "stopped and saved: requeue me"
    assert committed(str(folder)) == [4, 5]
    killed = world.start(output, save, str(folder), True, 7)
    wait_for(lambda: output.exists() and "saving" in output.read_text(), what="the save")
    killed.kill()
    killed.join()
    assert (folder / "step-00000007").is_dir(), "the save had begun"
    assert committed(str(folder)) == [4, 5]
    assert (folder / "latest").read_text() == "step-00000005"
    again = world.start(output, save, str(folder), False, 0)
    again.join(300)
    assert again.exitcode == 0
    assert "resumed: step 5 from " in output.read_text()
    assert committed(str(folder)) == [5, 8]


def train_until_interrupted(folder: str) -> int:
    from drumbeat.cli import main

    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the caller ignores
    settings = ["steps=100000", "batch=2", "validation=0", "report_every=1", f"checkpoint={folder}"]
    return main(["train", "llama", "--set", *settings])


def test_ctrl_c_without_a_launcher_saves_and_asks_to_be_requeued(world: GlooWorld, tmp_path: Path) -> None:
    from drumbeat.train.checkpoint.folder import committed

    output, folder = tmp_path / "output", tmp_path / "checkpoints"
    process = world.start(output, train_until_interrupted, str(folder))
    wait_for(lambda: output.exists() and "step 2/" in output.read_text(), what="two steps")
    os.kill(process.pid or 0, signal.SIGINT)
    process.join(300)
    assert process.exitcode == 75
    assert "stopped by a signal" in output.read_text()
    assert committed(str(folder))


def told_by(number: int, folder: str) -> Any:
    """Train; after the second step this process is sent a signal."""
    from drumbeat.train.recipes.llama import LlamaSettings, run
    from drumbeat.train.settings import fill
    from drumbeat.train.step import Step

    update, steps = Step._update, 0

    def signalled(self: Step, norm: Any) -> None:
        nonlocal steps
        steps += 1
        update(self, norm)
        if steps == 2:
            os.kill(os.getpid(), number)

    texts = ["steps=6", "batch=2", "validation=8", "validate_every=2", "report_every=1", f"checkpoint={folder}"]
    before = {each: signal.signal(each, signal.SIG_DFL) for each in (signal.SIGINT, signal.SIGHUP)}  # nohup, `&`
    Step._update = signalled  # type: ignore[method-assign]
    try:
        result = run(fill(LlamaSettings, texts))
    finally:
        Step._update = update  # type: ignore[method-assign]
        for each, handler in before.items():
            signal.signal(each, handler)
    return result.step, result.exit_code, len(result.validation)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"])
def test_every_stop_signal_saves_and_does_not_validate_first(world: GlooWorld, tmp_path: Path, name: str) -> None:
    from drumbeat.train.checkpoint.folder import committed

    number = int(getattr(signal, name))
    assert world.run(told_by, number, str(tmp_path), size=1) == [(2, 75, 0)]
    assert committed(str(tmp_path))[-1] == 2
    assert world.run(told_by, number, "", size=1) == [(2, 128 + number, 0)], "nothing saved: not a requeue"


def test_a_second_ctrl_c_ends_at_once_but_an_echo_of_the_first_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from drumbeat.train import world as stopping

    monkeypatch.setattr(stopping, "SIGNALS", ())  # this process's own handlers stay
    sent: List[int] = []
    now = [100.0]
    monkeypatch.setattr(stopping.os, "kill", lambda _pid, number: sent.append(number))
    monkeypatch.setattr(stopping.signal, "signal", lambda *_: None)
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    stop = stopping.StopTogether()
    for at in (100.0, 100.1, 100.9):
        now[0] = at
        stop._on_signal(signal.SIGINT, None)
        stop._on_signal(signal.SIGTERM, None)
    assert sent == [] and stop.agreed()
    now[0] = 103.0
    stop._on_signal(signal.SIGINT, None)
    assert sent == [signal.SIGINT]
