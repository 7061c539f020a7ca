"""A run folder whose storage hangs: the ranks go on, the agent lives, and it is said. The process that writes it is frozen, as a
hung file system would freeze it."""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

from drumbeat.agent.folder.child import NAME
from drumbeat.base.proc import children
from tests.conftest import marked, wait_for

SCRIPT = """
import os, time
from drumbeat import metrics
for step in range(10_000):
    time.sleep(0.1)
    metrics.report(step, samples=1)
    if os.path.exists("enough"):
        break
open(f"done-{os.environ['RANK']}", "w").close()
"""


def is_writer(pid):
    with contextlib.suppress(OSError):  # it has ended since it was listed
        return Path(f"/proc/{pid}/comm").read_text().strip() == NAME
    return False


def writer_of(agent):
    (child,) = [pid for pid in children(agent) if is_writer(pid)]
    return child


def test_ranks_go_on_while_the_run_folder_hangs(drumbeat):
    process = drumbeat.start("run", "--nodes", 2, "--", sys.executable, "-c", SCRIPT)
    wait_for(
        lambda: drumbeat.runs() and (drumbeat.run_folder() / "nodes/1/metrics.jsonl").exists(), 120, "the first steps"
    )
    run = drumbeat.run_folder()
    started = json.loads((run / "nodes/1/events.jsonl").read_text().splitlines()[0])
    writer = writer_of(started["pid"])
    os.kill(writer, signal.SIGSTOP)
    events = run / "events.jsonl"
    wait_for(lambda: "folder-stalled" in events.read_text() or process.poll() is not None, 180, "the finding")
    assert process.poll() is None  # longer than the guard waits for an agent
    assert len(marked(run.name)) >= 2
    (drumbeat.folder / "enough").touch()
    wait_for(lambda: len(list(drumbeat.folder.glob("done-*"))) == 2, 120, "the ranks' own end")
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0, said
    found = [
        event["finding"] for event in map(json.loads, events.read_text().splitlines()) if event["kind"] == "finding"
    ]
    (finding,) = [each for each in found if each["code"] == "folder-stalled"]
    assert finding["node"] == 1
    assert "node 1: the run folder has taken nothing for" in said and "writes are lost" in said
    assert json.loads((run / "summary.json").read_text())["outcome"] == "finished"
    assert not marked(run.name)


HUNG_LOG = """
import os, sys
log = os.readlink("/proc/self/fd/2")
os.rename(log, log + ".old")
os.mkfifo(log)
sys.exit(3)
"""


def test_a_failed_rank_whose_log_hangs_is_told_by_its_exit_code(drumbeat):
    """Opening a fifo that nobody writes blocks for ever, as hung storage does."""
    done = drumbeat("run", "--", sys.executable, "-c", HUNG_LOG)
    assert done.returncode == 3, done.stderr
    assert "could not be read within 10 s" in done.stderr and "cannot be ended" not in done.stderr, done.stderr
    assert json.loads((drumbeat.run_folder() / "summary.json").read_text())["failure"]["rank"] == 0
