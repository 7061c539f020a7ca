"""`diagnose RUN` knows at least what the run's own summary, hang verdict and checks know."""

from __future__ import annotations

import json

import pytest

from drumbeat.findings.model import CERTAIN, ERROR, LIKELY, WARNING, Evidence, Finding
from drumbeat.findings.recorded import Recorded
from drumbeat.logs.failure import NO_FAILURE, Failure
from drumbeat.logs.reader import Reader
from drumbeat.logs.recorded import with_record

LOST = "ConnectionResetError: Connection closed by peer"
HANG = Finding(
    "hang-asleep", ERROR, "no step for 9 s: rank 2 is asleep", "it sleeps", "look", (Evidence("rank 2: asleep"),),
    rank=2, confidence=LIKELY, seen=("4 ranks in /proc",),
)  # fmt: skip


def read(recorded, **logs):
    reader = Reader()
    reader.recorded = recorded
    for name, lines in logs.items():
        rank = int(name[1:])
        reader.name_file(f"rank-{rank}.err", rank, "h1")
        reader.feed_lines(f"rank-{rank}.err", 1, [line.encode() for line in lines])
    return reader.report().failure


def traceback(last):
    return ["Traceback (most recent call last):", '  File "t.py", line 3, in <module>', "    f()", last]


def test_a_hang_is_repeated_after_the_run_was_cancelled():
    failure = read(Recorded("summary.json", "cancelled", 130, HANG), r3=traceback(LOST))
    assert (failure.answer, failure.finding.rank, failure.confidence) == ("hang-asleep", 2, LIKELY)
    assert [each.code for each in failure.consequences] == ["peer-lost", "cancelled"]
    assert failure.seen == ("4 ranks in /proc", "summary.json")


def test_a_cancelled_run_did_not_fail():
    failure = read(Recorded("summary.json", "cancelled", 130), r3=traceback(LOST))
    assert (failure.answer, failure.confidence, failure.finding.rank) == ("cancelled", CERTAIN, None)


def test_the_records_certainty_and_rank_stand_and_the_logs_add_their_lines():
    own = Finding("exception", ERROR, "ValueError: a bug", rank=2, seen=("the last lines of rank-2.err",))
    failure = read(
        Recorded("summary.json", "failed", 1, own), r1=traceback("KeyError: 'x'"), r2=traceback("ValueError: a bug")
    )
    assert (failure.answer, failure.finding.rank, failure.confidence) == ("exception", 2, CERTAIN)
    quiet = read(Recorded("summary.json", "failed", 1, own))
    assert (quiet.answer, quiet.confidence, quiet.seen[-1]) == ("exception", CERTAIN, "summary.json")


def test_a_line_that_the_record_quotes_is_told_once_and_with_its_number():
    own = Finding("caught-error", WARNING, "ValueError: a bug", evidence=(Evidence("ValueError: a bug", "x"),), rank=2,
                  confidence=LIKELY)  # fmt: skip
    failure = read(Recorded("summary.json", "doubtful", 0, own), r2=traceback("ValueError: a bug"))
    assert (failure.answer, failure.confidence, failure.others) == ("caught-error", LIKELY, ())
    assert failure.finding.evidence[0].place == "rank-2.err:4"


def test_a_record_without_a_cause_leaves_the_answer_to_the_logs():
    own = Finding("exit-code", ERROR, "exit code 1", rank=2, confidence="unknown")
    failure = read(Recorded("summary.json", "failed", 1, own), r2=traceback("ValueError: a bug"))
    assert (failure.answer, failure.finding.rank) == ("exception", 2)


def test_what_a_finished_run_survived_is_a_note():
    failure = read(Recorded("summary.json", "finished", 0), r2=traceback("ValueError: a bug"))
    assert (failure.answer, failure.confidence) == ("none", LIKELY)
    assert [note.code for note in failure.notes] == ["exception"]


@pytest.mark.parametrize("code", ["nan-loss", "nan-value"])
def test_a_run_that_finished_with_a_loss_that_is_no_number_is_not_certain(code):
    note = Finding(code, WARNING, "the last reported loss is inf since step 11")
    failure = read(Recorded("summary.json", "finished", 0, None, (note,)), r0=["step 1"])
    assert (failure.answer, failure.confidence, failure.notes) == ("none", LIKELY, (note,))


