"""Who is blamed when one rank of a job fails in words that no rule knows, and the others fail with it in the same words.

    python bench/blame.py [--trials 24] [--seed 1] [--load 20] [--drumbeat PATH]

Each trial is a real run of 4 ranks that exchange a byte per step over TCP. One of them, at a random time, raises, leaves, or is
killed; the others notice the lost connection and raise, exit or leave by `os._exit`. `--load` keeps that many processes busy
beside it. Prints one line per trial, and how often another rank than the one that failed was named.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import List

RANK = """
import os, signal, socket, sys, time
rank, world, port = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["MASTER_PORT"])
bad, how, after, others = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4]
peers, server = {}, socket.create_server(("127.0.0.1", 0), backlog=world)
open(f"port-{rank}.new", "w").write(str(server.getsockname()[1]))
os.replace(f"port-{rank}.new", f"port-{rank}")
for lower in range(rank):
    while not os.path.exists(f"port-{lower}"):
        time.sleep(0.02)
    peers[lower] = socket.create_connection(("127.0.0.1", int(open(f"port-{lower}").read())))
    peers[lower].send(bytes([rank]))
for _ in range(rank + 1, world):
    new = server.accept()[0]
    peers[new.recv(1)[0]] = new
begun = time.time()
def end(way):
    if way == "raise":
        raise RuntimeError("the work cannot go on")
    if way == "unwind":
        for peer in peers.values():
            peer.close()
        raise RuntimeError("the work cannot go on")
    if way == "exit":
        sys.exit(3)
    if way == "_exit":
        os._exit(3)
    if way == "leave":
        sys.exit(0)
    os.kill(os.getpid(), getattr(signal, way))
while True:
    if rank == bad and time.time() - begun > after:
        end(how)
    try:
        for peer in peers.values():
            peer.send(b"x")
        for peer in peers.values():
            if not peer.recv(1):
                raise OSError
    except OSError:
        end(others)
    time.sleep(0.05)
"""
WAYS = ("raise", "unwind", "exit", "_exit", "leave", "SIGKILL", "SIGSEGV")
OTHERS = ("raise", "exit", "_exit")
AFTER = (0.0, 0.3, 1.0, 2.0, 6.0)


def trial(drumbeat: str, way: str, others: str, after: float, bad: int, nodes: int) -> str:
    """Run one; return what is wrong, or ''."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "rank.py")
        program.write_text(RANK)
        flags = [
            "--nodes",
            str(nodes),
            "--ranks-per-node",
            str(4 // nodes),
            "--site",
            "localhost",
            "--oversubscribe",
            "4",
        ]
        command = [sys.executable, str(program), str(bad), way, str(after), others]
        done = subprocess.run([drumbeat, "run", *flags, "--", *command], cwd=folder, capture_output=True, text=True)
        summary = list(Path(folder, "runs").glob("*/summary.json"))
        if not summary:
            return f"no summary: {done.stderr[-300:]}"
        attempt = json.loads(summary[0].read_text())["attempts"][-1]
        found = attempt["finding"] or {}
        if found.get("rank") == bad:
            return ""
        ends = [(end.get("rank"), end.get("what")) for end in attempt.get("ranks", [])]
        return f"rank {found.get('rank')}, {found.get('confidence')}: {found.get('title')} {found.get('seen')} {ends}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--load", type=int, default=0)
    parser.add_argument("--drumbeat", default=str(Path(sys.executable).parent / "drumbeat"))
    args = parser.parse_args()
    choose, wrong = random.Random(args.seed), Counter()
    cases = [(way, others) for way in WAYS for others in OTHERS]
    burners: List[subprocess.Popen[bytes]] = []
    try:
        burners += [subprocess.Popen(["nice", "sh", "-c", "while :; do :; done"]) for _ in range(args.load)]
        for number in range(args.trials):
            way, others = cases[number % len(cases)]
            about = (way, others, choose.choice(AFTER), choose.randrange(4), choose.choice((1, 2)))
            said = trial(args.drumbeat, *about)
            wrong[way] += bool(said)
            print(
                f"{number:3} {'{} others {} after {} s, rank {}, nodes {}'.format(*about):55} {said or 'right'}",
                flush=True,
            )
    finally:
        for each in burners:
            each.kill()
    print(f"wrong: {sum(wrong.values())} of {args.trials}; {dict(+wrong)}; load {os.getloadavg()[0]:.0f}")
    return 1 if sum(wrong.values()) > args.trials / 50 else 0


if __name__ == "__main__":
    raise SystemExit(main())
