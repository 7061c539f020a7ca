"""Rank, host, place, setting and process that a log names are in the answer; what it does not show is not claimed."""

import pytest

from drumbeat.logs.exits import explain_exit
from drumbeat.logs.failure import NOT_KNOWN
from drumbeat.logs.reader import Reader
from drumbeat.logs.show import render
from tests.logs.reading import IB, read, start_up

OOM_EVENT = (
    "slurmstepd: error: Detected 1 oom_kill event in StepId=812345.0. Some of the step tasks have been OOM Killed."
)
SRUN = "srun: error: nid001234: task 5: Segmentation fault (core dumped)"
DUMP = """\
Fatal Python error: Segmentation fault

Thread 0x00007f1d (most recent call first):
  File "/home/me/gpt/waits.py", line 12 in wait
Current thread 0x00007f1c (most recent call first):
  File "/home/me/venv/lib/python3.11/site-packages/torch/utils/data/_utils/fetch.py", line 52 in fetch
  File "/home/me/gpt/data.py", line 33 in __getitem__
  File "/home/me/gpt/train.py", line 412 in <module>"""
TABLE = """\
E0312 10:14:45.410000 140012 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 2 (pid: 140022) of binary: /home/me/venv/bin/python
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  time      : 2025-03-12_10:14:45
  host      : gpu07
  rank      : 10 (local_rank: 2)
  exitcode  : 1 (pid: 140022)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"""  # noqa: E501


def traceback(error, prefix=""):
    lines = [
        "Traceback (most recent call last):",
        '  File "/home/me/gpt/train.py", line 212, in <module>',
        "    loss.backward()",
        '  File "/home/me/venv/lib/python3.11/site-packages/torch/_tensor.py", line 581, in backward',
        "    torch.autograd.backward(",
        error,
    ]
    return "\n".join(prefix + line for line in lines)


def test_the_host_comes_with_the_rank_that_a_line_beside_names():
    killed = "srun: error: {}: task 3: Out Of Memory"
    found = read(f"{OOM_EVENT}\n{killed.format('nid001234')}").failure.finding
    assert (found.code, found.rank, found.host) == ("oom-kill", 3, "nid001234")
    found = read(f"{OOM_EVENT}\n{killed.format('nid001234')}\n{killed.format('nid001235')}").failure.finding
    assert (found.rank, found.host) == (3, None), "two hosts say so"


def test_the_dump_of_a_crash_takes_nothing_away_and_says_where():
    alone, whole = read(SRUN).failure, read(f"{DUMP}\n{SRUN}").failure
    for failure in (alone, whole):
        assert (failure.answer, failure.confidence) == ("segfault", "certain")
        assert (failure.finding.rank, failure.finding.host) == (5, "nid001234")
    assert "crashed at /home/me/gpt/data.py:33 (in /home/me/venv/" in whole.finding.cause
    assert "faulthandler" in alone.finding.fix and "faulthandler" not in whole.finding.fix
    assert "rebuild extensions" in whole.finding.fix
    assert "crashed at /home/me/gpt/data.py:33" in read(f"{SRUN}\n{DUMP}").failure.finding.cause, "in any order"


def test_only_the_thread_that_crashed_counts():
    waiting = DUMP.split("Current thread")[0]
    assert "crashed at" not in read(f"{waiting}\n{SRUN}").failure.finding.cause


def test_a_rank_that_ends_by_a_signal_keeps_what_its_dump_shows():
    finding = explain_exit(None, 11, DUMP.split("\n"), ["python"], False)
    assert finding.code == "segfault" and "crashed at /home/me/gpt/data.py:33" in finding.cause
    assert "faulthandler" in explain_exit(None, 11, ["step 1"], ["python"], False).fix


def test_torchruns_table_gives_host_exit_code_and_where_to_look():
    failure = read(TABLE).failure
    assert (failure.answer, failure.finding.rank, failure.finding.host) == (NOT_KNOWN, 10, "gpu07")
    assert "exit code 1" in failure.finding.title
    assert "--log-dir" in failure.finding.fix and "@record" in failure.finding.fix
    found = read(f"{traceback('KeyError: 1', '[rank10]: ')}\n{TABLE}").failure.finding
    assert (found.code, found.rank, found.host) == ("exception", 10, "gpu07")
    other = read(f"{traceback('KeyError: 1', '[rank9]: ')}\n{TABLE}").failure
    assert (other.finding.rank, other.finding.host, other.confidence) == (10, "gpu07", "likely")
    assert other.why_first == "torchrun saw rank 10 fail first; these words are rank 9's"


@pytest.mark.parametrize(
    "error",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.",
        "ModuleNotFoundError: No module named 'flash_attn'",
    ],
)
def test_a_known_error_is_placed_as_an_unknown_one_is(error):
    place = "raised at /home/me/gpt/train.py:212 (in /home/me/venv/lib/python3.11/site-packages/torch/_tensor.py:581)"
    assert place in read(traceback(error, "[rank1]: ")).failure.finding.cause
    assert "raised at" not in read(f"[rank1]: {error}").failure.finding.cause
    library = "\n".join(traceback(error).split("\n")[:1] + traceback(error).split("\n")[3:])
    assert "raised at" not in read(library).failure.finding.cause, "no line of the user's is in it"


