"""Once the ranks are up: do they sit and see as planned? A sensor that looks at them, and a watcher that judges."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.agent.watchers.contract import Action, Emit, Saw, Stop, Warn
from drumbeat.facts.parse import cpulist
from drumbeat.finding import ERROR, WARNING
from drumbeat.order import EnvVar
from drumbeat.plan import affinity
from drumbeat.plan.binding import Binding

LOOK_AFTER = 2.0  # seconds: the ranks have replaced the shells and shims before them
_VISIBILITY = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


class RankLook:
    """A sensor: what /proc says of the ranks, once, when they are up."""

    def __init__(self, run_id: str, node: int, due: float, wanted: Callable[[], bool]) -> None:
        self.run_id, self.node, self.due, self.wanted = run_id, node, due, wanted
        self._looked = False

    def poll(self, now: float, final: bool = False) -> List[Saw]:
        if self._looked or final or now < self.due or not self.wanted():
            return []
        self._looked = True
        return [Saw("ranks", {"seen": look_at_ranks(self.run_id, self.node)})]


class Affinity:
    """A watcher: compares what was seen with the plan. The table of ranks goes to the run folder."""

    def __init__(
        self, level: str, node: int, host: str, bound: Binding, expected: Sequence[EnvVar], first_rank: int
    ) -> None:
        self.level, self.node, self.host = level, node, host
        self.bound, self.expected, self.first_rank = bound, list(expected), first_rank

    def on(self, saw: Saw, now: float) -> List[Action]:
        if saw.kind != "ranks":
            return []
        seen = saw.data["seen"]
        verdict = affinity.check(self.bound, seen, self.expected, self.first_rank)
        table = affinity.table(self.bound, seen, self.first_rank)
        actions: List[Action] = [Emit("verdict", {"verdict": verdict, "table": table})]
        for finding in verdict.findings:
            if finding.severity in (WARNING, ERROR):
                located = replace(finding, node=self.node, host=self.host)
                actions.append(Stop(located) if self.level == "stop" else Warn(located))
        return actions


def look_at_ranks(run_id: str, node: int) -> Dict[int, Dict[str, Any]]:
    """Rank -> what /proc says of its main process: the one with the lowest pid among those that carry its number.

    Read from outside, so it holds for any command and any launcher.
    """
    seen: Dict[int, Dict[str, Any]] = {}
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        environ = _environ(pid)
        if environ is None or environ.get("DRUMBEAT_RUN") != run_id or environ.get("NODE_RANK") != str(node):
            continue
        rank = environ.get("RANK", "")
        if rank.isdecimal() and int(rank) not in seen:
            visible = next((environ[name] for name in _VISIBILITY if name in environ), None)
            seen[int(rank)] = {"cpus": _cpus(pid), "visible": visible, "env": environ, "pid": pid}
    return seen


def _environ(pid: int) -> Optional[Mapping[str, str]]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            data = file.read(1 << 20)
    except OSError:
        return None
    pairs = (entry.decode("utf-8", "replace").partition("=") for entry in data.split(b"\0") if entry)
    return {name: value for name, _, value in pairs}


def _cpus(pid: int) -> Optional[Tuple[int, ...]]:
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            line = next(line for line in file if line.startswith("Cpus_allowed_list:"))
    except (OSError, StopIteration):
        return None
    return cpulist(line.split(":", 1)[1].strip())
