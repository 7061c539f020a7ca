"""The class of an exception and who raised it are evidence; the free words of its message are weak, and touch no machine."""

import pytest

from drumbeat.agent.lead.decide import Allowed, decide
from drumbeat.agent.lead.model import Member, Outcome
from drumbeat.causes.events import HARDWARE, OUTSIDE, RAISED, RAISED_IN_COMMUNICATION
from drumbeat.causes.table import GUESSED, PROGRAM, cause_of, kind_of
from drumbeat.findings.model import CERTAIN, LIKELY
from drumbeat.logs.exits import explain_exit
from drumbeat.logs.reader import Reader

# Messages about a program's own objects, in the words of every family of causes.
MESSAGES = """\
this branch is killed: node pruned
out of memory table
connection to parent lost in tree
node 3 is dead
device 2 fell off the bus route
no space left on device list
permission denied for role admin
timed out waiting for rank 3 in ladder
gpu 7 not found in registry
segmentation fault line not labelled
checkpoint shapes differ: expected 3, got 4
address already in use by entry 5
peer closed the deal
loss is nan
preempted by a higher priority task in the simulated queue
job cancelled by user 7
time limit of the game reached
ECC uncorrectable code word
NCCL error in unit table
no such file: column path
module named foo missing
bus error rate too high
SIGKILL
heartbeat lost for patient 12
host not found in graph
rank 3 died in the game
NVLink down edge
CUDA out of memory
Connection reset by peer
Killed
illegal memory access
too many open files in fixture
Connection refused
quota exceeded for user
[Errno 28] No space left on device
CUDA error: uncorrectable ECC error encountered
Unable to find address for: eth7
Watchdog caught collective operation timeout
""".splitlines()
FAULTS = [
    "AssertionError", "KeyError", "TypeError", "IndexError", "AttributeError", "OverflowError", "ZeroDivisionError",
    "NotImplementedError", "UnboundLocalError", "NameError", "StopIteration", "RecursionError", "UnicodeEncodeError",
    "LookupError",
]  # fmt: skip


def traceback(name, message, path="/home/u/proj/tree.py"):
    said = repr(message) if name == "KeyError" else message
    frames = [("/home/u/proj/train.py", "<module>", "main()"), (path, "check", "raise problem")]
    inside = [row for file, where, code in frames for row in (f'  File "{file}", line 7, in {where}', f"    {code}")]
    return ["Traceback (most recent call last):", *inside, f"{name}: {said}"]


def ended(lines, exit_code=1):
    return explain_exit(exit_code, None, lines, ["python", "train.py"], killed_by_us=False)


def diagnosed(lines):
    reader = Reader()
    reader.feed_lines("log", 1, [line.encode() for line in ("step 1 loss 2.31", "step 2 loss 2.25", *lines)])
    return reader.report().failure


@pytest.mark.parametrize("message", MESSAGES)
def test_a_fault_of_the_program_is_an_exception_whatever_its_words(message):
    for name in FAULTS:
        lines = traceback(name, message)
        finding = ended(lines)
        assert (finding.code, finding.title, finding.guessed) == ("exception", lines[-1], False), name
        assert cause_of(finding, 1) is PROGRAM
        assert diagnosed(lines).answer == "exception", name


@pytest.mark.parametrize("message", MESSAGES)
def test_without_its_traceback_it_is_no_certain_cause(message):
    compared = {"exception", "unknown", "checkpoint-mismatch", "nan-loss"}
    for name in FAULTS:
        failure = diagnosed(traceback(name, message)[-1:])
        assert failure.answer in compared and failure.confidence != CERTAIN, name


@pytest.mark.parametrize("message", MESSAGES)
def test_a_guess_by_words_is_likely_and_accuses_no_machine(message):
    for name in ("RuntimeError", "ValueError", "Exception", "game.errors.MoveError"):
        finding = ended(traceback(name, message))
        if finding.guessed:
            cause = cause_of(finding, 1)
            assert finding.confidence == LIKELY and not cause.breaks_member and not cause.suspects_member, name


