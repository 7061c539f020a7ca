"""What a host runs where the job has a container: shell that binds what is needed and starts it with the node's agent inside."""

from __future__ import annotations

import shlex
from typing import Dict

from drumbeat.backends.ssh.request import key_of
from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.base.signals import EXIT_PREFLIGHT
from drumbeat.bundle.pinned import node_start
from drumbeat.containers.runtimes import RUNTIMES
from drumbeat.containers.wrap import node_lines


def check_container(order: Order, where: str) -> None:
    if order.container and RUNTIMES[order.container.runtime].lines is None:
        able = ", ".join(name for name, runtime in RUNTIMES.items() if runtime.lines)
        raise Problem(f"{where}: {order.container.runtime} is a scheduler's, and there is none", f"one of {able}")


def host_python(order: Order) -> str:
    """The interpreter on the host itself: with a container, `python` is the image's."""
    return "" if order.container else order.python


def container_script(order: Order, node: int) -> str:
    assert order.container is not None
    python = shlex.quote(order.python or order.container.python)
    loader, agent = node_start(python, "$RUN", order)
    lines = [
        f"RUN={shlex.quote(order.folder)}; NODE={node}; TASK={key_of(order)}-{node}",
        f"refuse() {{ exit {EXIT_PREFLIGHT}; }}",
        *loader,
        *node_lines(order, agent),
    ]
    return "\n".join(lines) + "\n"


def container_environ(order: Order, node: int) -> Dict[str, str]:
    """Who this node is, for the agent inside (facts/identity/given.py)."""
    return {
        "DRUMBEAT_SCHEDULER": "ssh",
        "DRUMBEAT_JOB": key_of(order),
        "DRUMBEAT_HOSTS": ",".join(order.hosts),
        "DRUMBEAT_NODE": str(node),
    }
