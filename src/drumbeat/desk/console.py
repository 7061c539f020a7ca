"""What a person sees of a run in the foreground: one line a matter, the job's own output untouched between."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any, Dict, List, Optional, Tuple

from drumbeat.agent.ranks.log_tail import tail
from drumbeat.order import Order
from drumbeat.plan.argv import replaced_flags
from drumbeat.runfolder.layout import NodeFolder, RunFolder
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.read import Tail, read_json

_PROGRESS_EVERY = 15.0  # seconds, where there is no terminal to redraw a line on


class Console:
    """drumbeat's own lines go to standard error; what ranks print goes where they printed it."""

    def __init__(self, order: Order, nodes: List[int], joined: str = "") -> None:
        self.order, self.nodes, self.joined = order, nodes, joined
        self.live = sys.stderr.isatty()
        self.progress = Progress()
        self._tails: Dict[Tuple[str, str], Tail] = {}
        self._metrics: Dict[int, Tail] = {}
        self._events: Optional[Tail] = None
        self._drawn = ""
        self._last_progress = time.monotonic()
        self._environment_said = False
        self.logs: Dict[int, NodeFolder] = {}  # node -> where its ranks write, if that is not the run folder
        self._earlier: Dict[int, List[int]] = {}  # node -> attempts of before, where a scheduler started the job again

    def begin(self) -> None:
        order = self.order
        folder = RunFolder(order.folder)
        self._earlier = {node: folder.node(node).attempts() for node in self.nodes}
        if 0 not in self.nodes:
            return  # the lead's node says it
        if os.path.exists(folder.events):
            self._events = Tail(folder.events, os.path.getsize(folder.events))
        ranks = _count(order.ranks_per_node, "rank") if order.ranks_per_node else "one rank a GPU"
        where = ", emulated on this machine" if order.emulated and order.nodes > 1 else ""
        said = self.joined or order.run_id
        self.say("drumbeat", f"{said}: {_count(order.nodes, 'node')} x {ranks}{where} (site {order.site})")
        self.say("launch", f"{order.launcher}: {order.launcher_why}")
        replaced = replaced_flags(order.command)
        if replaced:
            said = " ".join(f"{name}={value}" if value else name for name, value in replaced.items())
            self.say("replaced", f"{said} (said by the muster instead)")
        self.say("folder", _near(order.folder))

    def poll(self, folder: Optional[RunFolder], final: bool = False) -> None:
        if folder is None:
            return
        if 0 in self.nodes:  # one reader of the run's events is enough
            self._show_events(folder)
        self._show_logs(folder, final)
        self._read_metrics(folder, final)
        self._show_progress(final)

    def stopping(self, number: int, grace: float) -> None:
        if 0 not in self.nodes:
            return  # the lead's node says it
        name = signal.Signals(number).name
        self.say("stop", f"{name}: the ranks have {grace:g} s to save; once more ends them now")

    def end(self, folder: Optional[RunFolder], summary: Optional[Dict[str, Any]]) -> None:
        if folder is None or summary is None:
            return
        for label, text in closing_lines(folder, summary):
            self.say(label, text)

    def say(self, label: str, text: str) -> None:
        self._clear()
        print(f"{label:<10} {text}", file=sys.stderr, flush=True)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _show_events(self, folder: RunFolder) -> None:
        for event in self._new_events(folder):
            kind = event.get("kind")
            if kind == "mustered":
                at = f"{event['master_addr']}:{event['master_port']}"
                self.say(
                    "muster", f"{_count(self.order.nodes, 'node')} in {event['seconds']:.1f} s; ranks meet at {at}"
                )
            elif kind == "decided" and event.get("action") == "restart":
                self.say("restart", str(event.get("why")))
            elif kind == "failed" and self.order.restarts:
                self.say("failed", str(event["finding"]["title"]))
            elif kind == "node-lost":
                self.say("lost", f"node {event['peer']} ({event['peer_host']}): {event['why']}")
            elif kind == "verdict" and (event.get("peer") == 0 or event["verdict"]["answer"] == "mismatch"):
                verdict = event["verdict"]
                unread = verdict["check"] in ("transport", "traffic") or not verdict.get("seen")
                if verdict["answer"] == "unknown" and unread:
                    continue  # it stands in the events; a person learns nothing from it
                label = {"affinity": "cpu", "transport": "net"}.get(verdict["check"], verdict["check"])
                self.say(label, f"{verdict['answer']}: {verdict['summary']}")
            elif kind == "finding":
                finding = event["finding"]
                self.say(str(finding["severity"]), f"{finding['title']}: {finding['fix']}")
        if not self._environment_said:
            self._say_environment(folder)

    def _new_events(self, folder: RunFolder) -> List[Dict[str, Any]]:
        if self._events is None or self._events.path != folder.events:
            self._events = Tail(folder.events)
        found = []
        for line in self._events.lines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def _say_environment(self, folder: RunFolder) -> None:
        environment = read_json(folder.node(self.nodes[0]).environment)
        if environment is None or environment.get("attempt") in self._earlier.get(self.nodes[0], ()):
            return
        self._environment_said = True
        chosen = [v for v in environment["variables"] if v["source"] in ("site", "detected") and "_IFNAME" in v["name"]]
        first = chosen[0] if chosen else environment["variables"][0]
        others = len(environment["variables"]) - 1
        path = _near(folder.node(self.nodes[0]).environment)
        self.say("set", f"{first['name']}={first['value']} ({first['why']}), {others} more: {path}")

    def _show_logs(self, folder: RunFolder, final: bool) -> None:
        for number in self.nodes:
            node = self.logs.get(number) or folder.node(number)
            for attempt in sorted(set(node.attempts()) - set(self._earlier.get(number, ()))):
                for rank, stem in sorted(node.ranks(attempt).items()):
                    for stream in ("out", "err"):
                        self._copy(f"{stem}.{stream}", rank, stream, final)
                for stream in ("out", "err"):
                    self._copy(os.path.join(node.attempt(attempt), f"torchrun.{stream}"), 0, stream, final)

    def _copy(self, path: str, rank: int, stream: str, final: bool) -> None:
        tail = self._tails.setdefault((path, stream), Tail(path))
        lines = tail.lines(final)
        if lines:
            self._clear()
            prefix = f"[{rank}] " if rank else ""
            target = sys.stdout if stream == "out" else sys.stderr
            target.write("".join(f"{prefix}{line}\n" for line in lines))
            target.flush()

    def _read_metrics(self, folder: RunFolder, final: bool) -> None:
        for node in map(folder.node, self.nodes):
            tail = self._metrics.setdefault(node.node, Tail(node.metrics))
            for line in tail.lines(final):
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if isinstance(record, dict):
                    self.progress.add(record)

    def _show_progress(self, final: bool) -> None:
        if self.progress.step is None or 0 not in self.nodes:
            return
        line = progress_line(self.progress)
        if self.live and not final:
            if line != self._drawn:
                sys.stderr.write(f"\r\x1b[K{line}")
                sys.stderr.flush()
                self._drawn = line
        elif time.monotonic() - self._last_progress > _PROGRESS_EVERY:
            self._last_progress = time.monotonic()
            self.say("progress", line)

    def _clear(self) -> None:
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            self._drawn = ""


