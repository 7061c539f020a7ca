"""Pipeline parallelism for any model whose blocks follow each other, without a change to its code.

Every stage runs the model's own forward on the same batch. Blocks that it does not hold only hand on what they get, but for two:
the one before its own gives what the stage before has sent, and the one behind its own ends the pass. What lies before the blocks
is missing on later stages: there it gives NaN of the right shape, which the received tensor replaces. What reached the loss in
another way would show at once.

Plain model parallelism over two devices is a pipeline with one micro-batch.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from drumbeat.train.data.loaders import map_tensors, tensors_of
from drumbeat.train.layers.cross_entropy import IGNORE
from drumbeat.train.parallel.parallelize import tied_parameters
from drumbeat.train.refusal import Refusal

# name -> (class, stages per rank); more stages per rank: a smaller bubble, more communication
SCHEDULES: Dict[str, Tuple[Any, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "zero-bubble": (ScheduleInterleavedZeroBubble, 2),
    "zbv": (ScheduleZBVZeroBubble, 2),
}
_FORWARD = ("FORWARD", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")
SPLIT_BACKWARD = ("zero-bubble", "zbv")  # first the gradients that the stage before waits for, the weights' later


def refuse_for_pipelines(precision: str, schedule: str, recompute: str) -> None:
    if precision == "fp16":
        what = "pipeline with fp16: the schedule owns the backward pass, so the loss cannot be scaled"
        raise Refusal(what, "use bf16")
    if schedule in SPLIT_BACKWARD and recompute in ("selective", "lean"):
        raise Refusal(
            f"pipeline schedule {schedule} with {recompute} recomputation: torch recomputes such a block once, "
            "and a split backward pass asks for it twice",
            "use recompute=full or none, or schedule interleaved",
        )


def stage_numbers(schedule: str, rank: int, ranks: int) -> List[int]:
    """Return the stages that a rank holds: every ranks-th one, or there and back again (zbv: a V), so that the last stage
    stands on the first rank and its backward pass can start at once."""
    if schedule not in SCHEDULES:
        raise Refusal(f"pipeline schedule '{schedule}' is unknown", f"known: {', '.join(SCHEDULES)}")
    if schedule == "zbv":
        return [rank, 2 * ranks - 1 - rank]
    return [rank + i * ranks for i in range(SCHEDULES[schedule][1])]


INNER = "inner"
_CALLED = "let each block be one module that is called with the last one's output, or use another layout"
Piece = Tuple[Any, Tensor]  # a micro-batch, and how much of it counts
Weighted = Callable[[nn.Module, Any, Tensor], Tensor]
Between = Tuple[Tuple[int, ...], torch.dtype]


class _End(Exception):
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class _Elsewhere(nn.Module):
    """Stand-in for a block of another stage."""

    def __init__(self, block: nn.Module, role: str, stage: Stage) -> None:
        super().__init__()
        for name, value in vars(block).items():  # a model may read a block's kind
            if not name.startswith("_") and not isinstance(value, (nn.Module, Tensor)) and name != "training":
                setattr(self, name, value)
        self.role, self.box = role, [stage]  # in a list: a module inside itself would be no tree

    def forward(self, *args: Any, **more: Any) -> Any:
        hidden = args[0] if args else next(iter(more.values()))
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        if self.role == "end":
            raise _End(hidden.contiguous())  # only plain row order can be sent
        if self.role == "begin":
            received = self.box[0].received
            assert received is not None
            hidden = received.view_as(received)
            if hidden.requires_grad:
                hidden.register_hook(lambda grad: grad.contiguous())
        return (hidden,) if self.box[0].tuples else hidden


class _Missing(nn.Module):
    """Stand-in for a layer that another stage holds: returns NaN in the shape of that layer's output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["layer"] = layer.to("meta")  # no submodule: it has no parameters here

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **more: Any) -> Any:
        device = next(x.device for x in [*args, *more.values()] if isinstance(x, Tensor))
        args, more = map_tensors((args, more), lambda x: x.to("meta"))
        given = self.__dict__["layer"](*args, **more)
        return map_tensors(given, lambda x: torch.full(x.shape, torch.nan, dtype=x.dtype, device=device))


