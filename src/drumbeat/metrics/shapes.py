"""Behaviour of each number of a printed line over time.

Lines of one form (the same keys in the same order) repeat. For each of their numbers a short summary is kept: it grows, stays,
falls, or restarts inside a counter that continues. The grammar uses it where words do not decide.
"""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

_FORMS = 64  # of one stream; the least recently seen form is dropped
_KEPT = 8  # unread lines of one form


class Slot:
    """One number of a form."""

    __slots__ = ("first", "last", "ups", "inner", "stays", "turns", "stride", "even", "doubled", "moved", "learnt")

    def __init__(self, value: float) -> None:
        self.first = self.last = value
        self.ups = self.stays = self.turns = 0
        self.inner = 0  # increases while no other counter grew
        self.stride, self.even = 0.0, True  # it always grows by the same amount
        self.doubled = 0
        self.moved = 0.0  # up and down in all
        self.learnt = False  # it once went down much more than up

    @property
    def grows(self) -> bool:
        return self.ups > 0 and not self.turns

    @property
    def still(self) -> bool:
        return self.stays > 0 and not self.ups and not self.turns

    @property
    def doubles(self) -> bool:
        return self.doubled > 1 and self.doubled == self.ups and not self.turns

    @property
    def falls(self) -> bool:
        return self.learnt or self.last < self.first

    @property
    def learns(self) -> bool:
        """Return true for a positive number that goes down much more than up, as a loss does at first."""
        return self.turns > 1 and 0 < self.last < 0.97 * self.first and self.first - self.last > self.moved / 2

    @property
    def slows(self) -> bool:
        return abs(self.stride) * (self.ups + self.turns) < self.moved

    def add(self, value: float, others_grow: bool) -> None:
        step, self.last = value - self.last, value
        self.moved += abs(step)
        if step > 0:
            self.ups += 1
            self.doubled += value == 2 * step and value > 2
            self.inner += not others_grow
            self.even = self.even and self.stride in (0.0, step)
            self.stride = step
        elif step == 0:
            self.stays += 1
        elif not (others_grow and self.inner and value <= self.first):  # otherwise it has restarted
            self.turns += 1
            self.learnt = self.learnt or self.learns
            self.even = self.even and (not self.stride or abs(self.stride - step) <= 1e-6 * abs(step))
            self.stride = step


Form = Tuple[Tuple[str, ...], ...]


class Shapes:
    """The forms of one stream."""

    def __init__(self) -> None:
        self._forms: Dict[Form, List[Slot]] = {}
        self._form: Form = ()  # of the last line
        self.waiting: Dict[Form, List[str]] = {}  # the last lines that gave nothing
        self.replays = False  # earlier lines are read a second time
        self.comma = False  # numbers have a decimal comma
        self.again = self.changed = False  # the form of the last line was seen before; and with other values
        self.improving = False  # a value has fallen while a counter grew
        self.losses = 0  # lines with a loss of any kind

    def unread(self, text: str) -> None:
        """Keep a line that gave nothing, for the moment when the behaviour of its numbers shows what it means."""
        if self._form:
            if len(self.waiting) >= _FORMS:
                del self.waiting[next(iter(self.waiting))]
            kept = self.waiting.setdefault(self._form, [])
            kept.append(text)
            del kept[:-_KEPT]
            self._form = ()

    def understood(self) -> List[str]:
        """Return the earlier lines of the last line's form, which can be read now."""
        return self.waiting.pop(self._form, [])

    def seen(self, form: Form, values: Sequence[float], whole: Sequence[bool]) -> List[Slot]:
        """Add a line and return how its numbers behave."""
        slots, self._form = self._forms.pop(form, None), form
        if slots is None:
            slots = [Slot(value) for value in values]
            self.again = self.changed = False
            if len(self._forms) >= _FORMS:
                del self._forms[next(iter(self._forms))]
        elif not self.replays:
            ups = [value > slot.last for slot, value in zip(slots, values)]
            self.again = True
            self.changed = any(value != slot.last for slot, value in zip(slots, values))
            growing = sum(up and count for up, count in zip(ups, whole))
            for slot, value, up, count in zip(slots, values, ups, whole):
                slot.add(value, growing > (up and count))
        self._forms[form] = slots
        return slots
