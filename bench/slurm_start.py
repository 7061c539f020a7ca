"""From the command to the first line of the ranks on a real Slurm: `drumbeat submit` against plain `sbatch` with srun.

    .venv/bin/python bench/slurm_start.py [--rounds 5] [--nodes 2]      (root on Debian, as tests/bench/cluster.py)

Rounds alternate, so that whatever else the machine does hits both; medians are compared.
"""

import argparse
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


def measure(cluster, argv, mark, nodes):
    """Seconds until the last rank has written its mark."""
    for old in Path(cluster.home).glob(f"{mark.name}*"):
        old.unlink()
    begin = time.time()
    done = cluster.run(HEAD, argv)
    assert done.returncode == 0, done.stderr
    job = "".join(filter(str.isdigit, done.stdout.split("slurm://bench/")[-1].split()[0]))
    while len(marks := list(Path(cluster.home).glob(f"{mark.name}*"))) < nodes or not all(m.read_text() for m in marks):
        time.sleep(0.02)
        assert time.time() - begin < 120, f"no marks after 120 s: {done.stdout}"
    first = max(float(each.read_text()) for each in marks) - begin
    cluster.wait(int(job), ["COMPLETED"])
    return first


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=2)
    args = parser.parse_args()
    if why_not():
        sys.exit(why_not())
    base = tempfile.mkdtemp(prefix="drumbeat-bench-", dir="/var/tmp")
    os.chmod(base, 0o755)
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
        measure(cluster, ours, mark, args.nodes)  # warms the page cache
        rows = [
            (measure(cluster, plain, mark, args.nodes), measure(cluster, ours, mark, args.nodes))
            for _ in range(args.rounds)
        ]
    finally:
        cluster.down()
        shutil.rmtree(base, ignore_errors=True)
    by_hand, under = (statistics.median(column) for column in zip(*rows))
    load = os.getloadavg()[0]
    print(
        f"{args.nodes} nodes, {args.rounds} rounds, load {load:.1f}: plain sbatch {by_hand:.2f} s, drumbeat submit {under:.2f} s"
    )
    print(f"more: {under - by_hand:.2f} s; each round: {', '.join(f'{b - a:.2f}' for a, b in rows)}")


if __name__ == "__main__":
    main()
