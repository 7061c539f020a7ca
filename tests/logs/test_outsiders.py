"""What other people's logs showed: appended runs, set-up commands that fail, launchers' tables, cut chains, mixed lines."""

import pytest

from drumbeat.logs.meaning.rules import rulebook
from drumbeat.logs.meaning.senses import gpu_error_in, gpu_errors, sense
from drumbeat.logs.read.records import once
from drumbeat.logs.reader import Reader

OPENING = "Loading config configs/base.yaml\nBuilding model gpt2 with 124M parameters\nTokenizer has 50257 entries\n"
RAISED = 'Traceback (most recent call last):\n  File "/home/u/train.py", line 88, in <module>\n    main()\n'
RAISED += '  File "/home/u/train.py", line 70, in main\n    run(cfg)\n'
OOM = f"{RAISED}torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
KEY = f"{RAISED}KeyError: 'input_ids'\n"
NAME = f"{RAISED}NameError: name 'cfg' is not defined\n"
BAR = "Loading checkpoint shards:   0%|     | 0/4 [00:00<?, ?it/s]\nLoading checkpoint shards: 100%|#####| 4/4 [00:20<00:00]\n"
LIMIT = "slurmstepd: error: *** JOB 144 ON n5 CANCELLED AT 2026-07-07T21:31:30 DUE TO TIME LIMIT ***\n"


def read(text):
    reader = Reader()
    reader.feed_lines("log", 1, text.encode().split(b"\n")[: None if text[-1:] != "\n" else -1])
    return reader.report()


def steps(count, first=1):
    return "".join(f"step {n} loss {1 + 4 / (n + 1):.3f} lr 1e-4\n" for n in range(first, first + count))


def timed(hour, pid):
    at = f"2026-03-0{1 + hour // 24} {hour % 24:02d}"
    return (
        f"{at}:00:10,123 INFO [{pid}] starting trainer\n{at}:00:11,456 INFO [{pid}] building model\n"
        f"{at}:00:14,000 INFO [{pid}] world size 8\n"
    )


def first_of(text):
    failure = read(text).failure
    line = failure.finding.evidence[0].line if failure.finding and failure.finding.evidence else None
    return failure.answer, line, sum(note.code == "earlier-attempt" for note in failure.notes)


def test_start_up_lines_behind_an_end_begin_another_run():
    assert first_of(OPENING + KEY + OPENING + OOM)[::2] == ("gpu-out-of-memory", 1)
    assert first_of(OPENING + OOM + OPENING + KEY + OPENING + NAME)[::2] == ("exception", 2)
    assert first_of(OPENING + OOM + OPENING + steps(100))[::2] == ("none", 1)
    assert first_of("x\n" + BAR + KEY + BAR + NAME)[1:] == (17, 1), "a bar that is at 0 % again"
    assert first_of("x\n" + timed(1, 100) + KEY + timed(2, 222) + OOM + timed(9, 333) + NAME)[::2] == ("exception", 2)
    failure = read(OPENING + KEY + OPENING + OOM).failure
    assert failure.confidence == "likely", "only the order of lines says so"


def test_what_ranks_of_one_run_print_as_they_end_begins_no_run():
    ended = "[W CudaIPCTypes.cpp:15] Producer process has been terminated before all shared tensors were released\n"
    ended += "the worker group of this node is being stopped now\nclosing the tracker and its files\n"
    assert first_of(OPENING + steps(20) + OOM + ended + KEY + ended + NAME + ended)[::2] == ("gpu-out-of-memory", 0)
    late = (
        "booting the node from its image\n"
        + KEY.replace("train", "prepare")
        + timed(1, 1)
        + steps(20)
        + OOM
        + timed(1, 3)
        + NAME
    )
    assert first_of(late)[::2] == ("gpu-out-of-memory", 0), "seconds apart"
    again = OPENING + OOM + OPENING  # the last run has said nothing yet that could be judged
    assert first_of(again)[0] == "gpu-out-of-memory"


TOOLS = {
    "pip": "  error: subprocess-exited-with-error\n  × Building a wheel did not run.\n  │ exit code: -9\n  ╰─> Killed\n",
    "apt": "E: Unable to locate package x\nE: Sub-process /usr/bin/dpkg returned an error code (1)\n",
    "conda": "PackagesNotFoundError: The following packages are not available from current channels:\n",
    "cmake": "CMake Error at CMakeLists.txt:12 (find_package):\n-- Configuring incomplete, errors occurred!\n",
    "make": "g++: fatal error: Killed signal terminated program cc1plus\nmake[1]: *** [Makefile:30: a.o] Segmentation fault\n",
    "npm": "npm ERR! errno 137\nnpm ERR! Exit status 137\n",
    "git": "fatal: unable to access 'https://x.org/b.git/': Could not resolve host: x.org\n",
    "wget": "wget: unable to resolve host address\ntar: data.tar: Cannot open: No such file or directory\n",
    "shell": "./setup.sh: line 12: 4711 Killed                  ./prepare_data\n",
    "docker": 'ERROR: failed to solve: process "/bin/sh -c make" did not complete successfully: exit code: 137\n',
}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_command_of_the_set_up_that_failed_is_not_the_end_of_the_job(tool):
    begin = f"{OPENING}{TOOLS[tool]}Starting training of the model\n"
    assert read(begin + steps(30)).failure.answer == "none"
    assert read(begin + steps(400) + "Finished!!!\n").failure.answer == "none"
    assert read(begin + steps(400) + LIMIT).failure.answer == "time-limit"
    failure = read(begin + steps(30) + KEY).failure
    assert (failure.answer, failure.finding.title) == ("exception", "KeyError: 'input_ids'")
    assert read(OPENING + TOOLS[tool]).failure.answer != "none", "nothing went on behind it"


