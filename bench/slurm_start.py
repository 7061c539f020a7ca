"""From the command to the first line of the ranks on a real Slurm: `drumbeat submit` against plain `sbatch` with srun.

    .venv/bin/python bench/slurm_start.py [--rounds 5] [--nodes 2]      (root on Debian, as tests/bench/cluster.py)

Rounds alternate, so that whatever else the machine does hits both; medians are compared. Beside the time it shows the CPU time of
everything until the job's end, Slurm's daemons included, which a busy machine changes less (root's control group `cpuacct`).
"""

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.bench.cluster import HEAD, Cluster, why_not

from drumbeat.bundle.build import cached_bundle

RANK = "import os, time; open(os.environ['MARK'] + os.environ.get('SLURM_NODEID', ''), 'w').write(str(time.time()))"


class CpuTime:
    """CPU seconds of this process and all below it, in a control group of its own; 0 where there is none."""

    def __init__(self):
        self.folder = Path("/sys/fs/cgroup/cpuacct") / f"drumbeat-bench-{os.getpid()}"
        try:
            self.folder.mkdir()
            (self.folder / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            self.folder = None

    def now(self):
        return int((self.folder / "cpuacct.usage").read_text()) / 1e9 if self.folder else 0.0

    def close(self):
        if self.folder:
            (self.folder.parent / "cgroup.procs").write_text(str(os.getpid()))
            with contextlib.suppress(OSError):  # a process that is still ending
                self.folder.rmdir()


def measure(cluster, argv, mark, nodes, cpu):
    """Seconds until the last rank has written its mark, and CPU seconds until the job's end."""
    for old in Path(cluster.home).glob(f"{mark.name}*"):
        old.unlink()
    used, begin = cpu.now(), time.time()
    done = cluster.run(HEAD, argv)
    assert done.returncode == 0, done.stderr
    job = "".join(filter(str.isdigit, done.stdout.split("slurm://bench/")[-1].split()[0]))
    while len(marks := list(Path(cluster.home).glob(f"{mark.name}*"))) < nodes or not all(m.read_text() for m in marks):
        time.sleep(0.02)
        assert time.time() - begin < 120, f"no marks after 120 s: {done.stdout}"
    first = max(float(each.read_text()) for each in marks) - begin
    cluster.wait(int(job), ["COMPLETED"])
    return first, cpu.now() - used


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=2)
    args = parser.parse_args()
    if why_not():
        sys.exit(why_not())
    base = tempfile.mkdtemp(prefix="drumbeat-bench-", dir="/var/tmp")
    os.chmod(base, 0o755)
    cpu = CpuTime()
    cluster = Cluster(base, {f"n{number}": str(10 + number) for number in range(args.nodes)})
    try:
        cluster.up()
        home = Path(cluster.home)
        shutil.copyfile(cached_bundle(dict(os.environ)), home / "drumbeat.pyz")
        (home / "rank.py").write_text(RANK)
        mark = home / "mark"
        (home / "job.yaml").write_text(
            f"nodes: {args.nodes}\nranks-per-node: 1\ntime: 10m\nenv: {{MARK: {mark}}}\ncommand: python3 {home}/rank.py\n"
        )
        (home / "plain.sh").write_text(
            f"#!/bin/sh\nexport MARK={mark}\nsrun --ntasks-per-node=1 python3 {home}/rank.py\n"
        )
        plain = [
            "sbatch",
            "--parsable",
            f"--nodes={args.nodes}",
            "--time=10",
            "--output=/dev/null",
            str(home / "plain.sh"),
        ]
        ours = [sys.executable, str(home / "drumbeat.pyz"), "submit", str(home / "job.yaml")]
        measure(cluster, ours, mark, args.nodes, cpu)  # warms the page cache
        rows = [
            (measure(cluster, plain, mark, args.nodes, cpu), measure(cluster, ours, mark, args.nodes, cpu))
            for _ in range(args.rounds)
        ]
    finally:
        cluster.down()
        shutil.rmtree(base, ignore_errors=True)
        cpu.close()
    print(f"{args.nodes} nodes, {args.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for what, place in (("until the last rank's first line", 0), ("CPU time until the job's end", 1)):
        pairs = [(by_hand[place], under[place]) for by_hand, under in rows]
        by_hand, under = (statistics.median(column) for column in zip(*pairs))
        more = ", ".join(f"{b - a:.2f}" for a, b in pairs)
        print(
            f"{what}: plain sbatch {by_hand:.2f} s, drumbeat submit {under:.2f} s; {under - by_hand:.2f} more ({more})"
        )


if __name__ == "__main__":
    main()
