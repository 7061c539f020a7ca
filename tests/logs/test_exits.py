"""One rank's end: what the agent is told about it."""

import signal

import pytest

from drumbeat.logs.exits import CONSEQUENCES, RankEnd, explain_exit, explain_run

TRACEBACK = ["Traceback (most recent call last):", '  File "/home/u/train.py", line 12, in <module>', "    main()"]


def explain(code=1, sig=None, lines=(), command=("python", "train.py"), by_us=False, oom=False, stdout=()):
    return explain_exit(code, sig, list(lines), list(command), by_us, oom, list(stdout))


@pytest.mark.parametrize(
    "code,arguments",
    [
        ("finished", {"code": 0}),
        ("exception", {"lines": [*TRACEBACK, "ValueError: bad shape"]}),
        ("gpu-out-of-memory", {"lines": [*TRACEBACK, "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB"]}),
        ("gpu-out-of-memory", {"lines": ["[rank3]: torch.OutOfMemoryError: HIP out of memory. Tried 2 GiB"]}),
        ("oom-kill", {"code": None, "sig": signal.SIGKILL, "oom": True}),
        ("oom-kill", {"code": 137, "oom": True}),
        ("killed", {"code": None, "sig": signal.SIGKILL}),
        ("killed", {"code": 137}),
        ("stopped", {"code": None, "sig": signal.SIGTERM, "by_us": True}),
        ("stopped", {"code": None, "sig": signal.SIGKILL, "by_us": True, "lines": [*TRACEBACK, "KeyboardInterrupt"]}),
        ("bus-error", {"code": None, "sig": signal.SIGBUS}),
        ("bus-error", {"code": 135}),
        ("shm-full", {"lines": ["ERROR: Unexpected bus error encountered in worker."]}),
        ("segfault", {"code": None, "sig": signal.SIGSEGV}),
        ("segfault", {"code": 139, "lines": ["Fatal Python error: Segmentation fault"]}),
        ("aborted", {"code": None, "sig": signal.SIGABRT, "lines": ["terminate called without an active exception"]}),
        ("import-error", {"lines": [*TRACEBACK, "ModuleNotFoundError: No module named 'torch'"]}),
        ("port-in-use", {"lines": ["RuntimeError: errno: 98 - Address already in use"]}),
        ("rendezvous-timeout", {"lines": ["torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"]}),
        ("store-connect-timeout", {"lines": ["DistNetworkError: The client socket has timed out after 60000ms"]}),
        ("command-not-found", {"code": 127, "command": ("trian",)}),
        (
            "command-not-found",
            {
                "code": 127,
                "lines": ["drumbeat: cannot start: numactl: No such file or directory"],
                "command": ("numactl",),
            },
        ),
        ("not-executable", {"code": 126, "command": ("./train.sh",)}),
        ("interrupted", {"code": None, "sig": signal.SIGINT}),
        ("interrupted", {"code": 130}),
        ("terminated", {"code": None, "sig": signal.SIGTERM}),
        (
            "time-limit",
            {"code": 143, "lines": ["slurmstepd: error: *** JOB 1 ON a CANCELLED AT x DUE TO TIME LIMIT ***"]},
        ),
        ("peer-lost", {"lines": [*TRACEBACK, "RuntimeError: [pair.cc:598] Connection closed by peer [10.0.0.2]:45"]}),
        ("peer-lost", {"lines": ["[rank1]: ncclRemoteError: A call failed possibly due to a network error"]}),
        (
            "peer-lost",
            {
                "code": None,
                "sig": signal.SIGTERM,
                "lines": ["RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection reset by peer"],
            },
        ),
        ("exit-code", {"code": 3, "lines": ["bye"]}),
    ],
)
def test_code(code, arguments):
    finding = explain(**arguments)
    assert finding.code == code, finding
    assert finding.title


def test_exception_keeps_its_own_message_and_place():
    finding = explain(lines=["[rank0]: " + line for line in [*TRACEBACK, "KeyError: 'lr'"]] + ["[rank0]:[W] bye"])
    assert finding.title == "KeyError: 'lr'"
    assert finding.cause == "raised at /home/u/train.py:12"
    assert finding.evidence[0].text == "KeyError: 'lr'"


def test_own_exception_after_a_lost_peer_is_the_ranks_own():
    lines = ["[c10d] Connection reset by peer, retrying", *TRACEBACK, "ValueError: bad batch"]
    assert explain(lines=lines).code == "exception"


def test_first_cause_wins_over_what_follows():
    lines = ["torch.OutOfMemoryError: CUDA out of memory.", "RuntimeError: Connection closed by peer"]
    assert explain(lines=lines).code == "gpu-out-of-memory"


def test_user_exception_classes_count_after_a_traceback():
    assert explain(lines=[*TRACEBACK, "mylib.Oops: no data"]).title == "mylib.Oops: no data"


CAUGHT = [
    "Traceback (most recent call last):",
    '  File "/home/u/train.py", line 5, in <module>',
    "    x = bytearray(n)",
    "MemoryError: cannot allocate 3 GiB",
]
UNCAUGHT = [*TRACEBACK, "KeyError: 'lr'"]


