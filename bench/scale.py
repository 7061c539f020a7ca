"""A job of 4,096 nodes on paper: order, script, one node's plan, and the peers that a lead sends. Seconds and memory.

PYTHONPATH=src python bench/scale.py
"""

import json
import resource
import time

from drumbeat.agent.lead import for_nodes
from drumbeat.agent.place import placed
from drumbeat.backends.slurm import render
from drumbeat.facts.identity import read
from drumbeat.facts.model import Facts, Gpu, Peer, Peers
from drumbeat.order import dump_order, load_order
from drumbeat.plan.argv import Tools, processes
from drumbeat.plan.binding import binding
from drumbeat.plan.environment import environment
from drumbeat.record import from_plain
from drumbeat.spec.job import job_from_text
from drumbeat.spec.resolve import Here, resolve
from drumbeat.spec.sites import load_site

NODES = 4096


class Step:
    """The environment of node 4,095 of a step."""

    environ = {
        "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_NODEID": str(NODES - 1), "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": f"nid[{100000}-{100000 + NODES - 1}]", "SLURM_STEP_NUM_NODES": str(NODES),
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{NODES})",
    }  # fmt: skip


def main() -> None:
    begin = time.perf_counter()
    job = job_from_text(f"nodes: {NODES}\ncommand: python train.py\ntime: 1h\naccount: p\ncontainer: /p/rocm.sif\n")
    here = Here("uan01", "/project/code", {"HOME": "/home/ada"}, 8, None, "ada", time.time(), "scale")
    order = resolve(job, load_site("lumi", {}), here)
    text = render(order).text
    order = placed(load_order(dump_order(order)), read(Step(), []), Step.environ)
    at_desk = time.perf_counter()
    facts = Facts("nid100000", gpus=tuple(Gpu(number, "amd") for number in range(8)))
    peers = Peers(tuple(Peer(n, order.hosts[n], "10.0.0.1", facts, 0.0, 8) for n in range(NODES)), "10.0.0.1", 61000)
    sent = json.dumps(for_nodes(peers))
    received = from_plain(Peers, json.loads(sent))
    environment(order, facts, received, NODES - 1)
    binding(order, facts, NODES - 1)
    processes(order, received, NODES - 1, Tools())
    done = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"script {len(text)} bytes; order, script and node list {at_desk - begin:.2f} s")
    print(f"peers {len(sent) / 1e6:.1f} MB; sent, read and planned {done - at_desk:.2f} s; peak {peak:.0f} MB")


if __name__ == "__main__":
    main()
