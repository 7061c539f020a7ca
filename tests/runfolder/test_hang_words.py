"""What is said of a run that hangs, and of one that hung: the same number in every view, by the lead's clock."""

import json
import time

from drumbeat.base.record import to_plain
from drumbeat.cli.status import going_on
from drumbeat.desk.console import Console
from drumbeat.desk.foreground import summary_without_lead
from drumbeat.desk.state import recorded_end, state_of
from drumbeat.findings.model import WARNING, Finding
from drumbeat.report.gather import figures_of
from drumbeat.report.text import lines_of
from drumbeat.runfolder.events import AttemptEnded, AttemptStarted, FindingMade, Resumed
from drumbeat.runfolder.lines import closing_lines, progress_line
from drumbeat.runfolder.progress import Progress, RankPace, slowest_rank
from drumbeat.runfolder.records import Metric
from drumbeat.runfolder.run import LeadClock, Run, lead_now
from drumbeat.runfolder.state import hangs_of, ledger
from drumbeat.runfolder.summary import AttemptEnd, Observations, summarize, write_summary
from drumbeat.watch.session import Session
from drumbeat.watch.text import glance
from tests.runfolder.folders import events, make_run, metrics, order
from tests.runfolder.test_views import desk
from tests.watch.recorded import recorded, sample

HANG = Finding("hang-asleep", WARNING, "no step for 9 s: rank 1 sleeps", "a sleep", "wake it", rank=1)
STARTED = ("attempt-started", {"world_size": 2, "master_addr": "h", "master_port": 1})


def hung(path, *ends, begin=1000.0, **record):
    """Steps of a second until 1010, by the run's clock; a hang is found 9 s later, and 24 s after that it has ended."""
    run = make_run(path, created=begin, **record)
    for rank in range(2):
        metrics(run, *({"t": begin + t, "rank": rank, "step": t, "steps": 99} for t in range(1, 11)))
    written = [(0.0, STARTED), (19.0, ("finding", {"finding": to_plain(HANG)})), *((43.0, end) for end in ends)]
    events(run, *(event for _, event in written))
    path = run.folder.events
    with open(path) as file:
        told = [json.loads(line) for line in file]
    with open(path, "w") as file:
        for (t, _), event in zip(written, told):
            file.write(json.dumps({**event, "t": begin + t}) + "\n")
    return Run.open(run.path)


def made():
    progress = Progress()
    for t in range(1, 11):
        progress.add(Metric(0, 0, 1000.0 + t, "step", step=t, steps=99))
    return progress


def ended(tmp_path, stopped):
    """One that was stopped for its hang, or cancelled in it."""
    progress = to_plain(made())
    outcome = "failed" if stopped else "cancelled"
    run = hung(tmp_path / "run", ("attempt-ended", {"outcome": outcome, "exit_code": 1, "progress": progress}))
    found = HANG if stopped else None
    end, told = AttemptEnd(0, outcome, 1, found), run.run_events()
    parts = ledger(1000.0, 1044.0, told)
    summary = summarize(order(tmp_path / "run"), [end], [], (), made(), parts, Observations(told, HANG))
    write_summary(run.folder, summary)
    return Run.open(run.path)


def test_after_the_end_every_view_says_how_long_a_hang_lasted(tmp_path):
    for stopped in (True, False):
        run = ended(tmp_path / str(stopped), stopped)
        summary = run.summary()
        assert summary.hang_seconds == 33.0 and summary.ledger["hang"] == 33.0
        lines = dict(closing_lines(run, summary))
        label = "failed" if stopped else "hang"
        assert lines[label].endswith("rank 1 sleeps; it lasted 33 s"), lines
        said = " ".join(" ".join(lines_of(figures_of(run))).split())
        assert "rank 1 sleeps; it lasted 33 s" in said
    assert summary.failure is None


