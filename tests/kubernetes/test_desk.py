"""The desk's commands against a stand-in for kubectl whose pods are processes: agents, mirror and restarts are real."""

import hashlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from drumbeat.backends.kubernetes.pod import PIECE
from tests.conftest import wait_for
from tests.kubernetes import stand_in
from tests.kubernetes.programs import goes_on

SRC = Path(__file__).parent.parent.parent / "src"
WHO = "import os, sys; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], os.environ.get('WORD'), flush=True)\n"
GOES_ON = goes_on(0.1)


class Desk:
    def __init__(self, base, cache):
        self.base, self.cluster, self.home = base, base / "cluster", base / "home"
        for folder in (self.cluster, base / "bin", self.home):
            folder.mkdir()
        path = base / "bin" / "kubectl"
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {stand_in.__file__} "$@"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        self.environ = {
            "PATH": f"{base / 'bin'}:{os.path.dirname(sys.executable)}:/usr/bin:/bin", "HOME": str(self.home),
            "PYTHONPATH": str(SRC), "LANG": "C.UTF-8", "STAND_IN": str(self.cluster),
            "XDG_CACHE_HOME": str(cache),
        }  # fmt: skip

    def __call__(self, *words, **more):
        argv = [sys.executable, "-m", "drumbeat", *map(str, words)]
        environ = {**self.environ, **more}
        return subprocess.run(
            argv, env=environ, cwd=self.home, capture_output=True, text=True, timeout=400, check=False
        )

    def job(self, name, script, **keys):
        (self.home / f"{name}.py").write_text(script)
        lines = {
            "name": name, "site": "kubernetes", "nodes": 2, "ranks-per-node": 1, "container": "image:1", "workdir": self.home,
            "python": sys.executable, "command": f"{sys.executable} {self.home}/{name}.py", "stop-grace": "5s",
        }  # fmt: skip
        lines.update((key.replace("_", "-"), value) for key, value in keys.items())
        path = self.home / f"{name}.yaml"
        path.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
        return path

    def submit(self, job, **more):
        done = self("submit", job, "--json", **more)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def objects(self):
        return [
            name for name in os.listdir(self.cluster) if name.partition("-")[0] in ("Job", "ConfigMap", "Secret", "Pod")
        ]

    def end(self):
        environ = {**os.environ, **self.environ}
        subprocess.run([str(self.base / "bin" / "kubectl"), "delete", "all"], env=environ, timeout=60, check=False)


@pytest.fixture
def desk(tmp_path, cache):
    made = Desk(tmp_path, cache)
    yield made
    made.end()


def test_submit_follow_and_nothing_left(desk):
    job = desk.job("who", WHO, env="{WORD: pass}")
    shown = desk("plan", "--render", "--save", "order.json", job, WORD="xyzzy-42")
    assert shown.returncode == 0 and "# kind job: the cluster has no operator" in shown.stdout, shown.stderr
    run = desk.submit("order.json", WORD="xyzzy-42")
    assert run["handle"].startswith("kubernetes://team@bench/who-")
    assert (Path(run["folder"]) / "manifest.yaml").read_text() == shown.stdout, "what was shown is what was sent"
    assert "xyzzy-42" not in shown.stdout + (desk.cluster / "calls.jsonl").read_text()
    followed = desk("logs", "--follow", run["handle"])
    assert sorted(followed.stdout.splitlines()) == ["[0] rank 0 of 2 xyzzy-42", "[1] rank 1 of 2 xyzzy-42"], (
        followed.stderr
    )
    state = json.loads(desk("status", "--json").stdout)["status"]
    assert state["state"] == "finished" and state["exit_code"] == 0
    assert desk.objects() == [], "all that was made for the run is gone"
    assert "rank 1 of 2" in desk("logs", "--rank", 1).stdout, "and the logs are here"


