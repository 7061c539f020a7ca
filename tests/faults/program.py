"""A rank that trains nothing: it steps with all others, and does what its row of the fault table says. `FAULT KIND RANK STEP`.

Without torch the ranks meet at rank 0 over TCP once per step, as a collective would; with torch they call gloo.
"""

import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

from long_work import ALONE, TOGETHER

from drumbeat import metrics

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PACE = 0.1  # seconds
SAVED = os.environ.get("FAULT_FILE", "") + ".saved"  # the last step that a restart need not repeat
SAVE_EVERY = 5  # steps


def saved():
    try:
        with open(SAVED) as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


def save(step):
    with open(f"{SAVED}.{RANK}", "w") as file:
        file.write(str(step))
    os.replace(f"{SAVED}.{RANK}", SAVED)


class Star:
    """Every rank sends a byte to rank 0 and waits for its answer."""

    def __init__(self):
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self.peers = []
        if RANK == 0 and sys.argv[1] == "port" and not os.path.exists(os.environ["FAULT_FILE"]):
            began()
            self.thief = socket.create_server(address)  # somebody was faster
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
    """When the fault began, the first time: by it the detection is timed."""
    if not os.path.exists(os.environ["FAULT_FILE"]):
        with open(os.environ["FAULT_FILE"], "w") as file:
            file.write(str(time.time()))


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep():
    time.sleep(600)


def loop():
    while True:
        pass


def calls():
    while True:
        len("x")
        nothing()


def lock():
    held = threading.Lock()
    held.acquire()
    held.acquire()


def loader():
    """A data loader whose worker never answers."""
    from multiprocessing import Pipe

    into, _keep = Pipe(False)
    into.recv()


def asks():
    """A data loader that asks an empty queue with a time limit, again and again."""
    import multiprocessing
    import queue

    empty = multiprocessing.Queue()
    while True:
        try:
            empty.get(timeout=3)
        except queue.Empty:
            continue


def gil():
    import ctypes

    ctypes.PyDLL(None).sleep(600)


def exit_early():
    os._exit(0)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def crash():
    raise ValueError("a bug in this rank")


def segfault():
    os.kill(os.getpid(), signal.SIGSEGV)


def abort():
    os.abort()


def code():
    os._exit(3)


def gpu_memory():
    class OutOfMemoryError(RuntimeError):
        pass

    OutOfMemoryError.__module__ = "torch"
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB")


def host_memory():
    resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
    bytearray(1 << 30)


def nan():
    print("Loss is nan, stopping training", file=sys.stderr)
    sys.exit(1)


def kernel_says(text):
    """Into the stand-in for the log of the node's kernel."""
    folder = os.path.dirname(os.environ["FAULT_FILE"])
    with open(os.path.join(folder, f"kernel-{os.environ['NODE_RANK']}"), "a") as file:
        file.write(f"[ 812.345678] {text}\n")
    time.sleep(2)


