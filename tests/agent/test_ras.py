"""NCCL's RAS service is asked when steps stop coming: a stand-in speaks its protocol, hostile ones cost a deadline."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from drumbeat.agent.watchers.contract import Saw
from drumbeat.agent.watchers.hang import Hang
from drumbeat.agent.watchers.hang_verdict import Silence, judge, with_ras
from drumbeat.inspector import ras
from drumbeat.inspector.ras import RasNote, address_of, ask, notes
from drumbeat.inspector.record import RankLook

# In the form of NCCL's text: made for these tests.
ANSWER = """NCCL version 2.27.5 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         4         8         8   RUNNING  INCOMPLETE,MISMATCH

Errors
======

#0-0 (9c1f0a33b1d2e4f5) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 5 -- GPU 1 managed by process 105 on node 10.0.0.2

#0-0 (9c1f0a33b1d2e4f5) ERROR
  Asynchronous error on 1 rank
  Rank 7 reported Unhandled system error -- GPU 3 managed by process 107 on node 10.0.0.2

Warnings
========

#0-0 (9c1f0a33b1d2e4f5) MISMATCH
  Communicator ranks have different AllReduce operation counts
  5 ranks have launched up to operation 12
  Rank 2 has launched up to operation 11 -- GPU 2 managed by process 102 on node 10.0.0.1

  Communicator ranks have different Broadcast operation counts
  6 ranks have launched up to operation 4
  Rank 2 has not launched any operations -- GPU 2 managed by process 102 on node 10.0.0.1

"""


class StandIn:
    """Speaks RAS's protocol, or whatever `answer` does instead."""

    def __init__(self, answer=None):
        self.answer = answer or self.speak
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.heard = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(sock,), daemon=True).start()

    def _one(self, sock):
        try:
            self.answer(sock)
            sock.close()
        except OSError:
            pass

    def speak(self, sock):
        for line in sock.makefile("r", newline="\n"):
            self.heard.append(line.strip())
            word = line.strip().lower()
            if word.startswith("client protocol "):
                sock.sendall(b"SERVER PROTOCOL 2\n")
            elif word.startswith("timeout "):
                sock.sendall(b"OK\n")
            elif word.endswith("status"):
                sock.sendall(ANSWER.encode())
                sock.shutdown(socket.SHUT_RDWR)
                return


def test_the_stand_in_is_asked_and_understood():
    service = StandIn()
    found = notes(ask(service.address) or "")
    assert service.heard == ["CLIENT PROTOCOL 2", "TIMEOUT 1", "VERBOSE STATUS"]
    named = {(note.rank, note.pid, note.what): note.text for note in found}
    assert set(named) == {(5, 105, ras.NO_ANSWER), (7, 107, ras.ERROR), (2, 102, ras.BEHIND)}
    behind = [note.text for note in found if note.what == ras.BEHIND]
    assert "AllReduce up to number 11, others up to 12" in behind[0] and "no Broadcast, others up to 4" in behind[1]
    assert "Unhandled system error" in named[7, 107, ras.ERROR]


def _silent(sock):
    time.sleep(30)


def _gone(sock):
    pass


def _garbage(sock):
    sock.sendall(os.urandom(4096))


def _half(sock):
    sock.recv(100)
    sock.sendall(b"SERVER PROTOCOL 2\n")
    sock.recv(100)
    sock.sendall(b"OK\n#0-0 (9c1f) MISMATCH\n  Communicator ranks have different AllReduce operation counts\n  Rank 99")
    time.sleep(30)


def _endless(sock):
    sock.recv(100)
    sock.sendall(b"SERVER PROTOCOL 2\n")
    sock.recv(100)
    sock.sendall(b"OK\n")
    while True:
        sock.sendall(b"x" * 65536)


@pytest.mark.parametrize("answer", [_silent, _garbage, _half, _endless, _gone], ids=lambda each: each.__name__)
def test_silence_and_garbage_are_harmless(answer):
    service = StandIn(answer)
    begin = time.monotonic()
    assert notes(ask(service.address, deadline=0.5) or "") == []
    assert time.monotonic() - begin < 25  # the deadline, on a crowded machine: less than the silence of 30 s


