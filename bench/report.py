"""What `report`, `status` and `watch --once` of a large run cost: 1,250 nodes with 8 GPUs each, 1.8 million reports of steps.

    PYTHONPATH=src:. python bench/report.py [--nodes 1250] [--gpus 8] [--steps 180] [--keep FOLDER]

A run folder is written as agents write it (also the sums that each adds to its metrics), then each command is run once in
a process of its own: processor time, and the most memory that it used.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile

from tests.trees.archetypes import build

from drumbeat.base.proc import start_time
from drumbeat.base.record import to_plain
from drumbeat.machine.gather import gather
from drumbeat.machine.replay import FolderHost
from drumbeat.runfolder.files import EventLog, decode, replace_json
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.records import parse_metric, so_far_line
from watch import HISTORY, Recording

SO_FAR_EVERY = 8 << 10
STEP = 4


def record(path: str, nodes: int, gpus: int, steps: int) -> int:
    """Write the run; return the number of its records."""
    recording = Recording(path, nodes, gpus, STEP, max(HISTORY, steps * STEP))
    with tempfile.TemporaryDirectory() as tree:
        build("dgx-h100", tree, 0)
        facts, lines = to_plain(gather(FolderHost(tree))), 0
    for node in range(nodes):
        at, progress, unsaid = recording.folder.node(node), Progress(), 0
        replace_json(at.facts, facts)
        with open(at.metrics, "w", encoding="utf-8") as file:
            for step in range(steps):
                t = recording.begin + step * STEP
                for gpu in range(gpus):
                    line = recording._metric(t, node, gpu, step * STEP)
                    metric = parse_metric(decode(line) or {}, node)
                    assert metric
                    progress.add(metric)
                    unsaid, lines = unsaid + len(line), lines + 1
                    file.write(line + "\n")
                if unsaid > SO_FAR_EVERY:
                    file.write(so_far_line(progress.snapshot(), t))
                    unsaid = 0
        with open(at.telemetry, "w", encoding="utf-8") as file:
            for second in range(0, steps * STEP, 12):
                file.write(recording._sample(recording.begin + second, node) + "\n")
                lines += 1
        events = EventLog(at.events, node)
        for gpu in range(gpus):
            events.write(
                "rank-started",
                {"rank": node * gpus + gpu, "local_rank": gpu, "pid": 1000 + gpu, "cpus": "0-7", "attempt": 0},
            )
        events.close()
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, default=1250)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("--keep", help="write the folder here, or use the one that is here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        path = os.path.abspath(args.keep) if args.keep else os.path.join(temporary, "run")
        if not os.path.exists(path):
            os.makedirs(path)
            print(f"{record(path, args.nodes, args.gpus, args.steps):,} records")
        with open(os.path.join(path, "run.json"), encoding="utf-8") as file:
            about = json.load(file)
        about["desk"] = {"host": socket.gethostname(), "pid": os.getpid(), "started": start_time(os.getpid())}
        replace_json(os.path.join(path, "run.json"), about)  # so it is running
        size = sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(path) for name in names)
        print(f"{size / 1e6:.0f} MB")
        for words in (["status"], ["watch", "--once"], ["report"], ["report", "--json"]):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            code = (
                "import resource,sys\n"
                "from drumbeat.cli.entry import main\n"
                "try:\n    code = main(sys.argv[1:])\nexcept SystemExit as end:\n    code = end.code\n"
                "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, file=sys.stderr)\n"
            )
            done = subprocess.run(
                [sys.executable, "-c", code, words[0], path, *words[1:]], capture_output=True, text=True
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            memory = done.stderr.strip().rpartition("\n")[2]
            print(f"{' '.join(words):15} {seconds:6.1f} s CPU  {memory} MB  {len(done.stdout)} bytes", flush=True)
            if not done.stdout:
                print(done.stderr[-2000:])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
