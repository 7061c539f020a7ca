"""Never certain and "first" with an unexplained death before it: a launcher's record of a SIGKILL is planted before every certain
answer of the rules' examples and of the corpus."""

import os

import pytest

from drumbeat.desk.log_sources import Source, lines
from drumbeat.findings.model import CERTAIN, LIKELY
from drumbeat.logs.meaning.rules import CAUSE, rulebook
from drumbeat.logs.reader import Reader
from tests.corpus import folders
from tests.logs.reading import read, rule_examples

DEATH = b"srun: error: n77: task 977: Killed"
LARGEST = 300_000  # bytes of a log of the corpus
EXAMPLES = rule_examples()
CAUSES = [rule for rule in rulebook().rules if rule.role == CAUSE and rule.id in EXAMPLES and not rule.conditional]


def failure(raw):
    reader = Reader()
    reader.feed_lines("log", 1, raw, True)
    return reader.report().failure


def check(raw):
    """`certain` must go, unless the death itself is the answer."""
    before = failure(raw)
    if before.confidence != "certain" or before.finding is None or not before.finding.evidence:
        return
    planted = failure([DEATH, *raw])
    assert planted.answer in ("killed", "oom-kill") or planted.confidence != "certain", planted.why_first


@pytest.mark.parametrize("rule", CAUSES, ids=lambda rule: rule.id)
def test_a_death_before_an_example(rule):
    for example in EXAMPLES[rule.id].examples:
        check([line.encode() for line in example.strip("\n").split("\n")])


def _corpus():
    return [
        str(file)
        for folder in folders()
        for file in sorted(folder.glob("*/*"))
        if file.parent.name in ("A_nccl_logs", "B_torch_failures") and os.path.exists(f"{file}.json")
        if file.stat().st_size < LARGEST
    ]


@pytest.mark.parametrize("path", _corpus(), ids=os.path.basename)
def test_a_death_before_a_real_log(path):
    check([line for _, some in lines(Source(path, "log")) for line in some])


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
