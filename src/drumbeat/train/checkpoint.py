"""Checkpoints: sharded, written while training goes on, loadable on another number of ranks.

    FOLDER/step-00000400/     what torch's distributed checkpoint writes: one file a rank, .metadata last
    FOLDER/step-00000400/commit.json     our commit marker, after .metadata: step, ranks, the model's fingerprint
    FOLDER/latest             the name of the newest committed one

A folder without a commit marker is a save that did not finish; it is never loaded, and the next save removes it.

A save in the background costs the training thread a copy of the state (state.py). The rest is another thread's: meeting
the other ranks, torch's writing, the marker.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from drumbeat.train.refusal import Refusal
from drumbeat.train.state import TrainingState, own_part

_MARKER = "commit.json"

# torch says so at every save and load of a world of one, where it is meant.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


class Saved(NamedTuple):
    """How a save ended."""

    step: int
    path: str
    seconds: float  # from the call until it was durable
    error: str  # one line; empty: it is durable
    waited: float = 0.0  # seconds that training stood still for it


class Checkpoints:
    def __init__(
        self, folder: str, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, keep: int = 2
    ) -> None:
        self.folder, self.parts, self.keep = folder, list(parts), keep
        self.state = TrainingState(parts, optimizer)
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        # The saving thread's collectives must not mix with training's.
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.fingerprint = fingerprint(self.parts, self.group)
        self.before: Callable[[], None] = lambda: None  # what all ranks must do before the state is worth saving
        self._saving: Optional[Future[Saved]] = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drumbeat-checkpoint")

    def prepare(self) -> None:
        """Make room for the copies now, while training warms up: gigabytes of pinned memory take seconds to get."""
        self.state.make_room(self.state.now())

    def save(self, step: int, more: Dict[str, Any], wait: bool = False) -> List[Saved]:
        """Save step `step`. Returns as soon as the state is copied; `wait` makes it durable first, or raises.

        At most one save is under way. Returned are those that have ended and were not known yet: the one before, this.
        """
        ended = [self.finish()]
        self.before()
        began = time.monotonic()
        state, arrived = (self.state.now(), None) if wait else self.state.copied()
        state["extra"] = dict(more)
        # One key a rank: under one common key torch would keep rank 0's generator for everybody.
        state[f"generator_{self.rank}"] = generators()
        if wait:
            try:
                self._write(step, state)
            except (Exception, CheckpointException) as problem:  # the latter is no Exception
                raise Refusal(
                    f"{self.path_of(step)} cannot be written: {_first_line(problem)}",
                    "make room, or give another checkpoint folder",
                ) from problem
            ended.append(Saved(step, self.path_of(step), time.monotonic() - began, ""))
        else:
            self._saving = self._thread.submit(self._in_background, step, state, arrived, began)
        return [saved for saved in ended if saved is not None]

    def poll(self) -> Optional[Saved]:
        """How the background save ended, once; None while it has not. Costs nothing."""
        return self.finish() if self._saving is not None and self._saving.done() else None

    def finish(self) -> Optional[Saved]:
        """Wait for the background save, if there is one."""
        if self._saving is None:
            return None
        pending, self._saving = self._saving, None
        began = time.monotonic()
        saved = pending.result()
        return saved._replace(waited=time.monotonic() - began)

    def _in_background(
        self, step: int, state: Dict[str, Any], arrived: Optional[Callable[[], None]], began: float
    ) -> Saved:
        """A save that fails is reported and costs nothing but itself: the marker is not written, `latest` stays."""
        error = ""
        try:
            if arrived is not None:
                arrived()
            self._write(step, state)
        except (Exception, CheckpointException) as problem:
            error = _first_line(problem)
        return Saved(step, self.path_of(step), time.monotonic() - began, error)

    def _write(self, step: int, state: Dict[str, Any]) -> None:
        path = self.path_of(step)
        if self.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        self._meet()
        save(state, storage_writer=FileSystemWriter(path, thread_count=writers(state)), process_group=self.group)
        error = ""
        if self.rank == 0:
            try:
                self._commit(step)
            except OSError as problem:
                error = str(problem)
        if error := self._told_by_rank_0(error):  # every rank must know, not only the one whose disk is full
            raise OSError(error)

    def load(self, wanted: Sequence[str]) -> Optional[Tuple[int, Dict[str, Any]]]:
        """Load the newest committed checkpoint: (step, the `wanted` extras), or None where there is none."""
        step = self._told_by_rank_0(newest(self.folder) if self.rank == 0 else None)
        if step is None:
            return None
        path = self.path_of(step)
        marker = read_marker(path)
        if marker["model"] != self.fingerprint:
            raise Refusal(
                f"{path} was saved from another model ({marker['parameters']:,} parameters)",
                "give another checkpoint folder, or the settings it was made with",
            )
        reader = FileSystemReader(path)
        try:
            saved = _dtypes(reader.read_metadata())
        except Exception as error:
            raise _unreadable(path, error) from error
        try:
            state = self.state.ready_for(saved)
        except Refusal as refusal:
            raise Refusal(f"{path}: {refusal.what}", refusal.fix) from None
        state["extra"] = dict.fromkeys(wanted, 0)
        if self.rank < marker["ranks"]:
            state[f"generator_{self.rank}"] = generators()
        try:
            load(state, storage_reader=reader, process_group=self.group)
        except (Exception, CheckpointException) as error:  # all mean: unusable files
            raise _unreadable(path, error) from error
        self.state.restore(state)
        if self.rank < marker["ranks"]:
            restore_generators(state[f"generator_{self.rank}"])
        return step, state["extra"]

    def _commit(self, step: int) -> None:
        """On rank 0, whose save ends after every rank's: torch writes .metadata only when all have reported."""
        path = self.path_of(step)
        count = sum(p.numel() for part in self.parts for p in part.parameters())
        marker = {"step": step, "ranks": self.size, "model": self.fingerprint, "parameters": count}
        _write(os.path.join(path, _MARKER), json.dumps(marker))
        _write(os.path.join(self.folder, "latest"), name_of(step))
        done = committed(self.folder)
        for old in done[: -self.keep] if self.keep else []:
            shutil.rmtree(os.path.join(self.folder, name_of(old)), ignore_errors=True)
        for name in os.listdir(self.folder):  # saves that were cut short
            if name.startswith("step-") and name < name_of(step) and _step(name) not in done:
                shutil.rmtree(os.path.join(self.folder, name), ignore_errors=True)

    def path_of(self, step: int) -> str:
        return os.path.join(self.folder, name_of(step))

    def _meet(self) -> None:
        if self.group is not None:
            dist.barrier(group=self.group)

    def _told_by_rank_0(self, value: Any) -> Any:
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]


