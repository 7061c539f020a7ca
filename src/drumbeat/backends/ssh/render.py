"""What would be started on which host, for a person to read. The order itself goes to every host as it stands below."""

from __future__ import annotations

from drumbeat.backends.contract import Request
from drumbeat.backends.ssh import connection
from drumbeat.order import Order, dump_order


def render(order: Order) -> Request:
    command = connection.remote_command(order.python)
    lines = [
        f"# {order.run_id}: one agent on each of {len(order.hosts)} hosts, nothing is started unless all of them answer.",
        "# drumbeat.pyz (where a host does not have it), this order, the run's token and passed variables go in on standard",
        "# input. Node 0 leads; the others reach it by the address under which ssh reached it.",
        *(f"# node {node}: ssh -o BatchMode=yes -- {host} {command}" for node, host in enumerate(order.hosts)),
        dump_order(order).rstrip(),
    ]
    return Request("ssh", order, "\n".join(lines) + "\n")
