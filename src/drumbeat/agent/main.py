"""`drumbeat.pyz _agent ORDER.json NODE ...`: the guard with its agent, for one node."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Dict, List

from drumbeat.agent.guard import guard, warn
from drumbeat.agent.place import placed
from drumbeat.base.order import load_order
from drumbeat.base.problem import Problem
from drumbeat.base.processes import die_with_parent
from drumbeat.base.record import RecordError
from drumbeat.base.signals import EXIT_USAGE
from drumbeat.machine import identity
from drumbeat.machine.host import LiveHost

if TYPE_CHECKING:  # the guard does with as little as it can
    from drumbeat.agent.member.monitor import OpenTextFile


def run_agent(arguments: List[str], open_textfile: OpenTextFile) -> int:
    """Arguments: ORDER.json NODE REPORT_FD BUNDLE PARENT SIGNAL ORDER_FD. The token comes in the environment and goes
    no further.

    The order comes by ORDER_FD, a file without a name that all agents of one desk share: nobody can have replaced it. Its
    path is there to tell which run this is.

    PARENT is the pid of who started us: by now it may be gone, and our parent somebody else. SIGNAL is what its death means for
    us: TERM, a request to stop; KILL, the loss of this node.
    """
    path, node, report_fd, bundle, parent, with_signal, order_fd = arguments
    die_with_parent(int(parent), int(with_signal))
    token = os.environ.get("DRUMBEAT_TOKEN", "")
    try:
        text = os.pread(int(order_fd), os.fstat(int(order_fd)).st_size, 0)
        os.close(int(order_fd))
        order = placed(load_order(text.decode(), path), identity.read(LiveHost(), []))
    except (OSError, RecordError, Problem) as error:
        warn(str(error))
        return EXIT_USAGE

    def report(message: Dict[str, Any]) -> None:
        try:
            os.write(int(report_fd), json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # who started us is gone, or stopped: the run goes on without its reader

    def agent(beat_fd: int) -> int:
        from drumbeat.agent.agent import Agent
        from drumbeat.agent.loop import Loop

        return Loop(Agent(order, int(node), token, bundle, beat_fd, report, open_textfile)).run()

    deadline = order.timing.agent_deadline
    hung = f"it had not answered for {deadline:g} s, so its guard ended it"
    return guard(
        agent, deadline, lambda: report({"alive": int(node)}), lambda: report({"hung": int(node), "why": hung})
    )
