"""Launch commands as people have them, on two emulated nodes: one world each. The ranks need no torch, the launchers do."""

import importlib.util
import os
import sys

import pytest

from tests.conftest import need_torch

need_torch("the launchers need torch")

WHO = "import os; print('who', *(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'MASTER_PORT')), os.environ.get('FOO', ''))\n"
BIN = os.path.dirname(sys.executable)


def needs(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} comes with the dev extra")


def worlds(drumbeat, *command, nodes=2):
    (drumbeat.folder / "who.py").write_text(WHO)
    environ = {
        **os.environ,
        "PATH": BIN + os.pathsep + os.environ["PATH"],
        "DS_ACCELERATOR": "cpu",
    }
    done = drumbeat("run", "--nodes", nodes, "--", *command, timeout=170, env=environ)
    assert done.returncode == 0, done.stderr
    said = [line.split("who ")[1].split() for line in done.stdout.splitlines() if "who " in line]
    assert len({port for _, _, port, *_ in said}) == 1, done.stdout
    assert {size for _, size, *_ in said} == {str(len(said))}
    return sorted(int(rank) for rank, *_ in said), done


def test_accelerate_by_its_configuration_file(drumbeat):
    needs("accelerate")
    config = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 2\n"
    (drumbeat.folder / "a.yaml").write_text(config + "machine_rank: 0\nmixed_precision: 'no'\nuse_cpu: false\n")
    ranks, _ = worlds(
        drumbeat, sys.executable, "-m", "accelerate.commands.launch", "--config_file", "a.yaml", "--multi_gpu", "who.py"
    )
    assert ranks == [0, 1, 2, 3]
