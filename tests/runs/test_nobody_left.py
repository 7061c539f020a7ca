"""Whatever is killed, no process of the run is left: agent, guard, desk, both at once, a stopped agent, a failure."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drumbeat.agent.folder.child import NAME
from drumbeat.desk.foreground import Foreground
from drumbeat.runfolder.layout import RunFolder
from tests.conftest import marked, wait_for
from tests.runfolder.folders import order

AWKWARD = Path(__file__).parent / "awkward.py"


def begin(drumbeat, tmp_path, *words, nodes=2, grace="2s", env=None, prefix=()):
    """A run whose ranks have awkward children, up and running; (desk process, run id)."""
    place = tmp_path / "awkward"
    place.mkdir()
    env = {**os.environ, "AWKWARD": str(place), **(env or {})}
    argv = ("run", "--nodes", nodes, "--ranks-per-node", 2, "--stop-grace", grace, "--name", "awk", "--")
    process = drumbeat.start(*argv, sys.executable, AWKWARD, *words, env=env, prefix=prefix)
    wait_for(lambda: len(list(place.glob("*.ready"))) == 2 * nodes, what="the ranks")
    return process, drumbeat.run_folder().name


def words_of(pid):
    return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")


def parent_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]


def tree(run_id):
    """Role -> pids, from their command line: guards, agents (the children of guards), and what agents have forked, which has the
    same command line: the folder's child, and others that live shortly."""
    roles = {"guard": {}, "agent": {}, "folder": {}, "forked": {}}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            words, parent = words_of(name), parent_of(name)
            if "_agent" not in words or not any(run_id in word for word in words):
                continue
            comm = Path(f"/proc/{name}/comm").read_text().strip()
            if "_agent" not in words_of(parent):
                role = "guard"
            elif "_agent" not in words_of(parent_of(parent)):
                role = "agent"
            else:
                role = "folder" if comm == NAME else "forked"
        except OSError:
            continue
        roles[role][int(words[words.index("_agent") + 2])] = int(name)
    return roles


def assert_all_gone(run_id, seconds=120.0):
    wait_for(lambda: not marked(run_id) and not any(tree(run_id).values()), seconds, f"the end of {marked(run_id)}")


def test_failure_ends_every_process_soon(drumbeat, tmp_path):
    process, run_id = begin(drumbeat, tmp_path, "fail")
    assert len(marked(run_id)) > 20
    events = drumbeat.run_folder() / "nodes" / "0" / "events.jsonl"
    assert process.wait(120) == 7
    assert not marked(run_id)
    exited = [json.loads(line) for line in events.read_text().splitlines()]
    failed_at = next(event["t"] for event in exited if event["kind"] == "rank-exited" and event["exit_code"] == 7)
    ended_at = next(event["t"] for event in exited if event["kind"] == "agent-ended")
    assert ended_at - failed_at < 60, "a grace of 2 s, and a busy machine"
    summary = json.loads((drumbeat.run_folder() / "summary.json").read_text())
    assert summary["failure"]["rank"] == 1 and summary["exit_code"] == 7
    assert sum(each["count"] for each in summary["consequences"]) == 3


@pytest.mark.parametrize(
    "victim,node", [("agent", 0), ("agent", 1), ("guard", 0), pytest.param("guard", 1, marks=pytest.mark.proof)]
)
def test_killed_agent_or_guard(drumbeat, tmp_path, victim, node):
    process, run_id = begin(drumbeat, tmp_path)
    roles = tree(run_id)
    if (victim, node) == ("guard", 0):  # the lead's agent is slow to notice: it is not killed meanwhile
        os.kill(roles["agent"][0], signal.SIGSTOP)
    os.kill(roles[victim][node], signal.SIGKILL)
    if (victim, node) == ("guard", 0):
        lead = str(roles["agent"][0])
        wait_for(lambda: parent_of(lead) == str(process.pid), 120, "the lead's agent to be the desk's child")
        os.kill(roles["agent"][0], signal.SIGCONT)
    assert process.wait(120) != 0
    assert_all_gone(run_id)
    summary = json.loads((drumbeat.run_folder() / "summary.json").read_text())
    assert summary["outcome"] in ("failed", "cancelled") and summary["exit_code"] != 0
    if victim == "agent" and node == 1:
        assert summary["failure"]["code"] == "node-lost" and summary["failure"]["node"] == 1
    if victim == "guard" and node == 0:
        assert summary["failure"]["code"] == "guard-lost" and summary["exit_code"] == 143


