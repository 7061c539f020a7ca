"""Programs that start their ranks themselves: these are seen by their connections to each other, and a hang names the one."""

import json
import re
import sys

import pytest

from drumbeat.agent.wire.meet import free_port
from tests.conftest import wait_for

# Four workers in two programs; that of rank 0 listens at a port of the program's own, and the others meet there.
PROGRAM = """
import multiprocessing, os, socket, sys, time

def reach(port):
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            time.sleep(0.05)

def work(local, rank, port, hangs):
    if rank == 0:
        door = socket.create_server(("127.0.0.1", port))
        others = [door.accept()[0] for _ in range(3)]
    else:
        hub = reach(port)
    step, go = 0, b"1"
    while go == b"1":
        step += 1
        if rank == 0:
            assert all(other.recv(1) for other in others)
            go = b"0" if os.path.exists("enough") else b"1"
            for other in others:
                other.sendall(go)
            print(f"step {step} loss {1 / step:.4f}", flush=True)
        else:
            if hangs and rank == 2 and step > 20:
                time.sleep(1000)
            hub.sendall(b"1")
            go = hub.recv(1)
            assert go
        time.sleep(0.1)

class mp:
    @staticmethod
    def spawn(function, port, hangs, nprocs=2):
        first = int(os.environ["NODE_RANK"]) * nprocs
        context = multiprocessing.get_context("spawn")
        workers = [context.Process(target=function, args=(n, first + n, port, hangs)) for n in range(nprocs)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        sys.exit(max(abs(worker.exitcode) for worker in workers))

if __name__ == "__main__":
    mp.spawn(work, int(sys.argv[1]), len(sys.argv) > 2)
"""


@pytest.fixture
def start(drumbeat):
    def started(*words):
        (drumbeat.folder / "own.py").write_text(PROGRAM)
        port = free_port("127.0.0.1", range(23000, 23999))
        command = [sys.executable, "own.py", str(port), *words]
        job = {"command": command, "nodes": 2, "checks": {"hang": "stop"}}
        (drumbeat.folder / "job.yaml").write_text(json.dumps(job))
        return drumbeat.start("run", "job.yaml")

    return started


def events(drumbeat):
    files = [run / "events.jsonl" for run in drumbeat.runs()]
    lines = [line for path in files if path.exists() for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.endswith("}")]


def test_ranks_of_a_program_that_starts_them_are_counted_by_their_connections(drumbeat, start):
    run = start()
    worlds = []

    def seen():
        verdicts = [each["verdict"] for each in events(drumbeat) if each["kind"] == "verdict"]
        worlds[:] = [each for each in verdicts if each["check"] == "world" and each["answer"] != "unknown"]
        return worlds

    wait_for(seen, what="a verdict about the world")
    status = drumbeat.here("status")
    (drumbeat.folder / "enough").touch()
    err, _ = run.communicate(timeout=120)
    assert run.returncode == 0, err
    assert worlds[-1]["answer"] == "as planned" and worlds[-1]["count"] == 4
    assert "4 processes of one world: connected to each other (they number themselves)" in err
    assert "2 nodes x 1 process," in err and "1 rank" not in err
    assert "4 seen in one world: the command of 2 nodes starts them itself, and is running" in status.stdout
    assert json.loads((drumbeat.run_folder() / "summary.json").read_text())["ranks"] == 4
    assert "4 ranks" in drumbeat.here("report").stdout


def test_a_hang_inside_a_worker_names_the_worker(drumbeat, start):
    run = start("hangs")
    wait_for(
        lambda: any(each.get("finding", {}).get("code") == "hang-asleep" for each in events(drumbeat)), 200, "the hang"
    )
    run.terminate()
    err, _ = run.communicate(timeout=200)
    found = re.search(r"process (\d+) on node 1 \(rank unknown\) is asleep", err)
    assert found, err
    said = [each["finding"] for each in events(drumbeat) if each["kind"] == "finding"]
    (hang,) = [each for each in said if each["code"] == "hang-asleep"]
    assert hang["node"] == 1 and hang["rank"] is None
    assert any("4 workers in /proc" in words for words in hang["seen"]), (hang["seen"], hang["evidence"])
