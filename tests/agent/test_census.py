"""What the census reads of processes that really run: their own variables, and whether they have a connection."""

import os
import socket
import subprocess
import sys

from drumbeat.agent.watchers import world
from drumbeat.agent.watchers.contract import Saw
from drumbeat.agent.watchers.world import Census, CensusLooks
from drumbeat.inspector.ranks import look
from drumbeat.inspector.record import Row
from tests.agent.making import polled, scene

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


def test_processes_that_number_themselves_and_meet_at_a_port_of_their_own():
    """What a helper has from the rank that forked it is not its own."""
    connects = (
        "import os, socket, sys\n"
        "link = socket.create_connection(('127.0.0.1', {}))\n"
        "helper = os.fork()\n"
        "if not helper: os.read(0, 1); os._exit(0)\n"
        "print(1, flush=True); sys.stdin.read()"
    )
    accepts = (
        "import socket, sys\n"
        "door = socket.create_server(('127.0.0.1', 0)); print(door.getsockname()[1], flush=True)\n"
        "link = door.accept(); print(1, flush=True); sys.stdin.read()"
    )
    with Started(accepts) as first, Started(connects.format(first.said)) as second:
        first.process.stdout.readline()
        rows = look(0, [first.pid, second.pid], 61234, True)
    assert sorted((row.pid, row.rank, row.joined) for row in rows) == sorted(
        [(first.pid, None, False), (second.pid, None, False)]
    )
    (here, there), (back, forth) = rows[0].links[0], rows[1].links[0]
    assert (here, there) == (forth, back)


def test_looks_end_when_all_ranks_are_seen_and_connected():
    connects = "import socket; s = socket.create_connection(('127.0.0.1', {})); print(1, flush=True); input()"
    with socket.create_server(("127.0.0.1", 0)) as meeting:
        port = str(meeting.getsockname()[1])
        with Started(connects.format(port), RANK="0", **{**WORLD, "WORLD_SIZE": "1", "MASTER_PORT": port}) as rank:
            looks = CensusLooks(scene(planned_ranks=1, mains=lambda: [rank.pid]), True)
            seen = [polled(looks, now) for now in (0.0, 1.1, 30.0, 60.0, 90.0)]  # looks that cost much come less often
    assert [bool(each) for each in seen] == [False, True, True, False, False]
    watcher = Census()
    (told,) = watcher.on(seen[1][0], 1.0)  # a connection is proof enough: a short run may not be seen twice
    assert told.kind == "census" and told.data["rows"][0].rank == 0
    assert len(watcher.on(seen[2][0], 3.0)) == 1 and watcher.on(Saw("tick"), 4.0) == []  # a second look is told as well
    assert watcher.on(seen[2][0], 5.0) == []


def test_what_no_connection_proves_must_be_seen_twice():
    with Started(WAITS, RANK="0", **WORLD) as rank:
        looks = CensusLooks(scene(planned_ranks=1, mains=lambda: [rank.pid]), True)
        seen = [saw for now in (0.0, 1.1, 3.0, 4.0, 9.0) for saw in polled(looks, now)]
    watcher = Census()
    assert watcher.on(seen[0], 1.1) == []  # what one look shows may be about to change
    (told,) = watcher.on(seen[1], 3.0)
    assert not told.data["rows"][0].joined
    assert watcher.on(seen[2], 4.0) == []  # nothing new
    assert len(watcher.on(seen[3], 9.0)) == 1  # the lead must know that it still is so


def test_a_rank_that_ends_while_it_is_looked_at_bypasses_no_launcher():
    with Started(WAITS, RANK="1", **WORLD) as rank:
        mains = [rank.pid]
        looks = CensusLooks(scene(planned_ranks=2, mains=lambda: list(mains), met=lambda: 0), True)
        looks.poll(0.0)
        looks.poll(1.1)  # asks
        mains.clear()  # the rank has ended before the answer comes
        (saw,) = polled(looks, 1.2)
    assert saw.data["rows"][0].rank == 1 and not saw.data["unmet"]


def test_connections_that_were_seen_at_different_looks_add_up():
    """A rank that has left the meeting point was there all the same."""
    leaves = (
        "import socket, sys\n"
        "links = [socket.create_connection(('127.0.0.1', port)) for port in ({}, {})]\n"
        "print(1, flush=True)\n"
        "for link in links: sys.stdin.readline(); link.close(); print(1, flush=True)\n"
        "sys.stdin.read()"
    )
    with socket.create_server(("127.0.0.1", 0)) as meeting, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [each.getsockname()[1] for each in (meeting, other)]
        environ = {**WORLD, "MASTER_PORT": str(ports[0])}
        with Started(leaves.format(*ports), RANK="0", **environ) as rank:
            looks = CensusLooks(scene(planned_ranks=2, mains=lambda: [rank.pid]), True)
            seen = [polled(looks, 0.0), polled(looks, 1.1)]
            for now in (3.0, 9.0):
                rank.process.stdin.write("\n")
                rank.process.stdin.flush()
                rank.process.stdout.readline()
                seen.append(polled(looks, now))
            assert not look(0, [rank.pid], 61234, True)[0].joined  # now there is no connection
    assert [saw.data["rows"][0].joined for each in seen for saw in each] == [True, True, True]


