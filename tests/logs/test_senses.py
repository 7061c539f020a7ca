"""Errors are known by what they mean, in words that no rule holds; and the log's own remedy comes before ours."""

import errno
import os

import pytest

from drumbeat.causes.table import OF_ERRNO
from drumbeat.logs.meaning.rules import rulebook
from drumbeat.logs.meaning.senses import PROGRAM, remedy, sense, words
from drumbeat.logs.reader import Reader
from tests.logs.reading import read


@pytest.mark.parametrize(
    "text,code",
    [
        ("RuntimeError: Call to recv from 10.0.0.1<34921> failed : Connection timed out", "connect-failed"),
        ("RuntimeError: libnccl.so.2: cannot open shared object file: No such file or directory", "import-error"),
        ("AssertionError: head count 4 is not divisible by SP size 8", "layout-mismatch"),
        ("ValueError: world_size (4) is less than sequence_parallel_size 8", "layout-mismatch"),
        ("RuntimeError: unhandled system error while calling ncclGroupEnd()", "nccl-error"),
        ("ValueError: Invalid CUDAPlace(1), because GPU number on your machine is 1", "invalid-device-ordinal"),
        ("ValueError: File x.json not found.", "file-missing"),
        ("n1:12:12 [0] socket.cc:1 NCCL WARN socketProgress: Connection closed by remote peer", "peer-lost"),
        ("gai error: -3", "host-not-found"),
        ("nvrtc: error: invalid value for --gpu-architecture (-arch)", "wrong-architecture"),
    ],
)
def test_meaning_counts_whatever_the_words(text, code):
    failure = read(f"step 3 loss 2.3\n{text}").failure
    assert failure.answer == code and failure.confidence != "certain" and failure.finding.fix


@pytest.mark.parametrize("number", OF_ERRNO)
def test_names_numbers_and_texts_of_errno_mean_the_same(number):
    for said in (f"[Errno {number}] of it", errno.errorcode[number], os.strerror(number)):
        assert sense(f"WriterError: {said}") == OF_ERRNO[number], said


def test_every_row_speaks_of_known_concepts_and_every_concept_is_used():
    assert {name for _, row in words().rows for name in row} == set(words().concepts)


def test_every_sense_is_a_rules_code():
    assert {*OF_ERRNO.values(), *(code for code, _ in words().rows if code)} - {PROGRAM} <= {
        rule.code for rule in rulebook().rules
    }


@pytest.mark.parametrize(
    "text", ["KeyError: 'labels'", "ValueError: odd", "RuntimeError: shapes differ", "AssertionError"]
)
def test_other_exceptions_keep_their_own_words(text):
    assert sense(text) == "" and read(f"step 3 loss 2.3\n{text}").failure.answer == "exception"


def test_the_logs_own_remedy_comes_first():
    finding = read(
        "RuntimeError: Ninja is required to load C++ extensions (pip install ninja to get it)"
    ).failure.finding
    assert (finding.code, finding.fix) == ("import-error", "pip install ninja, as the log itself says")


@pytest.mark.parametrize(
    "words,fix",
    [
        ("ImportError: libmpi.so.40 cannot be opened. Try: module load openmpi/4.1", "module load openmpi/4.1"),
        ("OSError: no compiled core (conda install -c conda-forge pytables)", "conda install -c conda-forge pytables"),
        ("RuntimeError: the nest cache is stale. To fix this, run: plover rebuild --nest 4", "plover rebuild --nest 4"),
        ("FileNotFoundError: eggs.idx was not found; use --rebuild-index to create it", "use --rebuild-index"),
        ("RuntimeError: the cache is full. Hint: export NEST_HOME=/scratch/nest", "export NEST_HOME=/scratch/nest"),
        ("PermissionError: /opt/nest. Run `chmod -R u+w /opt/nest` and try again", "chmod -R u+w /opt/nest"),
        ("train: error: unknown option --egg; try 'train --help'", None),
        ("RuntimeError: could not run 'aten::add' with arguments from 'CUDA'", None),
    ],
)
def test_a_remedy_is_a_command_that_the_log_tells_to_run(words, fix):
    assert remedy(words) == fix


def test_a_panic_is_titled_by_its_message():
    reader = Reader()
    reader.feed_lines(
        "log", 1, [b"step 1 loss 2.0", b"thread 'main' panicked at src/bin.rs:8:2:", b"bin 12 holds 3 eggs"]
    )
    found = reader.report().failure
    assert (found.answer, found.finding.title) == (
        "exception",
        "thread 'main' panicked at src/bin.rs:8:2: bin 12 holds 3 eggs",
    )
