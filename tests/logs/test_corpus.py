"""Over real logs, where they are: the shares that the project asks for."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.corpus import folders


def score(place):
    command = [sys.executable, str(ROOT / "tools" / "corpus.py")]
    return subprocess.run(command, env={"DRUMBEAT_CORPUS": place, "PATH": ""}, capture_output=True, text=True)


def test_shares():
    if not folders():
        pytest.skip("no corpus (set DRUMBEAT_CORPUS)")
    result = score(os.pathsep.join(map(str, folders())))
    assert result.returncode == 0, result.stdout[-700:]


def test_without_a_corpus_it_says_so_and_ends_well(tmp_path):
    result = score(str(tmp_path / "no"))
    assert result.returncode == 0 and "nothing to judge" in result.stdout
