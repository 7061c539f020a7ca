"""Whose line it is: the library or program that wrote it bounds what it can be about, and no other line lends it a rank."""

import pytest

from drumbeat.logs.meaning.senses import rank_in, sense
from tests.logs.reading import read

OFI = "n1:11:12 [2] NCCL WARN NET/OFI Request 0x1480c completed with error. RC: {}. Error: 0. {}. Completed length: 0"
STEPS = "step 10 loss 4.2\nstep 20 loss 4.1"
LIMIT = "slurmstepd: error: *** JOB 90123 ON n1 CANCELLED AT 2026-06-01T11:58:04 DUE TO TIME LIMIT ***"
TMPDIR = "slurmstepd: error: Unable to create TMPDIR [/scratch/553]: No space left on device"
CACHE = "MIOpen(HIP): Error [FlushUnsafe] rename /home/a/.config/miopen//gfx90a6e.ufdb.txt: Disk quota exceeded"
FAULT = "Memory access fault by GPU node-7 (Agent handle: 0x8b0a6d0) on address 0x1504e2000000. Reason: Unknown."
HIP = "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB."


def answer(*lines):
    failure = read("\n".join(lines)).failure
    return failure.answer, failure.finding.rank


@pytest.mark.parametrize(
    "words", ["Input/output error", "Transport endpoint is not connected", "No space left on device"]
)
def test_an_error_of_a_network_library_is_the_network_s(words):
    assert read(OFI.format(5, words)).failure.answer == "ofi-error"
    for line in (
        f"libfabric:11:170::cxi:ep_ctrl:cxip_recv():104<warn> n1: failed: {words}",
        f"pml_ucx.c:296 Error: ucp_ep_create(proc=3172) failed: {words}",
        f"NCCL WARN Call to recv failed: {words}",
    ):
        assert sense(line) not in ("storage-error", "disk-full")
    assert sense(f"could not write /data/ckpt: {words}") in ("storage-error", "disk-full")


def test_an_error_of_a_file_system_s_client_is_the_file_system_s():
    assert (
        sense("LustreError: 11-0: scratch-OST0012: connection to the server was lost, connection refused")
        == "storage-error"
    )


def test_a_run_that_went_on_ended_otherwise():
    assert answer(TMPDIR, STEPS, LIMIT)[0] == "time-limit"
    assert answer(TMPDIR, STEPS, HIP, "srun: error: n1: task 3: Exited with exit code 1")[0] == "gpu-out-of-memory"
    assert answer(CACHE, STEPS, FAULT, "srun: error: n1: task 11: Aborted (core dumped)")[0] == "illegal-memory-access"
    caught = "OSError: [Errno 28] No space left on device\nWARNING: could not write the trace, going on"
    went_on = (STEPS, caught, "step 30 loss 3.1\nstep 40 loss 3.0\nstep 50 loss 2.9")
    illegal = "[rank3]: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert answer(*went_on, illegal) == ("illegal-memory-access", 3)


def test_a_launcher_lends_its_rank_to_no_line_behind_which_a_run_goes_on():
    assert answer(CACHE, "srun: error: n1: task 11: Exited with exit code 1") == ("disk-full", None)
    assert answer(HIP, "srun: error: n1: task 3: Exited with exit code 1") == ("gpu-out-of-memory", 3)


@pytest.mark.parametrize("prefix", ["[Mon Mar  2 22:02:10 2026]", "Mar  2 22:02:10 gpu13 kernel:", "[123411.120011]"])
def test_the_kernel_kills_a_process_and_no_rank(prefix):
    failure = read(f"{prefix} Memory cgroup out of memory: Killed process 41233 (python3) total-vm:210122332kB").failure
    assert (failure.answer, failure.confidence, failure.finding.rank) == ("oom-kill", "certain", None)
    assert rank_in("Out of memory: Killed process 41233 (train)") is None
    assert rank_in("process 3 has failed") == 3


SCONTROL = """
JobId=884213 JobName=llm
   UserId=aina(20311) GroupId=aina(20311) MCS_label=N/A
   JobState=FAILED Reason=NonZeroExitCode Dependency=(null)
   RunTime=00:10:11 TimeLimit=1-00:00:00 TimeMin=N/A
   Partition=gpu AllocNode:Sid=login1:12211
   NodeList=gpu-b[06-07]
"""
RAS = """
============================ ROCm System Management Interface ============================
GPU[0]\t\t: GPU[0]: RAS INFO
\t\t       Block     Status  Correctable Error  Uncorrectable Error
\t\t         UMC    ENABLED                  0                    2
__________________________________________________________________________________________
================================== End of ROCm SMI Log ===================================
"""


@pytest.mark.parametrize("dump", [SCONTROL, RAS], ids=["scontrol", "rocm-smi"])
def test_a_tool_s_dump_gives_no_cause(dump):
    failure = read(dump).failure
    assert failure.answer in ("unknown", "none") and failure.finding is None


def test_the_device_of_nccl_s_own_line_is_no_rank():
    at = "nid1:1379578:1379825 [{}] "
    warn = (
        at.format(1)
        + "register_mr_buffers:647 NCCL WARN NET/OFI Unable to register memory (type = 2) for device 5. RC: -22"
    )
    calls = [at.format(device) + f"NCCL INFO transport/net.cc:926 -> {device}" for device in (0, 3, 1, 0, 2, 1, 3, 0)]
    finding = read("\n".join([*calls, warn])).failure.finding
    assert (finding.rank, finding.host) == (None, "nid1")


SERVICE = [
    "wandb.errors.CommError: Network error (ConnectionError)",
    "aiohttp.client_exceptions.ClientConnectorError: Cannot connect to host collector:443 (Connection refused)",
    "redis.exceptions.ConnectionError: Error 111 connecting to cache:6379. Connection refused.",
]


@pytest.mark.parametrize("error", SERVICE)
def test_a_network_error_of_a_client_library_is_about_its_service(error):
    raised = ["Traceback (most recent call last):", '  File "/home/u/log.py", line 3, in log', error]
    failure = read("\n".join([STEPS, *raised])).failure
    assert failure.answer == "service-access" and "NCCL" not in failure.finding.cause + failure.finding.fix
    tried_again = [*raised[:2], f"{error}, entering retry loop."]
    assert read("\n".join([STEPS, *tried_again])).failure.answer == "service-access"
    assert read("\n".join([STEPS, *tried_again, "step 30 loss 4.0"])).failure.answer == "none"
