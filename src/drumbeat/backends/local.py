"""Backend `local`: this machine. One guard with its agent a node, as children of whoever starts them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from typing import Dict, Iterable, List, Mapping, Tuple

from drumbeat.backends.contract import Request
from drumbeat.order import Order


def agent_argv(bundle: str, order_file: str, node: int, report_fd: int = -1) -> Tuple[str, ...]:
    # -I -S: neither the caller's PYTHONPATH nor any installed package may change what the agent is
    return (sys.executable, "-I", "-S", bundle, "_agent", order_file, str(node), str(report_fd), bundle)


def render(order: Order, bundle: str, order_file: str) -> Request:
    lines = [shlex.join(agent_argv(bundle, order_file, node)) for node in range(order.nodes)]
    return Request("local", order, "\n".join(lines) + "\n")


def start_agents(
    bundle: str, order_file: str, nodes: Iterable[int], token: str, environ: Mapping[str, str], report_fd: int = -1
) -> Dict[int, subprocess.Popen[bytes]]:
    """Node -> its guard. Each has its own session: a Ctrl-C reaches only the desk, which passes it on."""
    env = {**environ, "DRUMBEAT_TOKEN": token}
    started: Dict[int, subprocess.Popen[bytes]] = {}
    keep: List[int] = [report_fd] if report_fd >= 0 else []
    for node in nodes:
        started[node] = subprocess.Popen(
            agent_argv(bundle, order_file, node, report_fd),
            env=env, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=keep, cwd=os.path.sep,
        )  # fmt: skip
    return started
