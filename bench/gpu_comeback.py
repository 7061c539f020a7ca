"""How soon a killed rank trains again on one GPU, from a snapshot in its agent's memory, and what a snapshot costs.

    python bench/gpu_comeback.py                     3b, killed twice; needs twice the state in free host memory
    python bench/gpu_comeback.py --model 1b --kills 1

It starts `drumbeat run` with the llama recipe in a folder of its own, waits for snapshots, kills the rank with SIGKILL, and reads
from the run folder when the attempt had ended, when the next one began and when its first step was made.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List


def lines(path: Path) -> List[Dict[str, Any]]:
    found = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in found if line.endswith("}")]


def wait(condition: Callable[[], bool], process: subprocess.Popen[bytes], output: Path, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(output.read_text()[-6000:])
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="3b")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--every", type=int, default=10, help="steps between snapshots")
    parser.add_argument("--set", nargs="*", default=["batch=2"], help="more settings of the recipe")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="drumbeat-comeback-") as name:
        place = Path(name)
        settings = [
            f"model={args.model}",
            "steps=100000",
            "data=synthetic",
            "validation=0",
            "report_every=1",
            *args.set,
        ]
        settings += [f"checkpoint={place / 'saved'}", f"snapshot_every={args.every}", "watch_communication=0"]
        program = [sys.executable, "-m", "drumbeat", "train", "llama", "--set", *settings]
        job = ["--ranks-per-node", "1", "--site", "localhost", "--restarts", str(args.kills)]
        output = place / "output"
        with open(output, "wb") as file:
            argv = [sys.executable, "-m", "drumbeat", "run", *job, "--", *program]
            # Where Python may keep no byte code, every start compiles torch's source anew: 8 s that no user's machine has.
            env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
            env["PYTHONPYCACHEPREFIX"] = str(place / "byte-code")
            process = subprocess.Popen(argv, cwd=place, stdout=file, stderr=file, env=env)
        try:
            measure(args, place, process, output)
        finally:
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
        said = output.read_text()
        print("\n".join(line for line in said.splitlines() if "resumed" in line), said[-1500:], sep="\n")


def measure(args: argparse.Namespace, place: Path, process: subprocess.Popen[bytes], output: Path) -> None:
    wait(lambda: (place / "runs").is_dir() and any((place / "runs").iterdir()), process, output)
    (folder,) = (place / "runs").iterdir()
    node = folder / "nodes" / "0"
    metrics = lambda: lines(node / "metrics.jsonl")  # noqa: E731
    saves = lambda: [each for each in metrics() if each.get("kind") == "checkpoint"]  # noqa: E731
    events = lambda kind: [each for each in lines(folder / "events.jsonl") if each["kind"] == kind]  # noqa: E731
    for kill in range(args.kills):
        before = len(saves())
        wait(lambda: len(saves()) >= before + 2, process, output)  # noqa: B023
        time.sleep(1.0)  # in between two
        ranks = [each["pid"] for each in lines(node / "events.jsonl") if each["kind"] == "rank-started"]
        fault = time.time()
        os.kill(ranks[-1], signal.SIGKILL)
        wait(lambda: output.read_text().count("resumed: step") == kill + 1, process, output)  # noqa: B023
        loaded = time.time()
        wait(lambda: len(events("first-step")) == kill + 2, process, output)  # noqa: B023
        ended, started = events("attempt-ended")[kill], events("attempt-started")[kill + 1]["t"]
        again = min(each["step"] for each in metrics() if each["t"] > started and each.get("kind", "step") == "step")
        moments = {"attempt ended": ended["t"], "ranks start": started, "state loaded": loaded}
        moments["first new step"] = events("first-step")[kill + 1]["t"]
        said = ", ".join(f"{name} {t - fault:.1f} s" for name, t in moments.items())
        print(f"kill {kill + 1}: {said}; steps repeated {ended['progress']['step'] - again + 1}", flush=True)
    before = len(saves())
    wait(lambda: len(saves()) >= before + 3, process, output)
    steps = {each["step"]: each["t"] for each in metrics() if each.get("kind", "step") == "step"}
    taken = [each["step"] for each in saves()][-3:]
    plain = [steps[s] - steps[s - 1] for s in range(taken[0] + 1, taken[-1] + 1) if (s - 1) % args.every > 1]
    usual = statistics.median(plain)
    whole = [steps[b] - steps[a] - (b - a) * usual for a, b in zip(taken, taken[1:])]
    stall = statistics.mean(each["seconds"] for each in saves()[-3:])
    print(
        f"a step {usual:.3f} s; a snapshot every {args.every}: in the call {stall:.3f} s, in all {statistics.mean(whole):.3f} s"
    )


if __name__ == "__main__":
    main()
