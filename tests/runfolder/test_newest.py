"""The run that is meant if none is named: the newest here, and for `diagnose` the newest one that did not end well."""

import pytest

from drumbeat.base.order import dump_order
from drumbeat.base.problem import Problem
from drumbeat.cli import main
from drumbeat.desk.runs import find_run, run_to_diagnose
from drumbeat.findings.model import Finding
from drumbeat.runfolder.files import replace
from drumbeat.runfolder.summary import Summary, write_summary
from tests.runfolder.folders import make_run, order


@pytest.fixture
def started(home, tmp_path):
    """Make runs, each newer than the one before, that are in the user's index."""
    index = home / ".local/state/drumbeat/runs"
    index.mkdir(parents=True)

    def start(folder, name, outcome="finished", workdir="/"):
        number = len(list(index.iterdir()))
        run = make_run(tmp_path / folder / "runs" / name, created=1000.0 + number)
        replace(run.folder.order, dump_order(order(tmp_path / folder / "runs" / name, workdir=str(workdir))))
        write_summary(run.folder, Summary(name, outcome, int(outcome == "failed"), 5.0, 1))
        (index / name).symlink_to(run.path)
        return run

    (tmp_path / "mine").mkdir()
    return start


def test_the_newest_run_here(started, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path / "mine")
    started("mine", "first")
    started("mine", "second")
    started("other", "newer")
    assert find_run(None, {"HOME": str(tmp_path / "home")}).run_id == "second" and not capsys.readouterr().err
    started("scratch", "elsewhere", workdir=tmp_path / "mine")  # its folder is elsewhere, its program here
    assert main(["status"]) == 0 and "elsewhere" in capsys.readouterr().out
    assert main(["list", "--here"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["elsewhere", "second", "first"]
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 0 and "elsewhere" in capsys.readouterr().out, "folders below this one count"


def test_without_a_run_here_the_newest_of_all_is_shown_and_named(started, tmp_path, monkeypatch, capsys):
    started("other", "older")
    started("other", "newer")
    monkeypatch.chdir(tmp_path / "mine")
    assert main(["status"]) == 0
    shown = capsys.readouterr()
    assert "newer" in shown.out and "no run of this folder; those of all folders count" in shown.err


def test_diagnose_takes_the_newest_run_that_did_not_end_well(started, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path / "mine")
    environ = {"HOME": str(tmp_path / "home")}
    with pytest.raises(Problem, match="no run was started yet"):
        run_to_diagnose(environ)
    started("mine", "good")
    assert run_to_diagnose(environ).run_id == "good"
    started("mine", "bad", "failed")
    started("mine", "stopped", "cancelled")
    started("mine", "good-again")
    started("other", "worse", "failed")
    assert run_to_diagnose(environ).run_id == "bad"
    assert main(["diagnose"]) == 0 and "reading runs/bad" in capsys.readouterr().err
    started("mine", "strange", "doubtful")
    assert run_to_diagnose(environ).run_id == "strange"


def test_diagnose_takes_no_run_of_another_folder(started, tmp_path, monkeypatch, capsys):
    started("other", "newer")
    monkeypatch.chdir(tmp_path / "mine")
    assert main(["diagnose"]) == 2
    shown = capsys.readouterr()
    assert not shown.out and "no run of this folder" in shown.err and "drumbeat diagnose FILE" in shown.err
    started("scratch", "elsewhere", workdir=tmp_path / "mine")
    assert main(["diagnose"]) == 0 and "elsewhere" in capsys.readouterr().err


def test_diagnose_takes_a_cancelled_run_that_hung(started, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "mine")
    environ = {"HOME": str(tmp_path / "home")}
    started("mine", "failed before", "failed")
    hung = started("mine", "hung", "cancelled")
    ended = Summary("hung", "cancelled", 130, 5.0, 1, hang=Finding("hang-collective", "warning", "no step for 37 s"))
    write_summary(hung.folder, ended)
    started("mine", "stopped", "cancelled")
    assert run_to_diagnose(environ).run_id == "hung"
