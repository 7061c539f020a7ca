"""A sweep over values: one job of an array for each combination."""

import json
import os
from pathlib import Path

import pytest

from drumbeat.base.problem import Problem
from drumbeat.desk.start.place import look_around
from drumbeat.jobfile.job import job_from_text
from drumbeat.jobfile.resolve import combinations, with_array
from tests.api.test_api import toys  # noqa: F401 - a fixture


def test_each_combination_is_one_job(toys):  # noqa: F811
    job = toys.base / "sweep.yaml"
    job.write_text("ranks-per-node: 1\nsweep: {lr: [1e-3, 1e-4]}\ncommand: [sh, -c, 'echo lr {lr} seed {seed}']\n")
    done = toys("submit", job, "--sweep", "seed=7", "--wait", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[0])
    printed = toys("logs", told["run_id"]).stdout.splitlines()
    assert sorted(line.partition("] ")[2] for line in printed) == ["lr 1e-3 seed 7", "lr 1e-4 seed 7"]
    kept = json.loads(Path(told["folder"], "array", "1", "order.json").read_text())
    assert kept["command"][-1] == "echo lr 1e-4 seed 7"


def test_a_machine_without_a_scheduler_queues_one_run_for_each_value(drumbeat):
    done = drumbeat("run", "--sweep", "lr=1,2", "--", "echo", "lr={lr}")
    assert done.returncode == 2 and "drumbeat submit queues one for each value" in " ".join(done.stderr.split())
    words = ("--sweep", "lr=1e-3,a b", "--ranks-per-node", "1", "--wait", "--json")
    done = drumbeat("submit", *words, "--", "sh", "-c", 'echo "$1 seed"; test "$1" = 1e-3', "x", "{lr}")
    assert done.returncode == 1, "that of the run that fails"
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["run_id"].startswith("x-lr-1e-3-") or first["run_id"].startswith("sh-lr-1e-3-")
    assert second["run_id"].rpartition("-lr-")[2].startswith("a-b-")
    assert "a b seed" in drumbeat("logs", second["run_id"]).stdout
    name = first["run_id"].partition("-lr-")[0]
    refused = " ".join(drumbeat("compare", name).stderr.split())
    assert f"{name}-lr-1e-3: no throughput" in refused and f"{name}-lr-a-b: no throughput" in refused, (
        "its runs, by its name"
    )


def test_combinations():
    assert combinations({}) == ()
    assert combinations({"a": ("1", "2"), "b": ("x",)}) == ({"a": "1", "b": "x"}, {"a": "2", "b": "x"})
    assert with_array(job_from_text("sweep: {a: [1, 2]}\narray: '%1'\ncommand: x {a}")).array == "0-1%1"


@pytest.mark.parametrize(
    "text",
    [
        "sweep: {a: [1]}\ncommand: x",
        "sweep: {a: []}\ncommand: x {a}",
        "sweep: {a: 1}\ncommand: x {a}",
        "sweep: {'-a': [1]}\ncommand: x",
        "sweep: {a: [1, 2]}\narray: 0-9\ncommand: x {a}",
        f"sweep: {{a: {list(range(50))}, b: {list(range(50))}}}\ncommand: 'x {{a}} {{b}}'",
    ],
)
def test_sweeps_that_are_none(text):
    with pytest.raises(Problem):
        with_array(job_from_text(text))


def test_a_desk_without_linux_own_calls(monkeypatch):
    """Another system has no affinity calls: what is submitted from there needs none."""
    monkeypatch.delattr(os, "sched_getaffinity")
    assert look_around(os.environ, gpus=None).cpus >= 1
