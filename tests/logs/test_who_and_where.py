# ruff: noqa: E501
"""Who is spoken of, and where it happened: roles and places in the words of many programs."""

import textwrap

import pytest

from drumbeat.findings.model import CERTAIN
from tests.logs.reading import read

RAISED = """
Traceback (most recent call last):
  File "train.py", line 88, in <module>
    main()
{}
"""


def failure(text):
    return read(textwrap.dedent(text)).failure


@pytest.mark.parametrize(
    "error",
    [
        "MemoryError: unable to allocate 1024.0 MiB on device 0 (free 12.0 MiB)",
        "MemoryError: Error allocating 2097152000 bytes of device memory (CNMEM_STATUS_OUT_OF_MEMORY).",
        "MemoryError: std::bad_alloc: card memory exhausted while growing the pool to 15.2 GiB",
        "numba.cuda.MemoryError: the device has no memory left",
    ],
)
def test_memory_of_the_device_is_not_the_hosts_whatever_the_exception(error):
    found = failure(RAISED.format(error))
    assert (found.answer, found.confidence != CERTAIN) == ("gpu-out-of-memory", True)


def test_memory_of_the_host_stays_the_hosts():
    assert failure(RAISED.format("MemoryError: out of pinned host memory for device 0")).answer == "host-out-of-memory"
    assert failure(RAISED.format("MemoryError")).answer == "host-out-of-memory"


@pytest.mark.parametrize(
    "text, rank",
    [
        ("[rank2] step 100 loss 2.1\n[rank2] lost contact with rank 5", 5),
        ("[rank1]: RuntimeError: peer rank 7 has left the group, aborting", 7),
        ("[rank0]: RuntimeError: Rank 0 is running collective ALLREDUCE, but Rank 2 is running collective BROADCAST: mismatch", 2),
        ("rank 0: step 10\nrank 1: step 10\nrank 0: step 11\nrank 1: step 11\nrank 1: fatal: rank 3 is gone, cannot continue", 3),
    ],
)  # fmt: skip
def test_the_one_spoken_of_is_named_and_not_the_speaker(text, rank):
    assert failure(text).finding.rank == rank


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 522.00 MiB."


@pytest.mark.parametrize(
    "text, rank, host",
    [
        (f"[TP1] loading\n[TP3] {OOM}", 3, None),
        (f"(Worker_TP3 pid=77) {OOM}", 3, None),
        (
            '[2025-05-05 10:10:20 TP3] Scheduler hit an exception: Traceback (most recent call last):\n  File "s.py", line 2, in run\n    go()\n'
            + OOM,
            3,
            None,
        ),
        ("[c3:20112] *** Process received signal ***\n[c3:20112] Signal: Segmentation fault (11)", None, "c3"),
        ("Pod bert-worker-3 terminated: OOMKilled, exit code 137", None, "bert-worker-3"),
        (
            "Your job 41 has been killed by the batch system (signal 9).\nJob was executed on host(s) <32*n14>, in queue <gpu>, as user <u>",
            None,
            "n14",
        ),
        ("prterun detected that one or more processes exited with non-zero status\n  Process name: [prterun-n9-2011@1,3]", 3, None),
    ],
)  # fmt: skip
def test_a_place_is_read_in_every_form_that_shows_it(text, rank, host):
    found = failure(text).finding
    assert (found.rank, found.host) == (rank, host)


def test_the_only_host_of_a_job_is_known_and_several_are_not():
    killed = "run.sh: line 3: 812 Segmentation fault (core dumped) python t.py\n"
    assert failure(f"{killed}SLURM_JOB_NODELIST=n14").finding.host == "n14"
    assert failure(f"{killed}SLURM_JOB_NODELIST=n[14-15]").finding.host is None


def test_a_complete_error_of_an_earlier_attempt_says_more_than_a_traceback_that_is_cut_off():
    attempt = '[2024-05-05 10:00:00] attempt {}\nloading data\nTraceback (most recent call last):\n  File "t.py", line 12, in <module>\n    main()\n'
    assert failure(attempt.format(1) + OOM + "\n" + attempt.format(2)).answer == "gpu-out-of-memory"


def test_a_failed_step_of_the_set_up_comes_before_what_could_not_be_loaded():
    lmod = 'Lmod has detected the following error: The following module(s) are unknown: "cudnn/8.9.7"\n'
    missing = RAISED.format("ImportError: libcudnn.so.8: cannot open shared object file: No such file or directory")
    found = failure(lmod + missing)
    assert found.answer == "module-not-found" and "import-error" in {each.code for each in found.consequences}
    assert failure(lmod + "reading shards\n" * 12 + RAISED.format("KeyError: 'lr'")).answer == "exception"


def test_the_node_agents_reason_comes_before_the_launchers_lost_contact():
    evicted = "Warning  Evicted  3m  kubelet  The node was low on resource: {}. Container trainer was using 210Gi, request is 0.\n"
    lost = "mpirun: ORTE has lost communication with a remote daemon.\n"
    assert failure(evicted.format("ephemeral-storage") + lost).answer == "disk-full"
    assert failure(evicted.format("memory") + lost).answer == "host-out-of-memory"
    assert failure(lost).answer == "node-failure"


def test_a_deadline_of_a_remote_call_is_no_time_limit():
    pull = """
    Normal   Pulling    4m (x3 over 5m)  kubelet  Pulling image "reg/x:1"
    Warning  Failed     4m               kubelet  Failed to pull image "reg/x:1": rpc error: code = DeadlineExceeded desc = context deadline exceeded
    Warning  Failed     4m               kubelet  Error: ErrImagePull
    Normal   Pulled     3m               kubelet  Successfully pulled image "reg/x:1" in 41s
    Normal   Started    3m               kubelet  Started container trainer
    epoch 1 loss 2.0
    epoch 2 loss 1.0
    training completed
    """
    assert failure(pull.strip()).answer == "none"
    assert failure("Reason: DeadlineExceeded").answer == "time-limit"


@pytest.mark.parametrize(
    "text, code",
    [
        ("pass 3 cost 1.92\npass 4 cost is no longer a number; stopping here", "nan-loss"),
        ("preparing\nwe are not allowed to look into /data/corpus, so there is nothing to train on\nno work was done, bye", "permission"),
        ("opening /proj/x\naccess to /proj/x/data was denied, we may not read it\nnothing was done.", "permission"),
        ("NOTE: unrecognized option 'fuse', its default is used\nrun.sh: line 12:  91 Segmentation fault      (core dumped) python3 p.py", "segfault"),
    ],
)  # fmt: skip
def test_calm_words_and_notes(text, code):
    assert failure(text).answer == code
