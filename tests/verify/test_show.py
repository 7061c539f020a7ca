"""The table of `verify --mpi`: sizes, rates and sums, and what one node alone cannot show."""

import pytest

from drumbeat.verify.judge import mpi_failed, mpi_lines


def results(hosts, right=4):
    rows = [{"bytes": size, "seconds": 0.001, "right": right} for size in (8, 1024, 4096, 1 << 20)]
    return {"ranks": 4, "hosts": [f"n{rank % hosts}" for rank in range(4)], "library": "Open MPI 5", "rows": rows}


@pytest.mark.parametrize("hosts, alone", [(1, True), (2, False)])
def test_one_node_alone_says_nothing_about_the_network(hosts, alone):
    text = "\n".join(mpi_lines(results(hosts)))
    assert ("all ranks were on one node" in text) == alone and f"on {hosts} node" in text


def test_sizes_and_rates():
    rows = mpi_lines(results(2))[2:6]
    assert [row.split()[:2] for row in rows] == [["8", "B"], ["1", "KiB"], ["4", "KiB"], ["1", "MiB"]]
    assert "GB/s" not in rows[1] and "0.006 GB/s" in rows[2] and "1.573 GB/s" in rows[3]  # 2 x 3/4 of 1 MiB in 1 ms


def test_a_wrong_sum_fails():
    assert mpi_failed(results(2, right=3)) and not mpi_failed(results(2))
    assert "WRONG on 1 of 4 ranks" in "\n".join(mpi_lines(results(2, right=3)))
