"""Over real logs, where they are: the shares that the project asks for, and the answer behind a planted death. All these tests
share one reading of each log."""

import functools
import os
import subprocess
import sys

import pytest
from tools import corpus as scorer

from drumbeat.desk.log_sources import Source, lines
from drumbeat.findings.model import CERTAIN
from drumbeat.logs.reader import Reader
from tests.conftest import ROOT
from tests.corpus import folders
from tests.logs.test_first_is_proven import DEATH, death_is_heeded
from tests.logs.test_recorded_death import table, waiting_rules

LARGEST = 300_000  # bytes of a log before which a death is planted
report = functools.cache(scorer.read)


def labelled():
    logs = (log for log, _, _ in scorer.labels(map(str, folders()), "all"))
    return [log for log in logs if os.path.getsize(log) < LARGEST]


def planted(log, before, last=False):
    """Read a log with these lines before its own."""
    reader = Reader()
    reader.feed_lines("log", 1, [*before, *(raw for _, some in lines(Source(log, "log")) for raw in some)], last)
    return reader.report().failure


def test_shares(monkeypatch, capsys):
    if not folders():
        pytest.skip("no corpus (set DRUMBEAT_CORPUS)")
    monkeypatch.setattr(scorer, "read", report)
    monkeypatch.setattr(sys, "argv", ["corpus.py"])
    assert scorer.main() == 0, capsys.readouterr().out[-700:]


def test_without_a_corpus_it_says_so_and_ends_well(tmp_path):
    argv = [sys.executable, str(ROOT / "tools" / "corpus.py")]
    env = {"DRUMBEAT_CORPUS": str(tmp_path / "no"), "PATH": ""}
    result = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert result.returncode == 0 and "nothing to judge" in result.stdout


def test_a_recorded_death_before_real_logs():
    """Wherever a real log's certain answer is a lost peer, a rendezvous or a timeout."""
    if not folders():
        pytest.skip("no corpus (set DRUMBEAT_CORPUS)")
    waiting = {rule.id for rule in waiting_rules()}
    logs = (str(path) for folder in folders() for path in sorted(folder.glob("[AB]_*/*")) if path.suffix != ".json")
    chosen = [log for log in logs if report(log).failure.confidence == CERTAIN and report(log).failure.rule in waiting]
    for log in chosen:
        again = planted(log, table("bus-error").encode().split(b"\n"))
        assert (again.answer, again.finding.rank) == ("bus-error", 1), os.path.basename(log)
    assert chosen


@pytest.mark.parametrize("log", labelled(), ids=os.path.basename)
def test_a_death_before_a_real_log(log):
    death_is_heeded(report(log).failure, lambda: planted(log, [DEATH], last=True))
