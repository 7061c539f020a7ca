"""Rank, size and device of this process, from the variables that every launcher sets."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, List, Optional, Tuple

import torch
import torch.distributed as dist

from drumbeat.base.folders import make_private
from drumbeat.inrank import stacks
from drumbeat.train.parallel import meshes
from drumbeat.train.parallel.meshes import once_per_world
from drumbeat.train.refusal import Refusal


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def lead(self) -> bool:
        return self.rank == 0


def join(timeout_s: float = 600.0) -> World:
    """Join the job that the environment describes; without RANK and WORLD_SIZE this process is a world of one."""
    stacks.serve()  # a hang can be told from the rendezvous on
    rank, size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    local_rank, local_size = _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1)
    if not 0 <= rank < size:
        raise Refusal(f"RANK is {rank} and WORLD_SIZE is {size}", "the launcher must set both, or neither")
    device = _device(local_rank, local_size)
    if device.type != "cpu":
        keep_kernels()  # where it cannot, torch takes its own place
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))
    if size > 1 and not dist.is_initialized():
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise Refusal(f"WORLD_SIZE is {size} but {name} is not set", "start the ranks with drumbeat run")
        # gloo beside NCCL: checkpoints and the stop signal travel between CPUs, never through the GPU's queue.
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        dist.init_process_group(
            backend,
            timeout=timedelta(seconds=timeout_s),
            store=_next_store(rank, size, timedelta(seconds=timeout_s)),
            rank=rank,
            world_size=size,
            device_id=None if device.type == "cpu" else device,
        )
    return World(rank, size, local_rank, local_size, device)


_stores: List[Tuple[str, Any]] = []


def _next_store(rank: int, size: int, timeout: timedelta) -> Any:
    """Return the store where the ranks of a new world meet. A process may make several worlds one after the other: all meet at
    one server, which stays until the process ends, each under a name of its own. A rank could mistake a second server at the same
    port for the first."""
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} {rank} {size}"
    known = [store for where, store in _stores if where == place]
    store = known[0] if known else next(dist.rendezvous("env://", rank, size, timeout=timeout))[0]  # type: ignore[attr-defined]
    _stores.append((place, store))
    return dist.PrefixStore(f"drumbeat-{len(known)}", store)  # type: ignore[attr-defined]


def leave() -> None:
    meshes.forget()
    if dist.is_initialized():
        dist.destroy_process_group()


def _device(local_rank: int, local_size: int) -> torch.device:
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    index = 0 if count == 1 else local_rank  # one visible device a rank is a launcher's way of binding
    if index >= count:
        what = f"local rank {local_rank} of {local_size}, but only {count} devices are visible"
        raise Refusal(what, "start fewer ranks per node")
    torch.accelerator.set_device_index(index)
    return torch.device(kind.type, index)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    if not text.lstrip("-").isdigit():
        raise Refusal(f"{name} is '{text}', not a number")
    return int(text)


_NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def keep_kernels() -> str:
    """Set cache folders for torch and Triton if nobody has; return why that was not possible, or an empty text."""
    if all(name in os.environ for name in _NAMES):
        return ""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    place = os.path.join(home, "drumbeat", "kernels")
    try:
        os.makedirs(os.path.dirname(place), mode=0o700, exist_ok=True)
        problem = make_private(place)
    except OSError as error:
        problem = str(error)
    if not problem:
        for name in _NAMES:
            os.environ.setdefault(name, os.path.join(place, name.split("_")[0].lower()))
    return problem


# Stop together: a signal reaches ranks at different moments, and a rank that stops alone leaves the others waiting.
# Each step every rank says whether it was told to stop; the answers are combined in the background, between CPUs, and
# read one step later. So all ranks learn it at the same step, and no step waits for it.


# A launcher's stop signal, Ctrl-C, a scheduler's notice before the end, a closed terminal.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_SECOND = 1.0  # seconds: a launcher in the same terminal passes Ctrl-C on, so an echo follows the first one at once


class StopTogether:
    """Records stop signals while it is open. A second Ctrl-C ends the process at once, saved or not."""

    def __init__(self) -> None:
        self.number = 0  # the signal that this rank was sent; after `agreed()` said yes: that any rank was sent
        self._first_interrupt: Optional[float] = None
        self._group = once_per_world(_cpu_group, "stop") if dist.is_initialized() else None
        self._flag = torch.zeros((), dtype=torch.int32)
        self._work: Optional[Any] = None
        # A signal that the caller ignores (nohup, a background job of sh) stays ignored.
        handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._on_signal) for number in handled}

    def _on_signal(self, number: int, _frame: Optional[FrameType]) -> None:
        self.number = self.number or number
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._first_interrupt is not None and now - self._first_interrupt > _SECOND:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            self._first_interrupt = self._first_interrupt or now

    def agreed(self) -> bool:
        """Return true if any rank had been asked to stop when it last called this. Call it once per step on every rank."""
        if self._group is None:
            return self.number != 0
        answer = 0
        if self._work is not None:
            self._work.wait()
            answer = int(self._flag)
        self._flag = torch.tensor(self.number, dtype=torch.int32)
        self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self.number = answer or self.number
        return answer != 0

    def close(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _cpu_group() -> Any:
    return dist.new_group(backend="gloo")
