"""Joining real launchers of MPI: a program that calls MPI_Init below drumbeat is one world, with the ranks as both count them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from drumbeat.processes import launcher_descriptors

WORLD = Path(__file__).parent / "mpi_world.py"
LAUNCHERS = {
    "mpich": ["mpiexec.mpich", "-n", "2"],
    "openmpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2"],
}


@pytest.mark.parametrize("flavour", sorted(LAUNCHERS))
def test_mpi_init_below_drumbeat(flavour, home, tmp_path):
    launcher = LAUNCHERS[flavour]
    if shutil.which(launcher[0]) is None:
        pytest.skip(f"needs {launcher[0]}: apt-get install mpich openmpi-bin")
    rank = [sys.executable, "-m", "drumbeat", "run", "--runs", str(tmp_path / "runs"), "--", sys.executable, str(WORLD)]
    done = subprocess.run(
        [*launcher, *rank, flavour], cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=150,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for number in (0, 1):
        assert f"mpi {number} of 2, sum 1; rank {number} of 2" in done.stdout, done.stdout + done.stderr
    assert "planned was" not in done.stderr  # what MPI tells each task about itself is not a mismatch


def test_only_open_files_of_a_launcher_are_kept():
    reading, writing = os.pipe()
    try:
        environ = {"PMI_FD": str(reading), "PMI2_FD": "99999", "MY_FD": str(writing), "HYDI_CONTROL_FD": "x"}
        assert launcher_descriptors(environ) == [reading]
    finally:
        os.close(reading)
        os.close(writing)
