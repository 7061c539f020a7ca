"""Checkpoints: sharded, written while training goes on, loadable on another number of ranks.

A save costs the training thread only a copy of the state (state.py). Another thread does the rest: it waits for the other ranks,
runs torch's writer with a checksum of each file and writes the commit marker (both in folder.py). A save before a stop
works the same way, and training waits for it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Protocol, Sequence, Tuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, WriteItem
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from drumbeat.train.checkpoint.folder import (
    SummedFileSystem,
    Unreadable,
    candidates,
    check_files,
    clear,
    commit,
    discard,
    name_of,
    place_for,
    read_marker,
    set_aside,
)
from drumbeat.train.checkpoint.state import TrainingState, generators, own_part, restore_generators
from drumbeat.train.parallel.meshes import gathered
from drumbeat.train.refusal import Refusal

T = TypeVar("T")


class Saved(NamedTuple):
    """Result of a save."""

    step: int
    path: str
    seconds: float  # from the call until it was durable
    error: str  # one line; empty: it is durable
    waited: float = 0.0  # seconds that training stood still for it
    copied: bool = True  # before it was written; else training had to wait


class Loaded(NamedTuple):
    """Result of a load."""

    step: int
    extra: Dict[str, Any]
    notes: Sequence[str]  # on rank 0: what is to be said of it, and of newer ones that could not be read


class Snapshots(Protocol):
    """Copies of the state in memory that outlives the ranks (snapshots.py)."""

    keeps_state: bool  # weights and optimizer, too; else another rank of this node keeps them

    def prepare(self) -> None: ...

    def take(
        self, step: int, more: Dict[str, Any], shared: Optional[Dict[str, Tensor]] = None
    ) -> Tuple[Dict[str, Any], Callable[[], None]]: ...

    def read_by(self, save: Future[Saved]) -> None: ...


class HasState(Protocol):
    def state_dict(self) -> Dict[str, Any]: ...

    def load_state_dict(self, state: Dict[str, Any]) -> Any: ...


class Checkpoints:
    def __init__(
        self,
        folder: str,
        parts: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        keep: int = 2,
        others: Optional[Mapping[str, HasState]] = None,
        shared: Optional[Callable[[], Dict[str, Tensor]]] = None,
        rank_state: Optional[Mapping[str, Tensor]] = None,
    ) -> None:
        """`others`: what else has a state that is the same on all ranks. `shared()`: entries of the model's state on which
        the ranks must agree before they are saved (running means); all ranks call it together. `rank_state`: live tensors
        that each rank has for itself; on another number of ranks they are not restored."""
        self.folder, self.parts, self.keep = folder, list(parts), keep
        self.state = TrainingState(parts, optimizer)
        self.others, self.shared, self.rank_state = dict(others or {}), shared, rank_state or {}
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        # The saving thread's collectives must not mix with training's.
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.fingerprint = fingerprint(self.parts, self.group)
        self._saving: Optional[Future[Saved]] = None
        self._copies: Optional[bool] = None  # is the state copied before it is written? unknown until there is a state
        self._copied = True  # for the last save
        self.snapshots: Optional[Snapshots] = None  # in memory; a save takes one, and reads it
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drumbeat-checkpoint")

    def prepare(self) -> str:
        """Allocate the copies now, while training warms up: pinning gigabytes of memory takes seconds. Return a warning if there
        is not enough memory."""
        if self.snapshots is not None:
            self.snapshots.prepare()
            if self.snapshots.keeps_state:
                self._copies = False
                return ""
        state = self.state.now()
        size, free = held_bytes(state), free_bytes()
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._copies = free is None or size * ranks <= free // 2
        if self._copies:
            self.state.make_room(state)
            return ""
        return (
            f"saves will make training wait: copies of {size * ranks / 2**30:.1f} GiB would take more than half of the "
            f"{(free or 0) / 2**30:.1f} GiB of free host memory, so the state is written as it is"
        )

    def save(self, step: int, more: Dict[str, Any], wait: bool = False) -> List[Saved]:
        """Save step `step`. Return as soon as the state is copied; with `wait`, only once the save is durable, or raise.

        At most one save is under way. Returned are the results of saves that have ended and were not reported yet: the one
        before, and this one if it is complete.
        """
        ended = [self.finish()]
        began = time.monotonic()
        if self._copies is None:
            self.prepare()
        shared = self.shared() if self.shared is not None else {}
        taken = self.snapshots.take(step, more, shared) if self.snapshots is not None and not wait else None
        keeps = taken is not None and self.snapshots is not None and self.snapshots.keeps_state
        slot = self.snapshots if keeps else None
        if taken is not None and slot is not None:
            state, arrived = taken
        else:
            state, arrived = self.state.copied(shared) if self._copies else self.state.as_it_is(shared)
            state = self.complete(state, more)
        self._copied = slot is not None or bool(self._copies)
        self._saving = self._thread.submit(self._in_background, step, state, arrived, began)
        if slot is not None:
            slot.read_by(self._saving)
        if wait or not self._copied:
            saved = self.finish()
            assert saved is not None
            if saved.error and wait:
                what = f"{saved.path} cannot be written: {saved.error}"
                raise Refusal(what, "make room, or give another checkpoint folder")
            ended.append(saved)
        return [saved for saved in ended if saved is not None]

    def complete(self, state: Dict[str, Any], more: Dict[str, Any]) -> Dict[str, Any]:
        """Add everything else that a resumed run needs to weights and optimizer."""
        state["extra"] = dict(more)
        if self.others:
            state["others"] = {name: other.state_dict() for name, other in self.others.items()}
        # One key per rank: under one common key torch would keep rank 0's generators and buffers for everybody.
        own = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.rank_state.items()}
        state[self.own] = {"generators": generators(), "buffers": state.pop("buffers"), "state": own}
        return state

    def poll(self) -> Optional[Saved]:
        """Return the result of the background save, once; None while it runs. This never blocks."""
        return self.finish() if self._saving is not None and self._saving.done() else None

    def finish(self) -> Optional[Saved]:
        """Wait for the background save, if there is one."""
        if self._saving is None:
            return None
        pending, self._saving = self._saving, None
        began = time.monotonic()
        saved = pending.result()
        return saved._replace(waited=time.monotonic() - began, copied=self._copied)

    def _in_background(self, step: int, state: Dict[str, Any], arrived: Callable[[], None], began: float) -> Saved:
        """Write a save in the background. If it fails, that is reported and the marker is not written; `latest`
        stays as it was."""
        error = ""
        try:
            arrived()
            self._write(step, state)
        except (Exception, CheckpointException) as problem:  # CheckpointException is not an Exception
            error = first_line(problem)
            if self.rank == 0:  # frees the space again on a full disk
                discard(self.path_of(step))
        return Saved(step, self.path_of(step), time.monotonic() - began, error)

    def _write(self, step: int, state: Dict[str, Any]) -> None:
        place: str = self.told_by_rank_0(place_for(self.path_of(step)) if self.rank == 0 else None)
        if self.rank == 0:
            shutil.rmtree(place, ignore_errors=True)
        self._meet()
        files, error = write_state(state, place, self.group), ""
        if self.rank == 0:
            try:
                count = sum(p.numel() for part in self.parts for p in part.parameters())
                marker = {"step": step, "ranks": self.size, "model": self.fingerprint, "parameters": count}
                marker["optimizer"] = self.optimizer
                commit(self.folder, {**marker, "files": files}, self.keep, place)
            except OSError as problem:
                error = str(problem)
        if error := self.told_by_rank_0(error):  # every rank must know, not only the one whose disk is full
            raise OSError(error)

    def load(self, wanted: Sequence[str]) -> Optional[Loaded]:
        """Load the newest committed checkpoint that can be read, the same one on all ranks; None if there is none.

        Newer checkpoints that any rank cannot read are set aside; a Refusal if none can be read.
        """
        if self.rank == 0:
            clear(self.folder)
        steps: List[int] = self.told_by_rank_0(candidates(self.folder) if self.rank == 0 else None)
        made_state = not self.state.optimizer.state
        damaged: List[Tuple[int, Unreadable]] = []
        for step in reversed(steps):
            if damaged and made_state:
                self.state.optimizer.state.clear()  # its entries depend on the checkpoint
            try:
                extra, checked = self._load(self.path_of(step), wanted)
            except Unreadable as problem:
                damaged.append((step, problem))
                continue
            notes = self._set_aside(damaged, step)
            if self.rank == 0 and not checked:
                notes.append(
                    f"the checkpoint of step {step} has no checksums (an older drumbeat saved it): NOT CHECKED"
                )
            return Loaded(step, extra, notes)
        if len(damaged) > 1:
            what = "; ".join(problem.what for _, problem in damaged)
            raise Refusal(f"none of {len(damaged)} checkpoints can be read: {what}", "give another checkpoint folder")
        if damaged:
            raise damaged[0][1]
        return None

    def _set_aside(self, damaged: Sequence[Tuple[int, Unreadable]], step: int) -> List[str]:
        """Set aside checkpoints newer than step `step`, which was loaded instead; return a line about each."""
        said = []
        for newer, problem in damaged if self.rank == 0 else ():
            path, lost = self.path_of(newer), newer - step
            now = set_aside(path)
            name = f"it is now called {os.path.basename(now)}" if now != path else "it could not be renamed"
            steps = "1 step is" if lost == 1 else f"{lost} steps are"
            what = f"the checkpoint of step {newer} CANNOT BE READ and is left out, {steps} lost"
            said.append(f"{what}: {problem.what}; {name}")
        return said

    def _load(self, path: str, wanted: Sequence[str]) -> Tuple[Dict[str, Any], bool]:
        """Load a checkpoint; return the `wanted` extras that it has, and true if it has checksums. It is Unreadable on all ranks
        or on none; what was written into the state by then is overwritten by the next one that can be loaded."""
        reader = Reader(path)
        marker = self.together(lambda: self._marker(path))
        if marker["files"] is not None:  # each rank checks a share of the files; the load begins once all are whole
            self.together(lambda: check_files(path, marker["files"], self.rank, self.size))
        saved = self.together(lambda: contents(path, reader))
        state = self.ready_for(path, saved, marker["ranks"] == self.size)
        state["extra"] = {name: 0 for name in wanted if f"extra.{name}" in saved}
        self.together(lambda: load_into(state, reader, self.group, path))
        self.restore(state)
        return state["extra"], marker["files"] is not None

    def restore(self, state: Dict[str, Any]) -> None:
        """Put a loaded state, whose tensors are the live ones, where it belongs."""
        own = state.pop(self.own, {})
        self.state.restore({**state, "buffers": own.get("buffers", {})})
        for name, values in state.get("others", {}).items():
            self.others[name].load_state_dict(values)
        for name, value in own.get("state", {}).items():
            self.rank_state[name].copy_(value)
        if own:
            restore_generators(own["generators"])

    def _marker(self, path: str) -> Dict[str, Any]:
        marker = read_marker(path)
        if marker["model"] != self.fingerprint:
            what = f"{path} was saved from another model ({marker['parameters']:,} parameters)"
            raise Refusal(what, "give another checkpoint folder, or the settings it was made with")
        if marker["optimizer"] not in ("", self.optimizer):
            fix = "resume with the optimizer and precision it was saved with, or give another checkpoint folder"
            raise Refusal(f"{path} holds the state of {marker['optimizer']}, and this run uses {self.optimizer}", fix)
        return marker

    @property
    def optimizer(self) -> str:
        return type(self.state.optimizer).__name__

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on all ranks. If one rank refuses, all do, with the first rank's reason."""
        refusal: Optional[Refusal] = None
        try:
            done = work()
        except Refusal as problem:
            refusal = problem
        told = (type(refusal), refusal.what, refusal.fix) if refusal else None
        for kind, what, fix in filter(None, self.gathered(told)):
            raise kind(what, fix) from refusal
        return done

    def ready_for(self, path: str, saved: Dict[str, Optional[torch.dtype]], same_ranks: bool) -> Dict[str, Any]:
        """Return live tensors and placeholders to load into. On another number of ranks, generators are drawn anew from the seed,
        and every rank starts with the buffers on which all agreed."""
        try:
            state = self.state.ready_for(saved)
        except Refusal as refusal:
            raise Refusal(f"{path}: {refusal.what}", refusal.fix) from None
        buffers = state.pop("buffers")
        mine = [name for name in buffers if f"{self.own}.buffers.{name}" in saved]
        if same_ranks:
            here = {name: value for name, value in generators().items() if f"{self.own}.generators.{name}" in saved}
            state[self.own] = {
                "generators": here,
                "buffers": {name: buffers[name].clone() for name in mine},
                "state": saved_part(self.rank_state, f"{self.own}.state", saved),
            }
        others = {name: other.state_dict() for name, other in self.others.items()}
        state["others"] = saved_part(others, "others", saved)
        return state

    @property
    def own(self) -> str:
        return f"rank_{self.rank}"

    def path_of(self, step: int) -> str:
        return os.path.join(self.folder, name_of(step))

    def _meet(self) -> None:
        if self.group is not None:
            dist.barrier(group=self.group)

    def gathered(self, value: Any) -> List[Any]:
        return gathered(value, self.group)

    def told_by_rank_0(self, value: Any) -> Any:
        return self.gathered(value)[0]


