"""Who waits for whom, seen from outside: ranks of a program that says nothing, and the lead's word about them."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from drumbeat.agent.watchers.contract import AskLook, Emit, Saw, Warn
from drumbeat.agent.watchers.straggler import Straggler
from drumbeat.agent.wire.messages import Beat, Pace
from drumbeat.inspector import activity
from drumbeat.inspector.activity import PEERS, READS, RUNS, SENDS, read_ranks
from drumbeat.inspector.record import RankLook
from drumbeat.machine.model import Gpu

# Each rank works, then meets the others at rank 0 over TCP. It reports nothing, and nothing inside it answers.
PROGRAM = """
import os, socket, sys, time
rank, kind, ports = int(os.environ["RANK"]), sys.argv[1], list(map(int, sys.argv[2:]))
peers, told = [], 0
if rank == 0:
    servers = [socket.socket(fileno=int(fd)) for fd in os.environ["SERVERS"].split()]
    peers = [server.accept()[0] for server in servers]
else:
    peers = [socket.create_connection(("127.0.0.1", ports[rank - 1]))]
if kind == "reads" and rank == 2:
    source, into = os.pipe()
    if os.fork() == 0:
        while os.getppid() > 1:
            os.write(into, b".")
            time.sleep(1.0)
        os._exit(0)
while True:
    if kind == "reads" and rank == 2:
        os.read(source, 1)
    until = time.thread_time() + (0.4 if kind == "longer" and rank == 2 else 0.01)
    while time.thread_time() < until:
        pass
    if rank:
        peers[0].sendall(b".")
        peers[0].recv(1) or sys.exit()
    else:
        all(peer.recv(1) for peer in peers) or sys.exit()
        [peer.sendall(b".") for peer in peers]
        if not told:
            told = os.write(1, b"all have met")
