"""Ten command lines as people have them, each on two nodes of two ranks: one world, the right exit code, and the right rank
after a kill. With the real launchers, so it takes minutes: `make workloads`."""

import importlib.util
import os
import shutil
import sys

import pytest

BIN = os.path.dirname(sys.executable)
PROGRAM = """
import os, signal, sys, time
print("who", *(os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")), flush=True)
if os.environ.get("KILL_RANK"):
    time.sleep(1)
    if os.environ["RANK"] == os.environ["KILL_RANK"]:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(120)
"""
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 1
num_processes: 2
machine_rank: 0
mixed_precision: 'no'
use_cpu: false
"""
OURS = (
    "--nnodes=$NNODES --node_rank=$NODE_RANK --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT --nproc_per_node=2"
)
FILES = {
    "p.py": PROGRAM,
    "a.yaml": ACCELERATE,
    "standalone.sh": "torchrun --standalone --nproc_per_node=2 p.py 2>&1 | tee log.$NODE_RANK\necho done\n",
    "nnodes.sh": f"#!/bin/bash\nset -e\ntorchrun {OURS} p.py\n",
}
# Where these programs are not installed, what they do to a command line is: run what stands behind their own words.
STUBS = {
    "uv": '#!/bin/sh\n[ "$1" = run ] && shift\nexec "$@"\n',
    "nsys": '#!/bin/sh\nshift 3\nexec "$@"\n',
}
LINES = {
    "env": "env FOO=1 torchrun --nproc_per_node=2 p.py",
    "uv run": "uv run torchrun --nproc_per_node=2 p.py",
    "bash, standalone": "bash standalone.sh",
    "bash, $NNODES": "bash nnodes.sh",
    "accelerate with a config file": "accelerate launch --config_file a.yaml --multi_gpu p.py",
    "deepspeed": "deepspeed --num_gpus 2 p.py",
    "fabric run": "fabric run --accelerator=cpu --devices=2 p.py",
    "python -X -m": "python -X dev -W ignore -m torch.distributed.run --nproc_per_node=2 p.py",
    "nsys": "nsys profile -o r torchrun --nproc_per_node=2 p.py",
    "mpirun": "python p.py",
}
NEEDS = {"accelerate": "accelerate", "deepspeed": "deepspeed", "fabric": "lightning"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


def start(drumbeat, name, cache, **variables):
    words = LINES[name].split()
    package = NEEDS.get(words[0], "torch")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} comes with the dev extra")
    for file, text in FILES.items():
        (drumbeat.folder / file).write_text(text)
    stubs = drumbeat.folder / "stubs"
    stubs.mkdir(exist_ok=True)
    for program, text in STUBS.items():
        if shutil.which(program) is None:
            (stubs / program).write_text(text)
            (stubs / program).chmod(0o755)
    path = os.pathsep.join([BIN, os.environ["PATH"], str(stubs)])
    environ = {**os.environ, "PATH": path, "DS_ACCELERATOR": "cpu", "XDG_CACHE_HOME": cache, **variables}
    if name == "mpirun":
        if shutil.which("mpirun") is None:
            pytest.skip("mpirun: make test installs it")
        mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "4"]
        process = drumbeat.start("run", "--", *words, env=environ, prefix=mpirun)
        out = process.communicate(timeout=300)[0]
        return process.returncode, out, out
    done = drumbeat("run", "--nodes", 2, "--", *words, timeout=300, env=environ)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", list(LINES))
def test_one_world(drumbeat, name, cache):
    code, out, err = start(drumbeat, name, cache)
    assert code == 0, err
    said = {tuple(line.split("who ")[1].split()) for line in out.splitlines() if "who " in line}
    assert sorted(rank for rank, _, _ in said) == ["0", "1", "2", "3"], out
    assert {size for _, size, _ in said} == {"4"} and len({port for _, _, port in said}) == 1


@pytest.mark.parametrize("name", list(LINES))
def test_a_killed_rank_is_the_one_that_is_named(drumbeat, name, cache):
    code, _, err = start(drumbeat, name, cache, KILL_RANK="3")
    assert code == 137 or (name == "mpirun" and code), err
    assert "rank 3 on" in err and "killed from outside (SIGKILL)" in err, err