def progress_line(progress: Progress) -> str:
    parts = [f"step {progress.step}" + (f"/{progress.steps}" if progress.steps else "")]
    if progress.last_loss is not None:
        parts.append(f"loss {progress.last_loss:.3f}")
    rate, left = progress.rate(), progress.seconds_left()
    if rate:
        parts.append(f"{rate[0]:,.0f} {rate[1]}" if rate[0] >= 10 else f"{rate[0]:.2f} {rate[1]}")
    if left is not None:
        parts.append(f"{duration(left)} left")
    return "  ".join(parts)


def closing_lines(folder: RunFolder, summary: Dict[str, Any]) -> List[Tuple[str, str]]:
    """The summary for a person."""
    lines: List[Tuple[str, str]] = []
    failure = summary.get("failure")
    if failure:
        lines += _failure_lines(folder, failure, summary.get("consequences") or [])
    lines.append(("end", f"{summary['outcome']} in {duration(summary['seconds'])}, exit code {summary['exit_code']}"))
    progress = Progress.from_plain(summary["progress"]) if summary.get("progress") else Progress()
    for name, first, last in (
        ("loss", progress.first_loss, progress.last_loss),
        ("validation", progress.first_validation, progress.last_validation),
    ):
        if first is not None and last is not None:
            went = f"{'fell' if last < first else 'rose'} from {first:.3f} to {last:.3f}"
            steps = f" over {progress.step} steps" if progress.step and name == "loss" else ""
            lines.append((name, (went if last != first else f"stayed at {last:.3f}") + steps))
    if progress.target_reached is not None:
        lines.append(("target", "reached" if progress.target_reached else "not reached"))
    throughput = summary.get("throughput")
    if throughput:
        size = f"{_count(summary['nodes'], 'node')}, {_count(summary['ranks'], 'rank')}"
        lines.append(("speed", f"{throughput['value']:,.0f} {throughput['unit']} on {size}"))
    ledger = summary.get("ledger") or {}
    if ledger:
        spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in ledger.items() if seconds >= 0.05)
        lines.append(("time", spent))
    attempts = summary.get("attempts") or []
    if len(attempts) > 1:
        lines.append(("attempts", ", ".join(attempt["outcome"] for attempt in attempts)))
    lines.append(("folder", _near(folder.path)))
    return lines


