"""Which rank failed first: from prefixes, tables, reports, and the lines beside; nobody where nothing names one."""

import pytest

from drumbeat.logs.failure import NO_FAILURE
from drumbeat.logs.show import render
from tests.logs.reading import read, read_files

STEP = "*** STEP 8.0 ON n1 CANCELLED AT 2026-01-27T14:51:17 ***"
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    "text,rank",
    [
        (f"[rank: 1] {ECC}", 1),
        (f"[1,3]<stderr>:{ECC}", 3),
        (f"[3]<stderr>:{ECC}", 3),
        (f" 7: {ECC}", 7),
        (f"{ECC}\n[E Process.cpp:9] [Rank 5] NCCL watchdog thread terminated with exception: {ECC[14:]}", 5),
        ("mpirun noticed that process rank 1 with PID xxxxx on node xxxxx exited on signal 9 (Killed).", 1),
        ("E service.cc:1] UNAVAILABLE: Task /job:w/replica:0/task:4 heartbeat timeout. Check its log.", 4),
        ("  Process name: [[32288,1],2]\n  Exit code:    1", 2),
        ("=   RANK 6 PID 9665 RUNNING AT n1\n=   KILLED BY SIGNAL: 9 (Killed)", 6),
        ("[1,0]<stderr>:[2026-04-13 13:55:31.8: W horovod/operations.cc:588] grads_0 [missing ranks: 1]", 1),
        ("Root Cause (first observed failure): [0]: time : 2026-01-01_01:02:03 host : n1 rank : 5 (local_rank: 1) "
         "exitcode : 1 (pid: 7) error_file: <N/A> traceback : none\ntorch.ChildFailedError:", 5),
        (f"{ECC}\n[rank1]: {ECC}\n[rank2]: {ECC}", None),  # which of the two wrote the first line is not shown
    ],
)  # fmt: skip
def test_the_rank_that_the_lines_name(text, rank):
    finding = read(text).failure.finding
    assert finding is not None and finding.rank == rank


def test_connections_name_the_rank_of_a_process():
    at = "n1:908:910 [0]"
    text = f"""
        {at} NCCL INFO Channel 00 : 3[2d000] -> 1[2e000] via P2P/IPC
        {at} transport/p2p.cc:238 NCCL WARN failed to open CUDA IPC handle : 217 peer access is not supported
        """
    finding = read(text).failure.finding
    assert (finding.code, finding.rank) == ("gpu-ipc", 3)


def test_a_traceback_without_its_end_is_not_nothing():
    failure = read(
        'Traceback (most recent call last):\n  File "/home/u/train.py", line 12, in <module>\n    main()'
    ).failure
    assert (failure.answer, failure.confidence) == ("exception", "likely")
    assert "cut off" in failure.finding.title and failure.finding.cause == "raised at /home/u/train.py:12"
    assert read("step 1\nTraceback (most recent call last):").failure.answer == "exception"
    ignored = 'Exception ignored in: <f>\nTraceback (most recent call last):\n  File "/home/u/a.py", line 2, in __del__'
    assert read(f"step 1 loss 2\n{ignored}").failure.answer == NO_FAILURE


def test_sequence_numbers_of_different_groups_are_not_compared():
    line = (
        "[E P.cpp:458] [Rank {}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum={}, OpType=ALLREDUCE, Timeout(ms)=9)"
    )
    several = read("\n".join(line.format(*pair) for pair in ((0, 96120), (0, 96117), (7, 64088)))).failure
    assert several.answer == "collective-timeout" and "rank-behind" not in {other.code for other in several.others}
    one = read("\n".join(line.format(*pair) for pair in ((0, 96120), (7, 64088)))).failure
    assert "rank-behind" in {other.code for other in one.others}


@pytest.mark.parametrize(
    "text,answer,confidence",
    [
        (STEP, "cancelled", "likely"),
        (f"srun: error: n1: task 3: Exited with exit code 1\n{STEP}", "unknown", "unknown"),
        (
            "OSError: [Errno 24] Too many open files\nunable to open shared memory object </torch_9> in read-write mode",
            "file-descriptors",
            "certain",
        ),
        ("enforce fail. PytorchStreamWriter failed writing file data/1: file write failed", "disk-full", "likely"),
    ],
)
def test_what_more_than_one_thing_can_lead_to(text, answer, confidence):
    failure = read(text).failure
    assert (failure.answer, failure.confidence) == (answer, confidence)


