"""A node runs the very files that were submitted, or nothing of them."""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import zipfile

import pytest

from drumbeat.bundle.pinned import start_argv

PROGRAM = """
import os, sys
word, request, private = sys.argv[1:]
assert os.path.dirname(request) == private == os.path.dirname(sys.argv[0])
print(word, open(request).read(), oct(os.stat(private).st_mode & 0o777), private)
"""


@pytest.fixture
def run(tmp_path):
    """A run folder in a place that a group can write to, and how to start what was submitted there."""
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    folder.parent.chmod(0o2770)
    folder.chmod(0o2770)
    with zipfile.ZipFile(folder / "drumbeat.pyz", "w") as archive:
        archive.writestr("__main__.py", PROGRAM)
    text = json.dumps({"program": hashlib.sha256((folder / "drumbeat.pyz").read_bytes()).hexdigest(), "name": "mine"})
    (folder / "order.json").write_text(text)
    argv = start_argv(sys.executable, str(folder / "order.json"), text)
    temporary = tmp_path / "tmp"
    temporary.mkdir(mode=0o700)
    env = {**os.environ, "TMPDIR": str(temporary)}
    return folder, temporary, lambda: subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


def test_private_copies_are_run(run):
    folder, temporary, start = run
    done = start()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('_node {"program": ') and " 0o700 " in done.stdout
    assert str(folder) not in done.stdout


@pytest.mark.parametrize("name", ["drumbeat.pyz", "order.json"])
def test_a_changed_file_is_refused(run, name):
    folder, temporary, start = run
    folder.rename(folder.with_name("away"))  # what a group can do to a folder in a folder of its own
    folder.mkdir()
    for file in ("drumbeat.pyz", "order.json"):
        (folder / file).write_bytes((folder.with_name("away") / file).read_bytes())
    if name == "drumbeat.pyz":
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr("__main__.py", "print('taken over')")
    else:
        (folder / name).write_text((folder / name).read_text().replace("mine", "theirs"))
    done = start()
    assert done.returncode == 78 and done.stdout == ""
    assert f"{name} was changed after the job was submitted" in done.stderr and "Traceback" not in done.stderr
    assert os.listdir(temporary) == []


def test_a_missing_file_is_named(run):
    folder, temporary, start = run
    (folder / "drumbeat.pyz").unlink()
    done = start()
    assert done.returncode == 74 and "drumbeat.pyz" in done.stderr and "Traceback" not in done.stderr
    assert os.listdir(temporary) == []


def test_what_a_killed_start_left_is_removed(run):
    """An hour later, and only where nobody uses it: a program keeps its own copies for as long as it runs."""
    folder, temporary, start = run
    for name in ("drumbeat-node-old", "drumbeat-node-used", "drumbeat-node-new", "drumbeat-other"):
        (temporary / name).mkdir()
        (temporary / name / "drumbeat.pyz").write_text("")
        if name != "drumbeat-node-new":
            os.utime(temporary / name, (0, 0))
    used = os.open(temporary / "drumbeat-node-used", os.O_RDONLY)
    fcntl.flock(used, fcntl.LOCK_SH)
    done = start()
    os.close(used)
    assert done.returncode == 0, done.stderr
    own = os.path.basename(done.stdout.split()[-1])
    assert set(os.listdir(temporary)) == {own, "drumbeat-node-used", "drumbeat-node-new", "drumbeat-other"}


ENDED_EARLY = """
import sys
sys.path[:0] = {path!r}
from drumbeat.bundle.pinned import removed_after
import os, signal
os.kill(os.getpid(), signal.SIGTERM)  # is held back until the copies can be removed
with removed_after(sys.argv[3:]):
    print("heard too late")
"""


def test_a_stop_before_the_agent_is_there_leaves_nothing(run):
    folder, temporary, start = run
    with zipfile.ZipFile(folder / "drumbeat.pyz", "w") as archive:
        archive.writestr("__main__.py", ENDED_EARLY.format(path=sys.path))
    text = json.dumps({"program": hashlib.sha256((folder / "drumbeat.pyz").read_bytes()).hexdigest()})
    (folder / "order.json").write_text(text)
    argv = start_argv(sys.executable, str(folder / "order.json"), text)
    done = subprocess.run(
        argv, env={**os.environ, "TMPDIR": str(temporary)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 143 and done.stdout == "", done.stderr
    assert os.listdir(temporary) == []
