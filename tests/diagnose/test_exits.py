"""One rank's end: what the agent is told about it."""

import signal

import pytest

from drumbeat.diagnose.exits import CONSEQUENCES, explain_exit

TRACEBACK = ["Traceback (most recent call last):", '  File "/home/u/train.py", line 12, in <module>', "    main()"]


def explain(code=1, sig=None, lines=(), command=("python", "train.py"), by_us=False, oom=False):
    return explain_exit(code, sig, list(lines), list(command), by_us, oom)


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
    lines = ["[c10d] Connection reset by peer, retrying", *TRACEBACK, "ValueError: nan loss"]
    assert explain(lines=lines).code == "exception"


def test_first_cause_wins_over_what_follows():
    lines = ["torch.OutOfMemoryError: CUDA out of memory.", "RuntimeError: Connection closed by peer"]
    assert explain(lines=lines).code == "gpu-out-of-memory"


def test_user_exception_classes_count_after_a_traceback():
    assert explain(lines=[*TRACEBACK, "mylib.Oops: no data"]).title == "mylib.Oops: no data"


def test_consequences_are_named():
    assert {"peer-lost", "stopped"} <= CONSEQUENCES


def test_nothing_known_is_said_so():
    assert "not known" in explain(code=7).cause
    assert "not known" in explain(code=None, sig=signal.SIGKILL).cause
