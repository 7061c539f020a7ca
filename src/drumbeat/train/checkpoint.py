"""Checkpoints: sharded, written while training goes on, loadable on another number of ranks.

    FOLDER/step-00000400/     what torch's distributed checkpoint writes: one file a rank, .metadata last
    FOLDER/step-00000400/commit.json     our commit marker, after .metadata: step, ranks, the model's fingerprint
    FOLDER/latest             the name of the newest committed one

A folder without a commit marker is a save that did not finish; it is never loaded, and the next save removes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from concurrent.futures import Future
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.utils._pytree import tree_map_only

from drumbeat.train.refusal import Refusal

_MARKER = "commit.json"
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # by parameter name: stages of a pipeline then just merge


class Checkpoints:
    def __init__(
        self, folder: str, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, keep: int = 2
    ) -> None:
        self.folder, self.parts, self.optimizer, self.keep = folder, list(parts), optimizer, keep
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        # The saving thread's collectives must not mix with training's.
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.fingerprint = fingerprint(self.parts, self.group)
        self._saving: Optional[Tuple[int, Any]] = None

    def save(self, step: int, more: Dict[str, Any], wait: bool = False) -> None:
        """Save step `step`. Returns as soon as the state is copied; `wait` makes it durable first."""
        self.finish()  # at most one save at a time
        path = os.path.join(self.folder, name_of(step))
        if self.rank == 0:
            os.makedirs(self.folder, exist_ok=True)
            shutil.rmtree(path, ignore_errors=True)
        self._meet()
        state = {**self._state(), "extra": dict(more)}
        # One key a rank: under one common key torch would keep rank 0's generator for everybody.
        state[f"generator_{self.rank}"] = generators()
        if wait:
            save(state, checkpoint_id=path, process_group=self.group)
            self._commit(step)
            self._meet()
            return
        still = tree_map_only(Tensor, _copied, state)
        self._saving = (step, async_save(still, checkpoint_id=path, process_group=self.group))

    def poll(self) -> None:
        """Commit a background save that is done. Costs nothing while it is not."""
        if self._saving is not None and _future(self._saving[1]).done():
            self.finish()

    def finish(self) -> None:
        """Wait for the background save, if there is one."""
        if self._saving is None:
            return
        step, pending = self._saving
        self._saving = None
        _future(pending).result()
        self._commit(step)

    def load(self, wanted: Sequence[str]) -> Optional[Tuple[int, Dict[str, Any]]]:
        """Load the newest committed checkpoint: (step, the `wanted` extras), or None where there is none."""
        step = self._agree_on(newest(self.folder) if self.rank == 0 else None)
        if step is None:
            return None
        path = os.path.join(self.folder, name_of(step))
        marker = read_marker(path)
        if marker["model"] != self.fingerprint:
            raise Refusal(
                f"{path} was saved from another model ({marker['parameters']:,} parameters)",
                "give another checkpoint folder, or the settings it was made with",
            )
        state = self._state()
        state["extra"] = dict.fromkeys(wanted, 0)
        if self.rank < marker["ranks"]:
            state[f"generator_{self.rank}"] = generators()
        try:
            load(state, checkpoint_id=path, process_group=self.group)
        except (Exception, CheckpointException) as error:  # the latter is no Exception; all mean: unusable files
            raise Refusal(
                f"{path} cannot be read: {_first_line(error)}", "delete it: the one before will be used"
            ) from error
        for part in self.parts:
            set_model_state_dict(part, {key: state["model"][key] for key in get_model_state_dict(part)})
        set_optimizer_state_dict(_joined(self.parts), self.optimizer, state["optimizer"], options=_FLAT)
        if self.rank < marker["ranks"]:
            restore_generators(state[f"generator_{self.rank}"])
        return step, state["extra"]

    def _state(self) -> Dict[str, Any]:
        """Nested: torch logs every top-level entry, which with hundreds of them costs more than copying the state."""
        model: Dict[str, Any] = {}
        for part in self.parts:
            model.update(get_model_state_dict(part))
        return {
            "model": model,
            "optimizer": get_optimizer_state_dict(_joined(self.parts), self.optimizer, options=_FLAT),
        }

    def _commit(self, step: int) -> None:
        """Rank 0's save ends after every rank's: torch writes .metadata only when all have reported."""
        if self.rank != 0:
            return
        path = os.path.join(self.folder, name_of(step))
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

    def _meet(self) -> None:
        if self.group is not None:
            dist.barrier(group=self.group)

    def _agree_on(self, step: Optional[int]) -> Optional[int]:
        if self.group is None:
            return step
        box = [step]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]


def _joined(parts: Sequence[nn.Module]) -> nn.Module:
    """The pipeline stages of one rank as one model: the same parameters under the same names."""
    if len(parts) == 1:
        return parts[0]
    whole = nn.Module()
    for part in parts:
        for path, parameter in part.named_parameters():
            *places, name = path.split(".")
            holder = whole
            for place in places:
                if not hasattr(holder, place):
                    holder.add_module(place, nn.Module())
                holder = holder.get_submodule(place)
            holder.register_parameter(name, parameter)
    return whole


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


def generators() -> Dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_generators(state: Dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _copied(x: Tensor) -> Tensor:
    """torch copies GPU tensors to the host before it returns; CPU tensors it would write while they change."""
    return x.detach().clone() if x.device.type == "cpu" else x


def _future(pending: Any) -> Future[Any]:
    return getattr(pending, "upload_completion", pending)  # type: ignore[no-any-return]


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
