"""False verdicts about world and affinity: healthy jobs, started in many ways and surroundings, with checks that end a run.

    python bench/worlds.py [--jax PYTHON] [--ray PYTHON] [WORD ...]

Each row is a real run of 2 ranks for some seconds with `checks: {world: stop, affinity: stop}`: ranks of drumbeat's own and each
launcher (torchrun, accelerate, deepspeed, mp.spawn, mpirun, scripts around them), with variables as pods and other jobs leave
them. A row is false if its run does not finish, or if something is said against its world or affinity. WORD chooses rows by name.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

SECONDS = 7  # of work: several looks
LONGEST = 900  # seconds that a row may take: DeepSpeed compiles an extension at its first start
# Ranks that know nothing of torch: a star around MASTER_ADDR:MASTER_PORT, or where that is the launcher's own store, beside it.
STAR = """
import os, socket, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
port = int(os.environ["MASTER_PORT"]) + (17 if "TORCHELASTIC_RUN_ID" in os.environ else 0)
if rank == 0:
    server = socket.create_server((os.environ["MASTER_ADDR"], port), backlog=world)
    peers = [server.accept()[0] for _ in range(world - 1)]
else:
    while True:
        try:
            peers = [socket.create_connection((os.environ["MASTER_ADDR"], port))]
            break
        except OSError:
            time.sleep(0.1)
for step in range(1, 10 * SECONDS + 1):
    for peer in peers:
        peer.send(b"x")
    assert all(peer.recv(1) for peer in peers)
    if rank == 0 and step % 5 == 0:
        print(f"step {step} loss {1 / step:.3f}", flush=True)
    time.sleep(0.1)
""".replace("SECONDS", str(SECONDS))
TORCH = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(1, 10 * SECONDS + 1):
    dist.all_reduce(torch.ones(8))
    time.sleep(0.1)
dist.destroy_process_group()
""".replace("SECONDS", str(SECONDS))
SPAWN = """
import os, time, torch, torch.distributed as dist, torch.multiprocessing as mp
def work(rank):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29611", rank=rank, world_size=2)
    for step in range(10 * SECONDS):
        dist.all_reduce(torch.ones(8))
        time.sleep(0.1)
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
""".replace("SECONDS", str(SECONDS))
DEEPSPEED = """
import os, time, torch, deepspeed, torch.distributed as dist
deepspeed.init_distributed("gloo")
for step in range(10 * SECONDS):
    dist.all_reduce(torch.ones(8))
    time.sleep(0.1)
""".replace("SECONDS", str(SECONDS))
JAX = """
import time, jax
jax.distributed.initialize()
assert jax.process_count() == 2
time.sleep(SECONDS)
""".replace("SECONDS", str(SECONDS))
RAY = """
import time, ray
ray.init(num_cpus=2, include_dashboard=False)
@ray.remote
def work(rank):
    time.sleep(SECONDS)
ray.get([work.remote(rank) for rank in range(2)])
""".replace("SECONDS", str(SECONDS))
# Helpers of a rank carry its variables, in whole or in part.
HELPERS = """
import os, subprocess, sys
few = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}
helpers = [subprocess.Popen(["sleep", "60"], env=env) for env in (few, dict(os.environ))]
exec(open("star.py").read())
for helper in helpers:
    helper.kill()
"""
PROGRAMS = {
    "star.py": STAR, "train.py": TORCH, "spawn.py": SPAWN, "ds.py": DEEPSPEED, "j.py": JAX, "r.py": RAY, "helpers.py": HELPERS,
    "mpi.sh": "RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29615 python star.py\n",
    "run.sh": "torchrun --nproc-per-node 2 --master-port 29612 star.py\n",
    "ranks.sh": 'cd "$(dirname "$0")" && exec env EXTRA=1 python star.py\n',
    "tee.sh": "python star.py 2>&1 | tee -a log.$RANK\n",
}  # fmt: skip
POD = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "PET_NNODES": "1",
    "PET_NODE_RANK": "0",
    "RUNAI_NUM_OF_GPUS": "2",
    "LOCAL_RANK": "0",
}
KUBEFLOW = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}
STALE = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
SURROUNDINGS: Dict[str, Dict[str, str]] = {
    "": {},
    "pod of Run:ai": POD,
    "pod of Kubeflow": KUBEFLOW,
    "stale variables": STALE,
}
TORCHRUN = ["torchrun", "--nproc-per-node", "2", "--master-port", "29613"]


class Row(NamedTuple):
    name: str
    command: List[str]
    flags: List[str]
    environ: Dict[str, str]
    prefix: List[str] = []