def test_a_run_that_finished_did_not_hang():
    failure = read(Recorded("summary.json", "finished", 0, HANG, (HANG,)), r2=["step 1"])
    assert (failure.answer, failure.confidence, failure.notes) == ("none", CERTAIN, ())


def test_what_the_checks_warned_of_is_a_note():
    census = Finding("separate-worlds", WARNING, "2 worlds of 1 rank", seen=("2 processes",))
    failure = read(Recorded("summary.json", "failed", 1, HANG, (census, HANG)))
    assert [note.code for note in failure.notes] == ["separate-worlds"]


def test_one_run_is_one_run_however_many_torchruns_ended_on_its_host():
    table = [
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2026-03-29_22:03:{}",
        "  host      : vm",
        "  rank      : 2 (local_rank: 0)",
        "  exitcode  : 1 (pid: 7)",
        "  traceback : To enable traceback see: x",
    ]
    own = Finding("exception", ERROR, "ValueError: a bug", rank=2, seen=("x",))
    logs = {f"r{rank}": [line.format(10 + rank) for line in table] for rank in (0, 2)}
    failure = read(Recorded("summary.json", "failed", 1, own), **logs)
    assert failure.confidence == CERTAIN and not any("several" in each for each in failure.unseen)


def test_attempts_before_the_last_one_are_told(tmp_path, monkeypatch, capsys):
    from drumbeat.cli import main

    folder = tmp_path / "r1"
    folder.mkdir()
    (folder / "run.json").write_text('{"run_id": "r1", "schema": "1.0"}')
    head = {"t": 1.0, "mono": 1.0, "host": "vm", "node": 0}
    lost = {"code": "node-lost", "severity": "error", "title": "node 1 (b) was lost"}
    world = {"world_size": 2, "master_addr": "a", "master_port": 9}
    events = [
        {"kind": "attempt-started", "attempt": 0, **world}, {"kind": "failed", "attempt": 0, "finding": lost},
        {"kind": "attempt-started", "attempt": 1, **world},
        {"kind": "verdict", "attempt": 1, "peer": 0,
         "verdict": {"check": "transport", "answer": "as planned", "summary": "tcp (NET/Socket)"}},
        {"kind": "run-ended", "attempt": 1, "outcome": "finished", "exit_code": 0},
    ]  # fmt: skip
    lines = [json.dumps({**head, "seq": number, **event}) for number, event in enumerate(events)]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", "r1"]) == 0
    said = capsys.readouterr().out
    assert "none in the last attempt [certain]" in said and "attempt 1 of 2 ended: node 1 (b) was lost" in said, said
    assert "the run's own transport check: as planned: tcp (NET/Socket)" in said


