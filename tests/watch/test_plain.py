"""The plain table: fits the terminal, shows what Run says, and answers bad input with one line."""

import json
import shutil

import pytest

from drumbeat.watch.session import Session
from drumbeat.watch.text import screen, table
from tests.runfolder.folders import events, make_run
from tests.watch.recorded import begin, recorded


def loaded(run):
    session = Session(run)
    session.load()
    return session


@pytest.mark.parametrize("nodes", [1, 2, 30])
def test_it_fits_80_by_24(tmp_path, nodes):
    session = loaded(recorded(tmp_path / "r", nodes, last=10))
    lines = screen(session, 80, 24)
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert any("step 10/100  loss 3.9" in line for line in lines)
    assert ("more nodes" in " ".join(lines)) == (nodes == 30)


def test_a_table_of_any_size_leaves_out_whole_columns():
    row = ("0", "n" * 40, "8", "97 %", "50 %", "5600 W", "1500", "88", "lost: " + "why " * 40, "12.0 GB/s", "-", "7 %")
    for nodes in (1, 1000):
        lines = table([row] * nodes, 80)
        assert max(map(len, lines)) <= 80 and len(lines) == nodes + 1
        assert lines[0].split() == ["node", "host", "use", "mem", "power", "temp", "slowed", "by"]
        assert lines[-1].startswith("0     nnnnnnnnn…nnnnnnnnnn  97 %  50 %  5600 W  88    lost: why") and lines[
            -1
        ].endswith("…")
    assert "out" not in table([row], 400)[0] and "clock" in table([row], 400)[0], "nothing is known of `out`"


def test_once(drumbeat, demo_run):
    done = drumbeat("watch", demo_run.path)
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout and "step 12/12  loss 0.333" in done.stdout
    told = json.loads(drumbeat("watch", "--json", demo_run.path).stdout)
    assert told["step"] == 12 and told["state"] == "finished"


def test_escapes_in_names_stay_out_of_the_terminal(tmp_path):
    run = make_run(tmp_path / "r")
    joined = {"peer": 0, "peer_host": "n1\x1b]0;owned\x07", "address": "", "clock_offset": 0.0}
    events(run, ("node-joined", joined))
    assert "\x1b" not in "\n".join(screen(loaded(run), 80, 24))


def damage(path, how):
    if how == "empty":
        shutil.rmtree(path)
        path.mkdir()
    elif how == "newer schema":
        (path / "run.json").write_text('{"schema": "99.0", "run_id": "r"}')
    elif how == "newer order":
        order = json.loads((path / "order.json").read_text())
        (path / "order.json").write_text(json.dumps({**order, "schema": "99.0"}))
    else:
        (path / "run.json").write_text('{"schema": "1.')


@pytest.mark.parametrize("how", ["empty", "newer schema", "newer order", "torn"])
def test_bad_folders_are_one_line(drumbeat, tmp_path, how):
    run = make_run(tmp_path / "r")
    damage(tmp_path / "r", how)
    done = drumbeat("watch", run.path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) <= 2 and "Traceback" not in done.stderr
    assert str(tmp_path) in done.stderr


def test_torn_records_are_left_out(tmp_path):
    run = recorded(tmp_path / "r", last=5)
    for name in ("metrics", "telemetry", "events"):
        with open(getattr(run.folder.node(0), name), "a") as file:
            file.write('{"t": 1, "gpus": [3], "rank": "x"}\n\x00\n{"t": 17')
    begin(run)
    session = loaded(run)
    assert session.head().step == 5 and session.follower.damaged


def test_an_array_is_watched_job_by_job(tmp_path):
    import dataclasses

    from drumbeat.base.order import dump_order
    from drumbeat.base.problem import Problem
    from tests.runfolder.folders import order

    run = make_run(tmp_path / "r")
    whole = order(tmp_path / "r")
    whole = dataclasses.replace(whole, resources=dataclasses.replace(whole.resources, array="0-3"))
    (tmp_path / "r/order.json").write_text(dump_order(whole))
    with pytest.raises(Problem, match="is an array"):
        Session(run)


def test_a_scheduler_that_does_not_answer_ends_nothing(tmp_path, monkeypatch):
    """A line that is only half written is read once it is whole."""
    from drumbeat.backends.contract import RUNNING, UNKNOWN, Status
    from drumbeat.desk import state as module

    answers = iter([Status("", UNKNOWN, "busy"), Status("", RUNNING)])
    monkeypatch.setattr(module, "status", lambda run: next(answers))
    run = recorded(tmp_path / "r", last=5)
    with open(run.folder.node(0).metrics, "a") as file:
        file.write('{"t": %f, "rank": 0, "step": 6,' % (run.record.created + 6))
        file.flush()
        session = loaded(run)
        assert session.standing.state == "unknown" and session.head().step == 5
        file.write(' "loss": 1.5}\n')
    session.load()
    assert session.standing.state == "running" and session.head().step == 6 and session.follower.damaged == 0
