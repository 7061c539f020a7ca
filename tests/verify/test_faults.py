"""Faults of one rank, in real worlds: they must be found, and that rank named."""

import json
import sys
from pathlib import Path

import pytest

from drumbeat.desk.start.verify import peers_of
from drumbeat.runfolder.run import Run
from drumbeat.verify.judge import judge
from tests.conftest import need_torch

need_torch("needs torch")

FAULTY = Path(__file__).parent / "faulty.py"


@pytest.fixture
def with_fault(drumbeat, tmp_path):
    def run(fault):
        out = tmp_path / "out.json"
        command = (sys.executable, FAULTY, fault, "--quick", "--out", out)
        done = drumbeat("run", "--ranks-per-node", 3, "--", *command)
        assert done.returncode == 0, done.stderr
        results = json.loads(out.read_text())
        judgement = judge(results, peers_of(Run.open(drumbeat.run_folder())), {}, False)
        assert judgement.failed
        return results, {verdict.check: verdict for verdict in judgement.verdicts}, done

    return run


def test_a_rank_that_corrupts_one_element_or_multiplies_wrongly_is_caught_and_named(with_fault):
    results, verdicts, done = with_fault("corrupt")
    values = verdicts["values"]
    assert values.answer == "wrong" and values.findings[0].rank == 1, values
    assert "all_reduce" in values.findings[0].title and "all_gather" in values.findings[0].title
    wrong = {each["op"] for each in results["mistakes"]}
    assert wrong == {"all_reduce", "all_gather"}, "what was not spoilt is right"
    copies = [each for each in results["mistakes"] if each["op"] == "all_gather"]
    assert copies and all(each["source"] == 1 and each["count"] == 1 for each in copies)
    assert "wrong values on rank" in done.stderr
    assert [(each.code, each.rank) for each in values.findings[1:]] == [("wrong-product", 1)]


def test_a_rank_that_does_not_answer_breaks_its_pair_and_hangs_nobody(with_fault):
    results, verdicts, _ = with_fault("silent")
    assert verdicts["pairs"].answer == "broken" and not results["complete"]
    broken = [{pair["a"], pair["b"]} for pair in results["pairs"] if "error" in pair]
    assert broken and all(1 in pair for pair in broken)
    assert verdicts["values"].answer == "unknown"


def test_a_python_without_torch_is_told_and_the_answer_is_still_json(drumbeat):
    (drumbeat.folder / "bare").write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    (drumbeat.folder / "bare").chmod(0o755)
    done = drumbeat("verify", "--quick", "--json", "--python", "./bare")
    answer = json.loads(done.stdout)
    assert done.returncode == answer["exit_code"] == 2 and answer["results"] is None
    assert "cannot import torch" in done.stderr


def test_an_unknown_operation_in_a_sites_floors_is_refused(drumbeat):
    (drumbeat.folder / "s.yaml").write_text("summary: s\nemulated: true\nfloors: {allreduce: {busbw: 3}}\n")
    done = drumbeat("verify", "--site", "./s.yaml")
    assert done.returncode == 2 and "floors.allreduce" in done.stderr and "all_reduce" in done.stderr
    assert not drumbeat.runs()
