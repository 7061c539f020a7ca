"""The batch script of a submitted tuning, word for word. DRUMBEAT_WRITE_GOLDEN=1 writes it anew; then read what changed."""

import dataclasses
import os
import re
import subprocess
from pathlib import Path

import pytest

from drumbeat.base.record import from_plain, to_plain
from drumbeat.jobfile.job import Job, job_from_text
from drumbeat.jobfile.resolve import resolve
from drumbeat.jobfile.resources import Here
from drumbeat.jobfile.site import load_site
from drumbeat.tune.session import make_request, settle, sized
from drumbeat.tune.trial_list import Asked, place_in_queue

GOLDEN = Path(__file__).parent / "golden" / "lumi.sh"
JOB = (
    "name: llama\nnodes: 2\ncommand: drumbeat train llama --layout hsdp --set batch=256 model=8b\naccount: project_465\n"
    "time: 12h\nmodules: [LUMI]\ncontainer: $PROJ/rocm.sif\nexpect: {transport: ofi}\nenv: {HF_TOKEN: pass, A: b}\n"
)


def tuning(job):
    environ = {"PROJ": "/project/465", "HOME": "/home/ada", "HF_TOKEN": "x"}
    here = Here("login1", "/project/465/code", environ, 8, None, "ada", 1.7e9, "golden")
    asked = Asked("batch")
    order = resolve(sized(job, {}), load_site("lumi", environ), here)
    return settle(asked, job, place_in_queue(order))


def test_golden():
    text = re.sub(r"\b[0-9a-f]{64}\b", "SHA256-OF-THE-REQUEST", make_request(tuning(job_from_text(JOB))).text)
    if os.environ.get("DRUMBEAT_WRITE_GOLDEN"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_the_time_is_that_of_the_trials_unless_it_is_said():
    job = job_from_text(JOB)
    made = tuning(job)
    limit = made.cost.seconds
    assert limit < make_request(made).order.time_limit < limit + 300
    said = dataclasses.replace(job, time=600, origins={**job.origins, "time": "--time"})
    assert make_request(tuning(said)).order.time_limit == 600


@pytest.mark.parametrize("text", [JOB, "command: python t.py {batch}\nwrap: {ranks: [0], command: perf}\n"])
def test_a_job_travels_whole(text):
    job = job_from_text(text)
    assert from_plain(Job, to_plain(job)) == job
    asked = Asked("layout", given={"hook": "bf16"})
    assert from_plain(Asked, to_plain(asked)) == asked
