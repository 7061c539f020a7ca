"""Steps between two lines of a recipe: a short training still has lines enough to tell its speed."""

import pytest

pytest.importorskip("torch")

from drumbeat.train.settings import Settings, fill  # noqa: E402


@pytest.mark.parametrize(
    "texts,steps",
    [
        (["steps=10"], 1),
        (["steps=50"], 5),
        (["steps=1000"], 10),
        (["steps=20", "report_every=20"], 20),
        (["steps=20", "report_every=10"], 10),
        (["steps=1"], 1),
    ],
)
def test_a_short_training_reports_more_often_unless_told_otherwise(texts, steps):
    assert fill(Settings, texts).steps_per_line == steps
