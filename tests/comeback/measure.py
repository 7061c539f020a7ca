"""How long a run is without steps after a fault: the demo's model on two emulated nodes of two ranks, with one spare.

`make faults` runs it; `python -m tests.comeback.measure 1` measures each case once. It writes its table into
measured/comeback.md. On a busy machine the figures are larger.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List

from tests.comeback.test_spare import events, kill_node, ranks_of

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "measured" / "comeback.md"
BEGIN, END = "<!-- measured by make faults -->\n", "<!-- end of what was measured -->\n"
GOAL = 60.0  # seconds


@dataclass(frozen=True)
class Case:
    name: str
    flags: List[str]
    fault: Callable[[Path], None]


def lose_node(folder: Path) -> None:
    kill_node(folder.name, 1, ranks_of(folder, 1))


def kill_rank(folder: Path) -> None:
    os.kill(ranks_of(folder, 1)[0], signal.SIGKILL)


CASES = (
    Case("a node is gone (agent, ranks and all): a spare takes its place", ["--spares", "1"], lose_node),
    Case("a rank is killed: all ranks start again in place", ["--restarts", "1"], kill_rank),
)


def run_case(case: Case, place: Path) -> Dict[str, float]:
    """Seconds from the fault to each event; steps that had to be repeated."""
    place.mkdir()
    saved = place / "checkpoint.pt"
    job = ["--nodes", "2", "--ranks-per-node", "2", "--site", "localhost", "--env", "OMP_NUM_THREADS=1", *case.flags]
    program = [str(ROOT / "examples" / "train_bytes.py"), "--steps", "1000000", "--checkpoint", str(saved)]
    argv = [sys.executable, "-m", "drumbeat", "run", *job, "--", sys.executable, *program, "--save-every", "20"]
    with open(place / "output", "wb") as output:
        process = subprocess.Popen(argv, cwd=place, stdout=output, stderr=output)
    try:
        _wait(lambda: saved.exists(), process, place)
        (folder,) = (place / "runs").iterdir()
        time.sleep(2.0)  # somewhere between two checkpoints
        fault = time.time()
        case.fault(folder)
        _wait(lambda: len(events(folder, "first-step")) == 2, process, place)
        first, ended = events(folder, "first-step")[1]["t"], events(folder, "attempt-ended")[0]
        started = events(folder, "attempt-started")[1]["t"]
        metrics = (folder / "nodes" / "0" / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in metrics if '"step"' in line]
        again = min(each["step"] for each in steps if each["t"] > started and each.get("kind", "step") == "step")
        return {
            "noticed": ended["t"] - fault,
            "ranks started": started - fault,
            "first new step": first - fault,
            "steps repeated": ended["progress"]["step"] - again + 1,
        }
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(condition: Callable[[], bool], process: subprocess.Popen[bytes], place: Path, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError((place / "output").read_text()[-3000:])
        time.sleep(0.1)


def main() -> int:
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    how = f"median of {times} runs each" if times > 1 else "one run each"
    lines = [
        f"Measured on {os.cpu_count()} cores ({platform.machine()}), load {os.getloadavg()[0]:.0f}: {how}, "
        "seconds after the fault. Two emulated nodes of two ranks train the demo's model; a checkpoint every 20 steps.",
        "",
        "| fault | attempt ended | ranks start | first new step | steps repeated |",
        "|---|---|---|---|---|",
    ]
    slow = False
    with tempfile.TemporaryDirectory(prefix="drumbeat-comeback-") as name:
        os.environ["HOME"] = name
        for number, case in enumerate(CASES):
            found = [run_case(case, Path(name) / f"{number}-{each}") for each in range(times)]
            middle = {key: statistics.median(each[key] for each in found) for key in found[0]}
            slow = slow or middle["first new step"] > GOAL
            seconds = " | ".join(f"{middle[key]:.1f} s" for key in ("noticed", "ranks started", "first new step"))
            lines.append(f"| {case.name} | {seconds} | {middle['steps repeated']:.0f} |")
            print(lines[-1], flush=True)
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + rest.split(END)[1])
    print(f"goal: under {GOAL:g} s: {'missed' if slow else 'kept'}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
