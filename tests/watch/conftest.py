"""A real run of two ranks that report a few steps, shared by all tests of views."""

import os
import subprocess
import sys

import pytest

from drumbeat.runfolder.run import Run
from tests.conftest import SOURCE

PROGRAM = """
import os, time
from drumbeat import metrics
for step in range(1, 13):
    time.sleep(0.05)
    metrics.report(step=step, steps=12, loss=4 / step, tokens=256)
print("rank", os.environ["RANK"], "is done <b>here</b>")
"""


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    (folder / "train.py").write_text(PROGRAM)
    env = {**os.environ, "HOME": str(folder), "PYTHONPATH": SOURCE}
    env = {name: value for name, value in env.items() if not name.startswith(("XDG_", "DRUMBEAT_"))}
    argv = [sys.executable, "-m", "drumbeat", "run", "--ranks-per-node", "2", "--", sys.executable, "train.py"]
    subprocess.run(argv, cwd=folder, env=env, check=True, timeout=600, capture_output=True)
    (path,) = (folder / "runs").iterdir()
    return Run.open(str(path))
