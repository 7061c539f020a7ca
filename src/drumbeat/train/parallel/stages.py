"""Pipeline stages of any model whose blocks follow each other, without a change to its code.

Every stage runs the model's own forward on the same batch. Blocks that it does not hold only hand on what they get, but for two:
the one before its own gives what the stage before has sent, and the one behind its own ends the pass. What lies before the blocks
is missing on later stages: there it gives NaN of the right shape, which the received tensor replaces. What reached the loss in
another way would show at once.
"""

from __future__ import annotations

import copy
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_map_only

from drumbeat.train.data.loaders import tensors_of
from drumbeat.train.layers.cross_entropy import IGNORE
from drumbeat.train.parallel.pipeline import SCHEDULES, forward_only, stage_numbers
from drumbeat.train.parallel.tensor_plan import tied_parameters
from drumbeat.train.refusal import Refusal

INNER = "inner"
Piece = Tuple[Any, Tensor]  # a micro-batch, and how much of it counts
Weighted = Callable[[nn.Module, Any, Tensor], Tensor]


class _End(Exception):
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class _Elsewhere(nn.Module):
    """In the place of a block of another stage."""

    def __init__(self, block: nn.Module, role: str, stage: Stage) -> None:
        super().__init__()
        for name, value in vars(block).items():  # a model may read a block's kind
            if not name.startswith("_") and not isinstance(value, (nn.Module, Tensor)) and name != "training":
                setattr(self, name, value)
        self.role, self.box = role, [stage]  # in a list: a module inside itself would be no tree

    def forward(self, *args: Any, **more: Any) -> Any:
        hidden = args[0] if args else next(iter(more.values()))
        if self.role == "end":
            raise _End(hidden)
        if self.role == "begin":
            hidden = self.box[0].received
        return (hidden,) if self.box[0].tuples else hidden


class _Missing(nn.Module):
    """In the place of a layer that another stage holds: NaN of the shape that it would give."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["layer"] = layer.to("meta")  # no submodule: it has no parameters here

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **more: Any) -> Any:
        device = next(x.device for x in [*args, *more.values()] if isinstance(x, Tensor))
        args, more = tree_map_only(Tensor, lambda x: x.to("meta"), (args, more))
        given = self.__dict__["layer"](*args, **more)
        return tree_map_only(Tensor, lambda x: torch.full(x.shape, torch.nan, dtype=x.dtype, device=device), given)


class Stage(nn.Module):
    """One stage; called by torch's schedule with what the stage before sent and the number of a micro-batch."""

    def __init__(self, model: nn.Module, blocks: str, number: int, stages: int) -> None:
        super().__init__()
        self.inner, self.last = model, number == stages - 1
        self.received: Optional[Tensor] = None
        self.tuples = False  # whether blocks give tuples
        self.blocks = blocks
        self.pieces: Sequence[Piece] = ()
        self.weighted: Weighted = lambda model, batch, count: model(batch)
        _cut(self, blocks, number, stages)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        batch, count = self.pieces[int(index)]
        self.received = x
        try:
            return torch.stack([self.weighted(self.inner, batch, count)])
        except _End as end:
            return end.hidden
        finally:
            self.received = None


def make_stages(model: nn.Module, blocks: str, schedule: str, mesh: DeviceMesh) -> List[nn.Module]:
    """This rank's stages of `model`, which is used up."""
    numbers = stage_numbers(schedule, mesh.get_local_rank(), mesh.size())
    models = [model, *(copy.deepcopy(model) for _ in numbers[1:])]
    return [Stage(each, blocks, number, len(numbers) * mesh.size()) for each, number in zip(models, numbers)]


def _cut(stage: Stage, blocks: str, number: int, stages: int) -> None:
    model = stage.inner
    if tied := tied_parameters(model):
        raise Refusal(
            f"pipeline: {tied[0][0]} and {tied[0][1]} are one matrix, but stand on the first and on the last stage",
            "untie them (transformers: tie_word_embeddings=False in the config), or use another layout",
        )
    if not blocks:
        raise Refusal(
            "pipeline: the model has no list of blocks of one kind", "name it with blocks=, or use another layout"
        )
    holder = model.get_submodule(blocks)
    names = [name for name, _ in holder.named_children()]
    if len(names) < stages:
        raise Refusal(f"pipeline: {len(names)} blocks for {stages} stages", "use fewer stages")
    low, high = (len(names) * i // stages for i in (number, number + 1))
    for name, layer, before in _outside(model, blocks):
        if number if before else number < stages - 1:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, _Missing(layer))
    for i, name in enumerate(names):
        if not low <= i < high:
            role = "begin" if i == low - 1 else "end" if i == high else "pass"
            holder.register_module(name, _Elsewhere(getattr(holder, name), role, stage))