def test_torchruns_table_alone_says_who_and_not_why():
    table = "Root Cause (first observed failure):\n[0]:\n  rank      : 3 (local_rank: 3)\n  exitcode  : 1 (pid: 9)\n"
    failure = read("train.py FAILED\n" + table).failure
    assert (failure.answer, failure.confidence, failure.finding.rank) == ("unknown", "unknown", 3)


def test_the_last_block_of_torchruns_table_alone_says_who_if_it_is_whole():
    block = [
        "  rank      : 3 (local_rank: 3)",
        "  exitcode  : 1 (pid: 9)",
        "  error_file: <N/A>",
        "  traceback : To enable",
    ]
    assert read("\n".join(block)).failure.finding.rank == 3
    assert read("\n".join(block[:3])).failure.finding is None
    assert read("\n".join([*block, "[1]:", "  time      : 2026-01-02_03:04:05"])).failure.finding is None


def test_who_waits_is_not_who_failed():
    waiter = "[rank12]:[E906 03:02:35.1 P.cpp:683] [Rank 12] Watchdog caught collective operation timeout: Work"
    finding = read(f"checkpoint write: [Errno 28] No space left on device\n{waiter}").failure.finding
    assert (finding.code, finding.rank) == ("disk-full", None)


def test_an_unknown_warning_beside_a_log_that_merely_ends_is_no_missing_rank():
    start = (
        "n1:7:15 [1] NCCL INFO ncclCommInitAll comm 0x57 rank 1 nranks 2 cudaDev 1 busId 230 commId 0x4 - Init START"
    )
    assert read(f"n1:7:15 [1] a.cc:1 NCCL WARN something odd\n{start}").failure.answer == "unknown"


SRUN = "srun: error: n{}: {}\n"
ENDING = "srun: launch/slurm: _step_signal: Terminating StepId=8.0\n"


def test_tasks_that_srun_kills_did_not_fail_first():
    failed, killed = SRUN.format(1, "task 5: Exited with exit code 1"), SRUN.format(2, "tasks 8-9,12: Killed")
    failure = read(f"{failed}{ENDING}slurmstepd: error: {STEP}\n{killed}srun: Force Terminated StepId=8.0").failure
    assert (failure.answer, failure.finding.rank) == ("unknown", 5)
    first = read(f"{SRUN.format(1, 'task 3: Killed')}{ENDING}{failed}{killed}").failure
    assert (first.answer, first.finding.rank) == ("killed", 3)


def test_mpich_names_the_rank_behind_what_its_transport_wrote():
    text = (
        "[1.4] [nid1:8:0] ucp_mm.c:137 UCX ERROR failed to register address 0xa mem_type bit 0x1 length 26400\n"
        "MPICH ERROR [Rank 1534] [job id 1.0] [Mon Feb 15 14:58:48 2021] [unknown] [nid1] - Abort(6) (rank 1534 in comm 0)"
    )
    finding = read(text).failure.finding
    assert (finding.code, finding.rank) == ("ucx-error", 1534)


def test_a_launchers_traceback_that_is_cut_off_hides_nothing():
    launcher = (
        'Traceback (most recent call last):\n  File "/e/bin/torchrun", line 8, in <module>\n    sys.exit(main())\n'
    )
    at = "E0526 16:36:24.875000 14041 torch/distributed/elastic/multiprocessing/api.py:826] failed"
    aborted = read(f"{at} (exitcode: -6) local_rank: 3 (pid: 26026) of binary: python\n{launcher}").failure
    assert (aborted.answer, aborted.finding.rank) == ("aborted", 3)
    unknown = read(f"{at} (exitcode: 1) local_rank: 2 (pid: 26026) of binary: python\n{launcher}").failure
    assert (unknown.answer, unknown.finding.rank) == ("unknown", 2)
    assert read(launcher).failure.answer == "exception", "alone it still shows that something failed"


def test_a_local_rank_is_no_rank():
    """torchrun's first line has the local rank alone; its table has both, and the table counts."""
    at = "E0101 00:00:00.1 990 torch/distributed/elastic/multiprocessing/api.py:869] failed"
    died = f"{at} (exitcode: -11) local_rank: 2 (pid: 991) of binary: python\n"
    alone = read(died).failure
    assert (alone.finding.rank, alone.finding.local) == (2, True)
    assert "(local rank 2)" in render(read(died))
    table = (
        "Root Cause (first observed failure):\n[0]:\n  rank      : 10 (local_rank: 2)\n  exitcode  : -11 (pid: 991)\n"
    )
    both = read(died + table).failure
    assert (both.answer, both.finding.rank, both.finding.local) == ("segfault", 10, False)


