"""A real MPI program below drumbeat in a Slurm step: one world over two nodes, by Slurm's own PMI-2."""

import shutil
import sys

import pytest

from tests.slurm.conftest import ROOT


def test_mpi_init_by_slurms_pmi2(oar):
    if shutil.which("mpiexec.mpich") is None:
        pytest.skip("needs MPICH's library: apt-get install mpich")
    world = f"{ROOT}/tests/runs/mpi_world.py"
    done = oar.srun("--mpi=pmi2", "-woar[9-10]", "-N2", "--ntasks-per-node=1", sys.executable, oar.pyz, "run",
                    "--ranks-per-node", "1", "--", sys.executable, world, "mpich", timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert f"mpi {rank} of 2, sum 1; rank {rank} of 2" in done.stdout, done.stdout + done.stderr
