"""Parts of a node, what a site wants every job to say, and the agent's interpreter."""

import subprocess

import pytest

from drumbeat import backends
from drumbeat.base.problem import Problem
from drumbeat.jobfile.job import job_from_text
from drumbeat.jobfile.resolve import resolve
from drumbeat.jobfile.resources import Here
from drumbeat.jobfile.site import load_site

HERE = Here("login1", "/w", {"HOME": "/h"}, 8, None, "u", 0.0, "e")


def order(job, site="lumi"):
    return resolve(job_from_text(f"command: python train.py\n{job}"), load_site(site, {}), HERE)


@pytest.mark.parametrize(
    "site, gpus, cpus, memory",
    [("lumi", 8, 56, "480G"), ("lumi", 4, 28, "240G"), ("lumi", 1, 7, "60G"), ("olivia", 1, 72, "110G")],
)
def test_cores_and_memory_follow_the_gpus(site, gpus, cpus, memory):
    asked = order(f"gpus: {gpus}\n", site).resources
    assert (asked.cpus, asked.memory) == (cpus, memory)


def test_what_the_job_says_itself_is_kept_if_it_can_be_had():
    asked = order("gpus: 4\nmemory: 300G\ncpus: 50\n").resources
    assert (asked.cpus, asked.memory) == (50, "300G")
    for asked, said in {
        "cpus: 64": "64 cores per node requested, but a job on lumi can have 56\n  ask for at most 56",
        "memory: 5T": "5T per node requested, but a job on lumi can have 480G\n  ask for at most 480G",
        "gpus: 9": "9 GPUs per node requested, but a node of lumi has 8\n  ask for more nodes",
    }.items():
        with pytest.raises(Problem, match=said):
            order(asked + "\n")
    assert order("memory: 480G").resources.memory == "480G" and order("memory: 500000").resources.memory == "500000"


def test_an_account_and_a_time_are_asked_for_before_the_scheduler_does(monkeypatch):
    for name in ("SBATCH_ACCOUNT", "SBATCH_TIMELIMIT"):
        monkeypatch.delenv(name, raising=False)
    slurm = backends.get("slurm")
    notes = "\n".join(slurm.notes(order("")))
    assert "lumi requires account for every job" in notes and "lumi requires time" in notes
    assert slurm.notes(order("account: p\ntime: 1h\n")) == []
    monkeypatch.setenv("SBATCH_ACCOUNT", "p")
    assert "account" not in "\n".join(slurm.notes(order("time: 1h\n")))


def test_a_rendered_script_comes_with_its_warnings(capsys, monkeypatch):
    from drumbeat.cli import main

    monkeypatch.delenv("SBATCH_ACCOUNT", raising=False)
    words = ["plan", "--render", "--site", "lumi", "--time", "1h"]
    assert main([*words, "--account", "p", "--", "python", "x.py"]) == 0 and capsys.readouterr().out
    assert main([*words, "--", "python", "x.py"]) == 1  # Slurm would refuse it
    out, err = capsys.readouterr()
    assert out.startswith("#!/bin/bash") and "lumi requires account for every job" in err
    assert "# lumi requires --account for every job, and nothing here sets it\n" in out


def script(job, site="lumi"):
    return backends.get("slurm").render(order(job, site)).text


def test_the_agents_interpreter():
    assert 'python3 -I -S -c "$LOADER" _node "$BASE/order.json"' in script("", "slurm")
    text = script("")
    assert "PYTHON=$(ls -d /opt/cray/pe/python/*/bin/python3" in text and '"${PYTHON:-python3}" -I -S' in text
    assert 'python3.11 -I -S -c "$LOADER" _node' in script("python: python3.11\n")
    inside = script("container: /images/a.sif\n")
    assert "/opt/cray/pe/python" not in inside, "an image has a Python of its own"
    with pytest.raises(Problem, match="not the name or path of a program"):
        order("python: 'python3; rm -rf /'\n")


