"""Communication hooks of DDP: what happens to a bucket of gradients on its way between ranks.

Each *adds up* over the ranks: the loss is already divided by the samples of all. A DDP model takes one hook only, and
reads its annotations as objects, so this file does not postpone them.
"""

from typing import Any, Callable, List, Optional
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from drumbeat.train.parallel.powersgd import PowerSGD
from drumbeat.train.refusal import Refusal

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
    """`text`: all-reduce, fp16, bf16, or powersgd[:rank[:first step]], such as powersgd:2:100."""
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
    """Half the bytes. torch's own bf16 hook refuses gloo; this one does not."""

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
        raise Refusal(f"communication hook '{text}'", "rank is 1 or more")
    return PowerSGD(model, rank, first)
