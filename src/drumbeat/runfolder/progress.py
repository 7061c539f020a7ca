"""Progress: the sum of the ranks' metrics. Add one metric at a time; the parts of several nodes can be merged."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import field
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.record import RecordError, from_plain, to_plain
from drumbeat.base.regex import regex
from drumbeat.runfolder.records import Metric, is_count

AS_PRINTED = " as printed"  # after the unit of a figure whose scope (rank or job) is unknown
STAGE = "stage"  # a metric's kind: a script has started another launcher
BETWEEN_STAGES = "between stages"  # of `spent`: from the last step before that to the first one after it
# More pauses belong to the program's pace: it validates or saves now and then, and does not report it.
_MOST_PAUSES = 2
_MOST_KINDS = 32  # of `spent`: scripts may use any word
_SHORT = 5.0  # seconds: over less, the times at which printed lines were read give no exact speed,
_TOO_SHORT = 2.0  # and over less than this none
_UNKNOWN = (None, "")
LATE = 5.0  # seconds, and factor on the usual time between two reports: see late_after
_LOSSES = (
    "first_loss",
    "first_loss_step",
    "last_loss",
    "last_loss_step",
    "not_finite",
    "not_finite_since",
    "not_finite_first",
)
_NO_MEASURE = regex(r"^(?:epochs?|batch(?:es)?|lr|node)$|_(?:ms|s|time|norm)$")  # in the report of a validation
_VALIDATIONS = ("first_validation", "last_validation", "validation_not_finite")
# Values that belong together: each group comes from the first node that has any value of it.
_OF_FIRST_NODE = (
    ("step", "first_step", "widest", "reports", "step_is", "own_steps", "own_seconds"),
    ("steps",),
    _LOSSES,
    _VALIDATIONS,
    ("epoch",),
    ("saved",),
    ("phase",),
    ("reported_rate", "reported_unit"),
)


@dataclass
class StatedRates:
    """Speed from a printed series of rates: all work divided by the time that the rates imply. So each value counts for as long
    as its steps took, however coarsely the line was timed. The first value is dropped once there is another: it includes the
    warm-up. With several ranks, the lowest one's values count; a program's own summary replaces its series."""

    rank: Optional[int] = None
    unit: str = ""
    values: int = 0
    step: Optional[int] = None  # of the last value
    steps: float = 1.0  # between the last two that name theirs
    work: float = 0.0
    seconds: float = 0.0  # times the work of a step; only the ratio has a meaning

    def __post_init__(self) -> None:
        self.step = self.step if self.step is not None and is_count(self.step) else None

    def is_for(self, metric: Metric) -> bool:
        return self.rank is None or metric.rank <= self.rank

    def add(self, metric: Metric) -> float:
        """Add the rate of a metric and return the speed so far."""
        assert metric.rate is not None
        if metric.kind == "summary" or (metric.rank, metric.unit) != (self.rank, self.unit):
            self.rank, self.unit, self.values, self.step = metric.rank, metric.unit, 0, None
        self.add_rate(metric.rate, metric.step)
        return metric.rate if metric.kind == "summary" else self.mean

    def add_rate(self, rate: float, step: Optional[int]) -> None:
        if step is not None:
            if self.step is not None and step > self.step:
                self.steps = float(step - self.step)
            self.step = step
        if not 0 < rate < math.inf:
            return
        self.values += 1
        if self.values < 3:  # the first value so far: the second replaces it
            self.work = self.seconds = 0.0
        self.work += self.steps
        self.seconds += self.steps / rate

    @property
    def mean(self) -> float:
        return self.work / self.seconds if self.seconds else 0.0


@dataclass
class Progress:
    step: Optional[int] = None
    steps: Optional[int] = None
    epoch: Optional[float] = None  # such as 6.25, where the lowest rank prints no step number with it
    step_is: str = ""  # `epoch` or `sample` where the script counts nothing else
    phase: str = ""  # what the lowest rank has announced, and is not over: checkpoint, validation
    first_loss: Optional[float] = None
    first_loss_step: Optional[int] = None  # at which it was reported; None: its report names no step
    last_loss: Optional[float] = None  # the last finite one
    last_loss_step: Optional[int] = None
    not_finite: str = ""  # the loss reported last, where it is nan, inf or -inf
    not_finite_since: Optional[int] = None  # the first step of those,
    not_finite_first: str = ""  # and its loss
    saved: Optional[int] = None  # step of the last checkpoint that was reported
    first_validation: Optional[float] = None
    last_validation: Optional[float] = None
    validation_not_finite: str = ""
    validation_measures: Dict[str, float] = field(default_factory=dict)  # beside its loss: perplexity, F1, ... as named
    accuracy: Optional[float] = None
    target_reached: Optional[bool] = None
    first_t: Optional[float] = None  # of the first report of a step, on this node's clock
    last_t: Optional[float] = None
    first_step: Optional[int] = None
    widest: Optional[int] = None  # the most steps between two reports of the lowest rank
    reports: Optional[int] = None  # of a step, by the lowest rank; None: not counted
    own_steps: Optional[int] = None  # made by the lowest rank between its reports, and the time that they took
    own_seconds: Optional[float] = None
    laps: int = 0  # how often the step number began anew: some programs count the steps of each epoch or stage
    stages: int = 0  # of these laps, those that began with a launcher of a script that was seen to start
    printed: bool = False  # steps were read from printed lines: their times are those of the reading
    tokens: float = 0.0  # since each rank's first report: what came before it also held the warm-up
    samples: float = 0.0
    reported_rate: Optional[float] = None  # where a script prints its own throughput: see StatedRates
    reported_unit: str = ""
    spent: Dict[str, float] = field(default_factory=dict)  # kind -> seconds, as reported by the lowest rank
    pauses: Tuple[
        Tuple[float, float], ...
    ] = ()  # long times without a step, after which steps came again; see `paused`
    ranks: int = 0  # that have reported a step

    def __post_init__(self) -> None:
        for name, unknown in _COUNTS.items():
            number = getattr(self, name)
            if number is not None and not is_count(number):
                setattr(self, name, unknown)
        self.paces: Dict[int, RankPace] = {}
        self.times = StepTimes()
        self.stated = StatedRates()
        self._reporting: Set[int] = set()
        self._lowest: Optional[int] = None  # of the ranks that have reported anything
        self._previous: Tuple[Optional[int], Optional[float]] = (None, None)  # the lowest rank's last step, its epoch
        self._stage_began: Optional[float] = None  # and none of its steps has come
        self._validated = False  # `accuracy` is a validation's
        self._at_work = False  # the lowest rank has reported something else since its last step, which takes its time
        self._new_stage = False  # the lowest rank has yet to make its first step in it

    def add(self, metric: Metric, clock_offset: float = 0.0) -> None:
        rank = metric.rank
        if self._lowest is None or rank < self._lowest:
            self._lowest, self._previous, self.reports = rank, (None, None), None
            self.own_steps = self.own_seconds = None
            for name in _LOSSES + _VALIDATIONS:  # never mix the first loss of one rank with the last one of another
                setattr(self, name, _DEFAULTS[name])
            self.validation_measures = {}
        lowest = rank == self._lowest
        if lowest:
            self.phase = metric.kind if metric.announces else ""
            self._at_work = self._at_work or metric.announces or metric.kind != "step" and metric.seconds is not None
        if metric.seconds is not None and lowest and (metric.kind in self.spent or len(self.spent) < _MOST_KINDS):
            self.spent[metric.kind] = self.spent.get(metric.kind, 0.0) + metric.seconds
        if metric.accuracy is not None and (metric.kind != "step" or not self._validated):
            self._validated = metric.kind != "step"  # a training accuracy says less
            self.accuracy = metric.accuracy if math.isfinite(metric.accuracy) else None
        if metric.target_reached is not None:
            self.target_reached = metric.target_reached
        if metric.rate is not None and self.stated.is_for(metric):
            self.reported_rate, self.reported_unit = self.stated.add(metric), metric.unit
        if metric.kind == "validation" and lowest:
            self._add_validation(metric)
        elif metric.kind == "checkpoint" and metric.step is not None:
            self.saved = metric.step
        elif metric.kind == STAGE:
            self._stage_began = metric.t + clock_offset
        elif metric.kind == "step":
            self._add_step(metric, metric.t + clock_offset, lowest)

    def _add_validation(self, metric: Metric) -> None:
        for name, value in metric.more.items():
            known = name in self.validation_measures or len(self.validation_measures) < _MOST_KINDS and len(name) <= 40
            if known and type(value) in (int, float) and math.isfinite(value) and not _NO_MEASURE.search(name):
                self.validation_measures[name] = float(value)
        loss = metric.loss
        if loss is None:
            return
        self.validation_not_finite = "" if math.isfinite(loss) else str(loss)
        if math.isfinite(loss):
            self.first_validation = loss if self.first_validation is None else self.first_validation
            self.last_validation = loss

    def _add_step(self, metric: Metric, t: float, lowest: bool) -> None:
        self.printed = self.printed or metric.printed
        if metric.rank in self._reporting:
            self.tokens += metric.tokens or 0.0
            self.samples += metric.samples or 0.0
        else:
            self._reporting.add(metric.rank)
            self.ranks += 1
        pace = self.paces.get(metric.rank)
        if pace is None:
            pace = self.paces[metric.rank] = RankPace(metric.rank, metric.node)
        before = pace.reported
        if lowest:
            self._add_pause(before, t)
        took = pace.add_step(metric, t)
        if took is not None and metric.step is not None:
            self.times.add(metric.rank, metric.step, took)
        if self._stage_began is not None and t >= self._stage_began:
            pause = 0.0 if self.last_t is None else max(0.0, t - self.last_t)
            self.spent[BETWEEN_STAGES] = self.spent.get(BETWEEN_STAGES, 0.0) + pause
            self._stage_began, self._new_stage = None, True
        if self.first_t is None or t < self.first_t:
            self.first_t = t
        if self.last_t is None or t > self.last_t:
            self.last_t = t
        step = metric.step
        if lowest:
            self.reports = (self.reports or 0) + 1
        if step is not None:
            if lowest or not self.reports:  # the lowest rank may not have reported a step yet
                self.step_is = metric.step_is
            if lowest:
                self._count_laps(metric, step, None if before is None else t - before)
            if self.first_step is None or step < self.first_step:
                self.first_step = step
            if (lowest or not self.laps) and (self.step is None or step > self.step):
                self.step = step
        epoch = metric.more.get("epoch")
        if lowest and step is None and isinstance(epoch, (int, float)) and math.isfinite(epoch):
            self.epoch = float(epoch)
        if metric.steps is not None and (lowest or not self.laps):
            self.steps = metric.steps
        if self.step is not None and self.steps is not None and self.step > self.steps:
            self.steps = None  # the planned number does not count these steps
        if metric.loss is not None and lowest:
            self._add_loss(metric.loss, metric.step)

    def _add_pause(self, before: Optional[float], t: float) -> None:
        """Note the time since the lowest rank's last step as a pause if it was much longer than usual and nothing was reported
        of it."""
        usual, gap = self._usual, 0.0 if before is None else t - before
        at_work, self._at_work = self._at_work or self._stage_began is not None, False
        if usual is not None and not at_work and gap > late_after(usual) and len(self.pauses) <= _MOST_PAUSES:
            self.pauses = (*self.pauses, (t - gap + usual, t))

    def paused(self, until: float = math.inf) -> float:
        """Return the seconds of pauses until this time; 0 where they come often. The one function for all figures: a pause is no
        part of speed, step time, remaining time and training."""
        times = self.pauses if len(self.pauses) <= _MOST_PAUSES else ()
        return sum(max(0.0, min(end, until) - begin) for begin, end in times)

    @property
    def _usual(self) -> Optional[float]:
        """Return the usual seconds between two reports of a step; None if there are too few."""
        return self.trained / (self.reports - 1) if self.reports and self.reports > 1 else None

    def _count_laps(self, metric: Metric, step: int, took: Optional[float]) -> None:
        """Count a new lap when the step number is back at the first one: the script counts the steps of each epoch or stage."""
        before, last_epoch = self._previous
        told = metric.more.get("epoch")
        epoch = float(told) if isinstance(told, (int, float)) else None
        again = step == before and None not in (epoch, last_epoch) and epoch != last_epoch
        back = before is not None and (step < before or again)
        anew = back and self.first_step is not None and step <= self.first_step
        if anew or (metric.of_epoch and (back or not self.laps or epoch != last_epoch)):
            self.laps, self.step = self.laps + 1, step
            self.stages += self._new_stage
        elif before is not None:
            self.widest = max(self.widest or 0, step - before)
            if took is not None:
                self.own_steps, self.own_seconds = (
                    (self.own_steps or 0) + step - before,
                    (self.own_seconds or 0.0) + took,
                )
        self._previous, self._new_stage = (step, epoch), False

    def _add_loss(self, loss: float, step: Optional[int]) -> None:
        """Add a loss; once there are losses with a step, one without a step (an epoch's average) does not replace them."""
        stepped = self.last_loss_step is not None
        if step is None and stepped:
            return
        if step is not None and not stepped:
            self.first_loss = None
        if not math.isfinite(loss):
            self.not_finite_since = self.not_finite_since if self.not_finite else step
            self.not_finite_first = self.not_finite_first if self.not_finite else str(loss)
            self.not_finite = str(loss)
            return
        self.not_finite, self.not_finite_since, self.not_finite_first = "", None, ""
        if self.first_loss is None:
            self.first_loss, self.first_loss_step = loss, step
        self.last_loss, self.last_loss_step = loss, step

    def merge(self, other: Progress, clock_offset: float = 0.0) -> None:
        """Add another node's part: its work is added, its times are corrected; losses stay those of the first node."""
        self.tokens += other.tokens
        self.samples += other.samples
        self.ranks += other.ranks
        if other.first_t is not None:
            first = other.first_t + clock_offset
            self.first_t = first if self.first_t is None else min(self.first_t, first)
        if other.last_t is not None:
            last = other.last_t + clock_offset
            self.last_t = last if self.last_t is None else max(self.last_t, last)
        self.printed = self.printed or other.printed
        if self.step is None:
            self.laps, self.stages = other.laps, other.stages
        for names in _OF_FIRST_NODE:
            if all(getattr(self, name) in _UNKNOWN for name in names):
                for name in names:
                    setattr(self, name, getattr(other, name))
        self.validation_measures = self.validation_measures or other.validation_measures

    @property
    def short_of_steps(self) -> bool:
        """Return true if the announced number of steps was certainly not reached: more are missing than lie between two reports.
        False if that is unknown, e.g. because steps are counted per epoch."""
        if self.step is None or self.steps is None or self.laps or self.target_reached:
            return False
        return falls_short(self.step, self.steps, self.widest or self.first_step or 0)

    @property
    def short_words(self) -> str:
        """Name the last step and the number that was announced, if `short_of_steps`; else ''."""
        return f"its last {self.counts} was {self.step} of {self.steps}" if self.short_of_steps else ""

    @property
    def counts(self) -> str:
        """Name what the step numbers count."""
        return self.step_is or "step"

    @property
    def place(self) -> str:
        """Name the last step (`step 5/40`), or the epoch (`epoch 6.25`) where no step is known; '' if neither is."""
        if self.step is not None:
            return f"{self.counts} {self.step}" + (f"/{self.steps}" if self.steps else "")
        return f"epoch {self.epoch:.4g}" if self.epoch is not None else ""

    @property
    def lap(self) -> str:
        """Name the unit in which step numbers restart; '' if they do not."""
        if not self.laps:
            return ""
        return STAGE if self.stages == self.laps else "epoch or stage"

    @property
    def seconds(self) -> float:
        """Return the seconds from the first report of a step to the last one."""
        if self.first_t is None or self.last_t is None:
            return 0.0
        return max(0.0, self.last_t - self.first_t)

    @property
    def trained(self) -> float:
        """Return the seconds from the first step to the last one in which steps were made: without pauses."""
        idle = self.spent.get(BETWEEN_STAGES, 0.0) + self.paused()
        return self.seconds - idle if self.seconds > idle else self.seconds

    def rate(self) -> Optional[Tuple[float, str]]:
        """Return the throughput of all ranks together, with its unit."""
        if self.trained > 0:
            if self.tokens:
                return self.tokens / self.trained, "tokens/s"
            if self.samples:
                return self.samples / self.trained, "samples/s"
        if self.reported_rate:
            return self.reported_rate, self.reported_unit
        mean = self.step_seconds
        return (1 / mean, f"{self.counts}s/s") if mean else None

    @property
    def no_rate(self) -> str:
        """Explain why `rate` is None."""
        if self.step is None:
            return "no step was reported"
        if self.laps:
            return f"steps are counted anew in each {self.lap}: report samples or tokens"
        if self.printed and self.seconds < _TOO_SHORT:
            return f"printed steps must span at least {_TOO_SHORT:g} s"
        return "fewer than two steps were reported" if self.step == self.first_step else "report samples or tokens"

    @property
    def step_seconds(self) -> Optional[float]:
        """Return the mean time of the steps after the first report; None if unknown."""
        if self.laps or (self.printed and self.seconds < _TOO_SHORT):  # the number of steps per epoch is not known
            return None
        if self.step_is == "sample":  # the line does not say whether one rank or all ranks have seen these samples
            return None
        if self.step is None or self.first_step is None or self.step <= self.first_step:
            return None
        made, seconds = self.step - self.first_step, self.trained
        if self.own_steps and self.own_seconds and self.own_steps > 0:  # steps and time of the same rank
            made, seconds = self.own_steps, self.own_seconds - (self.seconds - self.trained)
        return (seconds if seconds > 0 else self.seconds) / made

    @property
    def rough(self) -> bool:
        """Return true if `rate` is only approximate: measured over a short time between lines that are read a few times per
        second."""
        return self.printed and not self.reported_rate and self.seconds < _SHORT

    @property
    def all_made(self) -> bool:
        """Return true if all planned steps are done; how long the rest (validation, saving, the end) takes is unknown."""
        return not self.laps and self.step is not None and self.steps is not None and self.step >= self.steps

    def quiet(self, now: float) -> Optional[float]:
        """Return the seconds without a step once that is much longer than the usual time between two reports; else None."""
        usual = self._usual
        if self.last_t is None or usual is None or self.all_made:
            return None
        silent = now - self.last_t
        return silent if silent > late_after(usual) else None

    def seconds_left(self) -> Optional[float]:
        """Return the seconds left, if steps come as before; None if unknown."""
        if self.steps is None or self.step is None or self.first_step is None or self.step <= self.first_step:
            return None
        if self.laps or self.all_made or (self.printed and self.seconds < _TOO_SHORT):
            return None
        return (self.steps - self.step) * self.trained / (self.step - self.first_step)

    def snapshot(self, paced: bool = True) -> Dict[str, Any]:
        """Return everything that `restored` needs to go on from here. `paced`: with the pace of each rank, unless
        there are many."""
        reporting = tuple(sorted(self._reporting))
        counted = _Counted(reporting, self.stated, self._lowest, self._previous, self._stage_began)
        paces = [list(to_plain(each).values()) for each in self.paces.values()]
        times = [self.times.width, [list(each) for each in self.times.spans()]]
        return {**({PACES: paces, TIMES: times} if paced else {}), **to_plain(self), **to_plain(counted)}

    @staticmethod
    def restored(data: Any) -> Progress:
        """Restore a snapshot; RecordError if the data is not one."""
        progress, counted = from_plain(Progress, data), from_plain(_Counted, data)
        progress.stated, progress._reporting = counted.stated, set(counted.reporting)
        progress._lowest, progress._stage_began = counted.lowest, counted.stage_began
        if is_count(counted.previous[0] or 0):
            progress._previous = counted.previous
        paces = data.get(PACES)
        for each in paces if isinstance(paces, list) else ():
            pace = from_plain(RankPace, dict(zip(_PACE, each)) if isinstance(each, list) else None)
            if not (is_count(pace.reports) and is_count(pace.exposed[0])):
                raise RecordError(f"{PACES}: no number of reports")
            progress.paces[pace.rank] = pace
        progress.times = StepTimes.restored(data.get(TIMES))
        return progress


@dataclass(frozen=True)
class _Counted:
    """State of a Progress beside its fields, in a snapshot."""

    reporting: Tuple[int, ...]
    stated: StatedRates = field(default_factory=StatedRates)  # earlier versions wrote less
    lowest: Optional[int] = None
    previous: Tuple[Optional[int], Optional[float]] = (None, None)
    stage_began: Optional[float] = None


_DEFAULTS = {item.name: item.default for item in dataclasses.fields(Progress)}
_COUNTS = {item.name: item.default for item in dataclasses.fields(Progress) if item.type in ("int", "Optional[int]")}


def merged(parts: Iterable[Tuple[Progress, float]]) -> Progress:
    """Merge the parts of all nodes, each with its clock offset. Node 0 comes first: its losses are the run's."""
    total, first = Progress(), True
    for part, clock_offset in parts:
        total.merge(part, clock_offset)
        if first:
            total.accuracy, total.target_reached = part.accuracy, part.target_reached
            total.spent = part.spent
            total.pauses = tuple((begin + clock_offset, end + clock_offset) for begin, end in part.pauses)
        first = False
    return total


def late_after(usual: float) -> float:
    """Return the seconds without a report after which a rank is late. `usual`: the usual seconds between two reports."""
    return max(LATE, LATE * usual)


def falls_short(step: int, steps: int, between: int) -> bool:
    """Return true if more steps are missing than lie between two reports."""
    return steps - step > max(1, between)


def median(values: Iterable[float]) -> float:
    """Return the median; that of `statistics` costs each agent the import of fractions and decimal."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def speed(value: float, unit: str, rough: bool = False) -> str:
    """Format a speed. `rough`: with two digits only."""
    if rough:
        rounded = float(f"{value:.2g}")
        return f"about {rounded:,.0f} {unit}" if rounded >= 10 else f"about {rounded:g} {unit}"
    return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.2f} {unit}"


# The pace of each rank, and the rank that holds up the others: the same answer in every view. Pure.


PACES, TIMES = "paces", "step_times"  # keys in a snapshot


_SMOOTH = 0.3  # weight of the latest step time in a rank's average
# A rank stands out only if its steps take longer than the median rank's by both of these.
_LONGER, _SHARE = 0.005, 0.02  # seconds, of the median
SKEW = 5.0  # seconds by which the news of one node may be older than those of another
_READ = 0.25  # seconds to which the times of printed lines are known
_MARK_EVERY = 16  # reports
_MOST_MS = 1e18  # a script may report any number


@dataclass
class RankPace:
    """Pace of one rank of the current attempt."""

    rank: int
    node: int
    step: Optional[int] = None
    reported: Optional[float] = None  # when it last reported a step, by the lead's clock
    step_seconds: Optional[float] = None  # smoothed; None: no step was recognised, or only one
    own_seconds: Optional[float] = None  # of a step, without waiting for others, as the rank says itself; smoothed
    read: bool = False  # step_seconds is the time between lines that were read
    since: Optional[float] = None  # when `step` was first reported
    epoch: Optional[str] = None  # of `step`, where steps are those of an epoch
    gap: Tuple[Optional[float], Optional[float]] = (None, None)  # seconds and steps between two reports; smoothed
    reports: int = 0  # number of reports that name a step
    mean_t: float = 0.0  # of all of them
    marks: Tuple[Tuple[int, float], ...] = ()  # both, as they were at the last two marks: there ranks can be compared
    exposed: Tuple[int, float] = (0, 0.0)  # how often it reported communication that was not hidden; mean, ms

    def add_step(self, metric: Metric, t: float) -> Optional[float]:
        """Count a report; return its seconds per step: the rank's own figure, else the time since the last report."""
        stated = metric.seconds if metric.printed else None
        if stated is not None:
            self._took(stated, 1)
        self.own_seconds = _smoothed(self.own_seconds, metric.seconds)
        self.reported = t
        self.reports += 1
        self.mean_t += (t - self.mean_t) / self.reports
        if self.reports % _MARK_EVERY == 0:
            self.marks = (*self.marks[-1:], (self.reports, self.mean_t))
        exposed = metric.more.get("communication_exposed_ms")
        if isinstance(exposed, (int, float)) and abs(exposed) < _MOST_MS:  # NaN compares false
            times = self.exposed[0] + 1
            self.exposed = (times, self.exposed[1] + (exposed - self.exposed[1]) / times)
        took = metric.seconds
        if metric.step is None:
            return took
        epoch = str(metric.more.get("epoch")) if metric.of_epoch else None
        steps = metric.step - self.step if self.step is not None else 0
        goes_on = steps > 0 and epoch == self.epoch
        if goes_on and stated is None and self.since is not None and t > self.since:
            self._took(t - self.since, steps)
            took = (t - self.since) / steps if took is None else took
            self.read = self.read or metric.printed
        if metric.step != self.step or epoch != self.epoch:
            self.step, self.epoch, self.since = metric.step, epoch, t
        return took

    def _took(self, seconds: float, steps: int) -> None:
        """Smooth time and number of steps separately, so that a validation before a single step weighs no more than that step."""
        whole, made = _smoothed(self.gap[0], seconds), _smoothed(self.gap[1], float(steps))
        self.gap = (whole, made)
        self.step_seconds = whole / made if whole is not None and made else self.step_seconds


_PACE = [item.name for item in dataclasses.fields(RankPace)]


def _smoothed(before: Optional[float], latest: Optional[float]) -> Optional[float]:
    if before is None or latest is None:
        return before if latest is None else latest
    return before + _SMOOTH * (latest - before)


_MOST_SPANS = 64


class Span(NamedTuple):
    """Seconds per step of the ranks, over the `width` steps from `number * width` on."""

    number: int
    least: float
    median: float
    most: float
    slowest: int  # the rank with the most
    ranks: int


class StepTimes:
    """Seconds per step of many ranks: least, median, most and the slowest rank, for each step or, once there are many steps, for
    spans of 2, 4, 8, ... steps."""

    def __init__(self, width: int = 1, spans: Iterable[Span] = ()) -> None:
        self.width, self._over = width, {span.number: span for span in spans}
        self._open: Dict[int, Dict[int, Tuple[int, float]]] = {}  # the last two: rank -> reports, mean

    def add(self, rank: int, step: int, seconds: float) -> None:
        number = step // self.width
        if number not in self._open:
            if number in self._over or number < max(self._open, default=0):
                return  # a rank that lags behind, or whose count has restarted
            self._open[number] = {}
            while len(self._open) > 2:
                first = min(self._open)
                self._over[first] = _span(first, self._open.pop(first))
        reports, mean = self._open[number].get(rank, (0, 0.0))
        self._open[number][rank] = reports + 1, mean + (seconds - mean) / (reports + 1)
        if len(self._over) > _MOST_SPANS:
            self._over = {span.number: span for span in _joined(self._over.values(), 2)}
            self.width, still_open, self._open = 2 * self.width, self._open, {}
            for number, ranks in still_open.items():
                self._open.setdefault(number // 2, {}).update(ranks)

    def spans(self) -> List[Span]:
        """Return all spans in the order of their steps."""
        both = [*self._over.values(), *(_span(number, ranks) for number, ranks in self._open.items())]
        return _joined(both, 1)

    @staticmethod
    def restored(data: Any) -> StepTimes:
        """Restore the step times from a snapshot; empty if they cannot be used."""
        try:
            width, rows = data
            spans = [Span(*row) for row in rows]
            usable = all(map(math.isfinite, (value for span in spans for value in span)))
            return StepTimes(max(1, int(width)), spans if usable else ())
        except (TypeError, ValueError, OverflowError):
            return StepTimes()


def step_times(nodes: Sequence[StepTimes]) -> Tuple[int, List[Span]]:
    """Return the number of steps per span, and the spans of all nodes together; their median is that of the nodes' medians."""
    width = max((node.width for node in nodes), default=1)
    return width, _joined((span for node in nodes for span in _joined(node.spans(), width // node.width)), 1)


def stands_out(span: Span) -> bool:
    """Return true if the slowest rank takes longer than the median by more than chance."""
    return span.ranks > 1 and span.most - span.median >= max(_LONGER, _SHARE * span.median)


def _span(number: int, ranks: Dict[int, Tuple[int, float]]) -> Span:
    means = sorted((float(f"{mean:.4g}"), rank) for rank, (_, mean) in ranks.items())
    return Span(number, means[0][0], means[(len(means) - 1) // 2][0], *means[-1], len(means))


def _joined(spans: Iterable[Span], steps: int) -> List[Span]:
    """Join the spans that have the same number after division by `steps`."""
    found: Dict[int, List[Span]] = {}
    for span in spans:
        found.setdefault(span.number // steps, []).append(span)
    return [_join(number, found[number], steps == 1) for number in sorted(found)]


def _join(number: int, parts: List[Span], same_steps: bool) -> Span:
    longest = max(parts, key=lambda each: each.most)
    medians = sorted(each.median for each in parts)
    ranks = (sum if same_steps else max)(each.ranks for each in parts)
    return Span(number, min(each.least for each in parts), medians[(len(medians) - 1) // 2], *longest[3:5], ranks)


@dataclass(frozen=True)
class Slowest:
    rank: int
    node: int
    step_seconds: float  # its own, without waiting for others, where every rank reports that
    median_seconds: float
    behind: int  # steps behind the rank that is furthest
    stands_out: bool  # else all are about as fast, and any of them could be named

    @property
    def spread(self) -> float:
        """Return how much longer its steps take than the median rank's: 0.05 is 5 %."""
        return self.step_seconds / self.median_seconds - 1.0 if self.median_seconds > 0 else 0.0


def slowest_rank(ranks: Iterable[RankPace], skew: float = SKEW) -> Optional[Slowest]:
    """Return the rank that is furthest behind (by more than `skew` seconds of steps), else the one with the longest steps.

    None if fewer than two ranks have step times.
    """
    timed = [rank for rank in ranks if rank.step_seconds is not None]
    if len(timed) < 2:
        return None
    own: List[Optional[float]] = [rank.own_seconds for rank in timed]
    read = None in own and any(rank.read for rank in timed)
    if None in own:
        own = [rank.step_seconds for rank in timed]
    pace = [seconds for seconds in own if seconds is not None]
    steps = [rank.step or 0 for rank in timed]
    middle = sorted(pace)[(len(pace) - 1) // 2]
    least = min(steps)
    behind = max(steps) - least
    chosen: Sequence[int] = range(len(timed))
    if behind < 2 or behind * middle < skew:  # nodes are read one after the other
        behind = 0
    else:
        chosen = [at for at, step in enumerate(steps) if step == least]
    longest = max(map(pace.__getitem__, chosen))
    stands_out = bool(behind) or longest - middle >= max(_READ if read else _LONGER, _SHARE * middle)
    slowest = min((timed[at] for at in chosen if pace[at] == longest), key=lambda each: each.rank)
    return Slowest(slowest.rank, slowest.node, longest, middle, behind, stands_out)
