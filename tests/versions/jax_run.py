"""`make versions` only: jax.distributed.initialize() without arguments, on emulated nodes, with the variables of a Slurm step,
in pods (processes in their place), and (root on Debian) on a real Slurm, on ssh hosts and under mpirun. JAX_PYTHON names an
interpreter that has jax, where that is not the one that runs this."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from drumbeat.bundle.build import cached_bundle
from tests.bench import cluster as slurm_bench
from tests.bench import hosts as ssh_bench
from tests.kubernetes.test_desk import Desk

PROGRAM = """
import os, sys
import jax
jax.distributed.initialize()
import jax.numpy as jnp
from jax._src import xla_bridge
from jax.experimental import multihost_utils
ranks = multihost_utils.process_allgather(jnp.array([jax.process_index()])).ravel().tolist()
line = f"{jax.process_count()} {ranks} {xla_bridge.CUDA_VISIBLE_DEVICES.value}"
open(f"seen-{jax.process_index()}", "w").write(line)
"""
SLURM = (
    "env", "SLURM_JOB_ID=7", "SLURM_STEP_NODELIST=n1", "SLURM_NTASKS=1", "SLURM_PROCID=0", "SLURM_LOCALID=0",
    "SLURM_STEP_NUM_NODES=1",
)  # fmt: skip


SHAPES = pytest.mark.parametrize("nodes, ranks", [(1, 2), (2, 1), (2, 2)])
PYTHON = os.environ.get("JAX_PYTHON", sys.executable)
LIMIT = 500  # seconds for one run on busy cores


@pytest.fixture(scope="module", autouse=True)
def jax():
    if subprocess.run([PYTHON, "-c", "import jax"], capture_output=True).returncode:
        pytest.skip("jax is not installed: make versions")


def met(folder, nodes, ranks):
    """All ranks are in one world, each with the device of its place."""
    world = nodes * ranks
    devices = ["all"] * world if ranks == 1 else [str(rank % ranks) for rank in range(world)]
    seen = [(Path(folder) / f"seen-{rank}").read_text() for rank in range(world)]
    assert seen == [f"{world} {list(range(world))} {device}" for device in devices]


@pytest.mark.parametrize("before", [(), SLURM], ids=["plain", "slurm"])
@SHAPES
def test_ranks_meet(drumbeat, monkeypatch, nodes, ranks, before):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    (drumbeat.folder / "meet.py").write_text(PROGRAM)
    words = ("--nodes", nodes, "--ranks-per-node", ranks)
    done = drumbeat("run", "--site", "localhost", *words, "--", *before, PYTHON, "meet.py")
    assert done.returncode == 0, done.stdout + done.stderr
    met(drumbeat.folder, nodes, ranks)


def job(place, site, nodes, ranks):
    """A job file in a folder of its own, where its ranks write what they see."""
    folder = Path(place, f"meet-{nodes}-{ranks}-{Path(str(site)).stem}")
    folder.mkdir()
    (folder / "meet.py").write_text(PROGRAM)
    lines = [f"name: meet\nnodes: {nodes}\nranks-per-node: {ranks}\nsite: {site}\ntime: 10m\nworkdir: {folder}",
             f"command: {PYTHON} {folder}/meet.py", "env: {JAX_PLATFORMS: cpu}"]  # fmt: skip
    (folder / "job.yaml").write_text("\n".join(lines))
    return folder, [str(folder / "job.yaml"), "--runs", str(Path(place, "runs"))]


@pytest.fixture(scope="module")
def base():
    folder = tempfile.mkdtemp(prefix="dbj-", dir="/var/tmp")
    os.chmod(folder, 0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def machines(base):
    if ssh_bench.why_not():
        pytest.skip(ssh_bench.why_not())
    Path(base, "hosts").mkdir()
    made = ssh_bench.Machines(f"{base}/hosts", ["oar1", "oar2"])
    try:
        made.up()
        shutil.copy(cached_bundle({"XDG_CACHE_HOME": base}), f"{made.base}/drumbeat.pyz")
        yield made
    finally:
        made.down()


@SHAPES
def test_ssh_hosts(machines, nodes, ranks):
    place = Path(machines.base, "shared")
    (place / "lab.yaml").write_text("summary: two machines\nbackend: ssh\nhosts: oar[1-2]\n")
    folder, words = job(place, place / "lab.yaml", nodes, ranks)
    done = machines.run([sys.executable, f"{machines.base}/drumbeat.pyz", "run", *words], timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    met(folder, nodes, ranks)


@SHAPES
def test_mpirun(machines, nodes, ranks):
    folder, words = job(Path(machines.base, "shared"), "workstation", nodes, ranks)
    hosts = ",".join(["oar1", "oar2"][:nodes])
    start = ["mpirun", "--allow-run-as-root", "--host", hosts, "--map-by", "ppr:1:node", "-np", str(nodes)]
    handed_on = [word for name in ("MASTER_ADDR", "DRUMBEAT_TOKEN", "PATH") for word in ("-x", name)]
    environ = {"MASTER_ADDR": "oar1", "DRUMBEAT_TOKEN": "a token that both nodes have"}
    run = [sys.executable, f"{machines.base}/drumbeat.pyz", "run", *words]
    done = machines.run([*start, *handed_on, *run], env=environ, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    met(folder, nodes, ranks)


@SHAPES
def test_pods(tmp_path, cache, nodes, ranks):
    desk = Desk(tmp_path, cache)
    try:
        keys = {"nodes": nodes, "ranks_per_node": ranks, "workdir": tmp_path, "env": "{JAX_PLATFORMS: cpu}"}
        path = desk.job("meet", PROGRAM, **keys, command=f"{PYTHON} {desk.home}/meet.py")
        run = desk.submit(path)
        said = desk("logs", "--follow", run["run_id"])
        assert json.loads(desk("status", "--json").stdout)["status"]["state"] == "finished", said.stdout + said.stderr
        met(tmp_path, nodes, ranks)
    finally:
        desk.end()


@pytest.fixture(scope="module")
def slurm(base):
    if slurm_bench.why_not():
        pytest.skip(slurm_bench.why_not())
    Path(base, "slurm").mkdir()
    cluster = slurm_bench.Cluster(f"{base}/slurm", {"oar9": "9", "oar10": "10"})
    try:
        cluster.up()
        shutil.copy(cached_bundle({"XDG_CACHE_HOME": base}), f"{cluster.home}/drumbeat.pyz")
        yield cluster
    finally:
        cluster.down()


@SHAPES
def test_slurm(slurm, nodes, ranks):
    folder, words = job(slurm.home, "slurm", nodes, ranks)
    submit = [sys.executable, f"{slurm.home}/drumbeat.pyz", "submit", *words, "--follow"]
    done = slurm.run(slurm_bench.HEAD, submit, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    met(folder, nodes, ranks)
