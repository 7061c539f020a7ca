"""View of one node and its ranks: the latest samples, rates between two of them, and short histories."""

from __future__ import annotations

from array import array
from dataclasses import field
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.machine.model import GpuSample
from drumbeat.runfolder.lines import mean_of
from drumbeat.runfolder.progress import RankPace
from drumbeat.runfolder.records import Metric, Sample

# A curve over time in bounded memory: values fall into time slots; when all slots are taken, each two become one.


class Point(NamedTuple):
    t: float  # when the slot's last value was measured
    mean: float
    low: float
    high: float
    total: float


class Curve:
    """Values over time, added in any order. Adding one costs the same however long the run is."""

    def __init__(self, width: float = 1.0, slots: int = 600) -> None:
        assert slots % 2 == 0, slots
        self.width, self.slots = width, slots
        self.begin: Optional[float] = None  # when the first slot begins
        self._count = array("L")
        self._total, self._last = array("d"), array("d")
        self._low, self._high = array("f"), array("f")

    def __len__(self) -> int:
        return sum(1 for count in self._count if count)

    def add(self, t: float, value: float) -> None:
        if self.begin is None:
            self.begin = t
        slot = int((t - self.begin) / self.width) if t > self.begin else 0
        while slot >= self.slots:
            self._halve()
            slot = int((t - self.begin) / self.width)
        count = self._count
        while len(count) <= slot:
            count.append(0)
            for values in (self._total, self._last, self._low, self._high):
                values.append(0.0)
        if not count[slot]:
            self._low[slot] = self._high[slot] = value
            self._last[slot] = t
        else:
            if value < self._low[slot]:
                self._low[slot] = value
            if value > self._high[slot]:
                self._high[slot] = value
            if t > self._last[slot]:
                self._last[slot] = t
        count[slot] += 1
        self._total[slot] += value

    def points(self, since: float = float("-inf")) -> List[Point]:
        """Return slots that hold values, in time order; `since`: only those that end later."""
        if self.begin is None:
            return []
        first = max(0, int((since - self.begin) / self.width)) if since > self.begin else 0
        slots = list(zip(self._last, self._count, self._low, self._high, self._total))[first:]
        return [Point(last, total / count, low, high, total) for last, count, low, high, total in slots if count]

    def _halve(self) -> None:
        """Merge each two neighbouring slots into one of twice the width."""
        pairs = [range(slot, min(slot + 2, len(self._count))) for slot in range(0, len(self._count), 2)]
        taken = [[slot for slot in pair if self._count[slot]] or pair[:1] for pair in pairs]
        columns: List[Tuple[Any, Any]] = [(self._total, sum), (self._last, max), (self._low, min), (self._high, max)]
        for values, merge in [*columns, (self._count, sum)]:  # the counts last: `taken` is read from them
            values[:] = array(values.typecode, (merge(values[slot] for slot in slots) for slots in taken))
        self.width *= 2


def rates(points: List[Point], together: float = 0.0) -> List[Point]:
    """Return the increase from one slot to the next, per second; the first slot has no predecessor. Slots less than `together`
    seconds apart count as one: the ranks' reports of one step may fall on both sides of a slot's end."""
    joined: List[Point] = []
    for point in points:
        if joined and point.t - joined[-1].t < together:
            joined[-1] = point._replace(total=joined[-1].total + point.total)
        else:
            joined.append(point)
    found = []
    for before, after in zip(joined, joined[1:]):
        if after.t > before.t:
            rate = after.total / (after.t - before.t)
            found.append(Point(after.t, rate, rate, rate, after.total))
    return found


# Interfaces that pass on what another one has counted already.
_REPEATS = regex(r"(docker|veth|br-|virbr|cni|cali|flannel|vxlan|tunl|tap|lxc|cilium|podman)")
MOST_NODES, MOST_RANKS = 1 << 14, 1 << 17  # more than any run has; a record that names others is not believed
CURVES = ("gpu_use", "power", "memory", "network")  # of every node; per cent, watts, per cent, bytes per second


@dataclass
class RankView(RankPace):
    """One rank of the current attempt."""

    memory_gib: Optional[float] = None
    ended: Optional[int] = None  # exit code; minus the signal's number where one ended it

    def add(self, metric: Metric, t: float) -> None:
        if metric.memory_gib is not None:
            self.memory_gib = metric.memory_gib
        if metric.kind == "step":
            self.add_step(metric, t)


