"""A job with a range of nodes goes on with fewer after a loss, and uses the lost one again when it is back."""

import json
import os
import signal
import sys

import pytest

from tests.comeback.test_spare import RANKS, events, kill_node, ranks_of
from tests.conftest import marked, wait_for
from tests.runs.test_nobody_left import assert_all_gone


def sizes(folder):
    return [(event["nodes"], event["world_size"]) for event in events(folder, "attempt-started")]


def test_it_shrinks_and_grows_again(drumbeat):
    flags = ("--nodes", "2-3", "--ranks-per-node", 1, "--restarts", 1, "--site", "localhost", "--name", "range")
    process = drumbeat.start("run", *flags, "--", sys.executable, RANKS, 100_000, 0.1, 5)
    saved = drumbeat.folder / "checkpoint"
    wait_for(lambda: saved.exists() and int(saved.read_text() or 0) >= 5, 180, "a checkpoint")
    folder = drumbeat.run_folder()
    kill_node(folder.name, 1, ranks_of(folder, 1))
    wait_for(lambda: len(events(folder, "first-step")) == 2, 180, "steps with two nodes")
    wait_for(lambda: len(events(folder, "node-joined")) == 4, 180, "the lost node's return")
    os.kill(ranks_of(folder, 2, attempt=1)[0], signal.SIGKILL)
    wait_for(lambda: len(events(folder, "first-step")) == 3, 180, "steps with three nodes")
    (drumbeat.folder / "enough").touch()
    output = process.communicate(timeout=150)[0]
    assert process.returncode == 0, output
    assert sizes(folder) == [(3, 3), (2, 2), (3, 3)], output
    assert "goes on without node 1" in output and "returned   node 1" in output, output
    assert "2 of 3 nodes: a batch that is set per rank makes a global batch of 2/3" in output, output
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["nodes"] == 3 and [each["outcome"] for each in summary["attempts"]] == [
        "failed",
        "failed",
        "finished",
    ]
    killed = summary["attempts"][1]["finding"]  # then node 2 had node rank 1
    assert killed["node"] == 2, summary
    assert not marked(folder.name)
    assert_all_gone(folder.name)


SAVES = """
import os, signal, sys, time
def save(number, frame):
    time.sleep(4)  # more than ranks have to end after a failure
    open(f"saved-{os.environ['RANK']}", "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
open(f"ready-{os.environ['RANK']}", "w").close()
while True:
    signal.pause()
"""


def test_a_stop_during_a_shrink_leaves_time_to_save(drumbeat):
    flags = ("--nodes", "1-2", "--ranks-per-node", 1, "--site", "localhost", "--name", "shrinks")
    process = drumbeat.start("run", *flags, "--", sys.executable, "-c", SAVES)
    ready = lambda: all((drumbeat.folder / f"ready-{rank}").exists() for rank in range(2))  # noqa: E731
    wait_for(ready, 180, "both ranks")
    folder = drumbeat.run_folder()
    kill_node(folder.name, 1, ranks_of(folder, 1))
    wait_for(lambda: events(folder, "stopping"), what="the end of the other rank")
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=150)[0]
    assert (drumbeat.folder / "saved-0").exists(), output
    assert_all_gone(folder.name)


def test_below_the_least_it_ends(drumbeat):
    flags = ("--nodes", "2-3", "--ranks-per-node", 1, "--site", "localhost", "--name", "least")
    process = drumbeat.start("run", *flags, "--", sys.executable, RANKS, 100_000, 0.1, 5)
    wait_for(lambda: (drumbeat.folder / "checkpoint").exists(), 180, "a checkpoint")
    folder = drumbeat.run_folder()
    for node in (1, 2):
        kill_node(folder.name, node, ranks_of(folder, node))
    output = process.communicate(timeout=150)[0]
    assert process.returncode != 0 and "at least 2 needed" in output and "spare" not in output, output
    assert_all_gone(folder.name)


@pytest.mark.parametrize("text", ["3-2", "0-2", "2-", "a-3", "2-3-4"])
def test_ranges_that_are_none(drumbeat, text):
    done = drumbeat.here("plan", "--nodes", text, "--site", "localhost", "--", "true")
    assert done.returncode == 2 and "--nodes" in done.stderr, done


# Ranks at full speed take the cores from whatever the test waits for.
SLOWLY = """
import sys, time
from drumbeat.cli import main
from drumbeat.train.step import Step
at_full_speed = Step.__call__
def slowly(*args, **more):
    time.sleep(0.1)
    return at_full_speed(*args, **more)
Step.__call__ = slowly
sys.exit(main(sys.argv[1:]))
"""
REPORTS = "runs/elastic-*/nodes/0/metrics.jsonl"


def losses(folder):
    """The losses that rank 0 reported, by step, of each attempt."""
    attempts = [{}]
    for line in (folder / "nodes/0/metrics.jsonl").read_text().splitlines(keepends=True):
        report = json.loads(line) if line.endswith("\n") else {}
        if report.get("rank") == 0 and "loss" in report:
            if report["step"] <= max(attempts[-1], default=0):
                attempts.append({})
            attempts[-1][report["step"]] = report["loss"]
    return attempts


def test_drumbeat_train_keeps_its_global_batch(drumbeat):
    """The steps that are made again have the losses that they had with two ranks."""
    train = (
        sys.executable, "-c", SLOWLY, "train", "llama", "--set", "batch=4", "length=16", "data=synthetic", "validation=0",
        "report_every=1", "save_every=20", "steps=100000", "warmup=1", "checkpoint=kept",
    )  # fmt: skip
    flags = ("--nodes", "1-2", "--ranks-per-node", 1, "--site", "localhost", "--oversubscribe", 4, "--name", "elastic")
    process = drumbeat.start("run", *flags, "--", *train)
    first = lambda: next((losses(file.parents[2])[0] for file in drumbeat.folder.glob(REPORTS)), {})  # noqa: E731
    wait_for(
        lambda: max(first(), default=0) % 20 in range(6, 15) and max(first()) > 20, 180, "steps after a checkpoint"
    )
    folder = drumbeat.run_folder()
    kill_node(folder.name, 1, ranks_of(folder, 1))
    # Its agent comes back after 2 s: on a busy machine before the other rank has ended, and then the next attempt has it, and
    # loses it again.
    wait_for(lambda: kill_node(folder.name, 1, []) or sizes(folder)[-1] == (1, 1), 180, "the attempt without it")
    wait_for(lambda: max(losses(folder)[-1], default=0) >= max(first()), 180, "the same steps again")
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=300)[0]
    assert (sizes(folder)[0], {*sizes(folder)}) == ((2, 2), {(2, 2), (1, 1)}), output
    before, again = first(), losses(folder)[-1]
    both = before.keys() & again.keys()
    assert len(both) >= 5 and all(abs(before[step] - again[step]) < 1e-3 for step in both), (before, again)
    assert len({round(before[step], 3) for step in both}) > 1
