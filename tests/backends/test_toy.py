"""A backend that an installed package adds, without any other file: every command that knows a scheduler drives it."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import need_torch, wait_for

HERE = Path(__file__).parent
SRC = HERE.parent.parent / "src"

WHO = """
import os, sys, time
print("attempt", os.environ["DRUMBEAT_ATTEMPT"], "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"],
      "task", os.environ.get("DRUMBEAT_TASK"), flush=True)
"""
SAVES = WHO + "sys.exit(75 if os.environ['DRUMBEAT_ATTEMPT'] == '0' else 0)\n"
WAITS = WHO + "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); time.sleep(120)\n"
STEPS = """
import os, sys, time
from drumbeat import metrics
for step in range(1, 200):
    time.sleep(0.02)
    metrics.report(step=step, loss=1.0 / step, samples=int(sys.argv[1]))
"""


class Toys:
    """A machine with the toy package installed, and its queue."""

    def __init__(self, base: Path, cache: Path) -> None:
        self.base, self.queue, self.home = base, base / "queue", base / "home"
        self.queue.mkdir()
        self.home.mkdir()
        package = base / "packages"
        info = package / "toy_backend-1.0.dist-info"
        info.mkdir(parents=True)
        shutil.copy(HERE / "toy_backend.py", package)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-backend\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[drumbeat.backends]\ntoy = toy_backend:Toy\n")
        (base / "toybox.yaml").write_text("summary: toys\nbackend: toy\ndetect: {cluster: [toys]}\n")
        sites = self.home / ".config" / "drumbeat" / "sites"
        sites.mkdir(parents=True)
        shutil.copy(base / "toybox.yaml", sites)
        self.environ = {
            "PATH": os.path.dirname(sys.executable) + ":/usr/bin:/bin", "HOME": str(self.home), "TOY_QUEUE": str(self.queue),
            "PYTHONPATH": f"{package}:{SRC}", "LANG": "C.UTF-8", "XDG_CACHE_HOME": str(cache),
        }  # fmt: skip

    def __call__(self, *words, timeout=150, **more):
        argv = [sys.executable, "-m", "drumbeat", *map(str, words)]
        environ = {**self.environ, **more}
        return subprocess.run(
            argv, env=environ, cwd=self.home, capture_output=True, text=True, timeout=timeout, check=False
        )

    def job(self, name, script, **keys):
        path = self.home / f"{name}.py"
        path.write_text(script)
        lines = {
            "name": name,
            "nodes": 2,
            "ranks-per-node": 1,
            "stop-grace": "5s",
            "command": f"{sys.executable} {path}",
        }
        lines.update((key.replace("_", "-"), value) for key, value in keys.items())
        job = self.home / f"{name}.yaml"
        job.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
        return job

    def submit(self, job, *words):
        done = self("submit", job, "--json", *words)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        return told["handle"], Path(told["folder"])

    def state(self, run):
        done = self("status", "--json", run)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["status"]

    def waited(self, run, *states):
        wait_for(lambda: self.state(run)["state"] in states, 120, f"{run} to be {states}")
        return self.state(run)

    def end(self):
        for pid in self.queue.glob("*/*/pid"):
            try:
                os.killpg(int(pid.read_text()), signal.SIGKILL)
            except ProcessLookupError:
                pass


@pytest.fixture
def toys(tmp_path, cache):
    made = Toys(tmp_path, cache)
    yield made
    made.end()


def test_submit_status_logs_shell_and_cancel(toys):
    job = toys.job("waits", WAITS)
    plan = toys("plan", job)
    assert "waits on toybox: 2 nodes x 1 rank" in plan.stdout, plan.stderr  # found as submit finds it
    shown = toys("plan", "--render", "--save", "order.json", job)
    handle, folder = toys.submit("order.json")
    assert handle == "toy://toys/1" and (toys.queue / "1/only/script").read_text() == shown.stdout
    toys.waited(handle, "running")
    wait_for(lambda: "rank 1 of 2" in toys("logs", "1").stdout, 120, "both ranks")
    shell = toys("shell", handle, "--node", "1")
    assert shell.stdout == f"a shell of {handle} on {socket.gethostname()}\n"
    there = toys("shell", handle, "--node", "1", "--", "sh", "-c", 'echo "$ON  $1"; exit 5', "sh", "two  words")
    assert (there.returncode, there.stdout) == (5, f"{socket.gethostname()}  two  words\n"), there.stderr
    listed = toys("list")
    assert "running" in listed.stdout and "waits-" in listed.stdout
    done = toys("cancel", handle)
    assert done.returncode == 0 and "has ended" in done.stdout, done.stderr
    assert toys.state(handle)["state"] == "cancelled"


def test_cancel_in_the_queue_and_refusals(toys):
    handle, _ = toys.submit(toys.job("held", WHO, submit_options='["--hold"]'))
    assert toys.state(handle)["state"] == "queued"
    logs = toys("logs", handle)
    assert logs.returncode == 0 and "is queued: its ranks have not started" in logs.stderr, logs.stderr
    assert toys("cancel", handle).returncode == 0 and toys.state(handle)["state"] == "cancelled"
    for keys, words in (
        ({"account": "broke"}, "Toy refuses this job: no credit"),
        ({"reservation": "x"}, "Toy has no reservation"),
        ({"site": "localhost", "array": "0-3"}, "the queue of this machine has no arrays"),
    ):
        done = toys("submit", toys.job("refused", WHO, **keys))
        assert done.returncode == 2 and words in done.stderr, done.stderr
        assert not list(toys.home.glob("runs/refused-*"))
    assert "warning   toys break" in toys("submit", toys.job("held", WHO), TOY_ACCOUNT="careless").stderr
    on_login = toys("run", "--", "true")
    assert on_login.returncode == 2 and "this is a login node of a Toy cluster" in on_login.stderr
    assert "toy-alloc, then drumbeat run there" in on_login.stderr


def test_requeue(toys):
    """Ranks end with 75: the lead's verdict brings the job back. While it waits it is queued, and not cancelled."""
    (toys.base / "busy").touch()
    handle, folder = toys.submit(toys.job("saves", SAVES))
    state = toys.waited(handle, "queued")
    wait_for(lambda: toys.state(handle)["starts"] == 1, 120, "the requeue")
    state = toys.state(handle)
    assert state["state"] == "queued", state
    (toys.base / "busy").unlink()
    assert toys.waited(handle, "finished", "failed", "cancelled")["state"] == "finished"
    attempts = json.loads((folder / "summary.json").read_text())["attempts"]
    assert [attempt["outcome"] for attempt in attempts] == ["requeue", "finished"]