def _outside(model: nn.Module, blocks: str) -> List[Tuple[str, nn.Module, bool]]:
    """Modules outside of the blocks that have parameters of their own, and whether they come before the blocks: models define
    their layers in the order in which they use them."""
    found: List[Tuple[str, nn.Module, bool]] = []
    before = True
    for name, module in model.named_modules():
        if name == blocks:
            before = False
        elif any(True for _ in module.parameters(recurse=False)) and not name.startswith(f"{blocks}."):
            if not name or blocks.startswith(f"{name}."):
                own = next(iter(dict(module.named_parameters(recurse=False))))
                raise Refusal(f"pipeline: {own} belongs to the module that holds the blocks", "use another layout")
            if not any(name.startswith(f"{other}.") for other, _, _ in found):
                found.append((name, module, before))
    return found


class StagedPipeline:
    """The stages of this rank and torch's schedule for them."""

    def __init__(
        self, parts: Sequence[nn.Module], mesh: DeviceMesh, device: torch.device, schedule: str, pieces: int
    ) -> None:
        """`parts`: Stages, as `parallelize` leaves them."""
        self.parts: List[Any] = list(parts)
        self.mesh, self.device, self.name, self.micro_batches = mesh, device, schedule, pieces
        self.numbers = stage_numbers(schedule, mesh.get_local_rank(), mesh.size())
        self.total = SCHEDULES[schedule][1] * mesh.size()
        if pieces < mesh.size() and SCHEDULES[schedule][1] > 1:
            raise Refusal(
                f"pipeline schedule {schedule}: {pieces} micro-batches for {mesh.size()} ranks",
                f"set accumulate to a multiple of {mesh.size()}, or use gpipe",
            )
        self._schedules: Dict[Any, Any] = {}
        self._tried: Optional[Tuple[Any, Tuple[int, ...], torch.dtype]] = (
            None  # rows and tokens, and the shape for them
        )
        self._divisor = torch.ones((), device=device)

    def run(self, pieces: Sequence[Piece], weighted: Weighted, divisor: Tensor) -> List[Tensor]:
        """Forward and backward of one step; this rank's losses, each divided by `divisor`; none but on the last stage."""
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
            part.pieces, part.weighted = pieces, weighted
        between = self._between(pieces)
        if between not in self._schedules:
            shape, dtype = between
            hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
            loss = torch.empty(1, device="meta", requires_grad=True)
            stages = [
                PipelineStage(
                    part,
                    number,
                    self.total,
                    self.device,
                    input_args=hidden if number else torch.empty(1, 1, device="meta"),
                    output_args=loss if number == self.total - 1 else hidden,
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
    def _between(self, pieces: Sequence[Piece]) -> Tuple[Tuple[int, ...], torch.dtype]:
        """The shape of what stages send. The first stage tries it once; rows and tokens of other batches are put in their places,
        because ranks whose batches differ cannot try together."""
        given = next(tensors_of(pieces[0][0])).shape[:2]
        if self._tried is None:
            box: List[Any] = [None]
            if 0 in self.numbers:
                part = self.parts[self.numbers.index(0)]
                training = part.training
                part.eval()  # no random numbers are drawn, no statistics change
                kinds: List[bool] = []
                block = next(part.inner.get_submodule(part.blocks).children())
                hook = block.register_forward_hook(lambda *call: kinds.append(isinstance(call[2], tuple)))
                with torch.compiler.set_stance("force_eager"):
                    hidden = part(torch.zeros(1, 1, device=self.device), torch.zeros((), dtype=torch.int64))
                hook.remove()
                part.train(training)
                box = [(tuple(hidden.shape), hidden.dtype, kinds[0])]
            dist.broadcast_object_list(box, group=self.mesh.get_group(), group_src=0)
            self._tried = (given, *box[0][:2])
            for part in self.parts:
                part.tuples = box[0][2]
        first, shape, dtype = self._tried
        now = [given[i] if i < len(given) and size == first[i] else size for i, size in enumerate(shape)]
        return tuple(now), dtype


def _equal(pieces: Sequence[Piece]) -> List[Piece]:
    """Micro-batches of a pipeline are equally long: one that is shorter gets rows whose labels do not count."""
    rows = [len(next(tensors_of(batch))) for batch, _ in pieces]
    most, equal = max(rows), []
    for (batch, count), own in zip(pieces, rows):
        if own < most:
            if not isinstance(batch, dict) or not isinstance(batch.get("labels"), Tensor) or batch["labels"].ndim < 2:
                raise Refusal(
                    f"pipeline: a batch of {sum(rows)} samples cannot be cut into {len(pieces)} equal micro-batches",
                    "let accumulate divide the batch of each data-parallel rank",
                )
            batch = {name: _longer(x, own, most, name.endswith("labels")) for name, x in batch.items()}
        equal.append((batch, count))
    return equal


def _longer(x: Any, own: int, most: int, labels: bool) -> Any:
    if not isinstance(x, Tensor) or not x.ndim or len(x) != own:
        return x
    more = x[:1].expand(most - own, *x.shape[1:])
    return torch.cat((x, torch.full_like(more, IGNORE) if labels else more))