"""


@pytest.fixture
def looks(tmp_path):
    """Yield what a look shows of three ranks of that kind since the last one, for a minute: a busy machine can spoil it."""
    import socket

    processes = []

    device = tmp_path / "gpu"  # each rank holds it open
    device.touch()

    def of(kind, gpus=()):
        servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        ports = [str(server.getsockname()[1]) for server in servers]
        fds = [server.fileno() for server in servers]
        gpu = os.open(device, os.O_RDONLY)
        for rank in range(3):
            own = {
                "RANK": str(rank),
                "WORLD_SIZE": "3",
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "1",
            }
            environ = {
                **os.environ,
                **own,
                "DRUMBEAT_RUN": "slow",
                "NODE_RANK": "0",
                "SERVERS": " ".join(map(str, fds)),
            }
            argv = [sys.executable, "-c", PROGRAM, kind, *ports]
            processes.append(
                subprocess.Popen(argv, env=environ, pass_fds=[gpu, *(fds if rank == 0 else ())], stdout=subprocess.PIPE)
            )
        os.close(gpu)
        for server in servers:
            server.close()
        mains = {process.pid: rank for rank, process in enumerate(processes)}
        assert processes[0].stdout.read(12) == b"all have met"
        last = read_ranks("slow", 0, mains, False, str(tmp_path), gpus).last
        for _ in range(15):
            time.sleep(4.0)
            reading = read_ranks("slow", 0, mains, False, str(tmp_path), gpus, last)
            last = reading.last
            if None not in (look.waits for look in reading.looks):  # nothing was sent in this time: the machine is busy
                yield {look.rank: look for look in reading.looks}

    yield of
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("kind,does", [("longer", RUNS), ("reads", READS)])
def test_the_others_wait_for_a_slow_rank(looks, kind, does):
    def shows(found):
        return found[2].doing == does and found[2].waits < 0.2 < 0.3 < min(found[0].waits, found[1].waits)

    assert any(map(shows, looks(kind)))


def test_work_on_a_gpu_that_ranks_share_is_not_that_of_a_rank_that_waits(looks, tmp_path, monkeypatch):
    work = {"index": 0, "busy": 100.0, "power": 690.0, "power_cap": 700.0}
    monkeypatch.setattr(activity.Sampler, "sample", lambda _: {"gpus": [work]})

    def shows(found):
        return found[2].gpu == 100 and found[2].waits == 0 and min(found[0].waits, found[1].waits) > 0.3

    assert any(map(shows, looks("longer", [Gpu(0, "nvidia", device=str(tmp_path / "gpu"))])))


def test_nobody_waits_much_more_than_the_others_in_a_balanced_world(looks):
    def balanced(found):
        shares = [look.waits for look in found.values()]
        return max(shares) < 3 * min(shares) or max(shares) < 0.25

    assert any(map(balanced, looks("balanced")))


def member(least, share, others, **more):
    return Beat(waits_least=Pace(least, share), waits=others, **more)


def told(beats, looks=(), seconds=200, then=None):
    """Return what the watcher does when these beats keep coming, and after that `then`."""
    watcher, actions = Straggler(), []
    watcher.on(Saw("attempt", {"members": {number: {} for number in range(len(beats))}}), 0.0)
    for now in range(seconds):
        for number, beat in enumerate(beats if then is None or now < seconds / 2 else then):
            watcher.on(Saw("beat", {"member": number, "beat": beat}), float(now))
        done = watcher.on(Saw("tick"), float(now))
        actions += done
        if any(isinstance(action, AskLook) for action in done):
            for number in range(len(beats)):
                watcher.on(
                    Saw("looked", {"member": number, "looks": [look for look in looks if look.node == number]}), now
                )
    return actions, watcher


LOOKS = [
    RankLook(rank, 100 + rank, host=f"n{rank // 2}", node=rank // 2, state="S", cpu=0.2, doing=PEERS)
    for rank in range(4)
]


def with_rank_2(**values):
    return [replace(look, doing=RUNS, **values) if look.rank == 2 else look for look in LOOKS]


@pytest.mark.parametrize(
    "looks,cause",
    [
        ([replace(look, granted=0.2 if look.rank == 2 else 0.9) for look in LOOKS], "gets a core for 20% of the time"),
        (with_rank_2(ails="its GPU has 4 of 16 PCIe lanes"), "4 of 16 PCIe lanes"),
        ([replace(look, clock=1980 if look.rank != 2 else 990.0) for look in LOOKS], "990 MHz, the others at 1980 MHz"),
        ([replace(look, doing=READS) if look.rank == 2 else look for look in LOOKS], "input"),
        ([replace(look, doing=SENDS) if look.rank == 2 else look for look in LOOKS], "link is slower"),
        (with_rank_2(place="model.py:7 forward"), "it runs at model.py:7 forward"),
        ([], "could not be inspected"),
    ],
)
def test_the_slow_rank_is_named_with_what_can_be_seen(looks, cause):
    actions, _ = told([member(0, 0.55, 0.6), member(2, 0.02, 0.58)], looks)
    warned = [action.finding for action in actions if isinstance(action, Warn)]
    assert [(finding.code, finding.rank) for finding in warned] == [("slow-rank", 2)]
    assert cause in warned[0].cause and "wait 58% of the time" in warned[0].title


def test_time_lost_is_counted_until_it_has_caught_up():
    slow, even = [member(0, 0.55, 0.6), member(2, 0.0, 0.6)], [member(0, 0.1, 0.1), member(2, 0.1, 0.1)]
    actions, _ = told(slow, LOOKS, 400, even)
    stalls = [action.data for action in actions if isinstance(action, Emit)]
    assert [stall["rank"] for stall in stalls] == [2] * len(stalls) and len(stalls) > 3
    assert stalls[-1]["share"] == 0.0 and 110 < stalls[-1]["seconds"] < 125  # 200 s x 60 %


def test_all_ranks_of_one_node():
    actions, _ = told([member(0, 0.5, 0.5), member(2, 0.0, 0.02), member(4, 0.5, 0.5)], LOOKS)
    finding = next(action.finding for action in actions if isinstance(action, Warn))
    assert finding.title.startswith("all ranks of n1 (node 1) hold") and finding.rank is None and finding.node == 1


@pytest.mark.parametrize(
    "beats",
    [
        [member(0, 0.5, 0.5), member(2, 0.4, 0.5)],  # balanced
        [member(0, 0.1, 0.15), member(2, 0.0, 0.1)],  # too little to matter
        [member(0, 0.9, 0.9, phase="checkpoint"), member(2, 0.0, 0.9)],  # one saves, as announced
        [member(0, 0.9, 0.9, silent=60.0, every=1.0), member(2, 0.0, 0.9)],  # no steps: the hang watcher's
        [Beat(), Beat()],  # nothing can be seen
        [member(0, 0.0, None), Beat()],  # one rank alone
    ],
)
def test_nothing_is_said_of_healthy_runs(beats):
    assert told(beats, LOOKS)[0] == []