@pytest.mark.parametrize(
    "ends,steps,said",
    [
        ((12,), 100, "none seen [likely]; it ended with exit code 0 at step 12 of 100"),
        ((12, 5), 12, "none seen [likely]; rank 1 ended with exit code 0 at step 5, others at step 12"),
        ((12, 5), None, "none seen [likely]; rank 1 ended with exit code 0 at step 5, others at step 12"),
        ((12, 12), 12, "none seen [certain]"),
        ((12, 11), None, "none seen [certain]"),
    ],
)
def test_a_run_that_ended_with_0_short_of_its_steps_may_have_failed(tmp_path, monkeypatch, capsys, ends, steps, said):
    from drumbeat.cli import main

    folder = tmp_path / "r1"
    (folder / "nodes/0").mkdir(parents=True)
    (folder / "run.json").write_text('{"run_id": "r1", "schema": "1.0"}')
    reports = [
        {"t": float(step), "rank": rank, "kind": "step", "step": step, **({"steps": steps} if steps else {})}
        for rank, last in enumerate(ends)
        for step in range(1, last + 1)
    ]
    (folder / "nodes/0/metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in reports))
    progress = {"step": 12, "steps": steps, "first_step": 1, "widest": 1, "reports": 12, "ranks": len(ends)}
    summary = {"run_id": "r1", "outcome": "finished", "exit_code": 0, "seconds": 9.0, "nodes": 1, "progress": progress}
    (folder / "summary.json").write_text(json.dumps({**summary, "schema": "1.0"}))
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", "r1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(words in out for words in said.split("; ")), out
    assert ("exit code 0" in out) == ("exit code 0" in said)


@pytest.mark.parametrize(
    "progress,said",
    [
        ({"not_finite": "inf", "not_finite_since": 11}, "the last reported loss is inf since step 11"),
        ({"validation_not_finite": "nan"}, "the last reported validation loss is nan"),
    ],
)
def test_a_run_whose_last_recorded_loss_is_no_number_is_not_certain(tmp_path, monkeypatch, capsys, progress, said):
    from drumbeat.cli import main

    folder = tmp_path / "r1"
    folder.mkdir()
    (folder / "run.json").write_text('{"run_id": "r1", "schema": "1.0"}')
    summary = {"run_id": "r1", "outcome": "finished", "exit_code": 0, "seconds": 9.0, "nodes": 1, "schema": "1.0"}
    (folder / "summary.json").write_text(json.dumps({**summary, "progress": {"step": 25, "steps": 25, **progress}}))
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", "r1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "none seen [likely]" in out and said in out


@pytest.mark.parametrize("with_summary", [True, False])
def test_a_run_folder_is_read_before_its_logs(tmp_path, monkeypatch, capsys, with_summary):
    from drumbeat.cli import main

    folder = tmp_path / "r1"
    logs = folder / "nodes/1/attempt-0"
    logs.mkdir(parents=True)
    (folder / "run.json").write_text('{"run_id": "r1", "schema": "1.0"}')
    (logs / "rank-3.err").write_text("\n".join(traceback(LOST)) + "\n")
    plain = {"code": "hang-asleep", "severity": "warning", "title": "no step for 9 s: rank 2 is asleep", "rank": 2,
             "confidence": "likely"}  # fmt: skip
    head = {"t": 1.0, "mono": 1.0, "host": "vm", "node": 0}
    events = [{"kind": "attempt-started", "attempt": 0, "world_size": 4}, {"kind": "finding", "finding": plain}]
    lines = [json.dumps({**head, "seq": number, **event}) for number, event in enumerate(events)]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    if with_summary:
        summary = {"run_id": "r1", "outcome": "cancelled", "exit_code": 130, "seconds": 9.0, "nodes": 2, "hang": plain}
        (folder / "summary.json").write_text(json.dumps({**summary, "schema": "1.0"}))
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", "r1", "--json"]) == 0
    failure = json.loads(capsys.readouterr().out)["failure"]
    assert (failure["answer"], failure["finding"]["rank"], failure["confidence"]) == ("hang-asleep", 2, "likely")
    assert main(["status", str(folder)]) == 0
    assert "rank 2 is asleep" in capsys.readouterr().out


OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId=812.0. Some of the step tasks have been OOM Killed."
NO_RULE = Finding("exit-code", ERROR, "exit code 3: giving up", rank=1, confidence="unknown", seen=("exit code 3",))


def test_a_rank_that_drumbeat_ended_did_not_fail_whatever_it_wrote():
    recorded = Recorded("summary.json", "failed", 3, NO_RULE, ended_by_us=frozenset({0, 2}))
    failure = read(recorded, r0=["step 1 loss 2.0", OOM], r1=["giving up"], r2=traceback("KeyError: 'x'"))
    assert (failure.answer, failure.confidence, failure.finding.rank) == ("exit-code", "unknown", 1)
    assert failure.seen == ("exit code 3", "summary.json") and failure.others == ()
    assert {(note.rank, note.severity) for note in failure.notes} >= {(0, "info")}
    assert "drumbeat ended later" in failure.notes[0].title


def test_what_the_rank_itself_wrote_and_what_a_waiting_one_lost_still_answer():
    recorded = Recorded("summary.json", "failed", 3, NO_RULE, ended_by_us=frozenset({0}))
    own = read(recorded, r0=["step 1 loss 2.0"], r1=[OOM])
    assert (own.answer, own.finding.rank) == ("oom-kill", 1) and own.seen[-1] == "summary.json"
    lost = Finding("peer-lost", ERROR, "it lost a peer", rank=1, confidence=LIKELY)
    waited = read(Recorded("summary.json", "failed", 1, lost, ended_by_us=frozenset({0})), r0=[OOM], r1=traceback(LOST))
    assert (waited.answer, waited.finding.rank) == ("oom-kill", 0)


def test_a_run_folder_says_whom_drumbeat_ended(drumbeat):
    (drumbeat.folder / "q.py").write_text(
        "import os, sys, time\n"
        f"if os.environ['RANK'] == '0':\n    print({OOM!r}, flush=True)\n    open('there', 'w').close()\n    time.sleep(600)\n"
        "while not os.path.exists('there'):\n    time.sleep(0.05)\n"
        "print('accuracy 0.3 below target 0.7: giving up', flush=True)\nsys.exit(3)\n"
    )
    assert drumbeat("run", "--ranks-per-node", "2", "--", "python", "q.py").returncode == 3
    (run,) = (drumbeat.folder / "runs").iterdir()
    failure = json.loads(drumbeat.here("diagnose", "--json", str(run)).stdout)["failure"]
    assert (failure["answer"], failure["finding"]["rank"]) == ("exit-code", 1)
    assert failure["seen"][-1].endswith("summary.json") and "oom-kill" in [note["code"] for note in failure["notes"]]


def test_a_run_whose_starter_was_killed_was_not_cancelled_by_anybody():
    empty = Failure(NO_FAILURE, CERTAIN)
    gone = with_record(empty, Recorded("summary.json", "cancelled", 143, orphaned=True)).finding
    assert gone.code == "cancelled" and "was killed, or its terminal was closed" in gone.cause
    asked = with_record(empty, Recorded("summary.json", "cancelled", 143)).finding
    assert "asked it to stop" in asked.cause


NAN_TO_THE_END = Finding("nan-loss", ERROR, "the last reported loss is nan since step 15", evidence=(Evidence("x"),))


def test_a_finished_run_whose_loss_stayed_nan_is_answered_as_its_own_log_is():
    lines = [f"step {step} loss {'nan' if step > 14 else 3.0}" for step in range(1, 30)]
    log = read(None, r0=lines)
    run = read(Recorded("summary.json", "finished", 0, None, (NAN_TO_THE_END,)), r0=lines)
    assert (run.answer, run.confidence, run.finding) == (log.answer, log.confidence, log.finding)
    assert run.answer == "nan-loss" and run.finding.evidence[0].place == "rank-0.err:15" and not run.notes
    assert run.seen == (*log.seen, "summary.json")


def test_losses_that_a_program_reports_and_does_not_print_are_answered_too():
    run = read(Recorded("summary.json", "finished", 0, None, (NAN_TO_THE_END,)), r0=["hello"])
    assert (run.answer, run.confidence, run.finding.title) == ("nan-loss", LIKELY, NAN_TO_THE_END.title)
    assert "x" in [each.text for each in run.finding.evidence] and not run.notes


def dial(port, address="127.0.0.1"):
    words = "The client socket has timed out after 40000ms while trying to connect to"
    return f"[E socket.cpp:1028] [c10d] {words} ({address}, {port})."


@pytest.mark.parametrize("port,answer", [(29999, "store-elsewhere"), (61229, "store-clients-missing")])
def test_the_address_that_a_rank_dialled_is_compared_with_the_planned_one(port, answer):
    missing = Finding("store-clients-missing", ERROR, "not every rank reached the rendezvous in time", rank=0)
    recorded = Recorded("summary.json", "failed", 1, missing, store=("127.0.0.1", 61229), hosts=1)
    failure = read(recorded, r0=traceback("torch.distributed.DistStoreError: waiting for clients. 1/2 clients joined."),
                   r1=[dial(port)])  # fmt: skip
    titles = [each.title for each in (failure.finding, *failure.others, *failure.consequences)]
    assert failure.answer == answer and not any("every node" in title for title in titles)
    if port == 29999:
        assert (
            failure.finding.rank == 1
            and "at 127.0.0.1:29999, but they meet at 127.0.0.1:61229" in failure.finding.title
        )


def test_a_loopback_address_is_wrong_where_there_are_several_machines():
    failure = read(Recorded("summary.json", "failed", 1, store=("127.0.0.1", 29500), hosts=2), r1=[dial(29500)])
    assert "every node looks for the rendezvous store on itself" in failure.finding.title