@pytest.mark.parametrize(
    "between,title,confidence",
    [
        (["falling back", "step 1 loss 1"], "KeyError: 'lr'", "certain"),
        ([], "KeyError: 'lr'", "likely"),
        (["", "During handling of the above exception, another exception occurred:", ""], "memory", "certain"),
        (["", "The above exception was the direct cause of the following exception:", ""], "memory", "certain"),
    ],
)
def test_the_last_exception_ended_the_process_unless_python_chains_them(between, title, confidence):
    finding = explain(lines=[*CAUGHT, *between, *UNCAUGHT])
    assert title in finding.title and finding.confidence == confidence


def test_a_threads_exception_before_the_main_ones_stays_the_first():
    thread = ["Exception in thread Thread-1 (load):", CAUGHT[0]]
    thread += [
        '  File "/usr/lib/python3.11/threading.py", line 1045, in _bootstrap_inner',
        "    self.run()",
        *CAUGHT[1:],
    ]
    assert explain(lines=[*thread, "waiting", *UNCAUGHT]).code == "host-out-of-memory"


@pytest.mark.parametrize(
    "line,code,confidence",
    [
        ("INFO: we keep 2 GB free so that CUDA out of memory is avoided", "exit-code", "unknown"),
        ("we keep 2 GB free so that CUDA out of memory is avoided", "exit-code", "unknown"),
        ("loader - INFO - retried after No space left on device", "exit-code", "unknown"),
        ("level=info msg='Segmentation fault of the last run'", "exit-code", "unknown"),
        ("a smaller cache prevents No space left on device", "exit-code", "unknown"),
        ("giving up after CUDA out of memory", "gpu-out-of-memory", "likely"),
        ("the last run had a Segmentation fault", "segfault", "likely"),
        ("RuntimeError: CUDA error: out of memory", "gpu-out-of-memory", "certain"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "gpu-out-of-memory", "certain"),
        ("ValueError: worker 3 hit CUDA out of memory", "gpu-out-of-memory", "certain"),
        ("cp: error writing 'x': No space left on device", "disk-full", "certain"),
        ("Fatal Python error: Segmentation fault", "segfault", "certain"),
    ],
)
def test_a_line_that_talks_about_an_error_is_no_error(line, code, confidence):
    finding = explain(code=3, lines=["start", line])
    assert (finding.code, finding.confidence) == (code, confidence)


def test_a_mention_gives_way_to_an_exception():
    finding = explain(lines=["batch halved after CUDA out of memory", "step 1 loss 1", *UNCAUGHT])
    assert finding.title == "KeyError: 'lr'" and finding.confidence == "certain"


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGINT])
def test_an_exit_code_above_128_is_no_signal_that_was_seen(sig):
    by_code, by_signal = explain(code=128 + sig, lines=["step 1 loss 1"]), explain(code=None, sig=sig)
    assert by_code.code == by_signal.code, "what follows from it is the same"
    assert by_code.title == f"exit code {128 + sig}, which shells and containers use for {sig.name}"
    assert (by_code.confidence, by_code.seen) == ("likely", (f"exit code {128 + sig}",))
    assert (by_signal.confidence, by_signal.seen) == ("certain", (f"the process ended by {sig.name}",))


def test_what_a_shell_writes_about_a_signal_counts_for_more_than_its_exit_code():
    finding = explain(code=139, lines=["run.sh: line 3:   812 Segmentation fault      (core dumped) python train.py"])
    assert finding.title == "a process died from SIGSEGV" and finding.confidence == "certain"


def test_consequences_are_named():
    assert {"peer-lost", "stopped"} <= CONSEQUENCES


def test_nothing_known_is_said_so():
    assert "not known" in explain(code=7).cause
    assert "not known" in explain(code=None, sig=signal.SIGKILL).cause
    assert explain(code=None, sig=signal.SIGKILL).title == "killed by SIGKILL, not by drumbeat"


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
CLOSED = "RuntimeError: [pair.cc:598] Connection closed by peer [10.0.0.2]:45"


def test_what_stands_on_stdout_counts_too():
    assert explain(lines=[], stdout=[*TRACEBACK, OOM]).code == "gpu-out-of-memory"
    assert explain(lines=[CLOSED], stdout=[*TRACEBACK, OOM]).code == "gpu-out-of-memory"


def test_a_refusal_or_a_failed_setup_is_quoted():
    finding = explain(code=3, lines=["loading", "setup: module NRIS/GPU is not found"])
    assert finding.title == "exit code 3: setup: module NRIS/GPU is not found" and finding.confidence == "likely"


def test_a_missing_script_is_no_missing_command():
    finding = explain(
        code=2, lines=["python: can't open file '/home/u/nosuch.py': [Errno 2] No such file or directory"]
    )
    assert finding.code == "file-missing" and "/home/u/nosuch.py" in finding.title


