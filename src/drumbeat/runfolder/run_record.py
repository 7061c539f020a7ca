"""run.json: what is known about a run from its first moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from drumbeat.record import to_plain
from drumbeat.runfolder.layout import SCHEMA, RunFolder
from drumbeat.runfolder.write import replace_json


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
    lead: str = ""  # the lead's host, in the folder of a node that does not see the lead's


def write_run_record(folder: RunFolder, record: RunRecord) -> None:
    """Replace run.json. What is not known is left out."""
    replace_json(folder.run_json, {key: value for key, value in to_plain(record).items() if value not in ("", None)})