def test_guard_and_agent_killed_at_once(drumbeat, tmp_path):
    process, run_id = begin(drumbeat, tmp_path)
    roles = tree(run_id)
    for role in ("guard", "agent"):
        os.kill(roles[role][1], signal.SIGKILL)
    assert process.wait(120) != 0
    assert_all_gone(run_id)


def test_killed_desk(drumbeat, tmp_path):
    process, run_id = begin(drumbeat, tmp_path, "ignore", grace="1s")
    process.kill()
    process.wait()
    assert_all_gone(run_id)
    summary = json.loads((drumbeat.run_folder() / "summary.json").read_text())
    assert summary["outcome"] == "cancelled" and summary["exit_code"] == 143
    (drumbeat.run_folder() / "summary.json").unlink()
    assert "cancelled" in drumbeat.here("status", run_id).stdout, "the events say so, too"


def test_desk_and_the_leads_guard_killed_at_once(drumbeat, tmp_path):
    process, run_id = begin(drumbeat, tmp_path, "ignore", grace="1s")
    os.kill(tree(run_id)["guard"][0], signal.SIGKILL)
    process.kill()
    process.wait()
    assert_all_gone(run_id)


def test_desk_killed_while_its_guards_start(drumbeat):
    process = drumbeat.start("run", "--nodes", 2, "--", sys.executable, "-c", "import time; time.sleep(600)")
    wait_for(drumbeat.runs, what="the run folder")
    run_id = drumbeat.run_folder().name
    until = time.monotonic() + 30
    while 1 not in tree(run_id)["guard"] and time.monotonic() < until:
        pass  # at once, before its interpreter is up
    process.kill()
    process.wait()
    assert_all_gone(run_id)


def test_a_silent_guard_is_killed(tmp_path):
    """Stopped together with its agent it ends nobody; the desk's own pause is nobody's silence."""
    guards = {node: subprocess.Popen(["sleep", "60"]) for node in (0, 1)}
    made = order(tmp_path)
    desk = Foreground(made, [0, 1], "", "")
    desk.guards, desk.heard, desk.looked = guards, {0: 100.0, 1: 100.0}, 100.0
    try:
        desk._end_silent(1000.0)
        assert [guard.poll() for guard in guards.values()] == [None, None]
        desk.heard = {0: 1000.0, 1: 1000.0}
        for now in range(1001, 1032):
            desk.heard[0] = float(now)
            desk._end_silent(float(now))
        assert guards[1].wait(120) == -signal.SIGKILL and guards[0].poll() is None
    finally:
        for guard in guards.values():
            guard.kill()
            guard.wait()


def test_stopped_agent_is_ended_by_the_guards_deadline(drumbeat, tmp_path):
    from tests.runs.own_order import start_with_timing

    place = tmp_path / "awkward"
    place.mkdir()
    env = {**os.environ, "AWKWARD": str(place)}
    command = (sys.executable, str(AWKWARD))
    process, run_id = start_with_timing(drumbeat, command, env, agent_deadline=8.0, lost_node=60.0)
    wait_for(lambda: len(list(place.glob("*.ready"))) == 4, 120, what="the ranks")
    os.kill(tree(run_id)["agent"][1], signal.SIGSTOP)
    assert process.wait(120) != 0
    assert_all_gone(run_id)
    summary = json.loads((drumbeat.folder / "runs" / run_id / "summary.json").read_text())
    assert summary["failure"]["code"] == "node-lost"


