"""What drumbeat says of ranks that hang, work or fail on a GPU: `python bench/gpu_live.py [--only WORDS]`.

Each row is a real run of two ranks that share one GPU and sum a number over gloo in every step. Prints what the run said while it
lasted (with the seconds since its start) and at its end, beside what is true, to be read by a person. Needs torch and a GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAM = """
import sys, time, torch, torch.distributed as dist
kind, rank = sys.argv[1], None
dist.init_process_group("gloo")
rank = dist.get_rank()
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
def work(count):
    for _ in range(count):
        torch.mm(a, a)
def odd(step):
    if kind == "endless kernel":
        torch.cuda._sleep(1 << 60)
        torch.cuda.synchronize()
    elif kind == "long loop":
        until = time.monotonic() + 75
        while time.monotonic() < until:
            work(500)
            torch.cuda.synchronize()
    elif kind == "long queue":
        work(45_000)
        torch.cuda.synchronize()
    elif kind == "assert on the device":
        torch.zeros(4, device="cuda")[torch.tensor([7], device="cuda")] += 1
        torch.cuda.synchronize()
    elif kind == "out of memory":
        torch.empty(200 << 30, dtype=torch.uint8, device="cuda")
steps = 40 if kind == "slow rank" else 30
for step in range(steps):
    work(1500 if kind == "slow rank" and rank == 1 else 300)
    torch.cuda.synchronize()
    if rank == 1 and step == 20:
        odd(step)
    total = torch.ones(1)
    dist.all_reduce(total)
    if rank == 0:
        print(f"step {step + 1}/{steps} loss {1 / (step + 1):.4f}", flush=True)
dist.destroy_process_group()
"""

TRUTH = {
    "endless kernel": "rank 1 never comes out of its kernel: said early, ended as a hang",
    "long loop": "healthy: rank 1 works on the GPU for 75 s and goes on",
    "long queue": "healthy: rank 1 waits about 70 s for the work that it queued, and goes on",
    "slow rank": "rank 1 has five times the GPU work of rank 0 in every step",
    "assert on the device": "rank 1 fails: an index out of range on the device",
    "out of memory": "rank 1 fails: it asks for 200 GiB",
}


def row(kind: str, place: Path) -> None:
    program = place / "program.py"
    program.write_text(PROGRAM)
    job = place / "job.yaml"
    job.write_text("checks: {hang: stop}\n")
    argv = [sys.executable, "-m", "drumbeat", "run", str(job), "--site", "localhost", "--ranks-per-node", "2"]
    argv += ["--runs", str(place / "runs"), "--", sys.executable, str(program), kind]
    print(f"\n=== {kind}: {TRUTH[kind]}", flush=True)
    begun = time.monotonic()
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=place) as run:
        assert run.stdout
        for line in run.stdout:
            if not line.startswith("step "):
                print(f"{time.monotonic() - begun:6.1f} {line}", end="", flush=True)
    print(f"{time.monotonic() - begun:6.1f} exit code {run.returncode}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows by a part of their names, separated by commas")
    wanted = parser.parse_args().only.split(",")
    for kind in TRUTH:
        if any(word in kind for word in wanted):
            with tempfile.TemporaryDirectory(prefix="drumbeat-gpu-live-") as name:
                row(kind, Path(name))


if __name__ == "__main__":
    main()
