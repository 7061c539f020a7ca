"""The quick rows of the fault table, for real: 2 nodes x 2 ranks each. `make faults` runs all of them."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.rows import ALL, LONG
from tests.faults.runner import run_row

CROWDED = 15.0  # the bounds are those of an idle machine; here only that it is found counts


@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", [row for row in ALL if row.quick], ids=lambda row: row.name)
def test_quick_row(row, home, tmp_path):
    seen = run_row(row, tmp_path / "work")
    assert not seen.problems(CROWDED), seen.output


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_long_work_is_no_hang(home, tmp_path):
    with ThreadPoolExecutor(6) as pool:
        seen = list(pool.map(lambda row: run_row(row, tmp_path / row.kind), LONG))
    assert {each.row.kind: each.problems() for each in seen if each.problems()} == {}
