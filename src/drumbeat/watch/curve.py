"""A curve over time in bounded memory: values fall into time slots; when all slots are taken, each two become one."""

from __future__ import annotations

from array import array
from typing import List, NamedTuple, Optional, Tuple


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
        return [self._point(slot) for slot in range(first, len(self._count)) if self._count[slot]]

    def _point(self, slot: int) -> Point:
        total, count = self._total[slot], self._count[slot]
        return Point(self._last[slot], total / count, self._low[slot], self._high[slot], total)

    def _halve(self) -> None:
        """Merge each two neighbouring slots into one of twice the width."""
        pairs = range(0, len(self._count), 2)
        merged = [self._merged(slot, min(slot + 1, len(self._count) - 1)) for slot in pairs]
        self._count = array("L", (each[0] for each in merged))
        self._total, self._last = array("d", (each[1] for each in merged)), array("d", (each[2] for each in merged))
        self._low, self._high = array("f", (each[3] for each in merged)), array("f", (each[4] for each in merged))
        self.width *= 2

    def _merged(self, first: int, second: int) -> Tuple[int, float, float, float, float]:
        taken = [slot for slot in sorted({first, second}) if self._count[slot]] or [first]
        return (
            sum(self._count[slot] for slot in taken),
            sum(self._total[slot] for slot in taken),
            max(self._last[slot] for slot in taken),
            min(self._low[slot] for slot in taken),
            max(self._high[slot] for slot in taken),
        )


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
