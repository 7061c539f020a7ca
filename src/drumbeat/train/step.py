"""One optimizer step: micro-batches forward and backward, one reduction of gradients, clip, agree, update.

The loss of a step is the sum of all losses on all ranks divided by the number of all targets on all ranks, so neither
the number of ranks, nor of micro-batches, nor an uneven share of padding changes what is computed.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Callable, ContextManager, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm
from torch.profiler import record_function

from drumbeat.train.layers.cross_entropy import IGNORE
from drumbeat.train.optim import MasterAdamW
from drumbeat.train.parallel import hooks
from drumbeat.train.parallel.meshes import Meshes
from drumbeat.train.parallel.parallelize import shards
from drumbeat.train.parallel.pipeline import Pipeline
from drumbeat.train.parallel.replicas import Equality, add_gradients, summed_gradients
from drumbeat.train.precision import Precision, fsdp_casts
from drumbeat.train.refusal import Refusal

Batch = Tuple[Any, Tensor]  # inputs, and targets or their number
Loss = Callable[[nn.Module, Any, Tensor], Tensor]  # the *sum* of the losses


class Outcome(NamedTuple):
    """Result of a step as tensors on the device: reading one makes the host wait."""

    loss: Tensor  # this rank's share of the step's loss; the shares of all ranks add up to it
    norm: Tensor  # of the gradients, over all ranks, before clipping
    targets: Tensor  # on all ranks


class Step:
    def __init__(
        self,
        parts: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        meshes: Meshes,
        precision: Precision,
        device: torch.device,
        clip: Optional[float] = None,
        pipeline: Optional[Pipeline] = None,
        share: Optional[Callable[[Any], Any]] = None,
        count: Optional[Callable[[Any], Tensor]] = None,
        compare_every: int = 1000,
    ) -> None:
        """`share`: context parallelism: this rank's part of a batch. `count`: how many of a batch's targets count; by
        default those that are not -100. `compare_every`: steps between comparisons of replicas (parallel/replicas.py)."""
        self.parts, self.optimizer, self.loss, self.meshes = list(parts), optimizer, loss, meshes
        self.precision, self.device, self.clip, self.pipeline = precision, device, clip, pipeline
        if meshes.layout.pp > 1 and pipeline is None:
            what = "layout pp: this step has no pipeline, so every rank would train the whole model"
            raise Refusal(what, "use train.setup, which cuts the model into stages, or another layout")
        self.sharded = shards(meshes)
        self.cast_by_fsdp = self.sharded and all(fsdp_casts(part) for part in parts)
        self.scaler = precision.scaler(device)
        self.parameters = [p for part in parts for p in part.parameters()]
        _start_momentum(optimizer)
        self.skipped = torch.zeros((), device=device)  # steps left out because of a NaN or inf, the same on all ranks
        self.rescaled = torch.zeros((), device=device)  # fp16: steps left out because the loss was scaled too far
        self.hook = hooks.registered(self.parts[0])
        self.equality = Equality(self.parts, meshes, compare_every)
        self.summed = summed_gradients(self.parts)
        self.share: Callable[[Any], Any] = share or (lambda batch: batch)
        self.count: Callable[[Any], Tensor] = count or (lambda targets: (targets != IGNORE).sum())

    def __call__(self, batches: Sequence[Batch], mark: Callable[[str], None] = lambda phase: None) -> Outcome:
        """`mark(phase)` is called when a phase is over: "agree", "forward+backward", with DDP "waiting" for the gradients of
        the other ranks, and "optimizer"."""
        compared = self.equality.next_step()
        if compared:
            self.equality.batches(batches)
        batches = [self.share(batch) for batch in batches]
        targets = self._count(batches)
        waits = self.hook is not None and self.hook.powersgd is None  # PowerSGD waits in between, too
        if self.meshes.tokens is not None:
            mark("agree")
        if self.hook is not None and waits:
            self.hook.on_last_bucket = lambda: mark("forward+backward")
        with ExitStack() as stack:
            if self.equality.first:
                stack.enter_context(refuse_unused(self.parts[0]))
            if self.equality.first and self.meshes.layout.tp > 1:
                stack.enter_context(refuse_whole_sizes())
            loss = self._pipelined(batches, targets) if self.pipeline else self._accumulated(batches, targets)
        mark("waiting" if waits else "forward+backward")
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        with record_function("optimizer"):
            self.complete_gradients()
            if compared and self.equality.first:
                self.equality.gradients(self.summed)
            norm = gradient_norm(self.parameters, self.meshes)
            self._update(norm)
            if compared:
                self.equality.weights()
        self.optimizer.zero_grad(set_to_none=True)
        mark("optimizer")
        return Outcome(loss, norm, targets)

    def complete_gradients(self) -> None:
        """Add up gradients of which each tensor-parallel rank has a part."""
        tp = self.meshes.one("tp")
        if tp is not None:
            reduce_partial_gradients(self.parameters)
            add_gradients(self.summed, tp)

    def state_dict(self) -> Dict[str, Any]:
        state: Dict[str, Any] = {"skipped": self.skipped.clone(), "rescaled": self.rescaled.clone()}
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        if self.hook is not None and self.hook.powersgd is not None:
            state["powersgd"] = self.hook.powersgd.state_dict()
        return state

    def rank_state(self) -> Dict[str, Tensor]:
        """Return the live tensors of the state that each rank has for itself: the errors that PowerSGD has not sent yet."""
        return {} if self.hook is None or self.hook.powersgd is None else self.hook.powersgd.errors

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        self.skipped.copy_(state["skipped"])
        self.rescaled.copy_(state["rescaled"])
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])
        if self.hook is not None and self.hook.powersgd is not None and "powersgd" in state:
            self.hook.powersgd.load_state_dict(state["powersgd"])

    def _count(self, batches: Sequence[Batch]) -> Tensor:
        count = torch.stack([self.count(targets) for _, targets in batches]).sum().float()
        ranks = self.meshes.tokens
        if ranks is not None:
            dist.all_reduce(count, group=ranks.get_group())
        return count.clamp(min=1)

    def _accumulated(self, batches: Sequence[Batch], divisor: Tensor) -> Tensor:
        model = self.parts[0]
        total = torch.zeros((), device=self.device)
        for i, (inputs, targets) in enumerate(batches):
            last = i == len(batches) - 1
            # DDP and FSDP decide in the *forward* pass what the backward pass will send, so the choice comes first.
            with ExitStack() as stack:
                stack.enter_context(gradient_sync(model, last, self.meshes))
                stack.enter_context(loss_parallelism(self.meshes))
                with record_function("forward"), self.precision.autocast(self.device, self.cast_by_fsdp):
                    loss = full_tensor(self.loss(model, inputs, targets)) / divisor
                with record_function("backward"):
                    (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total += loss.detach()
        return total

    def _pipelined(self, batches: Sequence[Batch], divisor: Tensor) -> Tensor:
        assert self.pipeline is not None
        with self.precision.autocast(self.device, self.cast_by_fsdp), loss_parallelism(self.meshes):
            losses = self.pipeline.run(batches, self.loss, divisor)
        if self.meshes.tokens is not None and not self.sharded:
            add_gradients(self.parameters, self.meshes.tokens)
        shares = [full_tensor(x.detach()) for x in losses]
        return torch.stack(shares).sum() if shares else torch.zeros((), device=self.device)

    def _update(self, norm: Tensor) -> None:
        """Clip and step, or leave the step out if the gradients are not finite.

        The norm is a sum over all ranks, so all ranks see the same value and decide the same. Where the optimizer can,
        the decision stays on the device and the host never waits for it.
        """
        finite = torch.isfinite(norm)
        if self.scaler is None:
            self.skipped += ~finite
        divisor = (norm / self.clip).clamp(min=1.0) if self.clip else torch.ones_like(norm)
        if isinstance(self.optimizer, MasterAdamW):
            self.optimizer.step(scale=divisor, skip=(~finite).float())
        elif self.scaler is not None:
            _divide_gradients(self.parameters, divisor)
            self.scaler.step(self.optimizer)  # leaves the step out by itself
            self.scaler.update()
            # A loss that was scaled too far overflows fp16: the scaler halves its scale and no number was wrong. Gradients
            # that are not finite even unscaled are.
            (self.skipped if self.scaler.get_scale() < 1 else self.rescaled).add_(~finite)
        elif _decides_on_device(self.optimizer):
            self.optimizer.grad_scale, self.optimizer.found_inf = divisor, (~finite).float()  # type: ignore[attr-defined]
            self.optimizer.step()
            del self.optimizer.grad_scale, self.optimizer.found_inf  # type: ignore[attr-defined]
        elif bool(finite):  # the host waits here
            _divide_gradients(self.parameters, divisor)
            self.optimizer.step()


def gradient_sync(model: nn.Module, last: bool, meshes: Meshes) -> ContextManager[Any]:
    """Return a context in which gradients are sent with the last micro-batch only. With replicas of shards (HSDP) they are
    scattered inside the node each time, which keeps them small, and only the shards wait for the last micro-batch to cross
    between nodes."""
    if isinstance(model, FSDPModule):
        replicated = meshes.layout.dp_replicate > 1
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last or replicated)
        model.set_requires_all_reduce(last)
    elif isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()


@contextmanager
def refuse_unused(model: nn.Module) -> Iterator[None]:
    """Refuse parameters without a gradient under DDP: it sends full buckets only, so neighbours would stay unsent silently."""
    missing: Dict[Tensor, str] = {}
    if isinstance(model, DistributedDataParallel):
        missing = {p: name for name, p in model.module.named_parameters() if p.requires_grad}

    def arrived(parameter: Tensor) -> None:
        missing.pop(parameter, None)

    hooks = [parameter.register_post_accumulate_grad_hook(arrived) for parameter in missing]
    yield
    for hook in hooks:
        hook.remove()
    if missing:
        names = list(missing.values())
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        what = f"{names[0]}{more} had no part in the loss: with ddp every parameter needs a gradient in every step"
        raise Refusal(what, "freeze what is not used (requires_grad_(False)), or use layout fsdp")


@contextmanager
def refuse_whole_sizes() -> Iterator[None]:
    """Turn an error about tensor sizes into a Refusal that names the plan: the model's code may use unsharded sizes."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, Refusal):
            raise
        line = (str(error).splitlines() or [""])[0]
        raise Refusal(
            f"the first step with this tensor-parallel plan failed: {type(error).__name__}: {line}",
            "a layer cut colwise returns this rank's columns only: let the model's code find sizes (view(..., -1, head_width)), "
            "or plan 'colwise_gather_output' and 'rowwise_split_input' where it counts on whole ones (q, k and v in one layer)",
        ) from error


