"""Runs rows of the fault table: starts the job, waits for what must be said, and checks how it ends. `make faults` prints all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional

from tests.faults.rows import Row

PROGRAM = Path(__file__).parent / "program.py"
SOURCE = str(Path(__file__).parent.parent.parent / "src")
PATIENCE = 90.0  # seconds for a fault to be named or a run to end, on a crowded machine


@dataclass
class Seen:
    """What became of one row."""

    row: Row
    exit_code: Optional[int] = None
    seconds: Optional[float] = None  # from the fault to its finding
    finding: Optional[Dict[str, Any]] = None
    failure: Optional[Dict[str, Any]] = None
    then: str = ""
    orphans: int = 0
    output: str = ""

    def problems(self, slack: float = 1.0) -> List[str]:
        """What is not as the row says. `slack`: how many times longer the machine may take."""
        row, found = self.row, []
        if row.code == "any":
            pass
        elif row.code:
            said = self.finding or {}
            if said.get("code") != row.code:
                found.append(f"found {said.get('code')}, not {row.code}: {said.get('title')}")
            elif said.get("rank") != row.rank:
                found.append(f"named rank {said.get('rank')}, not {row.rank}: {said.get('title')}")
            elif row.place not in said.get("title", "") + str(said.get("evidence")):
                found.append(f"does not name {row.place}: {said.get('title')}")
            elif self.seconds is None or self.seconds > row.within * slack:
                found.append(f"took {self.seconds} s")
        elif self.finding:
            found.append(f"false alarm: {self.finding.get('title')}")
        wanted = row.failed or (row.code if row.hang == "stop" else "")
        if wanted and (self.failure or {}).get("code") not in wanted.split("|"):
            found.append(
                f"failure {(self.failure or {}).get('code')}, not {wanted}: {(self.failure or {}).get('title')}"
            )
        if row.failed and (self.failure or {}).get("rank") != row.rank:
            found.append(
                f"blamed rank {(self.failure or {}).get('rank')}, not {row.rank}: {(self.failure or {}).get('title')}"
            )
        if row.then not in self.then:
            found.append(f"the others: {self.then}")
        if self.exit_code != row.exit_code:
            found.append(f"exit code {self.exit_code}, not {row.exit_code}")
        if self.orphans:
            found.append(f"{self.orphans} processes left")
        return found


def run_row(row: Row, folder: Path) -> Seen:
    """In `folder`, which must be new; with $HOME of whoever calls."""
    folder.mkdir(parents=True, exist_ok=True)
    fault = folder / "fault"
    env = {
        "FAULT_FILE": str(fault),
        "FAULT_WORLD": row.world,
        "FAULT_STEPS": str(row.steps),
        "PYTHONPATH": SOURCE,
        **row.env,
    }
    arguments = [str(PROGRAM), row.kind, str(row.rank or 0), str(row.at)]
    command = ["torchrun", *arguments] if row.launcher == "torchrun" else [sys.executable, *arguments]
    job = {
        "name": "fault", "nodes": 2, "ranks-per-node": 2, "command": command, "env": env, "stop-grace": "2s",
        "checks": {"hang": row.hang},
    }  # fmt: skip
    (folder / "job.yaml").write_text(json.dumps(job))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    process = subprocess.Popen(
        [sys.executable, "-m", "drumbeat", "run", "job.yaml"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env={**os.environ, "PYTHONPATH": SOURCE, "PATH": path},
    )  # fmt: skip
    seen = Seen(row)
    try:
        _follow(row, folder, process, seen)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            seen.output = process.communicate(timeout=30)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            seen.output = process.communicate()[0]
    seen.exit_code = process.returncode
    run = _run(folder)
    if run is None:
        return seen
    events = _events(run)
    finding = _finding(events)
    if finding:
        seen.finding = finding["finding"]
        if fault.exists() and fault.read_text():
            seen.seconds = round(finding["t"] - float(fault.read_text()), 1)
    summary = run / "summary.json"
    if summary.exists():
        content = json.loads(summary.read_text())
        seen.failure = content.get("failure")
        seen.then = "; ".join(f"{each['ranks']}: {each['what']}" for each in content.get("consequences", ()))
    seen.orphans = len(_marked(run.name))
    return seen


def _follow(row: Row, folder: Path, process: subprocess.Popen[str], seen: Seen) -> None:
    """Until it ends by itself, or, where a hang is only warned of, until it is named."""
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
        run = _run(folder)
        if row.code and row.hang == "warn" and run and _finding(_events(run)):
            return


def _run(folder: Path) -> Optional[Path]:
    return next(iter(sorted((folder / "runs").glob("*"))), None) if (folder / "runs").is_dir() else None


def _events(run: Path) -> List[Dict[str, Any]]:
    path = run / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _finding(events: List[Dict[str, Any]]) -> Optional[Dict[str, Any]]:
    found = [event for event in events if event["kind"] == "finding"]
    return next((event for event in found if event["finding"]["code"].startswith(("hang-", "slow-rank"))), None)


def _marked(run_id: str) -> List[int]:
    """Live processes of a run, by the mark in their environment."""
    mark, found = f"DRUMBEAT_RUN={run_id}".encode(), []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
            except OSError:
                continue
    return found
