"""Parts that the two image recipes share: loss, accuracy, averaged statistics, assembling for convolutional nets."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from drumbeat.train.assemble import Anatomy, Assembly, assemble
from drumbeat.train.checkpoint.state import named_buffers
from drumbeat.train.data.stream import Images
from drumbeat.train.parallel.layout import Layout
from drumbeat.train.parallel.meshes import Meshes
from drumbeat.train.parallel.parallelize import shards
from drumbeat.train.parallel.stages import StagedPipeline
from drumbeat.train.recorded import record_first_call
from drumbeat.train.refusal import Refusal
from drumbeat.train.settings import Settings
from drumbeat.train.validation import average
from drumbeat.train.world import World


class _Rows(torch.autograd.Function):
    """Keep what goes from stage to stage, and its gradient, in plain row order: else it cannot be sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0].contiguous()


def steps_of(steps: int, epochs: int, an_epoch: int) -> int:
    """Return the number of steps to train: as many as given, or as the epochs have, whichever is less; 0 if neither is given."""
    return min([n for n in (steps, epochs * an_epoch) if n], default=0)


def classes_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images).float(), labels, reduction="sum")


def sgd(settings: Settings, meshes: Meshes) -> Callable[[Sequence[Tensor]], torch.optim.Optimizer]:
    """Momentum 0.9; matrices and filters decay, norms and biases do not."""

    def make(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        groups: List[Dict[str, Any]] = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.SGD(groups, lr=settings.lr, momentum=0.9, fused=not shards(meshes))  # no fused SGD on shards

    return make


def refuse_for_images(settings: Settings) -> None:
    """Called first of all: a layout or precision that image models do not have must not cost the making of data.

    `tp` and `cp` are refused by name too: in one process they would quietly mean nothing."""
    layout = Layout.parse(settings.layout)
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


def assemble_images(
    settings: Settings,
    world: World,
    meshes: Meshes,
    build: Callable[[], nn.Module],
    anatomy: Anatomy,
    graph: str = "no",
) -> Assembly:
    layout, record = meshes.layout, records(graph, settings, meshes)
    torch.backends.cudnn.benchmark = True  # images have one size: the fastest algorithm is found once

    def made() -> nn.Module:
        model = build()
        if layout.pp > 1:
            model.register_forward_pre_hook(lambda _model, args: (_Rows.apply(args[0]),))
            model.register_forward_hook(lambda _model, _args, x: _Rows.apply(x))
        elif not shards(meshes):  # FSDP cuts plain rows only
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            if record:
                record_first_call(model)
        return model

    return assemble(settings, world, meshes, made, classes_loss, sgd(settings, meshes), anatomy, shared=mean_statistics)


@torch.no_grad()
def accuracy(parts: Assembly, kept: Images, batch: int, limit: int) -> Dict[str, float]:
    """Mean loss and share of right answers over `limit` kept images (0: all), each rank its share."""
    for part in parts.parts:
        part.eval()
    pipeline = parts.step.pipeline
    assert not isinstance(pipeline, StagedPipeline)
    count = min(limit or len(kept), len(kept))
    rank, ranks = parts.meshes.data_rank, parts.meshes.layout.data_ranks
    chosen = list(range(rank, count - count % ranks, ranks))
    totals = torch.zeros(3, device=parts.world.device)
    if pipeline is not None:  # always as many images, in equal micro-batches
        batch = min(batch, len(chosen)) // pipeline.micro_batches * pipeline.micro_batches or pipeline.micro_batches
        chosen = [chosen[i % len(chosen)] for i in range(max(batch, len(chosen) - len(chosen) % batch))]
    with agreed_statistics(parts.parts, parts.meshes):
        for at in range(0, len(chosen), batch):
            indices = chosen[at : at + batch]
            images, labels = (x.to(parts.world.device) for x in kept.read(indices, [0] * len(indices)))
            with parts.precision.autocast(parts.world.device, parts.step.cast_by_fsdp):
                images = kept.finish(images)
                logits = parts.parts[0](images) if pipeline is None else pipeline.evaluate(images, labels)[0]
            if logits is None:  # not the last stage
                continue
            logits = logits.float()
            totals[0] += F.cross_entropy(logits, labels, reduction="sum")
            totals[1] += (logits.argmax(dim=1) == labels).sum()
            totals[2] += len(indices)
    for part in parts.parts:
        part.train()
    pipe = parts.meshes.one("pp")
    if pipe is not None:
        dist.all_reduce(totals, group=pipe.get_group())
    loss, right = average(torch.stack([totals[[0, 2]], totals[[1, 2]]]), parts.meshes.tokens).tolist()
    return {"loss": loss, "accuracy": right}


def mean_statistics(parts: Sequence[nn.Module], meshes: Meshes) -> Dict[str, Tensor]:
    """Each rank keeps running means of its own images. Where they are used or saved, all ranks take the mean of them; what
    a rank holds stays its own, so neither a save nor a validation changes the training."""
    if meshes.tokens is None:
        return {}
    means = {name: buffer.clone() for name, buffer in _statistics(parts).items()}
    for buffer in means.values():
        dist.all_reduce(buffer, group=meshes.tokens.get_group())
        buffer /= meshes.tokens.size()
    return means


@contextmanager
def agreed_statistics(parts: Sequence[nn.Module], meshes: Meshes) -> Iterator[None]:
    """Inside, every rank computes with the mean of all ranks' running means; afterwards each has its own again."""
    own = _statistics(parts)
    before = {name: buffer.clone() for name, buffer in own.items()}
    for name, mean in mean_statistics(parts, meshes).items():
        own[name].copy_(mean)
    yield
    for name, value in before.items():
        own[name].copy_(value)


def _statistics(parts: Sequence[nn.Module]) -> Dict[str, Tensor]:
    """The running means of batch normalisation, under the names that they have in a checkpoint."""
    layers = [m for part in parts for m in part.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    running = {id(buffer) for layer in layers for buffer in (layer.running_mean, layer.running_var)}
    return {name: buffer for name, buffer in named_buffers(parts) if id(buffer) in running}
