"""Real runs: three sizes of one program give the scaling table; what a run records; the on-end command; old folders."""

import io
import json
import os
import re
import subprocess
import sys

import pytest

from drumbeat.cli import main
from tests.conftest import wait_for
from tests.runfolder.folders import make_run

# Each rank reports 30 steps; the batch of a step is given, the ranks share it.
PROGRAM = """
import os, sys, time
from drumbeat import metrics
batch, ranks = int(sys.argv[1]), int(os.environ["WORLD_SIZE"])
for step in range(1, 31):
    time.sleep(0.02)
    metrics.report(step, steps=30, loss=5 - step / 10, samples=batch // ranks)
"""


def run(drumbeat, nodes, batch, name):
    script = drumbeat.folder / "program.py"
    script.write_text(PROGRAM)
    flags = ("--name", name, "--nodes", nodes, "--ranks-per-node", 1)
    done = drumbeat("run", *flags, "--", sys.executable, str(script), str(batch), timeout=150)
    assert done.returncode == 0, done.stderr


def test_one_two_and_four_nodes_scale(drumbeat, capsys):
    def read(*words):
        assert main(list(words)) == 0
        return capsys.readouterr().out

    for nodes in (1, 2, 4):
        run(drumbeat, nodes, 64, f"scale-{nodes}")
    run(drumbeat, 2, 96, "other-batch")
    plain = json.loads(read("compare", "scale-4", "scale-1", "scale-2", "--json"))
    assert plain["kind"] == "strong" and plain["fair"] and plain["unit"] == "samples/s"
    assert [(row["nodes"], row["size"]) for row in plain["rows"]] == [(1, 1), (2, 2), (4, 4)]
    for row in plain["rows"]:
        figures = json.loads(read("report", row["name"], "--json"))
        state = json.loads(read("status", row["name"], "--json"))
        assert row["throughput"] == figures["speed"]["value"] == state["throughput"]["value"]
        assert figures["ledger"] == state["summary"]["ledger"] and figures["batch"] == 64
        assert row["speedup"] == pytest.approx(row["throughput"] / plain["rows"][0]["throughput"])
    assert [row["name"] for row in plain["rows"]] == ["scale-1", "scale-2", "scale-4"]
    assert read("report", plain["rows"][2]["source"], "--json") == read("report", "scale-4", "--json")
    mixed = read("compare", "scale-1", "other-batch")
    assert "NOT A FAIR COMPARISON" in mixed and "scaling: neither" in mixed
    assert re.search(r"command: .* 64 \(scale-1\)", " ".join(mixed.split()))


@pytest.fixture
def checkout(drumbeat):
    def git(*words):
        who = ("-c", "user.name=x", "-c", "user.email=x@y")
        subprocess.run(["git", "-C", str(drumbeat.folder), *who, *words], check=True, capture_output=True)

    git("init", "-q")
    (drumbeat.folder / "train.py").write_text("steps = 3\n")
    git("add", "train.py")
    git("commit", "-qm", "one")
    return drumbeat


def test_a_run_records_code_and_packages_without_secrets(checkout):
    (checkout.folder / "train.py").write_text("steps = 4\nHF_TOKEN = 'hf_abcdefghijklmnopqrstuvwxyz012345'\n")
    job = checkout.folder / "job.yaml"
    job.write_text(json.dumps({"name": "told", "on-end": ["no-such-program-anywhere"]}))
    done = checkout("run", str(job), "--", sys.executable, "train.py")
    assert done.returncode == 0 and "on-end: no-such-program-anywhere: No such file" in done.stderr, done.stderr
    folder = checkout.run_folder()
    code = json.loads((folder / "code.json").read_text())
    diff = (folder / "code.diff").read_text()
    assert len(code["commit"]) == 40 and code["dirty"] and len(code["diff_digest"]) == 64
    assert "+steps = 4" in diff and "hf_abc" not in diff and (folder / "code.diff").stat().st_mode & 0o077 == 0
    assert set(json.loads((folder / "packages.json").read_text())) == {"folders", "packages"}


