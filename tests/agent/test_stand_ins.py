"""Stand-ins for launchers: what all nodes must work out alike, and what is left as it was."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from drumbeat.agent.ranks.ends import rank_meant
from drumbeat.agent.ranks.launchers import launcher_of
from drumbeat.agent.ranks.stages import Stages, read_report
from drumbeat.agent.ranks.stand_ins import run_stand_in
from drumbeat.agent.ranks.start import plain_end
from drumbeat.causes.table import CONFIGURATION, cause_of
from drumbeat.inrank import driver as launcher_driver
from drumbeat.inrank.driver import program
from drumbeat.machine.model import Facts, Identity, Peer, Peers
from drumbeat.plan.argv import Process
from drumbeat.plan.binding import Binding, Slot
from drumbeat.runfolder.layout import NodeFolder
from tests.agent.test_lead import order

BOUND = Binding((Slot(0), Slot(1)), 1, "")


def launcher_and_variables(tmp_path, node, script="torchrun --standalone x.py\n", **changes):
    """One node of a joined run: each knows only its own facts, and has a run id of its own."""
    folder = NodeFolder(str(tmp_path / "nodes" / str(node)), node)
    os.makedirs(folder.attempt(0))
    local = tmp_path / f"local-{node}"
    local.mkdir()
    (tmp_path / "x.sh").write_text(script)
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
    assert launcher.ends(0, plain_end(script.rank, 0, 5.0))[0].exit_code == 0
    assert run_stand_in([settings, "torchrun", "train.py"]) == 127
    assert capsys.readouterr().err.endswith("drumbeat: torchrun: command not found\n")
    end = launcher.ends(0, plain_end(script.rank, 0, 5.0))[0]
    assert (end.exit_code, end.of_command, end.finding.code) == (127, True, "command-not-found")
    assert "no rank was started" in end.finding.cause and cause_of(end.finding, 127) is CONFIGURATION
    Path(launcher.logs.log(0, 0, "out")).touch()  # an earlier launcher has started ranks: then it is a doubt
    end = launcher.ends(0, plain_end(script.rank, 0, 5.0))[0]
    assert (end.exit_code, end.finding.severity, end.finding.title) == (
        0,
        "warning",
        "the script's torchrun was not found",
    )


def test_a_stand_in_finds_the_real_launcher_though_the_script_has_unset_our_variables(tmp_path):
    """`env -u DRUMBEAT_LAUNCHERS torchrun`, `env -i PATH=$PATH torchrun`: it must not take itself for the launcher."""
    _, environ = launcher_and_variables(tmp_path, 0)
    folder = environ["DRUMBEAT_LAUNCHERS"]
    real = tmp_path / "bin" / "torchrun"
    real.parent.mkdir()
    real.write_text('#!/bin/sh\n[ -z "$DRUMBEAT_LAUNCHERS" ] && echo real $1 $PATH\n')
    real.chmod(0o755)
    call = [
        sys.executable,
        "-c",
        "import sys; from drumbeat.agent.ranks.stand_ins import run_stand_in as r; r(sys.argv[1:])",
    ]
    paths = {"PATH": f"{folder}:{real.parent}:/bin", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    words = [*call, os.path.join(folder, ".settings.json"), "torchrun", "--version"]
    done = subprocess.run(words, env=paths, capture_output=True, text=True)
    assert done.stdout == f"real --version {real.parent}:/bin\n", done.stderr


def test_a_launcher_that_ended_before_its_first_rank_is_no_success(tmp_path):
    launcher, environ = launcher_and_variables(tmp_path, 0)
    Stages(environ["DRUMBEAT_LAUNCHERS"]).begin(["torchrun", "--no-such-flag", "train.py"])
    script = Process(0, 0, ("bash", "x.sh"))
    end = launcher.ends(0, plain_end(script.rank, 0, 5.0))[0]
    assert (end.exit_code, end.finding.code) == (1, "no-rank-started")
    Path(launcher.logs.log(0, 0, "out")).touch()
    assert launcher.ends(0, plain_end(script.rank, 0, 5.0))[0].exit_code == 0


def test_accelerate_that_would_start_one_process_for_several_ranks_is_refused(tmp_path, monkeypatch, capsys):
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
    settings = {"shim": shim, "report": str(tmp_path / "report.json"), "redirected": False}
    monkeypatch.setattr(launcher_driver, "has_gpu", lambda: wanted.gpu)
    refusals = []
    for processes, machines, cpu, gpu, code in (
        (1, 1, True, True, 0), (4, 2, True, True, 2), (2, 1, False, True, 2), (2, 1, False, False, 2)
    ):  # fmt: skip
        wanted.gpu = gpu
        wanted.num_processes, wanted.num_machines, wanted.cpu, wanted.use_cpu = processes, machines, cpu, cpu
        launch.simple_launcher = started.append
        assert launcher_driver.accelerate(settings, ["--cpu", *shim, "python", "-u", "a.py"]) == code
        refusals += [read_report(settings["report"]).refused] if code else []
    assert len(started) == 1 and not any(capsys.readouterr())  # drumbeat says it, once for all nodes
    first, second, third = refusals
    assert third.startswith("on CPUs") and "--multi_gpu" not in third, "without a GPU it would lead nowhere"
    assert first.startswith("on CPUs accelerate launch starts one process per node") and "not 4 ranks\n" in first
    assert first.endswith("  drumbeat run --nodes 2 --ranks-per-node 2 -- env ACCELERATE_USE_CPU=true python -u a.py")
    assert "--multi_gpu" in second and "--nodes 1 --ranks-per-node 2 --" in second


def test_a_refusal_of_the_driver_is_the_commands_and_has_the_line_to_type(tmp_path):
    """Not a failure of rank 0 for a cause that is not known."""
    scripts, environ = launcher_and_variables(tmp_path, 0)
    stages = Stages(environ["DRUMBEAT_LAUNCHERS"])
    stages.begin(["accelerate", "launch", "a.py"])
    driven = launcher_of(
        order(command=("accelerate", "launch", "a.py"), launcher="once"), scripts.folder, scripts.logs, "b.pyz", ""
    )
    settings = json.loads(driven.driver_tools(0, 0, BOUND).settings)
    for report in (settings["report"], stages.report(0)):
        launcher_driver.write({"report": report}, [], refused="one process, not 4 ranks\n  drumbeat run -- python a.py")
    for launcher in (driven, scripts):
        (end,) = launcher.ends(0, plain_end(0, 2 << 8, 5.0))
        assert (end.exit_code, end.of_command, end.finding.code) == (2, True, "launcher-refused")
        assert (end.finding.title, end.finding.fix) == ("one process, not 4 ranks", "drumbeat run -- python a.py")
        assert rank_meant(launcher, end, end.finding) is None


@pytest.mark.parametrize("text, is_rank", [("mp.spawn(main, nprocs=2)\n", False), ("print(1)\n", True)])
def test_a_program_that_spawns_its_ranks_is_none_itself(tmp_path, text, is_rank):
    folder = NodeFolder(str(tmp_path), 0)
    (tmp_path / "a.py").write_text(text)
    asked = order(command=("python", "a.py"), workdir=str(tmp_path), launcher="once")
    launcher = launcher_of(asked, folder, folder, "b.pyz", str(tmp_path))
    launcher.prepare(0, 0, Peers((Peer(0, "h0", "", Facts("h0"), 0.0, 1),), "10.0.0.1", 61000), BOUND)
    (end,) = launcher.ends(0, plain_end(0, 256, 5.0))
    assert (launcher.is_rank, end.of_command) == (is_rank, not is_rank)


def test_a_launcher_that_fails_before_its_first_rank_is_not_rank_0(tmp_path):
    folder = NodeFolder(str(tmp_path), 0)
    os.makedirs(folder.attempt(0))
    launcher = launcher_of(order(command=("torchrun", "a.py"), launcher="torchrun"), folder, folder, "b.pyz", "")
    process = Process(0, 0, ("torchrun",))
    assert launcher.ends(0, plain_end(process.rank, 2 << 8, 5.0))[0].of_command
    Path(folder.log(0, 0, "out")).touch()
    assert not launcher.ends(0, plain_end(process.rank, 2 << 8, 5.0))[0].of_command


FAILED = [{"rank": 1, "exit_code": 9, "t": 4.0}]


@pytest.mark.parametrize(
    "script, reports, status, outcome",
    [
        ("torchrun a.py || python b.py\n", [FAILED], 0, "told"),
        ("torchrun a.py | tee log\n", [FAILED], 0, "failed"),
        ("torchrun a.py || python b.py\necho done\n", [FAILED], 0, "failed"),  # nothing says how b.py ended
        ("torchrun a.py || python b.py\n", [FAILED], 256, "failed"),
        ("torchrun a.py || torchrun b.py\n", [FAILED, []], 0, "told"),
        ("torchrun a.py | tee log; torchrun --no-such-flag b.py | tee log\n", [FAILED, None], 0, "failed"),
        ("torchrun a.py | tee log; torchrun --no-such-flag b.py | tee log\n", [FAILED, 2], 0, "failed"),
        ("if ! torchrun a.py; then\n  python b.py\nfi\n", [FAILED], 0, "told"),
        ("torchrun a.py || true\n", [FAILED], 0, "failed"),
        ("timeout 60 torchrun a.py || true\n", [FAILED], 0, "failed"),
        ("torchrun a.py; torchrun b.py | tee log\n", [[], FAILED], 0, "failed"),
        ("torchrun a.py; torchrun b.py\n", [[], []], 0, "ended well"),
    ],
)
def test_a_failed_stage_is_told_and_fails_the_run_unless_a_later_one_ended_well(
    tmp_path, script, reports, status, outcome
):
    launcher, environ = launcher_and_variables(tmp_path, 0, script=script)
    stages = Stages(environ["DRUMBEAT_LAUNCHERS"])
    for number, failures in enumerate(reports):
        stages._add({"command": f"torchrun {'ab'[number]}.py"})
        if isinstance(failures, int):
            launcher_driver.write({"report": stages.report(number)}, [], exit_code=failures)
        elif failures is not None:
            launcher_driver.write({"report": stages.report(number)}, failures)
    Path(launcher.logs.log(0, 0, "out")).touch()
    (end,) = launcher.ends(0, plain_end(0, status, 5.0))
    if outcome == "failed":
        assert (end.rank, end.exit_code, end.of_command) == (1, 9, False)
        return
    assert end.exit_code == 0 and end.of_command
    if outcome == "ended well":
        assert end.finding is None
        return
    finding = end.finding
    assert (finding.code, finding.severity, finding.rank) == ("stage-failed", "warning", 1)
    assert finding.title == "the script's torchrun a.py failed (exit code 9)" and "b.py" in finding.cause


def test_later_launchers_of_a_script_are_told_once_with_their_time(tmp_path):
    launcher, environ = launcher_and_variables(tmp_path, 0, script="torchrun a.py; torchrun b.py\n")
    assert launcher.new_stages() == []
    stages = Stages(environ["DRUMBEAT_LAUNCHERS"])
    stages.begin(["torchrun", "a.py"])
    assert launcher.new_stages() == []
    stages.refuse(["torchrun", "c.py"], "no")
    stages._add({"command": "torchrun b.py", "t": 12.5})
    (began,) = launcher.new_stages()
    assert began == pytest.approx(12.5, abs=0.1) and launcher.new_stages() == []


@pytest.mark.parametrize(
    "script, later",
    [
        ("timeout 9 torchrun a.py > log 2>&1 || true\n", "ended with exit code 0"),
        ("torchrun a.py > log 2>&1\necho done\n", "ended with exit code 0"),
        ("torchrun a.py || python b.py\n", "what ran after it ended well: python b.py"),
        ("torchrun a.py; torchrun b.py\n", "what ran after it ended well: torchrun b.py"),
    ],
)
def test_a_launcher_that_failed_without_a_rank_is_told(tmp_path, script, later):
    """It was told to stop, or could not meet the others, and its output went to a file: nothing else shows that."""
    launcher, environ = launcher_and_variables(tmp_path, 0, script=script)
    stages = Stages(environ["DRUMBEAT_LAUNCHERS"])
    stages._add({"command": "torchrun a.py"})
    launcher_driver.write({"report": stages.report(0)}, [], exit_code=143)
    if "; torchrun b.py" in script:
        stages._add({"command": "torchrun b.py"})
        launcher_driver.write({"report": stages.report(1)}, [])
    Path(launcher.logs.log(0, 0, "out")).touch()
    (end,) = launcher.ends(0, plain_end(0, 0, 5.0))
    assert (end.exit_code, end.finding.code, end.finding.rank) == (0, "stage-failed", None)
    assert (
        end.finding.title == "the script's torchrun a.py was told to stop (signal 15)" and not launcher.ranks_ended_well
    )
    assert end.finding.cause == f"the script went on, and {later}"
    (end,) = launcher.ends(0, plain_end(0, 143 << 8, 5.0))
    assert (end.exit_code, end.finding) == (143, None)


@pytest.mark.parametrize(
    "script, reports, code, finding",
    [
        ("torchrun a.py & sleep 7\necho started\n", [None], 1, "launcher-unended"),
        ("torchrun a.py kill 2>&1 | tee log\n", [None], 1, "launcher-unended"),
        ("torchrun a.py; torchrun b.py | tee log\n", [[], None], 1, "launcher-unended"),
        ("torchrun a.py; torchrun a.py; torchrun b.py | tee log\n", [FAILED, [], None], 1, "launcher-unended"),
        ("torchrun a.py | tee log; torchrun b.py | tee log\n", [FAILED, None], 9, None),
        ("torchrun a.py || python b.py\n", [None], 0, "stage-failed"),
        ("torchrun a.py & python client.py\nkill $!\n", [None], 0, "launcher-unended"),  # meant so, perhaps
        ("torchrun a.py || torchrun b.py\n", [None, []], 0, None),
    ],
)
def test_a_launcher_that_has_not_ended_when_its_script_does_is_no_success(tmp_path, script, reports, code, finding):
    launcher, environ = launcher_and_variables(tmp_path, 0, script=script)
    stages = Stages(environ["DRUMBEAT_LAUNCHERS"])
    for number, failures in enumerate(reports):
        stages._add({"command": "torchrun a.py"})
        if failures is None:
            Path(stages.report(number) + ".running").touch()
        else:
            launcher_driver.write({"report": stages.report(number)}, failures)
    Path(launcher.logs.log(0, 0, "out")).touch()
    (end,) = launcher.ends(0, plain_end(0, 0, 5.0))
    assert (end.exit_code, end.finding and end.finding.code) == (code, finding)
    if finding:
        assert end.finding.title == "the script ended while its torchrun a.py had not reported its end"
        assert end.finding.severity == ("error" if code else "warning") and "`wait`" in end.finding.fix


def test_a_single_process_of_accelerate_that_fails_is_reported(tmp_path, monkeypatch):
    """accelerate starts it without torchrun; behind a pipe into tee nobody would see its exit code."""
    package = "torch.distributed.elastic.multiprocessing"
    for name in ("api", "errors"):
        module = ModuleType(f"{package}.{name}")
        module.SignalException = module.ChildFailedError = type("Other", (Exception,), {})
        monkeypatch.setitem(sys.modules, f"{package}.{name}", module)

    def fails():
        raise subprocess.CalledProcessError(-9, ["python", "a.py"])

    settings = {"report": str(tmp_path / "report.json"), "first": 3}
    assert launcher_driver.by_torch(settings, fails, []) == 137
    (failure,) = read_report(settings["report"]).failures
    assert (failure["rank"], failure["exit_code"]) == (3, -9)


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


def test_a_report_that_cannot_be_written_makes_no_failure_of_a_success(tmp_path, monkeypatch):
    report = str(tmp_path / "gone" / "report.json")
    settings = {"report": report, "folder": str(tmp_path), "log": str(tmp_path / "launcher"), "stage": True}
    monkeypatch.setitem(launcher_driver.MODULES, "good", lambda settings, arguments: 0)
    monkeypatch.setattr(sys, "argv", ["driver", json.dumps(settings), "good"])
    assert launcher_driver.main() == 0
    (tmp_path / "gone").mkdir()
    assert launcher_driver.main() == 0 and read_report(report).succeeded


@pytest.mark.parametrize(
    "end, code",
    [(SystemExit(0), 0), (SystemExit(2), 2), (RuntimeError("no rendezvous"), 1), (KeyboardInterrupt(), 1)],
)
def test_a_stage_counts_as_running_until_its_driver_ends_in_whatever_way(tmp_path, monkeypatch, end, code):
    seen = []

    def launch(settings, arguments):
        seen.append(os.path.exists(settings["report"] + ".running"))
        raise end

    settings = {"report": str(tmp_path / "r.json"), "folder": str(tmp_path), "log": str(tmp_path / "l"), "stage": True}
    monkeypatch.setitem(launcher_driver.MODULES, "other", launch)
    monkeypatch.setattr(sys, "argv", ["driver", json.dumps(settings), "other"])
    with pytest.raises(type(end)):
        launcher_driver.main()
    assert seen == [True] and os.listdir(tmp_path) == ["r.json"]
    report = read_report(settings["report"])
    assert (report.exit_code, report.failures, report.succeeded) == (code, (), code == 0)


@pytest.mark.parametrize(
    "content", ["[" * 200_000, '{"command": "a", "t": NaN}\n' * 3, '{"command": "a", "t": 1e999}\n' * 3, "no JSON\n"]
)
def test_a_hostile_record_of_stages_tells_no_times(tmp_path, content):
    (tmp_path / ".stages.jsonl").write_text(content)
    assert Stages(str(tmp_path)).begun_since() == []


def test_a_record_of_very_many_stages_is_bounded(tmp_path):
    (tmp_path / ".stages.jsonl").write_text('{"command": "a", "t": 1.0}\n' * 200_000)
    assert len(Stages(str(tmp_path)).begun_since()) == 999
