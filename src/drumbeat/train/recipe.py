"""The common part of all recipes: choose what is not said, build the model and set up its trainer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, TypeVar

import torch
from torch import Tensor, nn

from drumbeat.train.checkpoint.state import seed_generators
from drumbeat.train.data.stream import Samples
from drumbeat.train.fit import SAVED_BYTES, Transformer, best_precision, device_bytes, fit
from drumbeat.train.layers.cross_entropy import IGNORE
from drumbeat.train.optim import AdamW8, Muon, OffloadedAdamW
from drumbeat.train.parallel.layout import Layout
from drumbeat.train.parallel.meshes import Meshes
from drumbeat.train.parallel.parallelize import RECOMPUTE, shards
from drumbeat.train.parallel.pipeline import SPLIT_BACKWARD
from drumbeat.train.prepare import setup
from drumbeat.train.refusal import Refusal
from drumbeat.train.settings import Settings, TokenSettings
from drumbeat.train.trainer import Summed, Trainer
from drumbeat.train.world import World

S = TypeVar("S", bound=Settings)
_LARGE = 500_000_000  # parameters


def resolved(settings: S, world: World, meshes: Meshes, shape: Optional[Transformer] = None) -> S:
    """Return settings with every choice made: precision, micro-batches, recomputation and warm-up. With the shape of a
    transformer they follow from what fits into the device's memory (fit.py), and rank 0 prints the choices."""
    layout, sharded = meshes.layout, shards(meshes)
    # A large model that is hurried through its first steps jumps between guesses (1b, 10 steps: loss 12, 8, 15, 6, 16, 17).
    least = 100 if shape is not None and shape.parameters > _LARGE else 10
    warmup = settings.warmup if settings.warmup >= 0 else max(least, min(2000, settings.steps // 10))
    precision, accumulate, recompute = settings.precision, settings.accumulate or 1, settings.recompute
    optimizer = getattr(settings, "optimizer", "adamw")
    if optimizer == "adamw-offload" and (sharded or layout.tp > 1):
        what = "optimizer=adamw-offload updates whole weights"
        raise Refusal(what, "with shards use optimizer=adamw and offload=yes")
    if precision == "auto":
        precision = best_precision(world.device, sharded or shape is None or optimizer == "muon")
    if recompute not in ("auto", *RECOMPUTE):
        raise Refusal(f"recompute '{recompute}' is unknown", f"known: auto, {', '.join(RECOMPUTE)}")
    share = settings.batch // layout.data_ranks
    if shape is not None and share and (settings.accumulate == 0 or recompute == "auto"):
        if settings.offload:
            shape = replace(shape, parameters=0)
        pieces = layout.tp * layout.pp * (layout.dp_shard * layout.ep * layout.cp if sharded else 1)
        found = fit(
            replace(shape, length=max(1, shape.length // (layout.cp * layout.tp))),
            device_bytes(world.device),
            precision,
            sharded,
            pieces,
            share,
            recompute=recompute,
            micro=share // settings.accumulate if settings.accumulate else 0,
            least=2 * layout.pp if layout.pp > 1 else 1,
            saved=SAVED_BYTES.get(optimizer, 0),
        )
        accumulate = settings.accumulate or max(1, share // found.micro)
        recompute = found.recompute
        split = layout.pp > 1 and settings.schedule in SPLIT_BACKWARD
        if settings.recompute == "auto" and recompute == "selective" and split:
            recompute = "full"
        if world.lead and found.memory is not None:
            print(f"chosen: {found.says()}; learning rate {settings.lr:g} after {warmup} steps", flush=True)
    recompute = "none" if recompute == "auto" else recompute
    return replace(settings, precision=precision, accumulate=accumulate, recompute=recompute, warmup=warmup)


def meshes_for(settings: Settings, world: World) -> Meshes:
    layout = Layout.parse(settings.layout, world.local_size).for_world(world.size)
    return Meshes(layout, world.device.type)


def build(settings: Settings, world: World, make: Callable[[], nn.Module], empty: bool = False) -> nn.Module:
    """Return the model, with the same first weights on every rank and for every layout; `empty`: without memory, for `setup` to
    fill."""
    seed_generators(settings.seed)
    with torch.device("meta" if empty else world.device):
        return make()


def set_up(settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> Trainer:
    same = ("layout", "precision", "clip", "accumulate", "seed", "recompute", "compile", "offload", "smallest", "prefetch",
            "hook", "profile", "schedule")  # fmt: skip
    # The recipes' own plans are tested; those that models of transformers bring are compared.
    more.setdefault("check_plan", getattr(settings, "check_plan", False))
    return setup(model, optimizer, **{name: getattr(settings, name) for name in same}, **more)


def decaying(model: nn.Module, decay: float) -> List[Dict[str, Any]]:
    """Return groups of parameters: matrices decay, vectors (norms, biases) do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: List[Dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


_SMALLER: Dict[str, Any] = {"adamw-8bit": AdamW8, "adamw-offload": OffloadedAdamW}


def optimizer_of(settings: TokenSettings, model: nn.Module) -> torch.optim.Optimizer:
    if settings.optimizer == "muon":
        matrices = [p for p in model.get_submodule("blocks").parameters() if p.ndim == 2]
        taken = {id(p) for p in matrices}
        groups = decaying(model, settings.decay)
        groups = [{**group, "params": [p for p in group["params"] if id(p) not in taken]} for group in groups]
        return Muon(matrices, groups, settings.lr, settings.decay)
    if settings.optimizer in _SMALLER:
        return _SMALLER[settings.optimizer](decaying(model, settings.decay), lr=settings.lr, betas=(0.9, 0.95))
    return torch.optim.AdamW(
        decaying(model, settings.decay), lr=settings.lr, betas=(0.9, 0.95), fused=not settings.offload
    )


def _token_loss(model: nn.Module, batch: Tuple[Tensor, Tensor]) -> Tensor:
    return model(*batch)  # type: ignore[no-any-return]


TOKENS = Summed(_token_loss, lambda batch: (batch[1] != IGNORE).sum())


def kept_batches(
    trainer: Trainer, kept: Samples, count: int, at_once: int, finish: Optional[Callable[[Tensor], Tensor]] = None
) -> Iterator[Tuple[Tensor, Tensor]]:
    """Yield this rank's share of the first `count` validation samples (0: all), `at_once` at a time: as many as in training, so
    validation never needs more memory than a training step."""
    rank, ranks = trainer.meshes.data_rank, trainer.meshes.layout.data_ranks
    pieces = 1 if trainer.pipeline is None else trainer.accumulate  # of a pipeline, which are equally long
    own = max(1, min(count or len(kept), len(kept)) // ranks // pieces) * pieces
    for first in range(0, own, at_once * pieces):
        indices = [(rank + ranks * i) % len(kept) for i in range(first, min(first + at_once * pieces, own))]
        inputs, targets = (x.to(trainer.world.device) for x in kept.read(indices, [0] * len(indices)))
        yield inputs if finish is None else finish(inputs), targets
