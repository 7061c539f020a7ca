"""Real runs from the command line: identity, exit codes, logs, restarts, wraps, limits, metrics."""

import json
import os
import signal
import socket
import sys

import pytest

from tests.conftest import marked, wait_for

PY = sys.executable


def run(drumbeat, *words, code="", flags=(), **options):
    return drumbeat("run", *flags, "--", PY, "-c", code, *words, **options)


def summary(drumbeat):
    return json.loads((drumbeat.run_folder() / "summary.json").read_text())


def test_every_rank_knows_who_it_is(drumbeat):
    names = [
        "RANK",
        "LOCAL_RANK",
        "NODE_RANK",
        "GROUP_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "NNODES",
        "MASTER_ADDR",
        "MASTER_PORT",
    ]
    code = f"import os, json; print(json.dumps({{n: os.environ[n] for n in {names}}}))"
    done = run(drumbeat, code=code, flags=("--nodes", 2, "--ranks-per-node", 2))
    assert done.returncode == 0, done.stderr
    said = [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines()]
    said.sort(key=lambda each: int(each["RANK"]))
    assert [(e["RANK"], e["LOCAL_RANK"], e["NODE_RANK"]) for e in said] == [
        ("0", "0", "0"), ("1", "1", "0"), ("2", "0", "1"), ("3", "1", "1"),
    ]  # fmt: skip
    assert {(e["WORLD_SIZE"], e["LOCAL_WORLD_SIZE"], e["NNODES"], e["MASTER_ADDR"]) for e in said} == {
        ("4", "2", "2", "127.0.0.1")
    }
    assert len({e["MASTER_PORT"] for e in said}) == 1


def test_run_folder_holds_what_its_layout_says(drumbeat):
    job = drumbeat.folder / "job.yaml"
    job.write_text(f"command: [{PY}, -c, 'print(1)']\nnodes: 2\n")
    assert drumbeat("run", "job.yaml").returncode == 0
    folder = drumbeat.run_folder()
    for name in ("run.json", "order.json", "code.json", "events.jsonl", "peers.json", "summary.json", "drumbeat.pyz"):
        assert (folder / name).stat().st_size, name
    assert (folder / "job.yaml").read_text() == job.read_text()
    for node in ("0", "1"):
        place = folder / "nodes" / node
        assert json.loads((place / "facts.json").read_text())["host"] == socket.gethostname()
        assert (place / "attempt-0" / f"rank-{node}.out").read_text() == "1\n"
        variables = json.loads((place / "environment.json").read_text())["variables"]
        assert all(variable["why"] and variable["source"] for variable in variables)
    assert json.loads((folder / "code.json").read_text())["commit"] == "unknown"
    kinds = [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()]
    assert kinds[0] == "run-started" and kinds[-1] == "run-ended" and kinds.count("node-joined") == 2


def test_commit_and_dirty_state_of_the_users_code(drumbeat):
    import subprocess

    def git(*words):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *words], cwd=drumbeat.folder, check=True, capture_output=True)

    git("init", "-q")
    (drumbeat.folder / "a.py").write_text("print(1)\n")
    git("add", "a.py")
    git("commit", "-qm", "one")
    (drumbeat.folder / "a.py").write_text("print(2)\n")
    assert drumbeat("run", "--", PY, "a.py").returncode == 0
    code = json.loads((drumbeat.run_folder() / "code.json").read_text())
    assert len(code["commit"]) == 40 and code["dirty"] is True and code["changed"] == [" M a.py"]


@pytest.mark.parametrize(
    "code,exit_code,finding",
    [
        ("import sys; sys.exit(7)", 7, None),
        ("raise ValueError('boom')", 1, "exception"),
        ("import ctypes; ctypes.string_at(0)", 139, "segfault"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137, None),
    ],
)
def test_exit_code_and_cause(drumbeat, code, exit_code, finding):
    done = run(drumbeat, code=code)
    assert done.returncode == exit_code, done.stderr
    failure = summary(drumbeat)["failure"]
    assert failure["rank"] == 0 and summary(drumbeat)["outcome"] == "failed"
    if finding:
        assert failure["code"] == finding
    assert failure["title"] in done.stderr


