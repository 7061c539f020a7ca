"""One recorded folder per state: every view says the same word for it."""

import json
import time
from dataclasses import replace

import pytest

from drumbeat.backends.contract import Status
from drumbeat.cli import main
from drumbeat.cli.list import table
from drumbeat.desk.state import state_of
from drumbeat.report.gather import figures_of
from drumbeat.report.text import end_words as report_end
from drumbeat.report.text import phase_words
from drumbeat.runfolder.lines import end_words
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.state import Course, condition
from drumbeat.runfolder.summary import AttemptEnd, summarize, write_summary
from drumbeat.watch.prometheus import families
from drumbeat.watch.session import Session
from drumbeat.watch.text import glance
from drumbeat.watch.web import head_data, heat_map
from tests.runfolder.folders import events, make_run, metrics, order

STARTED = ("run-started", {"run_id": "r", "nodes": 2, "ranks_per_node": 1, "launcher": "ranks", "launcher_why": ""})
MEETING = {"master_addr": "h", "master_port": 1}
TRAINS = (
    STARTED,
    *(("node-joined", {"peer": n, "peer_host": f"h{n}", "address": "", "clock_offset": 0.0}) for n in (0, 1)),
    ("mustered", {"seconds": 1.0, **MEETING}),
    ("attempt-started", {"world_size": 2, **MEETING}),
    ("rank-started", {"rank": 0, "local_rank": 0, "pid": 1, "cpus": []}),
    ("first-step", {"seconds": 1.0}),
)
HANG = {"code": "hang-stopped", "severity": "warning", "title": "rank 1 is stopped", "rank": 1, "cause": "", "fix": ""}
STEP = {"t": 1.0, "rank": 0, "step": 3, "steps": 10, "loss": 1.0}
STATES = {
    "queued": ("queued", (), ()),
    "waiting for node": ("running", (STARTED, TRAINS[1]), ()),
    "running": ("running", TRAINS, (STEP,)),
    "saving": ("running", TRAINS, (STEP, {"t": 2.0, "rank": 0, "kind": "checkpoint", "step": 3})),
    "hanging": ("running", (*TRAINS, ("finding", {"finding": HANG})), (STEP,)),
    "stopping": ("running", (*TRAINS, ("stopping", {"why": "drumbeat cancel", "signal": 15, "grace": 60.0})), (STEP,)),
    "restarting": ("running", (*TRAINS, ("decided", {"action": "restart", "why": "a node was lost"})), (STEP,)),
    "finished": ("finished", TRAINS, (STEP,)),
    "failed": ("failed", TRAINS, (STEP,)),
    "cancelled": ("cancelled", TRAINS, (STEP,)),
    "doubtful": ("finished", TRAINS, (STEP,)),
    "time-limit": ("failed", TRAINS, (STEP,)),
}
ENDED = ("finished", "failed", "cancelled", "doubtful", "time-limit")


def recorded(path, word):
    told, written, reports = STATES[word]
    run = make_run(path, nodes=2)
    events(run, *((kind, dict(data)) for kind, data in written))
    now = time.time()
    metrics(run, *({**report, "t": now + report["t"]} for report in reports))
    if word in ENDED:
        progress = Progress()
        for metric in run.metrics(0):
            progress.add(metric)
        write_summary(run.folder, summarize(order(path), [AttemptEnd(0, word, 0)], [], (), progress, {}))
    return Run.open(str(path)), Status("local://h/1", told)


def test_a_run_that_was_started_again_says_how_its_earlier_attempts_ended(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "run", nodes=2)
    failure = {"code": "exception", "severity": "error", "title": "ValueError: bad", "cause": "", "fix": "", "rank": 1}
    ended = {"outcome": "failed", "exit_code": 1, "progress": {"step": 20}}
    written = (*TRAINS, ("failed", {"finding": failure}), ("attempt-ended", ended))
    over = make_run(tmp_path / "over", nodes=2)
    events(over, *((kind, dict(data)) for kind, data in written), ("run-ended", {"outcome": "failed", "exit_code": 1}))
    written += (("attempt-started", {"world_size": 2, "attempt": 1, **MEETING}),)
    events(run, *((kind, dict(data)) for kind, data in written))
    monkeypatch.setattr("drumbeat.desk.state.status", lambda _: Status("local://h/1", "running"))
    found = state_of(run)
    assert (found.attempt, found.before) == (1, ("attempt 1 failed at step 20: rank 1: ValueError: bad",))
    assert main(["status", run.path]) == 0
    assert "2; before it: attempt 1 failed at step 20: rank 1: ValueError: bad" in capsys.readouterr().out
    assert main(["status", over.path]) == 0
    said = capsys.readouterr().out
    assert "stopping: its ranks have ended" in said and "before it" not in said


