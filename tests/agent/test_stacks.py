"""The thread that tells a rank's stack must not change how its program ends."""

import os
import subprocess
import sys
import time
from pathlib import Path

from drumbeat.inrank import stacks

FOLDER = Path(stacks.__file__).parent
PROGRAM = f"""
import sys, time
sys.path.insert(0, {str(FOLDER)!r})
import stacks
stacks.serve()
print("up", flush=True)
sys.stdin.readline()
print("threading" in sys.modules)
"""


def test_a_program_without_threads_ends_after_it_was_asked(tmp_path):
    """Imported by the answering thread, `threading` would take it for the main thread, and wait for it for ever."""
    environ = {**os.environ, "DRUMBEAT_METRICS": str(tmp_path / "metrics"), "RANK": "0"}
    argv = [sys.executable, "-S", "-c", PROGRAM]
    process = subprocess.Popen(argv, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "up\n"
        time.sleep(0.2)
        (name,) = [each for each in os.listdir(tmp_path) if each.endswith(f".{process.pid}.sock")]
        answer = stacks.ask(str(tmp_path), name, 30.0)
        assert answer and [frame[2] for frame in answer["stack"]] == ["<module>"], "of the main thread"
        out, _ = process.communicate("go on\n", timeout=60)
        assert (process.returncode, out) == (0, "False\n")
    finally:
        process.kill()
        process.wait()
