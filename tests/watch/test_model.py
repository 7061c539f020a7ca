"""What the views show is what Run says, record by record."""

import dataclasses
import json

import pytest

from drumbeat.findings.model import Verdict
from drumbeat.report.gather import figures_of
from drumbeat.runfolder.records import Metric, Sample
from drumbeat.runfolder.run import Run
from drumbeat.watch import prometheus, web
from drumbeat.watch.model import RunView
from drumbeat.watch.session import Session
from drumbeat.watch.text import glance
from tests.conftest import ROOT
from tests.runfolder.folders import events, make_run, metrics
from tests.watch.recorded import begin, gpu, recorded, sample, steps


def loaded(run):
    session = Session(Run.open(run.path))
    session.load()
    return session


def test_numbers_are_those_of_run(tmp_path):
    run = recorded(tmp_path / "r")
    session = loaded(run)
    head, progress = session.head(), run.progress()
    assert (head.step, head.steps, head.loss) == (40, 100, progress.last_loss)
    assert (head.rate, head.rate_unit) == progress.rate() == (pytest.approx(4000.0), "tokens/s")
    assert session.view.progress.seconds_left() == progress.seconds_left() == pytest.approx(60.0)
    assert (head.nodes, head.nodes_here, head.world, head.ranks_ended) == (2, 2, 4, 0)
    assert (head.gpus, head.gpu_use, head.gpu_memory, head.power) == (4, 85.0, 50.0, 2000.0)
    assert head.received == pytest.approx(2e9) and head.sent == pytest.approx(1e9)
    assert head.energy == 4 * 7 * 2500.0
    assert session.view.nodes[1].cpu_busy == 90.0


def test_an_ended_run_shows_what_its_summary_says(demo_run):
    session = loaded(demo_run)
    head, summary = session.head(), demo_run.summary()
    assert (head.state, head.phase, head.elapsed) == ("finished", "finished", summary.elapsed)
    assert (head.step, head.loss) == (summary.progress.step, summary.progress.last_loss)
    assert (head.rate, head.rate_unit) == (summary.throughput.value, summary.throughput.unit)
    assert (head.ranks_ended, head.seconds_left) == (2, None)
    assert session.view.progress.rate()[0] == pytest.approx(summary.throughput.value, abs=0.001)


def test_slowest_rank(tmp_path):
    slow = loaded(recorded(tmp_path / "r", slow=3)).head().slowest
    assert (slow.rank, slow.node, slow.behind) == (3, 1, 0) and slow.spread == pytest.approx(1.0)


