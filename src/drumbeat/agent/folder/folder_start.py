"""How an agent finds and prepares its part of the run folder. Storage may hang: each function runs in a child with a deadline."""

from __future__ import annotations

import os
from typing import Optional, Tuple

from drumbeat.agent.wire.messages import Welcome
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order, dump_order
from drumbeat.machine.model import Facts
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.run_record import RunRecord, is_folder_of, write_run_record
from drumbeat.runfolder.summary import AttemptEnd, Summary
from drumbeat.runfolder.trusted import untrusted
from drumbeat.runfolder.verdict import END, next_step, requeues
from drumbeat.runfolder.write import replace, replace_json


@dataclass(frozen=True)
class Earlier:
    """What a run folder tells about earlier starts of this run: a scheduler may have started the job again."""

    ends: Tuple[AttemptEnd, ...] = ()
    requeues: int = 0


@dataclass(frozen=True)
class MemberFolder:
    path: str
    shared: bool  # it is the lead's
    notice: str = ""  # why the lead's is not used, though it can be seen
    problem: str = ""  # why there is none to use


def prepare_folder(folder: RunFolder, node: int, facts: Facts) -> None:
    """This node's own folder, with its facts."""
    place = folder.node(node)
    os.makedirs(place.path, exist_ok=True)
    replace_json(place.facts, facts)


def earlier_starts(folder: RunFolder) -> Earlier:
    return Earlier(tuple(Run.open(folder.path).attempt_ends()), requeues(folder))


def member_folder(welcome: Welcome, order: Order, node: int) -> MemberFolder:
    """The lead's run folder if this node sees it and it is this user's, else one of its own that the lead gathers from."""
    theirs, notice = RunFolder(welcome.folder), ""
    if is_folder_of(theirs, welcome.run_id):
        foreign = untrusted(theirs, node)
        if not foreign:
            return MemberFolder(theirs.path, True)
        notice = f"the lead's run folder is not used here: {foreign}"
    own = RunFolder(order.folder)
    foreign = untrusted(own, node)
    if foreign:
        problem = f"cannot use the run folder: {foreign}; choose another place with --runs"
        return MemberFolder(own.path, False, notice, problem)
    os.makedirs(own.path, exist_ok=True)
    replace(own.order, dump_order(order))
    write_run_record(own, RunRecord(welcome.run_id, lead=welcome.host))
    return MemberFolder(own.path, False, notice)


def summary_at_the_end(folder: RunFolder) -> Optional[Summary]:
    """None where there is none, or where the job is queued again."""
    return Run.open(folder.path).summary() if next_step(folder) == END else None
