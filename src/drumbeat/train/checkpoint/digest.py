"""Hashes of a training state: two states are the same, bit by bit, where all their hashes are.

They are sums of integers, computed where the tensors are: exact in any order, so fast on a GPU. They find mistakes; they are
no protection against somebody who wants two states to have one hash.
"""

from __future__ import annotations

import hashlib
from typing import Any, Dict, List, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from drumbeat.train.checkpoint.generators import generators
from drumbeat.train.checkpoint.state import TrainingState, own_part

_CHUNK = 1 << 24  # elements hashed at once: 128 MB of 64-bit products
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # an odd number with mixed bits: the weight of an element follows from its place


class Digest(NamedTuple):
    """The hashes of this rank's part of the state after a step."""

    step: int
    entries: Dict[str, str]

    def differs_from(self, other: Digest) -> List[str]:
        """Names of what is not the same in both."""
        names = sorted({*self.entries, *other.entries})
        return [name for name in names if self.entries.get(name) != other.entries.get(name)]

    def of_all_ranks(self) -> str:
        """One hash for the state of all ranks; all ranks must ask together."""
        own = hashlib.sha256(repr(sorted(self.entries.items())).encode()).hexdigest()
        every: List[Any] = [own]
        if dist.is_initialized():
            every = [None] * dist.get_world_size()
            dist.all_gather_object(every, own)
        return hashlib.sha256("".join(every).encode()).hexdigest()[:16]


def digest(step: int, state: TrainingState, others: Dict[str, Any]) -> Digest:
    """`others`: what else belongs to the state, such as the loss scale or the position in the data."""
    now = state.now()
    entries = {f"{kind}.{name}": value for kind in ("model", "optimizer") for name, value in now[kind].items()}
    entries.update({f"group.{name}.{key}": value for name, pairs in now["groups"].items() for key, value in pairs})
    entries.update({f"generator.{name}": value for name, value in generators().items()})
    entries.update(others)
    return Digest(step, {name: _hash(value) for name, value in entries.items()})


def _hash(value: Any) -> str:
    if isinstance(value, dict):
        return str({key: _hash(inner) for key, inner in sorted(value.items())})
    return tensor_hash(value) if isinstance(value, Tensor) else repr(value)


def tensor_hash(tensor: Tensor) -> str:
    own = own_part(tensor.detach())
    plain, weighted = (number & (1 << 64) - 1 for number in hash_on_device(own).tolist())
    return f"{own.dtype} {tuple(own.shape)} {plain:016x}{weighted:016x}"


@torch.no_grad()
def hash_on_device(tensor: Tensor) -> Tensor:
    """Two integers, on the tensor's device: the host does not wait."""
    own = own_part(tensor.detach())
    flat = own.contiguous().reshape(-1).view(torch.uint8)
    flat = flat.view(torch.int32) if flat.numel() % 4 == 0 and flat.storage_offset() % 4 == 0 else flat
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for at in range(0, flat.numel(), _CHUNK):
        numbers = flat[at : at + _CHUNK].to(torch.int64)
        places = torch.arange(at + 1, at + 1 + numbers.numel(), device=numbers.device, dtype=torch.int64)
        sums += torch.stack((numbers.sum(), (numbers * (places * _STEP | 1)).sum()))  # wraps round, the same everywhere
    return sums
