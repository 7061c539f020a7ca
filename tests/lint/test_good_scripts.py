"""A good script gives no finding, not even a note."""

from pathlib import Path

import pytest

from drumbeat.lint.engine import lint

GOOD = sorted((Path(__file__).parent / "good").iterdir())


def test_there_are_six():
    assert len(GOOD) == 6


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.name)
def test_good_script_is_clean(path):
    folders_there = lint(path.read_text("utf-8"), path.name, lambda word: word * word.endswith("/"))
    assert folders_there.findings == ()


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.name)
def test_and_in_a_page_too(path):
    page = f"# How\n\n1. do\n\n   ```bash\n{indented(path.read_text('utf-8'))}   ```\n"
    assert lint(page, "page.md").findings == ()


def indented(text):
    return "".join(f"   {line}" if line.strip() else line for line in text.splitlines(keepends=True))
