"""The quick rows of the fault table, for real: 2 nodes x 2 ranks each. `make faults` runs all of them."""

import pytest

from tests.faults.rows import ALL
from tests.faults.runner import run_row

CROWDED = 15.0  # the bounds are those of an idle machine; here only that it is found counts


@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", [row for row in ALL if row.quick], ids=lambda row: row.name)
def test_quick_row(row, home, tmp_path):
    seen = run_row(row, tmp_path / "work")
    assert not seen.problems(CROWDED), seen.output
