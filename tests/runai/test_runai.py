"""Run:ai through its own command, with a stand-in that knows the documented grammar of both generations."""

import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from drumbeat.cli import main

os.environ.setdefault("STAND_IN", "")
from tests.runai import stand_in  # noqa: E402

SRC = Path(__file__).parent.parent.parent / "src"
DOCUMENT = """runai submit-dist pytorch --name distributed-job --workers=1 -g 4 -i ic-registry.epfl.ch/mlo/mlo:v1
--annotation k8s.v1.cni.cncf.io/networks=kube-system/roce --extended-resource rdma/rdma=1 -- bash -c "sleep infinity" """
JOB = """name: distributed-job
site: rcp
account: mlo-ada
nodes: 2
gpus: 4
container: ic-registry.epfl.ch/mlo/mlo:v1
command: torchrun --nproc-per-node gpu train.py
workdir: /mloscratch/homes/ada
"""


class Desk:
    def __init__(self, base, cache, generation):
        self.base, self.kept, self.generation = base, base / "kept", generation
        programs = base / "bin"
        for folder in (self.kept, programs, base / "home"):
            folder.mkdir()
        for name in ("runai", "kubectl"):
            path = programs / name
            path.write_text(f'#!/bin/sh\nexec {sys.executable} {stand_in.__file__} {name} "$@"\n')
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        self.environ = {
            "PATH": f"{programs}:/usr/bin:/bin", "HOME": str(base / "home"), "PYTHONPATH": str(SRC), "LANG": "C.UTF-8",
            "STAND_IN": str(self.kept), "RUNAI_GENERATION": str(generation), "XDG_CACHE_HOME": str(cache),
        }  # fmt: skip

    def __call__(self, *words, **more):
        argv = [sys.executable, "-m", "drumbeat", *map(str, words)]
        environ = {**self.environ, **more}
        return subprocess.run(
            argv, env=environ, cwd=self.base / "home", capture_output=True, text=True, timeout=500, check=False
        )

    def job(self, text=JOB, **more):
        path = self.base / "home" / "job.yaml"
        path.write_text(text + "".join(f"{key.replace('_', '-')}: {value}\n" for key, value in more.items()))
        return path

    def calls(self):
        path = self.kept / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(params=[1, 3])
def desk(request, tmp_path, cache):
    return Desk(tmp_path, cache, request.param)


@pytest.fixture(params=[1, 2, 3])
def any_desk(request, tmp_path, cache):
    return Desk(tmp_path, cache, request.param)


def test_submit_status_shell_and_cancel(desk):
    job = desk.job(env="{HF_TOKEN: pass}", submit_options="['--linger=5m']")
    shown = desk("plan", "--render", "--save", "order.json", job, HF_TOKEN="hf_never_shown")
    assert shown.returncode == 0, shown.stderr
    sent = desk("submit", "--json", "order.json", HF_TOKEN="hf_never_shown")
    assert sent.returncode == 0, sent.stderr
    told = json.loads(sent.stdout)
    assert told["handle"].startswith("runai://mlo-ada/distributed-job-")
    assert (Path(told["folder"]) / "runai.sh").read_text() == shown.stdout, "what was shown is what was run"
    secret = json.loads((desk.kept / "secret.json").read_text())
    assert secret["stringData"]["HF_TOKEN"] == "hf_never_shown" and len(secret["stringData"]["DRUMBEAT_TOKEN"]) == 64
    everything = shown.stdout + shown.stderr + sent.stderr + json.dumps(desk.calls())
    assert "hf_never_shown" not in everything and secret["stringData"]["DRUMBEAT_TOKEN"] not in everything
    (create, submit) = [call for call in desk.calls() if "exec" not in call][:2]
    assert create == ["kubectl", "--namespace=runai-mlo-ada", "create", "-f", "-"]
    command, options, tail = stand_in.parse(desk.generation, submit[1:])
    assert command == stand_in.SUBMIT[desk.generation] and options.workers == ["1"] and options.project == ["mlo-ada"]
    assert options.large_shm and options.command and tail == ["sh", "-c", 'exec sh -c "$DRUMBEAT_SCRIPT"']
    status = desk("status", "--json")
    assert json.loads(status.stdout)["status"]["state"] == "queued", status.stderr
    cancelled = desk("cancel")
    assert cancelled.returncode == 0, cancelled.stderr
    assert "2 pods with 4 of a node's 8 GPUs each" in sent.stderr, "part of a node"
    assert "within 300 s after the end" in sent.stderr
    assert json.loads(desk("status", "--json").stdout)["status"]["state"] == "cancelled"
    assert not (desk.kept / "secret.json").exists() and not (desk.kept / "state").exists(), "nothing is left"
    assert not [call for call in desk.calls() if "exec" in call], "no pod is asked of a job that is queued or gone"