def writers(state: Dict[str, Any]) -> int:
    """A thread writes one or two gigabytes a second, a file of its own: one for each two gigabytes of this rank."""
    tensors = [value for kind in ("model", "optimizer") for value in state[kind].values() if isinstance(value, Tensor)]
    size = sum(own_part(value).nbytes for value in tensors)
    return max(1, min(size >> 31, len(os.sched_getaffinity(0)), 8))


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def _step(name: str) -> Optional[int]:
    digits = name[len("step-") :]
    return int(digits) if name.startswith("step-") and digits.isdigit() else None


def committed(folder: str) -> List[int]:
    """The steps whose checkpoints are whole, in order."""
    if not os.path.isdir(folder):
        return []
    steps = [_step(name) for name in os.listdir(folder) if os.path.isfile(os.path.join(folder, name, _MARKER))]
    return sorted(step for step in steps if step is not None)


def newest(folder: str) -> Optional[int]:
    steps = committed(folder)
    return steps[-1] if steps else None


def read_marker(path: str) -> Dict[str, Any]:
    try:
        with open(os.path.join(path, _MARKER), encoding="utf-8") as file:
            marker = json.load(file)
        return {key: marker[key] for key in ("step", "ranks", "model", "parameters")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refusal(f"{path}/{_MARKER} cannot be read: {_first_line(error)}", "delete this checkpoint") from error


def fingerprint(parts: Sequence[nn.Module], group: Any) -> str:
    """Of the names and shapes of all parameters of all pipeline stages, however they are cut."""
    states = [item for part in parts for item in get_model_state_dict(part).items()]
    own = sorted(f"{name} {tuple(value.shape)}" for name, value in states if isinstance(value, Tensor))
    if group is not None:
        gathered: List[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, own, group=group)
        own = sorted({line for lines in gathered for line in lines})
    return hashlib.sha256("\n".join(own).encode()).hexdigest()[:16]


def _dtypes(metadata: Metadata) -> Dict[str, Optional[torch.dtype]]:
    """The entries of a checkpoint; None for those that are not tensors."""
    return {
        name: entry.properties.dtype if isinstance(entry, TensorStorageMetadata) else None
        for name, entry in metadata.state_dict_metadata.items()
    }


def _unreadable(path: str, error: BaseException) -> Refusal:
    return Refusal(f"{path} cannot be read: {_first_line(error)}", "delete it: the one before will be used")


def generators() -> Dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_generators(state: Dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _first_line(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        rank, (inner, _) = next(iter(error.failures.items()))
        return f"{type(inner).__name__} on rank {rank}: {str(inner)[:150]}".rstrip(": ")
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _write(path: str, text: str) -> None:
    """Whole or not at all, and on the disk before it has its name."""
    part = path + ".part"
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
