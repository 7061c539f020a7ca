"""Train ResNet-18 or -50 as on ImageNet: crops, flips, SGD with momentum, the rate down tenfold every 30 epochs.

drumbeat run --nodes 4 -- drumbeat train resnet --set data=/data/imagenet epochs=90 precision=bf16 compile=yes
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Dict, Tuple

from drumbeat.train.data import Images, nvjpeg
from drumbeat.train.data.decoders import decoders_for
from drumbeat.train.data.images import ImageFolder, SyntheticImages
from drumbeat.train.images import ACCURACY, CLASSES, refuse_for_images, set_up_images, steps_of
from drumbeat.train.loop import Result, train
from drumbeat.train.measure import utilisation
from drumbeat.train.models.resnet import ResNet, forward_flops
from drumbeat.train.recipes import kept_batches, meshes_for, resolved
from drumbeat.train.refusal import Refusal
from drumbeat.train.settings import BATCHES, Settings, option
from drumbeat.train.world import World, join


@dataclass(frozen=True)
class ResNetSettings(Settings):
    depth: int = option(50, "18 or 50")
    data: str = option(
        "synthetic", "synthetic, or a folder with train/CLASS/*.jpg and val/CLASS/*.jpg", reads=("synthetic",)
    )
    size: int = option(224, "pixels per side")
    classes: int = option(1000, "classes of the synthetic data; folders count their own")
    epochs: int = option(0, "passes over the data; 0: as many as `steps` give")
    steps: int = option(0, "optimizer steps; with `epochs` too, what ends first; neither: 100")
    batch: int = option(BATCHES["resnet"], "images per step, on all ranks together")
    lr: float = option(0.1, "first learning rate, for 256 images per step: it grows with the batch")
    decay: float = option(1e-4, "weight decay")
    clip: float = option(0.0, "largest norm of the gradients; 0: no limit")
    workers: int = option(0, "processes per rank that decode images; 0: one per core")
    decode: str = option("auto", "where JPEG files are decoded: gpu (nvJPEG), cpu, or auto: gpu where it can")
    validation: int = option(0, "images to validate on; 0: all of them (synthetic: 512)")
    graph: str = option(
        "auto", "GPU: record a step's kernels once, then replay them: yes, no, auto: in a single process"
    )


SettingsClass = ResNetSettings


def samples(settings: ResNetSettings, world: World) -> Tuple[Images, Images, int]:
    """Return training images, validation images and the number of classes."""
    if settings.data == "synthetic":
        made = [SyntheticImages(n, settings.size, settings.classes, seed) for n, seed in ((100_000, 0), (512, 0))]
        return made[0], made[1], settings.classes
    folder = os.path.expanduser(settings.data)
    decoders = decoders_for(settings.decode, settings.workers, world)
    train_set = ImageFolder(os.path.join(folder, "train"), settings.size, True, settings.seed, decoders)
    kept = ImageFolder(os.path.join(folder, "val"), settings.size, False, settings.seed, decoders, train_set.classes)
    return train_set, kept, len(train_set.classes)


def run(settings: ResNetSettings) -> Result:
    if settings.depth not in (18, 50):
        raise Refusal(f"no ResNet-{settings.depth}", "set depth=18 or depth=50")
    refuse_for_images(settings)
    nvjpeg.allow_many_streams()
    world = join()
    meshes = meshes_for(settings, world)
    images, kept, classes = samples(settings, world)
    an_epoch = max(1, len(images) // settings.batch)
    steps = steps_of(settings.steps, settings.epochs, an_epoch) or 100
    # A batch of 256 n images takes n times the rate, reached over the first steps (Goyal et al., 2017).
    top = settings.lr * settings.batch / 256
    settings = resolved(replace(settings, steps=steps, lr=top), world, meshes)
    third = an_epoch * 30

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / max(1, settings.warmup)) * 0.1 ** (step // third)

    make = lambda: ResNet(settings.depth, classes)  # noqa: E731
    stages = ("layer1", "layer2", "layer3", "layer4")
    trainer = set_up_images(settings, world, meshes, make, rate, stages, settings.graph)
    stream = trainer.stream(images, settings.batch, images.finish)
    flops = 3 * forward_flops(make(), settings.size)
    use = utilisation(flops, "3 x forward FLOPs", settings.precision, world.device, settings.measure_peak)

    def validate() -> Dict[str, float]:
        batches = kept_batches(trainer, kept, settings.validation, stream.micro, kept.finish)
        return trainer.evaluate(batches, ACCURACY, split=False)

    return train(settings, trainer, stream, CLASSES, validate, use, unit="samples")
