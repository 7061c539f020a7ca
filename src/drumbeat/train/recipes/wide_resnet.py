"""Train a Wide ResNet on CIFAR-100, with the arguments and the output lines of the Olivia guide.

drumbeat run --nodes 2 -- drumbeat train wide-resnet --set data=/data/cifar-100-binary epochs=100 batch=2048 \
    base_lr=0.04 target_accuracy=0.95 patience=2
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, replace
from typing import ClassVar, Dict, Tuple

from drumbeat.train.data import Images
from drumbeat.train.data.images import SyntheticImages, cifar100
from drumbeat.train.images import ACCURACY, CLASSES, refuse_for_images, set_up_images, steps_of
from drumbeat.train.loop import Result, train
from drumbeat.train.measure import utilisation
from drumbeat.train.models.resnet import WideResNet, forward_flops
from drumbeat.train.recipes import kept_batches, meshes_for, resolved
from drumbeat.train.settings import BATCHES, Settings, option
from drumbeat.train.world import join


@dataclass(frozen=True)
class WideResNetSettings(Settings):
    depth: int = option(28, "layers: 6 n + 4")
    widening: int = option(10, "how many times wider than a ResNet")
    data: str = option(
        "synthetic", "synthetic, or a folder with CIFAR-100, its binary or its Python version", reads=("synthetic",)
    )
    images: int = option(50_000, "images of the synthetic data")
    classes: int = option(100, "classes")
    epochs: int = option(100, "passes over the data")
    steps: int = option(0, "optimizer steps; 0: as many as `epochs` give, else what ends first")
    validate_every: int = option(0, "steps between validations; 0: after every epoch")
    batch: int = option(BATCHES["wide-resnet"], "images per step, on all ranks together")
    base_lr: float = option(0.04, "learning rate for 256 images per step: it grows with the batch")
    decay: float = option(5e-4, "weight decay")
    clip: float = option(0.0, "largest norm of the gradients; 0: no limit")
    target_accuracy: float = option(0.95, "stop when validation has been this good ...")
    patience: int = option(2, "... for so many epochs in a row")
    validation: int = option(0, "images to validate on; 0: all")

    UNUSED: ClassVar[Dict[str, str]] = {"lr": "base_lr sets the learning rate"}


SettingsClass = WideResNetSettings


def samples(settings: WideResNetSettings) -> Tuple[Images, Images]:
    if settings.data == "synthetic":
        kept = max(64, settings.images // 10)
        return tuple(SyntheticImages(n, 32, settings.classes) for n in (settings.images, kept))  # type: ignore[return-value]
    folder = os.path.expanduser(settings.data)
    both = [cifar100(folder, part, settings.seed, settings.classes) for part in (True, False)]
    return both[0], both[1]


def run(settings: WideResNetSettings) -> Result:
    refuse_for_images(settings)
    world = join()
    meshes = meshes_for(settings, world)
    images, kept = samples(settings)
    an_epoch = max(1, len(images) // settings.batch)
    steps = steps_of(settings.steps, settings.epochs, an_epoch)
    every = settings.validate_every or an_epoch
    top = settings.base_lr * settings.batch / 256
    settings = resolved(replace(settings, steps=steps, validate_every=every, lr=top), world, meshes)
    make = lambda: WideResNet(settings.depth, settings.widening, settings.classes)  # noqa: E731

    def rate(step: int) -> float:
        return min((step + 1) / max(1, settings.warmup), (1 + math.cos(math.pi * step / steps)) / 2)

    trainer = set_up_images(settings, world, meshes, make, rate, ("blocks",))
    stream = trainer.stream(images, settings.batch, images.finish)
    clock = _Epochs(settings, an_epoch, world.lead, "GPUs" if world.device.type != "cpu" else "processes")

    def validate() -> Dict[str, float]:
        took = clock.training_done()
        batches = kept_batches(trainer, kept, settings.validation, stream.micro, kept.finish)
        values = trainer.evaluate(batches, ACCURACY, split=False)
        clock.print(stream.sample // clock.images, values, took)
        return values

    flops = 3 * forward_flops(make(), 32)
    use = utilisation(flops, "3 x forward FLOPs", settings.precision, world.device, settings.measure_peak)
    result = train(settings, trainer, stream, CLASSES, validate, use, clock.target_reached, "samples")
    if not result.stopped:
        clock.summary(world.size // world.local_size, world.local_size)
    return result


class _Epochs:
    """Prints the lines that readers of this job's output know."""

    def __init__(self, settings: WideResNetSettings, an_epoch: int, lead: bool, workers: str) -> None:
        self.settings, self.images, self.lead = settings, an_epoch * settings.batch, lead
        self.done, self.good = 0, 0  # since this start; a resumed run goes on with its epoch's number
        self.best, self.best_epoch, self.workers = -1.0, 0, workers
        self.began = self.since = time.perf_counter()

    def training_done(self) -> float:
        return time.perf_counter() - self.since

    def print(self, epoch: int, values: Dict[str, float], took: float) -> None:
        self.done += 1
        if values["accuracy"] > self.best:
            self.best, self.best_epoch = values["accuracy"], epoch
        self.good = self.good + 1 if values["accuracy"] >= self.settings.target_accuracy else 0
        if self.lead:
            print(f"Epoch {epoch}/{self.settings.epochs} completed in {took:.3f} seconds")
            print(f"Validation Loss: {values['loss']:.4f}, Validation Accuracy: {values['accuracy']:.4f}")
            print(f"Epoch Throughput: {self.images / took:.3f} images/second", flush=True)
        self.since = time.perf_counter()

    def target_reached(self, _values: Dict[str, float]) -> bool:
        reached = self.good >= self.settings.patience
        if reached and self.lead:
            print(f"Target accuracy {self.settings.target_accuracy} held for {self.good} epochs: stopping early")
        return reached

    def summary(self, nodes: int, per_node: int) -> None:
        if self.lead:
            total = time.perf_counter() - self.began
            print(f"\nTraining Summary:\nTotal training time: {total:.3f} seconds")
            print(f"Throughput: {self.done * self.images / total:.3f} images/second")
            print(self._target())
            print(f"Number of nodes: {nodes}\nNumber of {self.workers} per node: {per_node}")
            print(f"Total {self.workers} used: {nodes * per_node}\nTraining completed successfully.", flush=True)

    def _target(self) -> str:
        target, patience = self.settings.target_accuracy, self.settings.patience
        best = f"best {self.best:.4f}, in epoch {self.best_epoch}" if self.done else "nothing was validated"
        if self.good >= patience:
            return f"Target accuracy {target} reached and held for {self.good} epochs ({best})"
        return f"Target accuracy {target} NOT reached for {patience} epochs in a row ({best})"