def xid():
    kernel_says("NVRM: Xid (PCI:0000:4e:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
    raise RuntimeError("CUDA error: unspecified launch failure")


def amd_reset():
    kernel_says("amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!")
    stop()


def own_xid():
    kernel_says(
        "NVRM: Xid (PCI:0000:4e:00): 31, pid=812, name=python, Ch 00000010, intr 00000000. MMU Fault: ENGINE GRAPHICS"
    )
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def nan_from_here(step):
    """The loss is NaN from this step on. The program notices before it saves again, or after that."""
    metrics.report(step, loss=float("nan"))
    if step >= int(sys.argv[3]) + (2 if sys.argv[1] == "nan-once" else SAVE_EVERY):
        began()
        nan()


def missing_module():
    import there_is_no_such_module  # noqa: F401


def bad_gpu():
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


def full_disk():
    raise OSError(28, "No space left on device", "/scratch/checkpoint.pt")


def forks():
    """Chains of processes that leave their parents, and then a failure."""
    text = "import os,time\nfor _ in range(6):\n  if os.fork(): break\n  os.setsid()\ntime.sleep(600)"
    for _ in range(8):
        subprocess.Popen([sys.executable, "-S", "-c", text])
    time.sleep(1)
    raise ValueError("a bug in this rank")


def output():
    for _ in range(20_000):
        print("x" * 1000)
    sys.stdout.flush()


def bad_metrics():
    with open(os.environ["DRUMBEAT_METRICS"], "ab") as file:
        for line in (
            b'{"step": NaN}',
            b"9" * 400,
            b"[" * 5000,
            b'"\\ud800"',
            b"\xff\xfe\0",
            b'{"step": 1e999, "t": "x"}',
            b"{" * 99,
        ):
            file.write(line + b"\n")


def daemon():
    """A helper that outlives its rank."""
    subprocess.Popen(["setsid", "sleep", "600"], start_new_session=True)


def ras():
    """What NCCL's service would say of this rank, from another one: rank 0 serves it."""
    with open(os.environ["FAULT_FILE"] + ".pid", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)


def serve_ras():
    """A stand-in for NCCL's RAS: it names the process whose pid was written down."""
    host, port = os.environ["NCCL_RAS_ADDR"].split(":")
    with socket.create_server((host, int(port))) as listener:
        while True:
            sock, _ = listener.accept()
            for line in sock.makefile("r"):
                if line.startswith("CLIENT"):
                    sock.sendall(b"SERVER PROTOCOL 2\n")
                elif line.startswith("TIMEOUT"):
                    sock.sendall(b"OK\n")
                else:
                    with open(os.environ["FAULT_FILE"] + ".pid") as file:
                        who = f"-- GPU 0 managed by process {file.read()} on node 127.0.0.1"
                    sock.sendall(
                        b"#0-0 (00000000000000ff) MISMATCH\n  Communicator ranks have different AllReduce operation counts\n"
                        b"  3 ranks have launched up to operation 12\n"
                        + f"  Rank 2 has launched up to operation 11 {who}\n".encode()
                    )
                    break
            sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def nothing():
    """What happens, happens from outside."""


FAULTS = {
    "stop": stop, "sleep": sleep, "loop": loop, "lock": lock, "loader": loader, "gil": gil, "exit": exit_early,
    "kill": kill, "crash": crash, "idle": lock, "leave": exit_early, "segfault": segfault, "abort": abort, "code": code,
    "gpu-memory": gpu_memory, "host-memory": host_memory, "nan": nan, "module": missing_module, "bad-gpu": bad_gpu,
    "full-disk": full_disk, "forks": forks, "output": output, "bad-metrics": bad_metrics, "daemon": daemon, "ras": ras,
    "asks": asks, "outside": nothing, "calls": calls, "xid": xid, "amd-reset": amd_reset, "own-xid": own_xid,
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
    elif kind in ALONE and RANK == 0:  # it works, mostly at rest, and the others wait for it
        ALONE[kind](until)
    elif kind in TOGETHER:
        TOGETHER[kind](until, RANK)
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
    how = os.environ.get("FAULT_HOW", "").split()
    if "deaf" in how and rank != RANK:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "saves" in how:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    if "prints" in how:  # and reports nothing
        metrics.report = lambda step, **_: print(f"step {step} loss {1 / step:.4f}", flush=True)
    if kind == "ras" and RANK == 0:
        threading.Thread(target=serve_ras, daemon=True).start()
    world = None if alone else Gloo() if torch else Star()
    again = "once" in how and os.path.exists(os.environ["FAULT_FILE"])
    first = saved() + 1 if "restarts" in how else 1
    for step in range(first, steps + 1):
        own = PACE * 5 if kind == "slow" and rank == RANK and step >= at else PACE
        if kind == "slow" and step == at and rank == RANK:
            began()
        time.sleep(own)
        if step == at and kind in ("desync", "behind") and rank == RANK:
            began()
            world.dist.barrier() if kind == "desync" else time.sleep(600)
        elif step == at and kind == "skipped" and rank == RANK:  # the others make no such call
            began()
            world.dist.broadcast(world.one, 0)
        elif step == at and kind in FAULTS and rank == RANK and not again:
            began()
            FAULTS[kind]()
        elif step == at and kind in ("idle", "leave"):
            lock()
        elif step >= at and step % at == 0:
            healthy(kind, world, step)
        if kind in ("nan-once", "nan-saved") and step >= at and rank == RANK and not again:
            nan_from_here(step)
        if world:
            world.meet()
        more = {"seconds": own} if kind == "slow" else {}
        metrics.report(step, steps=steps, samples=4, **more)
        if "restarts" in how and RANK == 0 and step % SAVE_EVERY == 0:
            save(step)
            metrics.report(step, kind="checkpoint", seconds=0.0)
    if torch:
        world.dist.destroy_process_group()  # else a thread of gloo may abort the process while Python ends


main()
