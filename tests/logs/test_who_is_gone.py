"""A member that went away, in any words, and who it was; versions that do not meet; and that a bad end is never a good one."""

import itertools

import pytest

from drumbeat.logs.meaning.senses import missed, sense
from tests.logs.reading import read

STEPS = [f"tick {number} objective {3 - number / 50:.3f}" for number in range(1, 30)]


@pytest.mark.parametrize(
    "line,code,rank",
    [
        ("rank 11 is gone", "peer-lost", 11),
        ("worker 6 vanished in the middle of it", "peer-lost", 6),
        ("task 9 stopped answering", "peer-lost", 9),
        ("peer 5 has left", "peer-lost", 5),
        ("member 7 just went silent", "peer-lost", 7),
        ("no word from rank 4 since 10:02", "peer-lost", 4),
        ("node r2n4 is down", "node-failure", None),
        ("host c3 stopped responding", "node-failure", None),
        ("lost 8 workers", "peer-lost", None),
    ],
)
def test_who_went_away(line, code, rank):
    assert sense(line) == code and missed(line) == (True, rank)
    failure = read("\n".join(["hub: 16 members", *STEPS, f"hub: {line}", "hub: leaving", "exit code: 1"])).failure
    assert (failure.answer, failure.finding.rank) == (code, rank)
    assert failure.confidence == "likely"


@pytest.mark.parametrize(
    "line",
    [
        "3 workers left to start", "rank 3 left-pads its batches", "worker 3 is down to 4 GiB", "rank 2 lost its cache",
        "node n4 is up", "the peer list is complete", "rank 3 has entered epoch 2",
    ],
)  # fmt: skip
def test_nobody_went_away(line):
    assert missed(line) == (False, None) and sense(line) not in ("peer-lost", "node-failure")


@pytest.mark.parametrize(
    "line,code",
    [
        ("fused_norm was built for torch 2.1, running under 2.4", "import-error"),
        ("requires glibc 2.34, found 2.28", "import-error"),
        ("this program needs a driver of release 550 or later; the node runs 470.82", "driver-too-old"),
        ("needs at least NCCL 2.20, found 2.18", "nccl-versions-differ"),
        ("needs at least CUDA 11.8, found 12.4", ""),
        ("requires version 2.1 or newer, 2.4 is installed", ""),
        ("fused_norm was built for torch 2.4, running under 2.4.1", ""),
        ("needs at least 8 files, found 4", ""),
    ],
)
def test_a_version_that_is_asked_for_and_the_one_that_is_there(line, code):
    assert sense(line) == code


@pytest.mark.parametrize(
    "line,code",
    [
        ("process exceeds its memory cgroup (64 GiB)", "oom-kill"),
        ("the process used more memory than its limit of 64 GiB: out of memory", "host-out-of-memory"),
        ("too many processes: limit of 4096 reached", "process-limit"),
        ("cannot start another thread: limit reached", "process-limit"),
    ],
)
def test_the_resource_governs_and_not_who_used_it(line, code):
    assert sense(line) == code


LINES = {
    "srun": "srun: error: n{n}: task {n}: Exited with exit code {code}",
    "shell": "exit code: {code}",
    "words": "plover exited with status {code}",
    "mpirun": "mpirun: process rank {n} on node a{n} ended with status {code}",
    "kubectl": "command terminated with exit code {code}",
    "make": "make: *** [Makefile:8: fit] Error {code}",
    "docker": "container plover-{n} exited with code {code}",
    "supervisor": "launcher: child {n} returned non-zero exit status {code}",
    "pod": "State: Terminated, Reason: Error, Exit Code: {code}",
    "torchrun": "multiprocessing/api.py:874] failed (exitcode: {code}) local_rank: {n} (pid: 4123) of binary: /usr/bin/python",
    "traceback": 'Traceback (most recent call last):\n  File "a.py", line {code}, in b\n    c()\nacme.Odd: {n} is odd',
}
NOISE = (
    (),
    ("closing the log", "plover: bye"),
    ("srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",),
    ("uploading the log", "[info] 3 files were sent", "removing /tmp/plover"),
)


@pytest.mark.parametrize("name", LINES)
def test_a_bad_end_is_never_none(name):
    """Every launcher's failing line, with any status, above whatever programs write while they stop."""
    for code, number, noise, steps in itertools.product((1, 77, 137, 255), (0, 3), NOISE, (STEPS, [])):
        text = "\n".join([*steps, LINES[name].format(code=code, n=number), *noise])
        assert read(text).failure.answer != "none", text


UNREACHABLE = [
    "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed.",
    "[W C10d] The client socket has failed to connect to [n1]:29500 (errno: 111 - Connection refused). TCPStore",
    "[c10d] The client socket has timed out after 60s while trying to connect to (n1, 29500).",
]
CLOSED = (
    "[W312 14:06:05 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=4, addr=[n2]:58112, remote=[n1]:29500): "
)
MET = [
    ["[rank4] step 10/5000 loss 6.500", "[rank4] step 20/5000 loss 6.000"],
    [
        "W0312 14:06:05.001 9120 torch/distributed/elastic/multiprocessing/api.py:9] Sending process 9131 closing signal SIGTERM"
    ],
    [f"{CLOSED}failed to recv, got 0 bytes"],
]


def test_a_store_that_closes_behind_the_last_step_is_no_failure():
    steps = "step 10/100 loss 2.0\nstep 100/100 loss 1.0"
    assert read(f"{steps}\n[rank1]:{CLOSED}failed to recv, got 0 bytes").failure.answer == "none"


@pytest.mark.parametrize("line", UNREACHABLE)
def test_a_store_that_was_reached_before_is_a_lost_peer(line):
    end = "srun: error: n2: task 1: Exited with exit code 1"
    assert read(f"loading modules\n{line}\n{end}").failure.answer != "peer-lost"
    for before in MET:
        failure = read("\n".join(["loading modules", *before, line, end])).failure
        assert (failure.answer, failure.confidence) == ("peer-lost", "likely"), before
    assert "on n1" in failure.finding.title and "its own log is not here" in failure.why_first
