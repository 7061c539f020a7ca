"""A run from an order of our own, for deadlines that no user sets. `python own_order.py ORDER.json` is its desk."""

import dataclasses
import os
import sys
import time

from drumbeat.agent.wire.meet import free_port
from drumbeat.base.order import Order, Timing, dump_order, load_order
from drumbeat.bundle.build import cached_bundle
from drumbeat.desk.foreground import Foreground
from drumbeat.desk.start.create import create_run, fresh_token


def start_with_timing(drumbeat, command, env, first_port=None, nodes=2, grace=2.0, prefix=(), **timing):
    """`first_port`: the first that the lead tries; the others are free when the test starts."""
    import subprocess

    others = [free_port("127.0.0.1", ()) for _ in range(4)]
    ports = tuple(others if first_port is None else [first_port, *others])
    name = f"own-{os.getpid()}-{time.monotonic_ns()}"
    order = Order(
        run_id=name, name="own", created=time.time(), command=tuple(command), nodes=nodes, ranks_per_node=2,
        launcher="ranks", launcher_why="a test", workdir=str(drumbeat.folder), folder=str(drumbeat.folder / "runs" / name),
        site="localhost", backend="local", emulated=True, hosts=("127.0.0.1", "127.0.0.2")[:nodes], master="127.0.0.1",
        muster_ports=ports, stop_grace=grace, timing=dataclasses.replace(Timing(), **timing),
    )  # fmt: skip
    path = drumbeat.folder / "order.json"
    path.write_text(dump_order(order))
    process = subprocess.Popen(
        [*prefix, sys.executable, __file__, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
    )
    drumbeat.started.append(process)
    return process, name


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        given = load_order(file.read())
    create_run(given, None, cached_bundle(os.environ), os.environ)
    sys.exit(Foreground(given, range(given.nodes), cached_bundle(os.environ), fresh_token()).run(os.environ))
