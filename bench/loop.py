"""What our loop costs beside a hand-written one, and what handing a checkpoint to the background costs. On the CPU.

    PYTHONPATH=src python bench/loop.py

The same model, data and optimizer take turns, step by step, in one process: a busy machine is busy for both. The ratio
is the median over pairs of neighbouring steps.
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

from drumbeat.train.assemble import Anatomy, Assembly, adamw, assemble, meshes_for, plan_for, warm_then_down
from drumbeat.train.checkpoint import Checkpoints
from drumbeat.train.data.stream import Stream
from drumbeat.train.data.text import TokenWindows, byte_text, standard_library
from drumbeat.train.loop import train
from drumbeat.train.models.llama import Llama, LlamaShape
from drumbeat.train.recipes.llama import LlamaSettings
from drumbeat.train.settings import fill
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


def by_us(steps: int, stream: Stream) -> Assembly:
    settings = fill(LlamaSettings, [f"steps={steps}", "batch=8", "lr=1e-3"])
    world = join()
    torch.set_num_threads(1)
    meshes = meshes_for(settings, world)
    parts = assemble(
        settings,
        world,
        meshes,
        lambda: Llama(SHAPE),
        lambda m, x, y: m(x, y),
        adamw(settings, meshes),
        Anatomy("blocks"),
    )
    with contextlib.redirect_stdout(io.StringIO()):
        train(plan_for(settings, warm_then_down(settings), "tokens"), world, parts.step, stream)
    return parts


def save_ms() -> float:
    """The call that copies the state and returns; the rest is a thread's."""
    with tempfile.TemporaryDirectory() as folder:
        parts = by_us(2, Stream(samples(), 8))
        saved = Checkpoints(folder, parts.parts, parts.step.optimizer)
        took = []
        for step in range(5):
            began = time.thread_time()
            saved.save(step, {"sample": 0})
            took.append(time.thread_time() - began)
            saved.finish()
        return statistics.median(took) * 1e3


def main() -> None:
    turns = both()
    hand, ours = turns.hand_s[10:], turns.our_s[10:]
    result = {
        "steps": len(ours),
        "by_hand_ms": statistics.median(hand) * 1e3,
        "ours_ms": statistics.median(ours) * 1e3,
        "ratio": statistics.median(b / a for a, b in zip(hand, ours)),
        "save_call_ms": save_ms(),
    }
    result["save_call_share_of_a_step"] = result["save_call_ms"] / result["ours_ms"]
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
