"""The command itself, as a person starts it."""

import json
import os
import subprocess
import sys

import pytest

SOURCE = os.path.join(os.path.dirname(__file__), "..", "..", "src")


def drumbeat(*arguments, text=None, folder=None):
    environment = {**os.environ, "PYTHONPATH": os.path.abspath(SOURCE)}
    command = [sys.executable, "-m", "drumbeat", "lint", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, env=environment, cwd=folder, timeout=150)


def test_standard_input_and_exit_codes():
    done = drumbeat("-", text="pkill -f x\n")
    assert done.returncode == 1
    assert "standard input:1: warning: processes are ended by a pattern  [kill-by-pattern]" in done.stdout
    assert "fix  keep the process id" in done.stdout and "1 warning" in done.stdout
    assert drumbeat("-", text="ls\n").returncode == 0
    assert drumbeat("-", text="export NCCL_DEBUG=INFO\n").returncode == 0  # a note is no failure


def test_json(tmp_path):
    (tmp_path / "a.sh").write_text("ls\npkill -f x\n")
    (tmp_path / "b.sh").write_text("ls\n")
    done = drumbeat("--json", "a.sh", "b.sh", folder=tmp_path)
    first, second = json.loads(done.stdout)["files"]
    assert first["findings"][0]["evidence"] == [{"text": "pkill -f x", "file": "a.sh", "line": 2}]
    assert first["findings"][0]["source"] == "", "where it is documented; most rules are our own"
    assert second == {"file": "b.sh", "findings": [], "fixed": []}


def test_fix_keeps_the_old_file_and_its_mode(tmp_path):
    script = tmp_path / "a.sh"
    script.write_text("#!/bin/bash\nsbatch –N 2 b.sh\npkill -f x\n")
    script.chmod(0o750)
    done = drumbeat("--fix", "a.sh", folder=tmp_path)
    assert done.returncode == 1
    assert "-sbatch –N 2 b.sh" in done.stdout and "+sbatch -N 2 b.sh" in done.stdout
    assert script.read_text() == "#!/bin/bash\nsbatch -N 2 b.sh\npkill -f x\n"
    assert (tmp_path / "a.sh.orig").read_text() == "#!/bin/bash\nsbatch –N 2 b.sh\npkill -f x\n"
    assert script.stat().st_mode & 0o777 == 0o750
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.sh", "a.sh.orig"]
    assert "fixed" not in drumbeat("--fix", "a.sh", folder=tmp_path).stdout  # nothing left to fix


def test_fix_never_covers_an_older_backup(tmp_path):
    (tmp_path / "a.sh").write_text("sbatch –N 2 b.sh\n")
    (tmp_path / "a.sh.orig").write_text("precious")
    done = drumbeat("--fix", "a.sh", folder=tmp_path)
    assert done.returncode == 2 and "already there" in done.stderr
    assert (tmp_path / "a.sh.orig").read_text() == "precious"
    assert (tmp_path / "a.sh").read_text() == "sbatch –N 2 b.sh\n"


@pytest.mark.parametrize(
    "content,says", [(None, "No such file"), (b"\xff\xfe\n", "line 1 is not UTF-8"), (b"a\0b", "is not text")]
)
def test_bad_input(tmp_path, content, says):
    if content is not None:
        (tmp_path / "a.sh").write_bytes(content)
    done = drumbeat("a.sh", folder=tmp_path)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_fix_of_standard_input_is_refused():
    done = drumbeat("--fix", "-", text="ls\n")
    assert done.returncode == 2 and "--fix needs a file" in done.stderr