def test_array(toys):
    script = WHO + "sys.exit(3 if os.environ['DRUMBEAT_TASK'] == '4' else 0)\n"
    handle, folder = toys.submit(toys.job("several", script, nodes=1, array='"3,4"'))
    whole = toys.waited(handle, "finished", "failed")
    assert whole["state"] == "failed" and "1 failed, 1 finished" in whole["detail"]
    assert toys.state(f"{handle}_3")["state"] == "finished" and toys.state(f"{handle}_4")["state"] == "failed"
    assert "task 3" in toys("logs", f"{handle}_3").stdout
    assert (folder / "array/4/nodes/0/attempt-0/rank-0.out").read_text().strip().endswith("task 4")


ALLOCATION = {"DRUMBEAT_SCHEDULER": "toy", "DRUMBEAT_JOB": "77"}


def allocation(nodes):
    return {**ALLOCATION, "DRUMBEAT_HOSTS": ",".join([socket.gethostname()] * nodes)}


def test_run_fans_out_and_tasks_join(toys):
    done = toys("run", "--name", "fan", "--ranks-per-node", 1, "--", sys.executable, "-c", WHO, **allocation(2))
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2" in done.stdout and "rank 1 of 2" in done.stdout
    (folder,) = toys.home.glob("runs/fan-*")
    assert json.loads((folder / "run.json").read_text())["handle"] == "toy://cluster/77"
    assert (toys.base / "finished").read_text() == "toy://cluster/77\n"
    joined = toys("run", "--ranks-per-node", 1, "--", sys.executable, "-c", WHO, **allocation(1), DRUMBEAT_NODE="0")
    assert joined.returncode == 0 and "joined toy job 77" in joined.stderr, joined.stderr


def test_tune_here_and_submitted(toys):
    job = toys.job("tuned", STEPS, command=f"'{sys.executable} {toys.home}/tuned.py {{batch}}'", nodes=1,
                   env=f"{{PYTHONPATH: {SRC}}}")  # fmt: skip
    words = ("tune", "batch", job, "--start", 1, "--largest", 2, "--steps", 3)
    refused = toys(*words)
    assert refused.returncode == 2 and "--submit" in refused.stderr
    sent = toys(*words, "--submit", "--json")
    assert sent.returncode == 0, sent.stderr
    folder = Path(json.loads(sent.stdout)["folder"])
    wait_for(lambda: (toys.queue / "1/only/state").read_text() in ("finished", "failed"), 120, "the tuning")
    answer = json.loads((folder / "tune.json").read_text())
    assert [trial["outcome"] for trial in answer["trials"]][:2] == ["ok", "ok"], answer


def test_verify_in_an_allocation(toys):
    need_torch("needs torch")
    done = toys("verify", "--quick", "--backend", "gloo", "--ranks-per-node", 1, "--python", sys.executable, "--json",
                timeout=200, **allocation(2))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {"all_reduce"} <= {row["op"] for row in json.loads(done.stdout)["rows"]}