def test_a_guess_is_no_sign_of_a_signal_or_of_broken_hardware():
    assert (kind_of("killed", ""), kind_of("gpu-lost", "")) == (OUTSIDE, HARDWARE)
    assert (kind_of("killed", "", guessed=True), kind_of("gpu-lost", "", guessed=True)) == (RAISED, RAISED)
    assert kind_of("exception", "KeyError: 'lost connection'") == RAISED
    assert kind_of("exception", "RuntimeError: lost connection") == RAISED_IN_COMMUNICATION


@pytest.mark.parametrize(
    "message", ["this branch is killed: node pruned", "node 3 is dead", "device 2 fell off the bus"]
)
def test_twice_the_same_guess_on_one_node_excludes_nobody(message):
    finding = ended(traceback("RuntimeError", message))
    assert finding.guessed and cause_of(finding, 1) is GUESSED
    members = {number: Member(number, f"n{number}", "127.0.0.1", number) for number in range(3)}
    history = [Outcome("failed", 1, finding, (0, 1), member=1, step=step) for step in (3, 9)]
    decision = decide(history, members, Allowed(5))
    assert decision.action == "restart" and decision.assignment == (0, 1) and not decision.excluded


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB", "gpu-out-of-memory"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB", "gpu-out-of-memory"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "gpu-ecc"),
        ("OSError: [Errno 28] No space left on device", "disk-full"),
        ("PermissionError: [Errno 13] Permission denied: '/data/x'", "permission"),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", "peer-lost"),
        ("OSError: [Errno 98] Address already in use", "port-in-use"),
        ("KeyError: 'LOCAL_RANK'", "world-not-set"),
        ("AssertionError: Torch not compiled with CUDA enabled", "no-gpu"),
    ],
)
def test_genuine_ones_keep_their_cause(line, code):
    finding = ended(
        ["Traceback (most recent call last):", '  File "/home/u/t.py", line 3, in <module>', "    go()", line]
    )
    assert finding.code == code and not finding.guessed


def test_an_assertion_of_a_library_may_say_what_does_not_fit():
    where = "/usr/lib/python3/dist-packages/megatron/arguments.py"
    words = "head count 4 cannot be split over SP size 8"
    assert ended(traceback("AssertionError", words, where)).code == "layout-mismatch"
    assert ended(traceback("AssertionError", words)).code == "exception"
    assert ended(traceback("AssertionError", "node 3 is dead", where)).code == "exception"


OF_OBJECTS = """\
GraphError: node 12 is unreachable
ValueError: In this graph the node named "north" was killed by the pruning pass before its parents could be visited
PuzzleError: disk 4 may not be placed on disk 3, it is too large for that peg
SimulationError: the virtual ship could not enter port 3 since all of its berths are occupied by other vessels
ScheduleError: the train on track 2 was preempted by an express train, and no siding is free for it
ValueError: the address field of customer 77 could not be resolved to a district of the map
""".splitlines()
OF_MACHINES = {
    "NodeGone: machine n12 went dead": "node-failure",
    "StorageFault: no room remains on the scratch volume": "disk-full",
    "ServerError: the metrics server wanted to listen at port 8080 but another process on this machine already uses it": (
        "port-in-use"
    ),
    "JobEvicted: preempted by higher priority job": "preempted",
    "RuntimeError: the name of the head node, train-head-0.internal, is not known to any name server": "host-not-found",
    "RuntimeError: lost connection to rank 5": "peer-lost",
}


@pytest.mark.parametrize("line", OF_OBJECTS)
def test_words_about_the_programs_own_objects_are_no_cause(line):
    name, message = line.split(": ", 1)
    finding = ended(traceback(name, message))
    assert (finding.code, finding.guessed) == ("exception", False)
    assert diagnosed(traceback(name, message)).answer == "exception"


@pytest.mark.parametrize(("line", "code"), OF_MACHINES.items())
def test_words_about_machines_in_the_programs_own_exception_are_a_likely_cause(line, code):
    name, message = line.split(": ", 1)
    finding = ended(traceback(name, message))
    assert (finding.code, finding.guessed, finding.confidence) == (code, True, LIKELY)
