"""What the ranks of these tests run: steps that are reported, a checkpoint every few of them, no torch.

python ranks.py STEPS SECONDS_PER_STEP SAVE_EVERY. A file `enough` in the working directory ends it earlier.
"""

import os
import socket
import sys
import time
from pathlib import Path

from drumbeat import metrics

SAVED, ENOUGH = "checkpoint", "enough"


def main():
    steps, seconds, every = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    rank, attempt = int(os.environ["RANK"]), os.environ["DRUMBEAT_ATTEMPT"]
    first = int(Path(SAVED).read_text()) if os.path.exists(SAVED) else 0
    print(
        f"attempt {attempt} rank {rank} node {os.environ['NODE_RANK']} on {socket.gethostname()} from step {first}",
        flush=True,
    )
    for step in range(first + 1, steps + 1):
        if os.path.exists(ENOUGH):
            break
        time.sleep(seconds)
        metrics.report(step, steps=steps, loss=1.0)
        if rank == 0 and step % every == 0:
            with open(SAVED + ".new", "w") as file:
                file.write(str(step))
            os.replace(SAVED + ".new", SAVED)


if __name__ == "__main__":
    main()
