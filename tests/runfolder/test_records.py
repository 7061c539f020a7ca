"""Whatever stands in a metrics or events file, its readers go on: what cannot be used is dropped and counted."""

import json
import math
import os
import time

import pytest

from drumbeat.base.order import Order
from drumbeat.base.record import RecordError
from drumbeat.findings.model import WAS
from drumbeat.runfolder.files import EventLog, replace_json
from drumbeat.runfolder.follow import Follower
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.records import Metric, parse_metric
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.summary import parse_summary
from tests.runfolder.folders import events, make_run, metrics

HOSTILE = {
    "step NaN": '{"t": 1.0, "rank": 0, "step": NaN}',
    "step Infinity": '{"t": 1.0, "rank": 0, "step": Infinity}',
    "step -Infinity": '{"t": 1.0, "rank": 0, "step": -Infinity}',
    "step 400 digits": '{"t": 1.0, "rank": 0, "step": ' + "9" * 400 + "}",
    "step 5000 digits": '{"t": 1.0, "rank": 0, "step": ' + "9" * 5000 + "}",
    "step beyond counting": '{"t": 1.0, "rank": 0, "step": 9007199254740993}',
    "step negative": '{"t": 1.0, "rank": 0, "step": -1}',
    "tokens 400 digits": '{"t": 1.0, "rank": 0, "step": 1, "tokens": ' + "9" * 400 + "}",
    "t NaN": '{"t": NaN, "rank": 0, "step": 1}',
    "t 400 digits": '{"t": ' + "9" * 400 + ', "step": 1}',
    "rank 400 digits": '{"t": 1.0, "rank": ' + "9" * 400 + "}",
    "rank Infinity": '{"t": 1.0, "rank": Infinity}',
    "deep": '{"t": 1.0, "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "less deep": '{"t": 1.0, "x": ' + "[" * 600 + "]" * 600 + "}",
    "lone surrogate": '{"t": 1.0, "rank": 0, "kind": "\\ud800"}',
    "lone surrogate as a key": '{"t": 1.0, "\\udfff": 1}',
    "no object": "[1, 2]",
    "half": '{"t": 1.0, "rank"',
    "bool": '{"t": 1.0, "step": true}',
    "text": '{"t": 1.0, "loss": "high"}',
    "bytes": "\x00\x01\ufffd",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_metrics_line_is_dropped_and_counted(tmp_path, name):
    run = make_run(tmp_path / "run")
    metrics(run, {"t": 1.0, "rank": 0, "step": 1}, HOSTILE[name], {"t": 2.0, "rank": 0, "step": 2})
    follower = Follower(run)
    assert [record.step for record in follower.poll()] == [1, 2] and follower.damaged == 1
    assert [metric.step for metric in run.metrics(0)] == [1, 2] and run.progress().step == 2


def test_a_hostile_metrics_line_ends_no_job(drumbeat):
    """All of them, written by a rank as any script may; the agent and the desk go on."""
    (drumbeat.folder / "lines").write_text("\n".join(HOSTILE.values()) + "\n")
    code = """
import os, time
first, last = ('{"t": %f, "rank": 0, "step": %d}\\n' % (time.time(), step) for step in (1, 7))
with open(os.environ["DRUMBEAT_METRICS"], "a") as file:
    file.write(first + open("lines").read() + last)
"""
    done = drumbeat("run", "--", "python3", "-c", code)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert json.loads((drumbeat.run_folder() / "summary.json").read_text())["progress"]["step"] == 7
    assert drumbeat.here("status").returncode == 0


def test_not_a_number_is_a_loss_like_any_other():
    for loss in ("nan", math.nan, "inf", "-inf"):
        metric = parse_metric({"t": 1.0, "rank": 3, "step": 1, "loss": loss, "lr": 0.1, "deep": [[]]}, 0)
        assert isinstance(metric, Metric) and not math.isfinite(metric.loss) and metric.more == {"lr": 0.1}


def test_hostile_events_are_dropped_and_counted(tmp_path):
    run = make_run(tmp_path / "run")
    events(run, ("attempt-ended", {"outcome": "finished", "exit_code": 0}))
    whole = json.loads((tmp_path / "run" / "events.jsonl").read_text())
    broken = [
        {**whole, "t": "yesterday"}, {**whole, "t": math.nan}, {**whole, "t": 10**400}, {**whole, "exit_code": None},
        {**whole, "kind": "failed", "finding": {"code": "x", "severity": "dreadful", "title": "y"}},
        {**whole, "kind": "failed", "finding": "y"}, {"kind": "failed"}, {**whole, "outcome": "\ud800"},
    ]  # fmt: skip
    with open(run.folder.events, "a") as file:
        file.writelines(json.dumps(event) + "\n" for event in broken)
        file.write(json.dumps({**whole, "kind": "of-the-future", "more": [1]}) + "\n")
        file.write(json.dumps({**whole, "a new key": 1}) + "\n")
    follower = Follower(run)
    assert [event.kind for event in follower.poll()] == ["attempt-ended", "of-the-future", "attempt-ended"]
    assert follower.damaged == len(broken) and len(run.events()) == 3


def test_an_event_about_bytes_that_are_no_text_is_written(tmp_path):
    log = EventLog(str(tmp_path / "events.jsonl"), 0)
    log.write("stopping", {"why": os.fsdecode(b"/tmp/\xff"), "signal": 15, "grace": 1.0})
    why = json.loads((tmp_path / "events.jsonl").read_text())["why"]
    assert os.fsencode(why) == b"/tmp/\xff", "escaped, so that the path can be opened"


def test_a_newer_schema_is_refused_by_name(tmp_path):
    run = make_run(tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text('{"schema": "2.0", "run_id": "x"}')
    with pytest.raises(RecordError, match="summary.json: written by a newer drumbeat .schema 2.0"):
        run.summary()
    (tmp_path / "run" / "run.json").write_text('{"schema": "7.1", "run_id": "x"}')
    with pytest.raises(RecordError, match="schema 7.1"):
        Run.open(run.path)


def test_throughput_is_work_over_time():
    """The clock starts at the first report: its tokens were worked on before. Wall-clock times are large numbers."""
    one, two = Progress(), Progress()
    for step in range(1, 6):
        one.add(parse_metric({"t": 1000.0 + 2 * step, "rank": 0, "step": step, "steps": 9, "tokens": 100}, 0))
        two.add(parse_metric({"t": 2000.0 + 2 * step, "rank": 1, "step": step, "tokens": 300}, 1))
    assert one.seconds == 8.0 and one.rate() == (50.0, "tokens/s") and one.seconds_left() == 8.0
    one.merge(two, clock_offset=-1000.0)
    assert one.seconds == 8.0 and one.rate() == (200.0, "tokens/s") and one.ranks == 2
    samples, steps = Progress(), Progress()
    for step in (3, 4, 5):
        samples.add(parse_metric({"t": 50.0 + step, "rank": 0, "step": step, "samples": 32, "loss": 9.0 - step}, 0))
        steps.add(parse_metric({"t": 50.0 + 4 * step, "rank": 0, "step": step}, 0))
    assert samples.rate() == (32.0, "samples/s") and steps.rate() == (0.25, "steps/s")
    assert (samples.first_loss, samples.last_loss) == (6.0, 4.0)


def test_the_summary_states_the_throughput(drumbeat):
    """Two ranks, 40 samples each and step, one step per second by the reports' own clock: 80 samples per second."""
    code = """
import json, os
rank, begin = int(os.environ["RANK"]), float(os.environ["BEGIN"])
with open(os.environ["DRUMBEAT_METRICS"], "a") as file:
    for step in range(1, 6):
        file.write(json.dumps({"t": begin + step, "rank": rank, "step": step, "samples": 40}) + "\\n")
"""
    begin = f"BEGIN={int(time.time())}"
    done = drumbeat("run", "--ranks-per-node", 2, "--env", begin, "--", "python3", "-c", code)
    assert done.returncode == 0, done.stderr
    summary = Run.open(str(drumbeat.run_folder())).summary()
    assert (summary.throughput.value, summary.throughput.unit) == (80.0, "samples/s")
    assert "speed      80 samples/s on 1 node, 2 ranks" in done.stderr


def test_order_and_parts_of_a_run(tmp_path):
    run = make_run(tmp_path / "run", nodes=2, handle="local://x/run")
    assert isinstance(run.order(), Order) and run.nodes() == [0, 1] and run.size() == 2
    assert run.summary() is None and run.members() == () and run.facts(0) is None and run.environment(0) == {}
    written = json.loads((tmp_path / "run" / "order.json").read_text())
    (tmp_path / "run" / "order.json").write_text(json.dumps({**written, "launcher": "\x1b[2J"}))
    with pytest.raises(RecordError, match=r"launcher '\\x1b"):
        run.order()
    (tmp_path / "run" / "order.json").write_text("{")
    with pytest.raises(RecordError):
        run.order()
    assert run.size() == 0


def test_codes_of_earlier_versions_are_read_as_those_of_today():
    """One fault has one code, whatever the version that wrote the folder called it."""
    old = {"code": "link-types-mixed", "severity": "error", "title": "NCCL tried to connect InfiniBand with RoCE"}
    data = {"run_id": "r", "outcome": "failed", "exit_code": 1, "seconds": 2.0, "nodes": 2, "schema": "1.0"}
    summary = parse_summary({**data, "failure": old}, "summary.json")
    assert summary is not None and summary.failure.code == "rdma-mixed"
    assert not set(WAS) & set(WAS.values())


def test_members_are_named_by_the_number_of_their_folder(tmp_path):
    """After a shrink, or where a spare took a place, node ranks are other numbers."""
    run = make_run(tmp_path / "run", nodes=3)
    nodes = [{"node": 0, "member": 0, "host": "n0"}, {"node": 1, "member": 2, "host": "n2", "clock_offset": 1.5}]
    replace_json(run.folder.peers, {"nodes": nodes})
    assert [(member.node, member.host) for member in run.members()] == [(0, "n0"), (2, "n2")]
    assert run.clock_offsets() == {0: 0.0, 2: 1.5}
    replace_json(run.folder.peers, {"nodes": [{"node": 1, "host": "n1"}, "torn", None]})
    assert [member.node for member in run.members()] == [1]
