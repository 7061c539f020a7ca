"""Communication hooks of DDP: what happens to a bucket of gradients on its way between ranks.

Each *adds up* over the ranks: the loss is already divided by the samples of all. A DDP model takes one hook only. DDP
reads a hook's annotations as objects, so this file does not import `annotations` from __future__."""

from typing import Any, Callable, Dict, List, Optional, Tuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from drumbeat.train.refusal import Refusal

# PowerSGD (Vogels et al., 2019): gradients travel as the product of two thin matrices. What a rank could not send is kept and
# added to its next gradient (error feedback). torch's own hook keeps it by bucket, and buckets change after the first step of
# every start; here it is kept by parameter, so that a checkpoint can hold it.


_WORTH_IT = 2  # a matrix travels compressed if that is less than 1 / 2 of its elements


class PowerSGD:
    def __init__(self, model: DistributedDataParallel, rank: int, first: int) -> None:
        """`rank`: columns of the thin matrices; `first`: steps whose gradients are sent whole."""
        self.group, self.first = model.process_group, first
        self.steps = torch.zeros((), dtype=torch.int64)
        self.names: Dict[int, str] = {}
        self.errors: Dict[str, Tensor] = {}  # of this rank: what it could not send yet
        self.right: Dict[str, Tensor] = {}  # the same on all ranks: where the next step starts from
        for number, (name, parameter) in enumerate(model.module.named_parameters()):
            self.names[id(parameter)] = name
            height = parameter.shape[0] if parameter.ndim else 1
            width = parameter.numel() // max(1, height)
            columns = min(height, width, rank)
            if parameter.requires_grad and (height + width) * columns * _WORTH_IT < height * width:
                random = torch.Generator().manual_seed(
                    number
                )  # by parameter: the same on every rank and at every start
                start = torch.randn(width, columns, generator=random)
                self.right[name] = start.to(parameter.device, parameter.dtype)
                self.errors[name] = torch.zeros_like(parameter).reshape(height, width)

    def __call__(self, _state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Add up gradients over the ranks, as the other hooks do: the loss is already divided by the samples of all ranks."""
        sending = int(self.steps) >= self.first
        if bucket.is_last():
            self.steps += 1
        if not sending:
            dist.all_reduce(bucket.buffer(), group=self.group)
            return _finished(bucket.buffer())
        thin: List[Tuple[str, Tensor, Tensor]] = []  # name, gradient, and the matrix to send: gradient + error
        whole: List[Tensor] = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients()):
            name = self.names[id(parameter)]
            if name in self.right:
                thin.append((name, gradient, gradient.reshape(self.errors[name].shape) + self.errors[name]))
            else:
                whole.append(gradient)
        # Every exchange waits for the one before: two buckets under way at once would mix theirs up.
        left = self._summed([matrix @ orthogonal(self.right[name]) for name, _, matrix in thin], whole)
        left = [orthogonal(tensor) for tensor in left]
        right = self._summed([matrix.t() @ tensor for tensor, (_, _, matrix) in zip(left, thin)], [])
        ranks = dist.get_world_size(self.group)
        for tall, wide, (name, gradient, matrix) in zip(left, right, thin):
            total = tall @ wide.t()
            gradient.copy_(total.view_as(gradient))
            # The same decision on every rank: a step that is left out because of a NaN leaves no trace here, and a column
            # of zeros (no gradient) would never become anything else.
            finite = torch.isfinite(total).all()
            self.errors[name].copy_(torch.where(finite, matrix - total / ranks, self.errors[name]))
            self.right[name].copy_(torch.where(finite & (wide != 0).any(0), wide, self.right[name]))
        return _finished(bucket.buffer())

    def _summed(self, tensors: List[Tensor], whole: List[Tensor]) -> List[Tensor]:
        """Add up `tensors`, and in place `whole`, over the ranks in one exchange."""
        every = [*tensors, *whole]
        if not every:
            return []
        flat = torch.cat([tensor.reshape(-1) for tensor in every])
        dist.all_reduce(flat, group=self.group)
        pieces = [piece.view_as(tensor) for piece, tensor in zip(flat.split([t.numel() for t in every]), every)]
        for tensor, piece in zip(whole, pieces[len(tensors) :]):
            tensor.copy_(piece)
        return pieces[: len(tensors)]

    def state_dict(self) -> Dict[str, Any]:
        """Return the state that all ranks share; each keeps its own `errors`."""
        return {"steps": self.steps.clone(), "right": {name: tensor.clone() for name, tensor in self.right.items()}}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        self.steps.copy_(state["steps"])
        for name, tensor in state["right"].items():
            self.right[name].copy_(tensor)


def orthogonal(matrix: Tensor) -> Tensor:
    """Make the columns orthogonal to each other and of length 1; a column of zeros stays one."""
    done: List[Tensor] = []
    for column in matrix.float().unbind(1):
        for before in done:
            column = column - before * (before @ column)
        done.append(column / column.norm().clamp(min=1e-30))
    return torch.stack(done, 1).to(matrix.dtype)


def _finished(buffer: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future


NAMES = ("all-reduce", "fp16", "bf16", "powersgd")
Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]


class Registered:
    """The hook of one DDP model."""

    def __init__(self, powersgd: Optional[PowerSGD] = None) -> None:
        self.powersgd = powersgd
        self.on_last_bucket: Callable[[], None] = lambda: None  # this rank has computed its last gradients


_REGISTERED: "WeakKeyDictionary[nn.Module, Registered]" = WeakKeyDictionary()


def registered(model: nn.Module) -> Optional[Registered]:
    return _REGISTERED.get(model)


def register(model: DistributedDataParallel, text: str) -> None:
    """Register a hook. `text`: all-reduce, fp16, bf16, or powersgd[:rank[:first step]], such as powersgd:2:100."""
    name, *numbers = text.split(":")
    if name == "powersgd":
        powersgd = _powersgd(model, text, numbers)
        own = Registered(powersgd)
        hook: Hook = powersgd.__call__
    elif name not in NAMES or numbers:
        raise Refusal(f"communication hook '{text}' is unknown", f"known: {', '.join(NAMES)}, powersgd:RANK:FIRST_STEP")
    else:
        narrow = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(name)
        own = Registered()
        hook = announced(own, sum_hook if narrow is None else narrow_hook(narrow))
    _REGISTERED[model] = own
    model.register_comm_hook(model.process_group, hook)


def announced(own: Registered, hook: Hook) -> Hook:
    def announcing(group: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.is_last():
            own.on_last_bucket()
        return hook(group, bucket)

    return announcing


def sum_hook(group: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    return _added(group, bucket.buffer()).then(lambda future: future.value()[0])  # type: ignore[no-any-return]


def narrow_hook(dtype: torch.dtype) -> Callable[[Any, GradBucket], torch.futures.Future[Tensor]]:
    """Return a hook that sends half the bytes. torch's own bf16 hook refuses gloo; this one does not."""

    def hook(group: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        wide = bucket.buffer()

        def widen(future: Any) -> Tensor:
            return wide.copy_(future.value()[0])

        return _added(group, wide.to(dtype)).then(widen)

    return hook


def _added(group: Any, data: Tensor) -> Any:
    work = dist.all_reduce(data, group=group, async_op=True)
    assert work is not None
    return work.get_future()


def _powersgd(model: DistributedDataParallel, text: str, numbers: List[str]) -> PowerSGD:
    if len(numbers) > 2 or not all(number.isdigit() for number in numbers):
        raise Refusal(f"communication hook '{text}'", "write powersgd:RANK:FIRST_STEP, such as powersgd:1:10")
    rank = int(numbers[0]) if numbers else 1
    first = int(numbers[1]) if len(numbers) > 1 else 10
    if rank < 1:
        raise Refusal(f"communication hook '{text}'", "the rank must be 1 or more")
    return PowerSGD(model, rank, first)
