"""A failure is repeated only where all tests have run and few failed."""

import json
import subprocess
import sys

import pytest

from tests.again import MOST, PARTS, to_repeat
from tests.conftest import ROOT


def outcomes(folder, **others):
    for part in PARTS:
        outcome = others.get(part.replace("-", "_"), {"failed": []})
        if outcome:
            (folder / f"{part}.json").write_text(json.dumps({"exit": 0, "missing": 0, **outcome}))
    return folder


@pytest.mark.parametrize(
    "others, why_not",
    [
        ({"test_others": {"failed": ["a", "b"]}}, ""),
        ({"test_others": {"failed": ["a"]}, "test_train": {"exit": 2, "failed": ["b"]}}, "ended early"),
        ({"test_others": {"failed": ["a"], "missing": 2}}, "2 tests without a result"),
        ({"test_others": {"failed": ["a"]}, "test_short": None}, "test-short did not end"),
        ({"test_others": {"failed": ["a"] * (MOST + 1)}}, "more than"),
        ({}, "no test failed"),
    ],
)
def test_what_is_worth_repeating(tmp_path, others, why_not):
    answer = to_repeat(outcomes(tmp_path, **others))[1]
    assert why_not in answer and bool(answer) == bool(why_not)


TESTS = """
import os, pathlib
def test_ok(): pass
def test_first_time_only():
    mark = pathlib.Path(os.environ["MARK"])
    here = mark.exists()
    mark.write_text("")
    assert here
def test_killed(): assert not os.environ.get("DIES") or os._exit(1)
def test_last(): pass
"""
HOOK = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.conftest import pytest_sessionfinish  # noqa
"""


@pytest.mark.parametrize("env, said, code", [({}, "UNSTEADY", 0), ({"DIES": "1"}, "not repeated", 1)])
def test_a_test_that_fails_once(tmp_path, env, said, code):
    """The outcome that pytest-xdist leaves, and what is made of it."""
    (tmp_path / "conftest.py").write_text(HOOK)
    (tmp_path / "test_it.py").write_text(TESTS)
    folder = outcomes(tmp_path, test_others=None)
    env = {"PATH": "/usr/bin:/bin", "MARK": str(tmp_path / "mark"), **env}
    beside = {**env, "DRUMBEAT_OUTCOME": str(folder / "test-others.json")}
    words = [sys.executable, "-m", "pytest", "-q", "-n1", "--max-worker-restart=0", "test_it.py"]
    first = subprocess.run(words, cwd=tmp_path, env=beside, capture_output=True, text=True)
    assert first.returncode != 0, first.stdout
    again = subprocess.run(
        [sys.executable, ROOT / "tests/again.py", folder], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert again.returncode == code, again.stdout + again.stderr
    assert said in again.stdout