def test_on_end(drumbeat):
    out = drumbeat.folder / "told"
    told = [sys.executable, "-c", f"import os, sys; open({str(out)!r}, 'a').write(' '.join(sys.argv[1:]) + "
            "' ' + os.environ['DRUMBEAT_EXIT_CODE'] + ' ' + str('DRUMBEAT_TOKEN' in os.environ) + '\\n')", "{run_id}",
            "{outcome}", "$HOME;echo"]  # fmt: skip
    job = drumbeat.folder / "job.yaml"
    job.write_text(json.dumps({"name": "told", "on-end": told, "nodes": 2, "ranks-per-node": 1, "restarts": 1}))
    done = drumbeat("run", str(job), "--", sys.executable, "-c", "import sys; sys.exit(3)")
    assert done.returncode == 3, done.stderr
    home = os.environ["HOME"]
    assert out.read_text() == f"{drumbeat.run_folder().name} failed {home};echo 3 False\n", "once, and no shell saw it"


def test_clean_removes_only_what_is_old_ended_and_ours(drumbeat, capsys, monkeypatch):
    assert drumbeat("run", "--name", "old", "--", sys.executable, "-c", "pass").returncode == 0
    old = drumbeat.run_folder()
    assert main(["list", "--clean"]) == 0 and "no run that has ended is older than 30d" in capsys.readouterr().out
    keep = drumbeat.folder / "keep.txt"
    keep.write_text("mine")
    os.symlink(keep, old / "link")
    now = ["list", "--clean", "--older-than", "0s"]
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert main(now) == 2 and "cannot ask" in capsys.readouterr().err and old.is_dir()
    assert main(["list", "--clean", "--older-than", "soon"]) == 2
    assert main([*now, "--yes"]) == 0 and "1 run folders removed" in capsys.readouterr().out
    assert not old.exists() and keep.read_text() == "mine"
    assert main(["list"]) == 0 and "no run was started yet" in capsys.readouterr().out


def test_clean_keeps_what_is_no_run_of_ours(home, tmp_path, capsys):
    run = make_run(tmp_path / "runs" / "r-1")
    index = home / ".local/state/drumbeat/runs"
    index.mkdir(parents=True)
    (index / "r-1").symlink_to(run.path)
    (tmp_path / "runs" / "r-1").rename(tmp_path / "runs" / "precious")
    (index / "r-1").unlink()
    (index / "r-1").symlink_to(tmp_path / "runs" / "precious")
    assert main(["list", "--clean", "--older-than", "0s", "--yes"]) == 0
    assert "is not named after its run" in capsys.readouterr().out and (tmp_path / "runs" / "precious").is_dir()


def test_clean_steers_no_terminal(home, tmp_path, capsys):
    """Folders have the names that their writers gave them."""
    index = home / ".local/state/drumbeat/runs"
    index.mkdir(parents=True)
    for number, name in enumerate(("ended\x1b]0;title\x07", "ended-too", "damaged\x1b[2J")):
        make_run(tmp_path / "runs" / name)
        (index / f"r-{number}").symlink_to(tmp_path / "runs" / name)
    (tmp_path / "runs" / "damaged\x1b[2J" / "run.json").write_text("{")
    for words, named in (
        (["status", "ended"], "ended"),
        (["list", "--clean", "--older-than", "0s", "--yes"], "ended"),
        (["list"], "damaged"),
    ):
        main(words)
        said = "".join(capsys.readouterr())
        assert named in said and "\x1b" not in said and "\x07" not in said, said


def test_clean_refuses_a_run_that_goes_on_and_a_folder_that_only_looks_like_one(drumbeat):
    process = drumbeat.start("run", "--name", "busy", "--", sys.executable, "-c", "import time; time.sleep(600)")
    wait_for(lambda: list(drumbeat.folder.glob("runs/*/nodes/0/attempt-0")), 180, "the run to start")
    said = drumbeat.here("list", "--clean", "--older-than", "0s", "--yes").stdout
    assert "it is running" in said and drumbeat.run_folder().is_dir()
    process.terminate()
    process.wait(180)
