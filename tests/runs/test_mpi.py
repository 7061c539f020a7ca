"""Joining real launchers of MPI: a program that calls MPI_Init below drumbeat is one world, with the ranks as both count them."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drumbeat.base.processes import launcher_descriptors
from drumbeat.runfolder.run import Run

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


@pytest.mark.parametrize("flavour", sorted(LAUNCHERS))
def test_after_an_abort_the_run_folder_tells_what_happened(flavour, home, tmp_path):
    """mpirun answers with a signal to all its tasks, drumbeat's processes; the lead goes on and writes the summary."""
    launcher = LAUNCHERS[flavour]
    if shutil.which(launcher[0]) is None:
        pytest.skip(f"needs {launcher[0]}: apt-get install mpich openmpi-bin")
    rank = [sys.executable, "-m", "drumbeat", "run", "--runs", str(tmp_path / "runs"), "--", sys.executable, str(WORLD)]
    done = subprocess.run(
        [*launcher, *rank, flavour, "abort"], cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    run = Run.open(str(next((tmp_path / "runs").iterdir())))
    until = time.monotonic() + 120
    while run.summary() is None and time.monotonic() < until:
        time.sleep(0.2)
    summary = run.summary()
    assert summary and summary.failure, done.stderr
    assert (summary.outcome, summary.failure.rank, summary.failure.title) == ("failed", 1, "ValueError: no such sample")


def test_only_open_files_of_a_launcher_are_kept():
    reading, writing = os.pipe()
    try:
        environ = {"PMI_FD": str(reading), "PMI2_FD": "99999", "MY_FD": str(writing), "HYDI_CONTROL_FD": "x"}
        assert launcher_descriptors(environ) == [reading]
    finally:
        os.close(reading)
        os.close(writing)
