"""drumbeat's own verdict in a text is a record: of the console's end, of `status` and of `report`."""

import sys

import pytest

from drumbeat.desk.log_sources import diagnose
from drumbeat.findings.model import CERTAIN, LIKELY
from drumbeat.logs.failure import NO_FAILURE
from drumbeat.logs.meaning.rules import NOISE, NOTE, rulebook
from tests.logs.reading import rule_examples

# Rank 0 fails as a consequence, and its lines have torch's own prefix.
PROGRAM = """
import os, sys, time
if os.environ["RANK"] == "1":
    {}["weights"]
time.sleep(1)
peer = "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:13224"
print("[rank0]: Traceback (most recent call last):", file=sys.stderr)
print('[rank0]:   File "/w/train.py", line 10, in <module>', file=sys.stderr)
print("[rank0]: RuntimeError: " + peer, file=sys.stderr)
sys.exit(1)
"""
HEADER = "drumbeat   t-1: 1 node x 2 ranks (site localhost)\n"
BLOCK = """\
failed     rank 1 on n7 (node 3): KeyError: 'weights'
cause      raised at /w/t.py:9
log        runs/t-1/nodes/0/attempt-0/rank-1.err
then       rank 0: the connection to another rank was closed
end        failed in 15 s, exit code 1
loss       fell from 1.000 to 0.333 from step 0 to 2
folder     runs/t-1
"""
OTHER = 'Traceback (most recent call last):\n  File "/w/x.py", line 3, in <module>\nValueError: other\n'
ASLEEP = (
    "no step for 38 s: rank 1 is asleep at hang.py:9 <module>; rank 0 is waiting in all_reduce 4 at hang.py:10 <module>"
)
POLLS = "check hang.py:9 for a retry or a poll that never ends"


@pytest.fixture
def failure(tmp_path):
    def of(text):
        path = tmp_path / "screen.log"
        path.write_text(text)
        return diagnose([str(path)]).failure

    return of


def named(failure):
    finding = failure.finding
    return failure.answer, finding.rank, finding.host, finding.node, finding.title, finding.cause


FAILED = ("exception", 1, "n7", 3, "KeyError: 'weights'", "raised at /w/t.py:9")


def test_what_drumbeat_printed_of_a_real_run(drumbeat):
    (drumbeat.folder / "t.py").write_text(PROGRAM)
    ran = drumbeat("run", "--ranks-per-node", "2", "--", sys.executable, "t.py")
    assert ran.returncode == 1
    texts = {
        "screen": ran.stdout + ran.stderr,
        "status": drumbeat.here("status").stdout,
        "report": drumbeat.here("report", *(path.name for path in (drumbeat.folder / "runs").iterdir())).stdout,
    }
    for name, text in texts.items():
        (drumbeat.folder / name).write_text(text)
        found = diagnose([str(drumbeat.folder / name)]).failure
        code, rank, host, node, title, cause = named(found)
        assert (code, rank, title, found.confidence) == ("exception", 1, "KeyError: 'weights'", CERTAIN), (name, text)
        assert host and (node == 0 or name == "report") and "t.py:4" in cause, (name, text)
        assert not any("folder" in each.text for each in found.finding.evidence)


@pytest.mark.parametrize("prefix", ["", "0: ", "2026-01-02T03:04:05.123Z ", "[1,0]<stderr>: "])
def test_the_verdict_counts_wherever_it_stands(failure, prefix):
    text = HEADER + OTHER + BLOCK + "srun: error: n7: task 0: Exited with exit code 1\n"
    found = failure("".join(f"{prefix}{line}\n" for line in text.splitlines()))
    assert named(found) == FAILED and found.confidence == CERTAIN


def test_lines_that_a_terminal_folded_are_one(failure):
    folded = BLOCK.replace("KeyError: 'weights'", "KeyError: 'weights of\n           the first layer'")
    assert failure(HEADER + folded).finding.title == "KeyError: 'weights of the first layer'"


def test_colours_do_not_hide_it(failure):
    assert named(failure(BLOCK.replace("failed    ", "\x1b[31mfailed    \x1b[0m", 1))) == FAILED


def test_ranks_that_follow_are_its_consequences(failure):
    then = failure(BLOCK).consequences
    assert [(each.code, each.rank, each.evidence[0].line) for each in then] == [("peer-lost", 0, 4)]


@pytest.mark.parametrize(
    "later", [HEADER.replace("t-1", "t-2") + OTHER, "restart    restart 1 of 1 in 1 s (program)\n" + OTHER, OTHER]
)
def test_a_later_attempt_takes_its_place(failure, later):
    assert failure(HEADER + BLOCK + later).finding.title == "ValueError: other"


def test_an_attempt_that_failed_is_not_the_verdict_of_a_run_that_finished(failure):
    restart = "failed     KeyError: 'weights'\nrestart    restart 1 of 1 in 1 s (program)\n"
    found = failure(f"{HEADER}{OTHER}{restart}end        finished in 40 s, exit code 0\nfolder     runs/t-1\n")
    assert found.answer == NO_FAILURE and any("ValueError" in note.title for note in found.notes)


def test_a_hang_while_it_lasts_and_at_its_end(failure):
    live = f"{HEADER}[1] step 2 loss 1.8\nerror      {ASLEEP}: {POLLS}\n"
    found = failure(live)
    assert named(found)[:2] == ("hang-asleep", 1) and (found.finding.title, found.finding.fix) == (ASLEEP, POLLS)
    end = f"failed     rank 1 on n1 (node 0): {ASLEEP}; it lasted 42 s\ncause      it sleeps while the others wait for it\n"
    found = failure(f"{live}{end}fix        {POLLS}\nend        failed in 60 s, exit code 1\n")
    assert named(found)[:4] == ("hang-asleep", 1, "n1", 0) and found.confidence == LIKELY
    resumed = failure(f"{live}resumed    steps come again, after 40 s without one\n[1] step 3 loss 1.7\n")
    assert resumed.answer == NO_FAILURE


def test_the_status_of_a_run_that_goes_on(failure):
    found = failure("run        t-1\nstate      running\nprogress   step 3  loss 1.7\nfolder     runs/t-1\n")
    assert found.answer == NO_FAILURE and "step 3" in found.in_progress


def test_the_log_that_a_status_quotes_belongs_to_its_verdict(failure):
    quoted = "log        the end of runs/t-1/rank-1.err:\n           [rank1]: KeyError: 'weights'\n"
    rows = BLOCK.splitlines(keepends=True)[:2]
    found = failure("".join(("run        t-1\nstate      failed\n", *rows, quoted, "folder     runs/t-1\n")))
    assert named(found) == FAILED and found.finding.evidence[0].line == 6


def test_a_program_may_print_such_labels(failure):
    found = failure(f"failed     2 of 9 samples\nend        of data\nstate      failed\n{OTHER}")
    assert found.finding.title == "ValueError: other"


def test_a_verdict_has_the_code_of_its_words(failure):
    """Titles are known by the templates that they were made of."""
    wrong, examples = {}, rule_examples()
    for rule in rulebook().rules:
        for example in examples[rule.id].examples[:1] if rule.id in examples and rule.role not in (NOISE, NOTE) else ():
            match = next((each for each in rulebook().match(example) if each.rule is rule), None)
            if match is not None:
                more = f"cause      {match.cause}\nfix        {match.fix(True)}\n"
                answer = failure(f"failed     rank 1 on n7 (node 3): {match.title}\n{more}").answer
                if answer != rule.code:
                    wrong[rule.id] = (rule.code, answer, match.title)
    assert not wrong
