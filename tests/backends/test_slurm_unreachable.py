"""Slurm's tools are here and its controller is not: nothing was refused, nobody was asked."""

import os

import pytest

from drumbeat.backends.slurm import client
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
    assert client.status("slurm://c/7", slurm(NO_CONTACT)).detail == client.UNREACHABLE
    unknown = "slurm_load_jobs error: Invalid job id specified"
    assert "no longer knows" in client.status("slurm://c/7", slurm(unknown)).detail
    with pytest.raises(Problem, match="no Slurm controller can be reached"):
        client.cancel("slurm://c/7", slurm(NO_CONTACT))
