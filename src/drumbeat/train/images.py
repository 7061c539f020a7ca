"""Parts that the two image recipes share: loss, accuracy, optimizer, and the set-up of convolutional nets."""

from __future__ import annotations

from typing import Callable, Dict, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drumbeat.train.parallel.layout import Layout
from drumbeat.train.parallel.meshes import Meshes
from drumbeat.train.parallel.parallelize import shards
from drumbeat.train.recipe import build, decaying, set_up
from drumbeat.train.recorded import record_first_call
from drumbeat.train.refusal import Refusal
from drumbeat.train.settings import Settings
from drumbeat.train.trainer import Summed, Trainer
from drumbeat.train.world import World


def steps_of(steps: int, epochs: int, an_epoch: int) -> int:
    """Return the number of steps to train: as many as given, or as the epochs have, whichever is less; 0 if neither is given."""
    return min([n for n in (steps, epochs * an_epoch) if n], default=0)


def sgd(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum 0.9; matrices and filters decay, norms and biases do not."""
    return torch.optim.SGD(decaying(model, settings.decay), lr=settings.lr, momentum=0.9, fused=True)


def _classes_loss(model: nn.Module, batch: Tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1], reduction="sum")


def _accuracy(model: nn.Module, batch: Tuple[Tensor, Tensor]) -> Tuple[Tensor, Dict[str, Tensor]]:
    logits = model(batch[0]).float()
    right = (logits.argmax(dim=1) == batch[1]).sum()
    return F.cross_entropy(logits, batch[1], reduction="sum"), {"accuracy": right}


def _rows(batch: Tuple[Tensor, Tensor]) -> Tensor:
    return torch.full((), float(len(batch[1])), device=batch[1].device)


CLASSES, ACCURACY = Summed(_classes_loss, _rows), Summed(_accuracy, _rows)


def refuse_for_images(settings: Settings) -> None:
    """Refuse a layout or precision that image models do not have, before any data are made.

    `tp` and `cp` are refused by name too: in one process they would quietly mean nothing."""
    layout = Layout.parse(settings.layout)
    if layout.ep != 1:
        raise Refusal("expert parallelism divides experts, and image models have none", "use ddp, fsdp, hsdp or pp")
    if layout.cp != 1:
        raise Refusal("context parallelism cuts sequences, and an image is none", "use ddp, fsdp, hsdp or pp")
    if layout.tp != 1:
        raise Refusal(
            "tensor parallelism cuts wide matrices; the filters of an image model are small, and cutting them would cost "
            "an exchange of activations in every layer to save little",
            "use ddp, fsdp, hsdp or pp",
        )
    if settings.precision in ("bf16-master", "fp8"):
        raise Refusal(f"precision {settings.precision} is for transformers trained with AdamW", "use bf16")


def records(graph: str, settings: Settings, meshes: Meshes) -> bool:
    """Return true if kernels are recorded and replayed. With DDP only on request: gradients are then sent after the
    backward pass instead of beside it."""
    why = {
        "shards": shards(meshes),
        "pipeline stages": meshes.layout.pp > 1,
        "compile=yes": settings.compile,
        f"recompute={settings.recompute}": settings.recompute != "none",
    }
    if graph not in ("auto", "yes", "no"):
        raise Refusal(f"graph '{graph}' is unknown", "known: auto, yes, no")
    if graph == "yes" and any(why.values()):
        raise Refusal(f"graph=yes with {next(word for word, so in why.items() if so)}", "use graph=auto")
    return graph == "yes" or (graph == "auto" and not any(why.values()) and meshes.tokens is None)


def set_up_images(
    settings: Settings,
    world: World,
    meshes: Meshes,
    make: Callable[[], nn.Module],
    schedule: Callable[[int], float],
    stages: Sequence[str] = (),
    graph: str = "no",
) -> Trainer:
    record = records(graph, settings, meshes)
    torch.backends.cudnn.benchmark = True  # images have one size: the fastest algorithm is found once
    model = build(settings, world, make)
    if not shards(meshes) and meshes.layout.pp == 1:  # FSDP cuts plain rows only, and so travel activations
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if record:
            record_first_call(model)
    return set_up(settings, model, sgd(settings, model), scheduler=schedule, blocks="", stages=stages)
