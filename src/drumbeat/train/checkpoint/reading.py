"""Reading a checkpoint's files: what is in them, and what can be said where they cannot be read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Dict, List, Mapping, Optional

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from drumbeat.train.checkpoint.folder import Unreadable

_THREADS = 4  # files read at a time, per rank; each takes one tensor to the host at a time


class Reader(FileSystemReader):
    """Torch's reader takes one file after the other; this one several at a time."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: Dict[str, List[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        read = super().read_data
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="drumbeat-read") as pool:
            list(pool.map(lambda items: read(replace(plan, items=items), planner), by_file.values()))
        done: Future[None] = Future()
        done.set_result(None)
        return done


def contents(path: str, reader: FileSystemReader) -> Dict[str, Optional[torch.dtype]]:
    """The entries of a checkpoint and their dtypes; None for those that are not tensors."""
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
    """Copies of those entries of a nested state that a checkpoint has, too, under `path`."""
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
    except (Exception, CheckpointException) as error:  # all mean: unusable files
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