class Stage(nn.Module):
    """One stage; called by torch's schedule with what the stage before sent and the number of a micro-batch."""

    def __init__(self, model: nn.Module, holders: Sequence[str], number: int, stages: int) -> None:
        super().__init__()
        self.inner = model
        self.received: Optional[Tensor] = None
        self.tuples = False  # whether blocks give tuples
        self.pieces: Sequence[Piece] = ()
        self.weighted: Weighted = lambda model, batch, count: model(batch)
        self.first = [_cut(self, holders, number, stages)]  # in a list: no second name for it in the state

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        batch, count = self.pieces[int(index)]
        self.received = x
        try:
            return torch.stack([self.weighted(self.inner, batch, count)])
        except _End as end:
            return end.hidden
        finally:
            self.received = None


def make_stages(model: nn.Module, holders: Sequence[str], schedule: str, mesh: DeviceMesh) -> List[nn.Module]:
    """Return this rank's stages of `model`, which cannot be used afterwards. `holders`: the modules whose children are
    distributed, in their order."""
    numbers = stage_numbers(schedule, mesh.get_local_rank(), mesh.size())
    models = [model, *(copy.deepcopy(model) for _ in numbers[1:])]
    return [Stage(each, holders, number, len(numbers) * mesh.size()) for each, number in zip(models, numbers)]


def _cut(stage: Stage, holders: Sequence[str], number: int, stages: int) -> nn.Module:
    """Keep in `stage` only its own blocks; return the first of them."""
    model = stage.inner
    if tied := tied_parameters(model):
        raise Refusal(
            f"pipeline: {tied[0][0]} and {tied[0][1]} are one matrix, but stand on the first and on the last stage",
            "untie them (transformers: tie_word_embeddings=False in the config; recipes: untie=yes), or use another layout",
        )
    if not holders:
        what = "pipeline: the model has no list of blocks of one kind"
        raise Refusal(what, "name it with blocks=, or use another layout")
    places = [model.get_submodule(name) for name in holders]
    blocks = [(place, name, block) for place in places for name, block in place.named_children()]
    if len(blocks) < stages:
        raise Refusal(f"pipeline: {len(blocks)} blocks for {stages} stages", "use fewer stages")
    if any(isinstance(block, (nn.ModuleList, nn.ModuleDict)) for _, _, block in blocks):
        raise Refusal(f"pipeline: the blocks in {holders[0]} are lists, which the model takes apart", _CALLED)
    low, high = (len(blocks) * i // stages for i in (number, number + 1))
    for name, layer, before in _outside(model, holders):
        if number if before else number < stages - 1:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, _Missing(layer))
    for i, (place, name, block) in enumerate(blocks):
        if not low <= i < high:
            role = "begin" if i == low - 1 else "end" if i == high else "pass"
            place.register_module(name, _Elsewhere(block, role, stage))
    return blocks[low][2]


def _outside(model: nn.Module, holders: Sequence[str]) -> List[Tuple[str, nn.Module, bool]]:
    """Return modules outside of the blocks that have parameters of their own, with true if they come before the blocks: models
    define their layers in the order in which they use them."""
    found: List[Tuple[str, nn.Module, bool]] = []
    before = True
    for name, module in model.named_modules():
        if name in holders:
            before = False
        elif any(True for _ in module.parameters(recurse=False)) and not _inside(name, holders):
            if not name or any(_inside(holder, [name]) for holder in holders):
                own = next(iter(dict(module.named_parameters(recurse=False))))
                raise Refusal(f"pipeline: {own} belongs to the module that holds the blocks", "use another layout")
            if not _inside(name, [other for other, _, _ in found]):
                found.append((name, module, before))
    return found


