"""Batch scripts of known clusters, word for word. DRUMBEAT_WRITE_GOLDEN=1 writes them anew; then read what changed."""

import dataclasses
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from drumbeat.backends.slurm.directives import check, notes
from drumbeat.backends.slurm.render import render
from drumbeat.base.problem import Problem
from drumbeat.bundle.pinned import LOADER
from drumbeat.jobfile.job import job_from_text
from drumbeat.jobfile.resolve import resolve
from drumbeat.jobfile.resources import Here
from drumbeat.jobfile.site import load_site

GOLDEN = Path(__file__).parent / "golden"

JOBS = {
    "lumi": "name: llama\nnodes: 2\ncommand: python -u train.py\naccount: project_465\ntime: 1h\ncontainer: $PROJ/rocm.sif\n"
    "setup: $WITH_CONDA\nmodules: [LUMI]\n",
    "lumi-tasks": "name: llama\nsite: lumi\nnodes: 2\nlauncher: tasks\ncommand: python -u train.py\naccount: project_465\n"
    "time: 1h\ncontainer: $PROJ/rocm.sif\n",
    "olivia": "name: resnet\nnodes: 2\ncommand: torchrun train_ddp.py --epochs 100 --batch-size 2048 --base-lr 0.04 "
    "--target-accuracy 0.95 --patience 2\naccount: nn1234k\ntime: 1h\ncontainer: $PROJ/pytorch.sif\n",
    "mi300x-cx7": "name: llama3-8b\nnodes: 4\ncommand: python train.py\ntime: 12h\ncontainer: docker.io/rocm/pytorch-training\n",
    "mi300x-thor2": "name: llama3-8b\nnodes: 4\ncommand: python train.py\ntime: 12h\ncontainer: docker.io/rocm/megatron-lm\n"
    "binds: [/nfs/cache]\n",
    "spares": "name: llama\nsite: slurm\nnodes: 4\nspares: 1\nranks-per-node: 8\ngpus: 8\ncommand: python train.py\n",
    "range": "name: llama\nsite: slurm\nnodes: 4-8\nranks-per-node: 8\ngpus: 8\ncpus: 64\ncommand: python train.py\n",
    "pyxis": "name: gpt\nsite: slurm\nnodes: 2\nranks-per-node: 8\ngpus: 8\ncommand: python train.py\npartition: batch\n"
    "container: nvcr.io#nvidia/pytorch:25.08-py3\ncontainer-runtime: pyxis\narray: 0-3%2\nmail: me@example.org\n",
}


def script(name, **more):
    job = job_from_text(JOBS[name] + "".join(f"{key}: {value}\n" for key, value in more.items()))
    environ = {"PROJ": "/project/465", "HOME": "/home/ada", "WITH_CONDA": "conda"}
    site = load_site(job.site or name, environ)
    here = Here("login1", "/project/465/code", environ, 8, None, "ada", 1.7e9, "golden")
    order = dataclasses.replace(resolve(job, site, here), program="0" * 64)
    text = render(order).text.replace(order.program, "SHA256-OF-THE-PROGRAM")
    return re.sub(r"\b[0-9a-f]{64}\b", "SHA256-OF-THE-ORDER", text)


def node_part(text):
    """What srun runs on each node."""
    return text.partition("END_OF_NODE'\n")[2].partition("\nEND_OF_NODE\n")[0]


def own_part(name):
    """The script without what every script has: the loader, and, but for the first, what follows srun."""
    text = script(name).replace(shlex.quote(LOADER), "'...'  # bundle/pinned.py")
    before, mark, after = text.partition("# the lead's verdict, read as words")
    first, _, shared = script("lumi").partition(mark)
    return before + mark + " (the rest is that of lumi.sh)\n" if mark and name != "lumi" and after == shared else text


