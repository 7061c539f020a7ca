"""Where the nodes of a run meet: their hosts, which of them is node 0, and what tells this run from another there."""

from __future__ import annotations

from typing import Optional, Tuple

from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.jobfile.here import Here
from drumbeat.jobfile.job import Job
from drumbeat.jobfile.site import Site


def find_hosts(
    job: Job, site: Site, here: Here, nodes: int, emulated: bool
) -> Tuple[Tuple[str, ...], str, Optional[int]]:
    """The hosts, node 0 among them, and the port, where one was given. `nodes` counts the spares too."""
    if emulated:
        hosts = tuple(f"127.0.{number >> 8}.{number & 255}" for number in range(1, nodes + 1))
        return hosts, hosts[0], None
    if here.hosts and len(here.hosts) != nodes:
        with_spares = f" ({job.spares} of them spares)" if job.spares else ""
        raise Problem(
            f"{job.where('nodes')}: {nodes} nodes requested{with_spares}, but the scheduler gave {len(here.hosts)}",
            f"leave it out, or say {max(1, len(here.hosts) - job.spares)}",
        )
    master, port = _split_port(here.master)
    master = master or (here.hosts[0] if here.hosts else "")
    if nodes > 1 and (master == "localhost" or master.startswith("127.") or master == "::1"):
        raise Problem(
            f"{master} cannot be the master of {nodes} nodes: each of them would dial itself",
            "name node 0 as the others see it: --master HOST",
        )
    if nodes > 1 and not master and site.backend == "local":
        raise Problem(
            f"{nodes} nodes, but which machine is node 0 is not known",
            "on each of them add --master HOST --node-rank K, or --site localhost to emulate them on this one",
        )
    # Where a scheduler chooses the nodes, nobody knows node 0 before it has.
    return here.hosts, master or (here.hostname if site.backend == "local" else ""), port


def _split_port(master: str) -> Tuple[str, Optional[int]]:
    """HOST, HOST:PORT, [ADDRESS]:PORT; a bare IPv6 address has no port."""
    if master.startswith("["):
        host, _, port = master[1:].partition("]")
        port = port[1:] if port.startswith(":") else port
    elif master.count(":") == 1:
        host, port = master.split(":")
    else:
        host, port = master, ""
        if "]" in master:
            raise Problem(f"{master!r} is not HOST or HOST:PORT")
    if master and not host:
        raise Problem(f"{master!r} names no host", "write HOST or HOST:PORT")
    if port == "" and not master.endswith(":"):
        return host, None
    if not (port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65536):
        raise Problem(f"{master!r}: {port!r} is not a port (1 to 65535)", "write HOST or HOST:PORT")
    return host, int(port)


def port_seed(run_id: str, name: str, master: str, here: Here) -> str:
    """What the candidate ports are derived from, the same on every node. A job typed by hand on each machine has no id that
    all share: then it is who runs what, and where node 0 is."""
    if here.job_id:
        return f"{here.job_id}.{here.step_id or ''}"
    return f"{here.user}/{name}/{master}" if here.master else run_id


def run_identity(order: Order, here: Here) -> str:
    """What the nodes of one run share where each makes an order of its own. By hand that includes the command itself: two
    runs with the same name may start on the same machines at once."""
    if here.job_id:
        return f"{here.job_id}.{here.step_id or ''}"
    return f"{here.user}/{order.name}/{order.master}/{order.digest()}" if here.master else ""