def test_a_line_before_the_agent(tmp_path):
    """`$WITH_CONDA` is known only inside the image: nothing of it is filled in here."""
    text = script("container: /images/a.sif\nbefore-agent: $WITH_CONDA\n")
    assert "$WITH_CONDA; exec" in text
    from drumbeat.containers import before

    words = before(order("before-agent: export FOUND=it\\'s\n"))
    done = subprocess.run(["sh", "-c", f"{words} sh -c 'echo \"$FOUND\"'"], capture_output=True, text=True, check=False)
    assert done.stdout == "it's\n", done.stderr


def test_a_plan_away_from_the_nodes_shows_only_what_can_come_up(capsys):
    from drumbeat.cli import main

    assert main(["plan", "--site", "dgx-h100", "--nodes", "2", "--", "python", "x.py"]) == 0
    out = capsys.readouterr().out
    assert "CUDA_VISIBLE_DEVICES" in out and "NCCL_IB_HCA" in out
    settings = "\n".join(line for line in out.splitlines() if not line.startswith(" "))
    assert not any(word in settings for word in ("HIP_", "MIOPEN", "ROCR", "Slingshot", "anp"))
    assert all(len(line) <= 80 for line in out.splitlines())


@pytest.mark.parametrize(
    ("job", "warned"),
    [
        ("", True),
        ("gpus: 4", False),
        ("gpus: 0", False),
        ("submit-options: ['--gres=gpu:4']", False),
        ("submit-options: ['--constraint=gpu']", True),
    ],
)
def test_a_job_that_trains_and_asks_slurm_for_no_gpu_is_questioned(job, warned, tmp_path):
    (tmp_path / "train.py").write_text("import os\nimport torch\n\ntorch.ones(1)\n")
    (tmp_path / "plain.py").write_text("print(1)\n")
    slurm = backends.get("slurm")

    def noted(command):
        text = f"command: {command}\nworkdir: {tmp_path}\n{job}\n"
        order = resolve(job_from_text(text), load_site("slurm", {}), HERE)
        return "asks for no GPU (1 rank per node)" in "\n".join(slurm.notes(order))

    assert noted("python train.py") is noted("drumbeat train llama") is warned
    assert noted("plain.py") is noted("hostname") is False


@pytest.mark.parametrize(
    ("job", "warned"),
    [
        ("gpus: 8\ncontainer: p.sif\ncontainer-runtime: apptainer", True),
        ("gpus: 8\ncontainer: p.sif\ncontainer-runtime: pyxis", False),
        ("container: p.sif\ncontainer-runtime: apptainer", False),
        ("gpus: 8", False),
    ],
)
def test_gpus_that_a_container_will_not_see_are_questioned(job, warned):
    order = resolve(job_from_text(f"command: python train.py\n{job}\n"), load_site("slurm", {}), HERE)
    assert ("is started without the GPUs" in "\n".join(backends.get("slurm").notes(order))) is warned


def test_a_plan_for_slurm_says_how_many_gpus_it_asks_for(tmp_path, monkeypatch, capsys):
    from drumbeat.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch\nfor x in []:\n    loss.backward()\n")
    assert main(["init"]) == 0
    assert "# gpus: 4  # per node; a scheduler" in capsys.readouterr().out
    for more in ([], ["--render"]):
        assert main(["plan", "--site", "slurm", "job.yaml", *more]) == 0
        out, err = capsys.readouterr()
        assert "this job asks for no GPU" in err and ("GPUs      none requested" in out) is not more
    assert main(["plan", "--site", "slurm", "--gpus", "4", "job.yaml"]) == 0
    out, err = capsys.readouterr()
    assert "GPUs      4 per node requested" in out and "no GPU" not in err


def test_a_batch_script_shows_what_every_rank_gets():
    text = (
        backends.get("slurm")
        .render(order("setup: |\n  . venv/bin/activate\n  ulimit -n 4096\nenv: {EPOCHS: 3}\n"))
        .text
    )
    shown = [line for line in text.splitlines() if line.startswith("# ")]
    assert any(line.startswith("# In every rank: EPOCHS=3  # user: ") for line in shown)
    assert "# Setup, in every rank: . venv/bin/activate" in shown and "# Setup, in every rank: ulimit -n 4096" in shown
