"""`train.setup`: a model and an optimizer of the user's own, made to run on any number of ranks."""

from __future__ import annotations

import hashlib
import inspect
from typing import Any, Dict, List, Optional, Sequence, Union

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import SequenceParallel
from torch.nn.parallel import DistributedDataParallel

from drumbeat.train.checkpoint.checkpoints import first_line
from drumbeat.train.hugging_face import Attention, Contexts, FusedLoss, fast_attention, segments_of, without_cache
from drumbeat.train.judge import Judge
from drumbeat.train.optim import AdamW8, MasterAdamW, OffloadedAdamW
from drumbeat.train.parallel import Layout
from drumbeat.train.parallel.meshes import Meshes, gathered
from drumbeat.train.parallel.parallelize import Plan, Sharding, find_blocks, parallelize, read_plan, shards
from drumbeat.train.parallel.pipeline import INNER, Pipeline, make_stages, refuse_for_pipelines
from drumbeat.train.parallel.uncut import Uncut
from drumbeat.train.precision import WITH_MASTERS, Precision
from drumbeat.train.refusal import Refusal
from drumbeat.train.safetensors import Tensors
from drumbeat.train.trainer import StepSettings, Trainer
from drumbeat.train.weights import Source, init_sharded, load, materialize
from drumbeat.train.world import join

_WRAPPER = "_checkpoint_wrapped_module."  # recomputation puts this into names


