"""Times as people and schedulers write them, in seconds. A bare number is refused: some mean minutes, others seconds."""

from __future__ import annotations

import re

from drumbeat.base.regex import regex

_UNITS = regex(r"(?:([0-9]{1,6})d)?(?:([0-9]{1,6})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,7})s)?")
_CLOCK = regex(r"(?:([0-9]{1,6})-)?([0-9]{1,6}):([0-5][0-9]):([0-5][0-9])")


def parse_duration(text: str) -> int:
    """Seconds; ValueError says what to write instead."""
    if re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError(f"needs a unit: write {text}s, {text}m or {text}h")
    if re.fullmatch(r"[0-9]{1,6}:[0-9]{2}", text):
        first, second = text.split(":")
        raise ValueError(f"{text} can be read in two ways: write {first}h{second}m or {first}m{second}s")
    clock = _CLOCK.fullmatch(text)
    match = clock or (_UNITS.fullmatch(text) if text else None)
    if match is None:
        raise ValueError("expected a time such as 90s, 30m, 1h, 2d6h30m, 1:30:00 or 1-02:00:00")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    if clock and clock[1] is not None and hours > 23:
        raise ValueError(f"{hours} hours after the days: at most 23")
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
