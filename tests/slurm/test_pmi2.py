"""A real MPI program below drumbeat in a Slurm step: one world over two nodes, by Slurm's own PMI-2."""

import glob
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


def test_mpi_init_by_slurms_pmix(oar):
    """Open MPI's library and Slurm's PMIx plug-in, both Debian's."""
    if shutil.which("mpirun.openmpi") is None or not glob.glob("/usr/lib/*/pmix2/lib/libpmix.so.2"):
        pytest.skip("needs Open MPI's library and PMIx: apt-get install openmpi-bin libpmix2")
    world = f"{ROOT}/tests/runs/mpi_world.py"
    done = oar.srun("--mpi=pmix", "-woar[9-10]", "-N2", "--ntasks-per-node=1", sys.executable, oar.pyz, "run",
                    "--ranks-per-node", "1", "--", sys.executable, world, "openmpi", timeout=150)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert f"mpi {rank} of 2, sum 1; rank {rank} of 2" in done.stdout, done.stdout + done.stderr
