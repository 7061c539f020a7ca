"""What list, status, logs and cancel say of runs, from their folders alone."""

import json
import os
import socket
import time
from dataclasses import replace

import pytest

from drumbeat.agent.lead.attempt import Attempt, RankEnd
from drumbeat.agent.lead.lead import Lead
from drumbeat.agent.lead.model import FAILED, Member, Outcome
from drumbeat.agent.lead.summary import summary_of
from drumbeat.backends.contract import Status
from drumbeat.base.problem import Problem
from drumbeat.base.proc import start_time
from drumbeat.base.ranges import expand, fold, named_ranks, ranges
from drumbeat.cli.list import table
from drumbeat.cli.status import rank_words
from drumbeat.desk.foreground import summary_without_lead
from drumbeat.desk.runs import all_runs, find_run, find_running
from drumbeat.desk.state import State, as_plain, cause_in_output, output_of, state_of, unsaved_lines
from drumbeat.findings.model import ERROR, Evidence, Finding
from drumbeat.inspector.record import Row
from drumbeat.plan.world_seen import Planned, copies
from drumbeat.runfolder.lines import closing_lines, end_words, failure_lines
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.state import Course, condition, world_of
from drumbeat.runfolder.summary import (
    Affected,
    AttemptEnd,
    Observations,
    Summary,
    Throughput,
    summarize,
    write_summary,
)
from tests.runfolder.folders import events, log, make_run, metrics, order

SOON = time.time() + 86400  # when steps are reported: a slow machine must not make them look old


def index(home, *runs):
    """As if they had been started from this home."""
    links = home / ".local/state/drumbeat/runs"
    links.mkdir(parents=True, exist_ok=True)
    for path in runs:
        (links / path.name).symlink_to(path)


