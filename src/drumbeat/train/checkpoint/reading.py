"""Reading a checkpoint's files: what is in them, and what can be said where they cannot be read."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from drumbeat.train.checkpoint.folder import Unreadable


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
        return f"{type(inner).__name__} on rank {rank}: {str(inner)[:150]}".rstrip(": ")
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
