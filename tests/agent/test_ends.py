"""Storage that hangs holds a child with a deadline, never the agent. A fifo that nobody serves blocks like a hung file system."""

import os
import signal
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from drumbeat.agent import agent as agent_module
from drumbeat.agent import lead_side, member_side
from drumbeat.agent.agent import Agent
from drumbeat.agent.folder import child
from drumbeat.agent.loop import Loop
from drumbeat.agent.member_side import MemberSide
from drumbeat.agent.ranks.ends import Ends, Explainer
from drumbeat.agent.ranks.launchers import launcher_of
from drumbeat.agent.ranks.start import plain_end, start
from drumbeat.agent.wire.messages import Welcome
from drumbeat.base import processes
from drumbeat.base.processes import in_child, on_storage
from drumbeat.base.signals import EXIT_STORAGE, EXIT_TIME_LIMIT
from drumbeat.inspector.record import Known
from drumbeat.runfolder.layout import NodeFolder, RunFolder
from drumbeat.runfolder.summary import RunRecord, read_run_record, write_run_record
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
    return Ends(launcher, Explainer(asked, node, launcher, 0, node.path), 0, told.append, Known(), within)


def exit_of(rank, status, by_us=False):
    return replace(plain_end(rank, status, 100.0 + rank), since=99.0 + rank, seconds=7.5, by_us=by_us)


def finish(ends):
    def over():
        ends.poll()
        return not ends

    wait_for(over, what="the ends")


def test_a_failure_is_read_by_a_child_and_ends_keep_their_order(node):
    told = []
    ends = ends_of(node, told)
    with open(node.log(0, 1, "err"), "w", encoding="utf-8") as file:
        file.write('Traceback (most recent call last):\n  File "x.py", line 3, in <module>\nValueError: odd\n')
    ends.add(exit_of(0, 0, by_us=True))
    assert [(each.rank, each.exit_code) for each in told] == [(0, 0)] and not ends  # nothing to read
    ends.add(exit_of(1, FAILED))
    ends.add(exit_of(2, 0))
    assert len(told) == 1 and ends
    finish(ends)
    assert [(each.rank, each.exit_code, each.at) for each in told[1:]] == [(1, 1, 101.0), (2, 0, 102.0)]
    assert "ValueError: odd" in told[1].finding.title and told[2].finding is None
    assert told[1].seconds == 7.5 and not told[1].by_us


def test_a_rank_that_ends_with_0_is_heard_and_one_whose_log_hangs_ends_all_the_same(node):
    told = []
    ends = ends_of(node, told, within=60.0)
    with open(node.log(0, 0, "err"), "w", encoding="utf-8") as file:
        file.write("ERROR: training failed: KeyError('labels')\n")
    os.utime(node.log(0, 0, "err"), (100.0, 100.0))
    ends.add(exit_of(0, 0))
    finish(ends)
    hung = ends_of(node, told, within=0.5)
    os.mkfifo(node.log(0, 1, "err"))
    hung.add(exit_of(1, 0))
    finish(hung)
    assert [(each.rank, each.exit_code) for each in told] == [(0, 0), (1, 0)]
    words = told[0].finding
    assert (words.code, words.title) == ("caught-error", "ERROR: training failed: KeyError('labels')")
    assert words.evidence[0].file == "attempt-0/rank-0.err" and told[1].finding is None


def test_a_log_that_hangs_is_given_up_and_said(node):
    told = []
    ends = ends_of(node, told, within=0.5)
    os.mkfifo(node.log(0, 3, "err"))
    ends.add(exit_of(3, FAILED))
    ends.add(exit_of(4, KILLED, by_us=True))
    begin = time.monotonic()
    ends.poll()
    assert time.monotonic() - begin < 120 and not told and ends.pid  # opening it would block for ever
    finish(ends)
    assert [(each.rank, each.exit_code, each.signal) for each in told] == [(3, 1, None), (4, None, 9)]
    finding = told[0].finding
    assert "could not be read within 0.5 s" in finding.cause and finding.severity == "error"
    assert finding.unseen == ("the rank's log",)
    assert told[1].finding.code == "stopped"  # drumbeat's own kill needs no log


def test_a_child_that_computes_on_a_busy_machine_has_longer_than_one_that_hangs(monkeypatch):
    def computes(seconds):
        while time.process_time() < seconds:  # a child's begins with 0
            pass
        return b"read"

    monkeypatch.setattr(processes, "_STARVED", 1000)
    assert in_child(lambda: computes(0.5), 0.3, lambda: None) == b"read"
    begin = time.monotonic()
    assert in_child(lambda: signal.pause() or b"", 0.1, lambda: None) is None and time.monotonic() - begin < 60
    monkeypatch.setattr(processes, "_STARVED", 2)
    assert in_child(lambda: computes(1e6), 0.1, lambda: None) is None, "but not for ever"


def test_whoever_leaves_waits_for_no_log(node):
    told = []
    ends = ends_of(node, told)
    os.mkfifo(node.log(0, 3, "err"))
    ends.add(exit_of(3, FAILED))
    ends.poll()
    ends.add(exit_of(4, FAILED))
    ends.give_up()
    assert [each.rank for each in told] == [3, 4] and not ends and not ends.pid


