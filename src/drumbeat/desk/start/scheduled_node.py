"""One node of a run whose nodes a scheduler has started: its agent, or, with one task per rank, one rank's guard."""

from __future__ import annotations

import os
import signal
import sys
from typing import Mapping

from drumbeat.agent.place import own_node, placed, task_meeting
from drumbeat.backends.contract import job_handle
from drumbeat.base.order import Order, dump_order, load_order
from drumbeat.base.problem import Problem
from drumbeat.base.record import RecordError
from drumbeat.base.signals import EXIT_REQUEUE, EXIT_USAGE
from drumbeat.bundle.pinned import running_bundle
from drumbeat.desk.foreground import Foreground
from drumbeat.machine import identity as identities
from drumbeat.machine.host import LiveHost
from drumbeat.machine.model import Identity
from drumbeat.runfolder.files import replace
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.summary import RunRecord, forget_end, write_run_record

EVERY = 0.5  # seconds between two looks at the ranks' output, which is on shared storage


def run_node(order_file: str) -> int:
    """Run one node (or rank) of a fanned-out or submitted run: `_node ORDER.json`, as a backend starts it."""
    environ = os.environ
    identity = identities.read(LiveHost(), [])
    token = environ.get("DRUMBEAT_TOKEN", "")
    bundle = running_bundle()
    assert bundle, "_node runs from the bundle"
    try:
        with open(order_file, encoding="utf-8") as file:
            order = placed(load_order(file.read(), order_file), identity)
        if not token:
            raise Problem("no DRUMBEAT_TOKEN reached this node", "the launch command must pass it on")
        node = own_node(order, identity)
        if order.launcher == "tasks" and identity.local_id:
            return guard_rank(order, identity, token, environ)
        if node == 0:
            _open_again(order, identity)
    except (OSError, RecordError, Problem) as error:
        print(f"drumbeat: {error}", file=sys.stderr)
        return EXIT_USAGE
    return joined(Foreground(order, [node], bundle, token, EVERY), node, environ)


def _open_again(order: Order, identity: Identity) -> None:
    """Open the run folder for this start: one job of an array has its own, and a requeued one has not ended after all."""
    folder = RunFolder(order.folder)
    if not os.path.exists(folder.run_json):
        os.makedirs(folder.at("nodes"), exist_ok=True)
        replace(folder.order, dump_order(order))
        if not os.path.exists(folder.stop):  # the batch script may have written into it already
            replace(folder.stop, "")
        record = RunRecord(order.run_id, name=order.name, created=order.created, handle=job_handle(identity))
        write_run_record(folder, record)
    forget_end(folder)


def guard_rank(order: Order, identity: Identity, token: str, environ: Mapping[str, str]) -> int:
    from drumbeat.agent.ranks.tasks import (  # here: few jobs have such tasks, and all would wait for it
        own_view,
        run_task,
    )

    node = own_node(order, identity)
    assert identity.local_id is not None
    meeting = task_meeting(identity, environ, node, token)
    return run_task(meeting, token, order.timing.muster, own_view(identity.local_id))


def joined(
    foreground: Foreground, node: int, environ: Mapping[str, str], by_mpirun: bool = False, own_pod: bool = False
) -> int:
    """Return the job's exit code on the lead. A node that the lead has ended returns 0, or a launcher that ends a job at its
    first failure would kill the lead while it still writes the summary. A pod (`own_pod`) fails where its own ranks failed.

    DRUMBEAT_REJOIN is set by a backend that starts the agent again on this very machine: it is told by 75 when to do so."""
    # mpirun kills its tasks, which are ours, when a rank has called MPI_Abort: the agents go on and record who it was. The lead
    # always goes on, to end the others.
    code = foreground.run(environ, if_killed=signal.SIGKILL if node and not by_mpirun else signal.SIGTERM)
    if node and foreground.again and environ.get("DRUMBEAT_REJOIN"):
        return EXIT_REQUEUE
    return 0 if node and foreground.ended_by_lead and not (own_pod and foreground.failed_here) else code