def test_a_death_that_a_launcher_reports_or_that_others_follow_from_stands():
    killed = "srun: error: n1: task 3: Killed\n"
    assert read(OPENING + killed + "waiting for the others\n" * 400).failure.answer == "killed"
    lost = (
        "[rank1]: torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error\n"
    )
    assert read(f"{OPENING}Segmentation fault (core dumped)\n{lost}").failure.answer == "segfault"


def entry(number, at, rank, code):
    name = {9: "KILL", 11: "SEGV", 15: "TERM"}.get(-code)
    said = (
        f"Signal {-code} (SIG{name}) received by PID 1{rank}"
        if name
        else "To enable traceback see: https://pytorch.org"
    )
    return (
        f"[{number}]:\n  time      : 2026-09-07_13:{at}\n  host      : n1\n  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {code} (pid: 1{rank})\n  error_file: <N/A>\n  traceback : {said}\n"
    )


def table(others, root):
    name = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
    return (
        f"{name}\n{'=' * 60}\nFailures:\n{others}{'-' * 60}\nRoot Cause (first observed failure):\n{root}{'=' * 60}\n"
    )


@pytest.mark.parametrize(
    "others, root, answer, rank",
    [
        (entry(1, "03:29", 0, -9) + entry(2, "03:29", 2, -15), entry(0, "02:58", 1, 1), "unknown", 1),
        (entry(1, "03:29", 0, 1) + entry(2, "03:29", 2, -15), entry(0, "02:58", 1, -9), "killed", 1),
        (entry(1, "03:29", 3, -11), entry(0, "02:58", 1, -9), "killed", 1),
        (entry(1, "03:29", 0, -9), entry(0, "02:58", 1, 1)[:90], "unknown", 1),
    ],
)
def test_entries_of_a_table_do_not_mix(others, root, answer, rank):
    failure = read(f"step 1 loss 2\n{table(others, root)}").failure
    assert (failure.answer, failure.finding.rank) == (answer, rank)


def test_the_innermost_complete_exception_of_a_cut_chain_stands():
    inner = 'Traceback (most recent call last):\n  File "/x/site-packages/torch/a.py", line 3, in f\n    store = TCPStore(\n'
    inner += "RuntimeError: connect() timed out. Original timeout was 60000 ms.\n"
    between = "\nThe above exception was the direct cause of the following exception:\n\n"
    failure = read(f"{inner}{between}{RAISED}").failure
    assert failure.answer != "none" and failure.finding.evidence[0].line == 4
    for cut in (RAISED, RAISED + "    ^^^^^^^^\n", "Traceback (most recent call last):\n"):
        assert read(f"step 1 loss 2\n{cut}").failure.answer == "exception"


@pytest.mark.parametrize("text", ["SyntaxError: invalid syntax", "NameError: name 'json' is not defined"])
def test_a_line_that_ranks_print_at_once_is_one(text):
    letters = "".join(letter * 2 for letter in text)
    name, message = text.split(": ", 1)
    pieces = f"{name}{name}: : {message}{message}"
    for mixed in (letters, pieces, "".join(letter * 4 for letter in text)):
        assert once(mixed.encode()).decode() == text
        failure = read(f"step 1 loss 2\n{RAISED}{mixed}\n").failure
        assert (failure.answer, failure.finding.title) == ("exception", text)
    for text in ("ValueError: 11 is not 11", "my.errors.ErrorError: x", "step 11 loss 22"):
        assert once(text.encode()).decode() == text


def test_an_exception_written_in_pieces_has_its_message():
    pieces = "FileNotFoundError\n: \n[Errno 2] No such file or directory: 'a.txt'\n"
    failure = read(f"step 1 loss 2\n{RAISED}{pieces}").failure
    assert failure.answer == "file-missing" and failure.finding.evidence[0].text.endswith("'a.txt'")
    quoted = (
        f"{RAISED}papermill.exceptions.PapermillExecutionError: \n{'-' * 40}\nException encountered at In [4]:\n{KEY}"
    )
    assert read(quoted).failure.finding.title == "KeyError: 'input_ids'"


@pytest.mark.parametrize("words", gpu_errors())
def test_errors_of_gpu_runtimes_have_one_meaning(words):
    code = gpu_errors()[words]
    assert gpu_error_in(f"RuntimeError: CUDA error: {words}")[0] == sense(f"RuntimeError: CUDA error: {words}") == code
    told = [match.rule.code for match in rulebook().match(f"RuntimeError: CUDA error: {words}")]
    assert code in told


def test_a_symptom_of_the_runtime_is_never_certain():
    for text in (
        "RuntimeError: CUDA error: operation not permitted",
        "n1:1:2 [0] x.cc:3 NCCL WARN Cuda failure 'invalid argument'",
    ):
        failure = read(f"step 1 loss 2\n{text}\n").failure
        assert (failure.answer, failure.confidence) == ("cuda-failure", "likely")


def test_the_line_that_names_the_peer_is_the_answer():
    text = "E coordination_service.cc:962] /job:jax_worker/replica:0/task:1 unexpectedly tried to connect"
    text += " with a different incarnation.\n"
    text += "F client.h:80] Terminating process because the JAX distributed service detected fatal errors.\n"
    failure = read(text).failure
    assert (failure.answer, failure.finding.rank) == ("peer-lost", 1)
