"""What the console prints while a run goes on."""

from dataclasses import replace

from drumbeat.desk.console import Console
from drumbeat.findings.model import Finding, Verdict
from drumbeat.runfolder.events import (
    Activity,
    AttemptEnded,
    AttemptStarted,
    Failed,
    FindingMade,
    Mustered,
    NodeJoined,
    NodeLost,
    VerdictGiven,
)
from drumbeat.runfolder.lines import failure_lines
from drumbeat.runfolder.records import Line, Metric
from tests.runfolder.folders import make_run, order


def console(tmp_path, **changes):
    make_run(tmp_path / "run", nodes=changes.get("nodes", 1))
    return Console(order(tmp_path / "run", **changes), [0])


def test_a_warning_of_several_nodes_is_one_line_that_names_them(tmp_path, capsys):
    view = console(tmp_path, nodes=4, hosts=("oar9", "oar10", "oar11", "oar12"))
    low = Finding("memlock-low", "warning", "memory may be locked up to 64 KiB only", "", "ulimit -l unlimited")
    common = ("x", 1.0, 1.0, 0, "h", 0, 0)
    found = [replace(low, node=node, host=f"oar{9 + node}") for node in range(4)]
    found.append(replace(low, title="shared memory is small", node=2, host="oar11"))
    view._show([FindingMade(*common, finding) for finding in found])
    assert capsys.readouterr().err == ""
    view._show([Mustered(*common, 0.25, "10.0.0.1", 4711)])
    said = capsys.readouterr().err
    assert "warning    nodes 0-3 (oar[9-12]): memory may be locked up to 64 KiB only: ulimit -l unlimited\n" in said
    assert "warning    node 2 (oar11): shared memory is small: ulimit -l unlimited\n" in said
    assert said.count("warning") == 2


def test_what_several_nodes_find_while_they_run_is_said_once_per_attempt(tmp_path, capsys):
    view = console(tmp_path, nodes=2)
    common, start = ("x", 1.0, 1.0, 0, "h", 0), AttemptStarted("x", 1.0, 1.0, 0, "h", 0, 0, 2, "h", 1)
    found = Finding(
        "expectation-not-checked", "warning", "rdma is expected, but nothing was checked", "", "drop expect"
    )
    view._show([start, *(FindingMade(*common, 0, replace(found, node=node)) for node in (0, 1))])
    assert capsys.readouterr().err.count("rdma is expected") == 1
    view._show([start, FindingMade(*common, 0, replace(found, node=1))])
    assert capsys.readouterr().err.count("rdma is expected") == 1


def test_the_place_of_tensorboards_files_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0")
    view = console(tmp_path, track=("tensorboard=", "wandb=mine"))
    view.begin()
    said = capsys.readouterr().err
    assert (
        f"tracker    tensorboard --logdir {tmp_path / 'run/tensorboard'}\n" in said
        and "tracker    wandb=mine\n" in said
    )


def test_a_node_that_was_lost_before_the_start_is_not_connected(tmp_path, capsys):
    view = console(tmp_path, nodes=2, fewest_nodes=1)
    common = ("x", 1.0, 1.0, 0, "h", 0, 0)
    view._show([NodeJoined(*common, node, f"n{node}", f"10.0.0.{node}", 0.0) for node in range(2)])
    view._show([NodeLost(*common, 1, "n1", "its agent's connection broke"), Mustered(*common, 0.25, "10.0.0.1", 4711)])
    assert "connected  1 of 2 nodes" in capsys.readouterr().err


def test_a_failure_before_a_restart_names_its_rank_as_at_the_end(tmp_path, capsys):
    view = console(tmp_path, restarts=1)
    failure = Finding("exception", "error", "RuntimeError: cosmic ray", rank=1, node=1, host="vm")
    view._show([Failed("failed", 1.0, 1.0, 0, "h", 0, 0, failure)])
    words = "rank 1 on vm (node 1): RuntimeError: cosmic ray"
    assert f"failed     {words}" in capsys.readouterr().err
    assert failure_lines(make_run(tmp_path / "run"), failure)[0] == ("failed", words)


def test_every_node_says_where_its_ranks_sit_and_those_that_say_the_same_are_one_line(tmp_path, capsys):
    view = console(tmp_path, nodes=4)
    common = ("x", 1.0, 1.0, 0, "h", 0, 0)

    def give(node, answer="as planned", summary="1/1 ranks on their cores", seen=("rank 0",)):
        view._show([VerdictGiven(*common, Verdict("affinity", answer, "certain", summary, seen=seen), node)])
        return [line for line in capsys.readouterr().err.splitlines() if line.startswith("affinity")]

    assert give(0) == give(2) == []
    assert give(3, "mismatch", "0/1 ranks beside their GPU") == [
        "affinity   node 3: mismatch: 0/1 ranks beside their GPU"
    ]
    assert give(1) == ["affinity   nodes 0-2, each: 1/1 ranks on their cores"]
    assert give(1, "not pinned", "1 rank on all cores") == ["affinity   node 1: not pinned: 1 rank on all cores"]
    view._show([AttemptEnded(*common, "failed", 1), AttemptStarted(*common, 4, "127.0.0.1", 1)])
    assert capsys.readouterr().err == "" and give(0) == [] and give(1, "unknown", "", ()) == []
    view._show([AttemptEnded(*common, "failed", 1)])
    assert capsys.readouterr().err == "affinity   node 0: 1/1 ranks on their cores\n"  # the others said nothing


