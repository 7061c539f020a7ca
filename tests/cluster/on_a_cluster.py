"""Jobs on a real Kubernetes cluster: run by `make cluster`, never by `make test`."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.cluster.bench import Cluster, why_not
from tests.kubernetes.programs import goes_on

SRC = Path(__file__).parent.parent.parent / "src"
PROGRAMS = Path(os.environ.get("KUBE_BIN", Path.home() / ".cache/drumbeat-cluster/bin"))
PACKAGES = [path for path in sys.path if path.endswith("site-packages") and os.path.isdir(path)]

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


@pytest.fixture(scope="session")
def cluster():
    reason = why_not(PROGRAMS)
    if reason:
        pytest.fail(reason)
    with tempfile.TemporaryDirectory(prefix="drumbeat-cluster-", dir="/var/tmp", ignore_cleanup_errors=True) as base:
        made = Cluster(Path(base), PROGRAMS, int(os.environ.get("KUBE_NODES", "2")))
        try:
            made.up()
            yield made
        finally:
            made.down()


class Desk:
    def __init__(self, cluster, base):
        self.cluster, self.base = cluster, base
        python = Path(sys.executable).resolve()
        self.python = str(python)
        binds = ["/usr", str(python.parent.parent), *PACKAGES, str(base)]
        self.site = base / "bench.yaml"
        self.site.write_text(
            "summary: the bench\nbackend: kubernetes\ncontainer: {runtime: pod, binds: [" + ", ".join(binds) + "]}\n"
        )
        self.environ = {
            "PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(base), "LANG": "C.UTF-8",
            "PYTHONPATH": ":".join([str(SRC), *PACKAGES]), "KUBECONFIG": str(cluster.kubeconfig),
        }  # fmt: skip

    def __call__(self, *words, timeout=300, stdin=None, **more):
        argv = self.cluster.inside(sys.executable, "-m", "drumbeat", *map(str, words))
        return subprocess.run(argv, env={**self.environ, **more}, cwd=self.base, input=stdin, capture_output=True, text=True,
                              timeout=timeout, check=False)  # fmt: skip

    def job(self, name, script, **keys):
        (self.base / f"{name}.py").write_text(script)
        lines = {
            "name": name, "site": self.site, "nodes": 2, "ranks-per-node": 2, "container": "localhost/host:1",
            "python": self.python, "workdir": self.base, "command": f"{self.python} {self.base}/{name}.py", "stop-grace": "5s",
        }  # fmt: skip
        lines.update((key.replace("_", "-"), value) for key, value in keys.items())
        path = self.base / f"{name}.yaml"
        path.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
        return path

    def submit(self, job, *words, **more):
        done = self("submit", job, "--json", *words, **more)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def state(self, run):
        done = self("status", "--json", run)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["status"]

    def waited(self, run, seconds, fits):
        until = time.monotonic() + seconds
        while True:
            state = self.state(run)
            if fits(state):
                return state
            assert time.monotonic() < until, state
            time.sleep(2)

    def left(self):
        """What carries a run's label in the cluster; pods that are going do not count."""
        self.cluster.wait(lambda: not self._left(), 240, "everything to be removed")

    def _left(self):
        words = ("get", "jobs,services,configmaps,secrets,pods", "-l", "drumbeat/run", "-o", "name")
        return self.cluster.kubectl(*words).split()


@pytest.fixture
def desk(cluster, tmp_path_factory):
    base = Path(tempfile.mkdtemp(prefix="drumbeat-desk-", dir="/var/tmp"))
    base.chmod(0o755)
    return Desk(cluster, base)


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


def test_pending_says_why_and_can_be_cancelled(desk):
    run = desk.submit(desk.job("large", "pass", cpus=1000))
    state = desk.waited(run["handle"], 60, lambda state: "Insufficient cpu" in state["detail"])
    assert state["state"] == "queued" and "ask for fewer GPUs, cores or memory" in state["detail"]
    assert desk("cancel", run["run_id"]).returncode == 0 and desk.state(run["handle"])["state"] == "cancelled"
    desk.left()


