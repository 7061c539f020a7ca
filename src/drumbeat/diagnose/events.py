"""What the rules and tracebacks found, line by line: bounded, in the order of the log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict, List, Optional, Set, Tuple

from drumbeat.diagnose.lines import Line
from drumbeat.diagnose.rulebook import Match
from drumbeat.finding import Evidence

MAX_PER_RULE_AND_SOURCE = 3
MAX_EVENTS = 20_000
MAX_SOURCES = 20_000

EXCEPTION = re.compile(r"^(?P<name>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:: ?(?P<message>.*))?$")
# A frame as Python prints it, or as rich does inside its box; and what lines within a traceback begin with.
_FRAME = re.compile(r'\s*File "([^"]{1,300})", line (\d+)|[\s\u2502]*(/[^\s:]{1,300}\.py):(\d+) in ')
_INSIDE = " \t|+^~/\u2502\u256d\u2570\u2771"
_RANK_IN_NAME = re.compile(r"(?:rank|local_rank)[-_.]?(\d{1,6})(?!\d)|/(\d{1,6})/std(?:err|out)\.log$", re.IGNORECASE)


@dataclass(frozen=True)
class Event:
    """A line that a rule or a traceback made speak. `match` is none for an exception that no rule knows."""

    sequence: int
    evidence: Evidence
    match: Optional[Match] = None
    exception: str = ""
    raised_at: str = ""
    rank: Optional[int] = None
    host: Optional[str] = None
    pid: int = 0
    time: Optional[float] = None


def rank_of_file(file: str) -> Optional[int]:
    match = _RANK_IN_NAME.search(file)
    return int(match[1] or match[2]) if match else None


class Events:
    def __init__(self) -> None:
        self.kept: List[Event] = []
        self.counts: Dict[str, int] = {}  # rule id -> lines
        self.marks: Set[str] = set()
        self.owners: Dict[str, Tuple[Optional[int], Optional[str]]] = {}  # file -> rank, host
        self._per_source: Dict[Tuple[str, str, Optional[int], str], int] = {}

    def add_match(
        self, sequence: int, match: Match, line: Line, evidence: Evidence, host: str = "", pid: int = 0
    ) -> None:
        rule = match.rule
        self.counts[rule.id] = self.counts.get(rule.id, 0) + 1
        named = match.groups.get("rank", "").strip()
        rank = int(named) if named.isdigit() else line.rank
        host = match.groups.get("host", "").strip() or host or line.host or ""
        if self._room(rule.id, evidence.file or "", rank, host):
            owner = self._owner(evidence.file or "")
            rank = rank if rank is not None else owner[0]
            event = Event(sequence, evidence, match, rank=rank, host=host or owner[1], pid=pid, time=line.time)
            self.kept.append(event)

    def add_exception(self, sequence: int, text: str, raised_at: str, line: Line, evidence: Evidence) -> None:
        name = text.split(":")[0]
        if self._room(name, evidence.file or "", line.rank, ""):
            owner = self._owner(evidence.file or "")
            self.kept.append(
                Event(
                    sequence,
                    evidence,
                    exception=text[:300],
                    raised_at=raised_at,
                    rank=line.rank if line.rank is not None else owner[0],
                    host=line.host or owner[1],
                    time=line.time,
                )
            )

    def _owner(self, file: str) -> Tuple[Optional[int], Optional[str]]:
        return self.owners.get(file) or (rank_of_file(file), None)

    def _room(self, name: str, file: str, rank: Optional[int], host: str) -> bool:
        if len(self.kept) >= MAX_EVENTS:
            return False
        key = (name, file, rank, host)
        count = self._per_source.get(key, 0)
        if count >= MAX_PER_RULE_AND_SOURCE or (count == 0 and len(self._per_source) >= MAX_SOURCES):
            return False
        self._per_source[key] = count + 1
        return True


class Tracebacks:
    """Finds the exception at the end of each traceback, also when the lines of several ranks are interleaved."""

    MAX_OPEN = 256
    MAX_LENGTH = 400

    def __init__(self) -> None:
        self._open: Dict[Optional[int], Tuple[int, str]] = {}  # rank of the prefix -> lines so far, nearest frame

    def __bool__(self) -> bool:
        return bool(self._open)

    def feed(self, line: Line) -> Optional[Tuple[str, str]]:
        """The exception's line and where it was raised, when this line ends a traceback."""
        text = line.text
        if "Traceback (most recent call last)" in text:
            if len(self._open) < self.MAX_OPEN:
                self._open[line.rank] = (0, "")
            return None
        if line.rank not in self._open:
            return None
        length, frame = self._open[line.rank]
        if not text.strip() or text[0] in _INSIDE:
            found = _FRAME.match(text)
            frame = f"{found[1] or found[3]}:{found[2] or found[4]}" if found else frame
            self._open[line.rank] = (length + 1, frame)
            if length > self.MAX_LENGTH:
                del self._open[line.rank]
            return None
        match = EXCEPTION.match(text)
        if match and frame and (match["message"] is not None or match["name"][0].isupper() or "." in match["name"]):
            del self._open[line.rank]
            return text.strip(), frame
        self._open[line.rank] = (length + 8, frame)  # another writer's line in between; give up after some fifty
        if length > self.MAX_LENGTH:
            del self._open[line.rank]
        return None
