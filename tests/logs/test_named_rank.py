"""A rank is named where the log shows which one it was, and nowhere else."""

import pytest

from drumbeat.findings.model import CERTAIN, LIKELY
from drumbeat.logs.reader import Reader
from tests.logs.reading import read

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 522.00 MiB."
WAITS = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=24, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600113 milliseconds before timing out."  # noqa: E501
IN_TORCHRUN = [
    "Traceback (most recent call last):",
    '  File "/opt/lib/python3.10/site-packages/torch/distributed/run.py", line 785, in run',
    "    elastic_launch(",
    '  File "/opt/lib/python3.10/site-packages/torch/distributed/elastic/rendezvous/static_tcp_rendezvous.py", line 55, in next',
    "    self._store = TCPStore(",
]
IN_USE = "RuntimeError: The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use)."


def failure(*lines):
    reader = Reader()
    reader.feed_lines("log", 1, [line.encode() for line in lines])
    return reader.report().failure


def timed_out(rank, time=""):
    return f"[rank{rank}]:[E{time} ProcessGroupNCCL.cpp:523] [Rank {rank}] {WAITS}"


def test_who_waits_is_not_named_where_several_wait_and_nothing_says_who_came_first():
    found = failure(*map(timed_out, (1, 2, 3)))
    assert (found.answer, found.finding.rank) == ("collective-timeout", None)
    assert "seen by ranks 1, 2, 3" in found.finding.title
    assert failure(timed_out(1)).finding.rank == 1


def test_two_ranks_that_share_a_gpu_are_both_in_the_title_and_neither_is_first():
    found = failure(
        "n1:7:7 [0] init.cc:720 NCCL WARN Duplicate GPU detected : rank 3 and rank 0 both on CUDA device f000"
    )
    assert (found.answer, found.confidence, found.finding.rank) == ("duplicate-gpu", CERTAIN, None)
    assert "ranks 3 and 0" in found.finding.title and found.finding.host == "n1"


def test_what_the_launcher_itself_raises_is_no_ranks_failure():
    report = "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 1 (pid: 7) of binary: python"
    found = failure(*IN_TORCHRUN, IN_USE, report)
    assert (found.answer, found.finding.rank) == ("port-in-use", None)
    own = [IN_TORCHRUN[0], '  File "/home/u/train.py", line 12, in <module>', "    main()"]
    assert failure(*own, IN_USE, report).finding.rank == 1


def test_reports_about_several_ranks_do_not_say_which_was_first():
    def exited(node, task):
        return f"srun: error: n{node}: task {task}: Exited with exit code 1"

    assert failure(OOM, exited(1, 4)).finding.rank == 4
    assert failure(OOM, exited(1, 4), exited(2, 9)).finding.rank is None


def test_a_task_beside_a_range_of_tasks_is_not_the_only_one_that_failed():
    alone, others = (f"srun: error: n1: {which}: Exited with exit code 1" for which in ("task 14", "tasks 8-13,15"))
    error = "RuntimeError: NCCL error in: NCCLUtils.hpp:82, invalid argument, NCCL version 2.4.8"
    assert failure(error, alone).finding.rank == 14
    assert failure(error, others, alone).finding.rank is None


def test_the_command_in_old_torchs_error_is_that_of_the_last_rank_whoever_failed():
    missing = "FileNotFoundError: [Errno 2] No such file or directory: 'a.pt'"
    command = (
        "subprocess.CalledProcessError: Command '['python', 'a.py', '--local_rank=3']' returned non-zero exit status 1."
    )
    found = failure(missing, command)
    assert (found.answer, found.finding.rank) == ("file-missing", None)


def test_who_only_warned_is_not_the_rank_that_failed():
    lines = [
        "n7:26:28 [0] NCCL INFO comm 0x557fe785f7a0 rank 5 nranks 16 cudaDev 0 busId 9b000 - Init COMPLETE",
        "n7:26:28 [0] misc/ibvwrap.cc:268 NCCL WARN Call to ibv_something_new failed",
    ]
    found = failure(*lines)
    assert (found.answer, found.finding.rank) == ("unknown", None)


