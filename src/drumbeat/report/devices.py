"""What telemetry says of a run's GPUs and network ports, added up over all nodes."""

from __future__ import annotations

import statistics
from dataclasses import field
from typing import Dict, Iterator, List, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.machine.vendors.telemetry import GpuSample
from drumbeat.report.figures import Traffic
from drumbeat.runfolder.records import Sample

_LONGEST_GAP = 60.0  # seconds between two samples over which power is taken to be steady


@dataclass
class Devices:
    count: int = 0  # samples with at least one GPU
    _gpus: Dict[Tuple[int, int], List[Tuple[float, GpuSample]]] = field(default_factory=dict)  # node, index -> readings
    _ports: Dict[Tuple[str, str], List[Tuple[Optional[int], Optional[int]]]] = field(default_factory=dict)

    def add(self, sample: Sample) -> None:
        self.count += 1 if sample.gpus else 0
        for gpu in sample.gpus:
            self._gpus.setdefault((sample.node, gpu.index), []).append((sample.t, gpu))
        for port, value in sample.network.items():
            if isinstance(value, dict):
                counted = (_whole(value.get("received")), _whole(value.get("sent")))
                self._ports.setdefault((sample.host, port), []).append(counted)

    def mean(self, name: str) -> Optional[float]:
        values = [getattr(gpu, name) for readings in self._gpus.values() for _, gpu in readings]
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known else None

    def most(self, name: str, unit: float = 1.0) -> Optional[float]:
        values = [getattr(gpu, name) for readings in self._gpus.values() for _, gpu in readings]
        known = [value / unit for value in values if value is not None]
        return max(known, default=None)

    def energy(self, begin: Optional[float] = None, end: Optional[float] = None) -> Optional[float]:
        """Joules of all GPUs between two times: by their energy counters, else power integrated over the samples."""
        total, measured = 0.0, False
        for readings in self._gpus.values():
            for first, second, joules in _spent(readings):
                low = max(first, begin if begin is not None else first)
                high = min(second, end if end is not None else second)
                if high > low:
                    total, measured = total + joules * (high - low) / (second - first), True
        return total if measured else None

    def energy_how(self) -> str:
        counters = sum(_counts(readings) for readings in self._gpus.values())
        sensors = sum(any(gpu.power is not None for _, gpu in readings) for readings in self._gpus.values())
        if counters == len(self._gpus):
            return f"energy counters of {counters} GPU{'s' * (counters != 1)}"
        return f"power of {sensors} of {len(self._gpus)} GPUs, sampled and integrated" if sensors else ""

    def curve(self, name: str) -> List[Tuple[float, float]]:
        """The mean over all GPUs, at most one point per second."""
        at: Dict[int, List[float]] = {}
        for readings in self._gpus.values():
            for t, gpu in readings:
                value = getattr(gpu, name)
                if value is not None:
                    at.setdefault(int(t), []).append(value)
        return [(float(t), statistics.fmean(values)) for t, values in sorted(at.items())]

    def traffic(self) -> Dict[str, Traffic]:
        """From the first sample to the last; RDMA ports (`mlx5_0:1`) count apart from network interfaces."""
        found: Dict[str, List[Tuple[int, int]]] = {}
        for (_, port), counted in self._ports.items():
            passed = tuple(_passed([each[side] for each in counted]) for side in (0, 1))
            if passed[0] is not None and passed[1] is not None:
                found.setdefault("rdma" if ":" in port else "ethernet", []).append((passed[0], passed[1]))
        return {
            kind: Traffic(len(ports), sum(received for received, _ in ports), sum(sent for _, sent in ports))
            for kind, ports in found.items()
        }


def _counts(readings: List[Tuple[float, GpuSample]]) -> bool:
    return sum(gpu.energy is not None for _, gpu in readings) > 1


def _spent(readings: List[Tuple[float, GpuSample]]) -> Iterator[Tuple[float, float, float]]:
    """From, to, joules: of each interval between two samples of one GPU."""
    if _counts(readings):
        counted = [(t, gpu.energy) for t, gpu in readings if gpu.energy is not None]
        for (first, before), (second, after) in zip(counted, counted[1:]):
            if after >= before and second > first:  # a driver that was loaded again counts from 0
                yield first, second, after - before
        return
    known = [(t, gpu.power) for t, gpu in readings if gpu.power is not None]
    for (first, watts), (second, later) in zip(known, known[1:]):
        if 0 < second - first <= _LONGEST_GAP:
            yield first, second, (watts + later) / 2 * (second - first)


def _passed(counter: List[Optional[int]]) -> Optional[int]:
    """How far a counter went up; one that was reset counts on from there."""
    known = [value for value in counter if value is not None]
    if len(known) < 2:
        return None
    return sum(after - before if after >= before else after for before, after in zip(known, known[1:]))


def _whole(value: object) -> Optional[int]:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