def test_the_documents_command_and_ours_side_by_side(tmp_path, cache):
    desk = Desk(tmp_path, cache, 1)
    _, asked, _ = stand_in.parse(1, shlex.split(DOCUMENT)[1:])
    _, got, _ = stand_in.parse(1, rendered(desk))
    for name in ("workers", "gpu", "image", "annotation", "extended_resource"):
        assert getattr(got, name) == getattr(asked, name), name


def rendered(desk, **keys):
    """The words behind `runai` in the script that submit would run."""
    shown = desk("plan", "--render", desk.job(**keys))
    assert shown.returncode == 0, shown.stderr
    lines = [line for line in shown.stdout.splitlines(True) if not line.startswith("#")]
    return shlex.split("".join(lines).replace("\\\n", ""))[1:]


def test_every_option(any_desk):
    more = {
        "cpus": 32, "memory": "256G", "partition": "h200", "qos": "preemptible",
        "submit_options": "['--existing-pvc claimname=scratch,path=/mloscratch', '--run-as-uid 1000', '--run-as-gid 100', "
        "'--run-folder=/mloscratch/runs']",
    }  # fmt: skip
    _, options, _ = stand_in.parse(any_desk.generation, rendered(any_desk, **more))
    assert options.node_pools == ["h200"] and options.run_as_uid == ["1000"] and options.run_as_gid == ["100"]
    assert options.existing_pvc == ["claimname=scratch,path=/mloscratch"] and options.extended_resource == [
        "rdma/rdma=1"
    ]
    if any_desk.generation == 1:
        assert options.cpu == ["32"] and options.memory == ["256G"] and options.gpu == ["4"]
        return
    assert options.cpu_core_request == ["32"] and options.cpu_memory_request == ["256G"]
    assert options.gpu_devices_request == ["4"] and options.master_gpu_devices_request == ["4"]
    assert options.master_extended_resource == ["rdma/rdma=1"], "node 0 needs its RDMA device like the others"
    if any_desk.generation == 2:
        assert any("DRUMBEAT_TOKEN=SECRET:" in each for each in options.environment)
    else:
        (token,) = [each for each in options.env_secret if each.startswith("DRUMBEAT_TOKEN=")]
        assert token.endswith(",key=DRUMBEAT_TOKEN") and options.preemptibility == ["preemptible"]
        assert options.restart_policy == options.master_restart_policy == ["Never"]
        assert options.master_cpu_core_request == ["32"] and options.master_cpu_memory_request == ["256G"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("account: unknown\n", "project unknown was not found"),
        ("account: ''\n", "names none"),
        ("submit-options: ['--large-smh']\n", "did you mean --large-shm?"),
        ("submit-options: ['--annotation a=b\\nrm -rf x']\n".replace("'", '"'), "is not an option of runai"),
        ('account: "a\\nrm -rf x"\n', "cannot be the name of a project"),
        ("account: -p\n", "cannot be the name of a project"),
        ("container: none\n", "names none"),
        ("binds: [/scratch]\n", "--existing-pvc"),
        ("qos: high\n", "is not one of preemptible"),
    ],
)
def test_bad_input_is_one_clear_error_and_leaves_nothing(tmp_path, cache, lines, words):
    desk = Desk(tmp_path, cache, 1)
    key = lines.split(":")[0] + ":"
    kept = "".join(line for line in JOB.splitlines(True) if not line.startswith(key))
    if lines == "account: ''\n":
        lines = ""
    done = desk("submit", desk.job(kept + lines))
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (desk.kept / "secret.json").exists() and not (desk.kept / "state").exists()
    assert not list((desk.base / "home").glob("runs/*"))


