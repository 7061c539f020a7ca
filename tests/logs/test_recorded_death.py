"""A consequence never outranks a death that a launcher recorded before it: not by its kind, and not by being better known."""

import pytest

from drumbeat.logs.meaning.rules import CONSEQUENCE, OTHER, rulebook
from tests.logs.reading import read, rule_examples

TABLE = """train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : {time}
  host      : n1
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 812)
  error_file: <N/A>
  traceback : Signal {signal} ({name}) received by PID 812
============================================================
"""
DEATHS = {"killed": (9, "SIGKILL"), "bus-error": (7, "SIGBUS"), "segfault": (11, "SIGSEGV")}
TIMEOUT = (
    "[rank0]:[E{date} ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
    "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600001 milliseconds before timing out."
)
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.16 GiB. GPU 1 has a total capacity of 79 GiB"
)
EXAMPLES = rule_examples()
EARLY = "2026-01-01_00:00:00"  # lines are ordered within their year


def table(code, time=EARLY):
    number, name = DEATHS[code]
    return TABLE.format(time=time, code=-number, signal=number, name=name)


def waiting_rules():
    rules = [rule for rule in rulebook().rules if rule.id in EXAMPLES]
    return [rule for rule in rules if rule.blames == OTHER or rule.role == CONSEQUENCE]


@pytest.mark.parametrize("code", DEATHS)
@pytest.mark.parametrize("rule", waiting_rules(), ids=lambda rule: rule.id)
def test_planted_before_every_example_of_a_consequence(rule, code):
    for example in EXAMPLES[rule.id].examples:
        failure = read(f"{table(code)}\n{example}").failure
        assert (failure.answer, failure.finding.rank) == (code, 1), example


@pytest.mark.parametrize("code", DEATHS)
def test_another_node_loses_the_store_later(code):
    between = "\n".join(f"n2: INFO waiting for the next rendezvous, attempt {number}" for number in range(150))
    error = "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed."
    failure = read(f"step 7 loss 2.1\n{table(code)}{between}\n{error}").failure
    assert (failure.answer, failure.finding.rank, failure.finding.host) == (code, 1, "n1")
    assert "rendezvous-connection" in {each.code for each in failure.consequences}


def test_a_rank_that_gave_up_waiting_long_before_was_not_waiting_for_the_dead():
    timeout = TIMEOUT.format(date="0329 21:00:00.000000")
    assert read(f"{timeout}\n{table('killed', '2026-03-29_22:03:17')}").failure.answer == "collective-timeout"
    assert read(f"{timeout}\n{table('killed', '2026-03-29_20:50:00')}").failure.answer == "killed"


def test_an_exception_of_another_rank_after_the_death():
    raised = (
        '[rank0]: Traceback (most recent call last):\n[rank0]:   File "/home/u/train.py", line 7, in <module>\n'
        "[rank0]: RuntimeError: allreduce failed: lost contact with a worker"
    )
    failure = read(f"{table('killed')}\n{raised}").failure
    assert (failure.answer, failure.finding.rank) == ("killed", 1)
    own = raised.replace("rank0", "rank1").replace(
        "RuntimeError: allreduce failed: lost contact with a worker", "KeyError: 3"
    )
    assert read(f"{own}\n{table('killed')}").failure.answer == "exception"


def test_a_cause_behind_a_timeout_of_another_rank_is_neither_first_nor_certain():
    failure = read(f"step 3 loss 1.8\n{TIMEOUT.format(date='')}\n[rank1]: {OUT_OF_MEMORY}").failure
    assert (failure.answer, failure.confidence) == ("gpu-out-of-memory", "likely")
    assert failure.why_first == "the first line that names a cause; collective-timeout at line 2 stands before it"
    failure = read(f"[rank1]: {OUT_OF_MEMORY}\n{TIMEOUT.format(date='')}").failure
    assert (failure.answer, failure.confidence) == ("gpu-out-of-memory", "certain")


def test_times_decide_between_a_timeout_and_a_later_cause():
    timeout = TIMEOUT.format(date="0329 21:00:00.000000")
    late = f"2026-03-29 21:20:00 ERROR: [rank1]: {OUT_OF_MEMORY}"
    failure = read(f"{late}\n{timeout}").failure
    assert failure.answer == "collective-timeout" and "gpu-out-of-memory" in {each.code for each in failure.others}
    assert read(f"{timeout}\n{late.replace('21:20', '20:50')}").failure.answer == "gpu-out-of-memory"