@pytest.mark.parametrize("word", STATES)
def test_every_view_says_the_same_word(tmp_path, word, monkeypatch, capsys):
    run, told = recorded(tmp_path / "run", word)
    monkeypatch.setattr("drumbeat.desk.state.status", lambda run: told)
    state = state_of(run)
    assert state.condition.word == word
    assert any(f" {word} " in f" {line} " for line in table([state], 120))
    assert main(["status", run.path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("state ") and line.split(None, 1)[1].partition(":")[0] == word for line in lines), lines
    assert main(["status", run.path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["condition"]["word"] == word
    session = Session(run)
    session.load()
    session.tick()
    head = session.head()
    assert head.word == word and head.severity == state.condition.severity
    assert dict(glance(head, session.view))["run"].split("  ", 1)[1].startswith(word)
    assert head_data(session)["head"]["word"] == word
    samples = next(each for each in families(head, []) if each.name == "drumbeat_state").samples
    assert [labels for labels, value in samples if value] == [(word,)]
    figures = figures_of(run)
    assert figures.outcome == word and report_end(figures).startswith(word)
    if word in ENDED:
        assert end_words(state.summary).startswith(word)
    assert heat_map(session, "step")["bad"] == (1 if word == "hanging" else None)


def test_every_view_has_the_same_time_per_step_and_says_that_it_ended_early(tmp_path, monkeypatch, capsys):
    """Steps of 1, 1, 1 and 5 s: the mean is 2 s, the median 1 s, the latest more."""
    steps = [{**STEP, "step": step, "t": t} for step, t in zip(range(1, 6), (1.0, 2.0, 3.0, 4.0, 9.0))]
    monkeypatch.setitem(STATES, "finished", ("finished", TRAINS, steps))
    run, told = recorded(tmp_path / "run", "finished")
    monkeypatch.setattr("drumbeat.desk.state.status", lambda run: told)
    session = Session(run)
    session.load()
    session.tick()
    head, figures = session.head(), figures_of(run)
    assert head.mean_step_seconds == pytest.approx(2.0) and head.step_seconds > 2.0
    assert "2 s per step (mean)" in dict(glance(head, session.view))["speed"]
    assert phase_words(figures).startswith("mean 2000.0 ms") and figures.speed.value == pytest.approx(0.5)
    short = "its last step was 5 of 10"
    assert main(["status", run.path]) == 0
    assert f"exit code 0, but {short}" in capsys.readouterr().out and head.detail == short
    assert f"  note: {short}" in table([state_of(run)], 120) and any(short in note.text for note in figures.notes)


def test_a_queued_run_has_no_elapsed_time(tmp_path, monkeypatch):
    run, told = recorded(tmp_path / "run", "queued")
    monkeypatch.setattr("drumbeat.desk.state.status", lambda run: replace(told, detail="Resources"))
    head, row, waits = table([state_of(run)], 120)
    assert row.split()[1:] == ["queued", "-", "-", "-"]
    assert waits.startswith("  waiting for ") and waits.endswith(": Resources")


def test_a_hang_is_red_and_a_run_that_goes_on_is_not():
    red = {word: condition(told, "", "", Course(), Progress()).severity for word, (told, _, _) in STATES.items()}
    assert red["failed"] == "error" and red["running"] == red["finished"] == "ok"


def test_a_slow_rank_is_shown_while_it_holds_the_others_up(tmp_path, monkeypatch, capsys):
    stalls = [("stalled", {"rank": 1, "seconds": lost, "share": share}) for lost, share in ((30.0, 0.5), (41.0, 0.0))]
    for seen, words in (
        (stalls[:1], "rank 1 holds the others up, which wait 50% of the time, 30 s so far"),
        (stalls, ""),
    ):
        monkeypatch.setitem(STATES, "running", ("running", (*TRAINS, *seen), (STEP,)))
        run, told = recorded(tmp_path / str(len(seen)), "running")
        monkeypatch.setattr("drumbeat.desk.state.status", lambda run, told=told: told)
        assert main(["status", run.path]) == 0
        out = capsys.readouterr().out
        assert words in " ".join(out.split()) and ("holds the others up" in out) == bool(words)
        session = Session(run)
        session.load()
        session.tick()
        head = session.head()
        assert (head.word, head.severity, head.detail) == ("running", "warning" if words else "ok", words)


def test_a_silent_run_says_in_every_view_what_its_ranks_do(tmp_path, monkeypatch, capsys):
    """Steps of a second until 20 s ago, then a look: what it showed stands in every view until a step follows."""
    words = "rank 0 is waiting in all_reduce 26 at stuck.py:22; rank 1 is asleep at stuck.py:20"
    look = ("activity", {"seconds": 8.8, "what": words, "stepped": True})
    steps = [{**STEP, "step": step, "t": step - 30.0} for step in range(1, 10)]
    for again in (False, True):
        reports = [*steps, {**STEP, "step": 10, "t": 1.0}] if again else steps
        monkeypatch.setitem(STATES, "running", ("running", (*TRAINS, look), reports))
        run, told = recorded(tmp_path / str(again), "running")
        monkeypatch.setattr("drumbeat.desk.state.status", lambda run, told=told: told)
        said = {}
        for command in ("status", "diagnose"):
            assert main([command, run.path]) == 0
            said[command] = " ".join(capsys.readouterr().out.split())
        said["list"] = " ".join(" ".join(table([state_of(run)], 120)).split())
        session = Session(run)
        session.load()
        session.tick()
        head = session.head()
        said["watch"] = dict(glance(head, session.view))["run"]
        said["page"] = head_data(session)["head"]["detail"]
        assert {view: words in text for view, text in said.items()} == dict.fromkeys(said, not again), said
        assert ("no step for" in said["list"]) == ("no step for" in said["diagnose"]) == (not again)
        assert ("none seen" in said["diagnose"]) == again
        assert head.severity == ("ok" if again else "warning")
