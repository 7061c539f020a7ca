"""Flags win over the file, are refused in the same words, and have been through the user's shell already."""

import argparse

import pytest

from drumbeat.base.problem import Problem
from drumbeat.jobfile.check import keys_of
from drumbeat.jobfile.flags import add_job_flags, load_job
from drumbeat.jobfile.job import Job
from drumbeat.jobfile.resolve import resolve
from drumbeat.jobfile.resources import Here
from drumbeat.jobfile.site import load_site

HERE = Here("h", "/w", {"HOME": "/h", "KEPT": "1"}, 4, None, "u", 0.0, "e")


def parse(*words, after=None):
    parser = argparse.ArgumentParser(prog="drumbeat run", allow_abbrev=False)
    add_job_flags(parser)
    args = parser.parse_args(list(words))
    if after is not None:
        args.after = after
    return args


def job(*words, after=None):
    args = parse(*words, after=after)
    return load_job(args.job, args)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("name: a\nnodes: 2\ncommand: python train.py\nenv: {A: file, B: file}\ntime: 1h\n")
    return str(path)


def test_no_file_and_a_command():
    made = job(after=["python", "train.py", "--", "$X"])
    assert resolve(made, load_site("localhost", {}), HERE).command == ("python", "train.py", "--", "$X")
    assert made.where("command") == "the command after '--'"


def test_a_flag_wins_and_the_rest_of_the_file_stays(file):
    made = job(file, "--nodes", "3", "--env", "B=flag", "--env", "C=x=y", "--stop-grace", "5s", "--trace")
    assert (made.name, made.nodes, made.time, made.stop_grace, made.trace) == ("a", 3, 3600, 5, True)
    assert made.env == {"A": "file", "B": "flag", "C": "x=y"}
    assert made.command == ("python", "train.py")
    assert made.where("nodes") == "--nodes"
    assert made.where("time") == f"{file}:5: time"
    assert made.where("env.B") == "--env B"


def test_a_command_after_the_dashes_replaces_that_of_the_file(file):
    assert job(file, after=["echo"]).command == ("echo",)


def test_what_the_shell_has_read_is_not_expanded_again():
    made = job("--env", "A=$HOME", "--workdir", "/a$b", "--runs", "$r", after=["bash", "-c", "echo $RANK $(date)"])
    order = resolve(made, load_site("localhost", {}), HERE)
    assert order.command == ("bash", "-c", "echo $RANK $(date)")
    assert (order.workdir, order.folder) == ("/a$b", f"/w/$r/{order.run_id}")
    assert order.env[-1].value == "$HOME"


def test_variables_are_handed_on_by_name():
    assert job("--env", "KEPT", "--env", "ALSO=pass", "--env", "EMPTY=", after=["x"]).env == (
        {"KEPT": None, "ALSO": None, "EMPTY": ""}
    )


@pytest.mark.parametrize(
    "words, message",
    [
        (["--nodes", "two"], "--nodes: expected a whole number, or a range such as 4-8, got 'two' (example: 4-8)"),
        (["--nodes", "0"], "--nodes: must be at least 1, got 0"),
        (["--nodes", "-1"], "--nodes: must be at least 1, got -1"),
        (["--nodes", ""], "--nodes: expected a whole number, or a range such as 4-8, got '' (example: 4-8)"),
        (["--time", "90"], "--time: needs a unit: write 90s, 90m or 90h, got '90'"),
        (["--env", "1=2"], "--env 1: '1' is not a valid variable name (letters, digits and '_', no digit first)"),
        (["--env", "=2"], "--env : '' is not a valid variable name (letters, digits and '_', no digit first)"),
        (["none.yaml"], "none.yaml: no such file"),
        (
            ["train.py"],
            "train.py: no such file\n  expected a job file here; put the command after '--': -- train.py",
        ),
    ],
)
def test_refused(words, message):
    with pytest.raises(Problem) as caught:
        job(*words)
    assert str(caught.value) == message


def test_nothing_after_the_dashes():
    with pytest.raises(Problem, match="no command after '--'"):
        job(after=[])


def test_help_says_what_the_fields_say():
    parser = argparse.ArgumentParser(prog="drumbeat run")
    add_job_flags(parser)
    text = " ".join(parser.format_help().split())
    for name, (_, key) in keys_of(Job).items():
        if key.flag:
            assert f"--{name} " in text
            assert " ".join(key.help.replace("`", "").split())[:40] in text


def test_a_list_may_be_given_in_several_flags():
    assert job("--track", "tensorboard", "--track", "wandb=mine").track == ("tensorboard", "wandb=mine")
    assert job("--hosts", "a,b", "--hosts", "n[1-2]").hosts == ("a", "b", "n1", "n2")