@pytest.mark.parametrize(
    "line, confidence",
    [
        ("KeyError: 'tracer_inds'", CERTAIN),
        ("AssertionError", CERTAIN),
        ("AssertionError: the sizes of two things do not fit each other", LIKELY),
        ("ValueError: nobody knows this", LIKELY),
        ("RuntimeError: nobody knows this", LIKELY),
        ("mylib.errors.OutOfTune: nobody knows this", LIKELY),
    ],
)
def test_an_exception_is_certain_only_where_its_name_says_what_went_wrong(line, confidence):
    own = ["Traceback (most recent call last):", '  File "/home/u/train.py", line 12, in <module>', "    main()"]
    found = failure(*own, line)
    assert (found.answer, found.confidence) == ("exception", confidence)


def test_a_traceback_that_is_cut_off_says_what_it_was_about_to_raise():
    frames = [
        '  File "/opt/lib/python3.10/site-packages/torch/distributed/elastic/rendezvous/backend.py", line 9, in _call',
        "    raise RendezvousConnectionError(",
    ]
    found = failure(*frames)
    assert (found.answer, found.confidence, found.finding.evidence[0].line) == ("rendezvous-connection", LIKELY, 2)
    found = failure(frames[0], "    raise mylib.Oops('twelve is odd')")
    assert (found.answer, found.finding.title) == ("exception", "mylib.Oops: twelve is odd")
    assert "cut off" in failure(frames[0], "    raise error").finding.title


def test_a_worker_that_loses_its_connection_is_not_why_a_program_was_interrupted():
    thread = [
        "Exception in thread Thread-1 (_pin_memory_loop):",
        "Traceback (most recent call last):",
        '  File "/opt/lib/python3.10/threading.py", line 1016, in _bootstrap_inner',
        "    self.run()",
        '  File "/opt/lib/python3.10/multiprocessing/connection.py", line 383, in _recv',
        "    raise EOFError",
        "EOFError",
    ]
    assert failure(*thread, "Keyboard interruption. Exiting from early training").answer == "cancelled"
    assert failure(*thread).answer == "exception"


