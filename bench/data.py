"""How fast images are decoded, and what reading costs a training step.

    PYTHONPATH=src python bench/data.py

JPEG files of 500 x 375 pixels, as ImageNet has them, cropped to 224 x 224. Decoding by 1, 2 and 4 threads, and by as many
processes, which is what training uses; then the training loop with a model that is slower than the reader, with and
without reading ahead.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Callable

import numpy as np
import torch
from PIL import Image

from drumbeat.train.assemble import Anatomy, meshes_for, plan_for
from drumbeat.train.data.decode import decoded
from drumbeat.train.data.decoders import Decoders
from drumbeat.train.data.images import ImageFolder
from drumbeat.train.data.stream import Stream
from drumbeat.train.images import assemble_images
from drumbeat.train.loop import train
from drumbeat.train.models.resnet import ResNet
from drumbeat.train.recipes.resnet import ResNetSettings
from drumbeat.train.settings import fill
from drumbeat.train.world import join

COUNT = 96


def write(folder: str) -> None:
    random = np.random.default_rng(0)
    for i in range(COUNT):
        place = os.path.join(folder, f"class-{i % 4}")
        os.makedirs(place, exist_ok=True)
        coarse = Image.fromarray((random.random((25, 33, 3)) * 255).astype(np.uint8))  # smooth, as photographs are
        coarse.resize((500, 375), Image.Resampling.BICUBIC).save(os.path.join(place, f"{i}.jpg"), quality=90)


def cpu_s() -> float:
    """Processor time of this process and of those it started; the decoders are still running."""
    total, ticks = time.process_time(), os.sysconf("SC_CLK_TCK")
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit():
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
                if int(fields[1]) == os.getpid():
                    total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def rate(read: Callable[[int], object]) -> dict[str, float]:
    """`read(epoch)` reads all images once."""
    read(0)
    began, busy = time.perf_counter(), cpu_s()
    for epoch in range(1, 4):
        read(epoch)
    took = time.perf_counter() - began
    return {"images_per_s": 3 * COUNT / took, "cores": (cpu_s() - busy) / took}


def by_threads(folder: str, count: int) -> dict[str, float]:
    files = [path for path, _ in ImageFolder(folder).files]
    with ThreadPoolExecutor(count) as pool:
        return rate(lambda epoch: list(pool.map(lambda path: decoded(path, 224, (0, epoch, 0)), files)))


def by_processes(folder: str, count: int) -> dict[str, float]:
    images = ImageFolder(folder, decoders=Decoders(count))
    return rate(lambda epoch: images.read(list(range(COUNT)), [epoch] * COUNT))


def a_step(folder: str, prefetch: int) -> dict[str, float]:
    """Mean milliseconds of a step and of its wait for data; a ResNet-18 on 4 crops of 64 x 64."""
    settings = fill(ResNetSettings, ["depth=18", "batch=4", "steps=14", "report_every=14", "watch_communication=0"])
    world = join()
    torch.set_num_threads(1)
    parts = assemble_images(settings, world, meshes_for(settings, world), lambda: ResNet(18, 4), Anatomy())
    images = ImageFolder(folder, size=64, decoders=Decoders(2))
    stream = Stream(images, 4, prefetch=prefetch, finish=images.finish)
    with contextlib.redirect_stdout(io.StringIO()):
        result = train(plan_for(settings, lambda _: 0.01, "samples"), world, parts.step, stream)
    return {"step_ms": statistics.median(result.step_ms), "data_ms": result.figures["data_ms"]}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(folder)
        result = {
            "by_threads": {n: by_threads(folder, n) for n in (1, 2, 4)},
            "by_processes": {n: by_processes(folder, n) for n in (1, 2, 4)},
            "reading_ahead": a_step(folder, 2),
            "reading_when_asked": a_step(folder, 0),
        }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
