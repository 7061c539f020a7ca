"""`drumbeat.pyz _agent ORDER.json --node K`: the guard with its agent, for one node."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, Dict, List

from drumbeat.agent.guard import guard
from drumbeat.agent.place import placed
from drumbeat.facts import identity
from drumbeat.facts.host import LiveHost
from drumbeat.order import load_order
from drumbeat.problem import Problem
from drumbeat.processes import die_with_parent
from drumbeat.record import RecordError
from drumbeat.signals import EXIT_USAGE


def run_agent(arguments: List[str]) -> int:
    """Arguments: ORDER.json NODE REPORT_FD BUNDLE. The token comes in the environment, and goes no further."""
    die_with_parent(os.getppid(), signal.SIGTERM)
    path, node, report_fd, bundle = arguments[0], int(arguments[1]), int(arguments[2]), arguments[3]
    token = os.environ.get("DRUMBEAT_TOKEN", "")
    try:
        with open(path, encoding="utf-8") as file:
            order = placed(load_order(file.read(), path), identity.read(LiveHost(), []))
    except (OSError, RecordError, Problem) as error:
        print(f"drumbeat: {error}", file=sys.stderr)
        return EXIT_USAGE

    def report(message: Dict[str, Any]) -> None:
        if report_fd >= 0:
            os.write(report_fd, json.dumps(message).encode() + b"\n")

    def agent(beat_fd: int) -> int:
        from drumbeat.agent.loop import Agent

        return Agent(order, node, token, bundle, beat_fd, report).run()

    return guard(agent, order.timing.agent_deadline)
