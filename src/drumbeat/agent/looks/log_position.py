"""How far a log was read: which lines are new where its file was replaced, by the next part of the log or by a copy of it.

A line is old if it is the last line read or stands before it, or if its time stamp is before the last one read; while none was
read, before the moment at which the reading began. Lines without a stamp, or with one of another form, count as new.
"""

from __future__ import annotations

import calendar
import time
from typing import Dict, List, Optional, Sequence, Tuple

from drumbeat.base.regex import regex

Stamp = Tuple[str, float]  # form, seconds; only stamps of one form can be compared

_BOOT = regex(rb"(?:<\d{1,5}>)?\[ *(\d{1,12}\.\d{1,9})\]")  # dmesg, journalctl: since the machine's start
_ISO = regex(rb"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(?:Z|([+-])(\d\d):?(\d\d))?")  # rsyslog
_SYSLOG = regex(rb"([A-Z][a-z]{2}) {1,2}(\d{1,2}) (\d\d):(\d\d):(\d\d)\b")  # without a year
_DATED = regex(rb"\[[A-Z][a-z]{2} ([A-Z][a-z]{2}) {1,2}(\d{1,2}) (\d\d):(\d\d):(\d\d) (\d{4})\]")  # dmesg -T
_MONTHS = {name: number + 1 for number, name in enumerate(b"Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split())}
_HALF_A_YEAR = 183 * 86400.0


def stamp_of(line: bytes) -> Optional[Stamp]:
    """None where the line does not begin with a time."""
    try:
        return _stamp(line)
    except (ValueError, KeyError):  # no day of any calendar
        return None


def _stamp(line: bytes) -> Optional[Stamp]:
    boot = _BOOT.match(line)
    if boot:
        return "since boot", float(boot.group(1))
    iso = _ISO.match(line)
    if iso:
        seconds = calendar.timegm(tuple(int(iso.group(at)) for at in range(1, 7)))
        shift = 60 * (60 * int(iso.group(9)) + int(iso.group(10))) if iso.group(8) else 0
        return "date", seconds + float(b"0." + (iso.group(7) or b"0")) + (-shift if iso.group(8) == b"+" else shift)
    dated = _DATED.match(line)
    if dated:
        hour, minute, second, year = (int(dated.group(at)) for at in (3, 4, 5, 6))
        day = (year, _MONTHS[dated.group(1)], int(dated.group(2)))
        return "local date", float(calendar.timegm((*day, hour, minute, second)))
    syslog = _SYSLOG.match(line)
    if syslog:
        hour, minute, second = (int(syslog.group(at)) for at in (3, 4, 5))
        day = (2000, _MONTHS[syslog.group(1)], int(syslog.group(2)))  # a leap year
        return "without a year", float(calendar.timegm((*day, hour, minute, second)))
    return None


class LogPosition:
    def __init__(self) -> None:
        self._line = b""
        # The other forms are those of a clock or time zone that need not be ours.
        self._stamps: Dict[str, float] = {"since boot": time.monotonic()}

    def advance(self, lines: Sequence[bytes]) -> None:
        """These were read, in this order."""
        self._line = next((line for line in reversed(lines) if line), self._line)
        stamp = next(filter(None, map(stamp_of, reversed(lines))), None)
        if stamp:
            self._stamps[stamp[0]] = stamp[1]

    def newer(self, lines: Sequence[bytes]) -> List[bytes]:
        """Those of a replaced file's lines that have not been read."""
        if self._line:
            for number in range(len(lines) - 1, -1, -1):
                if lines[number] == self._line:
                    return list(lines[number + 1 :])
        return [line for line in lines if not self._is_old(line)]

    def _is_old(self, line: bytes) -> bool:
        stamp = stamp_of(line)
        if stamp is None or stamp[0] not in self._stamps:
            return False
        age = self._stamps[stamp[0]] - stamp[1]
        return 0 < age < (_HALF_A_YEAR if stamp[0] == "without a year" else float("inf"))  # January follows December