def write_state(
    state: Dict[str, Any], place: str, group: Optional[dist.ProcessGroup] = None
) -> Dict[str, Tuple[int, int]]:
    """Write a state, all ranks together; if one rank cannot, all raise. Return size and checksum of each file."""
    writer = FileSystemWriter(place, thread_count=writers(state), per_thread_copy_ahead=0)
    writer.fs = written = SummedFileSystem()
    save(state, storage_writer=writer, planner=OneAtATime(), process_group=group)
    every = gathered((written.checksums, first_line(written.error) if written.error else ""), group)
    if error := next((error for _, error in every if error), ""):
        raise OSError(error)
    return {name: sums for checksums, _ in every for name, sums in checksums.items()}


def writers(state: Dict[str, Any]) -> int:
    """Return the number of writer threads: a thread writes one or two gigabytes per second to a file of its own, so one for each
    two gigabytes of this rank. At most 4 if the state is on a GPU: each thread copies one tensor at a time to the host."""
    on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in state["model"].values())
    return max(1, min(held_bytes(state) >> 31, len(os.sched_getaffinity(0)), 4 if on_gpu else 8))


def held_bytes(state: Dict[str, Any]) -> int:
    """Return the size of this rank's weights and optimizer state."""
    values = [value for kind in ("model", "optimizer") for value in state.get(kind, {}).values()]
    return sum(own_part(value).nbytes for value in values if isinstance(value, Tensor))