@dataclass
class NodeView:
    node: int
    host: str = ""
    gpus: Tuple[GpuSample, ...] = ()
    sampled: Optional[float] = None  # by the lead's clock
    cpu_busy: Optional[float] = None  # per cent of its cores, between the last two samples
    memory_used: Optional[int] = None  # bytes of the host
    memory_total: Optional[int] = None
    received: Optional[float] = None  # bytes per second, between the last two samples
    sent: Optional[float] = None
    energy: Optional[float] = None  # joules of its GPUs since the first sample
    # The node's curves: the mean over its GPUs, for power the sum; network is in and out together.
    means: Dict[str, Optional[float]] = field(default_factory=lambda: dict.fromkeys(CURVES))
    slowed: int = 0  # GPUs that something slows down
    joined: bool = False
    lost: str = ""  # why
    idle: str = ""  # why it has no ranks: spare, or excluded and why
    ranks: Dict[int, RankView] = field(default_factory=dict)
    curves: Dict[str, Curve] = field(default_factory=lambda: {name: Curve(5.0, 120) for name in CURVES})
    _cpu: Mapping[str, Any] = field(default_factory=dict)
    _network: Mapping[str, Any] = field(default_factory=dict)

    def add(self, sample: Sample, t: float) -> None:
        seconds = t - self.sampled if self.sampled is not None else 0.0
        if seconds < 0:
            return
        self.host = sample.host[:300] or self.host
        if seconds > 0:
            self.cpu_busy = _busy(self._cpu, sample.cpu)
            self.received, self.sent = traffic(self._network, sample.network, seconds)
            before = {gpu.index: gpu for gpu in self.gpus}
            pairs = [(before[gpu.index], gpu) for gpu in sample.gpus if gpu.index in before]
            self.energy = sum_of([self.energy, *(_energy(old, new, seconds) for old, new in pairs)])
        self.memory_used, self.memory_total = _whole(sample.memory.get("used")), _whole(sample.memory.get("total"))
        self.gpus = sample.gpus or self.gpus  # where vendor tools are asked, not every sample has them
        self.sampled, self._cpu, self._network = t, sample.cpu, sample.network
        self.means = {
            "gpu_use": mean_of([gpu.busy for gpu in self.gpus]),
            "power": sum_of([gpu.power for gpu in self.gpus]),
            "memory": mean_of([memory_percent(gpu) for gpu in self.gpus]),
            "network": sum_of([self.received, self.sent]),
        }
        self.slowed = sum(1 for gpu in self.gpus if gpu.throttle)
        for name, value in self.means.items():
            if value is not None:
                self.curves[name].add(t, value)

    @property
    def throttle(self) -> Tuple[str, ...]:
        """Return the reasons that slow any of its GPUs down now."""
        return tuple(dict.fromkeys(reason for gpu in self.gpus for reason in gpu.throttle or ()))


def sum_of(values: Sequence[Optional[float]]) -> Optional[float]:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def memory_percent(gpu: GpuSample) -> Optional[float]:
    if gpu.memory_used is not None and gpu.memory_total:
        return 100.0 * gpu.memory_used / gpu.memory_total
    return gpu.memory_percent


def traffic(
    before: Mapping[str, Any], after: Mapping[str, Any], seconds: float
) -> Tuple[Optional[float], Optional[float]]:
    """Return bytes per second in and out, over RDMA ports or over interfaces, whichever carried more: RDMA bypasses
    interfaces, and IP over InfiniBand is counted by both."""
    ports = [name for name in after if ":" in name]
    interfaces = [name for name in after if ":" not in name and not _REPEATS.match(name)]
    over_ip, over_rdma = (
        (_grown(before, after, names, "received", seconds), _grown(before, after, names, "sent", seconds))
        for names in (interfaces, ports)
    )
    more = sum(value or 0.0 for value in over_rdma) > sum(value or 0.0 for value in over_ip)
    return over_rdma if more or over_ip == (None, None) else over_ip


def _grown(
    before: Mapping[str, Any], after: Mapping[str, Any], names: List[str], key: str, seconds: float
) -> Optional[float]:
    pairs = [(_count(before.get(name), key), _count(after.get(name), key)) for name in names]
    both = [(old, new) for old, new in pairs if old is not None and new is not None]
    return sum_of([(new - old) / seconds for old, new in both if new >= old])  # else the counter began anew


def _count(entry: Any, key: str) -> Optional[int]:
    return _whole(entry.get(key)) if isinstance(entry, Mapping) else None


def _energy(before: GpuSample, after: GpuSample, seconds: float) -> Optional[float]:
    """Return joules between two samples: by the GPU's own counter, else by its power."""
    if before.energy is not None and after.energy is not None and after.energy >= before.energy:
        return after.energy - before.energy
    powers = [gpu.power for gpu in (before, after) if gpu.power is not None]
    return seconds * sum(powers) / len(powers) if powers else None


def _busy(before: Mapping[str, Any], after: Mapping[str, Any]) -> Optional[float]:
    names = ("busy_ticks", "all_ticks")
    old, new = [_whole(before.get(name)) for name in names], [_whole(after.get(name)) for name in names]
    if old[0] is None or old[1] is None or new[0] is None or new[1] is None or new[1] <= old[1]:
        return None
    return min(100.0, max(0.0, 100.0 * (new[0] - old[0]) / (new[1] - old[1])))


def _whole(value: Any) -> Optional[int]:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None
