"""A batch is whatever a DataLoader yields: a tensor, or tensors inside dicts, lists and tuples. Its rows are samples."""

from __future__ import annotations

from typing import Any, Callable, Iterator, List, Mapping, Tuple

from torch import Tensor

from drumbeat.train.refusal import Refusal


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed; mappings of any kind become dicts."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(value, change) for value in batch)
    return batch


def rows_of(batch: Any) -> int:
    """How many samples: the length of the first tensor."""
    for tensor in tensors_of(batch):
        if tensor.ndim:
            return len(tensor)
    raise Refusal(
        f"a batch of type {type(batch).__name__} holds no tensor", "yield tensors, alone or in dicts or tuples"
    )


def share_of(batch: Any, part: int, parts: int) -> Tuple[Any, bool]:
    """Part `part` of `parts` of the rows. With fewer rows than parts some get none: they get row 0 and False, which says
    that it must not count, because every rank has to take part in every forward pass."""
    rows = rows_of(batch)
    first, last = rows * part // parts, rows * (part + 1) // parts
    counts = last > first
    if not counts:
        first, last = 0, 1

    def cut(tensor: Tensor) -> Tensor:
        return tensor[first:last] if tensor.ndim and len(tensor) == rows else tensor

    return map_tensors(batch, cut), counts


def micro_batches(batch: Any, count: int) -> List[Tuple[Any, bool]]:
    return [(batch, True)] if count == 1 else [share_of(batch, i, count) for i in range(count)]


def tensors_of(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors_of(value)
