"""Job + Site + Here -> Order: the whole of it once against a golden file, then rule by rule."""

import dataclasses
import os
from pathlib import Path

import pytest

from drumbeat.base.order import EnvVar, dump_order
from drumbeat.base.problem import Problem
from drumbeat.commands.program import Script
from drumbeat.jobfile.job import Job, job_from_text
from drumbeat.jobfile.resolve import default_name, resolve
from drumbeat.jobfile.resources import Here
from drumbeat.jobfile.site import load_site, site_from_text

GOLDEN = Path(__file__).parent.parent / "golden"
LOCALHOST = load_site("localhost", {})
CLUSTER = site_from_text("summary: real nodes\nruns: $HOME/r\nranks-per-node: 8\n", "stairs", "stairs.yaml")
HERE = Here(
    hostname="laptop",
    cwd="/home/u/code",
    environ={"HOME": "/home/u", "HF_TOKEN": "hf_x", "SPACED": "a b", "NESTED": "$HOME"},
    cpus=2,
    gpus=None,
    user="u",
    now=1767225600.0,
    entropy="ab12",
)


def order(text, site=LOCALHOST, **here):
    return resolve(job_from_text(text), site, dataclasses.replace(HERE, **here))


def refusal(text, site=LOCALHOST, **here):
    with pytest.raises(Problem) as caught:
        order(text, site, **here)
    assert "\n" not in caught.value.what
    return str(caught.value)


def test_golden():
    text = dump_order(order((GOLDEN / "job.yaml").read_text()))
    if os.environ.get("DRUMBEAT_WRITE_GOLDEN"):
        (GOLDEN / "job-order.json").write_text(text)
    assert text == (GOLDEN / "job-order.json").read_text()


def test_what_a_bare_command_becomes():
    made = order("command: python train.py")
    assert (made.name, made.nodes, made.ranks_per_node, made.launcher) == ("train", 1, 1, "ranks")
    assert made.workdir == "/home/u/code"
    assert made.folder == "/home/u/code/runs/" + made.run_id
    assert made.run_id.startswith("train-20260101-000000-") and len(made.run_id.split("-")[-1]) == 4
    assert (made.hosts, made.master, made.emulated) == (("127.0.0.1",), "127.0.0.1", True)


def test_two_runs_in_the_same_second_have_two_ids():
    assert order("command: x", entropy="a").run_id != order("command: x", entropy="b").run_id


@pytest.mark.parametrize(
    "command, name",
    [
        (["python", "/a/b/train.py", "x.py"], "train"),
        (["python", "-m", "pkg.tool"], "tool"),
        (["/usr/bin/nvidia-smi"], "nvidia-smi"),
        (["drumbeat", "train", "finetune", "--set", "lora=16"], "finetune"),
        (["litgpt", "pretrain", "pythia-14m", "--data", "x"], "pythia-14m"),
        (["sleep", "300"], "sleep"),
        (["./run me!.sh"], "run-me"),
        (["..."], "job"),
        (["x" * 99], "x" * 64),
    ],
)
def test_default_names(command, name):
    assert default_name(command) == name
    assert job_from_text(f"name: {name}").name == name


def test_ranks_a_node():
    assert order("command: x", gpus=4).ranks_per_node == 4
    assert order("command: x\ngpus: 2", gpus=4).ranks_per_node == 2
    assert order("command: x\ngpus: 0\nranks-per-node: 3", gpus=4).ranks_per_node == 3
    assert order("command: x\nlauncher: once", gpus=4).ranks_per_node == 1
    assert order("command: x", CLUSTER, gpus=0).ranks_per_node == 8
    assert order("command: x", CLUSTER, gpus=None).ranks_per_node == 8
    assert order("command: x", gpus=0).ranks_per_node == 1


def test_names_are_filled_in_once():
    made = order(
        "command: echo $SPACED '${HOME}/x' $$HOME $NESTED\nworkdir: ${HOME}/w\nruns: r\nsetup: echo $UNDEFINED\n"
        'env: {A: "$HOME:$$", B: 012}\nwrap: {ranks: [0], command: "prof $HOME/{rank}"}\n'
    )
    assert made.command == ("echo", "a b", "/home/u/x", "$HOME", "$HOME")
    assert (made.workdir, made.folder) == ("/home/u/w", "/home/u/code/r/" + made.run_id)
    assert made.setup == "echo $UNDEFINED"
    assert [(each.name, each.value) for each in made.env if each.source == "user"] == [("A", "/home/u:$"), ("B", "012")]
    assert made.wrap.command == ("prof", "/home/u/{rank}")