def test_a_hang_that_is_over_or_was_none():
    def told(*written):
        return [FindingMade("finding", 1019.0, 1.0, 0, "h", 0, 0, HANG), *written]

    common = (1.0, 0, "h", 0, 0)
    assert [hang.seconds for hang in hangs_of(told(Resumed("resumed", 1030.0, *common, 20.0)))] == [20.0]
    assert [hang.seconds for hang in hangs_of(told(Resumed("resumed", 1030.0, *common, 0.0, True)))] == [None]
    assert [hang.seconds for hang in hangs_of(told())] == [None], "it goes on"
    assert [
        hang.seconds for hang in hangs_of(told(*told(), AttemptEnded("x", 1043.0, *common, "failed", 1, made())))
    ] == [33.0]
    assert [hang.seconds for hang in hangs_of(told(AttemptEnded("x", 1043.0, *common, "failed", 1)))] == [24.0]
    found = FindingMade("finding", 1019.0, 1.0, 0, "h", 0, 0, HANG, 9.0)
    stepped = made()
    stepped.add(Metric(0, 0, 1042.0, "step", step=11, steps=99))
    asked = AttemptEnded("x", 1043.0, *common, "cancelled", 130, stepped)
    assert [hang.seconds for hang in hangs_of([found, asked])] == [33.0], "a step that a stop request set free"
    began = AttemptStarted("x", 1000.0, *common, 2, "h", 1)
    for end, training in ((asked, 9.0), (AttemptEnded("x", 1043.0, *common, "cancelled", 130), 0.0)):
        parts = ledger(1000.0, 1043.0, [began, found, end])
        assert (parts["hang"], parts["training"]) == (33.0, training), "with steps before it, and without any"
    cut = AttemptStarted("x", 1043.0, *common, 2, "h", 1)
    assert [hang.seconds for hang in hangs_of(told(cut))] == [None], "nobody knows when it was over"


def test_a_lead_that_was_lost_in_a_hang(tmp_path):
    run = hung(tmp_path / "run")
    summary = summary_without_lead(run, order(tmp_path / "run"), 137, 1043.0)
    assert summary.hang.code == "hang-asleep" and summary.hang_seconds == 33.0


def test_beside_the_speed_of_a_run_that_hangs_it_says_so(tmp_path, capsys):
    begin = time.time() - 60.0
    run = hung(tmp_path / "run", begin=begin, desk=desk())
    state = state_of(run)
    assert state.status.state == "running" and state.hang and 49.0 < state.quiet < 200.0 and state.seconds_left is None
    assert "1.00 steps/s  no step for " in dict(going_on(state, begin + 43.0))["progress"]
    head = Session(run)
    head.load()
    assert "no step for " in dict(glance(head.head(), head.view))["progress"]
    console = Console(order(tmp_path / "run"), [0])
    console.live, console._hangs = True, True
    console._add_metrics([Metric(0, 0, 1000.0 + t, "step", step=t) for t in range(1, 11)])
    console._clock._read -= 33.0  # so long ago it was read
    console._show_progress(False)
    assert "1.00 steps/s  no step for 33 s" in capsys.readouterr().err
    console._stops = True
    console._show_progress(False)
    assert "no step" not in capsys.readouterr().err


def test_another_clock_than_the_desks_makes_no_silence(tmp_path):
    """The lead's clock is an hour behind: its last step was made just now."""
    begin = time.time() - 3612.0
    run = hung(tmp_path / "run", begin=begin, desk=desk())
    peers = {"nodes": [{"node": 0, "host": "far", "clock_offset": 0.0, "ranks": 2}]}
    with open(run.folder.peers, "w") as file:
        json.dump(peers, file)
    sample(run, 0, begin + 12.0)
    events_path = run.folder.events
    with open(events_path) as file:
        started = file.readline()
    with open(events_path, "w") as file:
        file.write(started)
    run = Run.open(run.path)
    assert lead_now(run) == begin + 12.0
    state = state_of(run)
    assert state.quiet is None and state.seconds_left is not None
    session = Session(run)
    session.load()
    head = session.head()
    assert head.quiet is None and head.seconds_left is not None
    assert progress_line(state.progress, now=lead_now(run)).endswith("left")


