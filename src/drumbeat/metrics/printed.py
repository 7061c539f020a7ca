"""Lines that training programs print, read as metrics."""

from __future__ import annotations

import math
import os
import time
from typing import Any, Dict, List, Optional, Tuple

from drumbeat.base.regex import regex
from drumbeat.metrics.grammar import Rule, by_plain_text

# The step of lines that count the batches of an epoch: `Epoch [2/3], Step [5/30]` is step 35 of 90.


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


# Reads what a rank prints, as it comes: whole lines, progress bars that overwrite themselves, colours. Every byte of
# every rank passes through here, so the first look is a search for a few words over a whole chunk; only a line with
# one of them is decoded and compared with the rules.


RATES = {"samples_per_s": "samples/s", "tokens_per_s": "tokens/s"}  # the later one is shown
_WHOSE_UNIT = {"all": "{}", "rank": "{} per rank", "device": "{} per device", "unknown": "{} as printed"}
_LONGEST = 2000  # characters of a line that is looked at
_LONGEST_PLAIN = 500  # that general rules look at
_KEPT = 1 << 16  # bytes of an unfinished line
_CHUNK = 1 << 20  # bytes of one log that are read at a time
_BEHIND = 8 << 20
_EVERY = 0.25  # seconds between two looks at the logs
_LOG_NAME = regex(r"rank-(\d{1,7})\.(?:out|err)")
_LAUNCHER_NAME = regex(r"launcher\.(?:out|err)")
_COLOUR = regex(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\].*?(?:\x07|\x1b\\)|\x1b[()][A-Z0-9]")
_STAMP = regex(
    r"(?<![\w./])(?:\d{4}[/.-]\d{1,2}[/.-]\d{1,2}|\d{1,2}[/.-]\d{1,2}[/.-]\d{2,4}|\d{1,2}/\d{1,2}(?=[ T]\d{1,2}:\d\d))"
    r"(?:[ T,]{1,2}\d{1,2}:\d\d(?::\d\d)?(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?)?(?![\w/])"
    r"|(?<![\w:.])\d{1,2}:\d\d:\d\d(?:[.,]\d{1,9})?(?![\w:])"
    r"|(?<![\w.)])(?:~|\.{1,2})?(?:/[\w.+-]{1,80}){2,}|(?<![\w.])v?\d{1,4}\.\d{1,4}\.\d[\w.+-]*"
)
_FIRST_STAMP = regex(r"^\s*(?:[\[(]?<t>[\])]?[\s,|:-]*)+")
# Every line of every format has one of these words (a test sees to it); hardly any other line has.
WORDS = (
    "loss", "Loss", "/sec", "_sec", "PerSec=", "Acc@1", "ccuracy", "step=", "step_avg:", "Batchsize:", "completed", "[batch=",
    "perf/throughput:", "img/s", "tokens/", "iteration", "(train)", "time=", "training time:", "Number of ", "GPUs used:",
)  # fmt: skip
_WORDS = tuple(word.encode() for word in WORDS)


def read_line(text: str) -> List[Dict[str, Any]]:
    """The metrics records that a printed line stands for, without time and rank; none for any other line."""
    if len(text) > _LONGEST:
        return []
    if "\x1b" in text or "\b" in text:
        text = _COLOUR.sub("", text).replace("\b", "")
    bare: Optional[str] = None
    for plain, rules in by_plain_text():
        if plain in text:
            for rule in rules:
                if rule.rule.general and len(text) > _LONGEST_PLAIN:
                    return []
                if rule.rule.general and bare is None:
                    bare = without_stamps(text)
                record = rule.read(text if bare is None else bare)
                if record is not None:
                    return _records(record, rule.rule) if record else []
    return []


def without_stamps(text: str) -> str:
    """The line with every date, clock, path and version masked, and without those at its start: their numbers count nothing."""
    return _FIRST_STAMP.sub("", _STAMP.sub("<t>", text), 1)


def _records(values: Dict[str, Any], rule: Rule) -> List[Dict[str, Any]]:
    """In the words of the run folder: a rate with its unit, whose it is, and a validation as a record of its own."""
    record = {name: _plain(value) for name, value in values.items() if name != "validation"}
    if "loss" in record:
        record["loss_per"] = rule.per["loss"]
    for name, unit in RATES.items():
        if name in record and isinstance(record[name], float):
            whose = rule.per[name]
            record.update(rate=record[name], rate_per=whose, unit=_WHOSE_UNIT[whose].format(unit))
    if "validation" not in values:
        return [record]
    validation = {
        "kind": "validation",
        "loss": _plain(values["validation"]),
        "loss_per": rule.per.get("validation", "all"),
    }
    if "accuracy" in record:
        validation["accuracy"] = record.pop("accuracy")
    return [record, validation]


def _plain(value: Any) -> Any:
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)  # JSON has no nan


