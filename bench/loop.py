"""What our loop costs beside a hand-written one, and what handing a checkpoint to the background costs. On the CPU.

    PYTHONPATH=src python bench/loop.py

The same model, data and optimizer take turns, step by step, in one process: a busy machine is busy for both. The ratio
is the median over pairs of neighbouring steps.

Saving is measured inside the loop: of the times it is asked to save, it really does so every other time. All time beyond
that of quiet steps, from the call until the save is durable, is what it costs; the times without a save show the noise.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import tempfile
import time
from typing import Any

import torch

from drumbeat.train.checkpoint.checkpoints import Checkpoints
from drumbeat.train.data import Stream
from drumbeat.train.data.text import TokenWindows, byte_text, standard_library
from drumbeat.train.loop import train
from drumbeat.train.models.llama import Llama, LlamaShape
from drumbeat.train.optim import wsd
from drumbeat.train.recipes import TOKENS, build, meshes_for, optimizer_of, resolved, set_up
from drumbeat.train.recipes.llama import LlamaSettings
from drumbeat.train.settings import fill
from drumbeat.train.trainer import Trainer
from drumbeat.train.world import join

SHAPE = LlamaShape(128, 4, 4, 2, 384, 256, 128)
STEPS = 60


def samples() -> TokenWindows:
    return byte_text(standard_library(), SHAPE.context, limit=1_000_000)


class Hand:
    """The loop that one would write without a library, one step at a time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Llama(SHAPE)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        loss = self.model(inputs, targets) / targets.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class TakingTurns(Stream):
    """When our loop asks for its next batch, the hand-written loop first makes a step with the last one."""

    def __init__(self) -> None:
        super().__init__(samples(), 8)
        self.hand, self.hand_s, self.our_s = Hand(), [], []  # type: ignore[var-annotated]
        self._given: Any = None

    def __next__(self) -> Any:
        now = time.perf_counter()
        if self._given is not None:
            self.our_s.append(now - self._given[0])
            self.hand.step(*self._given[1][0])
            self.hand_s.append(time.perf_counter() - now)
        batches = super().__next__()
        self._given = (time.perf_counter(), batches)
        return batches


def both() -> TakingTurns:
    turns = TakingTurns()
    by_us(STEPS, turns)
    return turns


def made(steps: int, *more: str) -> tuple[LlamaSettings, Trainer]:
    settings = fill(LlamaSettings, [f"steps={steps}", "batch=8", "lr=1e-3", *more])
    world = join()
    torch.set_num_threads(1)
    settings = resolved(settings, world, meshes_for(settings, world))
    model = build(settings, world, lambda: Llama(SHAPE))
    rate = wsd(settings.steps, settings.warmup)
    return settings, set_up(settings, model, optimizer_of(settings, model), scheduler=rate, blocks="blocks")


def by_us(steps: int, stream: Stream) -> None:
    settings, trainer = made(steps)
    with contextlib.redirect_stdout(io.StringIO()):
        train(settings, trainer, stream, TOKENS)


class EveryOther(Checkpoints):
    """Really saves every other time it is asked to; the other times are the control."""

    def __init__(self, folder: str, trainer: Trainer) -> None:
        super().__init__(folder, trainer.parts, trainer.optimizer)
        self.asked, self.call_s = 0, []  # type: ignore[var-annotated]
        self.step_s: list[list[float]] = []  # of each time it was asked: the steps until the next time
        self.durable: list[int] = []  # ... and in which of those steps the save became durable

    def save(self, step: int, more: dict[str, Any], wait: bool = False) -> Any:
        self.asked += 1
        self.step_s.append([])
        self.durable.append(0)
        began = time.perf_counter()
        ended = super().save(step, more) if self.asked % 2 else []
        self.call_s.append(time.perf_counter() - began)
        return ended

    def poll(self) -> Any:
        saved = super().poll()
        if saved is not None:
            assert not saved.error, saved.error
            self.durable[-1] = len(self.step_s[-1]) + 1
        return saved


class Watched(Stream):
    """Tells `EveryOther` how long each step took, the save in it included."""

    saves: EveryOther
    began = 0.0

    def __next__(self) -> Any:
        now = time.perf_counter()
        if self.began and self.saves.step_s:
            self.saves.step_s[-1].append(now - self.began)
        self.began = now
        return super().__next__()


def saving(times: int, every: int) -> dict[str, Any]:
    """Each time: the step that saves, the steps until it is durable, and then quiet ones, which say what a step takes."""
    with tempfile.TemporaryDirectory() as folder:
        settings, trainer = made(every * (times + 1), f"save_every={every}", f"checkpoint={folder}")
        stream = Watched(samples(), 8)
        saves = stream.saves = EveryOther(folder, trainer)
        trainer.checkpoints = lambda folder, keep=2: saves  # type: ignore[method-assign]
        with contextlib.redirect_stdout(io.StringIO()):
            train(settings, trainer, stream, TOKENS)
    reach = max(saves.durable[2:]) + 1  # control and save are compared over the same steps
    extra: list[list[float]] = [[], []]
    for i, steps in enumerate(saves.step_s[2:-1], 2):  # the first save walks the state and makes room
        quiet = statistics.median(steps[reach:])
        extra[i % 2].append((saves.call_s[i] + sum(steps[:reach]) - reach * quiet) / quiet)
    usual = statistics.median(s for steps in saves.step_s[2:-1] for s in steps[reach:])
    call = statistics.median(saves.call_s[2:-1:2])
    with_save, without = statistics.median(extra[0]), statistics.median(extra[1])
    return {
        "saves": len(extra[0]),
        "step_ms": usual * 1e3,
        "call_ms": call * 1e3,
        "call_share_of_a_step": call / usual,
        "steps_until_durable": max(saves.durable[2:]),
        "all_extra_time_in_steps": with_save - without,
        "the_same_without_a_save": without,
        f"a_step_when_saving_every_{every}": (with_save - without) / every,
    }


def main() -> None:
    turns = both()
    hand, ours = turns.hand_s[10:], turns.our_s[10:]
    result = {
        "steps": len(ours),
        "by_hand_ms": statistics.median(hand) * 1e3,
        "ours_ms": statistics.median(ours) * 1e3,
        "ratio": statistics.median(b / a for a, b in zip(hand, ours)),
        "saving": saving(times=17, every=8),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
