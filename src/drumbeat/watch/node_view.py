"""View of one node and its ranks: the latest samples, rates between two of them, and short histories."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Dict, List, Mapping, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.machine.model import GpuSample
from drumbeat.runfolder.lines import mean_of
from drumbeat.runfolder.progress import RankPace
from drumbeat.runfolder.records import Metric, Sample
from drumbeat.watch.curve import Curve

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
            used = [_energy(before, after, seconds) for before, after in _pairs(self.gpus, sample.gpus)]
            if any(joules is not None for joules in used):
                self.energy = (self.energy or 0.0) + sum(joules or 0.0 for joules in used)
        self.memory_used, self.memory_total = _whole(sample.memory.get("used")), _whole(sample.memory.get("total"))
        self.gpus = sample.gpus or self.gpus  # where vendor tools are asked, not every sample has them
        self.sampled, self._cpu, self._network = t, sample.cpu, sample.network
        self.means = self._means()
        self.slowed = sum(1 for gpu in self.gpus if gpu.throttle)
        for name, value in self.means.items():
            if value is not None:
                self.curves[name].add(t, value)

    def _means(self) -> Dict[str, Optional[float]]:
        traffic_now = [value for value in (self.received, self.sent) if value is not None]
        power = [gpu.power for gpu in self.gpus if gpu.power is not None]
        return {
            "gpu_use": mean_of([gpu.busy for gpu in self.gpus]),
            "power": sum(power) if power else None,
            "memory": mean_of([memory_percent(gpu) for gpu in self.gpus]),
            "network": sum(traffic_now) if traffic_now else None,
        }

    @property
    def throttle(self) -> Tuple[str, ...]:
        """Return the reasons that slow any of its GPUs down now."""
        return tuple(dict.fromkeys(reason for gpu in self.gpus for reason in gpu.throttle or ()))


def memory_percent(gpu: GpuSample) -> Optional[float]:
    if gpu.memory_used is not None and gpu.memory_total:
        return 100.0 * gpu.memory_used / gpu.memory_total
    return gpu.memory_percent


def traffic(
    before: Mapping[str, Any], after: Mapping[str, Any], seconds: float
) -> Tuple[Optional[float], Optional[float]]:
    """Return bytes per second in and out, over RDMA ports or over interfaces, whichever carried more: RDMA bypasses
    interfaces, and IP over InfiniBand is counted by both."""
    best: Tuple[Optional[float], Optional[float]] = (None, None)
    ports = [name for name in after if ":" in name]
    interfaces = [name for name in after if ":" not in name and not _REPEATS.match(name)]
    for names in (interfaces, ports):
        now = tuple(_grown(before, after, names, key, seconds) for key in ("received", "sent"))
        if sum(value or 0.0 for value in now) > sum(value or 0.0 for value in best) or best == (None, None):
            best = (now[0], now[1])
    return best


def _grown(
    before: Mapping[str, Any], after: Mapping[str, Any], names: List[str], key: str, seconds: float
) -> Optional[float]:
    total: Optional[float] = None
    for name in names:
        pair = [_count(where.get(name), key) for where in (before, after)]
        if pair[0] is not None and pair[1] is not None and pair[1] >= pair[0]:  # else the counter began anew
            total = (total or 0.0) + (pair[1] - pair[0]) / seconds
    return total


def _count(entry: Any, key: str) -> Optional[int]:
    return _whole(entry.get(key)) if isinstance(entry, Mapping) else None


def _pairs(before: Tuple[GpuSample, ...], after: Tuple[GpuSample, ...]) -> List[Tuple[GpuSample, GpuSample]]:
    known = {gpu.index: gpu for gpu in before}
    return [(known[gpu.index], gpu) for gpu in after if gpu.index in known]


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