def test_a_rank_that_stays_behind_is_the_slowest(tmp_path):
    run = recorded(tmp_path / "r", slow=3)
    last = 2_000_000_000.0
    for rank in (0, 1, 3):
        metrics(run, {"t": run.record.created + 50, "rank": rank, "step": 60, "seconds": 1.0}, node=rank // 2)
    assert (loaded(run).head().slowest.rank, loaded(run).head().slowest.behind) == (2, 20)
    metrics(run, {"t": last, "rank": 2, "step": 61})  # from a clock that is years ahead: no report of this run
    assert loaded(run).head().step == 60


def test_recent_speed_and_trend(tmp_path):
    run = make_run(tmp_path / "r", 2)
    begin(run)
    start = loaded(run).view.started
    steps(run, 1, 100, start, every=1.0)
    steps(run, 101, 150, start + 100, every=2.0)
    session = Session(run)
    session.load()
    session.standing = dataclasses.replace(session.standing, state="running")
    head = session.head()
    assert head.recent_rate == pytest.approx(2000.0, rel=0.05) and head.rate == pytest.approx(3000.0, rel=0.02)
    curve = [point.mean for point in session.view.throughput()]
    assert curve[10] == pytest.approx(4000.0) and curve[-1] == pytest.approx(2000.0)


def test_a_restart_begins_anew(tmp_path):
    run = recorded(tmp_path / "r")
    finding = {"code": "x", "severity": "error", "title": "rank 3 ran out of memory", "rank": 3, "node": 1}
    session = loaded(run)
    events(
        run, ("rank-exited", {"rank": 3, "exit_code": None, "signal": 9, "seconds": 1.0, "core_dumped": False}), node=1
    )
    replaced = ["node 2 (c) takes the place of node 1 (b)"]
    decided = {"action": "restart", "why": "a spare", "replaced": replaced}
    events(run, ("failed", {"finding": finding}), ("decided", decided))
    session.load()
    assert session.view.ranks[3].ended == -9 and session.view.ended_ranks == 1
    assert session.head().failure.title == "rank 3 ran out of memory" and session.view.phase == "restarting"
    begin(run, attempt=1)
    session.load()
    assert session.view.attempt == 1 and session.view.ended_ranks == 0 and session.head().failure is None
    assert [mark.kind for mark in session.view.marks] == ["failed", "restart", "attempt"]
    past, shown = session.head().findings[-1], glance(session.head(), session.view)
    assert (past.severity, past.title) == ("info", "attempt 1 ended: rank 3 ran out of memory")
    assert ("replaced", replaced[0]) in shown
    assert len(session.view.ranks) == 4 and all(rank.step is None for rank in session.view.ranks.values())


def test_checks_name_the_mismatch_first(tmp_path):
    run = make_run(tmp_path / "r", 3)
    for peer, answer in enumerate(("as planned", "mismatch", "as planned")):
        verdict = {"check": "transport", "answer": answer, "summary": f"node {peer}", "confidence": "likely"}
        events(run, ("verdict", {"verdict": verdict, "peer": peer}))
    (check,) = loaded(run).head().checks
    assert (check.answer, check.summary, check.nodes, check.judged) == ("mismatch", "node 1", 1, 3)


def test_a_check_says_unknown_once(tmp_path):
    run = make_run(tmp_path / "r")
    silent = {"check": "transport", "answer": "unknown", "summary": "unknown: NCCL wrote no log here"}
    events(run, ("verdict", {"verdict": silent, "peer": 0}))
    assert [check.words for check in loaded(run).head().checks] == ["unknown: NCCL wrote no log here"]
    assert Verdict("a", "tcp", summary="tcp, by the counters").words == "tcp, by the counters"
    assert Verdict("a", "not pinned", summary="4 ranks share 2 cores").words == "not pinned: 4 ranks share 2 cores"
    assert Verdict("a", "as planned").words == "as planned"


def test_a_warning_about_the_world_stands_for_its_verdict_until_that_refutes_it(tmp_path):
    run = make_run(tmp_path / "r")
    finding = {"code": "ranks-never-joined", "severity": "warning", "title": "2 copies of one training", "fix": "join"}
    unknown = {"check": "world", "answer": "unknown", "confidence": "unknown", "summary": "2 groups", "seen": ["x"]}
    events(run, ("verdict", {"verdict": unknown, "peer": 0}), ("finding", {"finding": finding}))
    session = loaded(run)
    lines = dict(glance(session.head(), session.view))
    assert lines["warning"] == "2 copies of one training" and "unknown" not in lines
    one = {**unknown, "answer": "as planned", "confidence": "certain", "count": 2, "summary": "2 ranks in one world"}
    events(run, ("verdict", {"verdict": one, "peer": 0}))
    session = loaded(run)
    lines = dict(glance(session.head(), session.view))
    assert lines["info"] == "no longer holds: 2 copies of one training" and "warning" not in lines
    hang = {"code": "hang-early-exit", "severity": "warning", "title": "rank 1 ended 8 s ago", "fix": "equal steps"}
    events(run, ("finding", {"finding": hang}), ("resumed", {"seconds": 9.0}))
    assert "rank 1 ended 8 s ago" in dict(glance(loaded(run).head(), loaded(run).view)).values(), "it was one"
    events(run, ("resumed", {"seconds": 0.0, "ended": True}), ("verdict", {"verdict": one, "peer": 0}))
    told = [finding.title for finding in loaded(run).view.findings]
    assert told == ["no longer holds: 2 copies of one training", "no longer holds: rank 1 ended 8 s ago"]
    told = [(note.severity, note.text) for note in figures_of(run).notes if "longer holds" in note.text]
    assert told == [("info", title) for title in (each.title for each in loaded(run).view.findings)]


def test_what_runs_on_one_machine_without_gpus_uses_no_network(tmp_path):
    run = make_run(tmp_path / "r", 2)
    for check in ("traffic", "transport", "affinity"):
        events(run, ("verdict", {"verdict": {"check": check, "answer": "unknown", "summary": "s"}, "peer": 0}))
    for number in range(3):
        sample(run, 0, 1000.0 + 5 * number, [])
    session = loaded(run)
    session.view.emulated = False
    assert dict(glance(session.head(), session.view))["unknown"].startswith("traffic, transport, affinity: ")
    session.view.emulated = True
    lines = dict(glance(session.head(), session.view))
    assert lines["unknown"].startswith("affinity: ") and "network not used: " in lines["nodes"]
    emulated = RunView()
    emulated.emulated = True
    emulated.node(1)
    for number in range(3):
        cpu = {"busy_ticks": 90 * number, "all_ticks": 100 * number}
        emulated.add(Sample(0, 1000.0 + 5 * number, "vm", cpu=cpu))
    assert emulated.nodes[1].cpu_busy == 90.0, "node 1 is the same machine"


def test_the_heat_map_gives_nearly_equal_values_nearly_equal_colours(tmp_path):
    def shares(values):
        low, high = web.scale(values)
        return [(value - low) / (high - low) for value in values]

    assert shares([96.5, 96.5]) == [0.5, 0.5] and shares([0.0, 0.0]) == [0.5, 0.5] and web.scale([]) == (0.0, 1.0)
    first, second = shares([96.4, 96.5])
    assert 0.45 < first < second < 0.55
    assert shares([50.0, 75.0, 100.0]) == [0.0, 0.5, 1.0], "what differs gets the whole scale"
    drawn = web.heat_map(loaded(recorded(tmp_path / "r")), "power")  # every GPU takes 500 W
    assert (drawn["low"], drawn["high"]) == (475.0, 525.0) and drawn["values"] == [[500, 500], [500, 500]]


def test_memory_does_not_grow_with_the_run(tmp_path):
    """Of a run with a history larger than what is read at first, the last part is read, and whole lines only."""
    run = make_run(tmp_path / "r", 1)
    begin(run, 1, 1)
    start = loaded(run).view.started
    steps(run, 1, 2000, start - 2000, nodes=1, ranks=1, total=9000)
    import drumbeat.watch.session as module

    before, module._FIRST_READ, module._LEAST_READ = (module._FIRST_READ, module._LEAST_READ), 20_000, 1000
    try:
        session = loaded(run)
    finally:
        module._FIRST_READ, module._LEAST_READ = before
    assert session.view.progress.first_step > 1900 and session.head().step == 2000
    assert session.follower.damaged == 0 and len(session.view.loss) < 100


def test_counters_that_begin_anew_give_no_rate(tmp_path):
    run = make_run(tmp_path / "r", 1)
    for number, bytes_received in enumerate((5_000, 6_000, 10)):
        sample(run, 0, 1000.0 + 5 * number, [gpu(0)], received=bytes_received)
    assert loaded(run).view.nodes[0].received is None


def test_what_was_announced_is_marked_once():
    view = RunView()
    for t, kind, seconds in ((1.0, "validation", None), (5.0, "validation", 4.0), (6.0, "checkpoint", 1.0)):
        view.add(Metric(0, 0, 1000.0 + t, kind, step=10, seconds=seconds))
        view.add(Metric(0, 0, 1000.5 + t, kind, step=10, loss=2.0, printed=True))  # the program prints it too
    assert [(mark.t, mark.text) for mark in view.marks] == [
        (1001.0, "validation at step 10"),
        (1006.0, "checkpoint at step 10"),
    ]


def test_a_validation_s_figure_beside_a_step_is_a_result_and_not_what_the_program_does_now():
    """`Epoch 1/60, Loss: 0.9, Val Acc: 51 %` is a step and a validation of one line; an announcement is a phase."""
    view = RunView()
    for epoch in (1, 2):
        view.add(Metric(0, 0, 1000.0 + epoch, step=epoch, steps=60, loss=0.9, printed=True))
        view.add(Metric(0, 0, 1000.0 + epoch, "validation", accuracy=0.5, printed=True))
    assert not view.marks and view.shown.phase == ""
    view.phase = "training"
    view.add(Metric(0, 0, 1003.0, "validation", accuracy=0.5, printed=True))
    assert view.phase == "training"
    view.add(Metric(0, 0, 1004.0, "validation"))
    assert view.phase == "validation" and [mark.text for mark in view.marks] == ["validation"]


def test_a_hostile_folder_stays_small(tmp_path):
    """Long texts are cut, and nodes, ranks and checks that no run has are not believed."""
    run = recorded(tmp_path / "r")
    long = "x" * 5_000
    finding = {"code": "oom", "severity": "error", "title": long, "cause": long, "fix": long}
    verdict = {"check": "", "answer": "mismatch", "summary": "s"}
    lost = {"peer": 1, "peer_host": long, "why": long}
    events(run, *(("finding", {"finding": finding}) for _ in range(60)), ("failed", {"finding": finding}))
    events(run, ("node-lost", lost), ("node-lost", {**lost, "peer": 1 << 40}))
    events(run, *(("verdict", {"verdict": {**verdict, "check": f"check {n}"}, "peer": 0}) for n in range(100)))
    metrics(run, {"t": run.record.created, "rank": 1 << 40, "kind": "step", "step": 3}, node=1)
    session = loaded(run)
    message = json.dumps(web.head_data(session))
    assert len(message) < 300_000 and len(session.view.nodes) == 2 and len(session.view.ranks) == 4
    assert len(session.head().checks) <= 30 and session.view.nodes[1].lost


def test_every_metric_is_in_the_docs():
    text = (ROOT / "docs" / "watch.md").read_text()
    names = [f"drumbeat_{row[0]}" for row in prometheus._OF_RUN]
    for what, table in (("node", prometheus._OF_NODE), ("gpu", prometheus._OF_GPU)):
        names += [f"drumbeat_{what}_{row[0]}{'_total' * (row[2] == prometheus.COUNTER)}" for row in table]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_the_token_of_the_page_is_the_same_at_each_start(tmp_path):
    web = pytest.importorskip("drumbeat.watch.web")
    environ = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    first = web.page_token(environ)
    assert first == web.page_token(environ) and first not in (tmp_path / "config/drumbeat/token").read_text()