def test_looks_are_frequent_while_there_is_something_new_and_rare_later(monkeypatch):
    monkeypatch.setattr(world, "_COST", 0.0)  # whatever a look takes here
    with Started(WAITS, RANK="0", **WORLD) as rank:
        looks = CensusLooks(scene(planned_ranks=1, mains=lambda: [rank.pid]), True)
        at = [tick / 4 for tick in range(4 * 120) if polled(looks, tick / 4)]
        looks.look_soon(120.0)
        soon = [tick / 4 for tick in range(4 * 120, 4 * 125) if polled(looks, tick / 4)]
    assert at[0] == 0.5 and len([now for now in at if now <= 10.0]) >= 10
    assert len([now for now in at if 60.0 < now <= 120.0]) <= 13
    assert soon[0] in (120.0, 120.5) and len(soon) >= 5  # the ranks have reported something


def test_a_look_that_takes_long_makes_the_next_one_wait(monkeypatch):
    looks = CensusLooks(scene(planned_ranks=1, mains=list), True)
    monkeypatch.setattr(world, "look", lambda *_: [])
    take = looks.asked.take
    monkeypatch.setattr(looks.asked, "take", lambda: take() and [[], 0.2])
    assert [now for now in range(40) if polled(looks, float(now))] == [1, 6, 11, 16, 21, 26, 31, 36]


def test_looks_become_rare_until_plenty_was_exchanged_or_the_ranks_had_the_time_to(monkeypatch):
    monkeypatch.setattr(world, "_COST", 0.0)
    sent = [5000]

    def rows(*_):
        return [
            Row(0, 10 + rank, rank, 2, alone=False, joined=True, framework="torch", sent=sent[0]) for rank in (0, 1)
        ]

    monkeypatch.setattr(world, "look", rows)

    def looked(looks, *times):
        return [now for now in times if polled(looks, now)]

    def seconds(first, last):
        return [tick / 2 for tick in range(2 * first, 2 * last)]

    quiet = CensusLooks(scene(planned_ranks=2), True)
    at = looked(quiet, *seconds(0, 590))
    assert (
        len([now for now in at if now < 10]) > 5 and len([now for now in at if now > 100]) < 25
    )  # nobody reports a step
    quiet.look_soon(590.0)
    at = looked(quiet, *seconds(590, 640))
    assert len(at) > 10 and 610 <= at[-1] < 620, "how much a step sends is known by then"
    busy, watcher, told = CensusLooks(scene(planned_ranks=2), True), Census(), []
    sent[0] = 2_000_000
    assert looked(busy, *seconds(0, 20))[-1] < 5, "plenty"
    busy.look_soon(20.0)
    for now in seconds(20, 60):
        sent[0] += 100_000 * (now < 30)
        told += [action.data["rows"][0].sent for saw in polled(busy, now) for action in watcher.on(saw, now)]
    assert told[0] < 2_600_000 and told[-1] > 3_000_000 and len(told) < 9, "looks end when a step has sent plenty too"


def test_ranks_of_a_scripts_second_launcher_are_marked():
    with Started("print(1, flush=True); input()", RANK="0", **WORLD) as rank:
        seen = []
        for launchers in (None, 0, 1, 2):
            looks = CensusLooks(
                scene(planned_ranks=1, mains=lambda: [os.getpid()], met=lambda count=launchers: count), True
            )
            polled(looks, 0.0)
            (saw,) = polled(looks, 1.1)
            seen.append((saw.data["unmet"], *(row.later for row in saw.data["rows"] if row.pid == rank.pid)))
    assert seen == [(False, False), (True, False), (False, False), (False, True)]


def test_ranks_of_mpi_which_no_connection_proves_are_told_before_the_looks_end(monkeypatch):
    monkeypatch.setattr(world, "_COST", 0.0)
    with Started(WAITS, RANK="0", PMIX_RANK="0", **{**WORLD, "WORLD_SIZE": "1"}) as rank:
        looks, watcher = CensusLooks(scene(planned_ranks=1, mains=lambda: [rank.pid]), True), Census()
        looked = [(tick / 4, saw) for tick in range(4 * 20) for saw in polled(looks, tick / 4)]
    told = [action for now, saw in looked for action in watcher.on(saw, now)]
    assert len(told) == 2 and told[0].data["rows"][0].alone is None
    assert looked[-1][0] < 10.0  # then nobody looks any more


