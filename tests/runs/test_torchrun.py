"""torchrun, started once per node by our driver: ranks where they belong, and the true exit code and cause."""

import json
import os
import sys

import pytest

from tests.conftest import need_torch

need_torch("torchrun needs torch")

TRAIN = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(x)
print(dist.get_rank(), os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"], int(x.item()), os.environ.get("FOO"),
      *sys.argv[1:], flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def path_of_this_python(monkeypatch):
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"])


def test_two_nodes_behind_wrappers_and_flags_of_the_users_command(drumbeat, tmp_path):
    """One rank per node, as each imports torch; four ranks below the real torchrun: test_scripts.py."""
    (drumbeat.folder / "train.py").write_text(TRAIN)
    launcher = tmp_path / "elsewhere" / "torchrun"  # found by its first line: no python is beside it
    launcher.parent.mkdir()
    launcher.write_text(f"#!{sys.executable}\nraise SystemExit('drumbeat starts torch.distributed.run itself')\n")
    launcher.chmod(0o755)
    flags = "--nproc_per_node 1 --standalone --rdzv-backend c10d --rdzv_endpoint nowhere:1 --monitor-interval 0.1"
    command = ("env", "FOO=bar", "nice", launcher, "--nnodes=2", *flags.split(), "train.py", "--lr", "1")
    done = drumbeat("run", "--site", "localhost", "--", *command)
    assert done.returncode == 0, done.stderr
    lines = sorted(line.split("] ")[-1] for line in done.stdout.splitlines())
    assert lines == ["0 0 0 3 bar --lr 1", "1 0 1 3 bar --lr 1"]
    replaced = done.stderr.split("folder")[0]  # what is replaced is shown
    assert "--rdzv_endpoint=nowhere:1" in replaced and "--standalone" in replaced
    assert "--monitor-interval" not in replaced


def test_a_segfault_is_reported_as_one(drumbeat):
    (drumbeat.folder / "train.py").write_text(
        "import ctypes, os, time\nctypes.string_at(0) if os.environ['RANK'] == '1' else time.sleep(600)\n"
    )
    flags = ("--launcher", "torchrun", "--ranks-per-node", 2)
    done = drumbeat("run", *flags, "--", sys.executable, "train.py")
    assert done.returncode == 139, done.stderr
    failure = json.loads((drumbeat.run_folder() / "summary.json").read_text())["failure"]
    assert failure["code"] == "segfault" and failure["rank"] == 1


def test_a_rank_that_torchrun_ended_is_not_the_one_that_failed(drumbeat):
    """Rank 0 gives up waiting for rank 1, and torchrun then ends rank 1: nobody outside did."""
    (drumbeat.folder / "train.py").write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n    open('up', 'w').close()\n    time.sleep(600)\n"
        "while not os.path.exists('up'):\n    time.sleep(0.1)\n"
        "sys.exit('RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation')\n"
    )
    flags = ("--launcher", "torchrun", "--ranks-per-node", 2)
    done = drumbeat("run", *flags, "--", sys.executable, "train.py")
    assert done.returncode == 1, done.stderr
    failure = json.loads((drumbeat.run_folder() / "summary.json").read_text())["failure"]
    assert (failure["code"], failure["rank"]) == ("rank-absent", 1)
    assert "SIGTERM" not in done.stderr.split("failed ")[-1]


@pytest.mark.usefixtures("path_of_this_python")
def test_without_torch_in_the_commands_interpreter(drumbeat, tmp_path):
    import venv

    venv.create(tmp_path / "bare", with_pip=False)
    (drumbeat.folder / "train.py").write_text("print(1)")
    done = drumbeat("run", "--launcher", "torchrun", "--", tmp_path / "bare" / "bin" / "python", "train.py")
    assert done.returncode == 127 and "needs torch in" in done.stderr
