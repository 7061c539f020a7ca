"""Ranks of a gloo world that report and print nothing; one of them is slower than the others. `slow.py KIND RANK`."""

import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
PART = 0.04  # seconds of a core per step


def compute(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(number * number for number in range(1000))


def main():
    kind, slow = sys.argv[1], int(sys.argv[2]) == RANK
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    one, source = torch.ones(1), None
    if kind == "neighbour" and slow:  # others want the core that it is on
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        for _ in range(5):
            subprocess.Popen([sys.executable, "-c", "while True: pass"])
    if kind == "reads" and slow:
        source, into = os.pipe()
        subprocess.Popen(
            [sys.executable, "-c", f"import os, time\nwhile os.write({into}, b'.'): time.sleep(2)"], pass_fds=[into]
        )
    if RANK == 0:
        with open(os.environ["FAULT_FILE"], "w") as file:
            file.write(str(time.time()))
    step, end = 0, time.monotonic() + float(os.environ.get("FAULT_SECONDS", "100000"))
    while step % 64 or one.item():  # rank 0 says when all end
        step += 1
        if source:
            os.read(source, 1)
        more = 5 if kind == "longer" and slow else 3 if kind == "uneven" and step % 4 == RANK else 1
        compute(PART * more)
        dist.all_reduce(one)
        one.fill_(float(time.monotonic() < end))
        if step % 64 == 0:
            dist.broadcast(one, 0)
    dist.barrier()
    dist.destroy_process_group()


main()