def fingerprint(parts: Sequence[nn.Module], group: Any) -> str:
    """Return a hash of the names and shapes of all parameters of all pipeline stages, independent of how they are sharded."""
    states = [item for part in parts for item in get_model_state_dict(part).items()]
    own = sorted(f"{name} {tuple(value.shape)}" for name, value in states if isinstance(value, Tensor))
    own = sorted({line for lines in gathered(own, group) for line in lines})
    return hashlib.sha256("\n".join(own).encode()).hexdigest()[:16]


def free_bytes(root: str = "/") -> Optional[int]:
    """Return the available memory, at most what the control group of this process has left; None if unknown."""
    try:
        with open(os.path.join(root, "proc/meminfo"), encoding="ascii") as file:
            rows: Dict[str, int] = {line.split(":")[0]: int(line.split()[1]) << 10 for line in file if "kB" in line}
        free = rows["MemAvailable"]
    except (OSError, ValueError, KeyError, IndexError):
        return None
    try:
        with open(os.path.join(root, "sys/fs/cgroup/memory.max"), encoding="ascii") as file:
            most = int(file.read())  # "max": no limit
        with open(os.path.join(root, "sys/fs/cgroup/memory.current"), encoding="ascii") as file:
            free = min(free, max(0, most - int(file.read())))
    except (OSError, ValueError):
        pass
    return free


