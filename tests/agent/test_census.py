"""What the census reads of processes that really run: their own variables, and whether they have a connection."""

import os
import socket
import subprocess
import sys

from drumbeat.agent.watchers.census import Census, CensusLooks, look
from drumbeat.agent.watchers.contract import Saw

WORLD = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "61234"}
WAITS = "import sys; print('up', flush=True); sys.stdin.read()"
LISTENS = "import socket, sys; s=socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); sys.stdin.read()"
# A shell that starts a rank with another number: a launcher.
STARTS = (
    f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {WAITS!r}], env={{**os.environ, 'RANK': '1'}})"
)


class Started:
    def __init__(self, code, **environ):
        argv = [sys.executable, "-c", code]
        self.process = subprocess.Popen(
            argv, env={**os.environ, **environ}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.said = self.process.stdout.readline().strip()
        self.pid = self.process.pid

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.communicate(timeout=120)


def test_a_rank_and_its_connection():
    with Started(WAITS, RANK="1", **WORLD) as lonely, Started(LISTENS, RANK="0", **WORLD) as listening:
        rows = {row.rank: row for row in look(0, [lonely.pid, listening.pid], 61234, True)}
    assert {(row.world_size, row.meeting, row.starts_others) for row in rows.values()} == {
        (2, "127.0.0.1:61234", False)
    }
    assert rows[1].alone is True and rows[0].alone is False


def test_a_launcher_and_its_rank():
    with Started(STARTS, RANK="0", **WORLD) as launcher:
        rows = look(0, [launcher.pid], 61234, True)
    assert [(row.rank, row.starts_others) for row in rows] == [(0, True), (1, False)]


def test_processes_that_number_themselves_are_known_by_their_connection():
    plain = {name: value for name, value in os.environ.items() if name not in ("RANK", *WORLD)}
    assert "RANK" not in plain
    with Started(LISTENS) as listening, Started(WAITS) as other:
        rows = look(1, [listening.pid, other.pid], int(listening.said), True)
    assert [(row.node, row.pid, row.rank) for row in rows] == [(1, listening.pid, None)]


def test_looks_end_when_all_ranks_are_seen_and_connected():
    connects = "import socket; s = socket.create_connection(('127.0.0.1', {})); print(1, flush=True); input()"
    with socket.create_server(("127.0.0.1", 0)) as meeting:
        port = str(meeting.getsockname()[1])
        with Started(connects.format(port), RANK="0", **{**WORLD, "MASTER_PORT": port}) as rank:
            looks = CensusLooks(0, 1, lambda: [rank.pid], 61234, True, lambda: None)
            seen = [looks.poll(now) for now in (0.0, 1.1, 3.0, 9.0, 20.0)]
    assert [bool(each) for each in seen] == [False, True, True, False, False]
    watcher = Census()
    assert watcher.on(seen[1][0], 1.0) == []  # what one look shows may be about to change
    (told,) = watcher.on(seen[2][0], 3.0)
    assert told.kind == "census" and told.data["rows"][0].rank == 0
    assert watcher.on(Saw("tick"), 4.0) == []


def test_ranks_of_a_scripts_second_launcher_are_marked():
    with Started("print(1, flush=True); input()", RANK="0", **WORLD) as rank:
        seen = []
        for launchers in (None, 0, 1, 2):
            looks = CensusLooks(0, 1, lambda: [os.getpid()], 61234, True, lambda: None, lambda count=launchers: count)
            looks.poll(0.0)
            (saw,) = looks.poll(1.1)
            seen.append((saw.data["unmet"], *(row.later for row in saw.data["rows"] if row.pid == rank.pid)))
    assert seen == [(False, False), (True, False), (False, False), (False, True)]