def test_raised_at_names_the_users_line():
    lines = [*TRACEBACK, '  File "/venv/lib/python3.11/site-packages/torch/nn/linear.py", line 116, in forward']
    finding = explain(lines=[*lines, "    return F.linear(input)", "RuntimeError: shapes do not fit"])
    assert finding.cause.startswith("raised at /home/u/train.py:12 (in /venv/lib/")


def test_a_whole_run_names_the_rank_that_failed_first_not_its_victims():
    ends = [
        RankEnd(0, 1, stderr=[*TRACEBACK, CLOSED], time=12.0),
        RankEnd(1, None, signal.SIGTERM, time=13.0, killed_by_us=True),
        RankEnd(2, 1, stdout=[*TRACEBACK, OOM], host="n2", time=11.0),
    ]
    failure = explain_run(ends)
    assert (failure.answer, failure.finding.rank, failure.finding.host) == ("gpu-out-of-memory", 2, "n2")


def test_torchruns_table_names_the_rank_behind_one_launcher():
    table = ["Root Cause (first observed failure):", "[0]:", "  host      : n1", "  rank      : 3 (local_rank: 3)",
             "  exitcode  : 1 (pid: 7)", "  traceback : x"]  # fmt: skip
    failure = explain_run([RankEnd(None, 1, stderr=[*TRACEBACK, "ValueError: bad", *table])])
    assert (failure.answer, failure.finding.title) == ("exception", "ValueError: bad")
    assert (failure.finding.rank, failure.finding.host) == (3, "n1")


@pytest.mark.parametrize(
    "how, title, code",
    [
        ("signal SIGKILL", "process 1 that the program spawned: killed by SIGKILL, not by drumbeat", "killed"),
        ("exit code 3", "process 1 that the program spawned: exit code 3", "exit-code"),
    ],
)
def test_a_process_that_the_program_spawned_is_named_with_its_end(how, title, code):
    last = f"torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with {how}"
    found = explain(lines=["W1 spawn.py:165] Terminating process 20126 via signal SIGTERM", *TRACEBACK, last])
    assert (found.title, found.code, found.rank) == (title, code, None) and found.evidence[-1].text == last


def test_a_silent_end_is_told_by_its_signal():
    failure = explain_run([RankEnd(0, 0), RankEnd(1, None, signal.SIGSEGV)])
    assert (failure.answer, failure.finding.rank) == ("segfault", 1)
    assert explain_run([RankEnd(0, 0)]).answer == "none"


@pytest.mark.parametrize(
    "lines,title",
    [
        (
            ["setup: line 1: /no/such/activate: No such file or directory", "drumbeat: setup failed (exit 1)"],
            "setup failed (exit 1) before the command started: /no/such/activate: No such file or directory",
        ),
        (
            ["setup: line 1: module: command not found", "drumbeat: setup failed (exit 127)"],
            "setup: command not found: module",
        ),
        (["drumbeat: setup failed (exit 3)"], "setup failed (exit 3) before the command started"),
    ],
)
def test_a_failed_setup_is_not_the_commands_failure(lines, title):
    finding = explain_exit(1, None, lines, ["python"], False)
    assert (finding.code, finding.title) == ("setup-failed", title)


def test_a_missing_script_is_named_as_in_the_command():
    line = "python3: can't open file '/home/me/src/nope.py': [Errno 2] No such file or directory"
    finding = explain_exit(2, None, [line], ["python3", "src/nope.py"], False)
    assert (finding.code, finding.title) == ("file-missing", "no such script: src/nope.py (workdir /home/me)")


def test_what_a_logger_calls_information_is_nobodys_last_words():
    info = ["2026-01-02 03:04:05,678 INFO Starting the training", "[INFO] epoch 1"]
    silent = explain_exit(3, None, [], ["python"], False, stdout_tail=info)
    assert (silent.title, silent.confidence) == ("exit code 3", "unknown") and "do not mention an error" in silent.cause
    told = explain_exit(3, None, ["cannot read data.bin"], ["python"], False, stdout_tail=info)
    assert told.title == "exit code 3: cannot read data.bin"


def test_a_hint_below_an_error_is_not_the_error():
    said = ["drumbeat train: no setting 'figurez'", "  did you mean figures?"]
    assert explain_exit(2, None, said, ["drumbeat"], False).title == "exit code 2: drumbeat train: no setting 'figurez'"


def test_a_step_of_training_is_no_last_word():
    finding = explain(code=1, lines=["loading the data", "step 12/100 loss: 2.31 lr: 0.001"])
    assert (finding.code, finding.title) == ("exit-code", "exit code 1: loading the data")
    assert explain(code=1, lines=["step 12/100 loss: 2.31 lr: 0.001"]).title == "exit code 1"


@pytest.mark.parametrize("name", ["KeyError", "ValueError", "MyOwnError"])
def test_an_exception_that_ended_its_rank_is_certain_whatever_its_class(name):
    lines = [*TRACEBACK, f"{name}: bad sample in shard 7"]
    assert explain(lines=lines).confidence == "certain"
    assert explain(code=3, lines=lines).confidence == (
        "certain" if name == "KeyError" else "likely"
    )  # chosen by the program
