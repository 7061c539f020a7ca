"""What reading printed metrics costs the agent: microseconds per line. python bench/printed.py"""

import time

from drumbeat.metrics.grammar import compiled
from drumbeat.metrics.printed import Reader

LINES = {
    "no metric (an NCCL log)": "nid001234:4242:4300 [3] NCCL INFO Channel 07/0 : 3[3] -> 4[4] via P2P/IPC/read",
    "no metric, but one of the words": "writing the loss curve to /scratch/project/run/plots, then going on with the next part",
    "a Megatron line": next(rule.rule.example for rule in compiled() if rule.rule.id == "megatron-iteration"),
    "a nanoGPT line": next(rule.rule.example for rule in compiled() if rule.rule.id == "nanogpt-iter"),
}


def main() -> None:
    for name, line in LINES.items():
        data = (line + "\n").encode() * 5000
        best = min(measured(data) for _ in range(5))
        print(f"{name:34}{best / 5000 * 1e6:8.2f} us per line{len(data) / best / 1e6:10.0f} MB/s")


def measured(data: bytes) -> float:
    started = time.perf_counter()
    Reader().feed(data)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