def test_nobody_listens_or_somebody_else_does(monkeypatch):
    service = StandIn()
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert ask(service.address) is None and not service.heard
    monkeypatch.undo()
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    assert ask(address) is None


def test_hostile_lines_name_nobody():
    head = "#0-0 (9c1f0a33b1d2e4f5) MISMATCH\n  Communicator ranks have different AllReduce operation counts\n"
    end = "-- GPU 2 managed by process 102 on node 10.0.0.1"
    for line in (
        f"  Rank {'9' * 400} has launched up to operation 3 {end}",
        f"  Rank 2 has launched up to operation {'9' * 400} {end}",
        "  Rank 2 has launched up to operation 3 -- GPU 2 managed by process x on node y",
        "  Rank 2 -- [process information not found]",
        f"  Rank -1 has launched up to operation 3 {end}",
        "\0" * 10_000,
        f"  Rank 2 reported {'x' * 10_000}",
    ):
        assert notes(head + line + "\n") == [], line
    assert len(notes(head + f"  Rank 2 has launched up to operation 3 {end}\n" * 10_000)) <= 256


def test_where_it_is_asked():
    assert address_of({}) == ("localhost", 28028)
    assert address_of({"NCCL_RAS_ADDR": "127.0.0.1:4000"}) == ("127.0.0.1", 4000)
    assert address_of({"NCCL_RAS_ADDR": "[::1]:4000"}) == ("::1", 4000)
    for environ in ({"NCCL_RAS_ENABLE": "0"}, {"NCCL_RAS_ADDR": "nonsense"}, {"NCCL_RAS_ADDR": "h:99999"}):
        assert address_of(environ) is None


def spins(rank, pid=None):
    """A rank that waits in NCCL, seen from outside: it is busy, and nobody can be asked for its stack."""
    return RankLook(rank, pid or 100 + rank, f"h{rank // 4}", rank // 4, state="R", cpu=1.0)


def test_its_counts_tell_who_is_behind_where_nothing_else_does():
    looks = [spins(rank) for rank in range(8)]
    waiting = RankLook(2, 102, "h0", 0, state="S", call="futex", still=40.0)
    looks[2] = waiting
    assert judge(looks, Silence(8.0)) is None
    found = judge(with_ras(looks, notes(ANSWER)), Silence(8.0))
    assert (found.code, found.rank) == ("hang-waits", 2)
    assert "NCCL's RAS: has launched AllReduce up to number 11" in found.evidence[0].text
    assert "NCCL's RAS, which names 3" in found.seen


def test_a_rank_that_is_behind_and_busy_is_given_time():
    looks = with_ras([spins(rank) for rank in range(8)], notes(ANSWER))
    assert judge(looks, Silence(8.0)) is None
    assert judge(looks, Silence(1800.0)).rank == 2


def test_a_note_goes_to_the_process_that_it_names():
    behind = RasNote(2, 42, "10.0.0.1", ras.BEHIND, "is behind")
    same_pid = [spins(rank, pid=42) for rank in (1, 2, 3)]  # as in containers of their own
    assert [look.behind for look in with_ras(same_pid, [behind])] == [None, True, None]
    assert [look.behind for look in with_ras([spins(5, pid=42)], [behind])] == [True]
    strangers = [spins(5, pid=42), spins(6, pid=42), spins(7, pid=7)]
    assert [look.behind for look in with_ras(strangers, [behind])] == [None, None, None]


def test_the_watcher_hears_of_it():
    watcher = Hang("warn")
    watcher.on(Saw("attempt", {"number": 0, "members": {0: {"node": 0, "host": "h0", "ranks": 8}}}), 0.0)
    watcher._waiting = 1.0
    looks = [spins(rank) for rank in range(8)]
    watcher.on(Saw("looked", {"member": 0, "looks": looks, "ras": notes(ANSWER)}), 2.0)
    assert [note.rank for note in watcher._ras] == [5, 7, 2, 2]