def test_the_table_says_who_was_first_where_another_rank_has_the_only_words():
    where = '[rank0]: Traceback (most recent call last):\n[rank0]:   File "/home/u/t.py", line 3, in <module>'
    raised = f"{where}\n[rank0]: TypeError: no mask"
    block = "  host      : n7\n  rank      : 1 (local_rank: 1)\n  exitcode  : {} (pid: 58)\n  error_file: <N/A>\n====="
    table = f"Root Cause (first observed failure):\n[0]:\n  time      : 2026-04-07_10:13:23\n{block}"
    failure = read(f"{raised}\n{table.format(1)}").failure
    assert (failure.answer, failure.finding.rank, failure.finding.host) == ("exception", 1, "n7")
    assert (
        failure.confidence == "likely"
        and failure.why_first == "torchrun saw rank 1 fail first; these words are rank 0's"
    )
    assert any("Root Cause" in evidence.text for evidence in failure.finding.evidence)
    alike = read(f"{raised.replace('rank0', 'rank1')}\n{raised}\n{table.format(1)}").failure
    assert (alike.finding.rank, alike.confidence) == (1, "certain")
    killed = read(f"{raised}\n{table.format(-9)}").failure  # recorded as the first; rank 0's words are not about it
    assert (killed.answer, killed.finding.rank, killed.confidence) == ("killed", 1, "likely")


def test_torchruns_of_two_nodes_within_the_noise_of_clocks_leave_it_to_the_log():
    """Each table speaks for its own node: the order of the lines decides, and a task number that is a node's names no rank."""
    raised = (
        "{0}: [rank{1}]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.94 GiB. GPU 0 has 39 GiB\n"
    )
    table = (
        "{0}: Root Cause (first observed failure):\n{0}: [0]:\n{0}:   time      : 2026-03-24_14:46:{1}\n{0}:   host      : n{0}\n"
        "{0}:   rank      : {2} (local_rank: 0)\n{0}:   exitcode  : 1 (pid: 7)\n{0}:   error_file: <N/A>\n{0}: =====\n"
    )
    lines = "".join(raised.format(*each) for each in ((0, 0), (1, 4)))
    close = read(lines + table.format(1, 35, 4) + table.format(0, 40, 0)).failure
    assert (close.answer, close.finding.rank) == ("gpu-out-of-memory", 0)
    apart = read(lines + table.format(1, 15, 4) + table.format(0, 40, 0)).failure
    assert (apart.finding.rank, apart.why_first) == (4, "torchrun saw rank 4 fail first")


def test_an_indented_log_keeps_its_ranks():
    raised = (
        'Traceback (most recent call last):\n  File "/u/t.py", line 3, in <module>\n    raise KeyError(1)\nKeyError: 1'
    )
    indented = "\n".join(f"      [rank3]: {line}" for line in raised.split("\n"))
    assert read("step 1\n" + indented + "\nn1.hsn: rank 6 exited with code 1").failure.finding.rank == 3


def test_what_a_batch_script_met_before_srun_is_not_why_a_task_failed():
    script = 'Traceback (most recent call last):\n  File "/u/h.py", line 3, in <module>\n'
    script += "ModuleNotFoundError: No module named 'yaml'\n"
    task = (
        '52: Traceback (most recent call last):\n52:   File "/u/t.py", line 3, in <module>\n52: AssertionError: sizes\n'
    )
    failure = read(script + "0: reading the settings\n" * 40 + task).failure
    assert (failure.answer, failure.finding.rank) == ("exception", 52)
    assert read(script + "0: step 1 loss 2.0").failure.answer == "import-error"


def test_a_scheduler_that_cancels_is_named_before_the_signal_that_it_sent():
    signal = "W0403 16:13:10.341000 7 torch/distributed/elastic/agent/server/api.py:704] "
    signal += "Received 15 death signal, shutting down workers\n"
    cancel = "slurmstepd: error: *** STEP 1364.0 ON n1 CANCELLED AT 2026-04-03T16:13:10 ***"
    assert read(f"step 1 loss 2.0\n{signal}{cancel}").failure.answer == "cancelled"


def test_the_kernels_word_says_why_torchrun_saw_a_rank_killed():
    table = (
        "Root Cause (first observed failure):\n[0]:\n  time      : 2026-02-13_13:17:58\n  host      : n1\n"
        "  rank      : 0 (local_rank: 0)\n"
        "  exitcode  : -9 (pid: 7)\n  error_file: <N/A>\n  traceback : Signal 9 (SIGKILL) received by PID 7\n=====\n"
    )
    said = "[2026-02-13T13:17:58.734] error: Detected 1 oom_kill event in StepId=9.0. Some tasks have been OOM Killed."
    assert read(table + said).failure.answer == "oom-kill"


