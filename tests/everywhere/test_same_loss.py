"""One job file, unchanged but for `site`: on this machine, on Slurm, on Kubernetes, on ssh hosts and under mpirun it trains to
the same loss.

`make everywhere` runs it: a Slurm, a Kubernetes, two sshd and ten ranks with torch take some minutes of two cores.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from drumbeat.bundle.build import cached_bundle
from tests.bench import cluster as slurm_bench
from tests.bench import hosts as ssh_bench
from tests.cluster import bench as kubernetes_bench
from tests.cluster.desk import PACKAGES

pytestmark = pytest.mark.skipif("DRUMBEAT_EVERYWHERE" not in os.environ, reason="make everywhere runs it")

ROOT = Path(__file__).parent.parent.parent
KUBE_BIN = Path(os.environ.get("KUBE_BIN", Path.home() / ".cache/drumbeat-cluster/bin"))
LIMIT = 500  # seconds for one run on busy cores
JOB = """
name: same
nodes: 2
ranks-per-node: 1
time: 10m
env: {OMP_NUM_THREADS: "1"}
command: %s %s/examples/train_bytes.py --steps 20
site: %s
"""


def job(folder: Path, site: object) -> Path:
    path = folder / "same.yaml"
    path.write_text(JOB % (sys.executable, ROOT, site))
    return path


def losses(text: str) -> list:
    return re.findall(r"step +(?:0|20)  validation loss [0-9.]+", text)


@pytest.fixture(scope="module")
def base():
    folder = tempfile.mkdtemp(prefix="dbe-", dir="/var/tmp")
    os.chmod(folder, 0o755)
    shutil.copy(cached_bundle({"XDG_CACHE_HOME": folder}), f"{folder}/drumbeat.pyz")
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def machines(base):
    reason = ssh_bench.why_not()
    if reason:
        pytest.skip(reason)
    (base / "hosts").mkdir()
    made = ssh_bench.Machines(str(base / "hosts"), ["oar1", "oar2"])
    try:
        made.up()
        shutil.copy(base / "drumbeat.pyz", made.base)
        yield made
    finally:
        made.down()


@pytest.fixture(scope="module")
def expected(base, machines):
    """On this machine: two nodes, emulated."""
    place = Path(machines.base, "shared")
    run = [
        sys.executable,
        f"{machines.base}/drumbeat.pyz",
        "run",
        str(job(place, "localhost")),
        "--runs",
        str(place / "runs"),
    ]
    done = machines.run(run, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    found = losses(done.stdout)
    assert len(found) == 2, done.stdout
    return found


def test_ssh(machines, expected):
    place = Path(machines.base, "shared")
    (place / "lab.yaml").write_text("summary: two machines\nbackend: ssh\nhosts: oar[1-2]\n")
    run = [sys.executable, f"{machines.base}/drumbeat.pyz", "run", str(job(place, place / "lab.yaml"))]
    done = machines.run([*run, "--runs", str(place / "runs")], timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == expected


def test_mpirun(machines, expected):
    place = Path(machines.base, "shared")
    run = [
        sys.executable,
        f"{machines.base}/drumbeat.pyz",
        "run",
        str(job(place, "workstation")),
        "--runs",
        str(place / "runs"),
    ]
    mpirun = ["mpirun", "--allow-run-as-root", "--host", "oar1,oar2", "--map-by", "ppr:1:node", "-np", "2"]
    handed_on = [word for name in ("MASTER_ADDR", "DRUMBEAT_TOKEN", "PATH") for word in ("-x", name)]
    environ = {"MASTER_ADDR": "oar1", "DRUMBEAT_TOKEN": "a token that both nodes have"}
    done = machines.run([*mpirun, *handed_on, *run], env=environ, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(done.stdout) == expected


def test_slurm(base, expected):
    reason = slurm_bench.why_not()
    if reason:
        pytest.skip(reason)
    (base / "slurm").mkdir()
    cluster = slurm_bench.Cluster(str(base / "slurm"), {"oar9": "9", "oar10": "10"})
    try:
        cluster.up()
        home = Path(cluster.home)
        shutil.copy(base / "drumbeat.pyz", home)
        submit = [
            sys.executable,
            f"{home}/drumbeat.pyz",
            "submit",
            str(job(home, "slurm")),
            "--runs",
            str(home / "runs"),
        ]
        done = cluster.run(slurm_bench.HEAD, [*submit, "--follow"], timeout=LIMIT)
        assert done.returncode == 0, done.stdout + done.stderr
        assert losses(done.stdout.replace("[0] ", "")) == expected
    finally:
        cluster.down()


def test_kubernetes(base, expected):
    """The site's profile says which image its pods are made of, and what they see of this machine."""
    reason = kubernetes_bench.why_not(KUBE_BIN)
    if reason:
        pytest.skip(f"no Kubernetes: {reason}")
    place = base / "kubernetes"
    place.mkdir()
    python = str(Path(sys.executable).resolve().parent.parent)
    site = {
        "summary": "two nodes",
        "backend": "kubernetes",
        "container": {
            "runtime": "pod",
            "image": "localhost/host:1",
            "binds": list(dict.fromkeys(["/usr", python, sys.prefix, *PACKAGES, str(ROOT), str(place)])),
        },
    }
    (place / "pods.yaml").write_text(json.dumps(site))
    cluster = kubernetes_bench.Cluster(base / "cluster", KUBE_BIN)
    try:
        cluster.up()
        environ = {"PATH": f"{KUBE_BIN}:/usr/bin:/bin", "HOME": str(place), "KUBECONFIG": str(cluster.kubeconfig)}
        submit = [sys.executable, f"{base}/drumbeat.pyz", "submit", job(place, place / "pods.yaml"), "--follow"]
        done = subprocess.run(
            cluster.inside(*submit), cwd=place, env=environ, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert losses(done.stdout.replace("[0] ", "")) == expected
    finally:
        cluster.down()
