"""Turn a plain model into one that runs on many ranks. The model's code knows nothing of it.

    model = parallelize(model, meshes, blocks="blocks", precision=Precision("bf16"), compile=True)

The order matters:
1. tensor and expert parallelism first: they exchange parameters for slices, and everything later must see the slices;
2. activation checkpointing next: recomputation must contain the tensor-parallel communication, not wrap around nothing;
3. compile each block: after recomputation, so the compiler sees it and can choose; before sharding, so that the hooks
   which gather parameters stay outside the graph (`module.compile()`: a reassigned OptimizedModule would skip them);
4. FSDP or DDP last: it is the outermost layer, it moves finished parameters and gradients.

Expert parallelism divides the experts of each layer between ranks that hold different tokens, and tokens travel to them. Ranks of
`ep` take samples of their own; those of `tp` have parts of the same sequences. Both hold other tokens, so both hold other
experts. All other parameters are shared between them as in FSDP.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import inspect
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ContextManager, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import nn

# No public name: torch.utils.checkpoint takes functions only, and torch's state dicts leave this module out of their names.
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from drumbeat.train.layers.attention import FLASH4
from drumbeat.train.layers.batch_norm import BATCH_NORMS
from drumbeat.train.layers.feed_forward import Experts, Mixture, mix
from drumbeat.train.parallel import hooks
from drumbeat.train.parallel.context import RING_ATTENTION
from drumbeat.train.parallel.meshes import Meshes
from drumbeat.train.parallel.replicas import SUMMED
from drumbeat.train.precision import Precision
from drumbeat.train.refusal import Refusal

_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"

RECOMPUTE = ("none", "selective", "lean", "full")


@dataclass(frozen=True)
class Sharding:
    """Way in which FSDP shards a model."""

    smallest: int = 100_000  # parameters; without named blocks, a module this large becomes its own unit
    keep_after_forward: Optional[bool] = None  # None: torch's choice (free inside, keep at the root)
    offload: bool = False  # shards, gradients and optimizer live in CPU memory
    prefetch: int = 1  # how many blocks ahead parameters are gathered


def parallelize(
    model: nn.Module,
    meshes: Meshes,
    *,
    device: torch.device,
    precision: Precision,
    blocks: str = "",
    recomputed: Sequence[str] = (),
    tensor_plan: Optional[Dict[str, ParallelStyle]] = None,
    recompute: str = "none",
    compile: bool = False,
    sharding: Optional[Sharding] = None,
    hook: str = "all-reduce",
) -> nn.Module:
    """Prepare a model. `blocks` names the module whose children are the model's repeated blocks; without it size chooses
    the units. `recomputed`: the modules whose children `recompute` wraps; without it those of `blocks`.
    """
    layout = meshes.layout
    sharded = shards(meshes)
    precision.check(device, sharded, layout.tp > 1)
    if layout.tp > 1:
        apply_tensor_plan(model, meshes, tensor_plan or {})
    apply_expert_parallelism(model, meshes)
    precision.prepare(model, sharded, blocks)
    if sharding is not None and sharding.offload and not sharded:
        what = "offload: only shards can live in CPU memory, and this layout has none"
        raise Refusal(what, "use fsdp, or leave it out")
    apply_recompute(model, [pair for name in recomputed or [blocks] for pair in block_list(model, name)], recompute)
    repeated = block_list(model, blocks)
    if compile:
        for _, block in repeated or [("", model)]:
            block.compile()
    if sharded:
        if hook != "all-reduce":
            raise Refusal(f"communication hook {hook}: hooks belong to DDP, and this layout shards", "use layout ddp")
        return apply_fsdp(model, meshes, precision, blocks, sharding or Sharding())
    return apply_ddp(model, meshes, device, hook)


def shards(meshes: Meshes) -> bool:
    """Return true if FSDP2 is used: for shards, and for replicas under tensor parallelism with a shard dimension of 1, because
    DDP does not accept DTensors. DDP handles other replicas; those of a pipeline add their gradients themselves (replicas.py)."""
    layout = meshes.layout
    copies = layout.dp_replicate > 1 or layout.cp > 1
    return layout.dp_shard > 1 or layout.ep > 1 or (copies and layout.tp > 1 and layout.pp == 1)


def block_list(model: nn.Module, blocks: str) -> List[Tuple[str, nn.Module]]:
    if not blocks:
        return []
    try:
        holder = model.get_submodule(blocks)
    except AttributeError:
        raise Refusal(f"the model has no module '{blocks}'", "name the module that holds its blocks") from None
    return [pair for pair in _callable_children(holder) if any(True for _ in pair[1].parameters())]


def _callable_children(holder: nn.Module) -> Iterator[Tuple[str, nn.Module]]:
    """Yield the blocks; a block may be a plain list of layers that the model calls one by one: then each layer is a block."""
    for name, block in holder.named_children():
        if isinstance(block, (nn.ModuleList, nn.ModuleDict)):
            yield from _callable_children(block)
        else:
            yield name, block


def find_blocks(model: nn.Module) -> str:
    """Return the name of the list with the most parameters whose children are all of one kind: a transformer's
    layers. "": none."""
    best, most = "", 0
    for name, module in model.named_modules():
        children = list(module.children())
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and len(children) > 1:
            size = sum(p.numel() for p in module.parameters())
            if len({type(child) for child in children}) == 1 and size > most:
                best, most = name, size
    return best


# Selective recomputation keeps the results of products and attention (expensive) and recomputes the rest (cheap). The lean one
# also computes a product again that is more than twice as wide as its input, as a feed-forward's gates are: the most memory.
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default, torch.ops.aten._grouped_mm.default}
_EXPENSIVE = {
    *_PRODUCTS,
    RING_ATTENTION,
    FLASH4,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _choose(lean: bool, _context: Any, operation: Any, *args: Any, **_more: Any) -> CheckpointPolicy:
    again = lean and operation in _PRODUCTS and args[1].shape[-1] > 2 * args[1].shape[-2]
    return CheckpointPolicy.MUST_SAVE if operation in _EXPENSIVE and not again else CheckpointPolicy.PREFER_RECOMPUTE


def apply_recompute(model: nn.Module, repeated: Sequence[Tuple[str, nn.Module]], how: str) -> None:
    if how not in RECOMPUTE:
        raise Refusal(f"recompute '{how}' is unknown", f"known: {', '.join(RECOMPUTE)}")
    if how == "none":
        return
    if not repeated:
        raise Refusal("recompute needs named blocks: it trades a block's activations for its second forward pass")
    parents = {id(block): parent for parent in model.modules() for block in parent.children()}
    for name, block in repeated:
        more: Dict[str, Any] = {}
        if how != "full":
            policy = functools.partial(_choose, how == "lean")
            more = {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)}
        if any(isinstance(module, BATCH_NORMS) for module in block.modules()):
            if how != "full":
                raise Refusal("selective recomputation of blocks with batch norm is not built", "use recompute=full")
            more = {"context_fn": functools.partial(_statistics_once, block)}
        parents[id(block)].register_module(name, checkpoint_wrapper(block, preserve_rng_state=True, **more))


def _statistics_once(block: nn.Module) -> Tuple[ContextManager[None], ContextManager[None]]:
    """Return contexts for the forward pass and for its recomputation: running means must not count the same images twice."""
    return nullcontext(), _kept_buffers(block)


@contextmanager
def _kept_buffers(block: nn.Module) -> Iterator[None]:
    before = [buffer.clone() for buffer in block.buffers()]
    try:
        yield
    finally:
        for buffer, kept in zip(block.buffers(), before):
            buffer.copy_(kept)


def apply_fsdp(model: nn.Module, meshes: Meshes, precision: Precision, blocks: str, how: Sharding) -> nn.Module:
    keep = how.keep_after_forward
    if meshes.layout.pp > 1 and keep is None:
        # Gathered once per step, not once per micro-batch; and a split backward pass (zero-bubble) looks for whole parameters.
        keep = True
    offload = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available()) if how.offload else OffloadPolicy()
    options: Dict[str, Any] = {
        "mesh": meshes.sharding(),
        "mp_policy": precision.sharded_policy(model),
        "offload_policy": offload,
        "reshard_after_forward": None if keep is None else not keep,
    }
    experts, apart = cut_experts(model), meshes.sharding("dp_shard", "cp")
    if apart is None:  # every rank has its own, and they have seen all of their tokens
        options["ignored_params"] = {p for module in experts for p in module.parameters()}
    for module in experts if apart is not None else ():
        ranks, sizes = apart.size(-1), sorted({p.shape[1] for p in module.parameters()})  # type: ignore[union-attr]
        if any(size % ranks for size in sizes):
            what = (
                f"an expert's matrices of {' and '.join(map(str, sizes))} rows cannot be divided between {ranks} ranks"
            )
            raise Refusal(what, "choose degrees of dp_shard and cp whose product divides them")
        fully_shard(module, **{**options, "mesh": apart}, shard_placement_fn=lambda _: Shard(1))
    units = [block for _, block in block_list(model, blocks)] if blocks else large_modules(model, how.smallest)
    for unit in units:
        fully_shard(unit, **options)
    fully_shard(model, **options)
    for unit, following in zip(units, [units[i + 1 : i + 1 + how.prefetch] for i in range(len(units))]):
        assert isinstance(unit, FSDPModule)
        unit.set_modules_to_forward_prefetch([m for m in following if isinstance(m, FSDPModule)])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided by the number of samples of all ranks, so gradients are added, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot divide while it adds
    return model


def large_modules(model: nn.Module, smallest: int) -> List[nn.Module]:
    """Return the deepest modules with at least `smallest` parameters of their own that no smaller unit has taken. A parameter
    that two modules share must stay whole in one unit, so neither of them becomes a unit without the other."""
    chosen: List[nn.Module] = []
    holders = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))

    def shares_outside(module: nn.Module) -> bool:
        inside = Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
        return any(holders[key] > count for key, count in inside.items())

    def walk(module: nn.Module) -> int:
        left = sum(p.numel() for p in module.parameters(recurse=False))
        left += sum(walk(child) for child in module.children())
        plain = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if left >= smallest and module is not model and plain and not shares_outside(module):
            chosen.append(module)
            return 0
        return left

    walk(model)
    return chosen


def apply_ddp(model: nn.Module, meshes: Meshes, device: torch.device, hook: str) -> nn.Module:
    group = meshes.tokens
    if group is None or meshes.layout.pp > 1:
        if hook != "all-reduce":
            why = (
                "hooks belong to DDP, this is a pipeline"
                if group is not None
                else "this layout has no data-parallel ranks"
            )
            raise Refusal(f"communication hook {hook}: {why}", "leave the hook out")
        return model
    wrapped = DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device],
        process_group=group.get_group(),
        gradient_as_bucket_view=True,  # the gradients are the buckets: no second copy of them
        # Running statistics are averaged where they are used, not sent in every step. torch 2.13 renamed the option.
        **{_BUFFERS: False},  # type: ignore[arg-type]
    )
    _choose_buckets(wrapped)
    hooks.register(wrapped, hook)
    return wrapped


def _choose_buckets(model: DistributedDataParallel) -> None:
    """Let DDP divide the gradients into buckets before the first step, not after it: the sums of three or more ranks depend on
    the division in their last bits, and a resumed run starts anew. Gradients of zero take the place of the first backward
    pass, in the usual order: last layer first."""
    parameters = [p for p in model.module.parameters() if p.requires_grad]
    model.reducer.prepare_for_backward([])
    for p in reversed(parameters):
        p.backward(torch.zeros_like(p))
    model.reducer._rebuild_buckets()
    for p in parameters:
        p.grad = None


_WEIGHTS = ("gate_up_proj", "down_proj")
_CUT = "_drumbeat_cut_experts"


def apply_expert_parallelism(model: nn.Module, meshes: Meshes) -> None:
    """Give each rank its experts: those of our own models, and of transformers', which hold them in the same way."""
    tp, cp = meshes.one("tp"), meshes.one("cp")
    for module in model.modules():
        if isinstance(module, Mixture):
            module.sequence = [(mesh.get_group(), mesh is tp) for mesh in (cp, tp) if mesh is not None]
            if module.sequence:  # ranks talk there, which the compiler leaves alone
                module.unevenness = torch.compiler.disable(module.unevenness)  # type: ignore[method-assign]
    found = [module for module in model.modules() if _holds_experts(module)]
    mesh = meshes.joined("ep", "tp")
    if meshes.layout.ep > 1 and not found:
        raise Refusal("layout ep: the model has no experts that can be divided", "use fsdp, or a model with experts")
    for module in found if mesh is not None else ():
        if meshes.layout.tp > 1 and not isinstance(module, Experts):
            what = "experts of transformers' models with tensor parallelism are not built"
            raise Refusal(what, "use ep, fsdp or both")
        count = len(getattr(module, _WEIGHTS[0]))
        if count % mesh.size():  # type: ignore[union-attr]
            raise Refusal(
                f"{count} experts cannot be divided between {mesh.size()} ranks",  # type: ignore[union-attr]
                "choose degrees of ep and tp whose product divides them",
            )
        for name in _WEIGHTS:
            whole: nn.Parameter = getattr(module, name)
            own = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(own, requires_grad=whole.requires_grad))
        setattr(module, _CUT, True)
        group = mesh.get_group()  # type: ignore[union-attr]
        module.forward = functools.partial(mix, module, group)  # type: ignore[method-assign]


