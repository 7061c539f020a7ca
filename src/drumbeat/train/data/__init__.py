"""The batches of one rank, step after step. Its whole state is one number: the first sample of the next step.

Samples come in a shuffled order that needs no memory and can be entered anywhere.
Sample number n of a whole training run is a plain integer. Its epoch is n // size, and its place in the data set is a
permutation of n % size: a four-round Feistel network over the next even power of two, walked until it falls inside.
So a run resumed at sample n, on any number of ranks, goes on exactly where it was: nothing repeated, nothing skipped.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, Deque, Dict, List, Optional, Protocol, Tuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drumbeat.train.refusal import Refusal

Batch = Tuple[Tensor, Tensor]


class Pieces(List[Batch]):
    """The micro-batches of one step."""


class Samples(Protocol):
    def __len__(self) -> int: ...

    def read(self, indices: list[int], epochs: list[int]) -> Batch:
        """Return inputs and targets of these samples. The epoch is for augmentation: the same pair gives the same result.

        Samples may have `sizes`, the tokens of each one, if not every token is a target.
        """
        ...


class Images(Samples, Protocol):
    def finish(self, inputs: Tensor) -> Tensor:
        """Turn what `read` returned into the images that a model takes; runs on the device that trains."""
        ...


class Stream:
    """Step k takes samples k * batch to (k + 1) * batch - 1 of the endless shuffled sequence; this rank takes its share of them,
    in `accumulate` micro-batches. All ranks always have the same number, so none is left waiting."""

    def __init__(
        self,
        samples: Samples,
        batch: int,
        *,
        data_rank: int = 0,
        data_ranks: int = 1,
        accumulate: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        device: Optional[torch.device] = None,
        prefetch: int = 2,
        finish: Optional[Callable[[Tensor], Tensor]] = None,
    ) -> None:
        """`finish` is the part of making inputs that the training device does better, such as bytes to numbers."""
        if batch % (data_ranks * accumulate):
            raise Refusal(
                f"a batch of {batch} samples does not divide into {data_ranks} data-parallel ranks x "
                f"{accumulate} micro-batches",
                "choose a multiple",
            )
        if len(samples) == 0:
            raise Refusal("the data set is empty")
        self.samples, self.batch, self.accumulate, self.seed, self.shuffle = samples, batch, accumulate, seed, shuffle
        self.data_rank, self.own = data_rank, batch // data_ranks
        self.micro = self.own // accumulate  # samples of one micro-batch of this rank
        self.device = device or torch.device("cpu")
        self.prefetch, self.finish = prefetch, finish
        self.sample = 0
        self.readers: int = getattr(samples, "readers", 1)  # threads, each with a batch of its own
        self._pool: Optional[ThreadPoolExecutor] = None
        self._ahead: Deque[Future[List[Batch]]] = deque()  # the batches that follow

    def state_dict(self) -> Dict[str, int]:
        return {"sample": self.sample}

    def load_state_dict(self, state: Dict[str, int]) -> None:
        self.sample = int(state["sample"])
        self.close()

    def __next__(self) -> Pieces:
        batches = self._next_read() if self.prefetch else self._read(self.sample)
        self.sample += self.batch
        moved = [(self._moved(x), self._moved(y)) for x, y in batches]
        return Pieces(moved if self.finish is None else [(self.finish(x), y) for x, y in moved])

    def tokens(self, steps: int) -> Optional[int]:
        """Count the tokens in the last batches of all ranks, whether they count in the loss or not; None if not known."""
        sizes = getattr(self.samples, "sizes", None)
        if sizes is None:
            return None
        numbers = np.arange(self.sample - steps * self.batch, self.sample, dtype=np.uint64)
        return int(sizes[places(numbers, len(self.samples), self.seed, self.shuffle)[1]].sum())

    def _next_read(self) -> List[Batch]:
        """Return the next batches; threads read ahead while the device computes."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.readers, thread_name_prefix="drumbeat-data")
        while len(self._ahead) < self.prefetch + self.readers:
            self._ahead.append(self._pool.submit(self._read, self.sample + len(self._ahead) * self.batch))
        try:
            return self._ahead.popleft().result()
        except BaseException:
            self.close()
            raise

    def _moved(self, x: Tensor) -> Tensor:
        if x.is_cuda:  # decoded there, on another stream: its memory must not be given away while this one reads it
            x.record_stream(torch.cuda.current_stream(x.device))
        return x.to(self.device, non_blocking=True)

    def close(self) -> None:
        """Let the reading threads end; the next batch starts new ones."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None
        self._ahead.clear()

    def _read(self, sample: int) -> List[Batch]:
        first = sample + self.data_rank * self.own
        numbers = np.arange(first, first + self.own, dtype=np.uint64)
        epochs, indices = places(numbers, len(self.samples), self.seed, self.shuffle)
        inputs, targets = self.samples.read(indices.tolist(), epochs.tolist())
        if self.device.type != "cpu":
            inputs, targets = (x if x.is_cuda else x.pin_memory() for x in (inputs, targets))
        return list(zip(inputs.chunk(self.accumulate), targets.chunk(self.accumulate)))


Integers = npt.NDArray[np.uint64]


def places(numbers: Integers, size: int, seed: int, shuffle: bool = True) -> tuple[Integers, Integers]:
    """Return (epoch, index in the data set) of each sample number."""
    epoch, index = numbers // np.uint64(size), numbers % np.uint64(size)
    return (epoch, _permuted(index, epoch, size, seed)) if shuffle and size > 1 else (epoch, index)


def _permuted(index: Integers, epoch: Integers, size: int, seed: int) -> Integers:
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    out = index.copy()
    outside = np.ones(len(index), dtype=bool)
    while outside.any():  # fewer than four turns on average: the network covers at most four times the data set
        left, right = out[outside] >> half, out[outside] & mask
        for turn in range(4):
            left, right = right, left ^ (_mix(right, epoch[outside], seed, turn) & mask)
        out[outside] = (left << half) | right
        outside = out >= np.uint64(size)
    return out


def _mix(x: Integers, epoch: Integers, seed: int, turn: int) -> Integers:
    """Return a hash of the inputs (the finishing steps of splitmix64)."""
    with np.errstate(over="ignore"):
        key = np.uint64((seed * 4 + turn + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
        x = x + key + epoch * np.uint64(0xD1342543DE82EF95)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
