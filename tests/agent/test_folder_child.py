"""The process that writes the run folder: in order, nothing lost, and whoever hands it something never waits."""

import json
import os
import selectors
import signal
import time

import pytest

from drumbeat.agent.agent import Agent
from drumbeat.agent.folder import child as folder_child
from drumbeat.agent.folder.child import FolderChild, member_folder
from drumbeat.agent.wire.messages import Welcome
from drumbeat.runfolder.files import EventLog
from drumbeat.runfolder.layout import StopFile, ask_to_stop
from tests.agent.test_lead import order
from tests.conftest import wait_for


@pytest.fixture
def child():
    made = []

    def make(*words):
        made.append(FolderChild(*words))
        return made[-1]

    yield make
    for each in made:
        pids = [pid for pid in (each.pid, each.printed.pid) if pid]
        each.close()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_writes_come_in_order_and_whole(child, tmp_path):
    one = child()
    for number in range(6_000):
        one.append(str(tmp_path / f"{number % 3}"), f"{number} {'x' * 50}\n".encode())
    one.replace(str(tmp_path / "whole"), "text\n")
    assert one.flush(60, lambda: None)
    for index in range(3):
        lines = (tmp_path / f"{index}").read_text().splitlines()
        assert [int(line.split()[0]) for line in lines] == list(range(index, 6_000, 3))
    assert (tmp_path / "whole").read_text() == "text\n"


def test_storage_that_hangs_holds_only_the_child(child, tmp_path, monkeypatch):
    monkeypatch.setattr(folder_child, "STALLED", 0.2)
    monkeypatch.setattr(folder_child, "FULL", 1 << 20)
    one = child()
    os.kill(one.pid, signal.SIGSTOP)  # as if the storage held it
    one.append(str(tmp_path / "hangs"), b"first\n")
    begin = time.monotonic()
    for number in range(4000):
        one.append_if_room(str(tmp_path / "after"), b"%d %s\n" % (number, b"x" * 1000))
        one.pump()
    assert time.monotonic() - begin < 120 and one.full and one.dropped > 1 << 20
    wait_for(lambda: one.stalled(time.monotonic()) > 0, what="the stall")
    assert not one.flush(0.3, lambda: None)
    os.kill(one.pid, signal.SIGCONT)
    assert one.flush(120, lambda: None) and (tmp_path / "hangs").read_bytes() == b"first\n"
    assert one.stalled(time.monotonic()) == 0
    kept = (tmp_path / "after").read_text().splitlines()
    assert [int(line.split()[0]) for line in kept] == list(range(len(kept))) and len(kept) > 900


def test_an_error_reaches_who_asked(child, tmp_path):
    one = child()
    one.append(str(tmp_path / "missing" / "file"), b"x")
    with pytest.raises(OSError) as raised:
        one.flush(30, lambda: None)
    assert raised.value.filename == str(tmp_path / "missing" / "file")


def test_one_that_is_killed_is_replaced(child, tmp_path):
    one = child()
    os.kill(one.pid, signal.SIGSTOP)
    one.append(str(tmp_path / "a"), b"1\n")
    os.kill(one.pid, signal.SIGKILL)
    os.waitpid(one.pid, 0)
    assert one.flush(30, lambda: None)
    assert (tmp_path / "a").read_text() == "1\n"


def test_it_reads_what_ranks_print_and_the_stop_file(child, tmp_path):
    (tmp_path / "rank-0.out").write_text("{'loss': 1.25, 'grad_norm': 2.0, 'learning_rate': 1e-4, 'epoch': 0.1}\n")
    one = child(StopFile(str(tmp_path / "stop")))
    one.read_printed(str(tmp_path), final=True)
    assert one.flush(30, lambda: None)
    assert [record["loss"] for record in one.take_records()] == [1.25] and not one.take_records()
    ask_to_stop(str(tmp_path / "stop"), "CANCEL", "a test")
    wait_for(lambda: one.pump() or one.stops, what="the line")
    assert one.take_stops() == [("CANCEL", "a test")]


