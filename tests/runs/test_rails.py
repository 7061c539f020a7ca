"""Nodes that share subnets which do not connect them, in real network namespaces: those subnets are not used, and said."""

import json
import os
import random
import secrets
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "iptables"))),
    reason="needs root, ip, unshare and iptables",
)
FAULTS = ("none", "isolated", "dropped", "large packets")
SIDE = """
import json, sys
from drumbeat.agent.wire.meet import Doors, doors_in, unreached
from drumbeat.machine.gather import gather
from drumbeat.machine.host import LiveHost
doors = Doors(gather(LiveHost()))
print(json.dumps(doors.places), flush=True)
theirs = doors_in(json.loads(sys.argv[1]), json.loads(sys.stdin.readline()))
print(json.dumps(unreached(doors.places, theirs)), flush=True)
sys.stdin.readline()
"""


def ip(*words):
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


class Pair:
    """Two namespaces with one link per rail, 10.77.RAIL.{1,2}/24, through a third that is the switch."""

    def __init__(self, faults):
        self.name = f"dbr{secrets.token_hex(3)}"
        self.sides = [f"{self.name}-{side}" for side in "ab"]
        self.switch = f"{self.name}-s"
        for netns in (*self.sides, self.switch):
            ip("netns", "add", netns)
            ip("-n", netns, "link", "set", "lo", "up")
        for rail, fault in enumerate(faults):
            mtu = 9000 if fault == "large packets" else 1500
            ip("-n", self.switch, "link", "add", f"br{rail}", "type", "bridge")
            ip("-n", self.switch, "link", "set", f"br{rail}", "up")
            for side, netns in enumerate(self.sides):
                port = f"p{rail}{side}"
                ip(
                    "-n",
                    netns,
                    "link",
                    "add",
                    f"rail{rail}",
                    "mtu",
                    mtu,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    port,
                    "netns",
                    self.switch,
                )
                ip("-n", netns, "addr", "add", f"10.77.{rail}.{1 + side}/24", "dev", f"rail{rail}")
                ip("-n", netns, "link", "set", f"rail{rail}", "gso_max_segs", 1, "up")  # packets as long as on a wire
                ip("-n", self.switch, "link", "set", port, "mtu", 1500, "up")
                if fault != "isolated":
                    ip("-n", self.switch, "link", "set", port, "master", f"br{rail}")
                if fault == "dropped":
                    drop = ["iptables", "-I", "INPUT", "-i", f"rail{rail}", "-j", "DROP"]
                    subprocess.run(["ip", "netns", "exec", netns, *drop], check=True)

    def argv(self, side, *words):
        inner = f'hostname machine{side}; exec "$@"'
        return ["ip", "netns", "exec", self.sides[side], "unshare", "--uts", "sh", "-c", inner, "sh", *map(str, words)]

    def down(self):
        for netns in (*self.sides, self.switch):
            subprocess.run(["ip", "netns", "del", netns], check=False, capture_output=True)


@pytest.fixture
def pairs():
    made = []
    yield lambda faults: made.append(Pair(faults)) or made[-1]
    for pair in made:
        pair.down()


@pytest.mark.parametrize("seed", range(3))
def test_a_subnet_counts_only_where_bytes_arrive(pairs, seed):
    drawn = random.Random(seed)
    faults = ["none", *drawn.sample(FAULTS, 4), drawn.choice(FAULTS)]
    pair = pairs(faults)
    run = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    shared = json.dumps([f"10.77.{rail}.0/24" for rail in range(len(faults))])
    sides = [subprocess.Popen(pair.argv(side, sys.executable, "-c", SIDE, shared), **run) for side in (0, 1)]
    try:
        places = [side.stdout.readline() for side in sides]
        for side, theirs in zip(sides, reversed(places)):
            side.stdin.write(theirs)
            side.stdin.flush()
        expected = {f"10.77.{rail}.0/24" for rail, fault in enumerate(faults) if fault != "none"}
        for side in sides:
            answer = json.loads(side.stdout.readline())
            assert set(answer) == expected, (faults, answer)
            large = [answer[f"10.77.{rail}.0/24"] for rail, fault in enumerate(faults) if fault == "large packets"]
            assert all("large packets are lost" in why for why in large), answer
    finally:
        for side in sides:
            side.communicate("\n", timeout=30)


def test_subnets_of_other_length_and_two_rails_in_one(pairs):
    """The second side takes all rails for one subnet, 10.77.0.0/16: each address is tried, and one that fails counts."""
    pair = pairs(["none", "none", "isolated"])
    for rail in range(3):
        for side, length in ((0, 24), (1, 23)):
            place = ("dev", f"rail{rail}")
            ip("-n", pair.sides[side], "addr", "del", f"10.77.{rail}.{1 + side}/24", *place)
            ip("-n", pair.sides[side], "addr", "add", f"10.77.{rail}.{1 + side}/{length}", *place)
    run = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    for shared, bad in ((["10.77.0.0/24", "10.77.1.0/24", "10.77.2.0/24"], {"10.77.2.0/24"}), (["10.77.0.0/16"],) * 2):
        argv = [sys.executable, "-c", SIDE, json.dumps(shared)]
        sides = [subprocess.Popen(pair.argv(side, *argv), **run) for side in (0, 1)]
        places = [side.stdout.readline() for side in sides]
        for side, theirs in zip(sides, reversed(places)):
            print(theirs.strip(), file=side.stdin, flush=True)
        answers = [json.loads(side.stdout.readline()) for side in sides]
        for side in sides:
            side.communicate("\n", timeout=30)
        assert set(answers[0]) == set(bad), answers


def test_ranks_start_in_the_networks_that_connect_them(pairs, drumbeat):
    pair = pairs(["none", "isolated", "none"])
    words = ("run", "--nodes", 2, "--ranks-per-node", 1, "--master", "10.77.0.1", "--name", "rails")
    program = "import os; print('socket', os.environ['NCCL_SOCKET_IFNAME'], os.environ['WORLD_SIZE'])"
    environ = {**os.environ, **getattr(drumbeat, "env", {})}
    nodes = [
        subprocess.Popen(
            pair.argv(side, sys.executable, "-m", "drumbeat", *words, "--node-rank", side, "--", sys.executable, "-c", program),
            cwd=drumbeat.folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for side in (0, 1)
    ]  # fmt: skip
    output = [node.communicate(timeout=180)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], output
    assert "does not reach machine" in output[0] and "in 10.77.1.0/24" in output[0], output[0]
    assert all("socket =rail1" not in text and "socket =rail" in text for text in output), output