def test_processes_below_a_rank_that_are_connected_to_each_other_are_counted():
    """As ranks that a program starts by multiprocessing.Process are; its own connections to them count for nothing."""
    below = (
        "import os, socket, sys\n"
        "ours = socket.create_server(('127.0.0.1', 0))\n"
        "if os.fork() == 0:\n"
        "    theirs = socket.create_server(('127.0.0.1', 0))\n"
        "    if os.fork() == 0:\n"
        "        link = socket.create_connection(theirs.getsockname()); sys.stdin.read(); os._exit(0)\n"
        "    link, _ = theirs.accept(); more = socket.create_connection(ours.getsockname())\n"
        "    print('up', flush=True); sys.stdin.read(); os._exit(0)\n"
        "link, _ = ours.accept(); sys.stdin.read()"
    )
    with Started(below, RANK="0", **{**WORLD, "WORLD_SIZE": "1"}) as rank:
        (row,) = look(0, [rank.pid], 61234, True)
    assert row.inner == 2
    with Started(WAITS, RANK="0", **WORLD) as rank:
        assert look(0, [rank.pid], 61234, True)[0].inner == 0


def test_why_a_ranks_bytes_cannot_be_seen_is_never_guessed(monkeypatch):
    """Between two looks at a rank that ends, its sockets are closed."""
    from drumbeat.inspector import exchange

    with socket.create_server(("127.0.0.1", 0)) as meeting:
        port = meeting.getsockname()[1]
        connects = f"import socket; s = socket.create_connection(('127.0.0.1', {port})); print(1, flush=True); input()"
        with Started(connects, RANK="0", **{**WORLD, "MASTER_PORT": str(port)}) as rank:
            found = []
            for counted, apart in (({"1": (5, 0)}, False), ({}, False), ({"1": (5, 0)}, True)):
                monkeypatch.setattr(exchange, "tcp_sockets", lambda counted=counted: counted)
                spaces = {rank.pid: "net:[2]" if apart else "net:[1]"}
                monkeypatch.setattr(exchange.proc, "network", lambda pid, spaces=spaces: spaces.get(pid, "net:[1]"))
                found.append(look(0, [rank.pid], port, True)[0].hidden)
            rank.process.stdin.write("\n")
    assert found == ["", "this kernel does not count them", "sockets of another network namespace"]


def test_bytes_between_ranks_are_counted_and_other_means_are_named(tmp_path):
    """Two processes connected to one meeting point and to each other, by TCP, a local socket and memory that they share."""
    code = (
        "import mmap, os, socket, sys\n"
        "rank, port, path = int(os.environ['RANK']), int(os.environ['MASTER_PORT']), sys.argv[-1]\n"
        "met = socket.create_connection(('127.0.0.1', port))\n"
        "def wait(): print('up', flush=True); return sys.stdin.readline().strip()\n"
        "peer = wait()\n"
        "if rank == 0:\n"
        "    door = socket.create_server(('127.0.0.1', 0)); print(door.getsockname()[1], flush=True); link = door.accept()[0]\n"
        "else: link = socket.create_connection(('127.0.0.1', int(peer)))\n"
        "link.sendall(b'x' * 5000); left = 5000\n"
        "while left: left -= len(link.recv(left))\n"
        "wait()\n"
        "file = open(os.environ['SHARED'], 'r+b'); memory = mmap.mmap(file.fileno(), 0)\n"
        "wait()"
    )
    shared = tmp_path / "memory"
    shared.write_bytes(b"0" * 20000)
    with socket.create_server(("127.0.0.1", 0)) as meeting:
        port = str(meeting.getsockname()[1])
        environ = {**WORLD, "MASTER_PORT": port, "SHARED": str(shared)}
        with Started(code, RANK="0", **environ) as first, Started(code, RANK="1", **environ) as second:
            both = (first, second)

            def seen():
                return look(0, [each.pid for each in both], int(port), True)

            def say(each, word=""):
                each.process.stdin.write(f"{word}\n")
                each.process.stdin.flush()

            def hear(each):
                return each.process.stdout.readline().strip()

            before = seen()
            say(first)
            say(second, hear(first))
            assert [hear(each) for each in both] == ["up", "up"]
            after = seen()
            for each in both:
                say(each)
            assert [hear(each) for each in both] == ["up", "up"]
            mapped = seen()
    assert [(row.joined, row.sent, row.out, row.hidden, row.has_sent) for row in before] == [
        (True, 0, 0, "", False)
    ] * 2
    assert all(row.sent >= 9900 and row.hidden == "" and row.has_sent for row in after)
    assert {row.hidden for row in mapped} == {"they share memory"}
