"""Records from the lines of one rank, each with its step.

A counter counts once it has been seen to advance; a heading (`Epoch 1/3`, `step: 100`) belongs to the values below it; a bar
without values and a dictionary without a step belong together. What the lines are not known to be waits until later ones show
it, or is dropped.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Set, Tuple, Union

from drumbeat.base.regex import regex
from drumbeat.metrics.grammar import Line, parse
from drumbeat.metrics.rows import LONGEST, Rows
from drumbeat.metrics.shapes import Shapes
from drumbeat.metrics.table import owner_of, rules
from drumbeat.metrics.tokens import TOO_LARGE, words_of
from drumbeat.metrics.vocab import COUNTERS, VALIDATION

Record = Dict[str, Any]
Read = Union[None, Line, List[Record]]
RATES = {"samples_per_s": "samples/s", "tokens_per_s": "tokens/s"}  # on a tie the later one is shown
_WHOSE_UNIT = {"all": "{}", "rank": "{} per rank", "device": "{} per device", "unknown": "{} as printed"}
_UNPROVEN = 256  # steps held back until something shows that this is training
_BLOCK = 30  # lines that a heading applies to, for values without a counter
_BESIDE_LOSS = ("grad_norm", "lr", "step_time", *RATES)
_OF_EPOCH = {"step": "batch", "steps": "batches"}
# Labels of a bar that counts steps, and of one that counts those of the run.
_TRAINS = regex(r"(?i)train(?:ing)?(?: progress)?|steps?|iterations?|epochs?|episodes?|rounds?")
_STEPS = regex(r"(?i)(?:global[ _]?|training )?steps?")
_TRAINING = {"epoch", "loss", "validation", "lr", "grad_norm"}
_TIMED = {"step_time", *RATES}  # values that a benchmark or inference run has too
_WORTH = {"loss", "validation", "accuracy", "val_accuracy", *RATES}  # a record without a counter needs one of them
_EPOCHS = regex(r"(?i)(?:training |train )?epochs?")  # the label of a bar that counts epochs
_CLOSES = regex(r"(?i)\b(?:done|end(?:ed)?(?: of)?|finished|completed?|over)\b")  # the values of this epoch stand above
_PENDING = 8  # records without a counter that wait for such a line
_PLAN = regex(
    r"(?i)(?<![a-z_])((?:(?:max|total|scheduled|optimization|num(?:ber of)?(?=.train))[ _-]{1,2}(?:train(?:ing)?[ _-])?){1,2})?"
    r"(epochs|(?<=[ _-])(?:steps|iters|iterations|updates))['\"]?(?:\s?[:=]|(?= ))\s?['\"]?(\d[\d,]{0,11})(?![\w.]|\s?/)"
)


def read(
    text: str, shapes: Optional[Shapes] = None, tabled: bool = False, validating: bool = False
) -> Union[None, Line, List[Record]]:
    """Read a line: records by a rule of the table, a Line by the grammar, or nothing."""
    if len(text) > LONGEST:
        return None
    for rule in rules():
        record = rule.read(text) if rule.has in text else None
        if record is not None:
            return [_with_unit(record, next(iter(rule.per.values()), "unknown"))] if record else []
    line = parse(text, shapes, tabled, validating)
    return line._replace(whose=owner_of(text)) if line and line.whose == "unknown" else line


def records_of(line: Line) -> List[Record]:
    """Convert a line to records of the run folder: rates with units, whose they are, and validation as a separate record."""
    values = dict(line.values)
    other = {
        name: values.pop(key) for name, key in (("loss", "validation"), ("accuracy", "val_accuracy")) if key in values
    }
    other.update(line.measures)
    if line.validation and "loss" in values:
        other["loss"] = values.pop("loss")
    if line.validation and "accuracy" in values:
        other.setdefault("accuracy", values.pop("accuracy"))
    counters = {name: values[name] for name in COUNTERS if name in values}
    alone = line.validation or (bool(other) and not set(values) & {"loss", *RATES})
    found = []
    if not alone:
        kind = "step" if counters or "loss" in values else "validation" if "accuracy" in values else "throughput"
        found.append(_with_unit({"kind": kind, **values}, line.whose))
    if other:
        found.append(_with_unit({"kind": "validation", **(counters if alone else {}), **other}, "unknown"))
    return found


def reports(line: Line) -> bool:
    """Return true if a line reports progress: a heading, a bar or a learning rate alone does not."""
    names = {*line.values}
    timed = "epoch" in names and (line.improves or "step_time" in names)
    return not line.bare and bool(line.measures or names & {*_WORTH, "step", "batch"} or timed)


def _with_unit(record: Record, whose: str) -> Record:
    odd = {name: str(value) for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    record = {**record, **odd}  # JSON has no nan
    for name, unit in RATES.items():
        if isinstance(record.get(name), float):
            record.update(rate=record[name], rate_per=whose, unit=_WHOSE_UNIT[whose].format(unit))
    return record


class EpochSteps:
    """Convert batches of an epoch to steps: `Epoch [2/3], Step [5/30]` is step 35 of 90.

    One object handles one stream of one rank. Some programs count epochs from 0, others from 1: the first epoch in the stream
    decides. A counter that continues across epochs counts the steps of all epochs. If the stream begins later than the
    numbering, or if epochs differ in length, the step of the run cannot be known: from then on the step is the epoch's own, as
    printed, and `step_of` says so.
    """

    def __init__(self) -> None:
        self._first: Optional[int] = None  # the number of the first epoch
        self._last: Tuple[int, int] = (0, 0)  # epoch and batch of the last line
        self._over_all = False  # the counter does not restart with each epoch
        self._per_epoch = False  # it does restart: seen, not guessed
        self._batches: Optional[int] = None  # number of batches in the last line
        self._within = False  # only the epoch's own step is known

    def counted(self, record: Record) -> Record:
        """Return the record with its step, and with the number of steps if that is certain."""
        epoch, batch, batches, epochs = (record.get(name) for name in ("epoch", "batch", "batches", "epochs"))
        if record["kind"] != "step" or "step" in record or not isinstance(epoch, (int, float)) or epoch != int(epoch):
            return record
        epoch = int(epoch)
        if batch is None:  # the epoch's mean comes with its last step
            known = self._batches and self._last[0] == epoch and self._last[1] < self._batches
            mean = known and "loss" in record and not (self._within or self._over_all)
            return (
                {**record, "step": (max(0, epoch - (self._first or 0)) + 1) * (self._batches or 0)} if mean else record
            )
        if not batches:
            return {**record, "step": batch, "step_of": "epoch"}
        if epoch * batches + batch >= TOO_LARGE:
            return record
        self._within = self._within or self._batches not in (None, batches)
        self._batches = batches
        if self._first is None:
            self._first = epoch
            self._within = epoch > 1 or epoch == 1 and batches / 2 < batch < batches
        elif epoch > self._last[0]:
            self._over_all = not self._per_epoch and batch > self._last[1]
            self._per_epoch = not self._over_all
        self._last = (epoch, batch)
        before = max(0, epoch - self._first)  # epochs
        if self._over_all:
            return {**record, "step": batch, "steps": batches}
        self._within = self._within or bool(epochs) and before * batches + batch > epochs * batches
        if self._within:
            return {**record, "step": batch, "steps": batches, "step_of": "epoch"}
        self._per_epoch = self._per_epoch or bool(epochs and batch * epochs > (before + 1) * batches)
        sure = epochs and (self._per_epoch or epochs == 1)
        planned = {"steps": epochs * batches} if sure else {}
        return {**record, "step": before * batches + batch, **planned}


class Layout:
    """Reads the lines of one rank on both of its streams together."""

    def __init__(self) -> None:
        self.rows = Rows()
        self.shapes = Shapes()
        self._steps = EpochSteps()
        self._samples = EpochSteps()
        self._held: Dict[Tuple[str, ...], Record] = {}  # form -> a record whose counter has not been seen to advance
        self._trusted: Set[Tuple[str, ...]] = set()
        self._fractional = False  # an epoch such as 0.25 stood alone
        self._heading: Record = {}
        self._left = 0  # lines for which the heading still applies
        self._bars: Dict[int, int] = {}  # total -> count, of bars without a label and without values
        self._again: Set[int] = set()  # totals of bars that restarted: each is of an epoch
        self._joined: Optional[int] = None  # the total of the bar that counts the program's steps
        # Total and count of the bar, and epoch, of the last record with it.
        self._joined_at: Tuple[int, int, Any] = (0, 0, None)
        self._epoch_over = 0  # batches of the epoch under the heading, once it has ended
        self._block: Optional[Record] = None  # values below a heading; more may follow
        self._under: Set[str] = set()  # names of the values seen below it
        self._trains = False  # a value that training improves was read
        self._unproven: List[Record] = []  # held-back steps: they may not be training
        self._validated = False  # a validation with a loss or an accuracy was read that is not of a test set
        self._validating = 0  # lines that the heading of a validation still applies to
        self._plans: Dict[str, int] = {}  # steps and epochs that the settings announce; 0: that number was no plan
        self._pending: List[Record] = []  # without a counter, where the lines that end an epoch stand below its values
        self._closes = False  # this line may be one of these
        self._above = True  # such lines stand below the values, as far as is known
        self._went_on = False  # the new heading is the previous one, some steps later
        self._second_counts = False  # what looked like the total of a counter advances
        self._headings = self._losses = 0  # consecutive headings that advanced, and losses seen above the last one
        self._lr: Optional[float] = None  # that stood alone, for the next step
        self._guess = -1  # the last number before a loss
        self._line, self._told = 0, 0  # lines so far, and the last one that gave a loss with its counter

    def read_text(self, text: str, tabled: bool) -> List[Record]:
        """Return the records that a line completes. What only its behaviour shows is read in the lines before it, too."""
        shapes = self.shapes
        self._plan(text)
        self._validating -= self._validating > 0
        line = read(text, shapes, tabled, self._validating > 0)
        self._closes = bool(_CLOSES.search(text)) if isinstance(line, Line) and len(line.values) < 4 else False
        if not line:
            opens = _opens(text)
            self._validating = self._validating if opens is None else _BLOCK * opens
        elif isinstance(line, Line) and (line.bare or {"step", "batch", "epoch"} & {*line.values}):
            self._validating = _BLOCK if line.bare and line.validation and not line.bar else 0
        self.rows.every_line = self._validating > 0
        if not line or isinstance(line, Line) and (line.bare or self._waits(line)):
            shapes.unread(text)
            return self._read(line)
        found: List[Record] = []
        if shapes.waiting:
            shapes.replays = True
            for older in shapes.understood():
                found += self._read(read(older, shapes, tabled))
            shapes.replays = False
        return found + self._read(line)

    def _waits(self, line: Line) -> bool:
        """Return true for the first counter, whose loss may stand beside it in words that only the next lines explain."""
        return "step" in line.values and not (self._trusted or self._held or line.measures or _WORTH & {*line.values})

    def _plan(self, text: str) -> None:
        """Take the planned number of steps or epochs from settings: `max_steps=6000`, `Num Epochs = 3`."""
        if self._plans or not self._trusted:
            for match in _PLAN.finditer(text) if "epochs" in text or "max" in text or "otal" in text else ():
                name = "epochs" if match[2][:1] in "eE" else "steps"
                number = int(match[3].replace(",", ""))
                if match[1] or name == "epochs":
                    self._plans[name] = number if self._plans.get(name, number) == number else 0

    def _planned(self, record: Record) -> Record:
        """Add the planned total to a counter that is printed without one; a counter beyond it shows that it was no plan."""
        for name, total in (("epoch", "epochs"), ("step", "steps")):
            plan = self._plans.get(total)
            if plan and name in record and not {total, "batch" if name == "step" else ""} & {*record}:
                self._plans[total] = plan if record[name] <= plan else 0
                record = {**record, total: plan} if record[name] <= plan else record
        return record

    def _read(self, line: Read) -> List[Record]:
        """Return the records that a line completes. Steps with only a speed, which a benchmark has too, are held back until a
        value that training improves is seen."""
        if not line:
            return []
        if isinstance(line, list):
            self._trains = True
            return [self._steps.counted(record) for record in line]
        if line.measures and not (line.values or self._trains):
            return []
        found = self._with_epochs_below(line, self._understood(self._of_epochs(line)))
        self._trains = (
            self._trains
            or line.improves
            or bool(_TRAINS.fullmatch(line.label))
            or not _TRAINING.isdisjoint(line.values)
        )
        return self._proven(found, line.unnamed)

    def _proven(self, records: List[Record], unnamed: bool = False) -> List[Record]:
        if self._trains or self.shapes.improving or self.shapes.losses:
            records, self._unproven = self._unproven + records, []
            return records
        timed = [
            each for each in records if "step" in each and "accuracy" not in each and (unnamed or _TIMED & {*each})
        ]
        self._unproven = [*self._unproven, *timed][-_UNPROVEN:]
        return [record for record in records if record not in timed]

    def _of_epochs(self, line: Line) -> Line:
        """Return the line with a counter of epochs that is called so only elsewhere: by the bar's label, or by its total, which
        is the planned number of epochs."""
        values = line.values
        planned = values.get("steps") == self._plans.get("epochs", 0) != 0 and "epoch" not in self._heading
        counts = planned or line.bar and bool(_EPOCHS.fullmatch(line.label))
        if not counts or "step" not in values or {"epoch", "batch"} & {*values}:
            return line
        names = {"step": "epoch", "steps": "epochs"}
        return line._replace(values={names.get(name, name): value for name, value in values.items()})

    def _with_epochs_below(self, line: Line, records: List[Record]) -> List[Record]:
        """Return the records of a line, with those before it if it ends their epoch: `Epoch 3/10 done`."""
        closes = self._closes and "epoch" in line.values and {*line.values} <= {"epoch", "epochs", "step_time"}
        if closes and not self._pending:
            self._above = False  # the values of this epoch stand below it
        elif closes and self._above:
            self._left, self._heading = 0, {}
            counted: Record = {name: line.values[name] for name in COUNTERS if name in line.values}
            above, self._pending = self._pending, []
            above = [{**record, **counted} for record in above]
            return [self._in_steps(record) if record["kind"] == "step" else record for record in above]
        waits = records and self._above and not self._trusted and not {*COUNTERS} & {*line.values}
        if waits and not self._heading and len(self._pending) < _PENDING:
            self._pending += records
            return []
        above, self._pending = (self._pending, []) if records else ([], self._pending)
        return above + records

    def _understood(self, line: Line) -> List[Record]:
        self._left, self._line = self._left - 1, self._line + 1
        below = bool(self._heading) and self._left > 0
        if line.bare:
            return self._end_block() + (self._bar(line) if line.bar else self._head(line))
        if not reports(line) and not below:
            if self.shapes.losses or "epoch" in line.values:  # else a setting
                self._lr = line.values.get("lr", self._lr)
            return []
        found: List[Record] = []
        # An accuracy below a heading is one of training, unless the line says that it is of a validation.
        of_block = (
            below
            and self._trains
            and not (line.validation or line.measures or {"validation", "val_accuracy"} & {*line.values})
        )
        for record in records_of(line):
            if record["kind"] == "step" and line.samples[1] and not {"step", "batch"} & {*record}:
                count, total = line.samples
                record = {**self._samples.counted({**record, "batch": count, "batches": total}), "step_is": "sample"}
            follows = False
            if (
                line.guessed and "step" in record
            ):  # it grows like a counter, and neither its value nor its stride could be a rank
                last, self._guess = self._guess, record["step"]
                follows = 0 <= last < self._guess and (self._guess - last >= 10 or self._guess >= 64)
                record = record if follows else {name: value for name, value in record.items() if name != "step"}
            if line.member:
                record["member"] = True
            if "epoch" in self._heading and "step" in record and "epoch" not in record:
                if line.bar and _STEPS.fullmatch(line.label):  # one bar over all epochs
                    record.update({name: self._heading[name] for name in ("epoch", "epochs") if name in self._heading})
                elif line.batch or line.bar:
                    record.update({_OF_EPOCH[name]: record.pop(name) for name in ("step", "steps") if name in record})
            if record["kind"] == "validation":
                if line.of_test and self._validated:
                    record = {name if name in _MARKS else f"test_{name}": value for name, value in record.items()}
                self._validated = self._validated or not line.of_test and not {"loss", "accuracy"}.isdisjoint(record)
            if record["kind"] in ("step", "throughput") or of_block:
                found += self._step(record, follows)
            else:
                found.append(_told(record))
                if not self.shapes.losses and "step" in record:  # errors of the validation are all that it prints
                    counted = {name: record[name] for name in COUNTERS if name in record}
                    found += self._step({"kind": "step", **counted}, False)
        return found

    def end(self, final: bool) -> List[Record]:
        """Return pending records. `final`: no more lines come; then a counter that never advanced is dropped, unless it was
        seen once, with a loss and with its total or another training value."""
        found = self._end_block(goes_on=not final)
        if final:
            found, self._pending = self._pending + found, []
        for held in self._held.values() if final else ():
            names = [*held, "loss"]  # `loss 2.1 after 2000 steps` is a summary, not a counter
            counts = {"step", "batch"} & {*names[: names.index("loss")]} and "loss" in held
            beside = not {"again", "member"} & {*held} and {*held} & {"steps", "batches", *_BESIDE_LOSS}
            if held["line"] >= self._told:  # what is older than the last step must not come after it
                found += [self._in_steps(_told(held))] if counts and beside else _without_count(held)
        self._held = {} if final else self._held
        return self._proven(found)

    def stamp(self, t: float) -> None:
        """Set the time of pending records to the time they were written, not that of a later read."""
        for held in (*self._held.values(), *self._unproven):
            held.setdefault("t", t)

    def _head(self, line: Line) -> List[Record]:
        if line.validation:
            return []
        before, self._losses = self._losses, self.shapes.losses
        values = dict(line.values)
        if self._left > 0 and not self._under:  # one counter per line: `step : 300`, `epoch : 7`
            above = {
                name: value for name, value in self._heading.items() if "epoch" not in values or "batch" not in name
            }
            values = {**above, **values}
        goes_on = set(self._heading) & set(line.values) and _place(values) > _place(self._heading)
        trains = {"epoch", "batch", "batches"} <= {*line.values}
        self._headings = self._headings + 1 if goes_on and (before < self._losses or trains) else 0
        self._went_on = bool(goes_on)
        self._set_heading(values, _BLOCK)
        counts = self._headings > ("steps" not in line.values)  # though no value below it is known
        if counts and not self._trusted and not line.member:
            record = {"kind": "step", **self._heading}
            within = {"step": record["batch"], "steps": record["batches"], "step_of": "epoch"} if trains else {}
            return [self._in_steps({**record, **within})]
        return []

    def _set_heading(self, values: Record, lines: int) -> None:
        self._heading = {name: values[name] for name in COUNTERS if name in values}
        self._left, self._epoch_over, self._under = lines, 0, set()

    def _bar(self, line: Line) -> List[Record]:
        count, total = line.values.get("step"), line.values.get("steps")
        if not line.validation and ("epoch" in line.values or _TRAINS.fullmatch(line.label)):
            above = (self._heading, self._left)
            found = self._step({"kind": "step", **line.values}, False)
            if "epoch" in above[0] and "epoch" not in line.values:
                self._heading, self._left = above
            return found
        if line.label or line.validation or count is None or total is None:
            return []
        before = self._bars.pop(total, 0)
        if count < before == total:
            self._again.add(total)
        self._bars[total] = count
        if total == self._joined and count > before:
            return [{"kind": "step", "step": count, "steps": total}]
        while len(self._bars) > 8:
            del self._bars[next(iter(self._bars))]
        return []

    def _step(self, record: Record, known: bool) -> List[Record]:
        form, epoch = _form(record), record.get("epoch")
        whole_epoch = isinstance(epoch, (int, float)) and epoch == int(epoch)
        if "batch" in form and "epoch" not in form:
            if not self._in_epoch(record):
                rest = {name: value for name, value in record.items() if name not in (*COUNTERS, "step_time")}
                return [{**rest, "kind": "validation"}] if "loss" in rest else []
        elif not form and self._heading and self._left > 0 and (self._went_on or not self._again):
            return self._below_heading(record)
        elif not {"step", "batch"} & {*form} and "loss" in record and not (whole_epoch and "epochs" in record):
            bar = self._running_bar(isinstance(epoch, int))
            bar = None if isinstance(epoch, int) and abs(self._bars.get(bar or 0, 0) - epoch) < 2 else bar  # of epochs
            place = (bar or 0, self._bars.get(bar or 0, 0), epoch)
            stale = place[:2] == self._joined_at[:2] and place != self._joined_at  # it stood still between two epochs
            if bar and not stale:
                self._joined_at = place
                record = {**record, "step": self._bars[bar], "steps": bar}
                record.update({"step_of": "epoch"} if bar in self._again else {})
                # The record shows that the bar is of training by itself, or the next one with the same bar further on does.
                known = bar == self._joined or not {"lr", "grad_norm"}.isdisjoint(record)
                held = self._held.get(_form(record))
                if known or (held is not None and held.get("steps") == bar and _goes_on(held, record)):
                    self._joined = bar
        if self._lr is not None and "loss" in record:
            record.setdefault("lr", self._lr)
            self._lr = None
        if not _form(record):
            return [record] if _WORTH & {*record} and "member" not in record else []
        found = self._end_block() + self._advanced(record, known)
        if "step" in record and "loss" not in record:  # it may be in the next line
            self._set_heading(record, 3)
        return found

    def _in_epoch(self, record: Record) -> bool:
        """Return true if this batch count is that of the epoch under the heading: a second one below it is an evaluation."""
        again = record.get("batches") == record["batch"] == self._epoch_over and "validation" in record
        if "epoch" not in self._heading or self._epoch_over and not again:
            return False
        if record["batch"] == record.get("batches"):
            self._epoch_over = record["batch"]
        record.update(self._heading)
        return True

    def _running_bar(self, epochs: bool) -> Optional[int]:
        """Return the total of the bar that values without a counter belong to; a bar that is full, or restarts in each of the
        record's `epochs`, may be an evaluation's."""
        if self._joined in self._bars:
            return self._joined
        going = [total for total, count in self._bars.items() if 0 < count < total]
        full = [total for total, count in self._bars.items() if count == total and not (epochs or total in self._again)]
        return next(reversed(going or full), None)

    def _below_heading(self, record: Record) -> List[Record]:
        """Add values to the record of the heading above them; values of a name seen before start a new record."""
        if "loss" in record and "loss" in self._under:
            return [record]
        new = {name: value for name, value in record.items() if name not in self._under}
        self._under.update(set(new) - {"kind"})
        self._block = {**self._heading, **(self._block or {}), **new, "kind": "step"}
        return []

    def _end_block(self, goes_on: bool = False) -> List[Record]:
        """Finish the record below a heading. `goes_on`: more values may follow below the same heading."""
        block = self._block
        if block is None or goes_on and not {*_WORTH, "step_time"} & {*block}:
            return []  # a learning rate waits for what it belongs to
        self._block = None
        if not goes_on:
            self._heading = {name: value for name, value in self._heading.items() if name in ("epoch", "epochs")}
        worth = {*_WORTH, "step_time"} & {*block} or _form(block) in self._trusted
        return self._advanced(block, False) if worth else []

    def _advanced(self, record: Record, known: bool) -> List[Record]:
        """Return the record once its counter has advanced, or at once if it has a loss and a speed: then it is no setting, no
        summary and no rank."""
        form = _form(record)
        held = self._held.get(form)
        older = held if form == ("step",) and {"steps", "loss"} <= {*record} else None
        if older and older["step"] == record["step"] and older.get("steps", record["steps"]) < record["steps"]:
            self._second_counts = True  # `Batch 4/200`, `Batch 4/300`: epoch and batch
            del self._held[form]
            return self._advanced(_told(older), known) + self._advanced(record, known)
        if self._second_counts and form == ("step",) and "steps" in record:
            rest = {name: value for name, value in record.items() if name not in ("step", "steps")}
            return self._advanced({**rest, "epoch": record["step"], "batch": record["steps"]}, known)
        self._fractional = self._fractional or (form == ("epoch",) and not isinstance(record["epoch"], int))
        if form == ("epoch",) and self._fractional:  # it says how far the run is, also where it happens to be whole
            older = self._held.pop(("epoch", "step"), None)  # the count came from an unrelated bar
            return [*_without_count(older), record]
        sure = form != ("epoch",) and "loss" in record and not _TIMED.isdisjoint(record)
        known = known or sure or form in self._trusted
        if known or (held is not None and _goes_on(held, record)):
            self._trusted.add(form)
            before = [self._held.pop(form)] if held is not None else []
            self._told = self._line
            return [self._in_steps(_told(each)) for each in (*before, record)]
        if held is not None and _place(held) == _place(record) and set(held) & set(record) <= {*COUNTERS, "kind"}:
            held.update(record)  # the block continues
            return []
        self._held[form] = {**record, "line": self._line, **({"again": True} if held is not None else {})}
        return _without_count(held)

    def _in_steps(self, record: Record) -> Record:
        """Return the record with the run's step; if a program counts only epochs, these are its steps."""
        record = self._planned(record)
        epoch = record.get("epoch", 0)
        others = any("step" in form or "batch" in form for form in (*self._trusted, *self._held))
        if "step" in record or "batch" in record or others or not isinstance(epoch, int):
            return self._steps.counted(record)
        planned = {"steps": record["epochs"]} if "epochs" in record else {}
        return {**record, "step": epoch, **planned, "step_is": "epoch"}


