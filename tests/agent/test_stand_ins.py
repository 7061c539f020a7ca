"""Stand-ins for launchers: what all nodes must work out alike, and what is left as it was."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from drumbeat.agent.causes import CONFIGURATION, cause_of
from drumbeat.agent.ranks import launcher_driver
from drumbeat.agent.ranks.launcher_driver import program
from drumbeat.agent.ranks.launchers import launcher_of
from drumbeat.agent.ranks.stages import Stages
from drumbeat.agent.ranks.stand_ins import run_stand_in
from drumbeat.facts.model import Facts, Identity, Peer, Peers
from drumbeat.plan.argv import Process
from drumbeat.plan.binding import Binding, Slot
from drumbeat.runfolder.layout import NodeFolder
from tests.agent.test_lead import order

BOUND = Binding((Slot(0), Slot(1)), 1, "")


def launcher_and_variables(tmp_path, node, **changes):
    """One node of a joined run: each knows only its own facts, and has a run id of its own."""
    folder = NodeFolder(str(tmp_path / "nodes" / str(node)), node)
    os.makedirs(folder.attempt(0))
    local = tmp_path / f"local-{node}"
    local.mkdir()
    (tmp_path / "x.sh").write_text("torchrun --standalone x.py\n")
    asked = order(command=("bash", "x.sh"), workdir=str(tmp_path), launcher="once", run_id=f"r{node}", **changes)
    facts = [Facts(f"h{each}", identity=Identity(job_id="77")) if each == node else Facts("") for each in range(2)]
    peers = Peers(tuple(Peer(each, f"h{each}", "", facts[each], 0.0, 2) for each in range(2)), "10.0.0.1", 61000)
    launcher = launcher_of(asked, folder, folder, "bundle.pyz", str(local))
    return launcher, {variable.name: variable.value for variable in launcher.prepare(0, node, peers, BOUND)}


def prepared(tmp_path, node, **changes):
    return launcher_and_variables(tmp_path, node, **changes)[1]


def test_all_nodes_meet_at_the_same_ports_in_every_stage(tmp_path):
    folders = [prepared(tmp_path, node, meeting="77.0")["DRUMBEAT_LAUNCHERS"] for node in range(2)]
    settings = [json.loads(Path(each, ".settings.json").read_text()) for each in folders]
    assert settings[0]["ports"] == settings[1]["ports"] and settings[0]["ports"][0] == 61000
    assert len(set(settings[0]["ports"])) > 4 and os.stat(folders[0]).st_mode & 0o777 == 0o700


def test_bash_functions_find_the_stand_in_or_the_real_program(tmp_path):
    environ = prepared(tmp_path, 0)
    assert "BASH_FUNC_accelerate-launch%%" not in environ  # no name that a shell in POSIX mode complains about
    stand_in = os.path.join(environ["DRUMBEAT_LAUNCHERS"], "torchrun")
    with open(stand_in, "w") as file:
        file.write("#!/bin/sh\necho stand-in $1\n")
    real = tmp_path / "bin" / "torchrun"
    real.parent.mkdir()
    real.write_text("#!/bin/sh\necho real $1\n")
    real.chmod(0o755)
    script = (
        f"PATH={real.parent}:$PATH; torchrun 1; rm {stand_in}; torchrun 2"  # an activate, and a node without the folder
    )
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True)
    assert done.stdout == "stand-in 1\nreal 2\n", done.stderr


def test_a_launcher_that_is_not_there_starts_no_rank_whatever_the_script_ends_with(tmp_path, monkeypatch, capsys):
    launcher, environ = launcher_and_variables(tmp_path, 0)
    folder = environ["DRUMBEAT_LAUNCHERS"]
    script = Process(0, 0, ("bash", "x.sh"))
    monkeypatch.setenv("PATH", folder)
    monkeypatch.setenv("DRUMBEAT_LAUNCHERS", folder)
    settings = os.path.join(folder, ".settings.json")
    assert run_stand_in([settings, "torchrun", "--version"]) == 127  # only asked whether it is there
    assert launcher.ends(0, script, 0, 5.0)[0].exit_code == 0
    assert run_stand_in([settings, "torchrun", "train.py"]) == 127
    assert capsys.readouterr().err.endswith("drumbeat: torchrun: command not found\n")
    end = launcher.ends(0, script, 0, 5.0)[0]
    assert (end.exit_code, end.of_command, end.finding.code) == (127, True, "command-not-found")
    assert "no rank was started" in end.finding.cause and cause_of(end.finding, 127) is CONFIGURATION
    Path(launcher.logs.log(0, 0, "out")).touch()  # an earlier launcher has started ranks: then it is a doubt
    end = launcher.ends(0, script, 0, 5.0)[0]
    assert (end.exit_code, end.finding.severity, end.finding.title) == (
        0,
        "warning",
        "the script's torchrun was not found",
    )


def test_a_launcher_that_ended_before_its_first_rank_is_no_success(tmp_path):
    launcher, environ = launcher_and_variables(tmp_path, 0)
    Stages(environ["DRUMBEAT_LAUNCHERS"]).begin(["torchrun", "--no-such-flag", "train.py"])
    script = Process(0, 0, ("bash", "x.sh"))
    end = launcher.ends(0, script, 0, 5.0)[0]
    assert (end.exit_code, end.finding.code) == (1, "no-rank-started")
    Path(launcher.logs.log(0, 0, "out")).touch()
    assert launcher.ends(0, script, 0, 5.0)[0].exit_code == 0


def test_accelerate_that_would_start_one_process_for_several_ranks_is_refused(monkeypatch, capsys):
    """With --cpu, accelerate's own way is one process per node, and each takes itself for rank 0."""
    started, wanted = [], SimpleNamespace()
    launch = ModuleType("accelerate.commands.launch")
    commands = ModuleType("accelerate.commands")
    commands.launch, launch.main = launch, lambda: launch.simple_launcher(wanted)
    monkeypatch.setitem(sys.modules, "accelerate", ModuleType("accelerate"))
    monkeypatch.setitem(sys.modules, "accelerate.commands", commands)
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setattr(launcher_driver, "by_torch", lambda settings, begin, arguments: begin() or 0)
    shim = ["python3", "_shim"]
    for processes, machines, code in ((1, 1, 0), (4, 2, 2), (2, 1, 2)):
        wanted.num_processes, wanted.num_machines = processes, machines
        launch.simple_launcher = started.append
        assert launcher_driver.accelerate({"shim": shim}, ["--cpu", *shim, "python", "-u", "a.py"]) == code
    assert len(started) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "not 4 ranks" in first and "-- env ACCELERATE_USE_CPU=true python -u a.py;" in first
    assert "drumbeat run --nodes 2 --ranks-per-node 2 --" in first and "--nodes 1 --ranks-per-node 2 --" in second


@pytest.mark.parametrize(
    "worker, name",
    [
        (["/v/bin/python", "-u", "train.py", "--lr", "1"], "train.py"),
        (["python3", "-u", "-m", "pkg.train"], "pkg.train"),
        (["./train.sh", "--lr"], "./train.sh"),
    ],
)
def test_the_failure_table_names_the_users_program(worker, name):
    shim = ["/usr/bin/python3", "-I", "drumbeat.pyz", "_rank", "{}"]
    assert program(shim, ["--nnodes=2", "--no-python", *shim, *worker]) == name
    assert program(shim, ["--nnodes=2", *worker]) == program([], worker) == ""
