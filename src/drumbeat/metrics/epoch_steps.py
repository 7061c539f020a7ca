"""The step of lines that count the batches of an epoch: `Epoch [2/3], Step [5/30]` is step 35 of 90."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple


class EpochSteps:
    """Of one stream of one rank. Some programs count epochs from 0, others from 1: the first epoch of the stream tells, and
    for a program that goes on in a later one, whether it prints the number of epochs (then from 1). A counter that goes on
    when the epoch changes counts the steps of all epochs. Where epochs differ in length, nobody knows the step of the run: from
    then on the step is the epoch's own, as it was printed, and `step_of` says so."""

    def __init__(self) -> None:
        self._first: Optional[int] = None  # the number of the first epoch
        self._last: Tuple[int, int] = (0, 0)  # epoch and batch of the last line
        self._over_all = False  # the counter does not begin again with each epoch
        self._per_epoch = False  # it does: seen, not guessed
        self._batches: Optional[int] = None  # of the last line's epoch
        self._uneven = False  # epochs differ in length, or there are more of them than announced

    def counted(self, record: Dict[str, Any]) -> Dict[str, Any]:
        """The record with its step, and with the number of steps where that is sure."""
        epoch, batch, batches, epochs = (record.get(name) for name in ("epoch", "batch", "batches", "epochs"))
        if record["kind"] != "step" or batch is None or not batches or not isinstance(epoch, (int, float)):
            return record
        guessed = "step" in record  # by its rule, as if epochs were counted from 0
        if epoch != int(epoch) or (guessed and record["step"] != int(epoch) * batches + batch):
            return record
        epoch = int(epoch)
        self._uneven = self._uneven or self._batches not in (None, batches)
        self._batches = batches
        if self._first is None:
            self._first = epoch if epoch < 2 else int(bool(epochs))
        elif epoch > self._last[0]:
            self._over_all = not guessed and not self._per_epoch and batch > self._last[1]
            self._per_epoch = not self._over_all
        self._last = (epoch, batch)
        before = max(0, epoch - self._first)  # epochs
        self._uneven = self._uneven or (
            not self._over_all and bool(epochs) and before * batches + batch > epochs * batches
        )
        if self._uneven:
            return {**record, "step": batch, "steps": batches, "step_of": "epoch"}
        if self._over_all:
            return {**record, "step": batch, "steps": batches}
        self._per_epoch = self._per_epoch or bool(epochs and batch * epochs > (before + 1) * batches)
        sure = epochs and (self._per_epoch or epochs == 1)
        planned = {"steps": epochs * batches} if sure and "steps" not in record else {}
        return {**record, "step": before * batches + batch, **planned}
