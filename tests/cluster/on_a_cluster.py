"""Jobs on a real Kubernetes cluster: run by `make cluster`, never by `make test`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.desk import PACKAGES
from tests.kubernetes.programs import goes_on
from tests.versions.jax_run import PROGRAM as MEET
from tests.versions.jax_run import met

TRAIN = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x, y, w = torch.randn(64, 8), torch.randn(64, 1), torch.zeros(8, 1)
for step in range(20):
    part = slice(rank * 64 // world, (rank + 1) * 64 // world)
    error = x[part] @ w - y[part]
    grad, loss = 2 * x[part].T @ error / 64, (error**2).sum() / 64
    dist.all_reduce(grad), dist.all_reduce(loss)
    w -= 0.05 * grad
print(f"rank {rank} of {world} loss {loss.item():.6f}", flush=True)
dist.destroy_process_group()
"""
GOES_ON = goes_on(0.5)


def right_loss():
    import torch

    torch.manual_seed(0)
    x, y, w = torch.randn(64, 8), torch.randn(64, 1), torch.zeros(8, 1)
    for _ in range(20):
        error = x @ w - y
        loss = (error**2).sum() / 64
        w -= 0.05 * 2 * x.T @ error / 64
    return loss.item()


def test_two_nodes_train_to_the_right_loss(desk):
    env = f"{{PYTHONPATH: '{':'.join(PACKAGES)}', SECRET_WORD: pass}}"
    job = desk.job("train", TRAIN, env=env)
    shown = desk("plan", "--render", job, SECRET_WORD="xyzzy-42")
    assert shown.returncode == 0 and "# kind job" in shown.stdout and "xyzzy-42" not in shown.stdout, shown.stderr
    run = desk.submit(job, SECRET_WORD="xyzzy-42")
    followed = desk("logs", "--follow", run["run_id"], timeout=600)
    assert followed.returncode == 0, followed.stderr
    losses = [float(line.split()[-1]) for line in followed.stdout.splitlines() if " loss " in line]
    assert len(losses) == 4 and all(abs(loss - right_loss()) < 1e-4 for loss in losses), followed.stdout
    state = desk.state(run["handle"])
    assert state["state"] == "finished" and state["exit_code"] == 0
    desk.left()
    again = desk("logs", run["run_id"], "--rank", 3)
    assert "rank 3 of 4 loss" in again.stdout, "the logs stay after the pods have gone"
    assert (
        "xyzzy-42"
        not in subprocess.run(["grep", "-r", "xyzzy-42", run["folder"]], capture_output=True, text=True).stdout
    )


def test_running_logs_shell_and_cancel(desk):
    run = desk.submit(desk.job("waits", "import time; print('here', flush=True); time.sleep(600)"))
    desk.waited(run["handle"], 180, lambda state: state["state"] == "running")
    desk.cluster.wait(lambda: desk("logs", run["run_id"]).stdout.count("here") == 4, 120, "all ranks")
    shell = desk("shell", run["run_id"], "--node", 1, stdin="hostname\nexit\n")
    assert "-1" in shell.stdout, shell.stdout + shell.stderr
    there = desk(
        "shell", run["run_id"], "--node", 1, "--", "sh", "-c", 'hostname; echo "$1"; exit 5', "sh", "two  words"
    )
    assert there.returncode == 5 and there.stdout.splitlines()[0].endswith("-1"), there.stdout + there.stderr
    assert there.stdout.splitlines()[1] == "two  words"
    assert "running" in desk("list").stdout
    done = desk("cancel", run["run_id"])
    assert done.returncode == 0 and "has ended" in done.stdout, done.stderr
    assert desk.state(run["handle"])["state"] == "cancelled"
    desk.left()


CALLS = """
import json, os, sys
from drumbeat import api

def add(a, b=0):
    return a + b, int(os.environ["RANK"])

run = api.submit(add, 2, b=3, job=json.loads(sys.argv[1]))
print(json.dumps({"results": run.results(1200), "state": run.state}))
"""


