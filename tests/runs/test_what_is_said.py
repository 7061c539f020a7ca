"""Ends whose cause or order is easily told wrong: real runs of two ranks."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import wait_for

# `python -c` programs; ACT of the rank whose number is even or odd.
RAISES = """
import os, socket, sys, time
open(f"ready-{os.environ['RANK']}", "w").close()
while not os.path.exists("go"):
    time.sleep(0.005)
if os.environ["RANK"] in sys.argv[1].split(","):
    time.sleep(0.004 * int(os.environ["RANK"]))
    raise ValueError(f"rank {os.environ['RANK']} has a batch of a wrong shape")
time.sleep(600)
"""
CPU_LIMIT = """
import os, resource, time
if os.environ["RANK"] == "1":
    resource.setrlimit(resource.RLIMIT_CPU, (1, 30))
    while True:
        pass
time.sleep(600)
"""
# Rank 0 resets its connection by closing it unread, and says why only some time later.
CLOSES = """
import os, socket, sys, time
rank, address = os.environ["RANK"], (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == "0":
    listener = socket.create_server(address)
    peer = listener.accept()[0]
else:
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.02)
peer.sendall(b"x" * 5000)
while not os.path.exists("go"):
    time.sleep(0.01)
if rank == "0":
    peer.close()
    time.sleep(float(sys.argv[1]))
    raise ValueError("a batch of a wrong shape")
while True:
    if not peer.recv(1 << 16):
        raise RuntimeError("the stream is over")
"""
DEAF = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
open(f"ready-{os.environ['RANK']}", "w").close()
time.sleep(600)
"""
TWO = ("--nodes", 1, "--ranks-per-node", 2, "--site", "localhost", "--oversubscribe", 4)


def start(drumbeat, program, *arguments, flags=()):
    return drumbeat.start("run", *TWO, *flags, "--", sys.executable, "-c", program, *arguments)


def ready(drumbeat):
    wait_for(lambda: len(list(drumbeat.folder.glob("ready-*"))) == 2, 120, "both ranks")


def go(drumbeat):
    (drumbeat.folder / "go").touch()


def ended(drumbeat, process):
    """Output, exit code, and the attempt's end as the summary has it."""
    output = process.communicate(timeout=120)[0]
    return output, process.returncode, json.loads((drumbeat.run_folder() / "summary.json").read_text())


def failure(summary):
    return summary["attempts"][-1]["finding"]


def test_an_interrupt_just_after_a_failure_does_not_hide_it(drumbeat):
    process = start(drumbeat, RAISES, "1")
    ready(drumbeat)
    go(drumbeat)
    wait_for(
        lambda: any("wrong shape" in path.read_text() for path in drumbeat.folder.rglob("rank-1.err")), 60, "its words"
    )
    process.send_signal(signal.SIGINT)
    output, code, summary = ended(drumbeat, process)
    assert (code, summary["outcome"], failure(summary)["rank"]) == (1, "failed", 1), output
    assert "wrong shape" in failure(summary)["title"]


def test_an_interrupt_of_a_healthy_run_is_a_cancellation(drumbeat):
    process = start(drumbeat, RAISES, "none")
    ready(drumbeat)
    process.send_signal(signal.SIGINT)
    output, code, summary = ended(drumbeat, process)
    assert (code, summary["outcome"]) == (130, "cancelled"), output


def test_a_second_interrupt_soon_after_the_first_ends_the_run_now(drumbeat):
    process = start(drumbeat, DEAF, flags=("--stop-grace", "500s"))
    ready(drumbeat)
    process.send_signal(signal.SIGINT)
    time.sleep(0.4)
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    output, _, summary = ended(drumbeat, process)
    assert summary["outcome"] == "cancelled" and time.monotonic() - begin < 100, output


def test_two_ranks_that_fail_at_the_same_time_are_told_in_no_order(drumbeat):
    process = start(drumbeat, RAISES, "0,1")
    ready(drumbeat)
    go(drumbeat)
    output, _, summary = ended(drumbeat, process)
    found = failure(summary)
    assert "failed too, so close in time that either may have been first" in found["cause"], output
    assert found["confidence"] == "likely" and "(at the same time)" in output


def test_a_limit_of_cpu_time_is_not_the_schedulers(drumbeat):
    output, _, summary = ended(drumbeat, start(drumbeat, CPU_LIMIT))
    found = failure(summary)
    assert (found["code"], found["rank"]) == ("cpu-limit", 1) and "ulimit -t" in found["fix"], output


def test_a_rank_that_resets_its_connections_and_raises_later_is_the_cause(drumbeat):
    process = start(drumbeat, CLOSES, "0.3")
    wait_for(
        lambda: '"world"' in "".join(p.read_text() for p in drumbeat.folder.rglob("events.jsonl")),
        60,
        "their connections",
    )
    go(drumbeat)
    output, _, summary = ended(drumbeat, process)
    found = failure(summary)
    assert found["rank"] == 0 and "wrong shape" in found["title"], output


def test_a_rank_that_resets_its_connections_and_is_ended_before_it_can_say_why(drumbeat):
    process = start(drumbeat, CLOSES, "600")
    wait_for(
        lambda: '"world"' in "".join(p.read_text() for p in drumbeat.folder.rglob("events.jsonl")),
        60,
        "their connections",
    )
    go(drumbeat)
    output, _, summary = ended(drumbeat, process)
    found = failure(summary)
    assert (found["code"], found["rank"]) == ("rank-absent", 0), output
    assert "had closed its connections" in found["title"], output


GROUPS = "/sys/fs/cgroup"
# Rank 1 moves to a memory group beside the agent's, as a container of its own would be, and takes more than it has.
TAKES = """
import os, sys, time
if os.environ["RANK"] == "1":
    with open(os.path.join(sys.argv[1], "cgroup.procs"), "w") as file:
        file.write(str(os.getpid()))
    memory = bytearray(400 << 20)
    for place in range(0, len(memory), 4096):
        memory[place] = 1
time.sleep(600)
"""


@pytest.fixture
def small_group():
    """A memory group with 64 MiB, by either version of cgroups."""
    first = os.path.join(GROUPS, "memory")
    root, limit = (first, "memory.limit_in_bytes") if os.path.isdir(first) else (GROUPS, "memory.max")
    folder = os.path.join(root, f"drumbeat-test-{os.getpid()}")
    try:
        os.mkdir(folder)
        with open(os.path.join(folder, limit), "w") as file:
            file.write(str(64 << 20))
    except OSError as error:
        pytest.skip(f"no memory group can be made here: {error}")
    yield folder
    wait_for(lambda: not Path(folder, "cgroup.procs").read_text(), what="the group to be empty")
    os.rmdir(folder)


def test_a_kill_for_lack_of_memory_in_another_group_is_named(drumbeat, small_group):
    output, _, summary = ended(drumbeat, start(drumbeat, TAKES, small_group))
    found = failure(summary)
    assert (found["code"], found["rank"], found["confidence"]) == ("oom-kill", 1, "likely"), output
