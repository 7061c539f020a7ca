"""The live verdict of a failed run and what `drumbeat diagnose RUN` says are one and the same."""

import json
import os
import sys

import pytest

from drumbeat.cli import main
from tests.runs.own_order import start_with_timing

PROGRAM = """
import os, signal, sys, time
rank, case = os.environ["RANK"], sys.argv[1]
if rank == "0":
    time.sleep(0.5 if case == "peer" else 600)  # else it is ended by the lead
    raise RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1234")
if case == "oom-out":
    print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", flush=True)
    sys.exit(1)
if case == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if case == "silent":
    os._exit(3)
if case == "words":
    sys.exit("cannot read the data: shard 7 is missing")
time.sleep(0.2)
raise ValueError("batch size 3 cannot be divided by 2")
"""
CASES = {
    "oom-out": ("gpu-out-of-memory", 1),
    "kill": ("killed", 137),
    "silent": ("exit-code", 3),
    "words": ("file-missing", 1),
    "peer": ("layout-mismatch", 1),
}


@pytest.mark.parametrize("case", list(CASES))
def test_live_and_later_agree(drumbeat, capsys, case):
    (drumbeat.folder / "p.py").write_text(PROGRAM)
    # Where both ranks fail, the lead waits for the second however slow the machine is; else for as long as it would by itself.
    settle = 120.0 if case == "peer" else 0.7
    process, _ = start_with_timing(drumbeat, (sys.executable, "p.py", case), dict(os.environ), nodes=1, settle=settle)
    process.communicate(timeout=300)
    summary = json.loads((drumbeat.run_folder() / "summary.json").read_text())
    live = summary["failure"]
    assert main(["diagnose", str(drumbeat.run_folder()), "--json"]) == 0
    later = json.loads(capsys.readouterr().out)["failure"]
    code, exit_code = CASES[case]
    assert (process.returncode, live["code"], live["rank"]) == (exit_code, code, 1), live
    found = later["finding"]
    assert (found["code"], found["rank"], found["title"]) == (live["code"], live["rank"], live["title"])
    assert [os.path.basename(each["file"] or "") for each in found["evidence"][:1]] == [
        os.path.basename(each["file"] or "") for each in live["evidence"][:1]
    ]
