"""Sends a run's metrics to a tracker while it runs: a process of its own beside the lead."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any, Dict, Iterable, List

from drumbeat.metrics.trackers import Tracker, open_tracker
from drumbeat.runfolder.files import replace
from drumbeat.runfolder.follow import METRICS, Follower, Record
from drumbeat.runfolder.records import Metric
from drumbeat.runfolder.run import Run

SCALARS = ("loss", "accuracy", "tokens", "samples", "seconds", "rate", "memory_gib")
_EVERY, _RETRY = 2.0, 30.0  # seconds between two reads, and until a tracker that failed is tried again


def figures(metric: Metric) -> Dict[str, Any]:
    values = {name: getattr(metric, name) for name in SCALARS}
    return {**{name: value for name, value in values.items() if value is not None}, **metric.more}


def send(tracker: Tracker, metric: Metric) -> None:
    if metric.step is not None:  # a value without a step has no place on a curve
        tracker.write(metric.kind, metric.step, figures(metric), metric.t)


def identity(run: Run) -> str:
    """Return an id for the tracker that tells this run from one that the program writes itself."""
    return f"drumbeat-{run.run_id}"


class Live:
    """Sends a run's metrics to one tracker while it runs. Metrics that could not be sent are kept and tried again."""

    def __init__(self, run: Run, kind: str, place: str) -> None:
        self.run, self.kind, self.place = run, kind, place
        self.follower = Follower(run, what=(METRICS,))
        self.waiting: List[Metric] = []
        self.problem = ""
        self._tracker: List[Tracker] = []  # once it is open
        self._rank = sys.maxsize  # the lowest that has reported
        self._retry = 0.0
        self._file = run.folder.tracked(kind)
        self._sent = float((run.files.read(os.path.basename(self._file)) or b"0").decode())

    def add(self, records: Iterable[Record]) -> None:
        offsets = self.run.clock_offsets()
        for metric in records:
            if isinstance(metric, Metric) and metric.rank <= self._rank:
                self._rank = metric.rank
                metric = metric._replace(t=metric.t + offsets.get(metric.node, 0.0))
                if metric.t > self._sent:  # an earlier start of the run has sent older ones
                    self.waiting.append(metric)

    def send(self) -> None:
        """Send the waiting metrics. Whatever the tracker raises, the run goes on."""
        if time.monotonic() < self._retry:
            return
        try:
            if not self._tracker:
                self._tracker.append(open_tracker(self.kind, self.place, identity(self.run)))
            for metric in self.waiting[:]:
                send(self._tracker[0], metric)
                self._sent = max(self._sent, metric.t)
                del self.waiting[0]
            self._tracker[0].flush()
            replace(self._file, repr(self._sent))
            self.problem = ""
        except Exception as error:  # noqa: BLE001 - theirs may be of any kind
            self._fail(error)

    def end(self) -> None:
        for records in self.follower.drain():
            self.add(records)
        self._retry = 0.0
        self.send()
        summary = self.run.summary()
        try:
            for tracker in self._tracker:
                tracker.close(failed=bool(summary and summary.exit_code))
                if tracker.kept:
                    raise OSError(f"offline, kept in {tracker.kept}: wandb sync sends it, drumbeat report --export too")
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.problem = f"{self.kind}: {str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)}"
        self._retry = time.monotonic() + _RETRY
        print(self.problem, file=sys.stderr, flush=True)


def track(path: str, kind: str, place: str) -> int:
    """Follow a run until SIGTERM says that it has ended; return 1 if something could not be sent."""
    ended: List[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    os.environ.setdefault("WANDB_DIR", path)
    live = Live(Run.open(path), kind, place or os.path.join(path, kind))
    while not ended:
        live.add(live.follower.poll())
        live.send()
        until = time.monotonic() + _EVERY
        while not ended and not live.follower.behind and time.monotonic() < until:
            time.sleep(0.1)
    live.end()
    return 1 if live.problem else 0