def test_the_jobs_variable_wins_over_the_sites_and_says_so():
    made = order("command: x\nenv: {GLOO_SOCKET_IFNAME: eth0}")
    assert made.env == (EnvVar("GLOO_SOCKET_IFNAME", "eth0", "as the job asks; site localhost would set lo", "user"),)


def test_passed_variables_are_named_and_nothing_more():
    made = order("command: x\nenv: {HF_TOKEN: pass}")
    assert made.passed == ("HF_TOKEN",)
    assert "hf_x" not in dump_order(made)


def test_real_machines_are_not_emulated():
    made = order("command: x\nnodes: 2", master="node1:62000")
    assert (made.emulated, made.hosts, made.master, made.muster_ports) == (False, (), "node1", (62000,))
    assert made.env == (), "the site's variables are about emulation"
    made = order("command: x", hosts=("n1", "n2"), job_id="812", step_id="0")
    assert (made.nodes, made.hosts, made.master, made.emulated) == (2, ("n1", "n2"), "n1", False)
    assert order("command: x\nnodes: 2", master="[fe80::1]:62000").master == "fe80::1"
    assert order("command: x\nnodes: 2", master="fe80::1").master == "fe80::1"


def test_every_node_works_out_the_same_ports():
    first = order("command: x\nnodes: 2", master="n1", entropy="a", hostname="n1").muster_ports
    assert first == order("command: x\nnodes: 2", master="n1", entropy="b", hostname="n2", now=1.0).muster_ports
    assert first != order("command: y\nnodes: 2", master="n1").muster_ports
    step = order("command: x", hosts=("n1", "n2"), job_id="812", step_id="0", entropy="a").muster_ports
    assert step == order("command: x", hosts=("n1", "n2"), job_id="812", step_id="0", entropy="b").muster_ports
    assert step != order("command: x", hosts=("n1", "n2"), job_id="812", step_id="1").muster_ports


def test_what_the_nodes_of_one_run_share():
    by_hand = order("command: x\nnodes: 2\nname: n", master="n1", entropy="a", hostname="n1").identity
    assert by_hand == order("command: x\nnodes: 2\nname: n", master="n1", entropy="b", hostname="n2", now=1.0).identity
    assert by_hand != order("command: y\nnodes: 2\nname: n", master="n1").identity
    steps = [order(f"command: {c}", hosts=("n1",), job_id="812", step_id=s).identity for c, s in ("x0", "y0", "x1")]
    assert steps[0] == steps[1] != steps[2]
    alone = order("command: x", entropy="a")
    assert alone.identity == alone.run_id


def test_ports_lie_above_those_that_linux_hands_out():
    for number in range(500):
        ports = order("command: x", entropy=str(number)).muster_ports
        assert len(set(ports)) == 8 and all(61000 <= port <= 65535 for port in ports)


def test_a_sites_folder_pattern():
    assert order("command: x", CLUSTER).folder.startswith("/home/u/r/x-")


def test_as_many_emulated_ranks_as_are_allowed():
    assert order("command: x\nnodes: 2\nranks-per-node: 4").world_size == 8


