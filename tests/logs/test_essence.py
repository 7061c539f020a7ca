"""The same words mean the same, whatever stands before them; and a run is good only if all its members are."""

from pathlib import Path

import pytest

from drumbeat.logs.meaning.likely import likely_sense
from drumbeat.logs.meaning.senses import sense
from tests.logs.reading import read

HELD_OUT = [
    line.split("\t", 1)[1] for line in (Path(__file__).parent / "data" / "held_out.tsv").read_text().splitlines()
]
PREFIXES = (
    "r6: ", "[6] ", "worker-6: ", "rank 6: ", "<6> ", "[w6/8] ", "PE 006/024 | ", "2026-03-04 10:09:50,123 | T06 | ",
    "Jun 09 17:40:51 hx15 lode[8872]: r6: ", "I 14:02:12.301 pkg/main.cc:88 [w6/8] ", "08.08.2026 18:00:20 <6> ",
    "2026/02/02 01:00:24 [rank=6 node=p0] ",
)  # fmt: skip
STEPS = [f"trainer-0  | step {n} | xent {3 - n / 900:.3f}" for n in range(100, 900, 100)]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_what_stands_before_a_message_does_not_change_its_meaning(prefix):
    sentence = "shard part-00417.rec: block 1288 reads back with sum 5f01cc2e, index says 9a77b013; block refused"
    assert likely_sense(prefix + sentence)[0] == "data"
    plain = [text for text in HELD_OUT if text[0].islower() and ":" not in text and "=" not in text and len(text) > 30]
    assert len(plain) > 50
    assert [likely_sense(prefix + text)[0] for text in plain] == [likely_sense(text)[0] for text in plain]


def test_names_in_quotes_do_not_change_the_meaning():
    words = "ERROR: LoadError: worker 4 went away while `{}` was pending"
    assert sense(words.format("pullgrads")) == sense(words.format("syncgrads"))


def test_members_that_leave_well_behind_one_that_failed_are_no_success():
    ends = [f"trainer-{rank} exited with code {40 if rank == 0 else 0}" for rank in range(4)]
    stop = "trainer-0  | guard: objective has not been a finite number for 2 reports in a row, stopping the run"
    assert read("\n".join([*STEPS, stop, *ends])).failure.answer == "nan-loss"
    assert read("\n".join([*STEPS, *ends])).failure.answer == "unknown"
    well = [f"trainer-{rank} exited with code 0" for rank in range(4)]
    assert read("\n".join([*STEPS, *well])).failure.answer == "none"


def test_words_about_the_same_member_say_why_it_was_lost():
    log = (
        "ERROR: LoadError: worker 4 went away while `pullgrads` was pending\nStacktrace:\n  [1] wait_for(w::Handle)\n"
        "2026-03-04T10:09:50Z node/b-7 memcg: container t-1 (worker 4) passed its 96Gi memory ceiling; kernel reaped pid 4411\n"
        "2026-03-04T10:09:52Z pod/t-1 container trainer ended, code 137"
    )
    failure = read(log).failure
    assert (failure.answer, failure.finding.rank, failure.finding.evidence[0].line) == ("oom-kill", 4, 4)
