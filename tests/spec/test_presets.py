"""Presets are job files: each one is right, and the job's own words win."""

import pytest

from drumbeat.problem import Problem
from drumbeat.spec.here import Here
from drumbeat.spec.job import job_from_text
from drumbeat.spec.presets import preset_names, with_preset
from drumbeat.spec.resolve import resolve
from drumbeat.spec.sites import load_site

HERE = Here("login1", "/w", {"HOME": "/h"}, 8, None, "u", 0.0, "e")


@pytest.mark.parametrize("name", ["jax-maxtext", "megatron-lm", "primus", "pytorch"])
def test_each_makes_an_order(name):
    command = "" if name != "pytorch" else "command: python train.py\n"
    order = resolve(
        with_preset(job_from_text(f"preset: {name}\nnodes: 2\n{command}")), load_site("mi300x-thor2", {}), HERE
    )
    if name == "primus":  # its image is for the job to say
        assert order.container is None
    else:
        assert order.container and order.container.image.startswith("docker.io/rocm/")
    assert order.launcher == ("ranks" if name == "pytorch" else "once") and order.nodes == 2


def test_all_are_known():
    assert preset_names() == ["jax-maxtext", "megatron-lm", "primus", "pytorch"]


def test_the_job_wins_key_by_key():
    job = with_preset(job_from_text("preset: megatron-lm\ncontainer: /my.sif\nenv: {TP: '8'}\n"))
    assert job.container == "/my.sif" and job.env["TP"] == "8" and job.env["MBS"] == "2"


def test_an_unknown_one_names_its_neighbour():
    with pytest.raises(Problem) as problem:
        with_preset(job_from_text("preset: megatron\n"))
    assert "did you mean 'megatron-lm'?" in str(problem.value)
