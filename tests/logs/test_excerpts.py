"""Pieces of logs, as people paste them: cut tracebacks, boxes without their upper part, glued lines. All written here."""

import pytest

from drumbeat.logs.read.prefixes import clean
from tests.logs.reading import read

IPYTHON = """\
---------------------------------------------------------------------------
ZeroDivisionError                         Traceback (most recent call last)
Cell In[4], line 7
      6 scale = warm_up(step)
----> 7 trainer.fit(scale)

File /opt/env/lib/python3.11/site-packages/pkg/fit.py:88, in Trainer.fit(self, scale)
     86 rate = self.rate
---> 88 return rate / scale
"""
BOX = """\
│ /opt/env/lib/python3.11/site-packages/torch/distributed/run.py:753 in run    │
│                                                                              │
│   750 │   │   )                                                              │
│ ❱ 753 │   elastic_launch(                                                    │
"""
HYDRA = "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n"
BAR = " 33%|###3      | 3/9 [00:04<00:08,  1.2it/s, loss=2.1]"
CASES = {
    "ipython": (IPYTHON + "\nZeroDivisionError: float division by zero", "exception", None),
    "ipython, cut": (IPYTHON, "exception", None),
    "ipython, known": (IPYTHON + "\nOSError: [Errno 116] Stale file handle", "storage-error", None),
    "rich, without its top": (BOX, "exception", None),
    "rich, cut at once": ("╭── Traceback (most recent call last) ──╮\n│ C:\\m\\fit.py:7 in fit  │", "exception", None),
    "rich, one line of it": ("step 3\n│ ❱ 753 │   elastic_launch(                     │", "exception", None),
    "ipython, without its top": (IPYTHON.split("\n\n")[1], "exception", None),
    "glog's error at the end": ("step 3\nE0102 03:04:05.678901 812 queue.go:38] could not make the group", "unknown", None),
    "glog's error that all runs print": (
        "step 3\nE0000 00:00:1738012345.123456 812 cuda_fft.cc:477] Unable to register cuFFT factory: Attempting to register "
        "factory for plugin cuFFT when one has already been registered",
        "none",
        None,
    ),
    "slurm went on": (
        "slurmstepd: error: couldn't chdir to `/home/u': No such file or directory: going to /tmp instead\nstep 3",
        "none",
        None,
    ),
    "a bar before the word": (BAR + "Killed", "killed", None),
    "a bar before a rank": (BAR + "[rank3]: OSError: [Errno 5] Input/output error", "storage-error", 3),
    "a bar and nothing else": ("training begins\n" + BAR, "none", None),
    "a plain exception": ("step 3 loss 2.1\nException: shard 7 is not in the manifest", "exception", None),
    "a plain exception, measured": ("step 3 loss 2.1\nException: 0", "none", None),
    "a spawned process": ("Exception: process 2 terminated with exit code 17", "unknown", 2),
    "ray's own process": (
        "(worker pid=7) [2026-01-02 03:04:05,227 E 19045 21937] logging.cc:97: Unhandled exception: what(): no more",
        "exception",
        None,
    ),
    "ascend, the runtime": (
        "step 3\nEH9999: Inner Error!\n  rtStreamSync execute failed, reason=[aicore]", "unknown", None,
    ),
    "ascend, a collective": (
        "RuntimeError: ACL stream synchronize failed.\n"
        "EI0002: [PID: 7] The wait execution of the Notify register times out. Reason: none from remote rank: [3].",
        "collective-timeout",
        None,
    ),
    "a box of rich, whose upper part is not here": (
        "\u2502 \u2771 245 \u2502   \u2502   raise ChildFailedError(   \u2502\n\u2570\u2500\u2500\u256f\nChildFailedError:\n"
        "Root Cause (first observed failure):\n[0]:\n  rank      : 0 (local_rank: 0",
        "unknown",
        0,
    ),
    "hydra's table": (HYDRA + "=   PID 7 RUNNING AT n7\n=   EXIT CODE: 139", "segfault", None),
    "hydra's table, a plain code": (HYDRA + "=   EXIT CODE: 2", "unknown", None),
    "told of, not of this run": ("step 1 loss 2.0\nNo optimizer state was asked for", "none", None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_excerpts(name):
    text, code, rank = CASES[name]
    failure = read(text).failure
    assert failure.answer == code, failure
    assert (failure.finding.rank if failure.finding else None) == rank


def test_the_exception_is_named_where_its_message_is_cut_off():
    failure = read(IPYTHON).failure
    assert failure.confidence == "likely"
    assert failure.finding.title == "ZeroDivisionError cut off before its message"


def test_ascend_names_the_rank_in_the_middle():
    assert (
        clean("[ERROR] 2026-01-02-03:04:05 (PID:7, Device:1, RankID:9) ERR02200 DIST call hccl api failed.").rank == 9
    )


def test_rays_own_processes_name_a_level():
    assert clean("[2026-01-02 03:04:05,227 E 19045 21937] (raylet) node_manager.cc:97: no answer").level == "E"
