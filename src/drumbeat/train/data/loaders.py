"""Any torch Dataset, DataLoader or iterable of batches, shared between the ranks.

A batch is the batch of one optimizer step on all ranks together, as it would be on one process; each data-parallel rank
takes its part of the rows. So the same script sees the same batches on any number of ranks, and the position in the data,
an epoch and a number of samples, means the same on all of them.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from drumbeat.train.layers.cross_entropy import IGNORE
from drumbeat.train.refusal import Refusal

_KEPT = (
    "num_workers", "collate_fn", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor",
    "persistent_workers",
)  # fmt: skip


class Batches:
    """This rank's part of every batch, on its device. Iterating gives all epochs, from where a checkpoint was taken."""

    def __init__(
        self,
        source: Any,
        epochs: int = 1,
        *,
        data_rank: int = 0,
        data_ranks: int = 1,
        device: Optional[torch.device] = None,
        batch_size: Optional[int] = None,
        shuffle: bool = True,
        seed: int = 0,
        split: bool = True,
        on_batch: Callable[[bool], None] = lambda counts: None,
    ) -> None:
        """`split=False`: the source gives each rank samples of its own already. `on_batch` is told whether a batch counts."""
        self.source = _loader(source, batch_size, shuffle)
        self.epochs, self.seed, self.split, self.on_batch = epochs, seed, split, on_batch
        self.data_rank, self.data_ranks = data_rank, data_ranks
        self.device = device or torch.device("cpu")
        self.epoch = self.samples = 0  # where we are: samples of all ranks in this epoch
        self._own: Optional[_OwnIndices] = None
        self._loader: Any = None

    def state_dict(self) -> Dict[str, int]:
        return {"epoch": self.epoch, "samples": self.samples}

    def load_state_dict(self, state: Dict[str, int]) -> None:
        self.epoch, self.samples = int(state["epoch"]), int(state["samples"])

    def __iter__(self) -> Iterator[Any]:
        while self.epoch < self.epochs:
            empty = self.samples == 0
            for batch, counts, rows in self._one_epoch(self.samples):
                empty = False
                self.samples += rows  # before the batch is handed out: a save in the loop's body counts it
                self.on_batch(counts)
                yield map_tensors(batch, self._moved)
            if empty:
                raise Refusal("the data gave no batch in a whole epoch", "check the data set and its batch size")
            self.epoch, self.samples = self.epoch + 1, 0

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def _one_epoch(self, done: int) -> Iterator[Tuple[Any, bool, int]]:
        """Yield (batch, whether it counts, its rows on all ranks), after the first `done` samples."""
        if not self.split:
            yield from self._as_given(done)
        elif isinstance(self.source, DataLoader) and self.source.batch_sampler is not None:
            if self._own is None:
                self._own = _OwnIndices(self.source.batch_sampler, self.data_rank, self.data_ranks)
                self._loader = _with_indices(self.source, self._own, self.device)
            seed = (self.seed << 20) + self.epoch
            _set_seed(self.source, seed)
            # Otherwise each start of an epoch would draw a random number that dropout gets in a run that was not resumed.
            self._loader.generator = torch.Generator().manual_seed(seed)
            self._own.begin(done)
            for batch in self._loader:
                yield batch, *self._own.handed_out.popleft()
        else:
            for batch in _after(self.source, done):
                part, counts = share_of(batch, self.data_rank, self.data_ranks)
                yield part, counts, rows_of(batch)

    def _as_given(self, done: int) -> Iterator[Tuple[Any, bool, int]]:
        """Yield batches until the first rank's data end: every forward pass of a sharded model needs all ranks."""
        for batch in _until_one_ends(_after(self.source, done // self.data_ranks)):
            yield batch, True, rows_of(batch) * self.data_ranks


class _OwnIndices:
    """A batch sampler that gives this rank's part of each batch of another one."""

    def __init__(self, batches: Any, rank: int, ranks: int) -> None:
        self.batches, self.rank, self.ranks, self.done = batches, rank, ranks, 0
        # Whether each batch counts, and its rows on all ranks: in the order in which a DataLoader returns the batches.
        self.handed_out: Deque[Tuple[bool, int]] = deque()

    def begin(self, done: int) -> None:
        """Start the next epoch after its first `done` samples."""
        self.done = done
        self.handed_out.clear()

    def __iter__(self) -> Iterator[List[Any]]:
        passed, first = 0, True
        for batch in self.batches:
            indices = list(batch)
            if first:
                _same_on_all_ranks(indices)
            first = False
            passed += len(indices)
            if passed <= self.done:
                continue
            if passed - len(indices) < self.done:
                raise Refusal(
                    f"the checkpoint was taken after {self.done} samples of this epoch, inside a batch of {len(indices)}",
                    "resume with the batch size that it was made with",
                )
            start, end = len(indices) * self.rank // self.ranks, len(indices) * (self.rank + 1) // self.ranks
            self.handed_out.append((end > start, len(indices)))
            yield indices[start:end] or indices[:1]

    def __len__(self) -> int:
        return len(self.batches)


def _loader(source: Any, batch_size: Optional[int], shuffle: bool) -> Any:
    if isinstance(source, DataLoader):
        if batch_size is not None:
            raise Refusal("batch_size belongs to the DataLoader that you gave", "leave it out here")
        if isinstance(source.sampler, DistributedSampler):
            what = "the DataLoader has a DistributedSampler, and batches would be shared between the ranks twice"
            raise Refusal(what, "give it no sampler (shuffle=True), or pass split=False")
        return source
    if isinstance(source, (Dataset, IterableDataset)) or (hasattr(source, "__getitem__") and batch_size is not None):
        if batch_size is None:
            raise Refusal("a data set alone has no batches", "pass batch_size, or a DataLoader")
        ordered = isinstance(source, IterableDataset)
        return DataLoader(source, batch_size, shuffle=None if ordered else shuffle)
    if not hasattr(source, "__iter__"):
        raise Refusal(f"{type(source).__name__} gives no batches", "pass a Dataset, a DataLoader or an iterable")
    return source


def _with_indices(loader: DataLoader[Any], own: _OwnIndices, device: torch.device) -> DataLoader[Any]:
    options = {name: getattr(loader, name) for name in _KEPT}
    if not loader.num_workers:
        del options["prefetch_factor"], options["persistent_workers"]
    pin = loader.pin_memory or device.type == "cuda"
    return DataLoader(loader.dataset, batch_sampler=own, pin_memory=pin, **options)  # type: ignore[arg-type]


def _set_seed(loader: DataLoader[Any], seed: int) -> None:
    """Seed random samplers: their generator must be the same on every rank, and different for every epoch."""
    samplers: List[Any] = [loader.sampler, getattr(loader.batch_sampler, "sampler", None), loader.batch_sampler]
    for sampler in samplers:
        if hasattr(sampler, "generator"):
            sampler.generator = torch.Generator().manual_seed(seed)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(seed & 0xFFFFF)


def _after(source: Any, done: int) -> Iterator[Any]:
    for batch in source:
        if done >= rows_of(batch):
            done -= rows_of(batch)
        elif done:
            raise Refusal("the checkpoint was taken inside a batch", "resume with the batch size that it was made with")
        else:
            yield batch


def _until_one_ends(source: Iterator[Any]) -> Iterator[Any]:
    while True:
        batch = next(source, None)
        has_one = torch.tensor(int(batch is not None))
        if dist.is_initialized():
            dist.all_reduce(has_one, dist.ReduceOp.MIN)
        if not has_one:
            return
        yield batch


def _same_on_all_ranks(indices: List[Any]) -> None:
    if not dist.is_initialized():
        return
    own = zlib.crc32(repr(indices).encode())
    both = torch.tensor([own, -own])
    dist.all_reduce(both, dist.ReduceOp.MAX)
    if int(both[0]) != -int(both[1]):
        what = "the sampler gives each rank other samples, so batches cannot be shared"
        raise Refusal(what, "let it draw from a torch generator in its attribute `generator`, or pass split=False")


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same structure with every tensor changed; mappings of any kind become dicts."""
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
    """Return the number of samples: the length of the first tensor."""
    for tensor in tensors_of(batch):
        if tensor.ndim:
            return len(tensor)
    what = f"a batch of type {type(batch).__name__} holds no tensor"
    raise Refusal(what, "yield tensors, alone or in dicts or tuples")


def share_of(batch: Any, part: int, parts: int) -> Tuple[Any, bool]:
    """Return part `part` of `parts` of the rows. With fewer rows than parts, the parts without rows get row 0 and False, which
    says that it must not count: every rank has to take part in every forward pass."""
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


# Ranks whose data end at different times, or that split a step into more micro-batches than others. Each forward pass of a
# sharded model needs all ranks, so a rank that has nothing left must still take part: it repeats its last inputs with no targets,
# which adds nothing to the loss, to the gradients or to the divisor of the loss.
#     for batches in together(my_steps):  # instead of: for batches in my_steps
#         step(batches)
# The recipes do not need it: their Stream gives every rank the same number.


Batch = Tuple[Tensor, Tensor]


def together(steps: Iterable[List[Batch]]) -> Iterator[List[Batch]]:
    """Yield the lists of micro-batches of `steps` until the last rank's end, equally long on all ranks."""
    source = iter(steps)
    empty: List[Batch] = []
    while True:
        own = next(source, [])
        if own:
            inputs, targets = own[-1]
            empty = [(inputs, torch.full_like(targets, IGNORE))]
        most, has_none = _largest(len(own), int(not empty))
        if most == 0:
            return
        if has_none:  # every rank sees this, so every rank stops
            raise Refusal("a rank has no data at all", "give every rank at least one micro-batch in the first step")
        yield own + empty * (most - len(own))


def _largest(*numbers: int) -> List[int]:
    """Return the largest of each number over all ranks."""
    agreed = torch.tensor(numbers)  # on the CPU: the device is not waited for
    if dist.is_initialized():
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return agreed.tolist()
