"""What is left when everything that would have ended it was killed at once; fork chains; what has no effect here."""

import dataclasses
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from drumbeat.backends.local import without_effect
from drumbeat.base import proc
from drumbeat.base.order import Container, Option, Resources
from drumbeat.base.processes import become_subreaper, fork, sweep
from drumbeat.cli import main
from tests.conftest import marked, wait_for
from tests.runfolder.folders import order
from tests.runs.test_nobody_left import assert_all_gone, begin, tree


def test_desk_guards_and_agents_killed_at_once(drumbeat, tmp_path):
    """Nobody is left who could end the ranks' own sessions: `status` counts them, `cancel` ends them."""
    process, run_id = begin(drumbeat, tmp_path)
    roles = tree(run_id)
    victims = [*roles["agent"].values(), *roles["guard"].values(), process.pid]
    for pid in victims:
        os.kill(pid, signal.SIGSTOP)  # all of them at one moment, as far as they can tell
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not any(tree(run_id).values()), 120, "the end of guards and agents")
    assert marked(run_id), "children of the ranks in sessions of their own"
    said = drumbeat.here("status", run_id).stdout
    assert "of its processes are still here" in said and f"drumbeat cancel {run_id}" in said, said
    done = drumbeat("cancel", run_id)
    assert done.returncode == 0 and "left behind" in done.stdout, done
    assert_all_gone(run_id)
    assert drumbeat("cancel", run_id).returncode == 2


CHAINS = """
import os, time
for number in range(20):
    if os.fork() == 0:
        os.setsid()
        while not os.fork():
            time.sleep(0.005)
        os._exit(0)
time.sleep(600)
"""


def test_twenty_fork_chains_are_ended():
    """Each link forks the next one and exits: a moving target, of which one look at the process table sees only the past."""
    guard = os.fork()
    if guard == 0:
        left = ["the sweep did not come to its end"]
        try:
            become_subreaper()
            if os.fork() == 0:
                os.execv(sys.executable, [sys.executable, "-c", CHAINS])
            until = time.monotonic() + 2.0
            while time.monotonic() < until:
                os.waitpid(-1, os.WNOHANG)
            left = sweep(seconds=120.0)
        finally:  # never a second pytest
            os._exit(1 if left else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1]) == 0


def test_what_a_script_had_started_before_it_became_drumbeat_is_left_alone(drumbeat):
    """bash gives its last command its own process: what it had started are children of drumbeat then."""
    script = """sleep 300 & echo $! > job
    exec "$0" -m drumbeat run -- "$0" -c "raise SystemExit(3)" > >(sleep 1; cat > log) 2>&1"""
    done = subprocess.run(["bash", "-c", script, sys.executable], cwd=drumbeat.folder, timeout=300)
    job, log = int((drumbeat.folder / "job").read_text()), drumbeat.folder / "log"
    try:
        assert done.returncode == 3 and os.path.exists(f"/proc/{job}")
        wait_for(lambda: log.exists() and "exit code 3" in log.read_text(), what="the last lines in the log")
    finally:
        os.kill(job, signal.SIGKILL)


def test_a_group_that_holds_a_kept_child_is_not_killed_as_a_whole():
    guard = os.fork()
    if guard == 0:
        code = 1
        try:
            become_subreaper()
            kept = subprocess.Popen(
                ["sh", "-c", "(sleep 300 & echo $!); exec sleep 300"], stdout=subprocess.PIPE, start_new_session=True
            )
            orphan = int(kept.stdout.readline())  # in the kept one's group, and ours once the bracket has ended
            wait_for(lambda: orphan in proc.children(), what="it is ours")
            left = sweep(keep={kept.pid}, seconds=60.0)
            alive = kept.poll() is None
            kept.kill()
            kept.wait()
            code = 0 if alive and not left and not os.path.exists(f"/proc/{orphan}") else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1]) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the limit is another user's")
def test_a_fork_waits_for_room():
    first = os.fork()
    if first == 0:
        code = 1
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody has to be waited for
            os.setuid(64321)
            resource.setrlimit(resource.RLIMIT_NPROC, (2, 2))
            other = fork()
            if other == 0:
                time.sleep(300)
            try:
                if os.fork() == 0:
                    os._exit(0)
            except BlockingIOError:  # as it should be: two are all that there may be
                signal.signal(signal.SIGALRM, lambda *_: os.kill(other, signal.SIGKILL))
                signal.setitimer(signal.ITIMER_REAL, 0.3)
                if fork() == 0:
                    os._exit(0)
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) == 0


def test_what_has_no_effect_here_is_named(tmp_path):
    asked = Resources(
        account="a", memory="5G", exclusive=True, array="0-3", specific={"qos": "q"}, options=(Option("--mail-type=END", "job"),)
    )  # fmt: skip
    box = Container("apptainer", "x.sif", binds=("/data",))
    made = dataclasses.replace(order(tmp_path), resources=asked, modules=("m",), container=box)
    assert without_effect(made) == [
        "account",
        "memory",
        "exclusive",
        "array",
        "qos",
        "--mail-type=END",
        "modules",
        "binds",
    ]
    assert without_effect(order(tmp_path)) == []


def test_one_damaged_run_folder_breaks_no_view(drumbeat, monkeypatch, capsys):
    """Each file in turn is garbage: `list` shows what there is, and nothing prints a traceback."""
    assert drumbeat("run", "--", "true").returncode == 0
    whole = drumbeat.run_folder()
    monkeypatch.chdir(drumbeat.folder)
    for name in ("run.json", "order.json", "summary.json", "events.jsonl"):
        text = (whole / name).read_bytes()
        (whole / name).write_bytes(b'\xff\x00{"a":')
        for words in (["list"], ["status", str(whole)], ["diagnose", str(whole)]):
            code = main(words)
            said = capsys.readouterr().err
            assert "Traceback" not in said and code in (0, 1, 2), (name, words, said)
            assert words != ["list"] or code == 0, said
        (whole / name).write_bytes(text)
    assert main(["list"]) == 0 and "finished" in capsys.readouterr().out