def test_a_silent_node_is_given_up(drumbeat, tmp_path):
    from tests.runs.own_order import start_with_timing

    command = (sys.executable, "-c", "import time; time.sleep(600)")
    # The guard ends the agent long after the lead gives it up: a lead that comes late does not count that time as silence.
    process, run_id = start_with_timing(drumbeat, command, dict(os.environ), agent_deadline=30.0, lost_node=2.0)
    wait_for(lambda: len(marked(run_id)) == 4, 120, what="the ranks")
    agent = tree(run_id)["agent"][1]
    os.kill(agent, signal.SIGSTOP)
    events = drumbeat.folder / "runs" / run_id / "events.jsonl"
    wait_for(lambda: "node-silent" in events.read_text(), 120, "the lead to notice by itself")
    wait_for(lambda: "silent for 4 s" in events.read_text(), 120, "the lead to give it up by itself")
    assert process.wait(120) != 0
    assert_all_gone(run_id)


@pytest.mark.parametrize("number,code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_stop_signal_to_the_desk(drumbeat, tmp_path, number, code):
    process, run_id = begin(drumbeat, tmp_path, nodes=1, prefix=("env", "--default-signal=HUP"))
    process.send_signal(number)
    assert process.wait(120) == code
    assert_all_gone(run_id)


def test_second_interrupt_ends_it_now(drumbeat, tmp_path):
    process, run_id = begin(drumbeat, tmp_path, "ignore", nodes=1, grace="600s")
    process.send_signal(signal.SIGINT)
    events = drumbeat.run_folder() / "events.jsonl"
    wait_for(lambda: '"stopping"' in events.read_text(), what="the first interrupt to be heeded")  # two at once are one
    time.sleep(1.5)  # a second one at once may be that of a wrapper
    assert process.poll() is None and marked(run_id), "the ranks have their grace"
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    assert_all_gone(run_id)


@pytest.mark.parametrize(
    "delay,ignored",
    [
        *((delay, False) for delay in (0.25, 0.6, 1.2)),
        (0.4, True),
        *(pytest.param(delay, False, marks=pytest.mark.proof) for delay in (0.1, 0.4, 0.5, 0.7, 0.9)),
        *(pytest.param(delay, True, marks=pytest.mark.proof) for delay in (0.1, 0.7)),
    ],
)
def test_an_interrupt_at_any_moment(drumbeat, delay, ignored):
    """Before the folder is made, between folder and guards, before the muster, after it: nobody is left. A script's
    `drumbeat run &` starts with SIGINT ignored, and must hear it all the same."""
    how = "--ignore-signal=INT" if ignored else "--default-signal=INT"
    words = ("run", "--nodes", 2, "--stop-grace", "1s", "--", sys.executable, "-c", "import time; time.sleep(600)")
    process = drumbeat.start(*words, prefix=("env", how))
    wait_for(lambda: "drumbeat" in Path(f"/proc/{process.pid}/cmdline").read_text().split("\0"), what="Python")
    time.sleep(delay)
    if ignored:  # an interrupt before Python runs its first line finds the caller's setting
        wait_for(lambda: _handles(process.pid, signal.SIGINT), what="a handler")
    process.send_signal(signal.SIGINT)
    assert process.wait(120) != 0
    for folder in drumbeat.runs():
        assert_all_gone(folder.name)


def _handles(pid, number):
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


def test_the_lead_is_told_once_of_a_node_that_ended_early(tmp_path):
    desk = Foreground(order(tmp_path), [0, 1], "", "")
    desk.folder = RunFolder(str(tmp_path))
    for codes in ({}, {1: 0}, {1: 70}, {1: 70}, {0: 1, 1: 70}):
        desk._tell_lead(codes)
    assert (tmp_path / "stop").read_text().splitlines() == [
        "LOST the agent of node 1 ended with 70 before all nodes had joined"
    ]


def test_a_node_that_joined_says_nothing_of_how_the_others_came_together(tmp_path):
    joined = Foreground(order(tmp_path), [1], "", "")
    joined.folder = RunFolder(str(tmp_path))
    joined._tell_lead({1: 143})
    assert not (tmp_path / "stop").exists()