def test_no_runai_and_no_kubectl(tmp_path, cache):
    desk = Desk(tmp_path, cache, 1)
    (desk.base / "bin" / "kubectl").unlink()
    only = str(desk.base / "bin")
    assert "there is no kubectl here" in desk("submit", desk.job(), PATH=only).stderr
    (desk.base / "bin" / "runai").unlink()
    done = desk("submit", desk.job(), PATH=only)
    assert done.returncode == 2 and "there is no runai here" in done.stderr


def test_an_answer_that_comes_too_late_leaves_nothing(tmp_path, cache, monkeypatch, capsys):
    """Run:ai has taken the job, and its command has not answered in time."""
    desk, real, taken = Desk(tmp_path, cache, 1), subprocess.run, []
    for name, value in desk.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path / "home")

    def late(argv, **options):
        done = real(argv, **options)
        if argv[0] == "sh":
            taken.append((desk.kept / "state").exists() and (desk.kept / "secret.json").exists())
            raise subprocess.TimeoutExpired(argv, 120)
        return done

    monkeypatch.setattr(subprocess, "run", late)
    assert main(["submit", str(desk.job())]) == 2 and "has not answered for 120 s" in capsys.readouterr().err
    assert taken == [True] and not (desk.kept / "secret.json").exists() and not (desk.kept / "state").exists()
    assert not list((tmp_path / "home").glob("runs/*"))


def test_what_travels_runs(tmp_path, cache):
    """The secret as a pod gets it: its script brings drumbeat and the order into being, and the run ends with its code."""
    desk = Desk(tmp_path, cache, 2)
    local = tmp_path / "pod"
    text = JOB.replace("nodes: 2", "nodes: 1").replace("gpus: 4\n", "ranks-per-node: 2\n")
    text = text.replace("torchrun --nproc-per-node gpu train.py", "sh -c 'echo rank $$RANK of $$WORLD_SIZE; exit 3'")
    text = text.replace("/mloscratch/homes/ada", str(tmp_path)) + f"gpus: 0\npython: {sys.executable}\n"
    sent = desk("submit", "--json", desk.job(text + "submit-options: ['--linger=1s']\n"))
    assert sent.returncode == 0, sent.stderr
    values = json.loads((desk.kept / "secret.json").read_text())["stringData"]
    values = {name: value.replace("/tmp/drumbeat-run", str(local)) for name, value in values.items()}
    plain = {
        "DRUMBEAT_SCHEDULER": "runai",
        "DRUMBEAT_JOB": "x",
        "DRUMBEAT_HOSTS": "localhost",
        "RANK": "0",
        "PET_NNODES": "1",
    }
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **plain, **values}
    done = subprocess.run(["sh", "-c", 'exec sh -c "$DRUMBEAT_SCRIPT"'], env=environ, capture_output=True, text=True, timeout=500,
                          check=False)  # fmt: skip
    run_id = json.loads(sent.stdout)["run_id"]
    assert done.returncode == 3, done.stdout + done.stderr
    folder = local / run_id
    assert (folder / "nodes/0/attempt-0/rank-1.out").read_text() == "rank 1 of 2\n"
    assert (
        json.loads((folder / "summary.json").read_text())["exit_code"] == 3 and (folder / "ended").read_text() == "3\n"
    )
    found = [
        path
        for path in folder.rglob("*")
        if path.is_file() and values["DRUMBEAT_TOKEN"] in path.read_text(errors="replace")
    ]
    assert found == [], "the token is written nowhere"
