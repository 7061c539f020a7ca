"""A model's kernels recorded once, as CUDA graphs, and replayed in every training step.

ResNet-50 starts about 700 kernels per step, and starting them one by one takes longer than running them. A graph holds
addresses, so parameters must stay where they are: not with FSDP's shards, which come and go. Gradients leave the graph as
any others do, so DDP sends them; it sees all of them at once, after the backward pass.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any, Callable, ContextManager

import torch
from torch import Tensor, nn

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
