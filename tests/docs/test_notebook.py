"""The notebook's own cells, in their order, as a notebook would run them."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT, need_torch

NOTEBOOK = ROOT / "examples/laptop.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(home, tmp_path):
    need_torch("the notebook trains")
    book = json.loads(NOTEBOOK.read_text())
    assert book["nbformat"] == 4 and len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    argv = [sys.executable, "-c", "\n\n".join(cells)]
    done = subprocess.run(argv, cwd=tmp_path / "examples", capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished 20" in done.stdout and "2 ranks: " in done.stdout, done.stdout
    assert "failed 1\n" in done.stdout and "KeyError" in done.stdout, done.stdout
