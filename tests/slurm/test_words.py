"""What would become another #SBATCH line, another word or another command is refused before anything is queued."""

import json

import pytest

from drumbeat.backends import get
from drumbeat.base.problem import Problem
from drumbeat.jobfile.job import job_from_text
from drumbeat.jobfile.resolve import resolve
from drumbeat.jobfile.resources import Here
from drumbeat.jobfile.site import load_site

JOB = {"name": "a", "site": "slurm", "nodes": 2, "ranks-per-node": 1, "command": "true"}


@pytest.mark.parametrize("text", ["a\n#SBATCH --wrap=reboot", "two words", "$(reboot)", "`reboot`", "a'b"])
@pytest.mark.parametrize("key", ["account", "partition", "qos", "submit-options", "workdir", "runs", "container"])
def test_what_cannot_be_one_word_is_refused(key, text):
    text = text.replace("$", "$$")
    value = (
        [f"--comment={text}"]
        if key == "submit-options"
        else f"/{text}"
        if key in ("workdir", "runs", "container")
        else text
    )
    job = job_from_text(json.dumps({**JOB, "container-runtime": "apptainer", key: value}))
    here = Here("login1", "/home/ada/code", {"HOME": "/home/ada"}, 8, None, "ada", 1.7e9, "words")
    with pytest.raises(Problem) as caught:
        order = resolve(job, load_site("slurm", {}), here)
        get("slurm").check(order, lambda key: key)
        get("slurm").render(order)
    assert len(str(caught.value).splitlines()) <= 2 and str(caught.value).replace("\n", "").isprintable()