def setup(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    layout: str = "ddp",
    precision: str = "fp32",
    scheduler: Any = None,
    clip: float = 0.0,
    accumulate: int = 1,
    seed: int = 0,
    plan: Optional[Plan] = None,
    blocks: Optional[str] = None,
    stages: Sequence[str] = (),
    recompute: str = "none",
    compile: bool = False,
    offload: bool = False,
    smallest: int = 100_000,
    prefetch: int = 1,
    hook: str = "all-reduce",
    ema: float = 0.0,
    profile: str = "",
    compare_every: int = 1000,
    check_plan: bool = True,
    on_nan: str = "skip",
    on_spike: str = "warn",
    weights: Union[str, Source] = "",
    schedule: str = "1f1b",
    context: str = "auto",
) -> Trainer:
    """Join the ranks that the launcher started and prepare model and optimizer for `layout` and `precision`.

    Every rank starts from rank 0's weights, whatever its own seed was. The optimizer is kept, with its groups; it must
    not have made a step yet. `plan` is for tensor parallelism: module names (with *) and "colwise", "rowwise", another of
    transformers' words or one of torch's parallel styles; transformers' models bring one. `blocks` names the list of
    repeated blocks; without it the largest list of modules of one kind is taken; "": none, so that FSDP cuts modules of
    `smallest` parameters and the model is compiled whole. `stages`: lists whose children a pipeline spreads and
    `recompute` wraps, where they are not the blocks. `scheduler` steps with the optimizer and is saved with it
    (ReduceLROnPlateau is saved; it wants a figure, so its steps are yours); a function of the step gives the factor of each
    group's learning rate (optim.py). `ema`: keep a running mean of the weights, with this share of the old one per step
    (`with trainer.averaged():`). `compare_every`: steps between comparisons of what replicas must hold alike; the
    first steps are always compared. `check_plan`: before the first step of tp, refuse a plan with which one sample's gradients
    are not those of the uncut model. `on_nan` (skip, stop) and `on_spike` (warn, stop): what `trainer.report` does about losses
    that are not finite or jump. `weights`: a folder of safetensors to start from, of which each rank reads its own part;
    the model may be built inside `train.on_meta()`, without memory, or on the meta device if it has `init_parameter(name, out)`.
    `schedule`: pp: gpipe, 1f1b, interleaved, zero-bubble or zbv, with `accumulate` micro-batches.
    `context`: cp: ulysses, ring or auto. docs/train/own-loop.md has examples.
    """
    alone_before = not dist.is_initialized()
    world = join()
    degrees = Layout.parse(layout, world.local_size).for_world(world.size)
    _refuse(degrees, model, optimizer, accumulate)
    if degrees.tp > 1 and hasattr(model, "drumbeat_lora"):
        raise Refusal("tensor parallelism of a model with LoRA is not built", "use ddp, fsdp, hsdp or pp")
    if degrees.pp > 1:
        refuse_for_pipelines(precision, schedule, recompute)
    empty = any(p.is_meta for p in model.parameters())
    _refuse_empty(model, weights) if empty else None
    if isinstance(weights, str) and weights:
        tensors = Tensors(weights)
        weights = Source(tensors, segments_of(model, tensors))
    meshes, kind = Meshes(degrees, world.device.type), Precision(precision)
    judge = Judge(on_nan, on_spike)
    uncut = _uncut(model, degrees, world.lead) if check_plan and degrees.tp > 1 else None
    without_cache(model)
    split = meshes.one("cp")
    contexts = None if split is None else Contexts(model, split, context, degrees.tp)
    if contexts is None and fast_attention(model, world.device):
        Attention(model, None)
    fused = FusedLoss.of(model) if degrees.tp == 1 and degrees.pp == 1 else None
    names = {id(p): name for name, p in model.named_parameters()}
    whole = not (shards(meshes) or degrees.tp > 1 or degrees.pp > 1)
    if not empty:
        model.to(world.device)
        same_weights(model)
    elif whole:
        materialize(model, world.device)
    holder = find_blocks(model) if blocks is None else blocks
    spread = list(stages) or ([holder] if holder else [])
    styles = read_plan(model, plan) if degrees.tp > 1 else {}
    pipe = meshes.one("pp")
    own: List[nn.Module] = [model] if pipe is None else make_stages(model, spread, schedule, pipe)
    prefix = "" if pipe is None else f"{INNER}."
    prepared = [
        parallelize(
            part,
            meshes,
            device=world.device,
            precision=kind,
            blocks=prefix + holder if holder else "",
            recomputed=[prefix + name for name in spread],
            tensor_plan={prefix + name: style for name, style in styles.items()},
            recompute=recompute,
            compile=compile,
            sharding=Sharding(smallest, offload=offload, prefetch=prefetch),
            hook=hook,
        )
        for part in own
    ]
    parts = prepared if pipe is None else [part.get_submodule(INNER) for part in prepared]
    if empty and not whole:
        for part in prepared:
            materialize(part, "cpu" if offload else world.device)
    if empty and not weights:
        for part in parts:
            init_sharded(part, model.init_parameter, world.device)  # type: ignore[arg-type]
    if isinstance(weights, Source):
        words = load(parts, weights, must_have=empty)
        if world.lead:
            print(f"weights: {words}", flush=True)
    rebind(optimizer, names, parts)
    if precision in WITH_MASTERS and not shards(meshes):
        optimizer = with_masters(optimizer, precision)
    # Dropout: other numbers for other samples. Tensor-parallel ranks hold the same activations, unless their sequence is cut.
    alike = 1 if any(isinstance(style, SequenceParallel) for style in styles.values()) else degrees.tp
    torch.manual_seed(torch.initial_seed() + 1 + world.rank // alike)
    pipeline = None if pipe is None else Pipeline(prepared, pipe, world.device, schedule, accumulate)
    if not 0 <= ema < 1:
        raise Refusal(f"ema={ema}", "the share of the old mean that each step keeps, such as 0.999; 0: no mean")
    step = StepSettings(clip or None, accumulate, compare_every, pipeline, contexts, fused, ema, uncut, judge)
    folder = weights.tensors.path if isinstance(weights, Source) else ""
    return Trainer(world, meshes, kind, parts, optimizer, scheduler, step, seed, profile, folder, alone_before)


def _uncut(model: nn.Module, layout: Layout, lead: bool) -> Optional[Uncut]:
    why = "with pp, cp or ep" if layout.pp * layout.cp * layout.ep > 1 else ""
    try:
        return None if why else Uncut(model)
    except Exception as error:  # whatever a model's own code does when it is copied
        why = f"it cannot be copied ({first_line(error)})"
    finally:
        if why and lead:
            print(f"plan not compared with the uncut model: {why}", flush=True)
    return None


def _refuse(layout: Layout, model: nn.Module, optimizer: torch.optim.Optimizer, accumulate: int) -> None:
    if accumulate < 1:
        raise Refusal(f"accumulate={accumulate}", "1 or more micro-batches per step")
    if optimizer.state:
        what = "the optimizer has made steps already"
        raise Refusal(what, "call setup before the first one, and trainer.load to resume")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        what = f"{type(optimizer).__name__} calls the model several times in each of its steps"
        raise Refusal(what, "use an optimizer of one step")
    known = {id(p) for p in model.parameters()}
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise Refusal("the optimizer holds a parameter that the model does not have", "make it from model.parameters()")


def _refuse_empty(model: nn.Module, weights: Any) -> None:
    if not weights and not hasattr(model, "init_parameter"):
        what = "the model has no weights: it was built on the meta device"
        raise Refusal(what, "pass weights=FOLDER, or build it on the CPU")
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            what = f"{name}, a buffer, has no values: it was built on the meta device"
            raise Refusal(what, "build the model inside `with train.on_meta():`, which leaves buffers alone")


@torch.no_grad()
def same_weights(model: nn.Module) -> None:
    """Copy rank 0's parameters and buffers to every rank: each may have drawn its own."""
    if not dist.is_initialized():
        return
    tensors: Dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    text = "\n".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors.items())
    if len(set(gathered(hashlib.sha256(text.encode()).hexdigest()))) > 1:
        raise Refusal("the ranks built different models", "names, shapes and types of all parameters must be the same")
    for tensor in tensors.values():
        raw = tensor.detach().contiguous().flatten().view(torch.uint8)  # bytes: not every backend sends every type
        dist.broadcast(raw, src=0)
        if raw.data_ptr() != tensor.data_ptr():  # a copy in row order
            tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))