@pytest.mark.parametrize(
    ("kill", "node"),
    [
        (stand_in.kill_pod, 1),
        (stand_in.kill_agent, 1),
        pytest.param(stand_in.kill_agent, 0, marks=pytest.mark.proof),
    ],
)
def test_one_failure_starts_all_pods_again_together(desk, monkeypatch, kill, node):
    """A pod that is lost is replaced; where only its agent was killed, it stays. The ranks of both begin the next attempt."""
    kept = desk.base / "kept"
    kept.mkdir()
    run = desk.submit(desk.job("goeson", GOES_ON, env=f"{{KEPT: {kept}}}"))
    name = run["handle"].rpartition("/")[2]
    wait_for(lambda: (kept / "step-1").exists() and int((kept / "step-1").read_text() or 0) > 3, 180, "some steps")
    monkeypatch.setattr(stand_in, "FOLDER", str(desk.cluster))
    monkeypatch.setenv("PATH", desk.environ["PATH"])
    kill(name, node)
    followed = desk("logs", "--follow", run["run_id"])
    state = json.loads(desk("status", "--json").stdout)
    assert state["status"]["state"] == "finished", (state, followed.stdout, followed.stderr)
    attempts = state["summary"]["attempts"]
    first = "failed" if node else "cut off"  # a lead that is killed records nothing any more
    assert [attempt["outcome"] for attempt in attempts] == [first, "finished"]
    again = desk("logs", "--attempt", 1).stdout
    assert again.count("attempt 1 begins at step") == 2 and again.count("done") == 2, "both ranks, in one world"
    assert "begins at step 0" not in again, "from its checkpoint"


def test_no_restart_is_left(desk, monkeypatch):
    run = desk.submit(desk.job("goeson", goes_on(1.0), env=f"{{KEPT: {desk.base}}}", requeues=0))
    wait_for(lambda: (desk.base / "step-1").exists(), 180, "a step")
    monkeypatch.setattr(stand_in, "FOLDER", str(desk.cluster))
    stand_in.kill_agent(run["handle"].rpartition("/")[2], 1)
    desk("logs", "--follow", run["run_id"])
    state = json.loads(desk("status", "--json").stdout)
    assert state["status"]["state"] == "failed" and len(state["summary"]["attempts"]) == 1, state
    assert desk.objects() == []


def test_cancel_gives_time_to_save(desk):
    script = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        + WHO
    )
    exporter = desk.base / "exporter"
    exporter.mkdir()
    run = desk.submit(desk.job("waits", script + "time.sleep(300)\n", textfile=exporter))
    wait_for(lambda: desk("logs", run["run_id"]).stdout.count("rank") == 2, 180, "both ranks")
    wait_for(lambda: list(exporter.glob("*.prom")), 180, "the lead's numbers for node-exporter")
    done = desk("cancel", run["run_id"])
    assert done.returncode == 0 and "has ended" in done.stdout, done.stderr
    assert desk("logs", run["run_id"]).stdout.count("saved") == 2 and desk.objects() == []


def test_code_is_sent_with_the_run(desk):
    """Uncommitted changes and new files too; in several pieces, and each pod unpacks its own."""
    code = desk.home / "code"
    (code / "part").mkdir(parents=True)
    (code / "part" / "who.py").write_text("import os; print('old')\n")
    (code / "noise.bin").write_bytes(os.urandom(PIECE + 1000))
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(code), *words], check=True)
    (code / "part" / "who.py").write_text(
        "import os, new; print(new.WORD, os.environ['RANK'], os.getcwd(), flush=True)\n"
    )
    (code / "part" / "new.py").write_text("WORD = 'sent'\n")
    keys = {"code": "sync", "workdir": code / "part", "command": f"{sys.executable} who.py"}
    run = desk.submit(desk.job("sync", "", **keys))
    name = run["handle"].rpartition("/")[2]
    manifest = (Path(run["folder"]) / "manifest.yaml").read_text()
    assert f"Secret {name}-code-0 to {name}-code-1: the code of {code}" in manifest
    followed = desk("logs", "--follow", run["handle"])
    shown = sorted(line.split() for line in followed.stdout.splitlines())
    assert [words[1:3] for words in shown] == [["sent", "0"], ["sent", "1"]], followed.stdout + followed.stderr
    assert all(words[3].endswith("/run/code/part") for words in shown) and shown[0][3] != shown[1][3]
    order = json.loads((Path(run["folder"]) / "order.json").read_text())
    archive = Path(run["folder"], "code.tar.gz").read_bytes()
    assert hashlib.sha256(archive).hexdigest() == order["code_digest"] and order["code_digest"] in manifest
    assert desk.objects() == []
    (code / "large.bin").write_bytes(os.urandom(9 << 20))
    done = desk("submit", desk.job("large", "", **keys))
    assert done.returncode == 2 and "at most 8 MiB are sent to pods" in done.stderr and "code: image" in done.stderr


