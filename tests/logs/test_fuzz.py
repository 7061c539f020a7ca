"""Nothing that a log holds may crash the reader or make it slow. `make fuzz` runs all 10,000 cases; a test run a few."""

import os
import random
import re
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumbeat.logs.exits import explain_exit
from drumbeat.logs.meaning.rules import MAX_TEXT, rulebook
from drumbeat.logs.read.flight import DumpError, parse
from drumbeat.logs.reader import Reader
from drumbeat.logs.show import render
from tests.logs.reading import CXI, IB, ROCE, rule_examples, run

CASES = int(os.environ.get("DRUMBEAT_FUZZ_CASES", "200"))
PIECES = [line for each in rule_examples().values() for text in each.examples + each.near for line in text.splitlines()]
PIECES += run("NET/IB/0/GDRDMA", more=[IB]).split("\n") + run("NET/IB/0", more=[ROCE]).split("\n")
PIECES += run("NET/AWS Libfabric/0/GDRDMA", "AWS Libfabric", [CXI]).split("\n")
PIECES += ["Traceback (most recent call last):", '  File "x", line 1, in f', "Root Cause (first observed failure):", ""]


def diagnose(lines):
    """Fed one by one and all at once, it must say the same."""
    lines = list(lines)
    reader, at_once = Reader(), Reader()
    for number, line in enumerate(lines, 1):
        reader.feed("log", number, line)
    at_once.feed_lines("log", 1, lines)
    report = reader.report()
    assert report == at_once.report()
    assert all(line.isprintable() for line in render(report).split("\n"))
    return report


def damage(rng, data):
    """Bytes flipped, cut out, repeated, moved; lines glued."""
    data = bytearray(data)
    for _ in range(rng.randrange(1, 8)):
        if not data:
            break
        place, kind = rng.randrange(len(data)), rng.randrange(5)
        length = rng.randrange(1, 40)
        if kind == 0:
            data[place] = rng.randrange(256)
        elif kind == 1:
            del data[place : place + length]
        elif kind == 2:
            data[place:place] = data[place : place + length] * rng.randrange(1, 5)
        elif kind == 3:
            data[place:place] = bytes(rng.randrange(256) for _ in range(length))
        else:
            data = data.replace(b"\n", b"", 1)
    return bytes(data)


def test_random_damage():
    rng = random.Random(int(os.environ.get("DRUMBEAT_FUZZ_SEED", "7")))
    for case in range(CASES // 2):
        text = "\n".join(rng.choices(PIECES, k=rng.randrange(1, 40))).encode()
        try:
            diagnose(damage(rng, text).split(b"\n"))
        except Exception as error:
            raise AssertionError(f"case {case}") from error


fuzz = settings(max_examples=CASES // 6, deadline=None, suppress_health_check=list(HealthCheck))


@fuzz
@given(
    st.lists(st.one_of(st.sampled_from(PIECES), st.text(), st.binary().map(lambda b: b.decode("latin-1"))), max_size=30)
)
def test_any_mixture_of_lines(lines):
    diagnose([line.encode("utf-8", "surrogatepass") for line in lines])


@fuzz
@given(
    st.one_of(st.none(), st.integers(-300, 300)),
    st.one_of(st.none(), st.integers(1, 64)),
    st.lists(st.one_of(st.sampled_from(PIECES), st.text()), max_size=10),
    st.lists(st.text(), max_size=2),
    st.booleans(),
    st.booleans(),
)
def test_any_end_of_a_rank(code, signal, tail, command, killed, oom):
    finding = explain_exit(code, signal, tail, command, killed, oom)
    assert finding.code and finding.title


@fuzz
@given(st.one_of(st.binary(), st.binary().map(lambda b: b"\x80\x04" + b)))
def test_any_dump(data):
    try:
        parse("nccl_trace_rank_0", data)
    except DumpError:
        pass


HOSTILE = [
    b"n1:7:9 [0] NCCL INFO " * 300,
    b"[rank1]: " * 900,
    b"Traceback (most recent call last):",
    b"(" * 8000,
    b"NCCL WARN " + b"Got completion with error " * 250,
    b"2026-01-02 03:04:05 " * 400,
    b"WorkNCCL(SeqNum=1, OpType=" * 200,
    b"\x1b[" * 4000,
    b"n1:1:1 [0] NCCL INFO Channel 00/0 : 1[0] -> 2[0] [send] via NET/IB/0",
]
timed = pytest.mark.skipif("DRUMBEAT_FUZZ_CASES" not in os.environ, reason="measures time: make fuzz")


@timed
def test_time_grows_with_the_length_and_not_faster():
    """Eight times the lines, about eight times the CPU time; much slack, to catch a square and nothing less."""

    def seconds(repeats):
        start = time.process_time()
        diagnose(line + b"%d" % number for number in range(repeats) for line in HOSTILE)
        return time.process_time() - start

    seconds(2)
    few, many = seconds(10), seconds(80)
    assert many < 8 * few * 4 + 0.5


@timed
@pytest.mark.parametrize(
    "lines",
    [
        lambda n: [
            f"n1:7:9 [0] NCCL INFO comm 0x{k:x} rank 0 nranks 2 cudaDev 0 busId 1 - Init COMPLETE" for k in range(n)
        ],
        lambda n: [
            f"n{k}:7:9 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1 - Init COMPLETE" for k in range(n)
        ],
        lambda n: [f"n1:7:{k} [0] NCCL INFO Channel 00/0 : {k}[0] -> 2[0] [send] via NET/IB/0" for k in range(n)],
        lambda n: [f"x{k}n1:7:9 [0] NCCL INFO Using network IB" for k in range(n)],
        lambda n: [f"[rank{k}]: ValueError: {'ab'[k % 2] * k}"[:4000] for k in range(n)],
    ],
)
def test_many_of_one_kind(lines):
    def seconds(count):
        start = time.process_time()
        diagnose(line.encode() for line in lines(count))
        return time.process_time() - start

    seconds(100)
    assert seconds(16_000) < 8 * seconds(2_000) * 4 + 0.5


@timed
def test_no_pattern_backtracks_without_bound():
    """A line has at most MAX_TEXT characters for a pattern, so even the worst is bounded, and it must be small."""
    start = time.process_time()
    for text in [*(line.decode("latin-1")[:MAX_TEXT] for line in HOSTILE), *(piece * 40 for piece in PIECES[::7])]:
        for rule in rulebook().rules:
            for pattern in rule.pattern:
                re.search(pattern, text[:MAX_TEXT])
    assert time.process_time() - start < 120, "some pattern is quadratic or worse"