def _opens(text: str) -> Optional[bool]:
    """Return true for the heading of a validation, false for that of training, None for any other line: a heading has few words
    and no number."""
    words = {*words_of(text)} if len(text) < 80 and text.strip() else set()
    if not words or len(words) > 5 or _FIGURES.search(text):
        return None
    return True if words & VALIDATION else False if words & {"train", "training"} else None


_FIGURES = regex(r"\d")
_MARKS = {*COUNTERS, "kind", "line", "again", "member"}


def _form(record: Record) -> Tuple[str, ...]:
    return tuple([name for name in ("epoch", "step", "batch") if name in record])


def _told(record: Record) -> Record:
    return {name: value for name, value in record.items() if name not in ("again", "line", "member")}


def _without_count(record: Optional[Record]) -> List[Record]:
    counts = ("step", "steps", "batch", "batches")
    rest = {name: value for name, value in _told(record or {}).items() if name not in counts}
    return [rest] if set(rest) & _WORTH and "member" not in (record or {}) else []


def _goes_on(held: Record, record: Record) -> bool:
    """Return true if the counter advanced towards the same total: `Batch 5/0` after `Batch 4/100` did not."""
    totals = [(held[name], record[name]) for name in ("steps", "batches") if name in held and name in record]
    same = all(first == second for first, second in totals) or held.get("epoch") != record.get("epoch")
    same = same and (set(held) <= _MARKS or not set(record) <= _MARKS)  # `[step 4/5] 12 ms`, `[step 5/5] done`
    return same and _place(record) > _place(held)


def _place(record: Record) -> Tuple[float, float]:
    count = record["step"] if "step" in record else record.get("batch", 0)
    return (float(record.get("epoch", 0)), float(count))
