"""No value of a job file becomes another line of the batch script, or another word of one. Only rendered: no Slurm is needed."""

import json
import shlex

import pytest

from drumbeat import backends
from drumbeat.backends.slurm.render import render
from drumbeat.base.problem import Problem
from drumbeat.jobfile.job import job_from_text
from drumbeat.jobfile.resolve import resolve
from drumbeat.jobfile.resources import Here
from drumbeat.jobfile.site import load_site

KEYS = (
    "account", "partition", "qos", "constraint", "reservation", "dependency", "mail", "memory", "array", "gpus-as",
    "name", "workdir", "runs", "container", "python", "textfile",
)  # fmt: skip
LISTS = ("submit-options", "modules", "binds", "on-end", "command")
EVIL = (
    "a\n#SBATCH --comment=stolen", "a\r\n#SBATCH --comment=stolen", "a --comment=stolen", "a\x0b#SBATCH --comment=stolen",
    "a; stolen", "$(stolen)", "`stolen`", "a' stolen '", 'a" stolen "', "a\u2028#SBATCH --comment=stolen",
)  # fmt: skip


SITE = load_site("slurm", {"HOME": "/home/ada"})


def script(keys):
    environ = {"HOME": "/home/ada"}
    job = job_from_text(json.dumps({"name": "n", "nodes": 2, "ranks-per-node": 1, "command": ["true"], **keys}))
    here = Here("login1", "/home/ada/code", environ, 8, None, "ada", 1.7e9, "golden")
    order = resolve(job, SITE, here)
    backends.get("slurm").check(order, job.where)
    return render(order).text


@pytest.mark.parametrize("key", [*KEYS, *LISTS])
def test_a_value_stays_one_word(key):
    for evil in EVIL:
        value = ["--x=" + evil if key == "submit-options" else evil] if key in LISTS else evil
        try:
            text = script({key: value, **({"container-runtime": "apptainer"} if key in ("container", "binds") else {})})
        except Problem as problem:
            assert problem.what.isprintable()
            continue
        for line in text.splitlines():
            if line.startswith("#SBATCH"):
                assert len(line.partition(" # ")[0].split()) == 2 and "stolen" not in line, (evil, line)
            elif "stolen" in line and not line.startswith("#"):
                words = shlex.split(line, comments=True)
                assert not any(word in ("stolen", "--comment=stolen", "#SBATCH") for word in words), (evil, line)