CALLS = """
import json, os
from drumbeat import api

def add(a, b=0):
    return a + b, int(os.environ["RANK"])

job = {"site": "kubernetes", "nodes": 1, "ranks-per-node": 2, "container": "image:1", "python": os.environ["PYTHON"]}
run = api.submit(add, 2, b=3, job=job)
said = {"results": run.results(400), "state": run.state}
try:
    api.submit(add, bytes(1_000_000), job=job)
except api.Problem as problem:
    said["large"] = str(problem)
try:
    api.map_array(add, [1, 2], job=job)
except api.Problem as problem:
    said["array"] = str(problem)
print(json.dumps(said))
"""


@pytest.mark.proof
def test_a_function_is_called_in_pods_and_what_it_returns_comes_back(desk):
    (desk.home / "calls.py").write_text(CALLS)
    argv = [
        "sh",
        "-c",
        f"umask 002; exec {sys.executable} calls.py",
    ]  # as many systems have it: results are private all the same
    environ = {**desk.environ, "PYTHON": sys.executable}
    done = subprocess.run(argv, cwd=desk.home, env=environ, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["results"] == [[5, 0], [5, 1]] and said["state"] == "finished"
    assert "at most 900,000 are sent to pods" in said["large"] and "arrays are not submitted" in said["array"]
    assert desk.objects() == [], "the function, its secret too, is gone"


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_job_that_is_refused_half_way_leaves_nothing(desk, call):
    done = desk("submit", desk.job("refused", WHO), STAND_IN_REFUSES=str(call))
    assert done.returncode == 2 and "may not create jobs" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert desk.objects() == [] and not list(desk.home.glob("runs/*"))


def test_a_desk_that_is_killed_while_it_submits_can_be_tidied_up_after(desk):
    done = desk("submit", desk.job("killed", WHO), STAND_IN_KILLS="2")
    assert done.returncode == -9 and desk.objects() != []
    told = desk("status")
    assert "failed: its desk was killed while it submitted; drumbeat cancel killed-" in told.stdout, told.stderr
    cancelled = desk("cancel", "killed")
    assert cancelled.returncode == 0 and desk.objects() == [], cancelled.stderr
    assert "cancelled" in desk("status").stdout
    again = desk("cancel", "killed")
    assert again.returncode == 2 and "is not running here (cancelled)" in again.stderr, again.stderr


def test_cancel_removes_a_job_that_has_ended_without_its_lead(desk, monkeypatch):
    """Nobody fetched it, and the pods are gone: what is known stays, the cluster is tidy."""
    run = desk.submit(desk.job("dies", WHO, nodes=1, python="/bin/false"))
    name = run["handle"].rpartition("/")[2]
    wait_for(lambda: "failed" in desk("status", name).stdout, 180, "the pod to end")
    before = desk("status", name).stdout
    done = desk("cancel", name)
    assert done.returncode == 0 and "had ended; what it had left in its cluster is removed" in done.stdout, done.stderr
    assert desk.objects() == [] and "failed" in before
    assert desk("status", name).stdout.splitlines()[:2] == before.splitlines()[:2], "as it was"
