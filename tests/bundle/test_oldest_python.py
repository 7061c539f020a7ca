"""The node rooms' own tests, run by the oldest Python that the agent promises to run on."""

import os
import subprocess

import pytest

from tests.conftest import ROOT


@pytest.mark.timeout(1800)  # more than a thousand tests, beside all others
def test_the_node_rooms_with_the_oldest_python():
    """Rooms that only compute: with what starts processes, the whole file is tried in test_pyz.py."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    argv = ["sh", str(ROOT / "tests" / "oldest-python.sh")]
    done = subprocess.run(argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-20_000:]
    if "SKIPPED: no Python 3.9" in done.stdout:
        pytest.skip("no Python 3.9 on PATH or in pyenv: the node rooms were not tested with the oldest Python")
    assert " passed" in done.stdout
