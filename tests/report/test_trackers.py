"""Trackers while a run goes on: what any program prints arrives there, and nothing that a tracker does ends the run."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from drumbeat.agent.ranks.start import start as process_start
from drumbeat.metrics.trackers import shown_tracker
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.tracker import Live
from tests.conftest import wait_for
from tests.runfolder.folders import make_run, metrics, order

# Goes on after step 3 only when somebody has seen step 1 in the tracker.
PROGRAM = """
import os, sys, time
for step in range(1, 7):
    while step == 4 and not os.path.exists("seen"):
        time.sleep(0.05)
    if os.environ["RANK"] == "1":
        print(f"step {step}/6 loss {3 / step:.3f}", flush=True)
    time.sleep(0.3)
"""


def losses(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    if not folder.exists():
        return []
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return [(each.step, round(each.value, 2)) for each in found.Scalars("step/loss")] if found.Tags()["scalars"] else []


def test_tensorboard_has_the_losses_while_the_program_still_runs(drumbeat):
    """The last rank prints them, as with Megatron-LM."""
    pytest.importorskip("tensorboard")
    (drumbeat.folder / "program.py").write_text(PROGRAM)
    job = {"command": [sys.executable, "program.py"], "ranks-per-node": 2, "track": "tensorboard=tb"}
    (drumbeat.folder / "job.yaml").write_text(json.dumps(job))
    process = subprocess.Popen(
        [sys.executable, "-m", "drumbeat", "run", "job.yaml"],
        cwd=drumbeat.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    drumbeat.started.append(process)
    wait_for(lambda: losses(drumbeat.folder / "tb")[:1] == [(1, 3.0)], 120, "step 1 in TensorBoard")
    (drumbeat.folder / "seen").touch()
    assert process.wait(120) == 0, process.stdout.read()
    assert losses(drumbeat.folder / "tb") == [(1, 3.0), (2, 1.5), (3, 1.0), (4, 0.75), (5, 0.6), (6, 0.5)]


def test_a_tracker_that_is_not_installed_is_named_before_any_rank_starts(drumbeat):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", drumbeat.folder / "bare"], check=True)
    done = drumbeat("run", "--track", "mlflow", "--", drumbeat.folder / "bare/bin/python", "-c", "print('trained')")
    assert done.returncode != 0 and "trained" not in done.stdout
    assert "has no package for `track`: mlflow" in done.stderr and "pip install mlflow" in done.stderr
    refused = drumbeat.here("run", "--track", "neptune", "--", sys.executable, "-c", "pass")
    assert refused.returncode == 2 and "known: tensorboard, wandb, mlflow" in refused.stderr


def test_a_tracker_that_fails_ends_no_run(drumbeat):
    pytest.importorskip("tensorboard")
    (drumbeat.folder / "file").touch()
    (drumbeat.folder / "seen").touch()
    (drumbeat.folder / "program.py").write_text(PROGRAM)
    flags = ("--ranks-per-node", 2, "--track", "tensorboard=file/below")
    done = drumbeat("run", *flags, "--", sys.executable, "program.py")
    assert done.returncode == 0, done.stderr
    assert "not all metrics reached a tracker" in done.stderr
    assert "tensorboard: " in (drumbeat.run_folder() / "track-tensorboard.log").read_text()


def start(run, kind, place):
    """One start of a run, from its tracker's view."""
    live = Live(Run.open(run.path), kind, str(place))
    live.end()
    assert live.problem == ""
    return live


def report(run, steps):
    for step in steps:
        metrics(run, {"t": 1000.0 + len(list(run.metrics(0))), "rank": 0, "step": step, "loss": 3 / step})


def test_a_later_start_continues_where_the_first_one_ended(tmp_path):
    """The second start begins again at the checkpoint of step 2: TensorBoard drops the first one's steps 3 and 4."""
    pytest.importorskip("tensorboard")
    run = make_run(tmp_path / "run")
    report(run, [1, 2, 3, 4])
    first = start(run, "tensorboard", tmp_path / "tb")
    report(run, [3, 4, 5])
    second = start(run, "tensorboard", tmp_path / "tb")
    assert (first._sent, second._sent) == (1003.0, 1006.0)
    assert [step for step, _ in losses(tmp_path / "tb")] == [1, 2, 3, 4, 5]


def test_mlflow_has_one_run_for_all_starts(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy", reason="mlflow's own file store needs it")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_RUN_ID", "the-program's-own")
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "run")
    for steps in ([1, 2], [3, 4]):
        report(run, steps)
        start(run, "mlflow", "test")
    (found,) = mlflow.search_runs(experiment_names=["test"], output_format="list")
    points = mlflow.MlflowClient().get_metric_history(found.info.run_id, "step/loss")
    assert [(point.step, point.timestamp) for point in points] == [(n, 999000 + 1000 * n) for n in (1, 2, 3, 4)]
    assert found.info.run_name == f"drumbeat-{run.run_id}"


LIVE = """
import sys
from drumbeat.runfolder.tracker import Live
from drumbeat.agent.ranks.start import start as process_start
from drumbeat.metrics.trackers import shown_tracker
from drumbeat.runfolder.run import Run
live = Live(Run.open(sys.argv[1]), "wandb", "test")
live.end()
sys.exit(live.problem or None)
"""


def test_wandb_without_a_key_keeps_the_figures_for_later(tmp_path):
    """Both starts have the same run id, whatever the program's own is: `wandb sync` makes one run of them."""
    pytest.importorskip("wandb")
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    env.update(HOME=str(tmp_path), WANDB_DIR=str(tmp_path), WANDB_RUN_ID="own", WANDB_BASE_URL="http://127.0.0.1:9")
    run = make_run(tmp_path / "run")
    for steps in ([1, 2], [3, 4]):
        report(run, steps)
        done = subprocess.run(
            [sys.executable, "-c", LIVE, run.path], env=env, check=False, capture_output=True, text=True
        )
        assert done.stderr.splitlines()[-1].startswith(f"wandb: offline, kept in {tmp_path}/wandb/offline-run-")
    made = [path.name for path in tmp_path.glob("wandb/offline-run-*")]
    assert made and all(name.endswith(f"-drumbeat-{run.run_id}") for name in made)


def test_what_a_tracker_prints_is_kept_without_secrets(tmp_path):
    log = str(tmp_path / "log")
    prints = "echo 'api key: 0123456789abcdef0123'; echo plain; printf 'HF_TOKEN=hf_abcdefghijklmnopqrstuv' >&2"
    pid = process_start(["sh", "-c", prints], dict(os.environ), str(tmp_path), log)
    assert os.waitpid(pid, 0)[1] == 0
    wait_for(lambda: "HF_TOKEN=" in (tmp_path / "log").read_text(), what="all that was printed")
    assert sorted((tmp_path / "log").read_text().splitlines()) == ["HF_TOKEN=…", "api key: …", "plain"]


def test_a_tracker_that_finds_no_key_here_is_said_to_be_in_doubt(tmp_path, monkeypatch):
    for name in [*(name for name in os.environ if name.startswith("WANDB_")), "NETRC"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    plain = order(tmp_path)
    assert (
        "no key is seen here" in shown_tracker("wandb=p", plain)
        and shown_tracker("tensorboard=", plain) == "tensorboard"
    )
    assert shown_tracker("wandb=p", dataclasses.replace(plain, passed=("WANDB_API_KEY",))) == "wandb=p"
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password 0\n")
    assert shown_tracker("wandb=p", plain) == "wandb=p"
