"""No text, however damaged, makes lint or its fixing crash; and none makes either run away."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumbeat.lint.context import rules
from drumbeat.lint.engine import apply_edits, lint

PIECES = [
    "$(", "${", ")", "}", '"', "'", "`", "\\", "\\\n", "\\ \n", "\n", " ", "|", "||", "&", "&&", ";", "<<EOF\n", "EOF\n",
    "#", "#SBATCH --nodes=", "a=(", "(", "export ", "NCCL_", "bash -c ", "srun ", "tee ", "–", "“", "```", "```bash\n",
    ".. code-block:: sh\n\n   ", "    ", "<x>", "mask_cpu:0xff,", "\r\n", "\0", "=", "-", "$", "1", "torchrun ", "é", "\ud7ff",
]  # fmt: skip
EXAMPLES = [rule.bad for rule in rules()] + [
    path.read_text("utf-8") for path in sorted((Path(__file__).parent / "good").iterdir())
]
NAMES = st.sampled_from(["-", "a.sh", "a.md", "a.py"])


def survives(text, name):
    review = lint(text, name)
    count = len(text.split("\n"))
    assert all(1 <= finding.evidence[0].line <= count for finding in review.findings)
    again = lint(apply_edits(review), name)
    assert len(again.text.split("\n")) >= len(review.text.split("\n"))


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=300), NAMES)
def test_any_text(text, name):
    survives(text, name)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=60), NAMES)
def test_shell_like_text(pieces, name):
    survives("".join(pieces), name)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(EXAMPLES), st.lists(st.tuples(st.integers(0, 4000), st.sampled_from(PIECES)), max_size=6), NAMES)
def test_damaged_scripts(text, damage, name):
    for place, piece in damage:
        at = place % (len(text) + 1)
        text = text[:at] + piece + text[at + len(piece) % 3 :]
    survives(text, name)


@pytest.mark.parametrize("piece", ["$(", '"', "${", "`", "a=(", "\\ \n", "bash -c '", "–x ", "x|tee y\n", "$(VAR) "])
def test_repetition_stays_bounded(piece):
    """Each of these was quadratic or worse at some time; the test's own time limit is the check."""
    survives(piece * (8_000 // len(piece)), "-")
