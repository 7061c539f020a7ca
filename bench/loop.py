"""What our loop costs beside a hand-written one, and what a checkpoint in the background costs. On the CPU, one run.

    PYTHONPATH=src python bench/loop.py

The same model, batches and optimizer; blocks of steps by hand and by us take turns, so a busy machine is busy for both.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
from typing import Dict, List

import torch

from drumbeat.train.assemble import Anatomy, adamw, assemble, meshes_for, plan_for, warm_then_down
from drumbeat.train.checkpoint import Checkpoints
from drumbeat.train.data.stream import Stream
from drumbeat.train.data.text import byte_text, standard_library
from drumbeat.train.loop import train
from drumbeat.train.models.llama import Llama, LlamaShape
from drumbeat.train.recipes.llama import LlamaSettings
from drumbeat.train.settings import fill
from drumbeat.train.world import join

SHAPE = LlamaShape(128, 2, 4, 2, 384, 256, 64)
STEPS = 20


def samples() -> object:
    return byte_text(standard_library(), SHAPE.context, limit=4_000_000)


def by_hand(steps: int) -> float:
    """Seconds a step of the loop that one would write without a library."""
    torch.manual_seed(0)
    model = Llama(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    stream = Stream(samples(), 8)  # type: ignore[arg-type]
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        ((inputs, targets),) = next(stream)
        loss = model(inputs, targets) / targets.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - began)
    stream.close()
    return statistics.median(times[5:])


def by_us(steps: int, save_every: int = 0) -> Dict[str, List[float]]:
    """Milliseconds of each step of our loop, after its warm-up."""
    settings = fill(LlamaSettings, [f"steps={steps}", "batch=8", "report_every=10", f"save_every={save_every}"])
    world = join()
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
    stream = Stream(samples(), 8)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        saved = Checkpoints(folder, parts.parts, parts.step.optimizer) if save_every else None
        plan = plan_for(settings, warm_then_down(settings), "tokens")
        result = train(plan, world, parts.step, stream, saved)
    return {"ms": [result.figures["step_ms_p50"]], "all": result.step_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    hand, ours, again = [], [], []
    for _ in range(args.rounds):
        hand.append(by_hand(STEPS) * 1e3)
        ours.append(by_us(STEPS)["ms"][0])
        again.append(by_hand(STEPS) * 1e3)
    ratios = [b / ((a + c) / 2) for a, b, c in zip(hand, ours, again)]
    spread = [c / a for a, c in zip(hand, again)]
    plain = sum(by_us(45)["all"])
    saving = sum(by_us(45, save_every=20)["all"])
    result = {
        "by_hand_ms": statistics.median(hand + again),
        "ours_ms": statistics.median(ours),
        "ratio_ours_to_hand": statistics.median(ratios),
        "ratio_hand_to_hand": statistics.median(spread),
        "seconds_of_40_steps": plain / 1e3,
        "seconds_with_a_save_every_20": saving / 1e3,
        "a_save_costs_steps": (saving - plain) / 2 / statistics.median(ours),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