def rows(jax: Optional[str], ray: Optional[str]) -> Iterator[Row]:
    two, nodes = ["--ranks-per-node", "2"], ["--nodes", "2", "--ranks-per-node", "1", "--oversubscribe", "4"]
    ways: List[Tuple[str, List[str], List[str]]] = [
        ("ranks", ["python", "star.py"], two),
        ("ranks on 2 nodes", ["python", "star.py"], nodes),
        ("ranks with helpers", ["python", "helpers.py"], two),
        ("ranks in a script", ["bash", "ranks.sh"], two),
        ("ranks behind tee", ["bash", "tee.sh"], two),
        ("torchrun", [*TORCHRUN, "star.py"], []),
        ("torchrun in a script", ["bash", "run.sh"], []),
        ("torchrun in a script, once", ["bash", "run.sh"], [*two, "--launcher", "once"]),
    ]  # fmt: skip
    for where, environ in SURROUNDINGS.items():
        for name, command, flags in ways:
            yield Row(f"{name}{where and ', ' + where}", command, flags, environ)
    accelerate = [
        "accelerate",
        "launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
    ]
    for where in ("", "pod of Run:ai", "stale variables"):
        environ, after = SURROUNDINGS[where], where and ", " + where
        yield Row(f"torch{after}", ["python", "train.py"], two, environ)
        yield Row(f"torchrun with torch{after}", [*TORCHRUN, "train.py"], [], environ)
        yield Row(f"accelerate{after}", [*accelerate, "train.py"], [], environ)
        yield Row(f"mp.spawn{after}", ["python", "spawn.py"], ["--launcher", "once"], environ)
        yield Row(
            f"deepspeed{after}", ["deepspeed", "--num_gpus", "2", "ds.py"], [], {**environ, "DS_ACCELERATOR": "cpu"}
        )
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    yield Row("below mpirun", ["python", "star.py"], [], {}, mpirun)
    yield Row("mpirun inside", [*mpirun, "bash", "mpi.sh"], ["--launcher", "once"], {})
    if jax:
        yield Row("jax", [jax, "j.py"], two, {})
        yield Row("jax, pod of Run:ai", [jax, "j.py"], two, POD)
    if ray:
        yield Row("ray", [ray, "r.py"], ["--launcher", "once"], {})


def run(row: Row) -> str:
    """Run one; return what is false, or ''."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in PROGRAMS.items():
            Path(folder, name).write_text(text)
        here = os.path.dirname(sys.executable)
        environ = {
            **os.environ,
            **row.environ,
            "PATH": f"{here}:{os.environ['PATH']}",
        }
        job = {"site": "localhost", "checks": {"world": "stop", "affinity": "stop"}, "command": row.command}
        Path(folder, "job.yaml").write_text(json.dumps(job))
        words = [*row.prefix, f"{here}/drumbeat", "run", "job.yaml", *row.flags]
        try:
            done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=LONGEST)
        except subprocess.TimeoutExpired as late:
            return f"not over after {LONGEST} s: {(late.stdout or b'')[-700:].decode('utf-8', 'replace')}"
        wrong = [] if done.returncode == 0 else [f"exit code {done.returncode}: {(done.stdout + done.stderr)[-700:]}"]
        answers = []
        for path in Path(folder, "runs").glob("*/events.jsonl"):
            for line in path.read_text().splitlines():
                event = json.loads(line)
                told = event.get("verdict") or event.get("finding") or {}
                name = told.get("check") or told.get("code", "")
                if event["kind"] == "verdict" and name in ("world", "affinity", "environment"):
                    answers.append(f"{name} {told['answer']}")
                    if told["answer"] not in ("as planned", "unknown", "not pinned") and told.get("severity") not in (
                        "ok",
                        "info",
                    ):
                        wrong.append(f"{name}: {told['answer']}: {told.get('summary')}")
                elif event["kind"] == "finding" and told.get("severity") in ("error", "warning"):
                    wrong.append(f"{name}: {told['title']}")
        return "; ".join(wrong) if wrong else f"right ({', '.join(answers)})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--jax", help="a Python that has JAX")
    parser.add_argument("--ray", help="a Python that has Ray")
    args = parser.parse_args()
    chosen = [row for row in rows(args.jax, args.ray) if not args.words or any(word in row.name for word in args.words)]
    false = 0
    for row in chosen:
        missing = shutil.which(row.command[0], path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}") is None
        said = "left out: not installed" if missing else run(row)
        false += not said.startswith(("right", "left out"))
        print(f"{row.name:45} {said}", flush=True)
    print(f"false: {false} of {len(chosen)}; load {os.getloadavg()[0]:.0f}")
    return 1 if false else 0


if __name__ == "__main__":
    raise SystemExit(main())