def rebind(optimizer: torch.optim.Optimizer, names: Dict[int, str], parts: Sequence[nn.Module]) -> None:
    """Make the optimizer update the parameters that sharding and slicing put in place of others of the same name. A pipeline
    stage has only some of them."""
    now: Dict[str, Tensor] = {}
    for part in parts:
        model = part.module if isinstance(part, DistributedDataParallel) else part
        now.update({name.replace(_WRAPPER, ""): p for name, p in model.named_parameters(remove_duplicate=False)})
    for group in optimizer.param_groups:
        group["params"] = [now[names[id(p)]] for p in group["params"] if names[id(p)] in now]
        kinds = {p.device_mesh if isinstance(p, DTensor) else None for p in group["params"]}
        if len(kinds) > 1:
            group["foreach"] = group["fused"] = False  # torch cannot update parameters of several meshes in one call
        if kinds != {None} and isinstance(optimizer, torch.optim.SGD):
            group["fused"] = False  # torch has no such kernel for shards


def with_masters(optimizer: torch.optim.Optimizer, precision: str) -> torch.optim.Optimizer:
    """Return an optimizer with fp32 masters that has the same groups, so that a scheduler made for the given optimizer drives it
    too."""
    if isinstance(optimizer, (AdamW8, OffloadedAdamW)):
        return optimizer  # it keeps masters itself
    if type(optimizer) is not torch.optim.AdamW or any(group["amsgrad"] for group in optimizer.param_groups):
        what = f"precision {precision} keeps fp32 copies of the weights in the optimizer, which is built for AdamW"
        raise Refusal(what, "use torch.optim.AdamW, or precision bf16")
    return MasterAdamW(optimizer.param_groups)
