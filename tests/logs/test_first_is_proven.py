"""Never certain and "first" with an unexplained death or error before it: a launcher's record of a SIGKILL, and an error that
nobody knows, are planted before every certain answer of the rules' examples (the death also before real logs,
in test_corpus.py)."""

import pytest

from drumbeat.causes.events import OUTSIDE
from drumbeat.causes.table import kind_of
from drumbeat.findings.model import CERTAIN, LIKELY
from drumbeat.logs.meaning.rules import CAUSE, rulebook
from drumbeat.logs.reader import Reader
from tests.logs.reading import read, rule_examples

UNKNOWN = b"2026-11-02 08:00:12 ERROR frobnicator lost its marbles"
DEATH = b"srun: error: n77: task 977: Killed"
EXAMPLES = rule_examples()
CAUSES = [rule for rule in rulebook().rules if rule.role == CAUSE and rule.id in EXAMPLES and not rule.conditional]


def failure(raw):
    reader = Reader()
    reader.feed_lines("log", 1, raw, True)
    return reader.report().failure


def death_is_heeded(before, planted):
    """`certain` must go, unless the death itself is the answer. `planted` reads the same log behind the death."""
    if before.confidence == "certain" and before.finding is not None and before.finding.evidence:
        after = planted()
        assert after.answer in ("killed", "oom-kill") or after.confidence != "certain", after.why_first


@pytest.mark.parametrize("rule", CAUSES, ids=lambda rule: rule.id)
def test_a_death_before_an_example(rule):
    for example in EXAMPLES[rule.id].examples:
        raw = [line.encode() for line in example.strip("\n").split("\n")]
        before = failure(raw)
        death_is_heeded(before, lambda raw=raw: failure([DEATH, *raw]))
        if before.confidence == CERTAIN and kind_of(before.answer, "") != OUTSIDE:
            after = failure([UNKNOWN, *raw])
            assert (after.answer, after.confidence) == (before.answer, LIKELY), after.why_first


def test_an_error_before_the_answer_that_does_not_count():
    answer = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    steps = [f"it {number} | ce 2.{number}".encode() for number in range(10, 90, 10)]
    assert failure([UNKNOWN, answer.encode()]).confidence == LIKELY
    assert failure([UNKNOWN, *steps, answer.encode()]).confidence == CERTAIN
    others = [b"[rank1]: " + UNKNOWN[20:], b"[rank0]: " + answer.encode()]
    assert failure(others).confidence == CERTAIN


INTERRUPTED = [
    "Traceback (most recent call last):",
    '  File "fit.py", line 5, in <module>',
    "    main()",
    "KeyboardInterrupt",
]


@pytest.mark.parametrize(
    "met",
    [
        "OpenBLAS blas_thread_init: pthread_create failed for thread {} of 64: Resource temporarily unavailable",
        "shard reader: unable to create thread {}, no slot is left",
        "could not start helper process: limit of processes reached ({})",
        "bash: fork: retry: Resource temporarily unavailable",
    ],
)
def test_a_cancellation_is_not_the_cause_of_errors_before_it(met):
    errors = [met.format(number) for number in (20, 21, 22)]
    found = read("\n".join(["reading shards", *errors, *INTERRUPTED])).failure
    assert (found.answer, found.confidence) == ("process-limit", LIKELY)
    assert "cancelled" in {each.code for each in found.others}
    steps = [f"step {number} loss 2.{number}" for number in range(1, 9)]
    later = read("\n".join(["reading shards", *errors, *steps, *INTERRUPTED])).failure
    assert later.answer == "cancelled"
    assert read("\n".join([*steps, *INTERRUPTED])).failure.confidence == CERTAIN