def test_an_image_that_does_not_exist(desk):
    run = desk.submit(desk.job("noimage", "pass", container="localhost/nothing:7"))
    state = desk.waited(run["handle"], 120, lambda state: "cannot get its image" in state["detail"])
    assert state["state"] == "queued" and "check the name and tag" in state["detail"]
    assert desk("cancel", run["run_id"]).returncode == 0
    desk.left()


def test_out_of_memory_is_named(desk):
    script = "import time\nblocks = []\nwhile True:\n    blocks.append(bytearray(8 << 20)); time.sleep(0.02)\n"
    run = desk.submit(desk.job("greedy", script, memory="256M", requeues=0))
    state = desk.waited(run["handle"], 180, lambda state: state["state"] == "failed")
    told = desk("status", run["run_id"]).stdout
    assert "memory" in state["detail"] + told, told
    desk("cancel", run["run_id"])


def test_a_pod_that_never_comes_is_named(desk):
    """Three nodes on a cluster of two: at the muster's limit the two that came are released."""
    run = desk.submit(desk.job("three", "pass", nodes=3, ranks_per_node=1, submit_options="['--muster=45s']"))
    state = desk.waited(run["handle"], 300, lambda state: state["state"] == "failed")
    told = desk("status", run["run_id"]).stdout
    assert "was pending: 0/2 nodes are available" in told, (state, told)
    desk("cancel", run["run_id"])  # where the lead itself never came, nothing was fetched
    desk.left()


def test_a_quota_that_allows_no_pod(desk):
    desk.cluster.kubectl("create", "namespace", "poor")
    desk.cluster.kubectl("create", "quota", "none", "--hard=pods=0", "-n", "poor")
    run = desk.submit(desk.job("poor", "pass", account="poor"))
    state = desk.waited(run["handle"], 60, lambda state: "quota" in state["detail"])
    assert state["state"] == "queued" and "the quota none does not allow it" in state["detail"]
    assert desk("cancel", run["run_id"]).returncode == 0


def test_refusals_leave_nothing(desk):
    nobody = str(desk.cluster.base / "kubeconfig-nobody")
    for keys, more, words in (
        ({}, {"KUBECONFIG": nobody}, "you (nobody) may not"),
        ({"account": "nowhere"}, {}, "the cluster has no namespace nowhere"),
        ({}, {"KUBECONFIG": "/nonexistent"}, "there is no kubeconfig here"),
        ({"submit-options": "['--pvc nothing:/data']"}, {}, "has no volume claim nothing"),
        ({"submit-options": "['--context=other']"}, {}, "no context other"),
    ):
        done = desk("submit", desk.job("refused", "pass", **keys), **more)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, (words, done.stderr)
    assert not list(desk.base.glob("runs/*"))
    desk.left()


def test_an_old_server_is_not_given_an_indexed_job(desk):
    if "1.20" not in desk.cluster._version():
        pytest.skip("only 1.20 drops completionMode")
    done = desk("submit", desk.job("indexed", "pass", submit_options="['--kind=job']"))
    assert done.returncode == 2 and "drops completionMode" in done.stderr, done.stderr
    desk.left()


def test_a_lost_pod_is_replaced_and_the_run_goes_on(desk):
    kept = desk.base / "kept"
    kept.mkdir()
    run = desk.submit(desk.job("goeson", GOES_ON, env=f"{{KEPT: {kept}}}", ranks_per_node=1))
    desk.cluster.wait(
        lambda: (kept / "step-1").exists() and int((kept / "step-1").read_text() or 0) > 6, 240, "some steps"
    )
    desk("status", run["run_id"])
    pods = desk.cluster.kubectl("get", "pods", "-l", "drumbeat/run,drumbeat/node=1", "-o", "name").split()
    desk.cluster.kubectl("delete", *pods, "--wait=false")
    state = desk.waited(run["handle"], 300, lambda state: state["state"] in ("finished", "failed"))
    summary = json.loads((Path(run["folder"]) / "summary.json").read_text())
    assert state["state"] == "finished", (state, summary)
    assert len(summary["attempts"]) == 2 and "done" in desk("logs", run["run_id"]).stdout
    assert "begins at step 0" not in desk("logs", run["run_id"], "--attempt", 1).stdout
    desk.left()
