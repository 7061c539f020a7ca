"""Killed with SIGKILL at random moments, in training and in saving, and started again each time: the last weights, moments and
generators equal those of a run that nobody disturbed, bit by bit. DRUMBEAT_KILLS=30 (make faults-train) kills more often."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any, Dict, List

from gloo_world import GlooWorld

KILLS = int(os.environ.get("DRUMBEAT_KILLS", "3"))
SETTINGS = ["batch=2", "length=16", "data=synthetic", "validation=0", "report_every=1", "deterministic=yes"]


def train(texts: List[str]) -> int:
    from drumbeat.cli import main

    return main(["train", "llama", "--json", "--set", *texts])


def last_state(output: Path) -> Dict[str, Any]:
    result = json.loads(output.read_text().splitlines()[-1])
    assert result["exit_code"] == 0
    entries: Dict[str, Any] = result["digests"][-1]["entries"]
    return entries


def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(world: GlooWorld, tmp_path: Path) -> None:
    drawn = random.Random(os.environ.get("DRUMBEAT_KILL_SEED", "1"))
    steps = 4 * KILLS + 4  # no attempt makes more than four
    output, folder = tmp_path / "output", tmp_path / "checkpoints"
    own = [*SETTINGS, f"steps={steps}"]
    start = lambda texts: world.start(output, train, texts)  # noqa: E731

    whole = start(own)
    whole.join(600)
    want = last_state(output)

    kills = saves = 0
    while kills < KILLS:
        process = start([*own, f"checkpoint={folder}", "save_every=1"])
        wanted = drawn.randint(1, 4)  # steps of this attempt
        while process.is_alive() and sum(" loss " in line for line in _lines(output)) < wanted:
            time.sleep(0.002)
        time.sleep(drawn.uniform(0, 0.05))  # into the save of that step, or into the next step
        if not process.is_alive():
            break
        process.kill()
        process.join()
        kills += 1
        saves += any(path.is_dir() and not (path / "commit.json").exists() for path in folder.glob("step-*"))
    last = start([*own, f"checkpoint={folder}", "save_every=1"])
    last.join(600)
    got = last_state(output)
    assert [name for name in want if got[name] != want[name]] == [] and set(got) == set(want)
    print(f"{kills} kills, {saves} of them inside a save")
    assert kills == KILLS
    assert not [path for path in folder.glob("step-*") if not (path / "commit.json").exists()]


def _lines(path: Path) -> List[str]:
    return path.read_text().splitlines() if path.exists() else []
