"""Weights out of a run, as transformers reads them: safetensors, config.json and the tokenizer's files.

They are written from a checkpoint, in one process, tensor by tensor: from any layout and any step, and on a machine without GPUs.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from drumbeat.train import lora
from drumbeat.train.checkpoint.folder import check_files, committed, has_marker, name_of, read_marker
from drumbeat.train.hugging_face import publisher
from drumbeat.train.models.llama import segments, shape_from
from drumbeat.train.refusal import Refusal
from drumbeat.train.safetensors import Entry, write

CONFIG = "config.json"
# Files beside a model's weights that its users need; never code, which a loader might run.
_BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", "chat_template.json", "generation_config.json",
    "preprocessor_config.json",
)  # fmt: skip
_KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_AT_ONCE = 1 << 30  # bytes read from a checkpoint at a time


def read_config(folder: str) -> Dict[str, Any]:
    path = os.path.join(folder, CONFIG)
    try:
        with open(path, encoding="utf-8") as file:
            config: Dict[str, Any] = json.load(file)
    except (OSError, ValueError) as error:
        what = f"{path}: {getattr(error, 'strerror', None) or error}"
        raise Refusal(what, "give a folder as save_pretrained writes it") from None
    return config


def keep_config(folder: str, config: Optional[Mapping[str, Any]], beside: str = "") -> None:
    """Copy a model's config, and the tokenizer's files from the folder `beside`, to where an export finds them."""
    there = os.path.isdir(beside) and os.path.realpath(beside) != os.path.realpath(folder)
    with writing(folder):
        os.makedirs(folder, exist_ok=True)
        if config is not None:
            path = os.path.join(folder, CONFIG)
            with open(path + ".part", "w", encoding="utf-8") as file:
                json.dump(config, file, indent=2, sort_keys=True)
            os.replace(path + ".part", path)
        for name in _BESIDE if there else ():
            if os.path.isfile(os.path.join(beside, name)):
                shutil.copyfile(os.path.join(beside, name), os.path.join(folder, name))


def newest(folder: str, step: Optional[int] = None) -> Tuple[str, str]:
    """Return the checkpoint to export and the folder of its config. `folder` holds checkpoints, or is one."""
    path = folder.rstrip("/")
    if has_marker(path):
        return path, os.path.dirname(path)
    steps = committed(path)
    if not steps:
        raise Refusal(f"{folder}: no checkpoint in it", "name a run, or the folder that it saved its checkpoints in")
    if step is not None and step not in steps:
        raise Refusal(f"{folder}: no checkpoint of step {step}", f"there are {', '.join(map(str, steps))}")
    return os.path.join(path, name_of(steps[-1] if step is None else step)), path


def export_checkpoint(path: str, config_folder: str, folder: str, dtype: str = "", adapter: bool = False) -> str:
    """Write the model of the checkpoint at `path` into `folder`. Returns one line about it."""
    if has_marker(path):
        files = read_marker(path)["files"]
        if files is not None:
            check_files(path, files, 0, 1)
    config = read_config(config_folder) if os.path.exists(os.path.join(config_folder, CONFIG)) else None
    return export(path, config, config_folder, folder, dtype, adapter)


def export(
    path: str, config: Optional[Dict[str, Any]], beside: str, folder: str, dtype: str = "", adapter: bool = False
) -> str:
    """Write the model saved at `path` into `folder`, with the tokenizer's files from `beside`. Returns one line about it.
    `adapter`: only what LoRA has learnt, as peft reads it; without it, that is added to the weights."""
    if dtype and dtype not in _KINDS:
        raise Refusal(f"dtype '{dtype}' is unknown", f"known: {', '.join(_KINDS)}")
    saved = _Saved(path)
    held = saved.entries
    learnt = None
    if config is not None:
        learnt, config = config.get(lora.KEY), {key: value for key, value in config.items() if key != lora.KEY}
    if adapter and learnt is None:
        raise Refusal(f"{path} has no adapter", "only a model that was trained with LoRA has one")
    if adapter and learnt is not None:
        with writing(folder):
            lora.write_adapter(folder, held, saved.read, learnt, str((config or {}).get("_name_or_path") or ""))
        keep_config(folder, None, beside)
        return f"an adapter of rank {learnt['r']} in {folder}"
    entries: Dict[str, Entry] = {}
    origin: Dict[str, str] = {}  # name of the checkpoint tensor that it equals, begins or is cut from
    read: Callable[[str], Tensor]
    if config is not None and "blocks.0.attention.qkv.weight" in held:
        rows = _rows_of_theirs(config)
        for name, pieces in rows.items():
            origin[name] = pieces[0][0]
            ours, count = held[origin[name]], sum(end - first for _, _, first, end in pieces)
            entries[name] = Entry(ours.dtype, (count, *ours.shape[max(1, len(ours.shape) - 1) :]))

        def read(name: str) -> Tensor:
            return torch.cat([_rows(saved.read(ours))[at : at + end - first] for ours, at, first, end in rows[name]])
    else:
        published = publisher(config)
        parts: Dict[str, Tensor] = {}  # of one tensor of the checkpoint
        for name, entry in held.items():
            if not lora.is_adapter(name):
                parts = published(name, torch.empty(entry.shape, dtype=entry.dtype, device="meta"))
                entries.update({new: Entry(part.dtype, tuple(part.shape)) for new, part in parts.items()})
                origin.update(dict.fromkeys(parts, name))

        def whole(name: str) -> Tensor:
            a, b = (f"{name[: -len('weight')]}lora_{letter}.weight" for letter in "AB")
            if learnt is not None and a in held:
                return lora.merged(saved.read(name), saved.read(a), saved.read(b), learnt)
            return saved.read(name)

        def read(name: str) -> Tensor:
            nonlocal parts
            if name not in parts or parts[name].is_meta:
                parts = published(origin[name], whole(origin[name]))
            return parts[name]

    if dtype:
        kind = _KINDS[dtype]
        entries = {name: e._replace(dtype=kind) if e.dtype.is_floating_point else e for name, e in entries.items()}
    if config is not None and entries:
        kinds = {entry.dtype for entry in entries.values() if entry.dtype.is_floating_point}
        config = {**config, "dtype": str(kinds.pop()).replace("torch.", "")} if len(kinds) == 1 else config
    with writing(folder):
        os.makedirs(folder, exist_ok=True)
        files = write(folder, dict(sorted(entries.items(), key=lambda item: saved.order(origin[item[0]]))), read)
    keep_config(folder, config, beside)
    size = sum(entry.nbytes for entry in entries.values())
    without = "" if config is not None else f"; no {CONFIG}: the run had none"
    return f"{len(entries)} tensors, {size / 2**30:.2f} GiB, in {len(files)} file{'s' * (len(files) != 1)} in {folder}{without}"


@contextmanager
def writing(folder: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unwritable(folder, error.strerror or str(error)) from None


def unwritable(folder: str, why: str) -> Refusal:
    return Refusal(f"{folder} cannot be written: {why}", "make room, or name another folder")


def _rows(x: Tensor) -> Tensor:
    """Return a matrix; the rows of all experts follow each other."""
    return x.flatten(0, 1) if x.ndim == 3 else x


def _rows_of_theirs(config: Mapping[str, Any]) -> Dict[str, List[Tuple[str, int, int, int]]]:
    """Return the rows of our matrices that make up each of transformers' matrices: our name, our first row, and its first and
    last row."""
    theirs: Dict[str, List[Tuple[str, int, int, int]]] = {}
    for ours, pieces in segments(shape_from(config)).items():
        at = 0
        for name, first, end in pieces:
            theirs.setdefault(name, []).append((ours, at, first, end))
            at += end - first
    return {name: sorted(pieces, key=lambda piece: piece[2]) for name, pieces in theirs.items()}


class _Saved:
    """Reads the model's tensors from a checkpoint, some at a time."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            stored = FileSystemReader(path).read_metadata().state_dict_metadata
        except Exception as error:
            raise Refusal(f"{path} cannot be read: {error}", "give another checkpoint") from error
        self.entries = {
            name[len("model.") :]: Entry(entry.properties.dtype, tuple(entry.size))
            for name, entry in stored.items()
            if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
        }
        self._names = list(self.entries)
        self._held: Dict[str, Tensor] = {}

    def order(self, name: str) -> int:
        return self._names.index(name)

    def read(self, name: str) -> Tensor:
        if name not in self._held:
            self._held = {
                each: torch.empty(self.entries[each].shape, dtype=self.entries[each].dtype) for each in self._next(name)
            }
            load({"model": self._held}, storage_reader=FileSystemReader(self.path), no_dist=True)
        return self._held[name]

    def _next(self, name: str) -> Iterator[str]:
        size = 0
        for each in self._names[self.order(name) :]:
            size += self.entries[each].nbytes
            if each != name and size > _AT_ONCE:
                return
            yield each
