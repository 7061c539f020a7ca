"""A rank that trains nothing: it steps with all others, and does what its row of the fault table says. `FAULT KIND RANK STEP`.

Without torch the ranks meet at rank 0 over TCP once per step, as a collective would; with torch they call gloo.
"""

import json
import os
import signal
import socket
import struct
import sys
import threading
import time

from drumbeat import metrics

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PACE = 0.1  # seconds


class Star:
    """Every rank sends a byte to rank 0 and waits for its answer."""

    def __init__(self):
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self.peers = []
        if RANK == 0:
            listener = socket.create_server(address)
            self.peers = [listener.accept()[0] for _ in range(SIZE - 1)]
            return
        deadline = time.monotonic() + 60
        while True:
            try:
                self.peers = [socket.create_connection(address)]
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def meet(self):
        if RANK:
            self.peers[0].sendall(b".")
            if not self.peers[0].recv(1):
                raise ConnectionResetError("Connection closed by peer")
            return
        for peer in self.peers:
            if not peer.recv(1):
                raise ConnectionResetError("Connection closed by peer")
        for peer in self.peers:
            peer.sendall(b".")


class Gloo:
    def __init__(self):
        import datetime

        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        seconds = float(os.environ.get("FAULT_TIMEOUT", "1800"))
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))
        self.dist, self.one = dist, torch.ones(1)

    def meet(self):
        self.dist.all_reduce(self.one)


def began():
    """When the fault began: by it the detection is timed."""
    with open(os.environ["FAULT_FILE"], "w") as file:
        file.write(str(time.time()))


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep():
    time.sleep(600)


def loop():
    while True:
        pass


def lock():
    held = threading.Lock()
    held.acquire()
    held.acquire()


def loader():
    """A data loader whose worker never answers."""
    from multiprocessing import Pipe

    into, _keep = Pipe(False)
    into.recv()


def gil():
    import ctypes

    ctypes.PyDLL(None).sleep(600)


def exit_early():
    os._exit(0)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def crash():
    raise ValueError("a bug in this rank")


FAULTS = {
    "stop": stop, "sleep": sleep, "loop": loop, "lock": lock, "loader": loader, "gil": gil, "exit": exit_early,
    "kill": kill, "crash": crash, "idle": lock, "leave": exit_early,
}  # fmt: skip


def healthy(kind, world, step):
    """Long work that is no hang."""
    seconds = float(os.environ.get("FAULT_LONG", "12"))
    until = time.monotonic() + seconds
    if kind == "validation":  # all ranks compute alike
        while time.monotonic() < until:
            sum(number * number for number in range(10_000))
    elif kind == "announced":  # one rank works at rest, as it said, and the others wait for it
        metrics.report(step, kind="checkpoint")
        if RANK == 0:
            time.sleep(seconds)
    elif kind == "checkpoint":  # rank 0 writes, the others wait for it
        if RANK == 0:
            with open(os.environ["FAULT_FILE"] + ".bytes", "wb") as file:
                while time.monotonic() < until:
                    file.seek(0)
                    file.write(b"x" * (1 << 20))
                    file.flush()
                    os.fsync(file.fileno())
                    time.sleep(0.02)
    elif kind == "compile":  # a compiler works for every rank
        import shutil
        import subprocess

        own = os.environ["FAULT_FILE"] + f".{RANK}.cc1plus"
        os.makedirs(own, exist_ok=True)
        tool = shutil.copy(shutil.which("sleep"), os.path.join(own, "cc1plus"))
        subprocess.run([tool, str(seconds)], check=True)
    elif kind == "uneven" and RANK == 1:  # it needs longer for its share than the others
        while time.monotonic() < until:
            json.dumps([struct.pack("q", number).hex() for number in range(1000)])


def main():
    kind, rank, at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    steps = int(os.environ.get("FAULT_STEPS", "100000"))
    torch = os.environ.get("FAULT_WORLD") == "torch"
    alone = os.environ.get("FAULT_WORLD") == "alone"
    world = None if alone else Gloo() if torch else Star()
    for step in range(1, steps + 1):
        time.sleep(PACE)
        if step == at and kind in ("desync", "behind") and rank == RANK:
            began()
            world.dist.barrier() if kind == "desync" else time.sleep(600)
        elif step == at and kind in FAULTS and rank == RANK:
            began()
            FAULTS[kind]()
        elif step == at and kind in ("idle", "leave"):
            lock()
        elif step >= at and step % at == 0:
            healthy(kind, world, step)
        if world:
            world.meet()
        metrics.report(step, steps=steps, samples=4)


main()