def test_the_console_says_whom_it_waits_for(tmp_path, capsys):
    said = console(tmp_path, nodes=3, hosts=("a", "b", "c"))
    said._begun -= 60
    said.poll(None)
    common = ("x", 1.0, 1.0, 0, "h", 0, 0)
    said._show([NodeJoined(*common, 0, "a", "10.0.0.1", 0.0), NodeJoined(*common, 2, "c", "10.0.0.3", 0.0)])
    said._waiting_said -= 60
    said.poll(None)
    said.poll(None)
    said.stopping(2, 60.0)
    said._show([Mustered(*common, 0.25, "10.0.0.1", 4711)])
    text = capsys.readouterr().err
    assert text.count("waiting    ") == 2 and "0 of 3 nodes connected; still missing: node 0 (a), 1 (b), 2 (c)" in text
    assert "2 of 3 nodes connected; still missing: node 1 (b); giving up in 4 m 00 s" in text
    assert "SIGINT: ending; no rank had been started" in text and "to save" not in text
    assert "connected  3 of 3 nodes in 0.2 s; MASTER_ADDR:PORT = 10.0.0.1:4711" in text


def test_progress_is_that_of_the_running_attempt(tmp_path):
    said = console(tmp_path)
    said._show([Metric(0, 0, 10.0 + step, "step", step=step, loss=1.0) for step in range(7)])
    assert said.progress.step == 6
    said._show(
        [AttemptStarted("x", 1.0, 1.0, 0, "h", 0, 1, 2, "10.0.0.1", 4711), Metric(0, 0, 60.0, "step", step=3, loss=2.0)]
    )
    assert (said.progress.step, said.progress.last_loss, said.progress.rate()) == (3, 2.0, None)


def test_the_same_traceback_of_several_ranks_is_shown_once(tmp_path, capsys):
    said = console(tmp_path)
    block = ("Traceback (most recent call last):", "RuntimeError: boom")
    said._show([Line(0, 0, rank, "err", f"[rank{rank}]: {text}") for rank in range(4) for text in block])
    said._show([Line(0, 0, 0, "err", f"[rank0]: {text}") for text in block])
    said._show([Line(0, 0, rank, "out", "same") for rank in range(2)])
    text = capsys.readouterr()
    assert text.err.splitlines() == [*(f"[0-3] {line}" for line in block), *(f"[rank0]: {line}" for line in block)]
    assert text.out.splitlines() == ["same", "[1] same"]


def test_colour_on_a_terminal_unless_it_is_not_wanted(tmp_path, capsys, monkeypatch):
    for live, environment, coloured in ((True, "", True), (True, "1", False), (False, "", False)):
        monkeypatch.setenv("NO_COLOR", environment)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr("sys.stderr.isatty", lambda live=live: live)
        console(tmp_path).say("failed", "x")
        assert ("\x1b[31mfailed" in capsys.readouterr().err) == coloured


def test_a_program_gets_each_line_that_the_terminal_would(tmp_path, capsys):
    make_run(tmp_path / "run")
    lines = []
    view = Console(order(tmp_path / "run"), [0], show=lines.append)
    view.begin(from_end=False)
    begun, common = len(lines), ("x", 1.0, 1.0, 0, "h", 0)
    view._show([
        AttemptStarted(*common, 0, 2, "h", 1), Line(0, 0, 0, "out", "one"), Line(0, 0, 1, "err", "two"),
        Activity(*common, 0, 40.0, "rank 0 sleeps", True),
        FindingMade(*common, 0, Finding("world", "warning", "two worlds", "", "read it")),
    ])  # fmt: skip
    assert begun and lines[begun:] == [
        "waiting    no step for 40 s: rank 0 sleeps", "warning    two worlds: read it", "one", "[1] two",
    ]  # fmt: skip
    assert not any(capsys.readouterr())
    hang = FindingMade(*common, 0, Finding("hang-asleep", "warning", "rank 1 sleeps", "", "read it"))
    view._show([hang])
    assert lines[-1] == (
        f"warning    rank 1 sleeps: read it. The run goes on; drumbeat cancel {view.order.run_id} ends it"
    )
    view.order.checks["hang"] = "stop"
    view._show([hang])
    assert lines[-1] == "warning    rank 1 sleeps: read it"
