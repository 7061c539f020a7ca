"""On one GPU: is resuming a model of a billion parameters exact, and does it train by its defaults on an 80 GB card?

python3 bench/gpu_resume.py [WHAT ...]     bf16-master, fp8, no-copy, saves, defaults, stability; all of them by default
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from typing import Any, Callable, Dict, List

import torch

from drumbeat.train import recipes
from drumbeat.train.checkpoint import checkpoints
from drumbeat.train.recipes import llama
from drumbeat.train.settings import fill
from drumbeat.train.verify_resume import verify_resume

CARD = 79 << 30  # what an 80 GB card has
SMALL = ["model=1b", "length=2048", "batch=4", "data=synthetic", "report_every=1", "watch_communication=0"]


def roomiest() -> str:
    """Two states of 17 GB must fit; memory is faster than a disk, where it is large enough."""
    return "/dev/shm" if shutil.disk_usage("/dev/shm").free > 40e9 else tempfile.gettempdir()


def run(texts: List[str]) -> Any:
    return llama.run(fill(llama.LlamaSettings, texts))


def exact(precision: str) -> None:
    folder = tempfile.mkdtemp(dir=roomiest())
    try:
        texts = [*SMALL, "steps=4", "validation=4", f"precision={precision}", f"checkpoint={folder}"]
        print(precision, verify_resume(llama, fill(llama.LlamaSettings, texts)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def no_copy() -> None:
    """As where the host's memory is too small for a copy of the state."""
    known = checkpoints.free_bytes
    checkpoints.free_bytes = lambda: 0
    try:
        exact("bf16-master")
    finally:
        checkpoints.free_bytes = known


def saves() -> None:
    """Seconds of a background save and of the save on a stop, of the same state to the same place."""
    folder = tempfile.mkdtemp(dir=roomiest())
    try:
        figures = os.path.join(folder, "figures")
        more = ["steps=9", "stop_after=8", "save_every=3", "keep=1", "validation=0", f"figures=jsonl={figures}"]
        run([*SMALL, "precision=bf16-master", f"checkpoint={folder}", *more])
        with open(figures, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        print("saves", {line["step"]: line["save_s"] for line in lines if "save_s" in line})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def defaults() -> None:
    """`train llama --set model=1b` as it is, with the memory of an 80 GB card; 6 steps and a validation."""
    torch.cuda.set_per_process_memory_fraction(CARD / torch.cuda.get_device_properties(0).total_memory)
    known = recipes.device_bytes
    recipes.device_bytes = lambda device: CARD
    try:
        result = run(["model=1b", "steps=6", "report_every=1", "validation=16"])
        print("defaults", result.losses, result.validation, {"memory_gib": result.figures["memory_gib"]})
    finally:
        recipes.device_bytes = known
        torch.cuda.set_per_process_memory_fraction(1.0)


def stability() -> None:
    """The default rate and warm-up, with batches 32 times smaller: noisier than they will ever be."""
    result = run(["model=1b", "batch=8", "length=1024", "stop_after=200", "report_every=10", "validation=0"])
    print("stability", [round(loss, 2) for loss in result.losses])


WHAT: Dict[str, Callable[[], None]] = {
    "bf16-master": lambda: exact("bf16-master"),
    "defaults": defaults,
    "stability": stability,
    "saves": saves,
    "fp8": lambda: exact("fp8"),
    "no-copy": no_copy,
}


if __name__ == "__main__":
    for name in sys.argv[1:] or list(WHAT):
        began = time.perf_counter()
        try:
            WHAT[name]()
        except Exception:
            traceback.print_exc()
        gc.collect()
        torch.cuda.empty_cache()
        print(f"== {name}: {time.perf_counter() - began:.0f} s", flush=True)