@pytest.mark.parametrize("command", ["torchrum", "uvx-fit", "python3.19"])
def test_a_module_that_did_not_load_is_no_answer_where_a_command_is_missing(command):
    lmod = 'Lmod has detected the following error: The following module(s) are unknown: "toolchain/9"'
    found = read(f"{lmod}\nPlease check the spelling\nrun.sh: line 9: {command}: command not found").failure
    assert found.answer == "command-not-found"
    assert "module-not-found" in {note.code for note in found.notes}
    assert read(f"{lmod}\nPlease check the spelling").failure.answer == "module-not-found"


TRACEBACK = 'Traceback (most recent call last):\n  File "/w/train.py", line 8, in <module>\n    main()\nKeyError: 1\n'
NODE = "master_addr=n0\n  group_rank=1\n  local_ranks=[0, 1, 2, 3]\n  global_ranks=[4, 5, 6, 7]\n"
MAPPING = (
    "[INFO] [launch.py:84:main] nnodes=2, num_local_procs=4, node_rank=1\n"
    "[INFO] [launch.py:99:main] global_rank_mapping=defaultdict(<class 'list'>, {'worker-0': [0, 1], 'worker-1': [2, 3]})\n"
)
LAUNCHED = (
    "[ERROR] [launch.py:321:sigkill_handler] ['python3', '-u', 'main.py', '--local_rank=1'] exits with return code"
)
RAY = "(TorchTrainer pid=8) - (node_id=21, ip=10.0.7.58, pid=895) world_rank=1, local_rank=0, node_rank=1\n"
DEVICE = "n1:908:910 [{}] misc/cudawrap.cc:36 NCCL WARN Cuda failure 2 'out of memory'\n"


@pytest.mark.parametrize(
    "text,rank,local",
    [
        (f"{NODE}{TRACEBACK}ERROR:api:failed (exitcode: 1) local_rank: 2 (pid: 5) of binary: /usr/bin/python", 6, False),
        (NODE + "".join(f"[default3]:{line}\n" for line in TRACEBACK.splitlines()), 7, False),
        ("".join(f"[default3]:{line}\n" for line in TRACEBACK.splitlines()), 3, True),
        (f"{LAUNCHED} = -7", 1, True),
        (f"{MAPPING}{LAUNCHED} = -11", 3, False),
        (f"--node_rank=1 --nproc_per_node=4\n{LAUNCHED} = -11", 5, False),
        ("".join(f"worker-1: {line}\n" for line in f"{MAPPING}{TRACEBACK}{LAUNCHED} = 1".splitlines()), 3, False),
        (f"{RAY}(raylet) A worker died. Worker PID: 895 Worker exit type: SYSTEM_ERROR", 1, False),
        (f"{TRACEBACK}[rank: 3] Child process with PID 2217 terminated with code 1.", 3, False),
        (DEVICE.format(2), 2, True),
        (DEVICE.format(0), None, False),  # each process may call its only GPU the first one
        (DEVICE.format(2) + DEVICE.format(3), None, False),
        (f"MASTER_PORT=29500\nWORLD_SIZE=16\nRANK=9\n{TRACEBACK}", 9, False),
        (f"| distributed init (rank 6): env://\n{TRACEBACK}", 6, False),
        (f"| distributed init (rank 0): env://\n{TRACEBACK}", None, False),  # the first rank may speak for all
        (f"GLOBAL_RANK: 3, MEMBER: 4/8\nGLOBAL_RANK: 2, MEMBER: 3/8\n{TRACEBACK}", None, False),
        (f"Num processes: 8\nProcess index: 5\nLocal process index: 1\n{TRACEBACK}", 5, False),
        ("2026-01-01 10:00:00 INFO Rank 3 got an exception: [Errno 5] Input/output error: '/data/x'", 3, False),
    ],
)  # fmt: skip
def test_the_rank_of_a_process(text, rank, local):
    finding = read(text).failure.finding
    assert (finding.rank, finding.local) == (rank, local)


def test_a_pod_or_file_of_one_process_names_its_rank():
    other = {"job-master-0.log": "step 1 loss 2.0"}
    assert read_files({"job-worker-7.log": TRACEBACK, **other}).failure.finding.rank == 8
    assert read_files({"logs/task5.err": TRACEBACK, "logs/task4.err": "step 1 loss 2"}).failure.finding.rank == 5
    several = f"(exitcode: 1) local_rank: 1\n{TRACEBACK}"
    assert read_files({"job-worker-7.log": several, **other}).failure.finding.rank != 8
