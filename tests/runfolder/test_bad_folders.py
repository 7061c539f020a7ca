"""Run folders that are damaged, or made to do harm: every view says what it can, and none breaks."""

import json
import math
import time

import pytest

from drumbeat.base.record import to_plain
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.summary import (
    parse_summary,
)
from tests.runfolder.folders import events, log, make_run
from tests.runfolder.test_views import desk, index, lines


def damage(path):
    """Run folders that something has broken, each in its own way."""
    texts = {
        "not-json": "{", "a-list": "[]", "created-text": '{"schema": "1.0", "run_id": "x", "created": "yesterday"}',
        "created-huge": '{"schema": "1.0", "run_id": "x", "created": ' + "9" * 400 + "}", "no-schema": '{"run_id": "x"}',
        "deep": "[" * 100_000, "newer": '{"schema": "9.0", "run_id": "x"}', "desk-text": '{"schema": "1.0", "desk": "x"}',
    }  # fmt: skip
    for name, text in texts.items():
        (path / name).mkdir()
        (path / name / "run.json").write_text(text)
    (path / "empty").mkdir()
    whole = make_run(path / "summary-broken", desk=desk())
    for name in ("summary.json", "order.json", "peers.json", "events.jsonl"):
        (path / "summary-broken" / name).write_text('{"schema": "1.0", "seconds": NaN, "nodes": [{"node": "x"}]}\n')
    (path / "summary-broken/nodes/0/environment.json").write_text("[]")
    newer = make_run(path / "summary-newer", desk=desk())
    (path / "summary-newer/summary.json").write_text('{"schema": "9.0"}')
    return [*texts, "empty", whole.run_id, newer.run_id]


def test_a_damaged_run_folder_breaks_nothing(drumbeat, home, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    names = damage(broken)
    make_run(tmp_path / "good", desk=desk(), created=2000.0)
    log(Run.open(str(tmp_path / "good")), 0, "OSError: [Errno 122] Disk quota exceeded\n", "err")
    index(home, tmp_path / "good", *(broken / name for name in names))
    done = drumbeat.here("list")
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["RUN", "good", "summary-broken", "summary-newer"]
    assert done.stderr.count("left out: ") == 9 and "newer drumbeat (schema 9.0" in done.stderr
    assert len(json.loads(drumbeat.here("list", "--json").stdout)) == 3
    for name in ("good", "summary-broken", "summary-newer"):
        done = drumbeat.here("status", name)
        assert done.returncode == 0 and lines(done.stdout)["state"] == "running", done.stdout + done.stderr
    assert "quota" in drumbeat.here("diagnose", "good").stdout, "diagnose takes a run id too"
    done = drumbeat.here("diagnose", broken / "newer")
    assert done.returncode == 2 and "schema 9.0" in done.stderr and "Traceback" not in done.stderr


def test_hostile_values_of_a_run_folder_break_no_view(drumbeat, home, tmp_path):
    """Numbers that no program counts to are left out, and nothing in a folder steers the terminal; other runs are shown."""
    steers, huge = "\x1b]0;pwn\x07\x1b[2J", 10**400
    hostile = make_run(tmp_path / "hostile", run_id=f"evil{steers}", created=1500.0)
    progress = to_plain(Progress(step=3, steps=9, reported_rate=5.0, reported_unit=f"{steers}x"))
    whole = {"schema": "1.0", "run_id": "hostile", "outcome": "finished", "exit_code": 0, "seconds": 5.0, "nodes": 1}
    summary = {**whole, "progress": {**progress, "step": huge, "steps": -5, "saved": -huge}}
    (tmp_path / "hostile/summary.json").write_text(json.dumps(summary))
    joined = {"peer": -5, "peer_host": "x", "address": "", "clock_offset": 0.0}
    started = {"world_size": 1, "master_addr": "", "master_port": 1}
    events(hostile, ("node-joined", joined), ("attempt-started", {**started}))
    written = [json.loads(line) for line in (tmp_path / "hostile/events.jsonl").read_text().splitlines()]
    with open(hostile.folder.events, "a") as file:
        file.writelines(json.dumps({**event, "t": -1e18}) + "\n" for event in written)
    undated = [make_run(tmp_path / name, created=value) for name, value in (("nan", math.nan), ("inf", math.inf))]
    for run in undated:
        events(run, ("attempt-started", {**started}), ("attempt-ended", {"outcome": "finished", "exit_code": 0}))
    make_run(tmp_path / "good", desk=desk(), created=2000.0)
    for name, schema in (("no-schema", steers), ("newer", f"9.{steers}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"schema": schema, "run_id": name}))
    index(home, *(tmp_path / name for name in ("good", "hostile", "nan", "inf", "no-schema", "newer")))
    views = [("list",), *((name, hostile.path) for name in ("status", "report")), ("watch", hostile.path, "--once")]
    for view in [*views, *(("report", run.path) for run in undated)]:
        done = drumbeat.here(*view)
        assert done.returncode == 0 and "Traceback" not in done.stderr, (view, done.stderr)
        assert all(letter.isprintable() or letter == "\n" for letter in done.stdout + done.stderr), (view, done.stdout)
        if view == ("list",):
            rows = [line.split() for line in done.stdout.splitlines()]
            assert [row[0] for row in rows[:2]] == ["RUN", "good"] and rows[2][0].startswith("evil"), done.stdout
            assert len(rows) == 5 and "finished  -" in done.stdout and done.stderr.count("left out: ") == 2
    kept = hostile.summary().progress
    assert (kept.step, kept.steps, kept.saved, kept.reported_rate) == (None, None, None, 5.0)
    for run in undated:
        assert run.record.created == 0.0 and sum(run.ledger(time.time(), run.progress()).values()) < 86400, (
            "not since 1970"
        )


@pytest.mark.parametrize("name", ["exit_code", "nodes", "ranks", "start", "spares", "gpus"])
def test_a_summary_with_a_count_beyond_all_counts_is_none(name):
    whole = {"schema": "1.0", "run_id": "x", "outcome": "failed", "exit_code": 1, "seconds": 5.0, "nodes": 1}
    assert parse_summary({**whole, name: 2**53}, "x") and parse_summary({**whole, name: 2**53 + 1}, "x") is None
