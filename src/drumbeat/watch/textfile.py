"""Node-exporter's text file: the lead's monitor writes the run's numbers where that collector looks, so no port is opened.

Runs on a compute node: the standard library alone. The file is replaced whole, and removed when the run ends.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Optional

from drumbeat.backends.contract import RUNNING
from drumbeat.base.record import RecordError
from drumbeat.runfolder.events import AttemptStarted
from drumbeat.runfolder.follow import EVENTS, METRICS, TELEMETRY, Follower
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.write import replace
from drumbeat.watch.families import families, text
from drumbeat.watch.head import Standing, head_of
from drumbeat.watch.model import RunView

EVERY = 15.0  # seconds
_ALL_NODES = 16  # above, only the lead's own node is read: following all of them would cost it too much


class TextFile:
    """`folder` is the collector's; the file is named after the run."""

    def __init__(self, folder: str, run_path: str) -> None:
        self.run_path = run_path
        self.path = os.path.join(folder, f"drumbeat-{os.path.basename(run_path)}.prom")
        self.run: Optional[Run] = None
        self._next = 0.0
        self._failed = False

    def update(self) -> None:
        """Every 15 s: read what is new and write the file. What fails is said once, and stops nothing."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + EVERY
        try:
            if self.run is None:
                self._open()
            replace(self.path, self._text(), mode=0o644)
        except (OSError, RecordError) as error:
            if not self._failed:
                self._failed = True
                print(f"drumbeat: cannot write {self.path}: {error}", file=sys.stderr, flush=True)

    def remove(self) -> None:
        try:
            os.unlink(self.path)
        except OSError:
            pass

    def _open(self) -> None:
        self.run = Run.open(self.run_path)
        order = self.run.order()
        self.whole = order is None or order.nodes <= _ALL_NODES
        self.view = RunView(order)
        chosen = None if self.whole else [0]
        self.follower = Follower(self.run, chosen, (EVENTS, METRICS, TELEMETRY))

    def _text(self) -> str:
        assert self.run is not None
        now = time.time()
        self.view.clock = now
        while True:
            records = self.follower.poll()
            for record in records:
                if isinstance(record, AttemptStarted):
                    self.view.members(self.run.members())
                self.view.add(record)
            if not self.follower.behind:
                break
        about = self.run.record
        standing = Standing(self.run.run_id, about.name, RUNNING, created=about.created, folder=self.run.path)
        found = families(head_of(self.view, standing, now), self.view.nodes.values())
        if not self.whole:  # one node's share is not the run's
            found = [family for family in found if not family.name.endswith("_per_second") or "_node_" in family.name]
        return text(found, {"run": self.run.run_id})
