"""Communication hooks of DDP: what happens to a bucket of gradients on its way between ranks.

Each *adds up* over the ranks: the loss is already divided by the samples of all. A DDP model takes one hook only, and
reads its annotations as objects, so this file does not postpone them.
"""

from typing import Any, Callable, List

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from drumbeat.train.refusal import Refusal

NAMES = ("all-reduce", "fp16", "bf16", "powersgd")


def register(model: DistributedDataParallel, text: str) -> None:
    """`text`: all-reduce, fp16, bf16, or powersgd[:rank[:first step]], such as powersgd:2:100."""
    name, *numbers = text.split(":")
    group = model.process_group
    if name == "powersgd":
        _register_powersgd(model, text, numbers)
    elif name not in NAMES or numbers:
        raise Refusal(f"communication hook '{text}' is unknown", f"known: {', '.join(NAMES)}, powersgd:RANK:FIRST_STEP")
    else:
        narrow = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(name)
        model.register_comm_hook(group, sum_hook if narrow is None else narrow_hook(narrow))


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


def _register_powersgd(model: DistributedDataParallel, text: str, numbers: List[str]) -> None:
    if len(numbers) > 2 or not all(number.isdigit() for number in numbers):
        raise Refusal(f"communication hook '{text}'", "write powersgd:RANK:FIRST_STEP, such as powersgd:1:10")
    rank = int(numbers[0]) if numbers else 1
    first = int(numbers[1]) if len(numbers) > 1 else 10
    if first < 2:
        raise Refusal(f"powersgd from step {first}: error feedback needs at least 2 plain steps first")
    group = model.process_group
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=first)

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        averaged = powerSGD_hook.powerSGD_hook(state, bucket)
        if state.iter >= first:
            # Its exchanges are started from callbacks of the one before, on other threads: two buckets under way would mix
            # them up, differently on each rank. So one bucket is finished before the next one begins.
            averaged.wait()
        # PowerSGD averages over the ranks; ours add.
        return averaged.then(lambda future: future.value().mul_(dist.get_world_size(group)))  # type: ignore[no-any-return]

    model.register_comm_hook(state, hook)
