"""A real run of two ranks that report a few steps, shared by all tests of views."""

import fcntl
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
def demo_run(tmp_path_factory, cache):
    """All workers read one run."""
    shared = "PYTEST_XDIST_WORKER" in os.environ
    folder = tmp_path_factory.getbasetemp().parent / "demo" if shared else tmp_path_factory.mktemp("demo")
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "runs").exists():
            _run_demo(folder, cache)
    (path,) = (folder / "runs").iterdir()
    return Run.open(str(path))


def _run_demo(folder, cache):
    (folder / "train.py").write_text(PROGRAM)
    env = {**os.environ, "HOME": str(folder), "PYTHONPATH": SOURCE}
    env = {name: value for name, value in env.items() if not name.startswith(("XDG_", "DRUMBEAT_"))}
    env["XDG_CACHE_HOME"] = str(cache)
    argv = [sys.executable, "-m", "drumbeat", "run", "--ranks-per-node", "2", "--", sys.executable, "train.py"]
    subprocess.run(argv, cwd=folder, env=env, check=True, timeout=600, capture_output=True)
