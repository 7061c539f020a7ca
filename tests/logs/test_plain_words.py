"""Lines that no rule knows and no logger marks: is it a log at all, and does it end with a failure? All written here."""

import pytest

from drumbeat.logs.read.prefixes import clean
from drumbeat.logs.read.records import KEPT, MAX_FILES, Tails, speaks_of_failure, telling
from tests.logs.reading import read, read_files

HEALTHY = {
    "a benchmark": "========\nMean time to the first word (ms):   53.9\n========",
    "rows of nccl-tests": "   134217728      33554432     float     sum      -1    631.9  212.41    0.00      0",
    "a table of times": "TOTAL                              124.02                 361.88         83.67",
    "passed tests": "....\nRan 15 in 13.099s\n\nOK",
    "a tracker's own log": '{"time":"2026-01-02T03:04:05.6Z","level":"INFO","msg":"stream: closed"}',
    "a redirected stream": "2026-01-02 03:04:05 | ERROR | stderr | INFO:     Application is up",
    "a tracker's thread": (
        "step 9 loss 2.1\n"
        "2026-01-02 03:04:05,678 WARNING MsgRouterThr:7 [router.py:message_loop():77] message_loop has been closed\n"
        'Traceback (most recent call last):\n  File "/opt/wandb/sdk/interface/router.py", line 70, in message_loop\n'
        "    msg = self._read_message()\nwandb.sdk.interface.router.MessageRouterClosedError\n"
        "2026-01-02 03:04:05,678 INFO    MsgRouterThr:7 [mailbox.py:close():115] Closing mailbox"
    ),
    "a measured error": "step 9 loss 2.1\nfinal validation error 4.64",
    "no errors": "step 9 loss 2.1\nfinished with 0 errors",
    "a column": "step 9 loss 2.1\n   size     time   algbw   busbw  error     time",
    "words of a fallback": "step 9 loss 2.1\nfused kernels could not be loaded, falling back to plain ones",
    "a worker that came back": "step 9 loss 2.1\nworker 3 died, restarting",
    "a status of zero": "step 9 loss 2.1\nprocess exited with status 0",
    "nobody failed": "step 9 loss 2.1\n0 workers failed, no rank was lost",
    "advice": "step 9 loss 2.1\nif a rank dies the job is aborted",
    "a lost share": "step 9 loss 2.1\nlost 3% of the tokens to padding",
    "a test's error": "step 9 loss 2.1\ntest error 4.64",
    "a failure further up": "the first try failed\nstep 1 loss 2.3\nstep 2 loss 2.2\nstep 3 loss 2.1",
    "rows of numbers": "     38/89     5.62G   0.02079  0.008967  0.000934\n     39/89     5.62G   0.02104  0.008995  0.000651",
    "capabilities": "#   Transport: ud\n#      latency: 630 nsec\n#   error handling: peer failure",
    "a tracker's service": (
        "step 8 loss 2.2\nwandb: ERROR Error while calling W&B API: rate limit exceeded (<Response [429]>)\nstep 9 loss 2.1\n"
        "wandb: ERROR Error while calling W&B API: rate limit exceeded (<Response [429]>)"
    ),
    "torchrun's good end": (
        "INFO:torch.distributed.elastic.agent.server.api:Local worker group finished (SUCCEEDED). Waiting 300 seconds"
    ),
}
NOTHING_GOOD = {
    "an installation": "Unpacking libfoo2 (2.40-1) ...\nSetting up libfoo2 (2.40-1) ...",
    "another redirected stream": "2026-01-02 03:04:05 | ERROR | stderr | Loading shards: 3 of 3",
    "an environment's report": "OS                 : Ubuntu\nClang version      : Could not collect",
    "settings": "use_cloud:True\nnode_rank:0\nnum_nodes: 2",
    "what a driver's tool prints": "| HL-X Version:      hl-9 |\n| Driver Version:    9.1 |",
    "help of a tool": "usage: train.py [options]\n  --color=mode     yes or no\n  --paste=mode   send failed|all output away",
    "a start": "Loading the model\nStarting 8 workers",
    "a queue": "srun: job 812 queued and waiting for resources",
}
FAILED = {
    "training": "step 3 loss 2.3\nTraining failed",
    "a script": "step 3 loss 2.3\ntrain.py crashed",
    "a status": "step 3 loss 2.3\npython train.py exited with code 3",
    "a logger's information": "step 3 loss 2.3\n2026-01-02 03:04:05 INFO The training job has crashed!",
    "a silent rank": "step 3 loss 2.3\nrank 5 on n07 is not responding",
    "a state": "step 3 loss 2.3\nJob 812 status: FAILED",
    "a reason": "step 3 loss 2.3\nRun stopped due to an error",
    "a library without a logger": "step 9 loss 2.1\n/src/host/transport.cpp:init:275: setup of the transport failed",
    "giving up": "step 9 loss 2.1\naborting due to what init_thread said",
    "about to abort": "step 9 loss 2.1\n*** the job will now abort.",
    "a call before MPI began": "*** The MPI_Comm_size() function was called before MPI_INIT was invoked.\n*** This is disallowed",
    "LSF": "step 9 loss 2.1\nExited with exit code 7.\n\nResource usage summary:\n    CPU time :     7.1 sec.",
    "a library of a network card": "step 9 loss 2.1\nmlx5: n1: got completion with error:",
    "a check of glog": "F0102 03:04:05.678 77 ring.cc:11] Check failed: a == b (1 vs. 2)",
    "a check of XLA": "2026-01-02 03:04:05.678: E    77 xla/log.cc:11] Check failed: run() == OK\n*** Begin stack ***\n  f()",
    "SGLang": "step 9 loss 2.1\nMessage: 'Received sigquit from a child proces. It usually means the child failed.'",
    "slurmd's own log": (
        "[2026-01-02T03:04:05.678] [51.0] error: pyxis: couldn't start container\n"
        "[2026-01-02T03:04:05.679] [51.0] pyxis: removing container filesystem: pyxis_51.0"
    ),
    "SkyPilot": "(task, pid=7) step 9 loss 2.1\n✓ Job finished (status: FAILED_DRIVER).",
    "hydra": "step 9 loss 2.1\nError executing job with overrides: ['data=c4']",
    "torchrun's record": (
        "step 9 loss 2.1\nINFO:torch.distributed.elastic.agent.server.api:Local worker group finished (FAILED). Waiting 300 s"
    ),
    "docker": "docker: Error response from daemon: failed to create task for container: exit status 1",
    "a debugger": "step 9 loss 2.1\nException has occurred: StoreError\ntwelve is odd",
    "detectron2": "ERROR [01/02 03:04:05 d2.engine.train_loop]: Exception during training:\nTraceback (most rec",
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_output(name):
    assert read(HEALTHY[name]).failure.answer == "none"


@pytest.mark.parametrize("name", NOTHING_GOOD)
def test_no_failure_and_nothing_good_is_not_health(name):
    failure = read(NOTHING_GOOD[name]).failure
    assert (failure.answer, failure.finding) == ("unknown", None)


@pytest.mark.parametrize(
    "status,code",
    [
        ("process exited with status 137", "killed"),
        ("python train.py returned exit status 139", "segfault"),
        ("RC=-7", "bus-error"),
        ("the child ended with code 134", "aborted"),
        ("worker 3 was terminated by signal 9", "killed"),
    ],
)
def test_an_exit_status_means_its_signal(status, code):
    failure = read(f"step 3 loss 2.3\n{status}").failure
    assert (failure.answer, failure.confidence) == (code, "likely")


@pytest.mark.parametrize("name", FAILED)
def test_last_words_of_a_failure(name):
    failure = read(FAILED[name]).failure
    assert (failure.answer, failure.confidence) == ("unknown", "unknown") and failure.finding is not None


@pytest.mark.parametrize(
    "line,code",
    [
        ("lost contact with node n07", "node-failure"),
        ("worker 3 died", "peer-lost"),
        ("no sign of life from worker 2", "peer-lost"),
        ("Unable to open the plugin of the network", "import-error"),
    ],
)
def test_last_words_have_a_meaning(line, code):
    failure = read(f"step 3 loss 2.3\n{line}").failure
    assert (failure.answer, failure.confidence, failure.finding.title) == (code, "likely", line)


def test_a_shopping_list_is_still_no_log():
    assert read("bread\nmilk and honey\n").failure.why_first == "nothing here is about a run"


def test_a_warning_right_above_a_cut_traceback_says_why():
    frames = 'Traceback (most recent call last):\n  File "/opt/jax/bridge.py", line 879, in backends\n    backend = init(name)'
    warning = (
        "W external/xla/xla/platform_util.cc:199] no StreamExecutor for CUDA:1: CUDA_ERROR_X: invalid device ordinal"
    )
    failure = read(f"{warning}\n{frames}").failure
    assert (failure.answer, failure.confidence) == ("invalid-device-ordinal", "likely")
    between = "\n".join(f"step {n} loss 2.1" for n in range(60))
    assert read(f"{warning}\n{between}\n{frames}").failure.answer == "exception"


CUT = 'Traceback (most recent call last):\n  File "/opt/tool/run.py", line 7, in main\n    result = get(future)'


def test_a_cut_traceback_of_whoever_reported_a_failure_is_no_cause():
    report = "E0102 03:04:05.678000 7 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 0"
    report += " (pid: 7) of binary: /usr/bin/python"
    assert read(f"{report}\n{CUT}").failure.answer == "unknown"
    assert read(f"{CUT}\n{report}").failure.answer == "exception"
    of_a_rank = "\n".join(f"[rank1]: {line}" for line in CUT.split("\n"))
    assert read(f"{report}\n{of_a_rank}").failure.answer == "exception"


def test_a_lost_peer_right_above_a_cut_traceback_says_why():
    failure = read(f"RuntimeError: Broken pipe\n\nThe above exception was the direct cause of it\n{CUT}").failure
    assert (failure.answer, failure.confidence) == ("peer-lost", "likely")


TABLE = """tools/train.py FAILED
=======================================
Root Cause:
[0]:
  time: 2026-01-02_03:04:05
  rank: 1 (local_rank: 1)
  exitcode: 1 (pid: 7)
  error_file: <N/A>
  msg: "Process failed with exitcode 1"
=======================================
"""
OTHER_CAUSES = {
    "store-key-timeout": "torch.distributed.DistStoreError: wait timeout after 600000ms",
    "store-clients-missing": "torch.distributed.DistStoreError: Timed out after 6 seconds waiting for workers. 1/2 joined.",
    "oom-kill": "(raylet) node_manager.cc:7: 2 Workers (tasks /\n actors) killed due to memory pressure (OOM), 0 Workers crashed",
    "killed": '"terminated": {\n  "exitCode": 137,\n  "reason": "Error"\n}\nstep 9 loss 2.1',
    "permission": "Jan  2 03:04:05 n1 slurmd[7]: mkdir: cannot create directory '/scratch/x': Permission denied",
    "segfault": "[Fri Jan  2 03:04:05 2026] traps: python3[7] general protection fault ip:70f6 sp:70f6 error:0 in libx.so[7+3]",
    "gpu-lost": "Jan  2 03:04:05.678901 n1 kernel: NVRM: GPU0 _issueRpcAndWait: rpcSendMessage failed with status 0x0000000f",
    "ssh-failed": "subprocess.CalledProcessError: Command 'ssh -o BatchMode=yes n2 hostname' returned non-zero exit status 255.",
    "exception": 'E 01-02 03:04:05 sdk.py:7]   File "/opt/x.py", line 7, in f\nE 01-02 03:04:05 sdk.py:7]     g()',
    "extension-build": f"ninja: build stopped: subcommand failed.\n{CUT}",
}


def test_the_table_of_the_first_torchrun():
    failure = read(TABLE).failure
    assert (failure.answer, failure.finding.code, failure.finding.rank) == ("unknown", "child-failed", 1)


@pytest.mark.parametrize("code", OTHER_CAUSES)
def test_causes_in_other_words(code):
    assert read(OTHER_CAUSES[code]).failure.answer == code


def test_lines_of_the_system_s_own_log():
    line = clean("Jan  2 03:04:05.678901 n1 vllm.service[77]: ERROR 01-02 03:04:05 [core.py:7] it broke")
    assert (line.text, line.host, line.level) == ("it broke", "n1", "E") and line.time is not None
    assert clean("2026-01-02T03:04:05.678+00:00 n1 kernel: x y").text == "x y"
    assert clean("Jan  2 03:04:05 we began: at last").host is None


def test_a_download_that_was_reset_is_no_lost_peer():
    assert read("Loading the model\n   1: Connection reset by peer (os error 54)").failure.answer != "peer-lost"


def test_a_rank_that_no_host_has_room_for_is_not_local():
    lines = [
        "n7:70:71 [3] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB ; OOB eth0:10.0.0.7<0>",
        "n7:70:72 [3] NCCL INFO Ring 00 : {0}[3d000] -> {1}[b2000] via P2P/IPC",
    ]
    assert read("\n".join(lines).format(155, 157)).transport.path.answer == "rdma"
    assert read("\n".join(lines).format(5, 7)).transport.path.answer == "local"


def test_a_container_that_ran_out_of_memory_and_is_started_again_and_again():
    state = "    State:          Waiting\n      Reason:       CrashLoopBackOff\n"
    assert read(state).failure.answer == "pod-failed"
    assert read(f"{state}    Last State:     Terminated\n      Reason:       OOMKilled").failure.answer == "oom-kill"


def test_a_run_that_was_started_again_and_did_its_work():
    first = (
        'step 7 loss 2.1\nTraceback (most recent call last):\n  File "/home/u/train.py", line 7, in <module>\n'
        "RuntimeError: DataLoader worker (pid(s) 812) exited unexpectedly\n"
        "srun: error: n1: task 0: Exited with exit code 1\n"
    )
    again = "\n".join(f"step {n} loss 2.1" for n in range(8, 400))
    assert read(f"{first}{again}\nTraining complete. Last checkpoint: 399").failure.answer == "none"
    assert read(f"{first}{again[:400]}\nTraining complete. Last checkpoint: 399").failure.answer != "none"
    assert read(first).failure.answer == "dataloader-stuck"


def test_nvlink_is_no_memory_error():
    failure = read(
        "[rank5]: RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution"
    ).failure
    assert (failure.answer, failure.finding.rank) == ("nvlink-down", 5)


def test_what_a_logger_says_of_a_redirected_stream_is_no_level():
    assert clean("2026-01-02 03:04:05 | ERROR | stderr | Loading").level == ""
    assert clean("2026-01-02 03:04:05 | ERROR | train | Loading").level == "E"


def test_tails_are_bounded_and_know_the_number_of_a_line():
    tails = Tails()
    for number in range(MAX_FILES + 3):
        tails.add(f"f{number}", 1, [b"setup failed again"])
    assert len(tails.files()) == MAX_FILES
    tails = Tails()
    tails.add("f", 1, [b"x"] * 99 + [b"setup of it failed", b""])
    found = telling(tails.of("f"), lambda text: False)
    assert found and found[0] == 100
    tails.add("f", 102, [b"y"] * KEPT)
    assert telling(tails.of("f"), lambda text: False) is None


def test_every_file_is_asked():
    files = {"rank0": "step 9 loss 2.1\nthe end", "rank1": "step 9 loss 2.1\nsetup of the transport failed"}
    assert read_files(files).failure.finding.evidence[0].file == "rank1"
    assert not speaks_of_failure("x" * 500 + " failed")


def test_a_log_that_is_cut_while_its_ranks_begin_misses_nobody():
    def start(host, pid, rank, nranks=4):
        words = f"ncclCommInitRank comm 0x{pid} rank {rank} nranks {nranks} cudaDev {rank} commId 0xab - Init START"
        return f"{host}:{pid}:{pid + 1} [{rank}] NCCL INFO {words}"

    chosen = [f"n{number // 2}:{70 + number}:{71 + number} [0] NCCL INFO Using network IB" for number in range(4)]
    some = [start("n0", 70, 0), start("n0", 71, 1)]
    assert read("\n".join([*chosen, *some])).failure.answer == "none"
    assert read("\n".join([*chosen[:2], *some])).failure.answer == "ranks-missing"
    threads = [f"n0:70:{71 + rank} [{rank}] NCCL INFO Using network Socket" for rank in range(3)]
    assert read("\n".join([*threads, start("n0", 70, 0, 3), start("n0", 70, 1, 3)])).failure.answer == "none"


@pytest.mark.parametrize(
    "words", ["rank ", "1", "rank 1/", "node a1.b2-", "worker 1:1:1:", "train.py", "exit with code ", "job is "]
)
def test_no_line_takes_long(words):
    """Written so that a pattern that tries every division of a line would never come back."""
    assert not speaks_of_failure((words * 400)[:399])
