"""Slurm's tools are here and its controller is not: nothing was refused, nobody was asked."""

import os

import pytest

from drumbeat.backends import slurm as client
from drumbeat.base.problem import Problem

NO_SOURCE = """\
sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
sbatch: error: fetch_config: DNS SRV lookup failed
sbatch: error: _establish_config_source: failed to fetch config
sbatch: fatal: Could not establish a configuration source"""
NO_CONTACT = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
NO_PARTITION = """\
sbatch: error: invalid partition specified: nowhere
sbatch: error: Batch job submission failed: Invalid partition name specified"""


@pytest.fixture
def slurm(tmp_path):
    """The environment with tools of Slurm that only complain."""
    folder = tmp_path / "slurm"
    folder.mkdir()

    def complaining(words):
        (folder / "words").write_text(words + "\n")
        for name in ("sbatch", "squeue", "sacct", "scontrol", "scancel", "sinfo"):
            tool = folder / name
            tool.write_text(f"#!/bin/sh\ncat '{folder}/words' >&2\nexit 1\n")
            tool.chmod(0o755)
        return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}

    return complaining


@pytest.mark.parametrize("words", [NO_SOURCE, NO_CONTACT], ids=["no-source", "no-contact"])
def test_submit_says_that_slurm_was_never_reached(drumbeat, slurm, words):
    (drumbeat.folder / "job.yaml").write_text("name: x\ncommand: python3 -V\nnodes: 1\ntime: 10m\n")
    done = drumbeat("submit", "job.yaml", "--site", "slurm", env=slurm(words))
    assert done.returncode == 2 and "no Slurm controller can be reached from here: " in done.stderr
    assert "refuses" not in done.stderr and "scontrol ping" in done.stderr


def test_a_refusal_stays_one(slurm):
    with pytest.raises(Problem, match="Slurm refuses this job: invalid partition specified: nowhere"):
        client.submit("job.sh", slurm(NO_PARTITION))


def test_a_job_is_not_forgotten_where_nobody_answers(slurm):
    assert client.statuses(["slurm://c/7"], slurm(NO_CONTACT))["slurm://c/7"].detail == client.UNREACHABLE
    unknown = "slurm_load_jobs error: Invalid job id specified"
    assert "no longer knows" in client.statuses(["slurm://c/7"], slurm(unknown))["slurm://c/7"].detail
    with pytest.raises(Problem, match="no Slurm controller can be reached"):
        client.cancel("slurm://c/7", slurm(NO_CONTACT))


def test_many_jobs_are_asked_about_at_once(tmp_path):
    """Eight jobs: one squeue; the two that it has forgotten: one sacct. Each answer is about its own job."""
    rows = [f"{number}|RUNNING|0|None|N/A|n{number}" for number in range(1, 7)]
    answers = {"squeue": rows, "sacct": ["7|COMPLETED|0:0", "71|FAILED|1:0"]}
    for name, lines in answers.items():
        tool = tmp_path / name
        text = "\n".join(lines)
        tool.write_text(f"#!/bin/sh\necho x >> {tmp_path}/calls\ncat <<'END'\n{text}\nEND\n")
        tool.chmod(0o755)
    handles = [f"slurm://c/{number}" for number in range(1, 9)]
    found = client.statuses(handles, {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"})
    assert [found[handle].state for handle in handles] == ["running"] * 6 + ["finished", "unknown"]
    assert [found[handle].over for handle in handles] == [False] * 6 + [True, True]
    assert (tmp_path / "calls").read_text().count("x") == 2


def test_a_reason_that_comes_late_is_waited_for(tmp_path):
    """Slurm 24.11 gives none before its scheduler has looked at the job."""
    squeue = tmp_path / "squeue"
    line = "printf '7|PENDING|0|%s|N/A|\\n'"
    squeue.write_text(
        f"#!/bin/sh\ncd {tmp_path}\nif [ -e asked ]; then {line} PartitionTimeLimit; else {line} None; fi\n>asked\n"
    )
    squeue.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    assert "more time than its partition allows" in client.hopeless("slurm://c/7", environ)
