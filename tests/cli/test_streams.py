"""Standard streams that are closed or full: a reading command ends with 74 and says so, and a run goes on to its end."""

import json
import subprocess
import sys

import pytest

from tests.conftest import SOURCE

VIEWS = ("--help", "status --help", "run --help-all", "plan -- true", "doctor", "facts", "site list", "completion bash")


def shell(drumbeat, words, streams):
    line = f"exec {sys.executable} -m drumbeat {words} {streams}"
    return subprocess.run(["sh", "-c", line], cwd=drumbeat.folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("words", VIEWS)
def test_a_view_that_cannot_be_written(drumbeat, words):
    """Each view ends alike: the second is tried with every state of its streams."""
    for streams, why in (("<&- >&-", "it is closed"), (">/dev/full", "No space left on device"))[words != VIEWS[1] :]:
        done = shell(drumbeat, words, streams)
        assert done.returncode == 74, done.stderr
        assert f"cannot write the output: {why}" in done.stderr
        assert "Traceback" not in done.stderr and "ignored" not in done.stderr
    for streams in ("2>&-", "2>/dev/full") if words == VIEWS[1] else ():
        done = shell(drumbeat, words, streams)
        assert done.returncode in (0, 1) and done.stdout, "nobody reads the errors; the answer is there"


def test_views_of_a_run(drumbeat):
    assert shell(drumbeat, "run -- true", "").returncode == 0
    for words in ("list", "status", "report", "logs"):
        name = "" if words == "list" else drumbeat.run_folder()
        done = shell(drumbeat, f"{words} {name}", ">/dev/full")
        written = words == "logs"  # `true` has printed nothing
        assert done.returncode == (0 if written else 74) and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", ">/dev/full 2>/dev/full"])
def test_a_run_goes_on_to_its_end(drumbeat, streams):
    code = "print('out', flush=True); raise SystemExit(3)"
    done = shell(drumbeat, f'run -- {sys.executable} -c "{code}"', streams)
    assert done.returncode == 3 and "Traceback" not in done.stderr, done.stderr
    summary = json.loads((drumbeat.run_folder() / "summary.json").read_text())
    assert summary["exit_code"] == 3 and summary["outcome"] == "failed"


@pytest.mark.parametrize(
    "before,printed",
    [
        ("print('last', end='')", "last"),
        ("import atexit; atexit.register(print, 'at exit')", "at exit\n"),
        (
            "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()",
            "thread\n",
        ),
    ],
)
def test_a_process_that_ends_at_once_loses_nothing(before, printed):
    program = f"from drumbeat.cli.streams import end, open_streams; open_streams(); {before}; end(7)"
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": SOURCE}, capture_output=True, text=True, timeout=150
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, printed, "")
