"""What healthy runs print and must not alarm, and prefixes and forms in which failures come. All written here."""

import pytest

from tests.logs.reading import read

TRACEBACK = """\
Traceback (most recent call last):
  File "/home/u/train.py", line 12, in <module>
    main()
  File "/home/u/train.py", line 9, in main
    loss = model(x)
"""
STEPS = "\n".join(f"step {number} loss 1.{number}" for number in range(150))


def prefixed(prefix, text):
    return "\n".join(prefix + line for line in text.split("\n"))


CASES = {
    "healthy-exit-noise": (
        STEPS
        + (
            "\n"
            "[rank0]:[W1101 10:00:00.123 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() "
            "was not called before program exit, which can leak resources.\n"
            "[rank1]:[W1101 10:00:01.223 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=18, "
            "addr=[n1]:47921, remote=[n0]:29500): Connection reset by peer\n"
            "[rank1]:[W1101 10:00:01.223 ProcessGroupNCCL.cpp:1662] [PG ID 0 PG GUID 0 Rank 1] Failed to check "
            'the "should dump" flag on TCPStore, (maybe TCPStore server has shut down too early), with error: '
            "Broken pipe\n"
            "/usr/lib/python3.10/multiprocessing/resource_tracker.py:224: UserWarning: resource_tracker: There "
            "appear to be 4 leaked semaphore objects to clean up at shutdown\n"
        ),
        "none",
        None,
    ),
    "ipv6": (
        (
            "[W socket.cpp:426] [c10d] The server socket cannot be initialized on [::]:29500 (errno: 97 - "
            "Address family not supported by protocol).\n"
            "[W socket.cpp:663] [c10d] The client socket cannot be initialized to connect to [localhost]:29500 "
            "(errno: 97 - Address family not supported by protocol).\n"
            "[W socket.cpp:697] [c10d] The IPv6 network addresses of (node-0, 29500) cannot be retrieved (gai "
            "error: -2 - Name or service not known).\n"
        )
        + STEPS,
        "none",
        None,
    ),
    "srun-l": (prefixed("3: ", TRACEBACK + "ValueError: bad"), "exception", 3),
    "bare7": (
        prefixed("7:", TRACEBACK + "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB"),
        "gpu-out-of-memory",
        7,
    ),
    "localhost-rank0": (prefixed("localhost: [rank2]: ", TRACEBACK + "KeyError: 1"), "exception", 2),
    "worker-1": (prefixed("worker-1: ", TRACEBACK + "KeyError: 1"), "exception", None),
    "jax": (
        (
            "2025-03-11 02:52:50.483350: W external/xla/xla/tsl/framework/bfc_allocator.cc:291] Allocator "
            "(GPU_0_bfc) ran out of memory trying to allocate 16.02GiB with freed_by_count=0. The caller "
            "indicates that this is not a failure\n"
            "jax.errors.SimplifiedTraceback: For simplicity, JAX has removed its internal frames\n"
            "\n"
            "The above exception was the direct cause of the following exception:\n"
            "\n"
        )
        + TRACEBACK
        + (
            "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate "
            "17196646400 bytes."
        ),
        "gpu-out-of-memory",
        None,
    ),
    "jax-healthy": (
        (
            "2025-03-11 02:52:50.483350: W external/xla/xla/tsl/framework/bfc_allocator.cc:291] Allocator "
            "(GPU_0_bfc) ran out of memory trying to allocate 16.02GiB with freed_by_count=0. The caller "
            "indicates that this is not a failure\n"
            "E0000 00:00:1755715039.99 1917530 cuda_dnn.cc:8579] Unable to register cuDNN factory: Attempting to "
            "register factory for plugin cuDNN when one has already been registered\n"
        )
        + STEPS,
        "none",
        None,
    ),
    "timelimit": (
        STEPS
        + (
            "\n"
            "0: slurmstepd: error: *** STEP 405737.0 ON cgpu12 CANCELLED AT 2020-01-16T23:05:49 DUE TO TIME "
            "LIMIT ***\n"
            "srun: error: cgpu12: task 0: Terminated\n"
        ),
        "time-limit",
        None,
    ),
    "cancel": (
        STEPS
        + (
            "\n"
            "slurmstepd: error: *** JOB 405737 ON cgpu12 CANCELLED AT 2020-01-16T23:05:49 ***\n"
            "srun: error: cgpu12: tasks 0-3: Terminated\n"
        ),
        "cancelled",
        None,
    ),
    "spawn": (
        (
            "Traceback (most recent call last):\n"
            '  File "train.py", line 5, in <module>\n'
            "    mp.spawn(main, nprocs=2)\n"
            '  File "/x/site-packages/torch/multiprocessing/spawn.py", line 240, in spawn\n'
            "    return start_processes()\n"
            "torch.multiprocessing.spawn.ProcessRaisedException: \n"
            "\n"
            "-- Process 1 terminated with the following error:\n"
            "Traceback (most recent call last):\n"
            '  File "/x/site-packages/torch/multiprocessing/spawn.py", line 69, in _wrap\n'
            "    fn(i, *args)\n"
            '  File "/home/u/train.py", line 9, in main\n'
            "    loss = model(x)\n"
            "IndexError: list index out of range"
        ),
        "exception",
        1,
    ),
    "ignored": (
        STEPS
        + (
            "\n"
            "Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f>\n"
            "Traceback (most recent call last):\n"
            '  File "/x/site-packages/torch/utils/data/dataloader.py", line 1479, in __del__\n'
            "    self._shutdown_workers()\n"
            "AssertionError: can only test a child process\n"
        ),
        "none",
        None,
    ),
    "atexit": (
        STEPS
        + (
            "\n"
            "Error in atexit._run_exitfuncs:\n"
            "Traceback (most recent call last):\n"
            '  File "/x/site-packages/jax/_src/distributed.py", line 168, in shutdown\n'
            "    global_state.shutdown()\n"
            "jaxlib.xla_extension.XlaRuntimeError: DEADLINE_EXCEEDED: Barrier timed out.\n"
        ),
        "none",
        None,
    ),
    "pip": (
        (
            "+ pip install -r req.txt\n"
            "ERROR: pip's dependency resolver does not currently take into account all the packages that are "
            "installed.\n"
            "torch 2.1.2 requires x, but you have y which is incompatible.\n"
            "/var/spool/slurmd/job1/slurm_script: line 12: module: command not found\n"
        )
        + STEPS,
        "none",
        None,
    ),
    "oom-child": (
        TRACEBACK
        + (
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB\n"
            "[2024-01-01 10:00:00,000] torch.distributed.elastic.multiprocessing.api: [WARNING] Sending process "
            "11 closing signal SIGTERM\n"
            "[2024-01-01 10:00:01,000] torch.distributed.elastic.multiprocessing.api: [ERROR] failed (exitcode: "
            "1) local_rank: 2 (pid: 12) of binary: python\n"
            "Traceback (most recent call last):\n"
            '  File "/bin/torchrun", line 8, in <module>\n'
            "    sys.exit(main())\n"
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
            "====\n"
            "train.py FAILED\n"
            "Root Cause (first observed failure):\n"
            "[0]:\n"
            "  time      : 2024-01-01_10:00:00\n"
            "  host      : n1\n"
            "  rank      : 2 (local_rank: 2)\n"
            "  exitcode  : 1 (pid: 12)\n"
            "  error_file: <N/A>\n"
            "  traceback : To enable traceback see: https://x\n"
        ),
        "gpu-out-of-memory",
        2,
    ),
    "one-process-many-ranks": (
        (
            "n1:50:60 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1a - Init COMPLETE\n"
            "n1:50:61 [1] NCCL INFO comm 0x2 rank 1 nranks 2 cudaDev 1 busId 1b - Init COMPLETE\n"
            "\n"
            "n1:50:61 [1] enqueue.cc:99 NCCL WARN Cuda failure 'out of memory'\n"
            "n1:50:61 [1] NCCL INFO enqueue.cc:99 -> 1\n"
        ),
        "gpu-out-of-memory",
        1,
    ),
    "fork-warn": (
        (
            "/usr/lib/python3.10/multiprocessing/popen_fork.py:66: RuntimeWarning: os.fork() was called. JAX is "
            "multithreaded, so this will likely lead to a deadlock.\n"
        )
        + STEPS,
        "none",
        None,
    ),
    "exit-msg": (STEPS + ("\nbash: line 3: 4711 Killed                  python train.py\n"), "killed", None),
    "wandb": (
        STEPS
        + (
            "\n"
            "wandb: Network error (ConnectionError), entering retry loop.\n"
            "wandb: ERROR Error while calling W&B API: connection reset by peer\n"
        )
        + STEPS,
        "none",
        None,
    ),
    "old-nccl": (
        (
            "host1:50:60 [0] INFO NET : Using interface ib0:10.0.0.1<0>\n"
            "host1:50:60 [0] INFO NET/IB : Using interface ib0 for sideband communication\n"
            "host1:50:60 [0] INFO Ring 00 : 0[0] -> 1[1] via P2P/direct pointer\n"
        ),
        "none",
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_answer_and_rank(name):
    text, answer, rank = CASES[name]
    failure = read(text).failure
    assert (failure.answer, failure.finding.rank if failure.finding else None) == (answer, rank), failure
    if answer in ("time-limit", "cancelled"):
        assert failure.finding.host in (None, "cgpu12"), "the scheduler's own words, where it has any"
