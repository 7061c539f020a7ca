"""A crash at any byte leaves the run folder readable."""

import json

from drumbeat.runfolder.files import EventLog, Tail, read_json, replace, replace_json
from drumbeat.runfolder.layout import SCHEMA, RunFolder
from drumbeat.runfolder.run import Run


def test_events_cut_at_every_byte(tmp_path):
    replace_json(str(tmp_path / "run.json"), {"schema": SCHEMA, "run_id": "x"})
    run = Run.open(str(tmp_path))
    path = tmp_path / "events.jsonl"
    log = EventLog(str(path), 0)
    for number in range(5):
        log.write("attempt-ended", {"outcome": f"ä{number}", "exit_code": number})
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        before = [event.outcome for event in run.run_events()]
        assert before == [json.loads(line)["outcome"] for line in whole[:cut].split(b"\n")[: len(before)]]
        again = EventLog(str(path), 0)
        again.write("attempt-ended", {"outcome": "after", "exit_code": 0})
        again.close()
        after = run.run_events()
        assert len(after) >= len(before) + 1 and after[-1].outcome == "after"
        assert [event.seq for event in after] == sorted(event.seq for event in after)


def test_replace_leaves_the_old_file_when_it_cannot_write(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    replace_json(str(path), {"a": 1})
    import os

    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    try:
        replace(str(path), "x")
    except OSError:
        pass
    assert read_json(str(path)) == {"a": 1} and [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_tail_gives_whole_lines_and_the_rest_at_the_end(tmp_path):
    path = tmp_path / "log"
    tail = Tail(str(path))
    assert tail.lines() == []
    path.write_bytes(b"one\ntw")
    assert tail.lines() == ["one"]
    with path.open("ab") as file:
        file.write(b"o\n\xff\nthree")
    assert tail.lines() == ["two", "\ufffd"] and tail.lines(final=True) == ["three"]


def test_events_of_all_nodes_in_the_leads_time(tmp_path):
    folder = RunFolder(str(tmp_path))
    replace_json(folder.run_json, {"schema": SCHEMA, "run_id": "x"})
    for node in (0, 1):
        (tmp_path / "nodes" / str(node)).mkdir(parents=True)
        log = EventLog(folder.node(node).events, node)
        log.write("agent-started", {"pid": 1, "version": "1", "python": "3"})
    members = [{"node": 0, "host": "a", "clock_offset": 0.0}, {"node": 1, "host": "b", "clock_offset": -100.0}]
    replace_json(folder.peers, {"nodes": members})
    assert [event.node for event in Run.open(str(tmp_path)).events()] == [1, 0]
