"""`make busy`, with a short command."""

import os
import subprocess
from pathlib import Path

from tests.conftest import marked, wait_for


def test_a_command_beside_a_load_runs_as_often_as_asked_and_leaves_nothing(tmp_path):
    script = str(Path(__file__).parent.parent / "beside-load.sh")
    count = ["sh", "-c", "echo x >> runs; ps -o pid= --ppid $PPID | wc -l >> load"]
    subprocess.run(["sh", script, "3", "2", *count], cwd=tmp_path, check=True, timeout=120)
    assert (tmp_path / "runs").read_text() == "x\nx\n" and (tmp_path / "load").read_text() == "4\n4\n"  # itself too
    for _ in range(20):  # however soon the command ends
        subprocess.run(
            ["sh", script, "2", "1", "true"], env={**os.environ, "DRUMBEAT_RUN": str(tmp_path)}, check=True, timeout=120
        )
    wait_for(lambda: not marked(tmp_path), what="the end of the load")
    failed = subprocess.run(["sh", script, "1", "2", "sh", "-c", "echo y >> runs; exit 3"], cwd=tmp_path, timeout=120)
    assert failed.returncode == 3 and (tmp_path / "runs").read_text() == "x\nx\ny\n"
