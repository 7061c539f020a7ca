"""Records of what a run's nodes report: metrics, telemetry, printed lines, members. Events: see events.py.

Any script may write metrics, so a record that cannot be used is dropped by its reader, who counts it; nothing here raises.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import field
from types import MappingProxyType
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.record import RecordError, from_plain
from drumbeat.machine.model import GpuSample

_LARGEST = 1e18  # no count, time or rate is larger; sums of many stay finite
_LARGEST_COUNT = 2**53  # limit for counts of steps, ranks, nodes: up to here a float holds every whole number exactly
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # how metrics.report writes what JSON cannot


class Metric(NamedTuple):
    """One report of one rank. `loss` and `accuracy` may be NaN or infinite, all other numbers are finite.

    A tuple because it is made thousands of times per second where a large run is watched."""

    node: int
    rank: int
    t: float  # by the clock of its node
    kind: str = "step"  # or validation, checkpoint, throughput, any word
    step: Optional[int] = None
    steps: Optional[int] = None  # planned in all
    loss: Optional[float] = None
    tokens: Optional[float] = None  # processed by this rank since its last report
    samples: Optional[float] = None
    seconds: Optional[float] = None  # that this validation or checkpoint took; a step: this rank's own part of one
    accuracy: Optional[float] = None
    rate: Optional[float] = None  # the script's own throughput
    unit: str = ""  # of `rate`
    memory_gib: Optional[float] = None
    target_reached: Optional[bool] = None
    printed: bool = False  # read from what the script printed
    more: Mapping[str, Any] = _NOTHING  # what else the script reported: numbers and strings

    @property
    def of_epoch(self) -> bool:
        """Return true if `step` and `steps` are the epoch's own, not the run's."""
        return self.more.get("step_of") == "epoch"

    @property
    def step_is(self) -> str:
        """Return `epoch` or `sample` if the script counts nothing else; '' if it counts steps."""
        told = self.more.get("step_is")
        return told if told in ("epoch", "sample") else ""

    @property
    def announces(self) -> bool:
        """Return true for a report without any figure: it announces the start of something other than a step."""
        figures = (self.loss, self.seconds, self.accuracy, self.rate, self.tokens, self.samples)
        return self.kind != "step" and all(figure is None for figure in figures) and not self.more


@dataclass(frozen=True)
class Sample:
    """One reading of a node's devices; None is unknown."""

    node: int
    t: float
    host: str = ""
    gpus: Tuple[GpuSample, ...] = ()
    cpu: Mapping[str, Any] = field(default_factory=dict)  # busy_ticks, all_ticks, load
    memory: Mapping[str, Any] = field(default_factory=dict)  # total, used: bytes
    network: Mapping[str, Any] = field(default_factory=dict)  # interface or RDMA port -> received, sent: bytes


@dataclass(frozen=True)
class Line:
    """One line that a rank printed; `rank` is None for what a launcher itself printed."""

    node: int
    attempt: int
    rank: Optional[int]
    stream: str  # out, err
    text: str


@dataclass(frozen=True)
class SoFar:
    """Sum of a node's metrics in the current attempt, up to this line of its metrics.jsonl. The agent writes one now and then, so
    that a reader who starts late, or reads only the end of a long file, gets the same totals as everybody else."""

    node: int
    progress: Mapping[str, Any]  # Progress.snapshot()


@dataclass(frozen=True)
class Member:
    """An agent on a machine, and its role in the run."""

    node: int  # its number in the run, that of its folder; members are listed by node rank
    host: str
    address: str = ""
    clock_offset: float = 0.0  # seconds to add to its clock to get the lead's
    ranks: int = 1


SO_FAR = "so-far"  # a kind that only the agent writes


def parse_metric(data: Mapping[str, Any], node: int) -> Optional[Metric]:
    """Return the metric on a decoded line; None if one of its known values cannot be used."""
    if data.get("kind") == SO_FAR:
        return None
    values: Dict[str, Any] = {}
    more: Dict[str, Any] = {}
    try:
        for name, value in data.items():
            read = _READERS.get(name)
            if read is None:
                if isinstance(value, (str, float, int)):
                    more[name] = value
            elif value is not None or name == "rank":
                values[name] = read(value)
        return Metric(node, values.pop("rank", 0), values.pop("t"), more=more or _NOTHING, **values)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def so_far_line(progress: Mapping[str, Any], t: float) -> str:
    """Return the line of metrics.jsonl that `parse_so_far` reads."""
    return json.dumps({"t": t, "kind": SO_FAR, "progress": progress}) + "\n"


def parse_so_far(data: Mapping[str, Any], node: int) -> Optional[SoFar]:
    progress = data.get("progress")
    return SoFar(node, progress) if data.get("kind") == SO_FAR and isinstance(progress, dict) else None


def parse_sample(data: Mapping[str, Any], node: int) -> Optional[Sample]:
    try:
        sample = from_plain(Sample, {**data, "node": node})
    except (RecordError, OverflowError):
        return None
    return sample if math.isfinite(sample.t) else None


def parse_member(data: Any) -> Optional[Member]:
    try:
        member = from_plain(Member, {**data, "node": data.get("member", data.get("node"))})
        return member if math.isfinite(member.clock_offset) else None
    except (RecordError, OverflowError, TypeError, AttributeError):
        return None


def is_count(number: int) -> bool:
    """Return true if the number can count steps, ranks or nodes. A run folder may be somebody else's and hold any number."""
    return 0 <= number <= _LARGEST_COUNT


def _finite(value: Any) -> float:
    number: float = value if type(value) is float else _number(value)
    if not -_LARGEST < number < _LARGEST:  # NaN compares false
        raise ValueError(value)
    return number


def _whole(value: Any) -> int:
    number: int = value if type(value) is int else int(_finite(value))
    if not is_count(number):
        raise ValueError(value)
    return number


def _measured(value: Any) -> float:
    if type(value) is float:
        return value
    return _WORDS[value] if isinstance(value, str) else _number(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(value)
    return float(value)  # OverflowError where an int has too many digits


_READERS: Dict[str, Callable[[Any], Any]] = {
    "rank": lambda value: _whole(int(value) if isinstance(value, str) and re.fullmatch(r"\d{1,9}", value) else value),
    "t": _finite,
    "kind": lambda value: str(value or "step")[:100],
    "step": _whole,
    "steps": _whole,
    "loss": _measured,
    "tokens": _finite,
    "samples": _finite,
    "seconds": _finite,
    "accuracy": _measured,
    "rate": _finite,
    "unit": lambda value: "".join(letter for letter in str(value or "")[:40] if letter.isprintable()),
    "memory_gib": _finite,
    "target_reached": lambda value: value if isinstance(value, bool) else None,
    "printed": bool,
}
