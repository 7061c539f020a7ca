"""Presets are job files: each one is right, and the job's own words win."""

import dataclasses
from pathlib import Path

import pytest

from drumbeat.base.data import names
from drumbeat.base.problem import Problem
from drumbeat.jobfile import flags
from drumbeat.jobfile.flags import about_preset, with_preset
from drumbeat.jobfile.job import job_from_text
from drumbeat.jobfile.resolve import resolve
from drumbeat.jobfile.resources import Here
from drumbeat.jobfile.site import load_site

HERE = Here("login1", "/w", {"HOME": "/h"}, 8, None, "u", 0.0, "e")


# preset -> who starts the ranks, and the image
PRESETS = {
    "accelerate": ("once", ""),
    "deepspeed": ("ranks", "docker.io/deepspeed/"),
    "horovod": ("tasks", ""),
    "jax-maxtext": ("once", "docker.io/rocm/jax-training"),
    "megatron-lm": ("once", "docker.io/rocm/megatron-lm"),
    "megatron-lm-nvidia": ("ranks", "nvcr.io/nvidia/pytorch"),
    "primus": ("once", "docker.io/rocm/primus"),
    "pytorch": ("ranks", "docker.io/rocm/pytorch-training"),
    "torchtitan": ("ranks", ""),
}


@pytest.mark.parametrize("name", PRESETS)
def test_each_makes_an_order(name):
    command = "" if name != "pytorch" else "command: python train.py\n"
    here = dataclasses.replace(HERE, environ={"HOME": "/h", "HF_TOKEN": "hf_x"})
    order = resolve(
        with_preset(job_from_text(f"preset: {name}\nnodes: 2\n{command}")), load_site("mi300x-thor2", {}), here
    )
    launcher, image = PRESETS[name]
    assert (order.container is None) == (not image) and (not image or order.container.image.startswith(image))
    assert order.launcher == launcher and order.nodes == 2


@pytest.mark.parametrize("name", ["primus", "torchtitan"])
def test_a_token_that_is_missing_is_said_before_the_queue(name):
    with pytest.raises(Problem) as problem:
        resolve(with_preset(job_from_text(f"preset: {name}\n")), load_site("mi300x-thor2", {}), HERE)
    assert "HF_TOKEN is to be passed on, but it is not exported here" in str(problem.value)
    own = with_preset(job_from_text(f"preset: {name}\nenv: {{HF_TOKEN: ''}}\n"))
    assert resolve(own, load_site("mi300x-thor2", {}), HERE)


def test_scripts_that_pipe_into_tee_fail_with_the_pipe():
    for name in PRESETS:
        command = with_preset(job_from_text(f"preset: {name}\n")).command
        assert "bash" not in command or "pipefail" in command, name


def test_all_are_known():
    assert names(flags.PRESETS) == tuple(sorted(PRESETS))
    page = (Path(__file__).parent.parent.parent / "docs" / "presets.md").read_text()
    assert all(f"| `{name}` |" in page for name in PRESETS)


def test_the_job_wins_key_by_key():
    job = with_preset(job_from_text("preset: megatron-lm\ncontainer: /my.sif\nenv: {TP: '8'}\n"))
    assert job.container == "/my.sif" and job.env["TP"] == "8" and job.env["MBS"] == "2"


def test_an_unknown_one_names_its_neighbour():
    with pytest.raises(Problem) as problem:
        with_preset(job_from_text("preset: megatron\n"))
    assert "did you mean 'megatron-lm'?" in str(problem.value)


def test_megatron_lm_is_told_how_often_to_evaluate():
    """pretrain_gpt.py divides by --eval-interval, which has no default since February 2026, also with --eval-iters 0."""
    command = with_preset(job_from_text("preset: megatron-lm-nvidia\n")).command
    assert "--eval-interval" in command


def test_a_plan_says_what_comes_from_the_preset():
    job = with_preset(job_from_text("preset: megatron-lm\nenv: {BS: '8'}\n"))
    order = resolve(job, load_site("mi300x-thor2", {}), HERE)
    why = {each.name: each.why for each in order.env}
    assert (why["MBS"], why["BS"], order.launcher_why) == (
        "preset megatron-lm",
        "as the job asks",
        "preset megatron-lm",
    )
    about = about_preset(job)
    assert "checkout of ROCm/Megatron-LM" in about and "Image: docker.io/rocm/megatron-lm:latest." in about


def test_tasks_need_somebody_who_starts_them(drumbeat):
    done = drumbeat.here("plan", "--preset", "horovod", "--site", "localhost", "--nodes", 2)
    assert done.returncode == 2 and "mpirun -np 2 drumbeat run --preset horovod" in done.stderr, done


def test_maxtext_takes_all_gpus_of_a_node():
    """Its gpu_multiprocess is one process per GPU; this preset starts one per node, for which MaxText reads these."""
    job = with_preset(job_from_text("preset: jax-maxtext\n"))
    assert "hardware=gpu" in job.command and job.launcher == "once"
    assert "JAX_COORDINATOR_IP=" in job.setup and "JAX_COORDINATOR_PORT=" in job.setup
