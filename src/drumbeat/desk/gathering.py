"""What a person who waits for a job is told until its ranks start: what its scheduler says, and which nodes are here."""

from __future__ import annotations

from typing import Optional

from drumbeat.backends.contract import QUEUED, RUNNING, Status
from drumbeat.runfolder.muster import muster_of
from drumbeat.runfolder.run import Run


class Gathering:
    """`news` is asked again and again, and has something to say whenever that has changed."""

    def __init__(self) -> None:
        self.said = ""
        self.over = False

    def news(self, run: Run, status: Status) -> Optional[str]:
        if self.over or status.tasks or status.state not in (QUEUED, RUNNING):
            return None
        text = self._text(run, status)
        if text == self.said:
            return None
        self.said = text
        return text or None

    def _text(self, run: Run, status: Status) -> str:
        if status.state == QUEUED:
            return f"queued{': ' + status.detail if status.detail else ''}"
        muster = muster_of(run.run_events())
        if muster is None:
            self.over = bool(run.attempts())
            return ""
        return muster.words + (f": {status.detail}" if status.detail else "")