class Unread:
    """Lines that the reader failed at: a defect of its own, which must cost nothing but these lines."""

    def __init__(self) -> None:
        self.lines, self.why = 0, ""  # why: of the first

    def add(self, error: Exception, line: str) -> None:
        self.lines += 1
        self.why = self.why or f"{type(error).__name__}: {error}, in {line[:200]!r}"

    def take(self) -> Tuple[int, str]:
        taken = (self.lines, self.why)
        self.lines, self.why = 0, ""
        return taken


class Reader:
    """One stream of one rank. `feed` takes what was appended to it and gives the records in it."""

    def __init__(self, unread: Optional[Unread] = None) -> None:
        self.unread = Unread() if unread is None else unread
        self._rest = b""
        self._steps = EpochSteps()

    def feed(self, data: bytes, final: bool = False) -> List[Dict[str, Any]]:
        data = (self._rest + data).replace(b"\r", b"\n")  # a progress bar's updates are lines too
        end = len(data) if final else data.rfind(b"\n") + 1
        self._rest = data[end:][-_KEPT:]
        lines = (data[start:stop].decode("utf-8", "replace") for start, stop in _promising(data, end))
        return [record for line in lines for record in self._records(line)]

    def _records(self, line: str) -> List[Dict[str, Any]]:
        try:
            return [self._steps.counted(record) for record in read_line(line)]
        except Exception as error:  # a rank may print anything, and a run must not end by it
            self.unread.add(error, line)
            return []


def _promising(data: bytes, end: int) -> List[Tuple[int, int]]:
    """Where lines with one of the words begin and end, in order."""
    found = set()
    for word in _WORDS:
        place = data.find(word, 0, end)
        while place >= 0:
            start = data.rfind(b"\n", 0, place) + 1
            stop = data.find(b"\n", place, end)
            stop = end if stop < 0 else stop
            found.add((start, stop))
            place = data.find(word, stop, end)
    return sorted(found)


class PrintedMetrics:
    """What all ranks of a node print in one attempt, on both streams: the folder of their logs is looked through again
    and again, since some files appear late. Where no rank has a log of its own, what its launcher prints is read."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.unread = Unread()
        self._files: Dict[str, _Log] = {}
        self._next = 0.0
        self._looked = time.time()  # last

    def read(self, final: bool = False) -> List[Dict[str, Any]]:
        """New records, each with its time and the rank in whose log it stands; asked again at once, it does not look again."""
        now = time.monotonic()
        if now < self._next and not final:
            return []
        self._next = now + _EVERY
        try:
            names = sorted(os.listdir(self.folder))
        except OSError:
            return []
        records = []
        ranked = [name for name in names if _LOG_NAME.fullmatch(name)]
        for name in ranked or [name for name in names if _LAUNCHER_NAME.fullmatch(name)]:
            if name not in self._files:
                match = _LOG_NAME.fullmatch(name)
                rank = int(match.group(1)) if match else 0
                self._files[name] = _Log(os.path.join(self.folder, name), rank, self._looked, self.unread)
            log = self._files[name]
            records += [{"t": t, "rank": log.rank, "printed": True, **record} for t, record in log.read(final)]
        self._looked = time.time()
        return records


class _Log:
    def __init__(self, path: str, rank: int, looked: float, unread: Unread) -> None:
        self.path, self.rank, self._unread = path, rank, unread
        self._looked = looked  # when there was nothing new
        self._place = 0
        self._which: Optional[Tuple[int, int]] = None  # device and inode of the file that was read so far
        self._reader = Reader(unread)

    def read(self, final: bool) -> List[Tuple[float, Dict[str, Any]]]:
        """New records, each with the time at which its line was written: that of the last one is the file's own; those
        before it came since the last look, and are spread evenly over that time."""
        now = time.time()
        try:
            status = os.stat(self.path)
            size, data = status.st_size, b""
            which = (status.st_dev, status.st_ino)
            if size < self._place or which != (self._which or which):  # begun anew, or another file in its place
                self._place, self._reader = 0, Reader(self._unread)
            self._which = which
            if size != self._place:
                with open(self.path, "rb", buffering=0) as file:
                    if size - self._place > _BEHIND:  # a rank that prints faster than we read: the newest counts
                        self._place, self._reader = size - _CHUNK, Reader(self._unread)
                    file.seek(self._place)
                    data = file.read(_CHUNK)
        except OSError:
            return []
        since, self._looked = min(self._looked, now), now  # the clock may have been set back
        self._place += len(data)
        ends = final and self._place >= size
        if not data and not ends:
            return []
        records = self._reader.feed(data, ends)
        until = status.st_mtime if since <= status.st_mtime <= now else now  # a file server's clock may be another
        count = len(records)
        return [(until - (until - since) * (count - 1 - i) / count, record) for i, record in enumerate(records)]