def test_the_first_failure_is_told_from_its_consequences(drumbeat):
    """Rank 0 loses its peer and is gone long before rank 1, whose own fault it was, has finished dying."""
    from tests.runs.own_order import start_with_timing

    code = """
import os, sys, time
if os.environ["RANK"] == "0":
    while not os.path.exists("dying"):
        time.sleep(0.01)
    print("RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:5", file=sys.stderr)
    sys.exit(1)
open("dying", "w").close()
time.sleep(0.4)
raise ValueError("the real cause")
"""
    # However slowly a busy machine lets it die: the lead waits for it longer than it would by itself.
    process, _ = start_with_timing(drumbeat, (PY, "-c", code), dict(os.environ), nodes=1, settle=120.0)
    said = process.communicate(timeout=300)[0]
    failure = summary(drumbeat)["failure"]
    assert failure["rank"] == 1 and "the real cause" in failure["title"], said
    assert summary(drumbeat)["consequences"][0]["ranks"] == "0"


def test_restart_keeps_the_attempts_apart(drumbeat):
    code = "import os, sys; print('attempt', os.environ['DRUMBEAT_ATTEMPT']); sys.exit(os.environ['DRUMBEAT_ATTEMPT'] == '0')"
    done = run(drumbeat, code=code, flags=("--restarts", 2, "--ranks-per-node", 2, "--nodes", 2))
    assert done.returncode == 0, done.stderr
    assert [attempt["outcome"] for attempt in summary(drumbeat)["attempts"]] == ["failed", "finished"]
    for attempt in (0, 1):
        log = drumbeat.run_folder() / "nodes" / "1" / f"attempt-{attempt}" / "rank-3.out"
        assert log.read_text() == f"attempt {attempt}\n"


def test_a_schedulers_site_is_refused_where_there_is_no_such_scheduler(drumbeat):
    done = run(drumbeat, code="", flags=("--site", "slurm"))
    assert done.returncode == 2 and "site slurm uses Slurm, but this machine is not in one of its jobs" in done.stderr
    assert "bug" not in done.stderr and not (drumbeat.folder / "runs").exists()


def test_restarts_are_spent_and_said(drumbeat):
    done = run(drumbeat, code="raise SystemExit(3)", flags=("--restarts", 1))
    assert done.returncode == 3 and len(summary(drumbeat)["attempts"]) == 2