def test_a_process_opens_its_logs_itself(node):
    os.mkfifo(node.log(0, 0, "err"))
    begin = time.monotonic()
    pid = start([sys.executable, "-V"], os.environ, "/", node.log(0, 0, "out"), node.log(0, 0, "err"))
    assert time.monotonic() - begin < 120
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)  # it waits
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_errors_of_a_writing_child_are_the_callers(tmp_path):
    seen = []
    with pytest.raises(FileNotFoundError, match="gone"):
        on_storage(lambda: os.mkdir(tmp_path / "gone" / "x"), 30.0, lambda: None, "here")
    with pytest.raises(TimeoutError, match="not answered for 0.3 s"):
        on_storage(lambda: time.sleep(600), 0.3, lambda: seen.append(1), str(tmp_path))
    assert seen
    on_storage(lambda: os.mkdir(tmp_path / "x"), 30.0, lambda: None, "here")
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


def hung_agent(beats, said, **known):
    """As much of an agent as its sides need to open the run folder; its storage has half a second to answer."""
    return SimpleNamespace(
        number=1, exit_code=None, complain=said.append, selector=None, token="", **known,
        on_storage=lambda work, path: on_storage(work, 0.5, lambda: beats.append(1), path),
    )  # fmt: skip


def hang(*_):
    time.sleep(600)


def test_a_member_welcomed_to_a_folder_that_hangs_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "is_folder_of", hang)
    beats, said = [], []
    side = MemberSide(hung_agent(beats, said, order=order(folder=str(tmp_path / "own"))))
    with pytest.raises(TimeoutError, match="not answered for 0.5 s"):
        side._welcome(Welcome("r", str(tmp_path), "h0"))
    assert beats and not (tmp_path / "own").exists()


def test_a_member_uses_the_leads_folder_where_it_sees_it(tmp_path):
    (tmp_path / "run").mkdir()
    write_run_record(RunFolder(str(tmp_path / "run")), RunRecord("r"))
    opened, said = [], []
    agent = hung_agent([], said, order=order(folder=str(tmp_path / "own")))
    agent.on_storage = lambda work, path: on_storage(work, 60.0, lambda: None, path)
    agent.open_folder = lambda folder: opened.append(folder.path)
    side = MemberSide(agent)
    side._welcome(Welcome("r", str(tmp_path / "run"), "h0"))
    assert opened == [str(tmp_path / "run")] and side.shared_folder and not (tmp_path / "own").exists()
    side._welcome(Welcome("another", str(tmp_path / "run"), "h0"))
    assert opened[1:] == [str(tmp_path / "own")] and not side.shared_folder and not said
    record = read_run_record(str(tmp_path / "own"))
    assert (record.run_id, record.lead) == ("another", "h0") and (tmp_path / "own" / "order.json").exists()


def led(tmp_path, *hanging, **changes):
    """The exit code of a real lead's loop, in a process of its own; these functions that it calls hang."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            agent_module._OPEN, lead_side._PACKAGES = 60.0 if "all_versions" in hanging else 1.0, 1.0
            for name in hanging:
                setattr(lead_side, name, hang)
            _, beat_fd = os.pipe()
            plain = {"nodes": 1, "ranks_per_node": 1, "command": ("true",), "checks": {"preflight": "off"}}
            asked = order(folder=str(tmp_path), **{**plain, **changes})
            code = Loop(Agent(asked, 0, "t", "", beat_fd, lambda message: None, lambda folder, run: None)).run()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_lead_whose_stop_file_hangs_says_so_and_ends(tmp_path, capfd):
    os.mkfifo(tmp_path / "stop")
    assert led(tmp_path) == EXIT_STORAGE
    assert "the storage has not answered for 1 s" in capfd.readouterr().err


@pytest.mark.parametrize(
    "events, start, line, code",
    [
        (False, 0, "CANCEL drumbeat cancel", 143),  # while the job started, before its lead was there
        (False, 0, "USR2 Slurm ends this job in 60 s", EXIT_TIME_LIMIT),
        (True, 1, "TERM Slurm ends this job", 0),  # it has, and the scheduler has started it again
        (False, 1, "TERM Slurm ends this job", 0),  # the same, and no lead had begun
        (True, 0, "LOST node 1", 0),  # a second lead in the same start of the job
        (True, 1, "CANCEL", 143),  # a cancelled run does not come back
    ],
)
def test_what_the_stop_file_says_before_the_lead_begins(tmp_path, events, start, line, code):
    write_run_record(RunFolder(str(tmp_path)), RunRecord("r"))
    (tmp_path / "stop").write_text(line + "\n")
    if events:
        (tmp_path / "events.jsonl").touch()
    assert led(tmp_path, command=("touch", str(tmp_path / "ran")), start=start) == code
    assert (tmp_path / "ran").exists() == (code == 0)


def test_a_lead_whose_folder_hangs_at_the_start_says_so_and_ends(tmp_path, capfd):
    assert led(tmp_path, "earlier_starts") == EXIT_STORAGE
    assert "the storage has not answered for 1 s" in capfd.readouterr().err


def test_a_run_goes_on_without_the_versions_of_packages_that_hang(tmp_path, capfd):
    write_run_record(RunFolder(str(tmp_path)), RunRecord("r"))
    code = led(tmp_path, "all_versions")
    said = capfd.readouterr().err
    assert code == 0, said
    assert "versions of installed packages are not recorded" in said
