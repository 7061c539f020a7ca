"""What processes wrote last before they ended with exit code 0: a failure that a shell hid, or that the program caught itself."""

from __future__ import annotations

import os
from typing import List, Optional, Sequence, Tuple

from drumbeat.agent.ranks.log_tail import tail
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.printable import printable
from drumbeat.base.regex import regex
from drumbeat.findings.model import PEER_LOST, WARNING, Evidence, Finding, shown
from drumbeat.metrics.reader import read_line

_TABLE = 40  # lines that may follow a failure that ended the work: torchrun's table, and what the script says last
_LAST = 8  # lines among which an error line counts as the last words
LATER = 0.5  # seconds: both streams of a program that gives up end within this time of each other,
_LEFT = 30.0  # and it is gone this long after at the latest
# What a program prints itself where it catches an exception: "Error: ...", "Exception caught: ...", "Training failed: ...". A
# number after the colon is a figure ("Error: 0.12"), and "none" is no error.
_OWN_WORDS = (
    r"(?i:(?:an? )?(?:(?:fatal|unexpected|caught) )?(?:error|exception)(?: (?:was )?(?:caught|raised|occurred))?"
    r"|(?:[\w-]{1,30} ){1,4}failed) ?:(?!\s*(?:[-+.]?\d|(?i:none|nan|inf|null|false)\b))"
)
_TRACEBACK = "Traceback (most recent call last)"
_SIGN = regex(
    r"Traceback \(most recent call last\)|(?:\b|\x1b\[[\d;]*m)(?:ERROR|CRITICAL|FATAL)\b|^(?:\w+\.)*[A-Z]\w*(?:Error|Exception)\b"
    r"|(?:\b|\x1b\[[\d;]*m)" + _OWN_WORDS
)
_ERROR_LINE = regex(r"(?:ERROR|CRITICAL|FATAL)\b")
_OWN_LINE = regex(_OWN_WORDS)


@dataclass(frozen=True)
class Stream:
    """The end of one stream of a rank, or of the node's command (rank None)."""

    rank: Optional[int]
    name: str  # out or err
    path: str
    lines: Sequence[str]
    written: float  # when the last line was; 0: there is no such file


def read_stream(rank: Optional[int], name: str, path: str) -> Stream:
    try:
        written = os.stat(path).st_mtime
    except OSError:
        written = 0.0
    return Stream(rank, name, path, tail(path), written)


def may_hold_error(lines: Sequence[str]) -> bool:
    """A quick look: False where no rule and no reader can find an error."""
    return any(_SIGN.search(line) for line in lines)


def last_failure(streams: Sequence[Stream], command: Sequence[str]) -> Optional[Tuple[Finding, Stream]]:
    """The failure that the rules see at the end of what was written, if no work went on after it in the same stream."""
    from drumbeat.logs.exits import RankEnd, explain_run  # the agent of a healthy run starts without it
    from drumbeat.logs.failure import NO_FAILURE, NOT_KNOWN

    by_rank = {rank: {each.name: each.lines for each in streams if each.rank == rank} for rank in _ranks(streams)}
    ends = [RankEnd(rank, 0, None, each.get("out", ()), each.get("err", ())) for rank, each in by_rank.items()]
    failure = explain_run(ends, command)
    found = failure.finding
    if found is None or failure.answer in (NO_FAILURE, NOT_KNOWN, PEER_LOST) or not found.evidence:
        return None
    text = found.evidence[0].text
    for stream in sorted(streams, key=lambda each: (_ranks(streams).index(each.rank), each.name)):  # err before out
        place = max((number for number, line in enumerate(stream.lines) if text in shown(line)), default=None)
        if place is not None:
            return (found, stream) if not _works(stream.lines[place + 1 :], _TABLE) else None
    return None


def last_error(streams: Sequence[Stream]) -> Optional[Tuple[Finding, Stream]]:
    """The last line that a program itself calls an error, if it stands at the end of its stream."""
    from drumbeat.logs.read.prefixes import clean, without_colour

    for stream in streams:
        lines = [line for line in stream.lines if line.strip()][-_LAST:]
        for number in reversed(range(len(lines))):
            line = clean(lines[number])
            own = not line.only_warns and _OWN_LINE.match(line.text)
            if line.level in ("E", "F") or _ERROR_LINE.match(line.text) or own:
                if _works(lines[number + 1 :], _LAST):
                    break
                text = shown(printable(without_colour(lines[number]))).strip()[:500]
                return Finding("", WARNING, text, evidence=(Evidence(text),), rank=stream.rank), stream
    return None


def raised_at(lines: Sequence[str], most: int = _LAST) -> Optional[int]:
    """The place of the line that names the exception of the last traceback, if no work went on after it and at most so many
    lines follow. Python prints it so where nobody catches it; what caught it would go on."""
    begin = max((number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)), default=len(lines))
    place = next((number for number in range(begin + 1, len(lines)) if lines[number][:1] not in ("", " ", "\t")), None)
    return None if place is None or _works(lines[place + 1 :], most) else place


def wrote_on(streams: Sequence[Stream], stream: Stream, ended: float) -> bool:
    """Did the work go on after the error at the end of `stream`? The rank's other stream may be newer, the rank may have
    lived on in silence, or it says itself that its work is done."""
    from drumbeat.logs.read.endings import is_good_end

    own = [each for each in streams if each.rank == stream.rank]
    newest = max([ended - _LEFT, *(each.written - LATER for each in own)])
    return newest > stream.written or any(is_good_end(line) for each in own for line in each.lines[-_LAST:])


def _works(lines: Sequence[str], most: int) -> bool:
    """Do the lines after an error show that the work went on: a step, or too many of them?"""
    after = [line for line in lines if line.strip()]
    return len(after) > most or any(read_line(line) for line in after)


def _ranks(streams: Sequence[Stream]) -> List[Optional[int]]:
    return list(dict.fromkeys(each.rank for each in streams))
