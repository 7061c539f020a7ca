"""What numbers before lines are, which ranks are missing, and advice that fits the place that a log shows."""

import pytest

from drumbeat.logs.show import render
from tests.logs.reading import read

MISSING = ["1: Traceback (most recent call last):", '1:   File "train.py", line 3, in <module>', '1:     open("/data/x")',
           "1: FileNotFoundError: [Errno 2] No such file or directory: '/data/x'",
           "srun: error: n2: task 1: Exited with exit code 1"]  # fmt: skip
STEPS = ["0: step 1 loss 2.1", "0: step 2 loss 2.1"]
TIMEOUT = (
    "[rank{0}]:[E1101 05:34:24 ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=14, OpType=ALLREDUCE, NumelIn=9, NumelOut=9, Timeout(ms)=600000) ran for 600010 milliseconds"
)


@pytest.mark.parametrize(
    "opening, rank",
    [
        (["{}: starting"], 1),
        (["{}: + torchrun --nnodes 2 --nproc_per_node 8 train.py"], None),
        (["{}: world_size=16, 8 processes here"], None),
        (["{}: world_size=2"], 1),
    ],
)
def test_a_task_is_a_rank_unless_the_world_is_larger(opening, rank):
    begun = [line.format(task) for task in (0, 1) for line in opening]
    found = read("\n".join([*begun, *STEPS, *MISSING])).failure.finding
    assert (found.code, found.rank) == ("file-missing", rank)


def test_the_log_of_one_node_names_the_ranks_that_it_does_not_hold():
    steps = [f"[rank{rank}]: step 1 loss 2.1" for rank in (2, 3)]
    timeouts = [TIMEOUT.format(rank) for rank in (2, 3)]
    for opening in ("torchrun --nnodes 4 --nproc-per-node 2 train.py", "[rank2]: world size 8"):
        failure = read("\n".join([opening, *steps, *timeouts])).failure
        assert failure.unseen[0].startswith("ranks 0, 1, 4, 5, 6, 7: no line about this; a log may be missing")


POD = "W1101 05:33:54.550000 7 torch/distributed/elastic/agent/server/api.py:704] Received 15 death signal, shutting down workers"
NOTICE = "2026-11-01T05:33:51Z node-termination-handler spot interruption notice received for i-0be (trainer-worker-2)"


def test_advice_fits_the_scheduler():
    for place, advice in (("kubelet started the pod", "kubectl"), ("slurm job 12", "sacct"), ("", "sacct")):
        finding = read(f"{place}\nstep 1 loss 2.0\n{POD}").failure.finding
        assert (finding.code, advice in finding.fix) == ("terminated", True)
    assert read(f"step 1 loss 2.0\n{NOTICE}\n{POD}").failure.answer == "preempted"


def test_a_pod_is_no_rank_and_the_headline_says_what_is_wrong():
    pods = [f"clip-train-worker-{number}   {state}   0   11m" for number, state in enumerate(
        ("1/1     Running", "1/1     Running", "0/1     ImagePullBackOff", "1/1     Running"))]  # fmt: skip
    finding = read("\n".join([*pods, "[W socket.cpp:436] waiting for clients, 24 of 32 joined"])).failure.finding
    assert finding.rank is None and finding.title.endswith(": ImagePullBackOff")


def test_a_headline_carries_the_words_below_an_open_one():
    lines = ["Traceback (most recent call last):", '  File "t.py", line 1, in <module>', "    fit()",
             "errors_impl.NotFoundError: Graph execution error:", "", "/nfs/part-217; No such file or directory"]  # fmt: skip
    title = read("\n".join(lines)).failure.finding.title
    assert title == "errors_impl.NotFoundError: Graph execution error: /nfs/part-217; No such file or directory"


@pytest.mark.parametrize(
    "raised",
    [
        "omegaconf.errors.ConfigAttributeError: Key 'patch' is not in struct",
        "yaml.scanner.ScannerError: mapping values are not allowed here",
        "pydantic_core._pydantic_core.ValidationError: 2 validation errors for TrainConfig",
    ],
)
def test_what_reads_settings_raises_errors_of_the_configuration(raised):
    report = read(f'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n    go()\n{raised}')
    assert report.failure.answer == "configuration"
    assert "transport" not in render(report)  # no line of NCCL's, and nothing to do with it


def test_errors_on_one_host_are_in_the_order_of_its_clock():
    lines = ["Nov 15 04:11:44 h1 kernel: NVRM: Xid (PCI:0000:9b:00): 79, pid=9, name=python, GPU has fallen off the bus.",
             "Nov 15 04:11:45 h1 trainer[2210]: [rank4]: Traceback (most recent call last):",
             'Nov 15 04:11:45 h1 trainer[2210]: [rank4]:   File "/srv/train.py", line 244, in step',
             "Nov 15 04:11:45 h1 trainer[2210]: [rank4]:     torch.cuda.synchronize()",
             "Nov 15 04:11:45 h1 trainer[2210]: [rank4]: RuntimeError: CUDA error: unspecified launch failure"]  # fmt: skip
    failure = read("\n".join(lines)).failure
    assert failure.answer == "gpu-lost" and "before it" not in failure.why_first
