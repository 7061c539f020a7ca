"""Over real logs, where they are: the shares that the project asks for."""

import subprocess
import sys

from tests.conftest import ROOT
from tests.corpus import corpus


def test_shares():
    place = corpus("A_nccl_logs").parent
    command = [sys.executable, str(ROOT / "tools" / "corpus.py")]
    result = subprocess.run(command, env={"DRUMBEAT_CORPUS": str(place), "PATH": ""}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:]


def test_without_a_corpus_it_says_so_and_ends_well(tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "corpus.py")]
    result = subprocess.run(
        command, env={"DRUMBEAT_CORPUS": str(tmp_path / "no"), "PATH": ""}, capture_output=True, text=True
    )
    assert result.returncode == 0 and "nothing to judge" in result.stdout