def test_a_taken_port_costs_no_restart(drumbeat, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        code = """
import os, socket
if os.environ["RANK"] == "0":
    try:
        socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"])))
    except OSError as error:
        raise RuntimeError("The server socket has failed to listen on any local network address. EADDRINUSE") from error
"""
        done = run(drumbeat, code=code)
    assert done.returncode == 0, done.stderr
    first, second = summary(drumbeat)["attempts"]
    assert first["finding"]["code"] == "port-in-use" and second["outcome"] == "finished"


def test_a_port_that_the_program_chose_itself_costs_a_restart(drumbeat):
    """Nobody has taken the run's own port, so another one would change nothing."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run(drumbeat, code=f"import socket; socket.create_server(('127.0.0.1', {taken.getsockname()[1]}))")
    assert done.returncode == 1, done.stderr
    (only,) = summary(drumbeat)["attempts"]
    assert only["finding"]["code"] == "port-in-use" and "rendezvous" not in only["finding"]["title"]
    assert "rendezvous port" not in done.stderr


def test_taken_muster_ports_move_to_the_next(drumbeat, monkeypatch):
    from tests.runs.own_order import start_with_timing

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process, _ = start_with_timing(drumbeat, (PY, "-c", "print(1)"), dict(os.environ), first_port=port)
        assert process.wait(120) == 0, process.stdout.read()


def test_a_stopped_rank_saves_and_only_its_main_process_is_signalled(drumbeat):
    code = """
import os, signal, sys, time
worker = os.fork()
if worker == 0:
    signal.signal(signal.SIGTERM, lambda *a: open("worker-got-it", "w").close())
    time.sleep(30); os._exit(0)
def save(*_):
    time.sleep(0.5)
    open("saved", "w").write(str(os.path.exists("worker-got-it")))
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
open("ready", "w").close()
while True: time.sleep(1)
"""
    process = drumbeat.start("run", "--", PY, "-c", code)
    wait_for((drumbeat.folder / "ready").exists)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 75, "the exit code says: requeue me"
    assert (drumbeat.folder / "saved").read_text() == "False"
    assert summary(drumbeat)["outcome"] == "requeue"


def test_a_reader_that_goes_away_costs_the_run_nothing(drumbeat):
    """`drumbeat run ... 2>&1 | head -1`"""
    code = "import time\nfor n in range(20): print(n, flush=True); time.sleep(0.05)\nopen('done', 'w'); raise SystemExit(3)"
    process = drumbeat.start("run", "--", PY, "-c", code)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(120) == 3
    assert (drumbeat.folder / "done").exists() and summary(drumbeat)["exit_code"] == 3


def test_time_limit(drumbeat):
    done = run(drumbeat, code="import time; time.sleep(60)", flags=("--time", "2s", "--stop-grace", "1s"))
    assert done.returncode == 124 and summary(drumbeat)["outcome"] == "time-limit"


def test_wrap_goes_before_chosen_ranks_only(drumbeat):
    (drumbeat.folder / "job.yaml").write_text(
        f"command: [{PY}, -c, \"print('plain')\"]\nranks-per-node: 2\n"
        'wrap: {ranks: [1], command: "env WRAPPED={rank} sh -c \'echo wrapped $WRAPPED; exec \\"$@\\"\' x"}\n'
    )
    done = drumbeat("run", "job.yaml")
    assert done.returncode == 2 and "WRAPPED" in done.stderr, "a $NAME in a job file is ours to fill in, once"
    (drumbeat.folder / "job.yaml").write_text(
        f"command: [{PY}, -c, \"import os; print(os.environ.get('W'))\"]\nranks-per-node: 2\n"
        "wrap: {ranks: [1], command: 'env -u HOME W=w{rank}-{node} nice -n {rank}'}\n"
    )
    done = drumbeat("run", "job.yaml")
    assert sorted(done.stdout.splitlines()) == ["None", "[1] w1-0"], done.stderr


def test_a_profiler_that_wraps_a_rank_writes_a_file_of_its_own(drumbeat):
    """A stand-in for nsys and rocprofv3: options, an output file, two dashes, the command."""
    profiler = drumbeat.folder / "profiler"
    profiler.write_text('#!/bin/sh\nout=$2\nshift 3\n"$@"\nrc=$?\necho "$RANK ended with $rc" > "$out"\nexit $rc\n')
    profiler.chmod(0o755)
    (drumbeat.folder / "job.yaml").write_text(
        f"command: [{PY}, -c, \"print('trained')\"]\nranks-per-node: 3\n"
        f"wrap: {{ranks: [0, 2], command: '{profiler} -o {drumbeat.folder}/prof-{{rank}} --'}}\n"
    )
    done = drumbeat("run", "job.yaml")
    assert done.returncode == 0 and done.stdout.count("trained") == 3, done.stderr
    written = {path.name: path.read_text() for path in drumbeat.folder.glob("prof-*")}
    assert written == {"prof-0": "0 ended with 0\n", "prof-2": "2 ended with 0\n"}


def test_setup_is_shell_and_the_command_is_not(drumbeat):
    (drumbeat.folder / "job.yaml").write_text(
        'setup: |\n  export GREETING="a b"\n  cd /\n'
        "command: [sh, -c, 'echo \"$$GREETING\" \"$$1\" $$(pwd)', x, '; echo injected']\n"
    )
    done = drumbeat("run", "job.yaml")
    assert done.stdout == "a b ; echo injected /\n", done.stderr


def test_a_failed_setup_is_a_failure(drumbeat):
    (drumbeat.folder / "job.yaml").write_text("setup: source /no/such/activate\ncommand: echo never\n")
    done = drumbeat("run", "job.yaml")
    assert done.returncode != 0 and "never" not in done.stdout and "/no/such/activate" in done.stderr


def test_trace_gives_each_rank_its_own_file_and_is_off_by_default(drumbeat):
    names = ("FI_LOG_LEVEL", "MIOPEN_ENABLE_LOGGING", "NCCL_DEBUG_FILE")
    code = f"import os; print(*map(os.environ.get, {names}))"
    traced = run(drumbeat, code=code, flags=("--trace", "--ranks-per-node", 2))
    second, first = sorted(traced.stdout.splitlines())
    assert second.startswith("[1] info 1 ") and first.startswith("info 1 "), traced.stderr
    assert "%p" in first and "%p" in second, "one file per process"
    plain = run(drumbeat, code=code, flags=("--ranks-per-node", 2))
    assert sorted(plain.stdout.splitlines()) == ["None None None", "[1] None None None"], plain.stderr


def test_secrets_are_passed_by_name_and_never_written(drumbeat, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret_value")
    code = "import os; print(os.environ['HF_TOKEN'][:2], 'DRUMBEAT_TOKEN' in os.environ)"
    done = run(drumbeat, code=code, flags=("--env", "HF_TOKEN", "--nodes", 2))
    assert sorted(done.stdout.splitlines()) == ["[1] hf False", "hf False"], done.stderr
    for path in drumbeat.run_folder().rglob("*"):
        if path.is_file():
            assert b"hf_very_secret_value" not in path.read_bytes(), path


def test_metrics_become_progress_and_summary(drumbeat):
    code = """
import time
from drumbeat import metrics
for step in range(1, 6):
    metrics.report(step, steps=5, loss=6.0 - step, tokens=1000)
    time.sleep(0.1)
metrics.report(5, kind="validation", loss=0.5)
metrics.report(kind="target", target_reached=False)
"""
    done = run(drumbeat, code=code, flags=("--nodes", 2, "--ranks-per-node", 2))
    assert done.returncode == 0, done.stderr
    got = summary(drumbeat)
    assert got["progress"]["first_loss"] == 5.0 and got["progress"]["last_loss"] == 1.0
    assert got["progress"]["tokens"] == 4 * 4 * 1000, "each rank's first report also held its warm-up"
    assert got["throughput"]["unit"] == "tokens/s" and got["target_reached"] is False and got["outcome"] == "finished"
    assert abs(sum(got["ledger"].values()) - got["seconds"]) < 0.05
    assert "not reached" in done.stderr and "fell from 5.000 to 1.000" in done.stderr


def test_a_line_of_the_last_rank_on_its_standard_error_is_read(drumbeat):
    """Megatron-LM prints on the last rank, MaxText on standard error, progress bars without a line's end."""
    code = """
import os, sys
if os.environ["RANK"] == "1":
    for step in (1, 2):
        sys.stderr.write(f" iteration {step:8d}/{2:8d} | consumed samples: {step:12d} | elapsed time per iteration (ms): 12.5 |"
                         f" learning rate: 1.0E-04 | lm loss: {3 - step}.5E+00 | grad norm: 1.5 |\\r")
"""
    done = run(drumbeat, code=code, flags=("--ranks-per-node", 2))
    assert done.returncode == 0, done.stderr
    summary = json.loads((drumbeat.run_folder() / "summary.json").read_text())
    progress = summary["progress"]
    assert (progress["step"], progress["steps"], progress["first_loss"], progress["last_loss"]) == (2, 2, 2.5, 1.5)


def test_printed_lines_are_understood(drumbeat):
    code = """
for epoch in (1, 2):
    print(f"Epoch {epoch}/2 completed in 0.7{epoch} seconds")
    print(f"Validation Loss: 1.{epoch}, Validation Accuracy: 0.70")
    print("Epoch Throughput: 63190.172 images/second", flush=True)
print("Training Summary:")
print("Throughput: 63190.172 images/second")
"""
    assert run(drumbeat, code=code).returncode == 0
    got = summary(drumbeat)
    assert got["progress"]["step"] == 2 and got["progress"]["accuracy"] == 0.7
    assert got["throughput"] == {"value": 63190.172, "unit": "samples/s"}


def test_list_status_logs_and_cancel(drumbeat):
    process = drumbeat.start(
        "run", "--name", "sleeper", "--", PY, "-c", "import time; print('up', flush=True); time.sleep(600)"
    )
    wait_for(lambda: drumbeat.runs() and "up" in drumbeat.here("logs", "sleeper", "--rank", 0).stdout)
    assert json.loads(drumbeat.here("status", "sleeper", "--json").stdout)["status"]["state"] == "running"
    follow = drumbeat.start("logs", "sleeper", "--follow")
    assert drumbeat("cancel", "sleeper").returncode == 0
    assert process.wait(120) == 143
    assert "up" in follow.communicate(timeout=150)[0]
    (listed,) = json.loads(drumbeat.here("list", "--json").stdout)
    assert listed["status"]["state"] == "cancelled" and listed["status"]["exit_code"] == 143
    assert drumbeat("cancel", "sleeper").returncode == 2
    assert "sleeper" in drumbeat.here("list").stdout
    assert not marked(drumbeat.run_folder().name)


def test_once_starts_one_process_a_node(drumbeat):
    code = "import os; print('node', os.environ['NODE_RANK'], 'RANK' in os.environ)"
    done = run(drumbeat, code=code, flags=("--launcher", "once", "--nodes", 2))
    assert sorted(done.stdout.splitlines()) == ["[1] node 1 False", "node 0 False"], done.stderr


def test_a_crash_leaves_no_temporary_folder(drumbeat, tmp_path, monkeypatch):
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    run(drumbeat, code="raise SystemExit(1)", flags=("--nodes", 2))
    wait_for(lambda: list(place.iterdir()) == [], what="an empty folder")