def test_time_goes_on_after_the_newest_record():
    clock = LeadClock()
    assert abs(clock.now() - time.time()) < 60.0, "ours, while there is none"
    clock.saw(5.0)
    clock.saw(3.0)
    clock._read -= 10.0
    assert 15.0 <= clock.now() < 75.0


def since_its_start(run):
    """The lead's events have the time at which the run was made, as its metrics have."""
    with open(run.folder.events) as file:
        told = [json.loads(line) for line in file]
    with open(run.folder.events, "w") as file:
        file.writelines(json.dumps({**event, "t": run.record.created}) + "\n" for event in told)
    return Run.open(run.path)


def test_watch_and_report_name_the_same_slowest_rank(tmp_path):
    run = since_its_start(recorded(tmp_path / "r", slow=3))
    session = Session(run)
    session.load()
    head, figures = session.head(), figures_of(run)
    assert head.slowest.rank == figures.slowest.rank == 3 and head.slowest.stands_out
    assert figures.slowest.ms == 1000.0 and "median rank's 1000.0 ms" in figures.slowest.how
    even = since_its_start(recorded(tmp_path / "even"))
    session = Session(even)
    session.load()
    assert "none stands out" in dict(glance(session.head(), session.view))["slowest"]
    assert figures_of(even).slowest is None and "none stands out" in figures_of(even).no_slowest


def test_times_of_printed_lines_make_nobody_slow():
    ranks = [RankPace(rank, 0, 10, 10.0, 1.0 + 0.1 * rank, None, True) for rank in range(2)]
    assert not slowest_rank(ranks).stands_out
    ranks[1].step_seconds = 1.3
    assert slowest_rank(ranks).stands_out


def test_news_of_one_node_may_be_older_than_those_of_another():
    """Two steps of 0.1 s are no lag: nodes are read one after the other. The same number of long steps is one."""
    for seconds, behind in ((0.1, 0), (10.0, 2)):
        ranks = [RankPace(rank, rank, step, 10.0, seconds, None, True) for rank, step in ((0, 12), (1, 10))]
        assert slowest_rank(ranks).behind == behind


def test_a_run_cancelled_before_a_verdict_keeps_what_the_last_look_saw(tmp_path):
    look = {"seconds": 9.0, "what": "rank 1 is asleep at train.py:29", "stepped": True}
    told = [
        (0.0, STARTED),
        (19.0, ("activity", look)),
        (43.0, ("stopping", {"why": "node 0 was asked to stop by SIGTERM", "signal": 15, "grace": 60.0})),
        (44.0, ("attempt-ended", {"outcome": "cancelled", "exit_code": 143, "progress": to_plain(made())})),
    ]
    run = hung(tmp_path / "run")
    written = [json.dumps({"kind": kind, "t": 1000.0 + t, "attempt": 0, **data}) for t, (kind, data) in told]
    with open(run.folder.events, "w") as file:
        file.write("\n".join(written) + "\n")
    run = Run.open(run.path)
    end, parts = AttemptEnd(0, "cancelled", 143), ledger(1000.0, 1044.0, run.run_events())
    write_summary(run.folder, summarize(order(tmp_path / "run"), [end], [], (), made(), parts))
    wanted = "no step for 33 s when it was asked to stop; the last look: rank 1 is asleep at train.py:29"
    assert dict(closing_lines(run, run.summary()))["stopped"] == wanted
    assert wanted in " ".join(" ".join(lines_of(figures_of(run))).split())
    assert wanted in [note.title for note in recorded_end(run).notes]
    later = [written[0], written[1].replace("1019", "1009"), *written[2:]]  # a step followed that look
    with open(run.folder.events, "w") as file:
        file.write("\n".join(later) + "\n")
    run = Run.open(run.path)
    assert "stopped" not in dict(closing_lines(run, run.summary()))
