"""A stop signal reaches what trains, once, and the save gets the whole grace; nothing of an attempt lives on in the next."""

import json
import os
import signal
import subprocess
import sys
import time

from tests.conftest import marked, wait_for

SAVER = """
import os, signal, sys, time
signals = []
signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
mark = os.environ["DRUMBEAT_RUN"] + "-" + os.environ["NODE_RANK"] + "-" + os.environ.get("RANK", "")
open(f"ready-{mark}", "w").close()
while not signals:
    time.sleep(0.02)
while not os.path.exists("enough"):  # saves until the test says so
    time.sleep(0.05)
open(f"saved-{mark}", "w").write(str(len(signals)))
sys.exit(75)
"""


def saved(drumbeat):
    return [path.read_text() for path in sorted(drumbeat.folder.glob("saved-*"))]


def start(drumbeat, *words):
    (drumbeat.folder / "save.py").write_text(SAVER)
    (drumbeat.folder / "saver.sh").write_text(f"{sys.executable} save.py | cat\nexit ${{PIPESTATUS[0]}}\n")
    return drumbeat.start("run", "--nodes", 2, "--stop-grace", "300s", *words)


def wait_ready(drumbeat, count):
    wait_for(lambda: len(list(drumbeat.folder.glob("ready-*"))) == count, 120, "the ranks")


def saves_end(drumbeat, seconds=1.0):
    """Let the ranks finish saving, after a time in which a signal too many would have come."""
    time.sleep(seconds)
    (drumbeat.folder / "enough").touch()


def test_behind_a_shell_script(drumbeat):
    process = start(drumbeat, "--launcher", "once", "--", "bash", "saver.sh")
    wait_ready(drumbeat, 2)
    process.send_signal(signal.SIGTERM)
    saves_end(drumbeat)
    assert process.wait(120) == 75
    assert saved(drumbeat) == ["1", "1"]


def test_one_request_by_many_ways(drumbeat):
    """As on a scancel: every agent is signalled, again by srun, and the batch script writes a line, again and again."""
    process = start(drumbeat, "--ranks-per-node", 1, "--", sys.executable, "save.py")
    wait_ready(drumbeat, 2)
    folder = drumbeat.run_folder()
    agents = [
        json.loads(line)["pid"]
        for node in (0, 1)
        for line in (folder / f"nodes/{node}/events.jsonl").read_text().splitlines()
        if '"agent-started"' in line
    ]
    for pause in (0.0, 1.2, 0.3):
        time.sleep(pause)
        for pid in agents:
            os.kill(pid, signal.SIGTERM)
        with open(folder / "stop", "a") as file:
            file.write("TERM the job was asked to stop\n")
    saves_end(drumbeat)
    assert process.wait(120) == 75
    assert saved(drumbeat) == ["1", "1"]


def test_further_signals_to_the_desk_take_no_grace_away(drumbeat):
    """A wrapper, a scheduler or a closed terminal sends TERM and HUP again; only a second Ctrl-C is a second request."""
    process = start(drumbeat, "--ranks-per-node", 1, "--", sys.executable, "save.py")
    wait_ready(drumbeat, 2)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
        time.sleep(1.1)
    saves_end(drumbeat)
    assert process.wait(120) == 75
    assert saved(drumbeat) == ["1", "1"]


def test_a_cancelled_run_does_not_ask_to_come_back(drumbeat):
    process = start(drumbeat, "--ranks-per-node", 1, "--", sys.executable, "save.py")
    wait_ready(drumbeat, 2)
    client = drumbeat.start("cancel", drumbeat.run_folder().name)
    wait_for(lambda: "CANCEL" in (drumbeat.run_folder() / "stop").read_text(), what="the request")
    client.kill()  # the request stands, whether its client lives or not
    saves_end(drumbeat)
    assert process.wait(120) == 143
    assert saved(drumbeat) == ["1", "1"]
    assert json.loads((drumbeat.run_folder() / "summary.json").read_text())["outcome"] == "cancelled"


def test_a_desk_that_is_killed_leaves_the_ranks_their_grace(drumbeat):
    """Also where `drumbeat cancel` comes then: the agents are there, so nobody else ends what they look after."""
    process = start(drumbeat, "--ranks-per-node", 1, "--", sys.executable, "save.py")
    wait_ready(drumbeat, 2)
    folder = drumbeat.run_folder()
    process.kill()
    wait_for(lambda: '"stopping"' in (folder / "events.jsonl").read_text(), what="the lead to hear of it")
    told = drumbeat.here("status", folder.name).stdout
    assert "stopping" in told and "its agents end it" in told, told
    cancelling = drumbeat.start("cancel", folder.name)
    wait_for(lambda: "CANCEL" in (folder / "stop").read_text(), what="cancel to ask")
    saves_end(drumbeat)
    assert cancelling.wait(120) == 0 and "left behind" not in cancelling.stdout.read()
    assert saved(drumbeat) == ["1", "1"] and not marked(folder.name)
    cause = "the drumbeat command that had started it was killed, or its terminal was closed"
    wait_for((folder / "summary.json").exists, what="the summary")
    assert json.loads((folder / "summary.json").read_text())["stopped"].endswith(
        ": the drumbeat that had started it was gone"
    )
    for view in ("status", "diagnose"):
        assert cause in " ".join(drumbeat.here(view, folder.name).stdout.split()), view


def test_nothing_of_an_attempt_lives_on_in_the_next(drumbeat):
    (drumbeat.folder / "stale.sh").write_text(
        'if [ "$DRUMBEAT_ATTEMPT" = 0 ]; then\n'
        "  setsid sh -c 'while :; do echo old >> old.txt; sleep 0.1; done' &\n"
        "  until [ -s old.txt ]; do sleep 0.1; done; exit 1\n"
        "fi\n"
        "wc -l < old.txt > first; sleep 1; wc -l < old.txt > second\n"
    )
    done = drumbeat("run", "--restarts", 1, "--", "bash", "stale.sh")
    assert done.returncode == 0, done.stderr
    assert (drumbeat.folder / "first").read_text() == (drumbeat.folder / "second").read_text()
    assert not marked(drumbeat.run_folder().name)


def test_ranks_hear_an_interrupt_that_the_caller_ignores(drumbeat):
    script = "import signal; print('SIGINT', signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    done = subprocess.run(
        ["env", "--ignore-signal=INT", sys.executable, "-m", "drumbeat", "run", "--", sys.executable, "-c", script],
        cwd=drumbeat.folder, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "SIGINT True" in done.stdout
