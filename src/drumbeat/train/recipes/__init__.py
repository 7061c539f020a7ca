"""The common part of all recipes: choose what is not said, build the model and set up its trainer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, TypeVar

import torch
from torch import Tensor, nn

from drumbeat.predict import cost
from drumbeat.predict.cost import parts
from drumbeat.predict.machine import FRAMEWORKS
from drumbeat.predict.shapes import Model
from drumbeat.train.checkpoint.checkpoints import free_bytes
from drumbeat.train.checkpoint.state import seed_generators
from drumbeat.train.data import Samples
from drumbeat.train.layers.cross_entropy import IGNORE
from drumbeat.train.optim import AdamW8, Muon, OffloadedAdamW
from drumbeat.train.parallel import Layout
from drumbeat.train.parallel.meshes import Meshes
from drumbeat.train.parallel.parallelize import RECOMPUTE, shards
from drumbeat.train.parallel.pipeline import SPLIT_BACKWARD
from drumbeat.train.prepare import setup
from drumbeat.train.refusal import Refusal
from drumbeat.train.settings import Settings, TokenSettings, deciding
from drumbeat.train.trainer import Summed, Trainer
from drumbeat.train.world import World

S = TypeVar("S", bound=Settings)
_LARGE = 500_000_000  # parameters


def resolved(settings: S, world: World, meshes: Meshes, shape: Optional[Transformer] = None) -> S:
    """Return settings with every choice made: precision, micro-batches, recomputation and warm-up. With the shape of a
    transformer they follow from what fits into the device's memory, and rank 0 prints the choices."""
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
            host=(free_bytes() or 0) // world.local_size or None,
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
    trainer = setup(model, optimizer, **{name: getattr(settings, name) for name in same}, **more)
    trainer.made_with = deciding(settings)
    return trainer


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


# Precision, micro-batch and recomputation that fit into a GPU, from the shape of a transformer.
#
# State: 16 bytes per parameter in every precision (fp32: weight 4, gradient 4, two moments 8; bf16-master and fp8: weight 2,
# gradient 2, master 4, moments 8), 2 more where autocast keeps bf16 copies of fp32 weights; divided by the ranks that share it.
#
# What the backward pass keeps, one slice of the loss's logits and what is computed at once are those of predict/cost.py,
# by which `drumbeat predict` judges a job before it starts. A tenth of the memory is left for libraries and gaps.

_STATE_BYTES = 16
SAVED_BYTES = {"adamw-8bit": 6, "adamw-offload": 12}  # per parameter, by optimizers that keep less of it on the device
_USABLE = 0.9  # of a device's memory
_MOST_AT_ONCE = 8  # samples of a micro-batch: more is no faster on any GPU we measured
_ORDER = ("none", "selective", "full")  # from the fastest to the smallest


@dataclass(frozen=True)
class Transformer:
    parameters: int
    layers: int
    width: int
    key_value: int  # width of keys and values together
    inner: int
    vocabulary: int
    length: int


@dataclass(frozen=True)
class Fit:
    """Choice of settings, and the bytes per rank behind it."""

    precision: str
    micro: int
    recompute: str
    state: float
    activations: float
    memory: Optional[int]  # of the device; none: not known

    def says(self) -> str:
        text = f"precision {self.precision}, {self.micro} per micro-batch, recompute {self.recompute}"
        if self.memory is None:
            return text
        parts = f"{self.state / 2**30:.1f} GiB of state and {self.activations / 2**30:.1f} of activations"
        return f"{text}: {parts} in {self.memory / 2**30:.0f} GiB"


def device_bytes(device: torch.device) -> Optional[int]:
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def best_precision(device: torch.device, sharded: bool) -> str:
    """Return bf16 if the device computes in it: with fp32 masters in the optimizer, or FSDP's own fp32 shards."""
    if device.type != "cuda" or not torch.cuda.is_bf16_supported(including_emulation=False):
        return "fp32"
    return "bf16" if sharded else "bf16-master"


def fit(
    shape: Transformer,
    memory: Optional[int],
    precision: str,
    sharded: bool,
    pieces: int,
    share: int,
    *,
    recompute: str = "auto",
    micro: int = 0,
    least: int = 1,
    saved: int = 0,
    host: Optional[int] = None,
) -> Fit:
    """Choose micro-batch and recomputation. `pieces`: over how many ranks the state is divided; `share`: samples of one
    rank and step, of which a micro-batch
    is a divisor; `least`: micro-batches that there must be; `saved`: bytes of state per parameter that the optimizer does not
    need. `recompute` and `micro` are kept where they are given. `host`: the memory of a process without a GPU."""
    size = 4 if precision in ("fp32", "tf32") else 2
    state = (_STATE_BYTES - saved + 2 * (precision in ("bf16", "fp16") and not sharded)) * shape.parameters / pieces
    ways = _ORDER if recompute == "auto" else (recompute,)
    most = share if memory is None else min(share, _MOST_AT_ONCE)
    sizes = [n for n in range(most, 0, -1) if share % n == 0 and share // n >= least] or [1]
    choices = [(n, way) for way in ways for n in ([micro] if micro else sizes)]
    found = [Fit(precision, n, way, state, _activations(shape, n, way, size), memory) for n, way in choices]
    room = host if memory is None else memory
    if room is not None and state > room:
        raise Refusal(
            f"weights, gradients and optimizer state of {shape.parameters:,} parameters take {state / 2**30:.0f} GiB per "
            f"{'GPU' if memory else 'process'}, which has {room / 2**30:.0f}",
            "share them between more GPUs (layout fsdp), use optimizer=adamw-8bit, or choose a smaller model",
        )
    if memory is None:
        return found[0]
    return next((one for one in found if one.state + one.activations <= _USABLE * memory), found[-1])


def _activations(shape: Transformer, micro: int, recompute: str, size: int) -> float:
    """Return the bytes besides the state. Only products of heads and their width count, so that heads of width 1
    stand for any."""
    model = Model("", shape.layers, shape.width, shape.width, shape.key_value // 2, 1, shape.inner, shape.vocabulary)
    level = _ORDER.index("selective" if recompute == "lean" else recompute)  # which is more than the lean one keeps
    layout = cost.Layout(micro=micro, recompute=level)
    own = FRAMEWORKS["drumbeat"]
    found = parts(model, cost.Work(shape.length, micro), layout, own.software, own.states, 0, 1)
    return float(sum(found[name] for name in ("activations", "logits", "working set")) * size / 2)
