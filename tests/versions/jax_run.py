"""`make versions` only: jax.distributed.initialize() without arguments, on emulated nodes and with the variables of a Slurm
step. JAX_PYTHON names an interpreter that has jax, where that is not the one that runs this."""

import os
import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("before", [(), SLURM], ids=["plain", "slurm"])
@pytest.mark.parametrize("nodes, ranks", [(1, 2), (2, 1), (2, 2)])
def test_ranks_meet(drumbeat, monkeypatch, nodes, ranks, before):
    python = os.environ.get("JAX_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import jax"], capture_output=True).returncode:
        pytest.skip("jax is not installed: make versions")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    (drumbeat.folder / "meet.py").write_text(PROGRAM)
    words = ("--nodes", nodes, "--ranks-per-node", ranks)
    done = drumbeat("run", "--site", "localhost", *words, "--", *before, python, "meet.py")
    assert done.returncode == 0, done.stdout + done.stderr
    world = nodes * ranks
    devices = ["all"] * world if ranks == 1 else [str(rank % ranks) for rank in range(world)]
    seen = [(drumbeat.folder / f"seen-{rank}").read_text() for rank in range(world)]
    assert seen == [f"{world} {list(range(world))} {device}" for device in devices]