@pytest.mark.parametrize(
    "text, here, message",
    [
        ("nodes: 1", {}, "the job has no command\n"
         "  write 'command: python train.py' in the job file, or '-- python train.py' at the end"),
        ("command: x $NOPE", {}, "job.yaml:1: command: $NOPE is not defined\n"
         "  export NOPE, or write $$NOPE for the text '$NOPE'"),
        ("command: x\nworkdir: ${NOPE}/x", {}, "job.yaml:2: workdir: $NOPE is not defined\n"
         "  export NOPE, or write $$NOPE for the text '$NOPE'"),
        ("command: x $(date)", {}, "job.yaml:1: command: a '$' without a name after it\n"
         "  write $$ for a plain '$'; no shell reads this text, so $(...) and $1 mean nothing here"),
        ("command: x --token $HF_TOKEN", {}, "job.yaml:1: command: the value of $HF_TOKEN looks secret and would be "
         "written into the run folder\n  pass it on by name (env: {HF_TOKEN: pass}) and read it in the command"),
        ("command: x\ngpus: 8", {"gpus": 2}, "job.yaml:2: gpus: 8 GPUs per node requested, but laptop has 2"),
        ("command: x\nruns: ~/runs", {}, "job.yaml:2: runs: '~' is not expanded here\n  write $HOME"),
        ("command: x\nnodes: 3\nranks-per-node: 3", {}, "3 nodes x 3 ranks = 9 ranks on this one machine; "
         "its 2 cores take 8, 4 per core\n  ask for fewer, or allow more with --oversubscribe 5"),
        ("command: x\nspares: 1000", {}, "1 node x 1 rank = 1 rank and 1,000 spare nodes on this one machine; "
         "its 2 cores take 8, 4 per core\n  ask for fewer, or allow more with --oversubscribe 501"),
        ("command: x\nwrap: {ranks: [0, 1], command: p}", {}, "job.yaml:2: wrap.ranks: there is no rank 1 among 1, "
         "counted from 0"),
        ("command: x\nenv: {HF_TOKEN: hf_abc}", {}, "job.yaml:2: env.HF_TOKEN: looks secret, and this text is written "
         "into the run folder\n  export it, and write HF_TOKEN: pass in the file, or --env HF_TOKEN"),
        ("command: x\nenv: {NOPE: pass}", {}, "job.yaml:2: env.NOPE: NOPE is to be passed on, but it is not exported "
         "here\n  export NOPE=..."),
        ("command: x\nnodes: 2", {"master": "localhost"}, "localhost cannot be the master of 2 nodes: each of them "
         "would dial itself\n  name node 0 as the others see it: --master HOST"),
        ("command: x\nnodes: 2", {"master": "127.0.0.1:61000"}, "127.0.0.1 cannot be the master of 2 nodes: each of "
         "them would dial itself\n  name node 0 as the others see it: --master HOST"),
        ("command: x\nnodes: 3", {"hosts": ("a", "b")}, "job.yaml:2: nodes: 3 nodes requested, but the scheduler "
         "gave 2\n  leave it out, or say 2"),
        ("command: x\nnodes: 2", {"master": "n1:http"}, "'n1:http': 'http' is not a port (1 to 65535)\n"
         "  write HOST or HOST:PORT"),
        ("command: x\nnodes: 2", {"master": ":61000"}, "':61000' names no host\n  write HOST or HOST:PORT"),
    ],
)  # fmt: skip
def test_refused(text, here, message):
    assert refusal(text, **here) == message


def test_real_nodes_need_to_know_who_is_node_0():
    assert refusal("command: x\nnodes: 2", CLUSTER) == (
        "2 nodes, but node 0's host is not known\n"
        "  on each of them add --master HOST --node-rank K, or --site localhost to emulate them on this one"
    )


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "CLIENT_SECRET",
        "MY_CREDENTIALS",
        "hf_token",
    ],
)
def test_secret_names(name):
    assert "looks secret" in refusal(f"command: x\nenv: {{{name}: abc}}")


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "NUM_TOKENS", "SORT_KEY", "HF_TOKEN_PATH", "KEYBOARD"])
def test_names_that_are_not_secret(name):
    assert order(f"command: x\nenv: {{{name}: abc}}").env[-1].value == "abc"


def test_a_job_made_in_code_is_held_to_the_same_limits():
    with pytest.raises(Problem, match="nodes: must be at least 1, got 0"):
        resolve(Job(command=("x",), nodes=0), LOCALHOST, HERE)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "DRUMBEAT_RUN"])
def test_variables_that_drumbeat_sets_itself_are_refused(name):
    with pytest.raises(Problem, match=f"drumbeat sets {name} itself"):
        order(f"command: x\nenv: {{{name}: '7'}}\n")


@pytest.mark.parametrize("text", [r'runs: "x\0y"', r'env: {A: "x\0y"}', r'setup: "a\0b"', r'command: [a, "b\0c"]'])
def test_a_nul_character_is_refused(text):
    with pytest.raises(Problem, match="NUL"):
        order(text + ("" if text.startswith("command") else "\ncommand: x") + "\n")


@pytest.mark.parametrize("image", ["--privileged", "-v=/:/host", "a\\nb"])
def test_an_image_cannot_be_an_option(image):
    text = f'command: python x.py\ncontainer-runtime: podman\ncontainer: "{image}"\n'
    assert "is not an image: podman would read it as an option" in refusal(text)


def test_ray_on_several_nodes_is_refused_with_what_to_type():
    here = {"script": lambda command, workdir: Script(python="import ray\nray.init()\n")}
    one = order("command: python driver.py", **here)
    assert one.launcher == "once" and one.nodes == 1
    told = refusal("command: python driver.py\nnodes: 2", **here)
    assert "nodes: 1; or launcher: once and a script that starts Ray's head on node 0" in told
    assert order("command: python driver.py\nnodes: 2\nlauncher: once", **here).nodes == 2
