"""Ranks that fail together: the one that closed the others' connections is named."""

import json
import signal
import sys

import pytest

from tests.conftest import wait_for

# Rank 1 leaves its peers, and is the last one to end. What they say of it is what it says itself.
RANK = """
import os, socket, sys, time
rank, world, port = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["MASTER_PORT"])
peers, server = [], socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", port if rank == 0 else 0))
server.listen()
with open(f"port-{rank}.new", "w") as file:
    file.write(str(server.getsockname()[1]))
os.replace(f"port-{rank}.new", f"port-{rank}")
for lower in range(rank):
    while not os.path.exists(f"port-{lower}"):
        time.sleep(0.02)
    peers.append(socket.create_connection(("127.0.0.1", int(open(f"port-{lower}").read()))))
for higher in range(rank + 1, world):
    peers.append(server.accept()[0])
if sys.argv[1] == "at once":
    if rank == 1:
        os._exit(3)
    while peers[0 if rank == 0 else 1].recv(1):
        pass
    raise RuntimeError("the work cannot go on")
if rank == 1:
    while not os.path.exists("go"):
        time.sleep(0.02)
    for peer in peers:
        peer.close()
    time.sleep(float(sys.argv[1]))
else:
    peers[0 if rank == 0 else 1].recv(1)
    if len(sys.argv) > 2:
        os.kill(os.getpid(), int(sys.argv[2]))
sys.exit("the work cannot go on")
"""


def failure(drumbeat, *arguments):
    """How a run ended in which rank 1 closed its connections once they were known."""
    flags = ("--nodes", 1, "--ranks-per-node", 3, "--site", "localhost", "--oversubscribe", 4, "--name", "closers")
    process = drumbeat.start("run", *flags, "--", sys.executable, "-c", RANK, *arguments)

    def world_seen():
        found = list(drumbeat.folder.glob("runs/closers-*/events.jsonl"))
        return found and '"check": "world"' in found[0].read_text().replace('":"', '": "')

    wait_for(world_seen, 120, "the connections of all ranks")
    (drumbeat.folder / "go").touch()
    output = process.communicate(timeout=120)[0]
    failed = json.loads((drumbeat.run_folder() / "summary.json").read_text())["attempts"][-1]["finding"]
    assert any("rank 1 closed those to ranks 0,2" in each for each in failed["seen"]), (failed, output)
    return failed


def test_who_closed_the_connections_is_the_cause(drumbeat):
    assert failure(drumbeat, 1)["rank"] == 1


@pytest.mark.parametrize("number", (signal.SIGSEGV, signal.SIGKILL))
def test_peers_that_die_from_a_signal_when_they_are_left_are_not_blamed(drumbeat, number):
    """Rank 1 takes long to end, and has to be ended."""
    failed = failure(drumbeat, 600, int(number))
    assert (failed["code"], failed["rank"], failed["confidence"]) == ("rank-absent", 1, "likely"), failed


def test_who_leaves_before_anybody_has_looked_is_named(drumbeat):
    """The others raise in words of their own, which say more than a bare exit code."""
    flags = ("--nodes", 1, "--ranks-per-node", 3, "--site", "localhost", "--oversubscribe", 4)
    done = drumbeat("run", *flags, "--", sys.executable, "-c", RANK, "at once", check=False)
    failed = json.loads((drumbeat.run_folder() / "summary.json").read_text())["attempts"][-1]["finding"]
    assert (failed["code"], failed["rank"]) == ("exit-code", 1), (failed, done)
