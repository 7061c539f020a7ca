"""The child that samples a node: it holds nothing of its agent's, heeds only its end, and says at the end how it was."""

import json
import os
import signal
import socket
import sys

from drumbeat.agent.member.monitor import NAME, MonitorProcess
from drumbeat.base.proc import open_files
from drumbeat.machine.gather import gather
from drumbeat.machine.host import LiveHost
from drumbeat.runfolder.layout import NodeFolder
from tests.conftest import wait_for
from tests.plan.making import order


def samples(folder):
    try:
        with open(folder.telemetry, encoding="utf-8") as file:
            return [json.loads(line) for line in file]
    except FileNotFoundError:
        return []


def test_its_life(tmp_path):
    folder = NodeFolder(str(tmp_path), 3)
    facts = gather(LiveHost())
    with socket.socket() as line:
        monitor = MonitorProcess(folder, facts, order(emulated=False), lambda folder, run: None)
        pid = monitor.pid
        wait_for(lambda: samples(folder), what="the first sample")
        with open(f"/proc/{pid}/comm") as file:
            assert file.read().strip() == NAME
        assert set(open_files(pid)) == {os.devnull, folder.agent_log}, line
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):  # meant for the ranks
            os.kill(pid, number)
        monitor.end()
    assert monitor.pid == 0 and not os.path.exists(f"/proc/{pid}")
    first, *_, last = samples(folder)
    assert (first["node"], last["host"]) == (3, facts.host) and last["t"] >= first["t"]


def test_it_says_why_the_text_file_cannot_be_written(drumbeat, tmp_path):
    """In the log that docs/watch.md names; the rank waits for it."""
    rank = (
        "import glob, os, time\nuntil = time.time() + 120\n"
        "while time.time() < until and not any(map(os.path.getsize, glob.glob('runs/*/nodes/0/agent.log'))): time.sleep(0.1)"
    )
    done = drumbeat("run", "--textfile", tmp_path / "nowhere", "--", sys.executable, "-c", rank)
    assert done.returncode == 0, done.stderr
    assert f"cannot write {tmp_path}/nowhere/" in (drumbeat.run_folder() / "nodes/0/agent.log").read_text()


def test_one_machine_needs_one(tmp_path):
    assert MonitorProcess(NodeFolder(str(tmp_path), 1), None, order(emulated=True), lambda folder, run: None).pid == 0


def test_what_it_dies_of_is_written_down(tmp_path):
    folder = NodeFolder(str(tmp_path), 0)
    broken = MonitorProcess(folder, None, order(emulated=False), lambda folder, run: None)
    assert os.waitstatus_to_exitcode(os.waitpid(broken.pid, 0)[1]) == 1
    with open(folder.agent_log, encoding="utf-8") as file:
        assert "AttributeError" in file.read()
