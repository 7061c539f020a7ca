"""Pipeline parallelism: blocks spread over stages, micro-batches flowing through them.

Plain model parallelism over two devices is a pipeline with one micro-batch.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
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

from drumbeat.train.parallel.tensor_plan import tied_parameters
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
        raise Refusal(
            "pipeline with fp16: the schedule owns the backward pass, so the loss cannot be scaled", "use bf16"
        )
    if schedule in SPLIT_BACKWARD and recompute == "selective":
        raise Refusal(
            f"pipeline schedule {schedule} with selective recomputation: torch recomputes such a block once, "
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


def cut(
    model: nn.Module, stage: int, stages: int, holders: Sequence[str], first: Sequence[str], last: Sequence[str]
) -> nn.Module:
    """Keep one stage of `model`: its share of the blocks (the children of `holders`), `first` (the embedding) on stage 0
    and `last` (norm and head) on the last stage. What is not kept becomes None, or is missing from the blocks; the
    model's forward skips it.
    """
    if tied_parameters(model):
        raise Refusal(
            "pipeline: the embedding and the head share one matrix but stand on different stages", "untie them"
        )
    places = [model.get_submodule(holder) for holder in holders]
    names = [(holder, name) for holder in places for name, _ in holder.named_children()]
    if len(names) < stages:
        raise Refusal(f"pipeline: {len(names)} blocks for {stages} stages", "use fewer stages")
    low, high = (len(names) * i // stages for i in (stage, stage + 1))
    for holder, name in names[:low] + names[high:]:
        delattr(holder, name) if not isinstance(holder, nn.ModuleDict) else holder.pop(name)
    for name in () if stage == 0 else first:
        setattr(model, name, None)
    for name in () if stage == stages - 1 else last:
        setattr(model, name, None)
    return model


class _Stage(PipelineStage):
    def _compute_outputs(self, *args: Tensor, module: nn.Module, **more: Any) -> Any:
        """torch learns the shapes between stages from a pass over tensors it never filled: running statistics must not."""
        kept = [buffer.clone() for buffer in module.buffers()]
        outputs = module(*args, **more)
        for buffer, before in zip(module.buffers(), kept):
            buffer.data.copy_(before)
        return outputs


def refuse_old_torch(parts: Sequence[nn.Module], device: torch.device) -> None:
    """Before torch 2.13 the first step on processors ends in gloo (seen with 2.9 and 2.11), and `_Stage` is not asked: running
    statistics of batch norms would come from tensors that were never filled."""
    if hasattr(PipelineStage, "_compute_outputs"):
        return
    version, fix = torch.__version__, "use torch 2.13 or newer, or another layout"
    if device.type == "cpu":
        raise Refusal(
            f"pipeline on processors with torch {version}: its stages do not understand each other over gloo", fix
        )
    if any(True for part in parts for _ in part.buffers()):
        raise Refusal(f"pipeline with torch {version}: a batch norm's running statistics would be wrong", fix)


class Pipeline:
    """The stages of this rank and their schedule. `loss(output, target)` is a sum, not a mean: a step divides it."""

    def __init__(
        self,
        parts: List[nn.Module],
        mesh: DeviceMesh,
        device: torch.device,
        schedule: str,
        micro_batches: int,
        loss: Callable[[Any, Tensor], Tensor],
    ) -> None:
        refuse_old_torch(parts, device)
        kind, each = SCHEDULES[schedule]
        self.micro_batches = micro_batches
        rank, ranks = mesh.get_local_rank(), mesh.size()
        total = each * ranks
        if micro_batches < ranks and each > 1:
            raise Refusal(
                f"pipeline schedule {schedule}: {micro_batches} micro-batches for {ranks} ranks",
                f"set accumulate to a multiple of {ranks}, or use gpipe",
            )
        numbers = stage_numbers(schedule, rank, ranks)
        stages = [_Stage(part, number, total, device, group=mesh.get_group()) for part, number in zip(parts, numbers)]
        self._divisor = torch.ones((), device=device)
        self.first = 0 in numbers
        self.last = total - 1 in numbers

        def divided(output: Any, target: Tensor) -> Tensor:
            return loss(output, target) / self._divisor

        # scale_grads would divide by the number of micro-batches: our loss is divided by all samples already.
        self.schedule = kind(stages[0] if each == 1 else stages, micro_batches, loss_fn=divided, scale_grads=False)

    def run(self, inputs: Tensor, targets: Tensor, divisor: Tensor) -> List[Tensor]:
        """Forward and backward of one step; the losses of the micro-batches, each divided by `divisor`, on the last
        stage; none elsewhere."""
        self._divisor = divisor
        losses: List[Tensor] = []
        given = (inputs,) if self.first else ()
        if self.last:
            self.schedule.step(*given, target=targets, losses=losses)
        else:
            self.schedule.step(*given)
        return losses

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tuple[Optional[Tensor], List[Tensor]]:
        """Outputs and losses of the micro-batches, on the last stage. Always as many samples, a multiple of them."""
        losses: List[Tensor] = []
        given = (inputs,) if self.first else ()
        self._divisor = torch.ones_like(self._divisor)
        with forward_only(self.schedule):
            if self.last:
                return self.schedule.eval(*given, target=targets, losses=losses), losses
            self.schedule.eval(*given)
        return None, losses


@contextmanager
def forward_only(schedule: Any) -> Iterator[None]:
    """torch's V schedule hands gradients from stage to stage of one rank in an evaluation too, and finds none."""
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
