"""A certain verdict rests on lines that it names: without them it is certain no more."""

import re

import pytest

from drumbeat.findings.model import CERTAIN, LIKELY, UNKNOWN, Verdict
from drumbeat.logs.meaning.rules import rulebook
from drumbeat.logs.reader import Reader
from tests.logs.reading import CXI, IB, ROCE, channels, rule_examples, run, start_up

TRACEBACK = 'Traceback (most recent call last):\n  File "/home/u/train.py", line 12, in <module>\n    main()\n'
CLOSED = "[rank1]: RuntimeError: [../gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.2]:4567"

# Logs with certain answers: every kind of transport, and failures of one and of several ranks.
TRANSPORTS = {
    "rdma": run("NET/IB/0/GDRDMA", more=[IB]),
    "roce": run("NET/IB/0", more=[ROCE]),
    "ofi": run("NET/AWS Libfabric/0/GDRDMA", "AWS Libfabric", [CXI]),
    "tcp": run("NET/Socket/0", "Socket", ()),
    "local": "\n".join([start_up(0, nodes=1, host="n0"), start_up(1, nodes=1, host="n0"), channels("P2P/CUMEM")]),
}
EXAMPLES = rule_examples()
FAILURES = {
    f"{rule.id}-{number}": text
    for rule in rulebook().rules
    for number, text in enumerate(EXAMPLES[rule.id].examples if rule.id in EXAMPLES else ())
    if rule.role in ("cause", "symptom") and rule.severity == "error"
}
FAILURES["exception"] = TRACEBACK + "ValueError: bad shape"
FAILURES["many-ranks"] = "\n".join(f"[rank{rank}]: RuntimeError: CUDA error: out of memory" for rank in range(40))
FAILURES["with-victims"] = f"{CLOSED}\n[rank2]: OSError: [Errno 28] No space left on device\n{CLOSED}"
FAILURES["torchrun"] = (
    TRACEBACK + "KeyError: 'lr'\nRoot Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n"
    "  exitcode  : 1 (pid: 7)\n  traceback : x"
)


def read(lines):
    reader = Reader()
    reader.feed_lines("log", 1, [line.encode() for line in lines])
    return reader.report()


def without(lines, seen):
    """The log without the lines that `seen` names."""
    gone = set()
    for text in seen:
        numbers = re.fullmatch(r"log:([\d,-]+)", text)
        assert numbers, text
        for part in numbers[1].split(","):
            first, _, last = part.partition("-")
            gone.update(range(int(first), int(last or first) + 1))
    assert gone, "a certain verdict names lines"
    return [line for number, line in enumerate(lines, 1) if number not in gone]


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_transport_falls_without_its_lines(name):
    lines = TRANSPORTS[name].split("\n")
    transport = read(lines).transport
    assert transport.path.confidence == CERTAIN
    assert read(without(lines, transport.seen)).transport.path.confidence in (LIKELY, UNKNOWN)


def test_a_failure_falls_without_its_lines():
    certain = 0
    for name, text in FAILURES.items():
        lines = text.split("\n")
        failure = read(lines).failure
        if failure.confidence == CERTAIN:
            certain += 1
            left = read(without(lines, failure.seen)).failure
            assert left.confidence in (LIKELY, UNKNOWN), (name, left)
    assert certain > 100, "most of the examples name their cause"


def test_nothing_seen_is_never_certain():
    assert Verdict("transport", "rdma", CERTAIN).confidence == LIKELY
    assert Verdict("transport", "rdma", CERTAIN, seen=("log:3",)).confidence == CERTAIN
    assert Verdict("transport", "unknown", CERTAIN, seen=("log:3",)).confidence == UNKNOWN


def test_what_was_not_there_is_said():
    report = read(start_up(0, nranks=4, nodes=2, more=[IB]).split("\n"))
    assert any("3 of 4 ranks" in text for text in report.transport.unseen)
    assert report.failure.verdict().unseen == ("ranks 1, 2, 3: no line of their communicator in these logs",)
    assert "there are none" in read(["step 1"]).transport.unseen[0]
