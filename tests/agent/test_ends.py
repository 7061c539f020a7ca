"""Storage that hangs holds a child with a deadline, never the agent. A fifo that nobody serves blocks like a hung file system."""

import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from drumbeat.agent import member_side
from drumbeat.agent.member_side import MemberSide
from drumbeat.agent.ranks.ends import Ends, Exit
from drumbeat.agent.ranks.explain import Explainer
from drumbeat.agent.ranks.launchers import launcher_of
from drumbeat.agent.ranks.start import start
from drumbeat.forked import write_in_child
from drumbeat.plan.argv import Process
from drumbeat.runfolder.layout import NodeFolder
from tests.agent.test_lead import order
from tests.conftest import wait_for

FAILED, KILLED = 1 << 8, int(signal.SIGKILL)  # as waitpid gives them


@pytest.fixture
def node(tmp_path):
    folder = NodeFolder(str(tmp_path / "nodes" / "0"), 0)
    os.makedirs(folder.attempt(0))
    return folder


def ends_of(node, told, within=30.0):
    asked = order(command=("python", "train.py"))
    launcher = launcher_of(asked, node, node, "", node.path)
    return Ends(launcher, Explainer(asked, node, launcher, 0, node.path), 0, told.append, within)


def exit_of(rank, status, by_us=False):
    return Exit(Process(rank, rank, ("python",)), status, 100.0 + rank, 7.5, by_us)


def finish(ends):
    def over():
        ends.poll()
        return not ends

    wait_for(over, 60, "the ends")


def test_a_failure_is_read_by_a_child_and_ends_keep_their_order(node):
    told = []
    ends = ends_of(node, told)
    with open(node.log(0, 1, "err"), "w", encoding="utf-8") as file:
        file.write('Traceback (most recent call last):\n  File "x.py", line 3, in <module>\nValueError: odd\n')
    ends.add(exit_of(0, 0))
    assert [(each.end.rank, each.end.exit_code) for each in told] == [(0, 0)] and not ends  # nothing to read
    ends.add(exit_of(1, FAILED))
    ends.add(exit_of(2, 0))
    assert len(told) == 1 and ends
    finish(ends)
    assert [(each.end.rank, each.end.exit_code, each.end.at) for each in told[1:]] == [(1, 1, 101.0), (2, 0, 102.0)]
    assert "ValueError: odd" in told[1].end.finding.title and told[2].end.finding is None
    assert told[1].seconds == 7.5 and not told[1].by_us


def test_a_log_that_hangs_is_given_up_and_said(node):
    told = []
    ends = ends_of(node, told, within=0.5)
    os.mkfifo(node.log(0, 3, "err"))
    ends.add(exit_of(3, FAILED))
    ends.add(exit_of(4, KILLED, by_us=True))
    begin = time.monotonic()
    ends.poll()
    assert time.monotonic() - begin < 20 and not told and ends.pid  # opening it would block for ever
    finish(ends)
    assert [(each.end.rank, each.end.exit_code, each.end.signal) for each in told] == [(3, 1, None), (4, None, 9)]
    finding = told[0].end.finding
    assert "could not be read within 0.5 s" in finding.cause and finding.severity == "error"
    assert told[1].end.finding.code == "stopped"  # drumbeat's own kill needs no log


def test_whoever_leaves_waits_for_no_log(node):
    told = []
    ends = ends_of(node, told)
    os.mkfifo(node.log(0, 3, "err"))
    ends.add(exit_of(3, FAILED))
    ends.poll()
    ends.add(exit_of(4, FAILED))
    ends.give_up()
    assert [each.end.rank for each in told] == [3, 4] and not ends and not ends.pid


def test_a_process_opens_its_logs_itself(node):
    os.mkfifo(node.log(0, 0, "err"))
    begin = time.monotonic()
    pid = start([sys.executable, "-V"], os.environ, "/", node.log(0, 0, "out"), node.log(0, 0, "err"))
    assert time.monotonic() - begin < 20
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)  # it waits
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_errors_of_a_writing_child_are_the_callers(tmp_path):
    seen = []
    with pytest.raises(FileNotFoundError, match="gone"):
        write_in_child(lambda: os.mkdir(tmp_path / "gone" / "x"), 30.0, lambda: None, "here")
    with pytest.raises(TimeoutError, match="not answered for 0.3 s"):
        write_in_child(lambda: time.sleep(600), 0.3, lambda: seen.append(1), str(tmp_path))
    assert seen
    write_in_child(lambda: os.mkdir(tmp_path / "x"), 30.0, lambda: None, "here")
    assert (tmp_path / "x").is_dir()


def test_a_member_leaves_although_its_files_hang(node, monkeypatch):
    """Where nodes share no storage, the files go to the lead; a file that cannot be read keeps nobody."""
    monkeypatch.setattr(member_side, "_LEAVE", 0.2)
    os.mkfifo(os.path.join(node.path, "a.log"))
    beats, closed = [], []
    up = SimpleNamespace(closed=False, wants_write=False, send=lambda part: None, close=lambda: closed.append(1))
    side = MemberSide.__new__(MemberSide)
    side.up, side.shared_folder = up, False
    side.agent = SimpleNamespace(node=SimpleNamespace(folder=node), beat=lambda: beats.append(1))
    side.leave()
    assert beats and closed and side.up is None
