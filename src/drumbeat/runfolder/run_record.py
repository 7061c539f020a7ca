"""run.json: what is known about a run from its first moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from drumbeat.runfolder.layout import SCHEMA


@dataclass(frozen=True)
class Desk:
    """The process that started the run and stays with it."""

    host: str
    pid: int
    started: Optional[str] = None  # its start time, as the kernel counts it: pids are used again


@dataclass(frozen=True)
class RunRecord:
    run_id: str
    schema: str = SCHEMA
    name: str = ""
    created: float = 0.0
    handle: str = ""  # BACKEND://CLUSTER/JOB
    version: str = ""
    desk: Optional[Desk] = None
    output: str = ""  # what a scheduler's job prints; a path, or a name in the run folder
    cancelled: bool = False  # the desk has taken the job out of the queue: a scheduler may forget it at once
