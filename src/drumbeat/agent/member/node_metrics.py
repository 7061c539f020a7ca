"""What this node's ranks report: shipped from the node's own disk to the run folder, and added up to its progress."""

from __future__ import annotations

import json
import os
import time
from typing import Any, Callable, Dict, List, Optional

from drumbeat.agent.folder.folder_child import FolderChild
from drumbeat.agent.folder.merged_logs import Shipping
from drumbeat.agent.member.rank_progress import RankProgress
from drumbeat.base import clock
from drumbeat.runfolder.layout import NodeFolder
from drumbeat.runfolder.progress import STAGE, Progress
from drumbeat.runfolder.read import Tail, decode
from drumbeat.runfolder.records import parse_metric, so_far_line

_LOOK_EVERY = 0.25  # seconds between two looks at what ranks print
_SO_FAR_EVERY = 8 << 10  # bytes of metrics; readers of large runs look at no less than the last 12 KiB of a file
_LAST_LOOK = 10.0  # seconds for the last one
_CLOCK_ERROR = 3600.0  # seconds by which a clock may be corrected while a run goes on


class NodeMetrics:
    """`local` is a folder on the node's own disk: ranks make many small writes. `child` alone touches the run folder."""

    def __init__(self, folder: NodeFolder, local: str, shipping: Optional[Shipping], child: FolderChild) -> None:
        self.folder, self.shipping, self.child = folder, shipping, child
        self.progress = Progress()
        self.ranks = RankProgress()
        self._began = clock.now()
        self.path = os.path.join(local, "metrics.jsonl")  # where ranks write
        self._reported = Tail(self.path)
        self._notes: List[str] = []  # records of our own that are not shipped yet
        self._stages = 1
        self._logs = ""  # the folder of what ranks print
        self._next_look = 0.0
        self._steps_reported = False
        self._unsaid = 0  # bytes of metrics since the last line that says what they add up to

    def begin_attempt(self, folder: str) -> None:
        """Progress counts from here. What scripts print is read too: from the logs in this folder."""
        counted = self.progress.first_t is not None
        self.progress, self.ranks = Progress(), RankProgress()
        self._logs, self._notes, self._stages = folder, [], 1
        if counted:
            self._say_so_far()

    def stage_began(self, rank: int, t: float) -> None:
        """The script has started another launcher. `rank`: this node's first."""
        self._stages += 1
        record = {"t": t, "rank": rank, "kind": STAGE, "stage": self._stages}
        self._notes.append(json.dumps(record))

    def finish(self, meanwhile: Callable[[], None]) -> None:
        """The ranks have ended: have the rest of what they printed read, as long as the storage answers."""
        if self._logs:
            self.child.read_printed(self._logs, final=True)
            self.child.flush(_LAST_LOOK, meanwhile)

    def ship(self, attempt: int, final: bool = False) -> List[Dict[str, Any]]:
        """Carry on what has come, in few writes; the records that could be used."""
        if self.shipping and self._logs and (final or not self.child.full):  # else it waits on the node's own disk
            self.shipping.ship(attempt, final)
        lines = self._notes + in_our_time(self._reported.lines(final)) + self._printed_records(final)
        self._notes = []
        if lines:
            data = "".join(line + "\n" for line in lines).encode("utf-8", "replace")
            self.child.append_if_room(self.folder.metrics, data)
            self._unsaid += len(data)
        records = []
        for line in lines:
            record = decode(line) or {}
            metric = parse_metric(record, self.folder.node)
            if metric and not self._began - _CLOCK_ERROR <= metric.t <= clock.now() + _CLOCK_ERROR:
                metric = None  # no time of this run: it would make durations and rates of nonsense
            if metric:  # any script may write this file: what cannot be used is left to the readers to count
                self._steps_reported = self._steps_reported or (metric.kind == "step" and not metric.printed)
                self.progress.add(metric)
                self.ranks.add(metric, time.monotonic())
                records.append(record)
        if self._unsaid >= _SO_FAR_EVERY:
            self._say_so_far()
        return records

    def _say_so_far(self) -> None:
        """After what was counted, so that a reader of the file's end need not read it all."""
        self._unsaid = 0
        line = so_far_line(self.progress.snapshot(), clock.now())
        self.child.append_if_room(self.folder.metrics, line.encode())

    def _printed_records(self, final: bool) -> List[str]:
        """What the child has found since; at the end the caller waits for it before."""
        now = time.monotonic()
        if self._logs and not final and now >= self._next_look:
            self._next_look = now + _LOOK_EVERY
            self.child.read_printed(self._logs)
        records = self.child.take_records()
        if self._steps_reported:  # a program that reports its steps itself is not counted twice
            records = [record for record in records if record["kind"] != "step"]
        return [json.dumps({**record, "t": clock.own(record["t"])}) for record in records]


def in_our_time(lines: List[str]) -> List[str]:
    """Where the machine's clock was set forward or back, what ranks have just reported gets the time that we go on with."""
    if not clock.stepped():
        return lines
    shifted = []
    for line in lines:
        record = decode(line)
        t = record.get("t") if record else None
        if record and isinstance(t, (int, float)):
            line = json.dumps({**record, "t": clock.own(t)})
        shifted.append(line)
    return shifted
