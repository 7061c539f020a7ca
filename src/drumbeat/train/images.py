"""Parts that the two image recipes share: loss, accuracy, optimizer, and the set-up of convolutional nets.

A model's kernels can be recorded once, as CUDA graphs, and replayed in every training step: ResNet-50 starts about 700 kernels
per step, and starting them one by one takes longer than running them. A graph holds addresses, so parameters must stay where they
are: not with FSDP's shards, which come and go. Gradients leave the graph as any others do, so DDP sends them; it sees all of them
at once, after the backward pass.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any, Callable, ContextManager, Dict, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drumbeat.train.parallel import Layout
from drumbeat.train.parallel.meshes import Meshes
from drumbeat.train.parallel.parallelize import shards
from drumbeat.train.precision import WITH_MASTERS
from drumbeat.train.recipes import build, decaying, set_up
from drumbeat.train.refusal import Refusal
from drumbeat.train.settings import Settings
from drumbeat.train.trainer import Summed, Trainer
from drumbeat.train.world import World


def steps_of(steps: int, epochs: int, an_epoch: int) -> int:
    """Return the number of steps to train: as many as given, or as the epochs have, whichever is less; 0 if neither is given."""
    return min([n for n in (steps, epochs * an_epoch) if n], default=0)


def sgd(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum 0.9; matrices and filters decay, norms and biases do not."""
    return torch.optim.SGD(decaying(model, settings.decay), lr=settings.lr, momentum=0.9, fused=True)


def _classes_loss(model: nn.Module, batch: Tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1], reduction="sum")


def _accuracy(model: nn.Module, batch: Tuple[Tensor, Tensor]) -> Tuple[Tensor, Dict[str, Tensor]]:
    logits = model(batch[0]).float()
    right = (logits.argmax(dim=1) == batch[1]).sum()
    return F.cross_entropy(logits, batch[1], reduction="sum"), {"accuracy": right}


def _rows(batch: Tuple[Tensor, Tensor]) -> Tensor:
    return torch.full((), float(len(batch[1])), device=batch[1].device)


CLASSES, ACCURACY = Summed(_classes_loss, _rows), Summed(_accuracy, _rows)


def refuse_for_images(settings: Settings) -> None:
    """Refuse a layout or precision that image models do not have, before any data are made.

    `tp` and `cp` are refused by name too: in one process they would quietly mean nothing."""
    layout = Layout.parse(settings.layout)
    if layout.ep != 1:
        raise Refusal("expert parallelism divides experts, and image models have none", "use ddp, fsdp, hsdp or pp")
    if layout.cp != 1:
        raise Refusal("context parallelism cuts sequences, and an image is none", "use ddp, fsdp, hsdp or pp")
    if layout.tp != 1:
        raise Refusal(
            "tensor parallelism cuts wide matrices; the filters of an image model are small, and cutting them would cost "
            "an exchange of activations in every layer to save little",
            "use ddp, fsdp, hsdp or pp",
        )
    if settings.precision in WITH_MASTERS:
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


def set_up_images(
    settings: Settings,
    world: World,
    meshes: Meshes,
    make: Callable[[], nn.Module],
    schedule: Callable[[int], float],
    stages: Sequence[str] = (),
    graph: str = "no",
) -> Trainer:
    record = records(graph, settings, meshes)
    torch.backends.cudnn.benchmark = True  # images have one size: the fastest algorithm is found once
    model = build(settings, world, make)
    if not shards(meshes) and meshes.layout.pp == 1:  # FSDP cuts plain rows only, and so travel activations
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if record:
            record_first_call(model)
    return set_up(settings, model, sgd(settings, model), scheduler=schedule, blocks="", stages=stages)


Forward = Callable[[Tensor], Tensor]
_REHEARSALS = 3  # in which libraries choose their algorithms and get their memory


def record_first_call(model: nn.Module) -> None:
    """Record the first training call on a GPU and replay it for inputs of the same shape; any other call runs as ever."""
    plain: Forward = model.forward

    def first(x: Tensor) -> Tensor:
        if not (x.is_cuda and model.training and torch.is_grad_enabled()):
            return plain(x)
        model.forward = plain
        before = [buffer.clone() for buffer in model.buffers()]
        try:
            recorded = _Recorded(model, x)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            warnings.warn(f"kernels are started one by one: recording failed: {reason}", stacklevel=2)
            return plain(x)
        finally:  # its rehearsals leave no trace in running means
            with torch.no_grad():
                for buffer, value in zip(model.buffers(), before):
                    buffer.copy_(value)

        def forward(x: Tensor) -> Tensor:
            fits = x.shape == recorded.x.shape and x.dtype == recorded.x.dtype
            if not (fits and model.training and torch.is_grad_enabled()):
                return plain(x)
            return _Replay.apply(recorded, x, *recorded.parameters)  # type: ignore[no-any-return,no-untyped-call]

        model.forward = forward
        return forward(x)

    model.forward = first


class _Recorded:
    """Buffers from which the graphs read their input and into which they write output and gradients."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.x = x.detach().clone()
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(named.values())
        # Other tensors with the same memory: DDP holds on to the real ones' places in autograd, which belong to its stream.
        leaves = {name: p.detach().requires_grad_() for name, p in named.items()}

        def run() -> Tensor:
            return torch.func.functional_call(model, leaves, (self.x,))  # type: ignore[no-any-return]

        autocast: ContextManager[Any] = nullcontext()
        if torch.is_autocast_enabled("cuda"):  # copies of weights that it keeps would not be made anew in a replay
            autocast = torch.autocast("cuda", torch.get_autocast_dtype("cuda"), cache_enabled=False)
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with autocast, torch.cuda.stream(beside):
            for _ in range(_REHEARSALS):
                out = run()
                torch.autograd.grad(out, list(leaves.values()), torch.zeros_like(out))
        torch.cuda.current_stream().wait_stream(beside)
        del out
        pool = torch.cuda.graph_pool_handle()
        # Of this thread alone: others, such as NCCL's watchdog, may ask the GPU for something meanwhile.
        how: Any = {"pool": pool, "capture_error_mode": "thread_local"}
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with autocast, torch.cuda.graph(self.forward, **how):
            self.out = run()
        self.d_out = torch.zeros_like(self.out)
        with torch.cuda.graph(self.backward, **how):
            self.gradients = torch.autograd.grad(self.out, list(leaves.values()), self.d_out)
        self.out = self.out.detach()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorded: _Recorded, x: Tensor, *_parameters: Tensor) -> Tensor:
        ctx.recorded = recorded
        recorded.x.copy_(x)
        recorded.forward.replay()
        return recorded.out.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        recorded: _Recorded = ctx.recorded
        recorded.d_out.copy_(grads[0])
        recorded.backward.replay()
        # Not the graph's own tensors: the next replay writes into them.
        return (None, None, *(gradient.clone() for gradient in recorded.gradients))
