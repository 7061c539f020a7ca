"""What would be started on which host, for a person to read. The order itself goes to every host as it stands below."""

from __future__ import annotations

from typing import List

from drumbeat.backends.contract import Request
from drumbeat.backends.ssh import connection
from drumbeat.backends.ssh.container import container_script, host_python
from drumbeat.base.order import Order, dump_order


def _container_lines(order: Order) -> List[str]:
    if order.container is None:
        return []
    return ["# On each host this shell starts the container with the node's agent; node 0's is:", *(
        f"#   {line}" for line in container_script(order, 0).splitlines()
    )]  # fmt: skip


def render(order: Order) -> Request:
    command = connection.remote_command(host_python(order))
    lines = [
        f"# {order.run_id}: one agent on each of {len(order.hosts)} hosts, nothing is started unless all of them answer.",
        "# drumbeat.pyz (where a host does not have it), this order, the run's token and passed variables go in on standard",
        "# input. Node 0 leads; the others reach it by the address under which ssh reached it.",
        *(f"# node {node}: ssh -o BatchMode=yes -- {host} {command}" for node, host in enumerate(order.hosts)),
        *_container_lines(order),
        dump_order(order).rstrip(),
    ]
    return Request("ssh", order, "\n".join(lines) + "\n")