def test_an_interface_is_named_only_where_the_log_has_the_setting():
    at = "gpu01:51021:51021 [0]"
    none = f"{at} misc/socket.cc:490 NCCL WARN Bootstrap : no socket interface found"
    shown = read(f"{at} NCCL INFO NCCL_SOCKET_IFNAME set by environment to ib0\n{none}").failure
    assert (shown.answer, shown.confidence) == ("no-interface", "certain")
    assert "NCCL_SOCKET_IFNAME=ib0" in shown.finding.title and shown.seen == ("log:1-2",)
    other = f"{at} NCCL INFO NCCL_SOCKET_IFNAME set by environment to ib0".replace("gpu01", "gpu02")
    own = f"{at} NCCL INFO NCCL_SOCKET_IFNAME set by environment to eno1"
    assert "NCCL_SOCKET_IFNAME=eno1" in read(f"{other}\n{own}\n{none}").failure.finding.title, "its own host's"
    alone = read(none).failure
    assert alone.answer == "no-interface" and "NCCL_SOCKET_IFNAME" not in alone.finding.title
    assert alone.finding.cause.startswith("this node has none that NCCL may use")


def test_memory_of_another_process_is_named_with_its_number_and_size():
    words = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 79.15 GiB of "
        "which 1.21 GiB is free. Process 51221 has {} memory in use. Including non-PyTorch memory, this process has {} memory in "
        "use. Of the allocated memory 3.02 GiB is allocated by PyTorch"
    )
    found = read(words.format("30.11 GiB", "47.80 GiB")).failure
    assert (found.answer, found.confidence) == ("gpu-out-of-memory", "certain")
    assert found.finding.cause.startswith("another process (pid 51221) holds 30.11 GiB of this GPU")
    taken = read(words.format("71.31 GiB", "5.70 GiB")).failure
    assert taken.answer == "gpu-memory-taken"
    assert taken.finding.cause == "another process (pid 51221) holds 71.31 GiB of that GPU, and this one 5.70 GiB"
    small = read(words.format("512.00 MiB", "77.40 GiB")).failure
    assert small.answer == "gpu-out-of-memory" and "51221" not in small.finding.cause


@pytest.mark.parametrize(
    ("line", "title"),
    [
        ("pair.cc:799] connect [127.0.1.1]:31245: Connection refused", "gloo could not connect to [127.0.1.1]:31245"),
        ("pair.cc:9] SO_ERROR: Connection refused, remote=[::1]:4567", "gloo could not connect to [::1]:4567"),
        ("pair.cc:9] connect: Connection refused", "gloo could not connect"),
    ],
)
def test_the_address_that_gloo_could_not_reach(line, title):
    found = read(f"RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/{line}").failure.finding
    assert (found.code, found.title) == ("gloo-connect", title)


def test_a_missing_module_comes_with_its_likely_reasons():
    found = read("/usr/bin/python3: No module named torchrun").failure.finding
    assert found.code == "import-error" and "not installed in this Python (/usr/bin/python3); its name" in found.cause
    found = read("ModuleNotFoundError: No module named 'flash_attn'").failure.finding
    reasons = [
        found.cause.index(words) for words in ("not installed in this Python;", "misspelled", "another environment")
    ]
    assert reasons == sorted(reasons) and "which python" in found.fix
    own = read("ModuleNotFoundError: No module named 'drumbeat.train'").failure.finding
    assert (own.code, own.title) == ("import-error", "No module named 'drumbeat.train'")
    assert "install drumbeat into the ranks' environment" in own.fix and "PYTHONPATH" in own.fix
    assert "drumbeat" not in read("ModuleNotFoundError: No module named 'drumbeats'").failure.finding.fix


def test_a_size_that_is_unknown_is_called_so():
    other = "n1:101:301 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [send] via NET/IB/0"
    shown = render(read(f"{start_up(0, nranks=2, more=[IB])}\n{other}"))
    assert " 0 ranks" not in shown


@pytest.mark.parametrize(
    "last,title",
    [
        (
            "OSError: [Errno 122] Disk quota exceeded: '/scratch/p7/e3.pt'",
            "a file system is full or its quota is used up: '/scratch/p7/e3.pt'",
        ),
        (
            "OSError: [Errno 28] No space left on device: '/local/e3.pt'",
            "a file system is full or its quota is used up: '/local/e3.pt'",
        ),
    ],
)
def test_a_failed_checkpoint_names_the_errno_and_the_path(last, title):
    first = "RuntimeError: [enforce fail at inline_container.cc:595] . unexpected pos 640 vs 512"
    chain = "During handling of the above exception, another exception occurred:"
    head, frame = "Traceback (most recent call last):", '  File "fit.py", line 9, in save'
    lines = [head, frame, first, "", chain, "", head, frame, last]
    found = read("\n".join(f"[rank0]: {line}" for line in lines)).failure
    assert (found.answer, found.finding.title) == ("disk-full", title)
    assert found.finding.evidence[0].text.endswith(last)


def test_a_healthy_log_shows_the_last_step_that_was_read():
    lines = ["step 390/400 loss 0.8058", "step 400/400 loss 0.7855 lr 0.0003", "val loss 0.81", "Training done."]
    reader = Reader()
    reader.feed_lines("log", 1, [line.encode() for line in lines])
    shown = render(reader.report())
    assert "failure     none seen" in shown and "last step   step 400/400 loss 0.7855 lr 0.0003" in shown


def test_a_summary_is_not_the_last_step():
    lines = [f"step {step} loss {4 - step / 100:.3f}" for step in range(30)]
    more = ["Summary: best step 12 loss 3.11, total steps 30", "Training done."]
    assert read("\n".join([*lines, *more])).failure.last_step == lines[-1]
