"""verify --mpi: right sums are told as right, wrong ones as wrong, and a world that is none is named."""

import importlib.util
import json
import shutil
import sys

import pytest

from drumbeat.base.problem import Problem
from drumbeat.desk.start.verify import require_mpi_launcher
from drumbeat.verify.judge import mpi_failed, mpi_lines


def results(right=4, hosts=("a", "a", "b", "b")):
    rows = [{"bytes": 8, "seconds": 1e-5, "right": 4}, {"bytes": 1 << 20, "seconds": 1e-3, "right": right}]
    return {"library": "Open MPI v4.1.4", "ranks": 4, "hosts": list(hosts), "rows": rows}


def test_the_figures_in_words():
    text = "\n".join(mpi_lines(results()))
    assert "4 ranks on 2 nodes, by Open MPI v4.1.4" in text and "1.573 GB/s  right on all 4 ranks" in text
    assert "not measured: GPU memory" in text and "one node" not in text
    assert "nothing of this went over the network" in mpi_lines(results(hosts="aaaa"))[-1]


def test_wrong_sums_fail():
    assert mpi_failed(results(right=3)) and not mpi_failed(results())
    assert any("WRONG on 1 of 4 ranks" in line for line in mpi_lines(results(right=3)))


def test_without_an_mpi_launcher_it_says_what_to_type():
    with pytest.raises(Problem, match="started by an MPI launcher"):
        require_mpi_launcher({"RANK": "0"})
    require_mpi_launcher({"PMI_RANK": "0"})


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py comes with the dev extra")
@pytest.mark.skipif(shutil.which("mpirun.openmpi") is None, reason="Open MPI: make test installs it")
def test_two_ranks_for_real(drumbeat):
    mpirun = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    process = drumbeat.start("verify", "--mpi", "--quick", "--json", "--python", sys.executable, prefix=mpirun)
    out = process.communicate(timeout=240)[0]
    assert process.returncode == 0, out
    answer = json.loads(out[out.index("{\n") : out.rindex("\n}") + 2])
    assert [row["right"] for row in answer["results"]["rows"]] == [2, 2, 2] and answer["results"]["ranks"] == 2
