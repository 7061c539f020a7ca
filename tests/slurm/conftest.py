"""One real Slurm per process. Two jobs that take their time start with it; the tests that look at them come last."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest

from drumbeat.bundle.build import cached_bundle
from tests.bench.cluster import HEAD, Cluster, why_not
from tests.conftest import SECOND_SLURM

ROOT = Path(__file__).parent.parent.parent
# Sorted as text, neither names nor addresses come in Slurm's order. The second four are for the test that cuts one off.
NODES = {"oar9": "9", "oar10": "10", "oar11": "100", "oar12": "20"}
FRAGILE = {"reed1": "31", "reed2": "32", "reed3": "33"}
SLOW = {"reed4": "34"}
YIELDS = {"reed5": "35"}  # to whoever is urgent


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: "slow" in item.fixturenames)


@pytest.fixture(scope="session")
def cluster():
    reason = why_not()
    if reason:
        pytest.skip(reason)
    base = tempfile.mkdtemp(prefix="drumbeat-bench-", dir="/var/tmp")
    os.chmod(base, 0o755)
    parts = {"debug": NODES, "fragile": FRAGILE, "slow": SLOW, "yields": YIELDS, "urgent": YIELDS}
    nodes = {**NODES, **FRAGILE, **SLOW, **YIELDS}
    made = Cluster(base, nodes, partitions=parts, system=os.environ.get("DRUMBEAT_SLURM_SYSTEM", ""))
    try:
        made.up()
        yield made
    finally:
        made.down()
        shutil.rmtree(base, ignore_errors=True)


class Oar:
    """drumbeat on the cluster's login node, the way a user calls it."""

    def __init__(self, cluster: Cluster, bundle: str) -> None:
        self.cluster = cluster
        self.home = Path(cluster.home)
        self.pyz = self.home / "drumbeat.pyz"
        shutil.copyfile(bundle, self.pyz)

    def __call__(self, *words, timeout=330, env=None):
        argv = [sys.executable, str(self.pyz), *map(str, words)]
        return self.cluster.run(HEAD, argv, env=env, timeout=timeout)

    def ranks(self, name: str, text: str) -> Path:
        """A script for the ranks, on storage that all nodes see."""
        path = self.home / f"{name}.py"
        path.write_text(text)
        return path

    def job(self, name: str, **keys) -> Path:
        path = self.home / f"{name}.yaml"
        lines = {"name": name, "nodes": 2, "ranks-per-node": 2, "time": "10m", "stop-grace": "5s"}
        if "gpus" in keys:
            lines["checks"] = "{preflight: warn}"  # Slurm's GPUs are made up here, and the preflight would say so
        lines.update((key.replace("_", "-"), value) for key, value in keys.items())
        path.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
        return path

    def submit(self, job: Path, *flags) -> tuple[int, Path]:
        done = self("submit", job, *flags)
        assert done.returncode == 0, done.stderr
        number = int(done.stdout.split("slurm://bench/")[1].split()[0])
        return number, Path(done.stdout.split("folder")[1].split()[0])

    def srun(self, *words, timeout=330):
        return self.cluster.run(HEAD, ["srun", *map(str, words)], timeout=timeout)


@pytest.fixture(scope="session")
def oar(cluster, cache):
    return Oar(
        cluster, cached_bundle({"XDG_CACHE_HOME": str(cache)})
    )  # with byte code: agents start in a third of the time


def output(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("slurm-*.out"))


def said(folder: Path, text: str, seconds: float = 180) -> str:
    """Wait until the job's output says it."""
    deadline = time.monotonic() + seconds
    while text not in output(folder):
        assert time.monotonic() < deadline, f"{text!r} was not said within {seconds} s:\n{output(folder)}"
        time.sleep(0.1)
    return output(folder)


LOST = """
import os, socket, time
print("attempt", os.environ["DRUMBEAT_ATTEMPT"], "rank", os.environ["RANK"], "on", socket.gethostname(), flush=True)
time.sleep(600 if os.environ["DRUMBEAT_ATTEMPT"] == "0" else 0.5)
"""

SAVES = """
# Counts steps through a DataLoader with workers; saves on the stop signal, and asks to be started again.
import os, signal, sys, time
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))  # before torch: its import takes a while
path = f"saved-{os.environ['RANK']}"
first = int(open(path).read()) if os.path.exists(path) else 0
print("attempt", os.environ["DRUMBEAT_ATTEMPT"], "begins at", first, flush=True)
if first:
    sys.exit(0)  # before torch: Slurm's next signal may come within seconds
import torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self): return 1000000
    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.tensor(index)

for step, batch in enumerate(DataLoader(Slow(), batch_size=2, num_workers=2)):
    if stop:
        # the workers must still be there: one more batch comes through them
        open(path, "w").write(str(step + 1))
        print("saved at", step + 1, flush=True)
        sys.exit(75)
"""


@pytest.fixture(scope="session")
def slow(cluster, oar):
    """The job that loses a node, and the one that reaches its time limit: number, run folder, what was done when."""
    saves = oar.ranks("saves", SAVES)
    # Slurm sends its signal up to half a minute early, and looks every half minute: here 45 to 75 s after the job's start. With a
    # limit of one minute it could come before the lead was there.
    limit = oar.job(
        "limit", ranks_per_node=1, nodes=1, time="2m", stop_grace="15s", partition="slow", command=f"python3 {saves}"
    )
    jobs = {"limit": oar.submit(limit)}
    lost = oar.job("lost", ranks_per_node=1, partition="fragile", command=f"python3 {oar.ranks('lost', LOST)}",
                   submit_options='["--exclude=reed4"]')  # fmt: skip
    jobs["lost"] = oar.submit(lost)
    said(jobs["lost"][1], "rank 1 on")
    jobs["cut at"] = time.time()
    cluster.cut("reed2")
    return jobs


@pytest.fixture(autouse=True)
def slow_jobs_first(request):
    """They begin with the first test on the Slurm that is theirs."""
    theirs = request.node.path.name not in SECOND_SLURM
    if theirs and any("slow" in item.fixturenames for item in request.session.items):
        request.getfixturevalue("slow")
