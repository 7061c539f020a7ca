"""What the checksums of a checkpoint cost: until a save is durable, in a load, and while training goes on. On the CPU.

    PYTHONPATH=src python bench/checkpoint.py [MEGABYTES [TURNS]]

Saves with checksums and without (torch's own file system in the place of ours) take turns in one process, as do loads: a busy
machine is busy for both. While a save is under way the training thread multiplies matrices; its products per second show whether
the writing thread slows it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import zlib
from typing import Any, Dict, List
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem

from drumbeat.train.checkpoint import checkpoints
from drumbeat.train.checkpoint.checkpoints import Checkpoints

WIDTH = 1024  # of a layer: 4 MiB of weights, and two moments


class Unsummed(FileSystem):
    """Torch's own, which records nothing."""

    checksums: Dict[str, Any] = {}
    error = None


def fresh(folder: str, megabytes: int) -> Checkpoints:
    layers = max(1, megabytes // 12)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    return Checkpoints(folder, [model], torch.optim.Adam(model.parameters()), keep=1)


def saved(saves: Checkpoints, step: int, summed: bool) -> Dict[str, float]:
    """Seconds of the call, seconds until it was durable, products per second in the meantime."""
    matrix, products = torch.rand(256, 256), 0
    with patch.object(checkpoints, "SummedFileSystem", checkpoints.SummedFileSystem if summed else Unsummed):
        began = time.monotonic()
        saves.save(step, {})
        call = time.monotonic() - began
        while (ended := saves.poll()) is None:
            matrix @ matrix
            products += 1
    assert not ended.error, ended.error
    return {"call": call, "durable": ended.seconds, "products": products / (ended.seconds - call)}


def loaded(folder: str, megabytes: int, summed: bool) -> float:
    loads = fresh(folder, megabytes)
    nothing = patch.object(checkpoints, "check_files", lambda *_: None)
    with patch.object(checkpoints, "check_files", checkpoints.check_files) if summed else nothing:
        began = time.monotonic()
        assert loads.load([]) is not None
        return time.monotonic() - began


def median(turns: List[Dict[str, float]], key: str) -> float:
    return statistics.median(turn[key] for turn in turns)


def main() -> None:
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 480
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 7
    torch.set_num_threads(1)
    block = os.urandom(1 << 24)
    began = time.monotonic()
    for _ in range(8):
        zlib.crc32(block)
    rate = 8 * len(block) / (time.monotonic() - began) / 1e9
    turns: Dict[bool, List[Dict[str, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        saves = fresh(folder, megabytes)
        for group in saves.state.optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        saves.state.optimizer.step()
        saves.prepare()
        saved(saves, 1, True)  # the first makes room
        for turn in range(2 * count):
            turns[turn % 2 == 1].append(saved(saves, turn + 2, turn % 2 == 1))
        path = saves.path_of(2 * count + 1)
        size = sum(os.path.getsize(os.path.join(path, name)) for name in os.listdir(path)) / 1e6
        loads = [(loaded(folder, megabytes, False), loaded(folder, megabytes, True)) for _ in range(count)]
    figures = {
        "checkpoint": f"{size:,.0f} MB",
        "zlib.crc32": f"{rate:.1f} GB/s",
        "training thread, s": [round(median(turns[summed], "call"), 3) for summed in (False, True)],
        "durable after, s": [round(median(turns[summed], "durable"), 2) for summed in (False, True)],
        "products per second beside it": [round(median(turns[summed], "products")) for summed in (False, True)],
        "load, s": [round(statistics.median(times), 2) for times in zip(*loads)],
        "load average": round(os.getloadavg()[0], 1),
    }
    print("without and with checksums, medians of", count, "turns each")
    for name, value in figures.items():
        print(f"  {name}: {value if isinstance(value, str) else json.dumps(value)}")


if __name__ == "__main__":
    main()