def desk():
    """The record of a desk process that lives: our own."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": start_time(os.getpid())}


def lines(text):
    return dict(line.split(None, 1) for line in text.splitlines() if line[:1].strip())


def test_ranges_and_node_lists():
    assert ranges([9, 0, 1, 2, 3, 2]) == "0-3,9" and ranges([]) == "" and ranges(range(0, 20, 2), 2) == "0,2,..."
    assert named_ranks([3]) == "rank 3" and named_ranks(range(10_000)) == "ranks 0-9999"
    for hosts in (
        ["n1", "n2", "n3", "n9", "login", "n10"], ["a09", "a10", "a11", "a1", "a2"], ["nid005026", "nid005027"], ["x"],
        ["n9", "n10", "n11"], ["10.0.0.1", "10.0.0.2"], ["n3", "n2", "n1"], ["vm", "vm", "vm1", "vm"], ["01", "02"],
    ):  # fmt: skip
        assert expand(fold(hosts)) == hosts, fold(hosts)
    assert fold(f"nid{n:06d}" for n in range(5026, 6276)) == "nid[005026-006275]"


def test_a_failure_of_ten_thousand_ranks(tmp_path):
    """One rank fails, a third are ended by us, the others lose their peers, each with a message of its own."""
    run = make_run(tmp_path / "run", nodes=1250)
    lead = Lead(order(tmp_path / "run", nodes=1250, ranks_per_node=8), lambda world, first: ("h", 1), 0.0)
    lead.members = {n: Member(n, f"x{n // 8}c{n % 8}s0b{n % 2}n0", "10.0.0.1", 8) for n in range(1250)}
    cause = Finding(
        "exception", ERROR, "RuntimeError: boom " + "long " * 500, "raised at t.py:6", "look at it",
        tuple(Evidence("a line of the log " * 400, "nodes/0/attempt-0/ranks.log") for _ in range(300)), 0, "x0c0s0b0n0", 7,
    )  # fmt: skip
    attempt = Attempt(0, 0.0, 1, tuple(range(1250)), 10_000)
    for rank in range(10_000):
        other = Finding("peer-lost", ERROR, f"Connection closed by peer [10.0.0.{rank}]:{rank}", rank=rank)
        found = cause if rank == 7 else other if rank % 2 else Finding("peer-lost", ERROR, "Connection reset by peer")
        found = Finding("stopped", ERROR, "ended by drumbeat") if rank % 3 == 0 else found
        code, number = (None, 15) if rank % 3 == 0 else (1, None)
        attempt.ends.append(RankEnd(rank, code, number, 1.0, finding=found, by_us=rank % 3 == 0, member=rank // 8))
    attempt.done = {0: {"step": 5, "first_loss": 1.0, "last_loss": 0.5, "first_t": 1.0, "last_t": 9.0}}
    earlier = replace(attempt, ends=attempt.ends[:8], done={})
    lead.attempts, lead.history = [*[earlier] * 39, attempt], [Outcome(FAILED, 1, cause)] * 40
    recorded = Progress(step=9, reports=9)
    assert summary_of(lead, [], 1100.0, recorded=recorded).progress == recorded, "of an attempt that was cut off"
    summary = summary_of(lead, [], 1100.0, recorded=Progress())
    write_summary(run.folder, summary)
    assert os.path.getsize(run.folder.summary) < 64_000
    read = run.summary()
    assert read == summary and read.ranks == 10_000 and sum(each.count for each in read.consequences) == 9_999
    for printed in ((), (0,)):
        said = closing_lines(run, read, printed)
        assert len(said) <= 12 and max(len(text) for _, text in said) <= 300
        then = dict(said)["then"]
        assert then.startswith("ranks 0,3,6,9,12,15,18,21,... (3,334 ranks): ended by drumbeat; ranks 2,4,8")
    assert len(attempt.affected(cause)) <= 8, "each group is one event"


def test_equal_failures_are_one_failure_on_several_ranks(tmp_path):
    failure = Finding("exception", ERROR, "no such file", rank=0, node=0, host="h")
    others = (Affected("1-2,5", 3, "no such file"), Affected("3-4", 2, "ended by drumbeat"))
    said = dict(failure_lines(make_run(tmp_path / "run"), failure, others))
    assert said["failed"] == "ranks 0-2,5: no such file" and said["then"] == "ranks 3-4: ended by drumbeat"


def test_the_log_that_is_named_is_one_in_which_something_stands(tmp_path):
    run = make_run(tmp_path / "run")
    failure = Finding("exit-code", ERROR, "exit code 1", rank=1, node=0, host="h")
    log(run, 1, "", "err")
    log(run, 1, "", "out")
    assert dict(failure_lines(run, failure, printed=(0,)))["log"].endswith("rank-1.err (empty)")
    log(run, 1, "step 20\n", "out")
    assert dict(failure_lines(run, failure, printed=(0,)))["log"].endswith("rank-1.out")
    log(run, 1, "odd\n", "err")
    assert dict(failure_lines(run, failure, printed=(0,)))["log"].endswith("rank-1.err")


def test_a_cancelled_run_says_that_its_ranks_saved():
    ends = [(AttemptEnd(0, "cancelled", 143, resumable=saved),) for saved in (False, True)]
    plain, saved = (end_words(Summary("r", "cancelled", 143, 13.0, 1, attempts=each)) for each in ends)
    assert plain == "cancelled after 13 s, exit code 143"
    assert saved == f"{plain}; its ranks saved and ended with 75: start the same command to go on"


def test_a_time_limit_and_a_doubt_have_one_word_everywhere():
    limit, doubt = Summary("r", "time-limit", 124, 13.0, 1), Summary("r", "doubtful", 0, 13.0, 1)
    assert end_words(limit) == "time-limit reached after 13 s, exit code 124"
    for summary, state in ((limit, "failed"), (doubt, "finished")):
        said = condition(state, "", summary.outcome, Course(), Progress())
        shown = State(said, run_id="r", folder="f", status=Status("h", state), summary=summary)
        assert said.word == as_plain(shown)["outcome"] == summary.outcome
        assert table([shown], 80)[1].split()[1] == summary.outcome


def test_the_desk_writes_the_leads_own_record_when_the_lead_was_killed(tmp_path):
    run = make_run(tmp_path / "run")
    started = {"run_id": "x", "nodes": 1, "ranks_per_node": 2, "launcher": "ranks", "launcher_why": ""}
    where = {"master_addr": "h", "master_port": 1}
    events(
        run, ("run-started", started), ("mustered", {"seconds": 0.5, **where}),
        ("attempt-started", {"world_size": 2, **where}), ("first-step", {"seconds": 3.0}),
    )  # fmt: skip
    end = {"rank": 1, "exit_code": None, "signal": 9, "seconds": 5.0, "core_dumped": False}
    events(run, ("rank-exited", end), node=0)
    metrics(run, *({"t": 1003.0 + step, "rank": 0, "step": step, "samples": 8} for step in range(5)))
    summary = summary_without_lead(run, run.order(), 137, now=1020.0)
    write_summary(run.folder, summary)
    plain = json.loads((tmp_path / "run/summary.json").read_text())
    assert set(plain) == set(Summary.__dataclass_fields__) and run.summary() == summary
    assert (summary.outcome, summary.exit_code, summary.seconds) == ("failed", 137, 20.0)
    assert "killed by SIGKILL" in summary.failure.title and [a.outcome for a in summary.attempts] == ["failed"]
    assert summary.consequences[0].ranks == "1" and summary.throughput == Throughput(8.0, "samples/s")
    assert abs(sum(summary.ledger.values()) - 20.0) < 0.01


def test_an_exact_id_wins_over_a_prefix(home, tmp_path):
    for name in ("pre", "prep-1", "prep-2"):
        make_run(tmp_path / name, created=1000.0 + len(name))
    index(home, *(tmp_path / name for name in ("pre", "prep-1", "prep-2")))
    assert find_run("pre", os.environ).run_id == "pre"
    assert find_run(None, os.environ).run_id in ("prep-1", "prep-2")
    with pytest.raises(Problem, match="prep could be any of prep-"):
        find_run("prep", os.environ)
    with pytest.raises(Problem, match="no run nothing"):
        find_run("nothing", os.environ)


def test_a_name_means_its_newest_run_and_those_of_this_folder_first(drumbeat, home, tmp_path):
    for number, folder in enumerate(("here", "here", "elsewhere"), 1):
        make_run(tmp_path / folder / f"twin-{number}", name="twin", created=1000.0 + number)
    index(home, *(tmp_path / path for path in ("here/twin-1", "here/twin-2", "elsewhere/twin-3")))
    drumbeat.folder = tmp_path / "here"
    for command in ("status", "diagnose"):
        done = drumbeat.here(command, "twin")
        assert "drumbeat: twin is twin-2, the newest of 2 runs of that name here" in done.stderr, done.stderr
        assert done.returncode == 0 or command == "diagnose"
    drumbeat.folder = tmp_path / "third"
    drumbeat.folder.mkdir()
    done = drumbeat.here("status", "twin", "--json")
    assert "twin-3, the newest of 3 runs of that name in all folders" in done.stderr
    assert json.loads(done.stdout)["run_id"] == "twin-3"
    assert find_run("twin-1", os.environ).run_id == "twin-1", "an id is exact"
    for name in ("nothing", "no/such/file.log"):
        assert f"{name}: no such file, folder or run" in drumbeat.here("diagnose", name).stderr


def test_an_exact_name_wins_over_the_start_of_an_id(home, tmp_path):
    names = {"pre-0101-a": "pre", "prep-0101-b": "prep"}
    for run_id, name in names.items():
        make_run(tmp_path / run_id, name=name)
    index(home, *(tmp_path / run_id for run_id in names))
    assert find_run("pre", os.environ).run_id == "pre-0101-a" and find_run("prep", os.environ).run_id == "prep-0101-b"


def test_cancel_takes_the_only_one_that_runs(home, tmp_path):
    for name in ("one", "two", "three"):
        make_run(tmp_path / name)
    index(home, *(tmp_path / name for name in ("one", "two", "three")))
    assert find_running(None, os.environ, lambda run: run.run_id == "two").run_id == "two"
    assert find_running("one", os.environ, lambda run: False).run_id == "one"
    with pytest.raises(Problem, match="2 runs are running or queued: (one, two|two, one)"):
        find_running(None, os.environ, lambda run: run.run_id != "three")
    with pytest.raises(Problem, match="no run is running"):
        find_running(None, os.environ, lambda run: False)


def test_list_fits_eighty_columns_and_leaves_trials_out(drumbeat, home, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    fast = make_run(tmp_path / ("a-run-with-a-name-that-is-longer-than-most" + "-20261115-101112-abcd"))
    write_summary(
        fast.folder, Summary(fast.run_id, "finished", 0, 7300.0, 1, throughput=Throughput(1.234e6, "tokens/s"))
    )
    slow = make_run(tmp_path / "slow-20261115-101112-abcd", desk=desk(), created=time.time() - 100)
    metrics(slow, *({"t": SOON + step, "rank": 0, "step": step, "steps": 1000, "samples": 4} for step in range(50)))
    (tmp_path / "tuning").mkdir()
    (tmp_path / "tuning/tune.json").write_text("{}")
    trial = make_run(tmp_path / "tuning/trial-1", created=5000.0)
    index(
        home,
        *(os.path.realpath(run.path) and tmp_path / os.path.relpath(run.path, tmp_path) for run in (fast, slow, trial)),
    )
    shown = drumbeat.here("list").stdout.splitlines()
    assert max(map(len, shown)) <= 80 and shown[0].split() == ["RUN", "STATE", "STEP", "SPEED", "ELAPSED", "LEFT"]
    assert shown[1].split() == [slow.run_id, "running", "49/1000", "4", "samples/s", "2", "m", "16", "m"]
    assert shown[2] == fast.run_id and shown[3].split() == [
        "finished",
        "-",
        "1.23M",
        "tokens/s",
        "2",
        "h",
        "02",
        "m",
        "-",
    ]
    monkeypatch.delenv("COLUMNS")
    assert len(drumbeat.here("list").stdout.splitlines()) == 3, "in a pipe a line stays whole"
    assert len(shown) == 4 and "trial-1" in drumbeat.here("list", "--all").stdout
    assert find_run(None, os.environ).run_id == slow.run_id and len(all_runs(os.environ).runs) == 3


def test_status_of_a_run_that_goes_on(drumbeat, home, tmp_path):
    """Elapsed time, time left, step, and the ranks that have ended meanwhile."""
    run = make_run(tmp_path / "run", desk=desk(), created=time.time() - 500)
    index(home, tmp_path / "run")
    for rank in range(4):
        events(run, ("rank-started", {"rank": rank, "local_rank": rank, "pid": 1, "cpus": []}), node=0)
    metrics(
        run, *({"t": SOON + 2 * step, "rank": 0, "step": step, "steps": 109, "loss": 9.0 - step} for step in range(10))
    )
    assert lines(drumbeat.here("status").stdout)["ranks"] == "all 4 running"
    for rank in range(3):
        end = {"rank": rank, "exit_code": rank // 2, "signal": None, "seconds": 5.0, "core_dumped": False}
        events(run, ("rank-exited", end), node=0)
    path = tmp_path / "run/nodes/0/events.jsonl"
    written = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**event, "t": event["t"] - 120}) + "\n" for event in written))
    said = lines(drumbeat.here("status").stdout)
    assert said["ranks"].startswith("3 of 4 have ended, the last one 2 m 0") and said["ranks"].endswith(
        "ranks 0-2 (ended with 1)"
    )
    assert said["elapsed"].startswith("8 m 2") and "3 m 20 s left" in said["elapsed"]
    assert said["progress"] == "step 9/109  loss 0.000  0.50 steps/s  3 m 20 s left"
    plain = json.loads(drumbeat.here("status", "--json").stdout)
    assert (
        plain["status"]["state"] == "running" and plain["seconds_left"] == 200.0 and len(plain["ranks"]["ended"]) == 3
    )


def test_ranks_that_a_command_starts_are_counted_by_their_logs(tmp_path):
    run = make_run(tmp_path / "run", nodes=2)
    now = time.time()

    def said():
        return rank_words(run.ranks(), now)

    for node in range(2):
        about = {"rank": 2 * node, "local_rank": 0, "pid": 1, "cpus": [], "of_command": True}
        events(run, ("rank-started", about), node=node)
        (tmp_path / f"run/nodes/{node}/attempt-0").mkdir()
    assert said() == "not counted: the command of 2 nodes starts them itself, and is running"  # as with mp.spawn
    for node in range(2):
        (tmp_path / f"run/nodes/{node}/attempt-0/launcher.out").touch()
    assert said() == "none started yet by the command of 2 nodes, which is running"
    for rank in range(4):
        (tmp_path / f"run/nodes/{rank // 2}/attempt-0/rank-{rank}.err").touch()
    assert said() == "4 started by the command of 2 nodes, which is running"
    end = {"rank": 0, "exit_code": 0, "signal": None, "seconds": 5.0, "core_dumped": False, "of_command": True}
    events(run, ("rank-exited", end), node=0)  # the launcher of node 0, and with it its ranks
    assert said().startswith("2 of 4 have ended, the last one ") and said().endswith(" ago: ranks 0-1")
    events(run, ("rank-exited", {**end, "rank": 3, "exit_code": 7, "of_command": False}), node=1)
    assert said().endswith("ranks 0-1,3 (ended with 7)")


def test_a_hang_is_no_time_left_and_a_silence_neither(drumbeat, home, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    run = make_run(tmp_path / "run", desk=desk(), created=time.time() - 500)
    index(home, tmp_path / "run")
    metrics(run, *({"t": time.time() - 99 + step, "rank": 0, "step": step, "steps": 99} for step in range(10)))
    rows = drumbeat.here("list").stdout.splitlines()
    assert rows[0].split()[-1] == "ELAPSED" and rows[2].startswith("  no step for ")
    said = lines(drumbeat.here("status").stdout)
    assert "left" not in said["elapsed"] and "1.00 steps/s  no step for " in said["progress"]
    events(run, ("finding", {"finding": Finding("hang-stopped", ERROR, "no step for 9 s: rank 1 is stopped")}))
    rows = drumbeat.here("list").stdout.splitlines()
    assert rows[0].split()[-1] == "ELAPSED" and rows[2:] == ["  hang: no step for 9 s: rank 1 is stopped"]
    long = Finding("hang-stopped", ERROR, f"no step for 9 s: rank 1 is stopped; {'rank 2 waits; ' * 9}\x1b[31m the end")
    events(run, ("finding", {"finding": long}))
    assert not any("\x1b" in drumbeat.here(command).stdout for command in ("list", "status", "report"))
    rows = drumbeat.here("list").stdout.splitlines()
    assert max(map(len, rows)) <= 80 and rows[-1].endswith("the end") and rows[-1].startswith("    ")
    assert json.loads(drumbeat.here("list", "--json").stdout)[0]["seconds_left"] is None


def test_a_loss_that_is_no_number_and_ranks_that_train_apart_stand_in_every_summary(drumbeat, home, tmp_path):
    run = make_run(tmp_path / "run", desk=desk(), created=time.time() - 50)
    index(home, tmp_path / "run")
    metrics(
        run, *({"t": SOON + step, "rank": 0, "step": step, "loss": 1.0 if step < 5 else "nan"} for step in range(9))
    )
    lonely = [Row(0, 100 + rank, rank, 2, "m", alone=True, framework="torch") for rank in (0, 1)]
    apart = copies(lonely, Planned(2, 1, True))
    words = "2 ranks are not connected: they are 2 copies of one training"
    events(
        run,
        ("attempt-started", {"world_size": 2, "master_addr": "h", "master_port": 1}),
        ("finding", {"finding": apart}),
    )
    shown = state_of(run)
    assert words in drumbeat.here("status").stdout and "Trainer(devices=2" in drumbeat.here("status").stdout
    remarks = ["  warning: loss nan since step 5", f"  warning: {words}"]
    assert drumbeat.here("list").stdout.splitlines()[2:] == remarks
    ended = summarize(
        run.order(), [AttemptEnd(0, "finished", 0)], [], (), run.progress(), {}, Observations(run.run_events())
    )
    write_summary(run.folder, ended)
    make_run(tmp_path / "run")
    hung = replace(ended, hang=Finding("hang-stopped", ERROR, "no step for 9 s"), world=None, progress=Progress())
    assert table([replace(shown, summary=hung, world=None, progress=Progress())], 80)[2:] == ["  hang: no step for 9 s"]
    assert words in drumbeat.here("status").stdout and drumbeat.here("list").stdout.splitlines()[2:] == remarks
    assert ("warning", words) in closing_lines(run, ended)
    assert summary_without_lead(run, run.order(), 137, now=1020.0).world == apart
    events(run, ("attempt-started", {"world_size": 2, "master_addr": "h", "master_port": 1, "attempt": 1}))
    assert world_of(run.run_events()) is None, "the next attempt is judged anew"


CAUSES = {
    "/runs/x/job.sh: 45: exec: apptainer: not found": "a node has no apptainer",
    'FATAL:   "python3": executable file not found in $PATH': "the container image has no python3",
    "FATAL:   could not open image /p/x.sif: image format not recognized": "the container image cannot be opened /p/x.sif",
    "drumbeat: node 0: [Errno 28] No space left on device; ending": "a file system is full or its quota is used up",
}


@pytest.mark.parametrize("line", CAUSES, ids=lambda line: CAUSES[line].replace(" ", "-"))
def test_the_output_of_a_schedulers_job_tells_why_it_failed(drumbeat, home, tmp_path, line):
    """The job ended before any agent could say anything; its desk has long gone."""
    gone = {"host": socket.gethostname(), "pid": 1 << 22, "started": "1"}
    make_run(tmp_path / "run", desk=gone)
    index(home, tmp_path / "run")
    (tmp_path / "run/slurm-77.out").write_text(
        f"drumbeat  job 77, start 0, on n1\n{line}\nsrun: error: n1: task 0: Exited\n"
    )
    status, logs, diagnosis = (drumbeat.here(*words) for words in (("status",), ("logs",), ("diagnose", "run")))
    assert lines(status.stdout)["failed"] == CAUSES[line] and "fix" in lines(status.stdout), status.stdout
    assert line in logs.stdout and "what its job printed" in logs.stderr
    assert CAUSES[line] in diagnosis.stdout


def test_logs_of_one_rank_of_one_attempt(drumbeat, home, tmp_path):
    run = make_run(tmp_path / "run")
    index(home, tmp_path / "run")
    for rank in (0, 1):
        log(run, rank, f"first {rank}\n")
        log(run, rank, f"second {rank}\n", attempt=1)
        log(run, rank, f"wrong {rank}", "err", attempt=1)
    assert drumbeat.here("logs").stdout.splitlines() == ["[0] second 0", "[0] wrong 0", "[1] second 1", "[1] wrong 1"]
    assert drumbeat.here("logs", "--rank", 1, "--attempt", 0).stdout == "first 1\n"
    (said,) = [
        json.loads(line) for line in drumbeat.here("logs", "--rank", 0, "--attempt", 0, "--json").stdout.splitlines()
    ]
    assert said == {"node": 0, "attempt": 0, "rank": 0, "stream": "out", "text": "first 0"}
    assert drumbeat.here("logs", "--rank", 7).returncode == 2


@pytest.mark.parametrize(
    "lines, elapsed, hint",
    [(40, 5.0, True), (3, 5.0, False), (3, 90.0, True), (0, 90.0, False)],
    ids=["many", "few", "few but long", "none of its own"],
)
def test_a_program_whose_lines_say_nothing_is_told_how_to_report(tmp_path, lines, elapsed, hint):
    run = make_run(tmp_path / "r")
    log(run, 0, "drumbeat: torchrun: --nproc_per_node=2\n" + "still working\n" * lines)
    summary = Summary(run_id="r", outcome="finished", exit_code=0, seconds=elapsed, nodes=1, ranks=2)
    said = dict(closing_lines(run, summary))
    assert ("metrics" in said) == hint
    metrics(run, {"t": 1.0, "rank": 0, "kind": "step", "step": 1, "loss": 1.0})
    assert "metrics" not in dict(closing_lines(run, summary))


def test_a_resumed_run_does_not_claim_the_steps_before_it(tmp_path):
    run = make_run(tmp_path / "r")
    progress = Progress(
        step=1175, first_step=571, first_loss=3.1, first_loss_step=571, last_loss=1.9, last_loss_step=1175
    )
    summary = Summary(run_id="r", outcome="finished", exit_code=0, seconds=9.0, nodes=1, ranks=2, progress=progress)
    assert dict(closing_lines(run, summary))["loss"] == "fell from 3.100 at step 571 to 1.900 at step 1175"


def test_status_waits_for_the_last_files_of_a_run_that_has_ended(drumbeat, home, tmp_path, monkeypatch):
    """Elsewhere the summary comes before the rest: only when all of it is here are its pods removed."""
    waited = []
    monkeypatch.setattr("drumbeat.runfolder.files.Files.settle", lambda files, seconds: waited.append(files.root))
    going = make_run(tmp_path / "going", desk=desk())
    index(home, tmp_path / "going")
    assert "running" in drumbeat.here("status", going.run_id).stdout and not waited
    ended = make_run(tmp_path / "ended")
    write_summary(ended.folder, Summary(ended.run_id, "finished", 0, 7.0, 1))
    index(home, tmp_path / "ended")
    assert "finished" in drumbeat.here("status", ended.run_id).stdout and waited == [ended.path]


def test_an_array_that_failed_shows_the_output_of_a_task_that_did(tmp_path):
    run = make_run(tmp_path)
    for task, text in enumerate(
        ("training goes well\n", "OSError: [Errno 28] No space left on device\n", "all is well\n")
    ):
        (tmp_path / f"slurm-7_{task}.out").write_text(text)
    tasks = tuple(Status(f"slurm://bench/7_{task}", "failed" if task == 1 else "finished") for task in range(3))
    told = Status("slurm://bench/7", "failed", tasks=tasks)
    assert output_of(run, told) == ["slurm-7_1.out"]
    found = cause_in_output(run, told)
    assert found and found.evidence[0].file == "slurm-7_1.out"


def test_ranks_that_were_killed_while_they_saved_are_told(tmp_path):
    """The lead was killed with them: its records end after the request, or go on with the next start."""
    run = make_run(tmp_path)
    started = {
        "run_id": "x",
        "nodes": 1,
        "ranks_per_node": 1,
        "launcher": "ranks",
        "launcher_why": "",
        "job_began": None,
    }
    events(run, ("run-started", started), ("stopping", {"why": "Slurm ends this job", "signal": 15, "grace": 20.0}))
    (tmp_path / "stop").write_text("TERM Slurm ends this job\nLEFT 8 Slurm kills them then\n")
    less = "the ranks get 8 s to save, less than the 20 s of stop-grace: Slurm kills them then"
    assert unsaved_lines(run, over=False) == [("warning", less)]
    ((_, words),) = unsaved_lines(run, over=True)
    assert "a save that was not finished is cut" in words and less in words
    events(run, ("run-started", started))
    assert unsaved_lines(run, over=False) == [("warning", words)]


@pytest.mark.parametrize("seconds,sure,said", [(8.0, "likely", True), (8.0, "certain", False), (90.0, "likely", False)])
def test_a_training_too_short_to_show_an_exchange_says_so_at_its_end(tmp_path, seconds, sure, said):
    run = make_run(tmp_path / "r")
    seen = {
        "check": "world",
        "answer": "as planned",
        "confidence": sure,
        "summary": "2 ranks connected",
        "count": 2,
        "seen": ["x"],
    }
    events(run, ("verdict", {"verdict": seen, "peer": 0}))
    progress = Progress(step=40, first_step=1, first_t=1.0, last_t=1.0 + seconds)
    summary = Summary(run_id="r", outcome="finished", exit_code=0, seconds=9.0, nodes=1, ranks=2, progress=progress)
    world = dict(closing_lines(run, summary)).get("world", "")
    assert ("2 ranks connected; the training was too short to see" in world) == said
