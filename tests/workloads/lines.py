"""Ten command lines as people have them, each on two nodes of two ranks: one world, the right exit code, and the right rank
after a kill. With the real launchers; uv and nsys, where they are not installed, are stand-ins that run what follows them."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Callable, List

from tests.workloads.runner import LATE, MPIRUN, SECONDS, Done, run

PROGRAM = """
import os, signal, sys, time
print("who", *(os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")), flush=True)
if os.environ.get("KILL_RANK"):
    time.sleep(1)
    if os.environ["RANK"] == os.environ["KILL_RANK"]:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
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
STAND_INS = {
    "uv": '#!/bin/sh\n[ "$1" = run ] && shift\nexec "$@"\n',
    "nsys": '#!/bin/sh\nshift 3\nexec "$@"\n',
}
LINES = {
    "env": "env FOO=1 torchrun --nproc_per_node=2 p.py",
    "uv run": "uv run torchrun --nproc_per_node=2 p.py",
    "bash, torchrun --standalone into tee": "bash standalone.sh",
    "bash, torchrun with $NNODES": "bash nnodes.sh",
    "accelerate with a config file": "accelerate launch --config_file a.yaml --multi_gpu p.py",
    "deepspeed": "deepspeed --num_gpus 2 p.py",
    "fabric run": "fabric run --accelerator=cpu --devices=2 p.py",
    "python -X -m": "python -X dev -W ignore -m torch.distributed.run --nproc_per_node=2 p.py",
    "nsys": "nsys profile -o r torchrun --nproc_per_node=2 p.py",
    "mpirun before drumbeat, 4 tasks": "python p.py",
}


@dataclass
class LineRow:
    """A cell that begins with `no:` is not as it should be."""

    name: str
    command: str = ""
    world: str = ""
    killed: str = ""
    source: str = ""  # the drumbeat with which it was seen

    @property
    def bad(self) -> List[str]:
        return [name for name, value in asdict(self).items() if value.startswith("no:")]


class Lines:
    """`bins` is where torchrun, accelerate, deepspeed and fabric are."""

    def __init__(self, bins: str, work: Path) -> None:
        self.bins, self.work = bins, work
        self.count = 0

    def row(self, row: LineRow, keep: Callable[[LineRow], None]) -> LineRow:
        row.command = LINES[row.name]
        if not row.world or row.world.startswith(LATE):
            row.world = self.one_world(row.name)
            keep(row)
        if not row.killed or row.killed.startswith(LATE):
            row.killed = self.after_a_kill(row.name)
            keep(row)
        return row

    def one_world(self, name: str) -> str:
        done = self.start(name)
        if done.late or done.code:
            return f"{LATE} {SECONDS:g} s" if done.late else f"no: exit code {done.code}"
        said = {tuple(line.split("who ")[1].split()) for line in done.out.splitlines() if "who " in line}
        ranks, sizes, ports = (sorted({words[place] for words in said}) for place in range(3))
        one = ranks == ["0", "1", "2", "3"] and sizes == ["4"] and len(ports) == 1 and len(said) == 4
        return "4 ranks in one world, exit 0" if one else f"no: ranks {ranks}, sizes {sizes}, ports {ports}"

    def after_a_kill(self, name: str) -> str:
        done = self.start(name, KILL_RANK="3")
        if done.late:
            return f"{LATE} {SECONDS:g} s"
        failed = next((line for line in done.out.splitlines() if line.startswith("failed ")), "no line `failed`")
        wanted = done.code == 137 or (name.startswith("mpirun") and done.code)
        right = wanted and "rank 3 on" in failed and "killed by SIGKILL, not by drumbeat" in failed
        return (
            f"rank 3: killed by SIGKILL, not by drumbeat, exit {done.code}"
            if right
            else f"no: {failed}, exit {done.code}"
        )

    def start(self, name: str, **variables: str) -> Done:
        self.count += 1
        folder = self.work / f"line-{list(LINES).index(name)}-{self.count}"
        stand_ins = folder / "bin"
        stand_ins.mkdir(parents=True)
        for file, text in FILES.items():
            (folder / file).write_text(text)
        for program, text in STAND_INS.items():
            if shutil.which(program) is None:
                (stand_ins / program).write_text(text)
                (stand_ins / program).chmod(0o755)
        path = os.pathsep.join([self.bins, os.environ["PATH"], str(stand_ins)])
        environ = {**os.environ, "PATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **variables}
        drumbeat = [sys.executable, "-m", "drumbeat", "run", "--runs", str(folder / "runs")]
        if name.startswith("mpirun"):
            argv = [*MPIRUN, "-n", "4", *drumbeat, "--", *LINES[name].split()]
        else:
            argv = [*drumbeat, "--nodes", "2", "--", *LINES[name].split()]
        return run(argv, str(folder), environ)
