"""Why a trial's ranks ended, from its run folder: the last lines of their logs, and who ended before anybody was asked to."""

from __future__ import annotations

from typing import List, Tuple

from drumbeat.findings.model import Finding
from drumbeat.logs.reader import Reader
from drumbeat.runfolder import events as kinds
from drumbeat.runfolder.logs import Log
from drumbeat.runfolder.run import Run

_TAIL = 256 << 10  # bytes of each log
_MOST = 512  # logs
_CLOCKS = 0.05  # seconds by which two nodes' clocks may differ after they were compared
_SAYS = "drumbeat train: "  # how a recipe begins what it says when it refuses


def in_logs(run: Run) -> Tuple[Finding, ...]:
    """Causes and symptoms in the ends of the last attempt's logs; a program may print one and yet not end."""
    reader = Reader()
    for log in _logs(run):
        reader.name_file(log.name, log.rank, None)
        lines = [line.text.encode("utf-8", "replace") for line in run.last_lines(log, _TAIL)]
        reader.feed_lines(log.name, 1, lines)
    failure = reader.report().failure
    return ((failure.finding,) if failure.finding else ()) + failure.others


def failed_before_stop(run: Run) -> bool:
    """Whether a rank had failed when the ranks were asked to end: one that reports may have run on without it."""
    events = run.events()
    stops = (event.t for event in events if isinstance(event, kinds.Stopping) and event.why != "a rank failed")
    asked = min(stops, default=float("inf"))
    ends = (event for event in events if isinstance(event, kinds.RankExited) and event.failed)
    return any(end.t < asked - _CLOCKS for end in ends)


def refusal(run: Run) -> str:
    """What a recipe would not do, and why, in its own words."""
    for log in _logs(run):
        lines = [line.text for line in run.last_lines(log, _TAIL)]
        for index, line in enumerate(lines):
            if _SAYS in line:
                fix = lines[index + 1].strip() if index + 1 < len(lines) and lines[index + 1].startswith("  ") else ""
                what = line.split(_SAYS, 1)[1].strip()
                return f"{what}; {fix}" if fix else what
    return ""


def _logs(run: Run) -> List[Log]:
    """Of the last attempt; of each rank what it printed to standard error first."""
    logs = [log for log in run.logs() if log.rank is not None or log.stream != "out"]
    return sorted(logs, key=lambda log: (log.node, not log.merged, log.rank is None, log.rank or 0, log.stream))[:_MOST]
