"""run.json: what is known about a run from its first moment."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Optional

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.record import RecordError, check_schema, from_plain, to_plain
from drumbeat.runfolder.layout import SCHEMA, RunFolder
from drumbeat.runfolder.read import Files, read_json
from drumbeat.runfolder.write import replace_json

_RUN_JSON = RunFolder("").run_json


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
    created: float = 0.0  # seconds since 1970; 0: not known
    handle: str = ""  # BACKEND://CLUSTER/JOB
    version: str = ""
    desk: Optional[Desk] = None
    output: str = ""  # what a scheduler's job prints; a path, or a name in the run folder
    cancelled: bool = False  # the desk has taken the job out of the queue: a scheduler may forget it at once
    last_state: str = ""  # what its scheduler said last, kept where the desk has removed the job after its end
    last_detail: str = ""
    submitting: bool = False  # the desk is handing it over; if that desk is dead, nobody knows how far it came
    lead: str = ""  # the lead's host, in the folder of a node that does not see the lead's


def read_run_record(path: str, files: Optional[Files] = None) -> RunRecord:
    """RecordError when there is no run there, or one of a newer drumbeat."""
    place = os.path.join(path, _RUN_JSON)
    data = read_json(_RUN_JSON, files or Files(path))
    if data is None:
        raise RecordError(f"{path}: not a run folder (no readable run.json)")
    check_schema(str(data.get("schema", "?")), SCHEMA, place)
    try:
        record = from_plain(RunRecord, {"run_id": os.path.basename(path), **data}, place)
    except OverflowError as error:
        raise RecordError(f"{place}: {error}") from None
    return record if math.isfinite(record.created) else dataclasses.replace(record, created=0.0)


def is_folder_of(folder: RunFolder, run_id: str) -> bool:
    """Whether this run's folder can be seen from here."""
    try:
        return read_run_record(folder.path).run_id == run_id
    except RecordError:
        return False


def keep_last_word(path: str, state: str, detail: str) -> None:
    """The job is about to be removed from its cluster: what was said of its end stays here."""
    record = dataclasses.replace(read_run_record(path), last_state=state, last_detail=detail)
    write_run_record(RunFolder(path), record)


def write_run_record(folder: RunFolder, record: RunRecord) -> None:
    """Replace run.json. What is not known is left out."""
    known = {key: value for key, value in to_plain(record).items() if value not in ("", None, False)}
    replace_json(folder.run_json, known)
