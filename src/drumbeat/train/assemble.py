"""From settings to what a loop needs, in the order in which the parts depend on each other. Recipes call this."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from drumbeat.train.checkpoint.checkpoints import Checkpoints
from drumbeat.train.checkpoint.generators import seed_generators
from drumbeat.train.fit import Transformer, best_precision, device_bytes, fit
from drumbeat.train.layers.cross_entropy import cross_entropy_sum
from drumbeat.train.measure.profile import Profile
from drumbeat.train.optim import MasterAdamW
from drumbeat.train.parallel.context import Context
from drumbeat.train.parallel.layout import Layout
from drumbeat.train.parallel.meshes import Meshes
from drumbeat.train.parallel.parallelize import RECOMPUTE, Sharding, parallelize, shards
from drumbeat.train.parallel.pipeline import (
    SCHEDULES,
    SPLIT_BACKWARD,
    Pipeline,
    cut,
    refuse_for_pipelines,
    stage_numbers,
)
from drumbeat.train.parallel.tensor_plan import read_plan
from drumbeat.train.precision import Precision
from drumbeat.train.refusal import Refusal
from drumbeat.train.settings import Settings
from drumbeat.train.step import Loss, Step, full_tensor
from drumbeat.train.training_plan import Plan
from drumbeat.train.weights import Source, init_sharded, load, materialize
from drumbeat.train.world import World

Shared = Callable[[Sequence[nn.Module], Meshes], Dict[str, Tensor]]


@dataclass(frozen=True)
class Anatomy:
    """Structure of a model that parallelism must know, by module names."""

    blocks: str = ""  # the module whose children are the repeated blocks
    first: Tuple[str, ...] = ()  # what belongs to the first pipeline stage
    last: Tuple[str, ...] = ()  # ... to the last one
    stages: Tuple[str, ...] = ()  # modules whose children a pipeline spreads; none given: those of `blocks`
    tensor_plan: Optional[Dict[str, ParallelStyle]] = None


@dataclass
class Assembly:
    world: World
    meshes: Meshes
    precision: Precision
    parts: List[nn.Module]
    step: Step
    checkpoints: Optional[Checkpoints]


S = TypeVar("S", bound=Settings)
_LARGE = 500_000_000  # parameters


def resolved(settings: S, world: World, meshes: Meshes, shape: Optional[Transformer] = None) -> S:
    """Settings without a choice left: precision, micro-batches, recomputation and warm-up. With the shape of a transformer
    they follow from what fits into the device's memory (fit.py), and rank 0 says what was chosen."""
    layout, sharded = meshes.layout, shards(meshes)
    # A large model that is hurried through its first steps jumps between guesses (1b, 10 steps: loss 12, 8, 15, 6, 16, 17).
    least = 100 if shape is not None and shape.parameters > _LARGE else 10
    warmup = settings.warmup if settings.warmup >= 0 else max(least, min(2000, settings.steps // 10))
    precision, accumulate, recompute = settings.precision, settings.accumulate or 1, settings.recompute
    if precision == "auto":
        precision = best_precision(world.device, sharded or shape is None)
    if recompute not in ("auto", *RECOMPUTE):
        raise Refusal(f"recompute '{recompute}' is unknown", f"known: auto, {', '.join(RECOMPUTE)}")
    share = settings.batch // layout.data_ranks
    if shape is not None and share and (settings.accumulate == 0 or recompute == "auto"):
        if settings.offload:
            shape = replace(shape, parameters=0)
        pieces = layout.tp * layout.pp * (layout.dp_shard * layout.cp if sharded else 1)
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
        )
        accumulate = settings.accumulate or max(1, share // found.micro)
        recompute = found.recompute
        if (
            settings.recompute == "auto"
            and recompute == "selective"
            and layout.pp > 1
            and settings.schedule in SPLIT_BACKWARD
        ):
            recompute = "full"
        if world.lead and found.memory is not None:
            print(f"chosen: {found.says()}; learning rate {settings.lr:g} after {warmup} steps", flush=True)
    recompute = "none" if recompute == "auto" else recompute
    return replace(settings, precision=precision, accumulate=accumulate, recompute=recompute, warmup=warmup)


def meshes_for(settings: Settings, world: World) -> Meshes:
    layout = Layout.parse(settings.layout, world.local_size).for_world(world.size)
    return Meshes(layout, world.device.type)


def assemble(
    settings: Settings,
    world: World,
    meshes: Meshes,
    build: Callable[[], nn.Module],
    loss: Loss,
    optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
    anatomy: Anatomy,
    large: bool = False,
    context: Optional[Context] = None,
    shared: Optional[Shared] = None,
    source: Optional[Source] = None,
) -> Assembly:
    """`large`: make the weights only after they are cut, each rank its own part (weights.py). `shared`: entries of the
    model's state on which ranks agree before a save. `source`: first weights from files."""
    precision = Precision(settings.precision)
    layout = meshes.layout
    numbers = [0]
    stages = 1
    large = large and (shards(meshes) or layout.tp > 1 or layout.pp > 1)  # else a rank holds the whole model anyway
    spread = anatomy.stages or ((anatomy.blocks,) if anatomy.blocks else ())
    if layout.pp > 1:
        if not spread:
            raise Refusal("this model has no pipeline stages", "use another layout")
        refuse_for_pipelines(settings.precision, settings.schedule, settings.recompute)
        numbers = stage_numbers(settings.schedule, meshes.coordinate("pp"), layout.pp)
        stages = layout.pp * SCHEDULES[settings.schedule][1]
    parts = []
    for number in numbers:
        torch.manual_seed(settings.seed)  # the same first weights on every rank and for every layout
        with torch.device("meta" if large else world.device):
            part = build()
        plan = read_plan(part, anatomy.tensor_plan or {}) if layout.tp > 1 else None
        if context is not None:
            context.apply(part)
        if stages > 1:
            part = cut(part, number, stages, spread, anatomy.first, anatomy.last)
        part = parallelize(
            part,
            meshes,
            device=world.device,
            precision=precision,
            blocks=anatomy.blocks,
            recomputed=anatomy.blocks or anatomy.stages,
            tensor_plan=plan,
            recompute=settings.recompute,
            compile=settings.compile,
            sharding=Sharding(smallest=settings.smallest, offload=settings.offload, prefetch=settings.prefetch),
            hook=settings.hook,
        )
        home = torch.device("cpu") if settings.offload else world.device
        if large and source is not None:
            materialize(part, home)
        elif large:
            init_sharded(part, world.device, home)
        if source is not None:
            words = load([part], source, must_have=large)
            if world.lead:
                print(f"weights: {words}", flush=True)
        parts.append(part)
    seed_generators(settings.seed + 1 + world.rank)  # from here on each rank draws its own: its tokens are its own
    updates = optimizer([p for part in parts for p in part.parameters()])
    pipe, pipeline = meshes.one("pp"), None
    if pipe is not None:
        summed: Callable[[Any, Tensor], Tensor] = lambda output, target: full_tensor(cross_entropy_sum(output, target))  # noqa: E731
        pipeline = Pipeline(parts, pipe, world.device, settings.schedule, settings.accumulate, summed)
    share = context.share_pair if context is not None else None
    step = Step(parts, updates, loss, meshes, precision, world.device, settings.clip or None, pipeline, share)
    checkpoints = None
    if settings.checkpoint:
        agreed = (lambda: shared(parts, meshes)) if shared is not None else None
        others = {"step": step}
        checkpoints = Checkpoints(
            settings.checkpoint, parts, updates, settings.keep, others, agreed, rank_state=step.rank_state()
        )
    return Assembly(world, meshes, precision, parts, step, checkpoints)


def adamw(settings: Settings, meshes: Meshes) -> Callable[[Sequence[Tensor]], torch.optim.Optimizer]:
    """AdamW, as the precision wants it; matrices decay, vectors (norms, biases) do not."""

    def make(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        groups: List[Dict[str, Any]] = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if settings.precision in ("bf16-master", "fp8") and not shards(meshes):
            return MasterAdamW(groups, lr=settings.lr)
        return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=not settings.offload)

    return make


def plan_for(settings: Settings, lr: Callable[[int], float], unit: str) -> Plan:
    profile = Profile.parse(settings.profile) if settings.profile else Profile()
    sinks = [text for text in settings.figures.split(",") if text]
    return Plan(
        steps=settings.steps,
        lr=lr,
        report_every=settings.report_every,
        validate_every=settings.validate_every,
        save_every=settings.save_every,
        stop_after=settings.stop_after,
        on_nan=settings.on_nan,
        unit=unit,
        watch_communication=settings.watch_communication,
        profile=profile,
        sinks=sinks,
        deterministic=settings.deterministic,
    )


def warmup_then_decay(settings: Settings, down_from: float = 0.7) -> Callable[[int], float]:
    """Up over `warmup` steps, level, then straight down over the last 30 %."""

    def lr(step: int) -> float:
        up = (step + 1) / max(1, settings.warmup)
        down = (settings.steps - step) / max(1.0, (1 - down_from) * settings.steps)
        return settings.lr * min(1.0, up, down)

    return lr