def _failure_lines(
    folder: RunFolder, failure: Dict[str, Any], consequences: List[Dict[str, Any]]
) -> List[Tuple[str, str]]:
    rank = failure.get("rank")
    who = "" if rank is None else f"rank {rank} on {failure.get('host')} (node {failure.get('node')}): "
    lines = [("failed", f"{who}{failure['title']}")]
    if failure.get("cause"):
        lines.append(("cause", failure["cause"]))
    if rank is not None:
        log = next((e["file"] for e in failure.get("evidence") or [] if e.get("file")), None) or _error_log(
            folder, failure
        )
        if log:
            last = [line for line in _of_rank(tail(folder.at(log), 400), log, int(rank)) if line.strip()][-8:]
            lines.append(("log", f"the end of {log}:" if last else f"{log} is empty"))
            lines += [("", line) for line in last]
    if failure.get("fix"):
        lines.append(("fix", failure["fix"]))
    if consequences:
        said: Dict[str, List[str]] = {}
        for each in consequences:
            said.setdefault(str(each["what"]), []).append(str(each["rank"]))
        lines.append(("then", "; ".join(f"{_ranks(ranks)}: {what}" for what, ranks in said.items())))
    return lines


def _of_rank(lines: List[str], log: str, rank: int) -> List[str]:
    """A large job's ranks share one file a node, whose lines begin with rank and stream."""
    if os.path.basename(log) != "ranks.log":
        return lines
    return [line.split(" ", 2)[-1] for line in lines if line.startswith(f"{rank} err ")]


def _error_log(folder: RunFolder, failure: Dict[str, Any]) -> Optional[str]:
    attempts = folder.node(int(failure.get("node") or 0)).attempts()
    if not attempts:
        return None
    return os.path.relpath(
        folder.node(int(failure["node"])).log(attempts[-1], int(failure["rank"]), "err"), folder.path
    )


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} m {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} m"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _ranks(ranks: List[str]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"


def _near(path: str) -> str:
    """A path as short as it can be said from here."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
