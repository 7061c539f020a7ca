"""A run folder that is full or gone: the ranks save, the run ends with 74, in one clear line, soon."""

import os
import shutil
import sys

import pytest

from drumbeat.agent.folder.child import Shipping
from drumbeat.runfolder.layout import NodeFolder
from tests.conftest import wait_for
from tests.runs.test_without_lead import SAVES

GRACE = "600s"  # longer than a test waits: ranks that have saved must not be waited for


def assert_saved_and_said(process, folder, ranks, reason):
    text = process.communicate(timeout=300)[0]
    assert process.returncode == 74, text
    assert all((folder / f"saved-{rank}").exists() for rank in range(ranks)), text
    assert "Traceback" not in text and reason in text, text
    said = [line for line in text.splitlines() if "the run folder cannot be written" in line]
    assert said and len(said) <= 2, text  # one per node


def test_the_run_folder_is_deleted(drumbeat):
    argv = ("run", "--nodes", 2, "--stop-grace", GRACE, "--", sys.executable, "-c", SAVES)
    process = drumbeat.start(*argv)
    wait_for(lambda: len(list(drumbeat.folder.glob("up-*"))) == 2, 180, "the ranks")
    gone = drumbeat.folder / "gone"
    os.rename(drumbeat.run_folder(), gone)  # at once: what is written meanwhile would keep a folder from being deleted
    shutil.rmtree(gone)
    assert_saved_and_said(process, drumbeat.folder, 2, "gone")


FILLS = """
import glob, json, time
while len(glob.glob("up-*")) < 2:  # the other rank must be able to save
    time.sleep(0.05)
with open(os.path.join(os.environ["DRUMBEAT_FOLDER"], "ballast"), "wb", buffering=0) as file:
    try:
        while True:
            file.write(b"x" * 65536)
    except OSError:
        pass
while True:
    with open(os.environ["DRUMBEAT_METRICS"], "a") as file:
        file.write(json.dumps({"kind": "step", "t": time.time(), "step": 1, "rank": 0, "note": "x" * 2000}) + "\\n")
    time.sleep(0.1)
"""


def test_the_run_folder_is_full(drumbeat, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "small"
    place.mkdir()
    script = 'mount -t tmpfs -o size=24m none "$1" && shift && exec "$@"'
    prefix = ("unshare", "-m", "sh", "-c", script, "x", str(place))
    fills = SAVES.partition("while True:")[0] + FILLS
    argv = ("run", "--runs", place / "runs", "--nodes", 2, "--stop-grace", GRACE, "--", sys.executable, "-c", fills)
    process = drumbeat.start(*argv, prefix=prefix)
    wait_for(lambda: len(list(drumbeat.folder.glob("up-*"))) == 2 or process.poll() is not None, 180, "the ranks")
    if process.poll() not in (None, 74):
        pytest.skip(f"cannot mount here: {process.stdout.read()}")
    assert_saved_and_said(process, drumbeat.folder, 2, "No space left on device")


def test_ranks_that_fill_the_disk_with_what_they_print_fail_for_that(drumbeat, tmp_path):
    """They fail themselves, before the agent has anything to write."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "small"
    place.mkdir()
    script = 'mount -t tmpfs -o size=16m none "$1" && shift && touch mounted && exec "$@"'
    prints = "while True: print('x' * 65536, flush=True)"
    argv = ("run", "--runs", place / "runs", "--ranks-per-node", 2, "--", sys.executable, "-c", prints)
    process = drumbeat.start(*argv, prefix=("unshare", "-m", "sh", "-c", script, "x", str(place)))
    text = process.communicate(timeout=300)[0]
    if not (drumbeat.folder / "mounted").exists():
        pytest.skip(f"cannot mount here: {text}")
    told = [line for line in text.splitlines() if "xxxx" not in line]
    assert process.returncode == 74 and not any("bug in drumbeat" in line for line in told), told
    assert any("No space left on device" in line for line in told), told


def append(path, data):
    with open(path, "ab") as file:
        file.write(data)


def test_a_ranks_last_megabytes_are_kept_above_64_ranks(tmp_path):
    logs, folder = NodeFolder(str(tmp_path / "local"), 0), NodeFolder(str(tmp_path / "shared"), 0)
    for place in (logs, folder):
        os.makedirs(place.attempt(0))
    lines = [f"line {number} {'x' * 90}" for number in range(60_000)]  # 6 MB
    with open(logs.log(0, 3, "out"), "w") as file:
        file.write("\n".join(lines) + "\nlast words")
    beats = []
    Shipping(logs, folder, append, lambda: beats.append(1)).ship(0, final=True)
    with open(folder.merged(0)) as file:
        shipped = file.read().splitlines()
    assert shipped[-1] == "3 out last words" and len(shipped) == 60_001 and beats


def test_what_is_left_out_is_said(tmp_path):
    """Storage that is too slow for gigabytes of last words: the end is kept, and the gap is counted."""
    logs, folder = NodeFolder(str(tmp_path / "local"), 0), NodeFolder(str(tmp_path / "shared"), 0)
    for place in (logs, folder):
        os.makedirs(place.attempt(0))
    with open(logs.log(0, 3, "out"), "w") as file:
        file.write("y" * 99 + "\n")
        file.write(("x" * 99 + "\n") * 80_000 + "last words")
    Shipping(logs, folder, append).ship(0, final=True, seconds=-1.0)
    with open(folder.merged(0)) as file:
        shipped = file.read().splitlines()
    (gap,) = [line for line in shipped if "left out" in line]
    missing = int(gap.split()[3])
    assert (
        shipped[-1] == "3 out last words"
        and missing + sum(len(line) - 5 for line in shipped if line != gap) >= 8_000_000
    )
