"""What following a run costs: reading the last second of a run of a million metric lines, against one that has just begun.

    python bench/follow.py [--lines 1000000]

Both run folders are written to a temporary place. One second adds 100 lines to each in turn, and its Follower reads them; what
is compared is processor time, in one process, second by second. A/A is how far two halves of the young run are apart.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from typing import List, Optional

from drumbeat.base.order import Order, dump_order
from drumbeat.runfolder.files import replace, replace_json
from drumbeat.runfolder.follow import Follower
from drumbeat.runfolder.layout import SCHEMA, RunFolder
from drumbeat.runfolder.run import Run

PER_SECOND = 100  # lines: 10 reports per second from each of 10 ranks
ROUNDS = 400
AT_ONCE = 20_000  # lines


def make(path: str) -> Run:
    folder = RunFolder(path)
    os.makedirs(folder.node(0).path)
    order = Order(
        "bench", "bench", 0.0, ("true",), 1, 10, "ranks", "", "/", path, "localhost", "local",
    )  # fmt: skip
    replace(folder.order, dump_order(order))
    replace_json(folder.run_json, {"schema": SCHEMA, "run_id": "bench", "created": 0.0})
    return Run.open(path)


def lines(first: int, count: int) -> str:
    made = []
    for number in range(first, first + count):
        step = 1_000_000 + number // 10
        record = {
            "t": 1794700000.0 + number / PER_SECOND,
            "rank": number % 10,
            "kind": "step",
            "step": step,
            "loss": 2.345,
        }
        made.append(json.dumps({**record, "tokens": 4096}))
    return "\n".join(made) + "\n"


class Followed:
    """A run that grows, and its follower."""

    def __init__(self, path: str) -> None:
        self.run = make(path)
        self.file = os.open(self.run.folder.node(0).metrics, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.follower, self.written = Follower(self.run), 0

    def grow(self, count: int) -> None:
        os.write(self.file, lines(self.written, count).encode())
        self.written += count

    def second(self) -> float:
        """Write one second of metrics, then read it; the processor time that reading took."""
        self.grow(PER_SECOND)
        begin = time.process_time()
        records = self.follower.poll()
        spent = time.process_time() - begin
        assert len(records) == PER_SECOND and not self.follower.behind
        return spent


def measure(total: int) -> None:
    with tempfile.TemporaryDirectory(prefix="drumbeat-bench-") as place:
        young, old = (Followed(os.path.join(place, name)) for name in ("young", "old"))
        reading = 0.0
        while old.written < total:
            old.grow(AT_ONCE)
            begin = time.process_time()
            while old.follower.poll() or old.follower.behind:
                pass
            reading += time.process_time() - begin
        per_line = reading / old.written
        pairs = [(young.second(), old.second()) for _ in range(ROUNDS)]
        begins, lasts = (statistics.median(side) for side in zip(*pairs))
        halves = [statistics.median(pair[0] for pair in pairs[half::2]) for half in (0, 1)]
        begin = time.process_time()
        assert old.run.progress().step
        status = time.process_time() - begin
        size = os.path.getsize(old.run.folder.node(0).metrics)
    print(f"one second ({PER_SECOND} lines) of a run that has just begun   {begins * 1000:.3f} ms")
    print(f"one second after {total:,} lines ({size / 1e6:.0f} MB)           {lasts * 1000:.3f} ms")
    print(f"ratio {lasts / begins:.3f}, A/A {abs(halves[0] / halves[1] - 1):.3f}")
    print(f"all lines, as they came: {per_line * 1e6:.1f} us per line")
    print(f"step and speed for `status`, from the first and last lines: {status * 1000:.0f} ms")
    print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=1_000_000)
    measure(parser.parse_args(argv).lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
