"""A run that belongs to somebody else: cancel says so in one line."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.conftest import wait_for

SYSTEM_PYTHON = "/usr/bin/python3"
NOBODY = 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the run belongs to another user")
@pytest.mark.skipif(not os.path.exists(SYSTEM_PYTHON), reason="needs a Python that every user may run")
def test_cancel_says_whose_it_is(pyz):
    base = Path(tempfile.mkdtemp(prefix="drumbeat-other-", dir="/var/tmp"))
    base.chmod(0o755)
    other = base / "other"
    other.mkdir()
    os.chown(other, NOBODY, NOBODY)
    environ = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    shutil.copy(pyz, base)
    argv = [SYSTEM_PYTHON, str(base / "drumbeat.pyz")]  # a virtual environment may lie where others cannot look
    run = subprocess.Popen(
        [*argv, "run", "--stop-grace", "2s", "--", "sleep", "60"], env={**environ, "HOME": str(base)}, cwd=base,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(lambda: list(base.glob("runs/*/nodes/0/attempt-0")), 120, "the run")
        (folder,) = base.glob("runs/*")
        done = subprocess.run(
            [*argv, "cancel", str(folder)], env={**environ, "HOME": str(other)}, cwd=other, user=NOBODY, group=NOBODY,
            capture_output=True, text=True, check=False, timeout=150,
        )  # fmt: skip
        assert done.returncode == 2 and "belongs to another user" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr and run.poll() is None
    finally:
        run.terminate()
        run.wait(timeout=150)
        shutil.rmtree(base, ignore_errors=True)