def test_a_function_from_python(desk):
    (desk.base / "calls.py").write_text(CALLS)
    job = {
        "site": str(desk.site), "nodes": 2, "ranks-per-node": 1, "container": "localhost/host:1", "python": desk.python,
        "workdir": str(desk.base), "env": {"PYTHONPATH": ":".join(PACKAGES)},
    }  # fmt: skip
    argv = desk.cluster.inside(sys.executable, "calls.py", json.dumps(job))
    done = subprocess.run(
        argv, env=desk.environ, cwd=desk.base, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"results": [[5, 0], [5, 1]], "state": "finished"}
    desk.left()


def test_an_old_server_is_not_given_an_indexed_job(desk):
    if "1.20" not in desk.cluster.version():
        pytest.skip("only 1.20 drops completionMode: make cluster without KUBE_BIN")
    done = desk("submit", desk.job("indexed", "pass", submit_options="['--kind=job']"))
    assert done.returncode == 2 and "drops completionMode" in done.stderr, done.stderr
    desk.left()


# Guard and agent at once, as a memory limit may kill them.
KILL_AGENT = (
    "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline | grep -q ' [_]agent ' && kill -9 ${p#/proc/}; done; true"
)


@pytest.mark.parametrize("lost", ["pod", "agent"])
@pytest.mark.parametrize("node", [1, 0])
def test_one_failure_starts_all_pods_again_together(desk, node, lost):
    """A pod that is lost is replaced, one whose agent was killed stays; the ranks of both begin the next attempt."""
    kept = desk.base / "kept"
    kept.mkdir()
    run = desk.submit(desk.job("goeson", GOES_ON, env=f"{{KEPT: {kept}}}", ranks_per_node=1))
    desk.cluster.wait(
        lambda: (kept / "step-1").exists() and int((kept / "step-1").read_text() or 0) > 6, 240, "some steps"
    )
    desk("status", run["run_id"])
    (pod,) = desk.pods_of_node(node)
    if lost == "pod":
        desk.cluster.kubectl("delete", f"pod/{pod}", "--wait=false")
    else:
        desk.cluster.kubectl("exec", pod, "--", "sh", "-c", KILL_AGENT)
    state = desk.waited(run["handle"], 300, lambda state: state["state"] in ("finished", "failed"))
    summary = json.loads((Path(run["folder"]) / "summary.json").read_text())
    assert state["state"] == "finished", (state, summary)
    last = summary["attempts"][-1]["attempt"]
    again = desk("logs", run["run_id"], "--attempt", last).stdout
    assert again.count("begins at step") == 2 and again.count("done") == 2, (summary, again)
    assert last == 1 and "begins at step 0" not in again
    desk.left()


@pytest.mark.parametrize("nodes, ranks", [(1, 2), (2, 1), (2, 2)])
def test_ranks_of_jax_meet(desk, nodes, ranks):
    """jax.distributed.initialize() without arguments. JAX_PYTHON names an interpreter that has jax, of this Python's version."""
    asked = [os.environ.get("JAX_PYTHON", sys.executable), "-c", "import jax; print(jax.__path__[0])"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("jax is not installed: JAX_PYTHON")
    packages = os.path.dirname(found.stdout.strip())
    keys = {} if packages in PACKAGES else {"binds": f"[{packages}]"}
    env = f"{{PYTHONPATH: {packages}, JAX_PLATFORMS: cpu}}"
    job = desk.job("meet", MEET, nodes=nodes, ranks_per_node=ranks, env=env, **keys)
    run = desk.submit(job)
    desk("logs", "--follow", run["run_id"], timeout=600)
    assert desk.state(run["handle"])["state"] == "finished", desk("logs", run["run_id"]).stdout
    met(desk.base, nodes, ranks)
    desk.left()
