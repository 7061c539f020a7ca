"""Runs rows of the fault table: starts the job, waits for what must be said, and checks how it ends. `make faults` prints all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from drumbeat.agent.wire.meet import free_port
from drumbeat.desk.log_sources import read
from drumbeat.desk.state import state_of
from drumbeat.runfolder.run import Run
from tests.faults.acts import ACTS
from tests.faults.rows import Row
from tests.faults.strangers import BEFORE, MASTER

PROGRAM = Path(__file__).parent / "program.py"
SOURCE = str(Path(__file__).parent.parent.parent / "src")
PATIENCE = 150.0  # seconds for a fault to be named or a run to end, on a crowded machine


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
    outcome: str = ""  # as the summary says
    lost: Optional[int] = None  # steps that were made twice
    back: Optional[float] = None  # seconds from the fault to the first step of a later attempt
    planted: bool = False  # what must not be there is there
    views: str = ""  # where `diagnose` or `status` say something else than the summary

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
            elif row.place not in f"{said.get('title')} {said.get('cause')} {said.get('evidence')}":
                found.append(f"does not name {row.place}: {said.get('title')}")
            elif self.seconds is None or self.seconds > row.within * slack:
                found.append(f"took {self.seconds} s")
        elif self.finding:
            found.append(f"false alarm: {self.finding.get('title')}")
        found += self._failure_problems()
        if self.exit_code != row.exit_code:
            found.append(f"exit code {self.exit_code}, not {row.exit_code}")
        if self.orphans:
            found.append(f"{self.orphans} processes left")
        if row.comes_back and (self.back is None or self.back > 60.0 * slack or (self.lost or 0) > row.lost_at_most):
            found.append(f"came back after {self.back} s, {self.lost} steps lost")
        if row.heard and not any(word in self.output for word in row.heard.split("|")):
            found.append(f"did not say {row.heard!r}")
        if row.unheard and row.unheard in self.output:
            found.append(f"said {row.unheard!r}")
        if self.planted:
            found.append(f"{row.absent} is there")
        return found + ([self.views] if self.views else [])

    def _failure_problems(self) -> List[str]:
        row, failure, found = self.row, self.failure or {}, []
        if row.without_summary:
            return []
        wanted = row.failed or (row.code if row.hang == "stop" and not row.outcome else "")
        if wanted and failure.get("code") not in wanted.split("|"):
            found.append(f"failure {failure.get('code')}, not {wanted}: {failure.get('title')}")
        elif not wanted and failure:
            found.append(f"failure {failure.get('code')}: {failure.get('title')}")
        if row.failed and (failure.get("rank"), row.node) != (
            row.rank,
            failure.get("node") if row.node is not None else None,
        ):
            found.append(f"blamed rank {failure.get('rank')}, node {failure.get('node')}: {failure.get('title')}")
        if row.then not in self.then:
            found.append(f"the others: {self.then}")
        if row.outcome and self.outcome != row.outcome:
            found.append(f"outcome {self.outcome}, not {row.outcome}")
        return found


def run_row(row: Row, folder: Path) -> Seen:
    """In `folder`, which must be new; with $HOME of whoever calls."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"fault-{os.getpid()}-{folder.name}"
    with BEFORE[row.before](folder, name) if row.before else ExitStack() as ends:
        (folder / "job.yaml").write_text(json.dumps(_job(row, folder, name)))
        process = _desk(row, folder, row.desk, ("--master", MASTER, "--node-rank", "0") if row.joined else ())
        if row.joined:
            other = _desk(row, folder, row.second, ("--master", MASTER, "--node-rank", "1"), folder / "second")
            ends.callback(_end, other)
        return _watch(row, folder, process)


def _job(row: Row, folder: Path, name: str) -> Dict[str, Any]:
    port = str(free_port("127.0.0.1", ()))
    env = {
        "FAULT_FILE": str(folder / "fault"),
        "FAULT_WORLD": row.world,
        "FAULT_STEPS": str(row.steps),
        "FAULT_HOW": row.how,
        "PYTHONPATH": SOURCE,
        **{name: value.replace("{port}", port) for name, value in row.env.items()},
    }
    arguments = [str(PROGRAM), row.kind, str(row.rank if row.rank is not None else 2 if row.act else 0), str(row.at)]
    command = ["torchrun", *arguments] if row.launcher == "torchrun" else [sys.executable, *arguments]
    if row.command:
        command = [word.format(folder=folder, python=sys.executable, program=PROGRAM.parent) for word in row.command]
    return {
        "name": name, "nodes": 2, "ranks-per-node": 2, "command": command, "env": env, "stop-grace": "2s",
        "checks": {"hang": row.hang}, **row.job,
    }  # fmt: skip