def test_the_death_of_the_process_that_reads_printed_lines_costs_no_record(child, tmp_path):
    """What is appended afterwards is written, and lines that are printed afterwards are read, once."""
    log = tmp_path / "rank-0.out"
    log.write_text("iter 1: loss 3.5, time 1.50ms, mfu 1.00%\n")
    one = child()
    one.read_printed(str(tmp_path))
    assert one.flush(30, lambda: None) and [record["step"] for record in one.take_records()] == [1]
    os.kill(one.printed.pid, signal.SIGKILL)
    one.append(str(tmp_path / "events"), b"1\n")
    one.read_printed(str(tmp_path))
    assert one.flush(30, lambda: None) and (tmp_path / "events").read_text() == "1\n"
    wait_for(lambda: one.take_records() or not one.printed.pid, what="its end to be noticed")
    assert one.printed.unread == 1 and one.printed.why_unread == "the process that reads them has died"
    one.read_printed(str(tmp_path))
    assert one.flush(30, lambda: None)
    with log.open("a") as file:
        file.write("iter 2: loss 3.4, time 1.50ms, mfu 1.00%\n")
    one.read_printed(str(tmp_path), final=True)
    assert one.flush(30, lambda: None) and [record["step"] for record in one.take_records()] == [2]


def test_a_printed_line_that_cannot_be_read_is_told_of_once_and_ends_nothing(tmp_path, monkeypatch, capfd):
    def fails(*_):
        raise RuntimeError("unlucky")

    monkeypatch.setattr("drumbeat.metrics.layout.read", fails)
    (tmp_path / "rank-0.out").write_text("step 1 loss 2.5\n" * 3)
    agent = Agent.__new__(Agent)  # its signal handlers are not for a test
    agent.number, agent.order, agent.beat = 0, order(), lambda: None
    agent.child, agent.stalled, agent.without_storage = None, False, False
    agent.selector = selectors.DefaultSelector()
    one = agent.start_child()
    one.read_printed(str(tmp_path), final=True)
    one.append(str(tmp_path / "after"), b"1\n")
    assert one.flush(120, lambda: None) and (tmp_path / "after").read_text() == "1\n"
    assert one.take_records() == []
    printed = one.printed.pid
    agent.close_folder()
    for pid in (one.pid, printed):
        os.waitpid(pid, 0)
    agent.selector.close()
    said = "printed lines not read, by a defect of drumbeat: 3; the first: RuntimeError: unlucky, in 'step 1 loss 2.5'"
    assert capfd.readouterr().err.count(said) == 1


def test_events_stay_in_order(child, tmp_path):
    one = child()
    log = EventLog(str(tmp_path / "events.jsonl"), 0, one.append)
    for number in range(100):
        log.write("resumed", {"seconds": float(number)})
    assert one.flush(30, lambda: None)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["seq"] for event in events] == list(range(100))


def test_storage_that_begins_to_hang_at_the_end_is_said_and_waited_for_once(child, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(folder_child, "STALLED", 0.2)
    agent = Agent.__new__(Agent)  # its signal handlers are not for a test
    agent.number, agent.order, agent.beat = 0, order(), lambda: None
    agent.child, agent.stalled, agent.without_storage = child(), False, False
    os.kill(agent.child.pid, signal.SIGSTOP)
    agent.child.append(str(tmp_path / "log"), b"last words\n")
    assert not agent.flush(1.5) and agent.stalled
    asked = []
    monkeypatch.setattr(agent.child, "flush", lambda seconds, meanwhile: asked.append(seconds))
    agent.flush(60.0)
    assert asked == [3.0]  # known by now
    monkeypatch.undo()
    os.kill(agent.child.pid, signal.SIGCONT)
    assert agent.flush(120.0) or agent.flush(120.0)  # the first one is short
    said = capfd.readouterr().err
    assert said.count("its storage hangs; its last writes are waited for, 1.5 s at most") == 1
    assert (tmp_path / "log").read_text() == "last words\n"


def test_a_member_that_starts_again_does_not_take_its_own_folder_for_the_leads(tmp_path):
    """In pods both have the same path; the lead's own would not be gathered from."""
    asked = order(folder=str(tmp_path / "r"))
    for _ in range(2):
        found = member_folder(Welcome("r", asked.folder, "h0"), asked, 1)
        assert (found.path, found.shared, found.problem) == (asked.folder, False, "")