@pytest.mark.parametrize("name", JOBS)
def test_golden(name):
    path = GOLDEN / f"{name}.sh"
    if os.environ.get("DRUMBEAT_WRITE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(own_part(name))
    assert own_part(name) == path.read_text()


@pytest.mark.parametrize("name", JOBS)
def test_both_shells_can_read_it(name):
    """Slurm runs it with bash; on each node it is sh that reads its part."""
    for shell, text in (("bash", script(name)), ("sh", node_part(script(name)))):
        done = subprocess.run([shell, "-n"], input=text, text=True, capture_output=True, check=False)
        assert text and done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", JOBS)
def test_it_does_what_no_script_should_forget(name):
    text = script(name)
    assert "–" not in text and "|| echo" not in text.replace('||\n    echo "drumbeat', "")
    assert "--gpus-per-task" not in re.sub(r"#.*", "", text)  # it hides peers
    assert "pkill" not in text and "docker stop" not in text and "sudo" not in text
    assert "29500" not in text  # a fixed port collides
    assert "scontrol show hostnames" not in text  # node 0 comes from Slurm's own list, also inside a container


def test_4096_nodes_render_quickly():
    """On paper: nothing in the script grows with the number of nodes."""
    job = job_from_text(JOBS["lumi"].replace("nodes: 2", "nodes: 4096"))
    environ = {"PROJ": "/project/465", "HOME": "/home/ada"}
    here = Here("login1", "/project/465/code", environ, 8, None, "ada", 1.7e9, "golden")
    order = resolve(job, load_site("lumi", environ), here)
    assert len(render(order).text) - len(script("lumi")) < 100


def test_gpus_without_cores_are_questioned():
    """Slurm's default is one core a task: all ranks of a node would share it."""
    for text, questioned in (
        ("gpus: 8\n", True),
        ("gpus: 8\ncpus: 96\n", False),
        ("gpus: 8\nexclusive: true\n", False),
    ):
        job = job_from_text("nodes: 2\ncommand: python train.py\n" + text)
        here = Here("login1", "/w", {"HOME": "/h"}, 8, None, "ada", 1.7e9, "golden")
        assert bool(notes(resolve(job, load_site("slurm", {}), here))) == questioned


def test_a_folder_that_only_one_node_has_is_questioned():
    for nodes, folder, questioned in ((2, "/tmp/code", True), (1, "/tmp/code", False), (2, "/tmpfs/code", False)):
        job = job_from_text(f"nodes: {nodes}\ncommand: python train.py\n")
        here = Here("login1", folder, {"HOME": "/h"}, 8, None, "ada", 1.7e9, "golden")
        assert (
            any("local to each node" in each for each in notes(resolve(job, load_site("slurm", {}), here)))
            == questioned
        )


@pytest.mark.parametrize(
    "words,fix",
    [
        ("time: 2m\n", "more than 00:02:30 (hours:minutes:seconds), or stop-grace: 20s"),
        ("time: 1m\nstop-grace: 5s\n", "more than 00:01:35 (hours:minutes:seconds)"),
        ("time: 150s\n", ""),  # Slurm rounds it up to three minutes
        ("time: 2m\nstop-grace: 20s\n", ""),
        ("", ""),
        ("time: 1h\nsubmit-options: ['--time=2']\n", "more than 00:02:30 (hours:minutes:seconds), or stop-grace: 20s"),
        (
            "submit-options: ['-t1:30']\nstop-grace: 40s",
            "more than 00:02:10 (hours:minutes:seconds), or stop-grace: 20s",
        ),
        (
            "time: 1h\nsubmit-options: ['--time-min=00:01:00']\nstop-grace: 5s",
            "more than 00:01:35 (hours:minutes:seconds)",
        ),
        ("time: 1m\nsubmit-options: ['--time=0-1']", ""),
        ("submit-options: ['--time=UNLIMITED']", ""),
    ],
)
def test_a_limit_that_leaves_no_time_to_train_is_refused(words, fix):
    """Slurm may send its signal a minute early: the ranks would be told to stop as soon as they start."""
    here = Here("login1", "/w", {"HOME": "/h"}, 8, None, "ada", 1.7e9, "golden")
    order = resolve(job_from_text("command: python train.py\n" + words), load_site("slurm", {}), here)
    if not fix:
        check(order, str)
        return
    with pytest.raises(Problem) as problem:
        check(order, str)
    assert "leave no time to train" in str(problem.value) and str(problem.value).endswith("ask for " + fix)


@pytest.mark.parametrize("option", ["--gres=gpu:a100:4", "--gpus-per-node=a100:4", "--gres=nvme:1"])
def test_gpus_with_a_type_are_asked_for_once(option):
    environ = {"PROJ": "/project/465", "HOME": "/home/ada", "WITH_CONDA": "conda"}
    job = job_from_text(f"command: python t.py\nnodes: 2\ngpus: 4\nsubmit-options: ['{option}']\n")
    here = Here("login1", "/project/465/code", environ, 8, None, "ada", 1.7e9, "golden")
    text = render(resolve(job, load_site("lumi", environ), here)).text
    asked = re.findall(r"^#SBATCH (--(?:gres|gpus-per-node)=\S+)", text, re.M)
    assert asked == ([option] if "a100" in option else ["--gpus-per-node=4", option])


def test_a_job_without_requeues_is_never_queued_again_and_modules_may_be_purged():
    text = script("spares", requeues=0, modules="[purge, CUDA]")
    assert "#SBATCH --no-requeue" in text and "#SBATCH --requeue" not in text and "preempted: queueing" not in text
    assert "\nmodule purge || exit 78\nmodule load CUDA || exit 78\n" in text