def loss_parallelism(meshes: Meshes) -> ContextManager[Any]:
    """Return the context for a loss over logits that tensor parallelism leaves sharded along the vocabulary, forward and
    backward."""
    return loss_parallel() if meshes.layout.tp > 1 else nullcontext()


def full_tensor(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def reduce_partial_gradients(parameters: Sequence[Tensor]) -> None:
    """Under sequence parallelism a rank's gradient of a norm's weight is its own tokens' share only; FSDP adds the shares up
    while it reduces, without it they are added here. A norm of unfinished sums would be wrong."""
    for p in parameters:
        if isinstance(p, DTensor) and isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
            p.grad = p.grad.redistribute(placements=p.placements)


_PIECE = 1 << 14


def gradient_norm(parameters: Sequence[Tensor], meshes: Meshes) -> Tensor:
    """Return the norm of all gradients of the model, the same number on every rank.

    Each rank squares its part, divided by the number of ranks that hold the same part; one sum over all ranks completes the norm.
    So it does not matter how a parameter is sharded, or whether two parameters are sharded alike.
    """
    groups: Dict[int, List[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            pieces = 1
            if isinstance(p.grad, DTensor):
                cuts = zip(p.grad.placements, p.grad.device_mesh.shape)
                pieces = math.prod(size for placement, size in cuts if not placement.is_replicate())
            own = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            # On a CPU torch adds squares one after the other: of a million, in another order, the sixth digit is another one.
            groups.setdefault(pieces, []).extend(own.flatten().split(_PIECE) if own.is_cpu else [own])
    ranks = meshes.layout.ranks // meshes.layout.pp
    squares = [get_total_norm(grads).float() ** 2 * (pieces / ranks) for pieces, grads in groups.items()]
    total = torch.stack(squares).sum()
    if meshes.layout.pp > 1 or set(groups) != {1}:
        dist.all_reduce(total)
    else:
        total *= ranks  # every rank holds the same, whole: DDP, or one device
    return total.sqrt()


def _divide_gradients(parameters: Sequence[Tensor], by: Tensor) -> None:
    for p in parameters:
        if p.grad is not None:
            (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).div_(by)


def _start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """torch's fused SGD takes uninitialised memory for its momentum in the first step, and where that step is left out the
    memory stays as it was. Zeros give the same first step."""
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else []:
        for p in group["params"]:
            if group["fused"] and group["momentum"] and not optimizer.state[p]:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


def _decides_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return true if the optimizer takes a divisor and a skip flag as tensors: torch's fused ones do, without DTensors."""
    groups = optimizer.param_groups
    return all(g.get("fused") and not any(isinstance(p, DTensor) for p in g["params"]) for g in groups)
