"""The how-to's own script, before and after its diff, runs on a machine without a GPU."""

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT, need_torch

pytestmark = pytest.mark.slow  # each process imports torch
DIFF = re.search(r"```diff\n(.*?)```", (ROOT / "docs/howto/one-gpu-to-many.md").read_text(), re.DOTALL)[1]


def script(folder, sign):
    """The page's script with the lines of that sign."""
    lines = [line[1:] for line in DIFF.splitlines() if line[:1] in ("", " ", sign)]
    (folder / "train.py").write_text("\n".join(lines) + "\n")


def test_before(tmp_path):
    need_torch("the page's script trains")
    script(tmp_path, "-")
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, check=True, capture_output=True, timeout=300)
    assert (tmp_path / "model.pt").exists()


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(["--ranks-per-node", "2"], marks=pytest.mark.proof),
        ["--nodes", "2", "--ranks-per-node", "1"],
    ],
)
def test_after(home, tmp_path, where):
    need_torch("the page's script trains")
    script(tmp_path, "+")
    command = [sys.executable, "-m", "drumbeat", "run", *where, "--", sys.executable, "train.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "model.pt").exists() and result.stdout.count("epoch 2 loss") == 1