def _inside(name: str, modules: Sequence[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


class Pipeline:
    """The stages of this rank and torch's schedule for them."""

    def __init__(
        self, parts: Sequence[nn.Module], mesh: DeviceMesh, device: torch.device, schedule: str, pieces: int
    ) -> None:
        """`parts`: Stages, as `parallelize` leaves them."""
        if device.type == "cpu" and not hasattr(PipelineStage, "_compute_outputs"):  # seen with 2.9 and 2.11
            raise Refusal(
                f"pipeline on processors with torch {torch.__version__}: its stages do not understand each other over gloo",
                "use torch 2.13 or newer, or another layout",
            )
        self.parts: List[Any] = list(parts)
        self.mesh, self.device, self.name, self.micro_batches = mesh, device, schedule, pieces
        self.numbers = stage_numbers(schedule, mesh.get_local_rank(), mesh.size())
        self.total = SCHEDULES[schedule][1] * mesh.size()
        if pieces < mesh.size() and SCHEDULES[schedule][1] > 1:
            what = f"pipeline schedule {schedule}: {pieces} micro-batches for {mesh.size()} ranks"
            raise Refusal(what, f"set accumulate to a multiple of {mesh.size()}, or use gpipe")
        self._schedules: Dict[Any, Any] = {}
        self._tried: Optional[Tuple[Any, List[Between]]] = None  # rows and tokens, and what is sent for them
        self._divisor = torch.ones((), device=device)

    def run(self, pieces: Sequence[Piece], weighted: Weighted, divisor: Tensor) -> List[Tensor]:
        """Run forward and backward of one step; return this rank's losses, each divided by `divisor`; none except on the last
        stage."""
        schedule = self._prepared(pieces, weighted)
        self._divisor = divisor
        losses: List[Tensor] = []
        self._call(schedule.step, losses)
        return losses

    def evaluate(self, pieces: Sequence[Piece], weighted: Weighted) -> List[Tensor]:
        schedule = self._prepared(pieces, weighted)
        self._divisor = torch.ones_like(self._divisor)
        losses: List[Tensor] = []
        with forward_only(schedule):
            self._call(schedule.eval, losses)
        return losses

    def _call(self, run: Callable[..., Any], losses: List[Tensor]) -> None:
        index = torch.arange(self.micro_batches)
        first = (torch.zeros(self.micro_batches, 1, device=self.device),) if 0 in self.numbers else ()
        more = {"target": index, "losses": losses} if self.total - 1 in self.numbers else {}
        run(*first, index=index, **more)
        for part in self.parts:
            part.pieces = ()

    def _prepared(self, pieces: Sequence[Piece], weighted: Weighted) -> Any:
        pieces = _equal(pieces)
        for part in self.parts:
            part.weighted = weighted
        between = self._between(pieces)
        for part in self.parts:
            part.pieces = pieces
        if between not in self._schedules:
            sent = [torch.empty(shape, dtype=kind, device="meta", requires_grad=True) for shape, kind in between]
            ends = [torch.empty(1, 1, device="meta"), *sent, torch.empty(1, device="meta", requires_grad=True)]
            stages = [
                PipelineStage(
                    part,
                    number,
                    self.total,
                    self.device,
                    input_args=ends[number],
                    output_args=ends[number + 1],
                    group=self.mesh.get_group(),
                )
                for part, number in zip(self.parts, self.numbers)
            ]
            kind, each = SCHEDULES[self.name]
            self._schedules[between] = kind(
                stages[0] if each == 1 else stages,
                self.micro_batches,
                loss_fn=lambda output, _target: output.sum() / self._divisor,
                scale_grads=False,
            )
        return self._schedules[between]

    @torch.no_grad()
    def _between(self, pieces: Sequence[Piece]) -> Tuple[Between, ...]:
        """Return the shapes that each stage but the last sends. They are measured once, stage by stage, and scaled for other
        batches: ranks whose batches differ cannot run a trial together."""
        given = next(tensors_of(pieces[0][0])).shape[:2]
        if self._tried is None:
            for part in self.parts:  # a loss that counts nothing leaves its sums as they are
                part.pieces = [(batch, torch.zeros_like(count)) for batch, count in pieces]
            sent: List[Between] = []
            tuples = False
            for number in range(self.total):
                box: List[Any] = [None]
                if number in self.numbers:
                    before = torch.zeros(sent[-1][0], dtype=sent[-1][1]) if sent else torch.zeros(1, 1)
                    box = [_try(self.parts[self.numbers.index(number)], before.to(self.device))]
                owners = [
                    number in stage_numbers(self.name, rank, self.mesh.size()) for rank in range(self.mesh.size())
                ]
                dist.broadcast_object_list(box, group=self.mesh.get_group(), group_src=owners.index(True))
                if not box[0][3]:
                    what = "pipeline: the model changes what a block returns before the next one gets it"
                    raise Refusal(what, _CALLED)
                sent.append(box[0][:2])
                tuples = tuples or box[0][2]
                for part in self.parts:
                    part.tuples = tuples
            self._tried = (given, sent[:-1])
        first, tried = self._tried
        return tuple(
            ((*(size * new // old for size, new, old in zip(shape, given, first)), *shape[len(given) :]), kind)
            for shape, kind in tried
        )


def _try(part: Stage, received: Tensor) -> Tuple[Tuple[int, ...], torch.dtype, bool, bool]:
    """Return shape and type of a stage's output for the first micro-batch, true if its blocks give tuples, and true if the first
    of them got the received tensor and nothing else: anything missing on this stage would be NaN."""
    training = part.training
    part.eval()  # no random numbers are drawn, no statistics change
    kinds: List[Tuple[bool, bool]] = []
    hook = part.first[0].register_forward_hook(
        lambda *call: kinds.append(
            (type(call[2]) is tuple, not any(bool(x.isnan().any()) for x in tensors_of(call[1])))
        )
    )
    with torch.compiler.set_stance("force_eager"):
        hidden = part(received, torch.zeros((), dtype=torch.int64))
    hook.remove()
    part.train(training)
    return tuple(hidden.shape), hidden.dtype, *kinds[0]


def _equal(pieces: Sequence[Piece]) -> List[Piece]:
    """Return micro-batches of equal length, as a pipeline needs: a shorter one gets rows whose labels do not count."""
    rows = [len(next(tensors_of(batch))) for batch, _ in pieces]
    most, equal = max(rows), []
    for (batch, count), own in zip(pieces, rows):
        if own < most:
            if not isinstance(batch, dict) or not isinstance(batch.get("labels"), Tensor) or batch["labels"].ndim < 2:
                what = f"pipeline: a batch of {sum(rows)} samples cannot be cut into {len(pieces)} equal micro-batches"
                raise Refusal(what, "let accumulate divide the batch of each data-parallel rank")
            batch = {name: _longer(x, own, most, name.endswith("labels")) for name, x in batch.items()}
        equal.append((batch, count))
    return equal


def _longer(x: Any, own: int, most: int, labels: bool) -> Any:
    if not isinstance(x, Tensor) or not x.ndim or len(x) != own:
        return x
    more = x[:1].expand(most - own, *x.shape[1:])
    return torch.cat((x, torch.full_like(more, IGNORE) if labels else more))


@contextmanager
def forward_only(schedule: Any) -> Iterator[None]:
    """Keep only a V schedule's forward actions: in an evaluation torch would also pass gradients on, and there are none."""
    whole = getattr(schedule, "pipeline_order_with_comms", {})
    try:
        if isinstance(schedule, ScheduleZBVZeroBubble):
            schedule.pipeline_order_with_comms = {
                rank: [action for action in actions if action.computation_type.name in _FORWARD]
                for rank, actions in whole.items()
            }
        yield
    finally:
        if isinstance(schedule, ScheduleZBVZeroBubble):
            schedule.pipeline_order_with_comms = whole