def test_the_table_of_a_benchmark_is_a_good_end():
    error = "[1668693503.473] [n7:118:0] ib_log.c:246  UCX  ERROR mlx5_0: something failed"
    found = failure(error, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 12.5")
    assert (found.answer, found.confidence) == ("none", CERTAIN)
    assert failure(error).answer == "ucx-error"


def test_the_last_block_of_a_torchrun_table_whose_beginning_is_cut_off_is_the_root_cause():
    block = ["  rank      : {} (local_rank: {})", "  exitcode  : -11 (pid: 6421)", "  error_file: <N/A>"]
    block += ["  traceback : Signal 11 (SIGSEGV) received by PID 6421"]

    def of(rank):
        return [line.format(rank, rank % 8) for line in block]

    found = failure(*of(12), "=" * 54)
    assert (found.answer, found.finding.rank) == ("segfault", 12)
    assert failure(*of(12), "-" * 54).finding.rank is None, "more blocks follow: the root cause is the last"
    found = failure(*of(3), "-" * 54, "Root Cause (first observed failure):", "[0]:", *of(12), "=" * 54)
    assert found.finding.rank == 12


def test_mpirun_may_write_the_time_before_its_tag():
    line = "Tue Nov 27 13:49:06 2018[1,10]<stdout>:F1127 13:49:06.743 17418 a.cc:5] Check failed: Cuda Error: CUDA driver version is insufficient for CUDA runtime version"  # noqa: E501
    found = failure(line)
    assert (found.answer, found.finding.rank) == ("driver-too-old", 10)


def test_all_who_waited_in_a_collective_waited_equally_long():
    found = failure(*(timed_out(rank, f"810 03:04:1{rank}.5") for rank in (2, 0, 1)))
    assert (found.finding.rank, "seen by ranks 0, 1, 2" in found.finding.title) == (None, True)


CONSOLE = """\
drumbeat   hang-1: 1 node x 2 ranks (site localhost)
[1] step 2 loss 1.8
"""


def test_a_rank_of_drumbeats_console_counts_beside_torchs_own_prefix():
    """`[1] ` is rank 1, although torch writes `[rank0]: ` before its lines."""
    lines = [
        "[1] Traceback (most recent call last):", '[1]   File "/w/train.py", line 8, in <module>', "[1]     main()",
        "[1] ValueError: bad sample 7", "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "/w/train.py", line 10, in <module>', "[rank0]:     dist.all_reduce(t)",
        "[rank0]: RuntimeError: [/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:13224",
    ]  # fmt: skip
    report = read(CONSOLE + "\n".join(lines))
    assert (report.failure.answer, report.failure.finding.rank) == ("exception", 1)
    assert not any("NCCL_DEBUG" in each for each in report.transport.unseen)


def test_srun_names_the_host_of_the_rank_that_failed():
    failure = read(
        """
        2: Traceback (most recent call last):
        2:   File "/home/me/train.py", line 44, in step
        2:     labels = batch["label"]
        2: KeyError: 'label'
        srun: error: n11: task 2: Exited with exit code 1
        """
    ).failure
    assert (failure.answer, failure.finding.rank, failure.finding.host) == ("exception", 2, "n11")


def raised(rank, text):
    return [
        f"[rank{rank}]: Traceback (most recent call last):",
        f'[rank{rank}]:   File "fit.py", line 8, in <module>',
        f"[rank{rank}]: {text}",
    ]


def test_a_launchers_number_is_a_task_where_the_ranks_do_not_fit_it():
    report = "srun: error: cn07: task 1: Exited with exit code 1"
    found = failure(*raised(6, "KeyError: 'warmup'"), report)
    assert (found.answer, found.confidence, found.finding.rank, found.finding.host) == ("exception", CERTAIN, 6, "cn07")
    assert not found.others and [(each.task, each.host, each.rank) for each in found.consequences] == [
        (1, "cn07", None)
    ]
    same = failure(*raised(1, "KeyError: 'warmup'"), report)
    assert (same.finding.rank, same.finding.host) == (1, "cn07")
    assert all(each.task is None for each in (*same.others, *same.consequences))


@pytest.mark.parametrize(
    "below",
    [
        "+ srun --ntasks-per-node=1 torchrun --nnodes=2 --nproc-per-node=8 fit.py",
        "W1118 14:00:02.112 1402 torch/distributed/run.py:779] Setting OMP_NUM_THREADS",
        "2: [rank17]: Traceback (most recent call last):",
    ],
)
def test_a_task_that_starts_several_ranks_is_named_as_a_task(below):
    found = failure(below, "srun: error: cn3: task 2: Out Of Memory")
    assert (found.answer, found.finding.rank, found.finding.task) == ("oom-kill", None, 2)
    alone = failure("srun: error: cn3: task 2: Out Of Memory")
    assert (alone.finding.rank, alone.finding.task) == (2, None)


def test_the_report_of_another_host_is_not_joined():
    one, other = (f"srun: error: cn{n}: task {n}: Exited with exit code 1" for n in (1, 2))
    found = failure(*raised(9, "KeyError: 'warmup'"), one, other)
    assert found.finding.host is None and found.others


def test_the_rank_without_a_line_is_the_one_to_look_at_not_the_waiting_one_that_torchrun_saw_end_first():
    root = [
        "Root Cause (first observed failure):", "[0]:", "  time      : 2026-11-02_11:02:33", "  host      : gpu03",
        "  rank      : 3 (local_rank: 3)", "  exitcode  : -6 (pid: 18224)", "  error_file: <N/A>",
        "  traceback : Signal 6 (SIGABRT) received by PID 18224",
    ]  # fmt: skip
    found = failure(timed_out(3), timed_out(0), timed_out(1), *root)
    assert (found.answer, found.finding.rank, found.confidence) == ("collective-timeout", None, LIKELY)
    assert "timed out: SeqNum=24" in found.finding.title
    assert found.finding.title.endswith("look at rank 2 (it has no line here)")


RAY = [
    "(TorchTrainer pid=700) - (node_id=ab, ip=10.0.0.4, pid=3112) world_rank=1, local_rank=1, node_rank=0",
    "(TorchTrainer pid=700) - (node_id=cd, ip=10.0.0.5, pid=3112) world_rank=3, local_rank=1, node_rank=1",
    "(TorchTrainer pid=700) - (node_id=cd, ip=10.0.0.5, pid=2901) world_rank=2, local_rank=0, node_rank=1",
]


@pytest.mark.parametrize(
    "line,rank",
    [
        (f"(RayTrainWorker pid=2901, ip=10.0.0.5) {OOM}", 2),
        (f"(RayTrainWorker pid=3112, ip=10.0.0.5) {OOM}", 3),
        (f"(RayTrainWorker pid=3112) {OOM}", None),  # of two with this number
        (f"(RayTrainWorker pid=811) {OOM}", None),
    ],
)
def test_ray_says_once_which_process_is_which_rank(line, rank):
    found = failure(*RAY, line)
    assert (found.answer, found.finding.rank) == ("gpu-out-of-memory", rank)


def test_horovod_names_the_missing_rank_on_the_next_line():
    stall = "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting for remainder of ranks for more than 60 seconds."  # noqa: E501
    lines = [f"[1,0]<stderr>:{words}" for words in (stall, "Missing ranks:", "3: [DistributedAdam_Allreduce/grads_1]")]
    found = failure(*lines)
    assert (found.answer, found.finding.rank) == ("rank-absent", 3)
    reader = Reader()
    for number, line in enumerate(lines, 1):
        reader.feed("log", number, line.encode())
    assert reader.report().failure.finding.rank == 3


def test_what_every_rank_prints_in_the_same_words_is_no_rank_s_own():
    wrong = "ValueError: global_batch_size (100) is not divisible by micro_batch_size (8) times data parallel size (4)"
    assert failure(*(f"[rank{rank}]: {wrong}" for rank in (2, 0, 1))).finding.rank is None
    assert failure(f"[rank2]: {wrong}", "[rank0]: RuntimeError: Connection closed by peer").finding.rank == 2
    assert failure(f"[rank2]: {wrong}", f"[rank0]: {OOM}").finding.rank == 2


OFI = "NET/OFI Request 0x14f completed with error. RC: 5. Error: 5 (Input/output error). Completed length: 0, Request: { dev: 2 }"


@pytest.mark.parametrize(
    "down,code",
    [
        ("nid002211 kernel: cxi_ss1 0000:27:00.0: cxi2: Link is DOWN (remote fault)", "link-down"),
        ("nid005 kernel: hsn3: carrier lost", "link-down"),
        ("x3104c0s1b0n0: cxi1: CXI_EVENT_LINK_DOWN received, marking NIC unusable", "link-down"),
        ("mlx5_1: got async event: IBV_EVENT_PORT_ERR on port 1", "ib-port-error"),
    ],
)
def test_a_link_that_is_down_comes_before_what_the_library_says_of_it(down, code):
    found = failure("9: step 3 loss 2.1", down, f"9: {OFI}", "srun: error: nid002213: task 9: Exited with exit code 1")
    assert (found.answer, found.finding.rank) == (code, None)
    assert "ofi-error" in {each.code for each in found.others}


def test_a_program_that_gives_up_because_its_loss_is_no_number():
    nan = [f"step {step} loss nan" for step in range(7, 11)]
    raised = ["Traceback (most recent call last):", '  File "pre.py", line 281, in loop', "    stop()"]
    found = failure("step 6 loss 2.1", *nan, *raised, "RuntimeError: giving up")
    assert (found.answer, found.finding.evidence[0].line) == ("nan-loss", 2)
    assert failure("step 6 loss 2.1", *nan, *raised, "KeyError: 'x'").answer == "exception", (
        "a fault has a cause of its own"
    )
    assert failure(*raised, "FloatingPointError: training diverged").answer == "nan-loss"


@pytest.mark.parametrize("words", ["RuntimeError: license checkout failed", "FLEXnet Licensing error:-15,570"])
def test_a_licence_server_is_no_model_hub(words):
    assert failure("step 1 loss 2.1", words, "exit code 1").answer == "exception"


def test_the_only_task_reported_of_the_answers_host_is_its_rank():
    lost = "cn07 kernel: [881.1] NVRM: Xid (PCI:0000:87:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    waited = "[rank20]:[E1010 02:06:22.910 ProcessGroupNCCL.cpp:1895] [Rank 4] Process group watchdog thread terminated"
    found = failure(waited, lost, "srun: error: cn07: task 20: Aborted (core dumped)").finding
    assert (found.code, found.host, found.rank) == ("gpu-lost", "cn07", 20)


def test_a_setting_that_nobody_knows_is_no_missing_file_and_of_no_rank():
    said = [f"{rank}: FATAL: unknown key 'lerning_rate' in recipe.toml" for rank in range(4)]
    found = failure(*said, "srun: error: q1: tasks 0-3: Exited with exit code 2").finding
    assert (found.code, found.rank) == ("launcher-arguments", None)
