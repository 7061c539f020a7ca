"""The batches of one rank, step after step. Its whole state is one number: the first sample of the next step."""

from __future__ import annotations

import queue
import threading
from typing import Callable, Dict, Iterator, List, Optional, Protocol, Tuple

import numpy as np
import torch
from torch import Tensor

from drumbeat.train.data.order import places
from drumbeat.train.refusal import Refusal

Batch = Tuple[Tensor, Tensor]


class Pieces(List[Batch]):
    """The micro-batches of one step."""


class Samples(Protocol):
    def __len__(self) -> int: ...

    def read(self, indices: list[int], epochs: list[int]) -> Batch:
        """Inputs and targets of these samples. The epoch is for augmentation: the same pair gives the same result."""
        ...


class Images(Samples, Protocol):
    def finish(self, inputs: Tensor) -> Tensor:
        """Turn what was read into the images that a model takes; runs on the device that trains."""
        ...


class Stream:
    """Step k takes samples k * batch to (k + 1) * batch - 1 of the endless shuffled sequence; of those, this rank takes
    its share, in `accumulate` micro-batches. All ranks always have equally much, so none can be left waiting.
    """

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
        self._ahead: Optional[Iterator[List[Batch]]] = None

    def state_dict(self) -> Dict[str, int]:
        return {"sample": self.sample}

    def load_state_dict(self, state: Dict[str, int]) -> None:
        self.sample = int(state["sample"])
        self.close()

    def __next__(self) -> Pieces:
        if self._ahead is None:
            self._ahead = _ahead_of(self, self.sample, self.prefetch) if self.prefetch else self._from(self.sample)
        batches = next(self._ahead)
        self.sample += self.batch
        moved = [(self._moved(x), self._moved(y)) for x, y in batches]
        return Pieces(moved if self.finish is None else [(self.finish(x), y) for x, y in moved])

    def _moved(self, x: Tensor) -> Tensor:
        if x.is_cuda:  # decoded there, on another stream: its memory must not be given away while this one reads it
            x.record_stream(torch.cuda.current_stream(x.device))
        return x.to(self.device, non_blocking=True)

    def close(self) -> None:
        """Let the reading thread end; the next batch starts a new one."""
        if isinstance(self._ahead, _Ahead):
            self._ahead.close()
        self._ahead = None

    def _from(self, sample: int) -> Iterator[List[Batch]]:
        while True:
            yield self._read(sample)
            sample += self.batch

    def _read(self, sample: int) -> List[Batch]:
        first = sample + self.data_rank * self.own
        numbers = np.arange(first, first + self.own, dtype=np.uint64)
        epochs, indices = places(numbers, len(self.samples), self.seed, self.shuffle)
        inputs, targets = self.samples.read(indices.tolist(), epochs.tolist())
        if self.device.type != "cpu":
            inputs, targets = (x if x.is_cuda else x.pin_memory() for x in (inputs, targets))
        return list(zip(inputs.chunk(self.accumulate), targets.chunk(self.accumulate)))


class _Ahead:
    """A thread that reads the next batches while the device computes."""

    def __init__(self, source: Iterator[List[Batch]], depth: int) -> None:
        self._queue: queue.Queue[object] = queue.Queue(depth)
        self._stop = threading.Event()
        self._source = source
        self._thread = threading.Thread(target=self._fill, name="drumbeat-data", daemon=True)
        self._thread.start()

    def _fill(self) -> None:
        try:
            while not self._stop.is_set():
                self._put(next(self._source))
        except BaseException as error:  # handed to the training thread, which raises it where the batch was wanted
            self._put(error)

    def _put(self, item: object) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> List[Batch]:
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item  # type: ignore[return-value]

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def _ahead_of(stream: Stream, sample: int, depth: int) -> _Ahead:
    return _Ahead(stream._from(sample), depth)
