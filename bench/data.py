"""How fast images and tokens are read, and what reading costs a training step: `PYTHONPATH=src python bench/data.py`.

JPEG files of 500 x 375 pixels, as ImageNet has them, cropped at random to 224 x 224 and flipped: by our decoding processes,
on the GPU where there is one, and by torchvision's ImageFolder in torch's DataLoader, which is what people use. Then windows of
8,192 tokens from a mapped file; and a training loop with a model that is slower than the reader, with and without reading ahead.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any, Callable, Dict

import numpy as np
import torch
from PIL import Image

from drumbeat.train.data import Stream
from drumbeat.train.data.decoders import Decoders, DeviceDecoder, unavailable
from drumbeat.train.data.images import ImageFolder
from drumbeat.train.data.text import token_file
from drumbeat.train.images import CLASSES, set_up_images
from drumbeat.train.loop import train
from drumbeat.train.models.resnet import ResNet
from drumbeat.train.recipes import meshes_for, resolved
from drumbeat.train.recipes.resnet import ResNetSettings
from drumbeat.train.settings import fill
from drumbeat.train.world import join

CORES = len(os.sched_getaffinity(0))
BATCH = 256


def write(folder: str, i: int) -> None:
    random = np.random.default_rng(i)
    place = os.path.join(folder, f"class-{i % 4}")
    os.makedirs(place, exist_ok=True)
    coarse = Image.fromarray((random.random((25, 33, 3)) * 255).astype(np.uint8))  # smooth, as photographs are
    coarse.resize((500, 375), Image.Resampling.BICUBIC).save(os.path.join(place, f"{i}.jpg"), quality=90)


def rate(read: Callable[[int], int], seconds: float) -> float:
    """Images per second; `read(epoch)` reads some and says how many. The first time does not count."""
    read(0)
    began, epoch, images = time.perf_counter(), 0, 0
    while time.perf_counter() - began < seconds:
        epoch += 1
        images += read(epoch)
    return images / (time.perf_counter() - began)


def folder_rate(images: ImageFolder, seconds: float) -> float:
    def read(epoch: int) -> int:
        start = epoch * BATCH % len(images)
        indices = [(start + i) % len(images) for i in range(min(BATCH, len(images)))]
        return len(images.read(indices, [epoch] * len(indices))[0])

    return rate(read, seconds)


def torchvision_rate(folder: str, workers: int, seconds: float) -> float:
    import torchvision
    from torchvision.transforms import v2

    steps = [v2.PILToTensor(), v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()]
    images = torchvision.datasets.ImageFolder(folder, v2.Compose(steps))
    loader = torch.utils.data.DataLoader(
        images, min(BATCH, len(images)), shuffle=True, num_workers=workers, persistent_workers=True
    )
    return rate(lambda _: sum(len(x) for x, _ in loader), seconds)


def token_rate(folder: str) -> float:
    """Tokens per second, inputs and targets, by one thread; the file is in memory already."""
    path = os.path.join(folder, "tokens.bin")
    np.random.default_rng(0).integers(0, 50_000, 1 << 25, dtype=np.uint16).tofile(path)
    windows = token_file(path, 8192, vocabulary=128_256)
    random = np.random.default_rng(1)
    return 8192 * rate(lambda _: len(windows.read(random.integers(0, len(windows), 16).tolist(), [0] * 16)[0]), 3)


def a_step(folder: str, prefetch: int) -> Dict[str, float]:
    """Mean milliseconds of a step and of its wait for data; a ResNet-18 on 4 crops of 64 x 64."""
    settings = fill(ResNetSettings, ["depth=18", "batch=4", "steps=14", "report_every=14", "watch_communication=0"])
    world = join()
    torch.set_num_threads(1)
    meshes = meshes_for(settings, world)
    settings = replace(resolved(settings, world, meshes), lr=0.01)
    trainer = set_up_images(settings, world, meshes, lambda: ResNet(18, 4), lambda step: 1.0)
    images = ImageFolder(folder, size=64, decoders=Decoders(2))
    stream = Stream(images, 4, device=world.device, prefetch=prefetch, finish=images.finish)
    with contextlib.redirect_stdout(io.StringIO()):
        result = train(settings, trainer, stream, CLASSES, unit="samples")
    return {"step_ms": statistics.median(result.step_ms), "data_ms": result.figures["data_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=2048, help="how many files are written")
    parser.add_argument("--seconds", type=float, default=5, help="how long each way is measured")
    parser.add_argument("--no-step", action="store_true", help="leave out the training loop")
    args = parser.parse_args()
    result: Dict[str, Any] = {"cores": CORES}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        with ProcessPoolExecutor(CORES) as pool:
            list(pool.map(write, [folder] * args.images, range(args.images), chunksize=16))
        for workers in sorted({1, CORES}):
            images = ImageFolder(folder, decoders=Decoders(workers))
            result[f"images_per_s, {workers} processes"] = folder_rate(images, args.seconds)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        reason = unavailable(device)
        if reason is None:
            images = ImageFolder(folder, decoders=DeviceDecoder(device, Decoders(CORES)))
            result["images_per_s, GPU"] = folder_rate(images, args.seconds)
        else:
            result["GPU"] = reason
        try:
            workers = CORES
            result[f"images_per_s, torchvision, {workers} workers"] = torchvision_rate(folder, workers, args.seconds)
        except ImportError:
            result["torchvision"] = "not installed"
        result["tokens_per_s"] = token_rate(folder)
        if not args.no_step:
            result["reading_ahead"], result["reading_when_asked"] = a_step(folder, 2), a_step(folder, 0)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