def _desk(
    row: Row, folder: Path, variables: Dict[str, str], more: Sequence[str], output: Optional[Path] = None
) -> subprocess.Popen[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    own = {name: value.replace("{folder}", str(folder)) for name, value in variables.items()}
    with open(output or os.devnull, "w") as file:
        return subprocess.Popen(
            ["env", "--default-signal=HUP,INT", sys.executable, "-m", "drumbeat", "run", "job.yaml", *more], cwd=folder,
            stdout=file if output else subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONPATH": SOURCE, "PATH": path, **own},
        )  # fmt: skip


def _end(process: subprocess.Popen[str]) -> None:
    """Let it end by itself, then with a signal, then without one."""
    for act in (lambda: None, process.terminate, process.kill):
        act()
        try:
            process.wait(30)
            return
        except subprocess.TimeoutExpired:
            continue


def _watch(row: Row, folder: Path, process: subprocess.Popen[str]) -> Seen:
    fault = folder / "fault"
    seen = Seen(row)
    try:
        _follow(row, folder, process, seen)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            seen.output = process.communicate(timeout=120)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            seen.output = process.communicate()[0]
    seen.exit_code = process.returncode
    if (folder / "second").exists():
        seen.output += (folder / "second").read_text()
    seen.planted = bool(row.absent) and (folder / row.absent).exists()
    run = _run(folder)
    if run is None:
        return seen
    began = float(fault.read_text()) if fault.exists() and fault.read_text() else None
    deadline = time.monotonic() + 60  # a desk that was killed leaves the end to the agents
    while _marked(run.name) and time.monotonic() < deadline:
        time.sleep(0.2)
    events = _events(run)
    finding = _finding(events)
    if finding:
        seen.finding = finding["finding"]
    told = finding or next((event for event in events if event["kind"] in ("node-lost", "failed")), None)
    if told and began is not None:
        seen.seconds = round(told["t"] - began, 1)
    summary = run / "summary.json"
    if summary.exists():
        content = json.loads(summary.read_text())
        seen.failure, seen.outcome = content.get("failure"), content["outcome"]
        seen.then = "; ".join(f"{each['ranks']}: {each['what']}" for each in content.get("consequences", ()))
        seen.views = _views(run, content)
    if row.comes_back and began is not None:
        _came_back(seen, run, events, began)
    seen.orphans = len(_marked(run.name))
    return seen


def _views(run: Path, summary: Dict[str, Any]) -> str:
    """Where `diagnose RUN` and `status RUN` differ from the summary in cause, rank or certainty; '' if nowhere."""
    own = summary.get("failure") or summary.get("hang")
    state, reader = state_of(Run.open(str(run))), read([str(run)])
    failure = reader.report().failure
    shown = failure.finding
    if own is None:
        fine = failure.answer in ("none", "cancelled", "time-limit", "preempted")
        return "" if fine else f"diagnose says {failure.answer}, the summary nothing"
    said = (failure.answer, shown.rank if shown else None, failure.confidence)
    if own["confidence"] != "unknown" and said != (own["code"], own["rank"], own["confidence"]):
        return f"diagnose says {said}, the summary {own['code']} of rank {own['rank']}, {own['confidence']}"
    status = state.summary and (state.summary.failure or state.summary.hang)
    return "" if status and status.code == own["code"] else "status says something else"


def _came_back(seen: Seen, run: Path, events: List[Dict[str, Any]], began: float) -> None:
    later = [event["t"] for event in events if event["kind"] == "attempt-started" and event["t"] > began]
    if not later:
        return
    steps = [
        (metric.t, metric.step) for node in Run.open(str(run)).nodes() for metric in Run.open(str(run)).metrics(node)
    ]
    steps = sorted((t, step) for t, step in steps if step is not None)
    after = [(t, step) for t, step in steps if t > later[0]]
    before = [step for t, step in steps if t < later[0]]
    if after:
        seen.back = round(after[0][0] - began, 1)
        seen.lost = max(0, max(before, default=0) - min(step for _, step in after) + 1)


def _follow(row: Row, folder: Path, process: subprocess.Popen[str], seen: Seen) -> None:
    """Until it ends by itself, or, where a hang is only warned of, until it is named. Does what the row does from outside."""
    deadline, to_do = time.monotonic() + PATIENCE + (row.within if row.within > 60 else 0), bool(row.act)
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
        run = _run(folder)
        due = len(list(folder.glob(row.when))) > 1 if row.when else (folder / "fault").exists()
        if to_do and run and due:
            to_do = False
            ACTS[row.act](run, process)
        if row.until_back and run and sum(event["kind"] == "first-step" for event in _events(run)) > 1:
            return
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
