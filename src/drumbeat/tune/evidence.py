"""Why a trial's ranks ended, from its run folder: the lead's own finding, and what the ranks' last lines say."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Optional, Tuple

from drumbeat.diagnose.reader import Reader
from drumbeat.finding import Finding
from drumbeat.record import RecordError, from_plain
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.read import events, read_json

_TAIL = 256 << 10  # bytes of each log
_MOST = 512  # logs
_CLOCKS = 0.05  # seconds by which two nodes' clocks may differ after they were compared
_SAYS = "drumbeat train: "  # how a recipe begins what it says when it refuses


def summary(folder: RunFolder) -> Dict[str, Any]:
    return read_json(folder.summary) or {}


def finding(told: Dict[str, Any]) -> Optional[Finding]:
    try:
        return from_plain(Finding, told["failure"]) if told.get("failure") else None
    except (RecordError, AssertionError):
        return None


def in_logs(folder: RunFolder) -> Tuple[Finding, ...]:
    """Causes and symptoms in the ends of the last attempt's logs; a program may print one and yet not end."""
    reader = Reader()
    for path, rank in logs(folder):
        name = os.path.relpath(path, folder.path)
        reader.name_file(name, rank, None)
        reader.feed_lines(name, 1, _tail(path))
    failure = reader.report().failure
    return ((failure.finding,) if failure.finding else ()) + failure.others


def failed_before_stop(folder: RunFolder) -> bool:
    """Whether a rank had failed when the ranks were asked to end: one that reports may have run on without it."""
    found = events(folder)
    stops = (event for event in found if event.get("kind") == "stopping" and event.get("why") != "a rank failed")
    asked = min((float(event.get("t") or 0.0) for event in stops), default=float("inf"))
    ends = (event for event in found if event.get("kind") == "rank-exited")
    failed = (float(end.get("t") or 0.0) for end in ends if end.get("exit_code") or end.get("signal"))
    return any(at < asked - _CLOCKS for at in failed)


def refusal(folder: RunFolder) -> str:
    """What a recipe would not do, and why, in its own words."""
    for path, _ in logs(folder):
        lines = [line.decode("utf-8", "replace") for line in _tail(path)]
        for index, line in enumerate(lines):
            if _SAYS in line:
                fix = lines[index + 1].strip() if index + 1 < len(lines) and lines[index + 1].startswith("  ") else ""
                what = line.split(_SAYS, 1)[1].strip()
                return f"{what}; {fix}" if fix else what
    return ""


def logs(folder: RunFolder) -> List[Tuple[str, Optional[int]]]:
    """The last attempt's logs, and whose they are."""
    found: List[Tuple[str, Optional[int]]] = []
    for node in folder.nodes():
        for attempt in node.attempts()[-1:]:
            found += [(node.merged(attempt), None)]
            for rank, stem in sorted(node.ranks(attempt).items()):
                found += [(f"{stem}.{stream}", rank) for stream in ("err", "out")]
            found += [(os.path.join(node.attempt(attempt), "torchrun.err"), None)]
    return [each for each in found if os.path.exists(each[0])][:_MOST]


def _tail(path: str) -> List[bytes]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - _TAIL))
            return file.read(_TAIL).splitlines()
    except OSError:
        return []