_THREADS = 4  # files read at a time, per rank; each takes one tensor to the host at a time


class Reader(FileSystemReader):
    """Reader that reads several files at a time; torch's reads one after the other."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        by_file: Dict[str, List[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        read = super().read_data
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="drumbeat-read") as pool:
            list(pool.map(lambda items: read(replace(plan, items=items), planner), by_file.values()))
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done


def contents(path: str, reader: FileSystemReader) -> Dict[str, Optional[torch.dtype]]:
    """Return the entries of a checkpoint with their dtypes; None for those that are not tensors."""
    try:
        return _dtypes(reader.read_metadata())
    except Exception as error:
        raise unreadable(path, error) from error


def _dtypes(metadata: Metadata) -> Dict[str, Optional[torch.dtype]]:
    return {
        name: entry.properties.dtype if isinstance(entry, TensorStorageMetadata) else None
        for name, entry in metadata.state_dict_metadata.items()
    }


def saved_part(state: Mapping[str, Any], path: str, saved: Mapping[str, Any]) -> Dict[str, Any]:
    """Return copies of those entries of a nested state that a checkpoint also has under `path`."""
    part: Dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            part[key] = saved_part(value, f"{path}.{key}", saved)
        elif f"{path}.{key}" in saved:
            part[key] = value.clone() if isinstance(value, Tensor) else value
    return {key: value for key, value in part.items() if not isinstance(value, dict) or value}


def load_into(state: Dict[str, Any], reader: FileSystemReader, group: Any, path: str) -> None:
    try:
        load(state, storage_reader=reader, process_group=group)
    except (Exception, CheckpointException) as error:  # all of these mean that files are unusable
        raise unreadable(path, error) from error


def unreadable(path: str, error: BaseException) -> Unreadable:
    return Unreadable(f"{path} cannot be read: {first_line(error)}", "give another checkpoint folder, or delete it")


def first_line(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        rank, (inner, _) = next(iter(error.failures.items()))
        if isinstance(inner, OSError) and inner.strerror:
            return f"{inner.strerror} (rank {rank})"
        return f"{type(inner).__name__} on rank {rank}: {str(inner)[:150]}".rstrip(": ")
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


class OneAtATime(DefaultSavePlanner):
    """Planner for a writer that copies nothing ahead (`per_thread_copy_ahead=0`): when a thread asks for a tensor, the previous
    one has been written."""

    def __init__(self) -> None:
        super().__init__()
        self._written = threading.local()  # .tensor: this thread's last copy

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        written = getattr(self._written, "tensor", None)
        if written is not None:
            written.untyped_storage().resize_(0)
        self._written.tensor = None
        if not isinstance(data, Tensor):
            return data
        host = on_host(data)
        if host is not data:  # a copy that nothing else needs
            self._written.tensor = host
        return host


def on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu() if not tensor.is_cpu else tensor
