"""The end of the batch script, run by bash with tools that only write down how they were called."""

import os
import subprocess

import pytest

from drumbeat.backends.slurm.render import after_lines

TOOL = """#!/bin/sh
case "$(basename $0) $*" in
  squeue*%x*) echo "$EXCLUDED" ;;
  squeue*%T*) echo "7 $STATE" ;;
  *) echo "$(basename $0) $*" >> "$CALLS" ;;
esac
"""


def run(folder, verdict, state="RUNNING", excluded="", code=1):
    tools = folder / "bin"
    tools.mkdir()
    for name in ("squeue", "scontrol"):
        (tools / name).write_text(TOOL)
        (tools / name).chmod(0o755)
    (folder / "verdict").write_text(verdict)
    calls = folder / "calls"
    calls.touch()
    lines = [f"RUN={folder}", f"BASE={folder}", f"code={code}", *after_lines("job.sh")]
    environ = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "STATE": state, "EXCLUDED": excluded}
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)], env={**environ, "CALLS": str(calls)}, cwd=folder, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return done.returncode, calls.read_text().splitlines(), done.stdout


@pytest.mark.parametrize(
    ("verdict", "state", "excluded", "calls", "code"),
    [
        ("code=0\nnext=end\nlost=\n", "RUNNING", "", [], 0),
        ("code=143\nnext=end\nlost=\n", "COMPLETING", "", [], 143),
        ("code=75\nnext=requeue\nlost=\n", "RUNNING", "", ["scontrol requeue 7"], 75),
        # scancel, scontrol requeue, preemption: Slurm is at it already
        ("code=75\nnext=requeue\nlost=\n", "COMPLETING", "", [], 75),
        ("code=75\nnext=requeue\nlost=\n", "CANCELLED", "", [], 75),
        (
            "code=69\nnext=requeue\nlost=n2\n", "RUNNING", "",
            ["scontrol requeuehold 7", "scontrol update JobId=7 ExcNodeList=n2", "scontrol release 7"], 69,
        ),
        # what the user excluded, and nodes lost before, stay excluded
        (
            "code=69\nnext=requeue\nlost=n2\n", "RUNNING", "n[7-9]",
            ["scontrol requeuehold 7", "scontrol update JobId=7 ExcNodeList=n[7-9],n2", "scontrol release 7"], 69,
        ),
        ("code=69\nnext=requeue\nlost=n2\n", "COMPLETING", "", ["scontrol update JobId=7 ExcNodeList=n2"], 69),
        ("", "RUNNING", "", ["scontrol show job 7"], 1),  # was it preempted? Nothing says so
    ],
)  # fmt: skip
def test_what_follows(tmp_path, verdict, state, excluded, calls, code):
    assert run(tmp_path, verdict, state, excluded)[:2] == (code, calls)


@pytest.mark.parametrize(
    "verdict",
    [
        "code=$(touch hacked)\nnext=requeue;touch hacked\nlost=`touch hacked`\n",
        "touch hacked\ncode=0; touch hacked\nnext=end\n",
        "lost=a$(touch hacked)\nnext=requeue && touch hacked\n",
    ],
)
def test_nothing_in_the_verdict_is_ever_run(tmp_path, verdict):
    code, calls, _ = run(tmp_path, verdict)
    assert code == 1 and calls == ["scontrol show job 7"] and not (tmp_path / "hacked").exists()
