"""Run folders of several nodes with GPUs, as a run would have left them so far."""

import json
import time

from tests.runfolder.folders import events, make_run, metrics

GIB = 1 << 30


def gpu(index, busy=90.0, **more):
    known = {
        "busy": busy, "memory_used": 40 * GIB, "memory_total": 80 * GIB, "power": 500.0, "power_cap": 700.0,
        "temperature": 60.0, "clock": 1500.0, "throttle": [], "energy": 1000.0, "name": "NVIDIA H200",
    }  # fmt: skip
    return {"index": index, **known, **more}


def sample(run, node, t, gpus=(), received=0, sent=0, busy_ticks=0, all_ticks=0, host=""):
    line = {
        "t": t, "node": node, "host": host or f"n{node:03d}", "gpus": list(gpus),
        "cpu": {"busy_ticks": busy_ticks, "all_ticks": all_ticks, "load": 1.0},
        "memory": {"total": 100, "used": 40}, "network": {"mlx5_0:1": {"received": received, "sent": sent}},
    }  # fmt: skip
    with open(run.folder.node(node).telemetry, "a") as file:
        file.write(json.dumps(line) + "\n")


def begin(run, nodes=2, ranks=2, attempt=0):
    """The lead's events up to the ranks' start."""
    joined = [
        ("node-joined", {"peer": k, "peer_host": f"n{k:03d}", "address": f"10.0.0.{k}", "clock_offset": 0.0})
        for k in range(nodes)
    ]
    meeting = {"master_addr": "10.0.0.0", "master_port": 29500}
    started = {"run_id": run.run_id, "nodes": nodes, "ranks_per_node": ranks, "launcher": "ranks", "launcher_why": ""}
    events(
        run, ("run-started", started), *joined, ("mustered", {"seconds": 0.5, **meeting}),
        ("attempt-started", {"world_size": nodes * ranks, **meeting, "attempt": attempt}),
    )  # fmt: skip
    for node in range(nodes):
        for local in range(ranks):
            rank = {"rank": node * ranks + local, "local_rank": local, "pid": 9, "cpus": [], "attempt": attempt}
            events(run, ("rank-started", rank), node=node)


def steps(run, first, last, start, nodes=2, ranks=2, every=1.0, slow=None, total=100):
    """Each rank reports steps first..last, one every `every` seconds; `slow` takes twice as long by its own clock."""
    for step in range(first, last + 1):
        for node in range(nodes):
            for local in range(ranks):
                rank = node * ranks + local
                report = {
                    "t": start + every * (step - first), "rank": rank, "kind": "step", "step": step, "steps": total,
                    "loss": 4.0 - 0.01 * step, "tokens": 1000, "seconds": every * (2 if rank == slow else 1),
                }  # fmt: skip
                metrics(run, report, node=node)


def recorded(path, nodes=2, ranks=2, last=40, slow=None):
    """A run of a while ago that is still going on, as far as its folder says; its desk is gone."""
    start = time.time() - last - 5.0
    run = make_run(path, nodes, created=start, name="recorded")
    begin(run, nodes, ranks)
    steps(run, 1, last, start, nodes, ranks, slow=slow)
    for node in range(nodes):
        for number in range(last // 5):
            moved = number * 5_000_000_000
            gpus = [gpu(index, busy=90.0 - 10 * (node % 8), energy=1000.0 + 2500.0 * number) for index in range(ranks)]
            sample(run, node, start + 5.0 * number, gpus, moved, moved // 2, 90 * number, 100 * number)
    return run