def cut_experts(model: nn.Module) -> List[nn.Module]:
    return [module for module in model.modules() if getattr(module, _CUT, False)]


def _holds_experts(module: nn.Module) -> bool:
    """Return true for a module with experts without biases, whose gates and ups are two halves and whose weights are (experts,
    out, in)."""
    own = dict(module.named_parameters(recurse=False))
    plain = set(own) == set(_WEIGHTS) and all(p.ndim == 3 for p in own.values()) and hasattr(module, "_apply_gate")
    return plain and not getattr(module, "is_transposed", False) and getattr(module, "is_concatenated", True)


Plan = Mapping[str, Union[str, ParallelStyle]]


class SummedGradients(ParallelStyle):
    """Style for a module that stays whole but sees only this rank's heads or columns: its gradients are summed over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        setattr(module, SUMMED, True)
        return module


_SUMMED = "replicated_with_grad_allreduce"
_STYLES: Dict[str, Any] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    _SUMMED: SummedGradients,
}


def read_plan(model: nn.Module, plan: Optional[Plan]) -> Dict[str, ParallelStyle]:
    """Check a plan against a whole model; without one, take the plan that transformers' models bring. A pattern that matches
    nothing would leave a layer whole on every rank."""
    own: Plan = getattr(model, "tp_plan", None) or {}
    if plan is None:
        plan = own
    else:  # which gradients are parts is the model's to know, whoever cuts it
        plan = {**{name: style for name, style in own.items() if style == _SUMMED}, **plan}
    modules = dict(model.named_modules())
    styles = {}
    for pattern, style in plan.items():
        if isinstance(style, str) and style not in _STYLES:
            known = f"use another layout, or a plan of your own: {', '.join(_STYLES)} or a torch ParallelStyle"
            raise Refusal(f"plan: '{style}' for {pattern} is not built", known)
        styles[pattern] = _STYLES[style]() if isinstance(style, str) else style
        names = fnmatch.filter(modules, pattern)
        if not names:
            near = difflib.get_close_matches(pattern, [name for name in modules if name], 1, cutoff=0.0)
            raise Refusal(f"plan: no module is called '{pattern}'", f"the nearest is {near[0]}" if near else "")
        if isinstance(styles[pattern], (ColwiseParallel, RowwiseParallel)):
            for name in names:
                if not isinstance(modules[name], (nn.Linear, nn.Embedding)):
                    kind = type(modules[name]).__name__
                    what = f"plan: {name} is a {kind}"
                    raise Refusal(what, "only Linear and Embedding layers can be cut by columns or rows")
    return styles


def apply_tensor_plan(model: nn.Module, meshes: Meshes, plan: Mapping[str, ParallelStyle]) -> None:
    """Apply the plan. Patterns without a match are allowed, because a pipeline stage lacks some modules; read_plan refuses
    them."""
    if not plan:
        what = "tensor parallelism needs a plan that says which layer is cut how"
        raise Refusal(what, "pass plan, or use another layout")
    names = [name for name, module in model.named_modules() if any(True for _ in module.parameters())]
    used = {name: style for pattern, style in plan.items() for name in fnmatch.filter(names, pattern)}
    tied = tied_parameters(model)
    parallelize_module(model, meshes.one("tp"), used)
    if not any(isinstance(p, DTensor) for p in model.parameters()):
        raise Refusal("the plan cuts no parameter: every rank would train the whole model", "name the layers to cut")
    tie(model, tied)  # slicing made two parameters out of one


def tie(model: nn.Module, pairs: Sequence[Tuple[str, str]]) -> None:
    """Let the second of each pair of names be the first one's parameter."""
    for keep, other in pairs:
        module, _, name = other.rpartition(".")
        setattr(model.get_submodule(module), name, model.get_parameter(keep))


def tied_parameters(model: nn.Module) -> List[Tuple[str, str]]:
    seen: Dict[int, str] = {}
    pairs = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            pairs.append((seen[id(parameter)], name))
        seen.setdefault(id(parameter), name)
    return pairs
