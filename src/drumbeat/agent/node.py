"""The node: starts this node's processes, ends them, and says how each one went. What it does, the lead has decided."""

from __future__ import annotations

import json
import os
import pkgutil
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, List, Optional, Set

from drumbeat.agent.local_caches import private_caches
from drumbeat.agent.monitor import monitor_argv
from drumbeat.agent.ranks.console_script import launcher_interpreter
from drumbeat.agent.ranks.log_tail import tail
from drumbeat.agent.ranks.merged_logs import Shipping, is_large
from drumbeat.agent.ranks.own_scripts import bring, filled
from drumbeat.agent.ranks.start import start
from drumbeat.agent.ranks.stop_targets import Stopping
from drumbeat.agent.ranks.tasks import Tasks
from drumbeat.agent.ranks.torchrun_shim import shim_argv
from drumbeat.agent.watchers.affinity import Placement, RankLooks
from drumbeat.agent.watchers.contract import Watcher
from drumbeat.agent.watchers.feed import Sensor, Watching
from drumbeat.agent.watchers.oom import oom_kills
from drumbeat.agent.watchers.transport_sensors import OpenGate
from drumbeat.diagnose.exits import explain_exit
from drumbeat.facts.host import LiveHost
from drumbeat.facts.model import Facts, Peers
from drumbeat.finding import ERROR, WARNING, Finding
from drumbeat.order import EnvVar, Order
from drumbeat.plan.argv import Process, Tools, processes
from drumbeat.plan.binding import Binding, binding, right_binding
from drumbeat.plan.environment import environment
from drumbeat.plan.ranks import node_identity, rank_identity, trace
from drumbeat.printed.reader import PrintedMetrics
from drumbeat.processes import rank_in_environment, sweep
from drumbeat.record import to_plain
from drumbeat.runfolder.layout import NodeFolder
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.read import Tail, decode
from drumbeat.runfolder.records import parse_metric
from drumbeat.runfolder.write import EventLog, replace_json

_PRIVATE = ("DRUMBEAT_TOKEN",)  # the ranks have no use for it


@dataclass
class Running:
    process: Process
    started: float


class Node:
    """`tell` sends a message to the lead."""

    def __init__(
        self,
        order: Order,
        node: int,
        facts: Facts,
        folder: NodeFolder,
        bundle: str,
        tell: Callable[[Dict[str, Any]], None],
        tasks: Tasks,
    ) -> None:
        self.order, self.node, self.facts, self.folder, self.bundle, self.tell = (
            order,
            node,
            facts,
            folder,
            bundle,
            tell,
        )
        self.tasks = tasks
        os.makedirs(folder.path, exist_ok=True)
        self.events = EventLog(folder.events, node)
        self.local = tempfile.mkdtemp(prefix=f"drumbeat-{order.run_id[:40]}-{node}-")  # node-local: many small writes
        self.progress = Progress()
        self.attempt = 0
        self.active = False
        self.kill_at: Optional[float] = None
        self.stopped_by_us = False
        self.stopping = Stopping()
        self.running: Dict[int, Running] = {}
        self.gate: Optional[OpenGate] = None
        self.watching = Watching((), (), self.events.write, tell)
        self.reaped = 0
        self._metrics = Tail(os.path.join(self.local, "metrics.jsonl"))
        self._printed: Optional[PrintedMetrics] = None
        self._steps_reported = False
        self._first_step_told = False
        self._oom_kills: Optional[int] = None  # before this attempt
        ranks = order.ranks_per_node or len(facts.gpus) or 1
        self.logs = folder
        self.shipping: Optional[Shipping] = None
        if is_large(order, ranks):
            self.logs = NodeFolder(tempfile.mkdtemp(prefix=f"drumbeat-logs-{order.run_id[:40]}-{node}-"), node)
            self.shipping = Shipping(self.logs, folder)
        replace_json(folder.facts, facts)
        self.monitor = 0 if order.emulated and node else self._start_monitor()  # one machine needs one

    # -- what the lead asks ------------------------------------------------------------------------------------------

    def start(self, attempt: int, peers: Peers) -> None:
        self.attempt = self.events.attempt = attempt
        self.active, self.kill_at, self.stopped_by_us, self.stopping = True, None, False, Stopping()
        os.makedirs(self.folder.attempt(attempt), exist_ok=True)
        os.makedirs(self.logs.attempt(attempt), exist_ok=True)
        facts = self.tasks.facts(self.facts)
        right = right_binding(self.order, facts, self.node)
        bound = self._bind(facts, right)
        shared, unsafe_caches = private_caches(environment(self.order, self.facts, peers, self.node), self.local)
        for finding in unsafe_caches:
            self._tell_finding(finding)
        place = os.path.abspath(self.folder.attempt(attempt))
        shared += node_identity(self.order, peers, self.node, attempt, self._metrics.path, place)
        first_rank = sum(peer.ranks for peer in peers.nodes[: self.node])
        shared = self._watch(shared, facts, bound, right, first_rank)
        bring(self.order, self.folder.attempt(attempt))
        replace_json(self.folder.environment, {"attempt": attempt, "variables": shared, "binding": bound})
        self.watching.tick(time.monotonic())  # how the counters stood before
        self._oom_kills = oom_kills(LiveHost())
        for process in processes(self.order, peers, self.node, self._tools(attempt, bound)):
            self._start_one(process, shared, bound)
        self.watching.feed("started", {"pids": list(self.running)}, time.monotonic())
        self._printed = PrintedMetrics(self.logs.attempt(attempt))

    def stop(self, number: int, grace: float) -> None:
        """Signal what trains, once; a second request can only make the grace end earlier."""
        if not self.active:
            return
        ends = time.monotonic() + grace
        if self.stopped_by_us:
            self.kill_at = ends if self.kill_at is None else min(ends, self.kill_at)
            return
        self.stopped_by_us, self.kill_at = True, ends
        for handle in self.running:
            if handle < 0:
                self.tasks.signal(handle, number)
        self.stopping.send([handle for handle in self.running if handle > 0], number)

    # -- what happens ------------------------------------------------------------------------------------------------

    def on_exit(self, pid: int, status: int) -> None:
        """A child was reaped; it may be an orphan that only became ours."""
        if pid == self.monitor:
            self.monitor = 0
            return
        self.reaped += 1
        run = self.running.pop(pid, None)
        if run is None:
            return
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        ends = [(run.process.rank, code, number, time.time())]
        if self.order.launcher == "torchrun" and status:
            ends = self._torchrun_ends() or ends
        for rank, exit_code, by_signal, at in ends:
            self._rank_ended(rank, exit_code, by_signal, at, run, bool(os.WCOREDUMP(status)))

    def tick(self, now: float) -> None:
        self._ship_metrics()
        if not self.active:
            return
        self.watching.tick(now)
        grace_is_over = self.kill_at is not None and now >= self.kill_at
        if grace_is_over:
            self.tasks.kill()
            sweep(self._kept(), reaped=self.on_exit)
        if not self.running and (grace_is_over or not self.stopping.alive()):
            self._finish()  # a shell may be gone while what it ran still saves

    def kill(self) -> None:
        """End everything now, whatever the lead thinks: it may be gone."""
        self.stopped_by_us = True
        self.tasks.kill()
        sweep(self._kept(), reaped=self.on_exit)
        self.active = False

    def close(self, seconds: float) -> None:
        self._ship_metrics(final=True)
        self._end_monitor()
        times = os.times()
        spent = {
            "cpu_seconds": round(times.user + times.system, 3),
            "seconds": round(seconds, 3),
            "reaped": self.reaped,
        }
        self.events.write("agent-ended", spent)
        self.events.close()
        shutil.rmtree(self.local, ignore_errors=True)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _kept(self) -> Set[int]:
        """The monitor goes on between attempts."""
        return {self.monitor} if self.monitor else set()

    def _start_monitor(self) -> int:
        argv = monitor_argv(self.bundle, self.folder.telemetry, self.facts, self.order.nodes, self.node)
        env = {name: value for name, value in os.environ.items() if name not in _PRIVATE}
        return start(argv, env, os.path.sep, os.devnull, self.folder.agent_log)

    def _end_monitor(self) -> None:
        """By its pid; it writes one last sample. If it hangs in a driver, whoever sweeps after us ends it."""
        if not self.monitor:
            return
        try:
            os.kill(self.monitor, signal.SIGTERM)
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline and not os.waitpid(self.monitor, os.WNOHANG)[0]:
                time.sleep(0.02)
        except (ProcessLookupError, ChildProcessError):
            pass
        self.monitor = 0

    def _tools(self, attempt: int, bound: Binding) -> Tools:
        python = launcher_interpreter(self.order)
        if self.order.launcher != "torchrun":
            return Tools(python=python)
        folder = self.folder.attempt(attempt)
        cpus = [list(slot.cpus) for slot in bound.slots]
        driver = pkgutil.get_data("drumbeat.agent.ranks", "torchrun_driver.py") or b""
        return Tools(
            shim=tuple(shim_argv(self.bundle, self.logs.attempt(attempt), self.order.wrap, cpus, self.node)),
            driver=driver.decode(),
            failures=os.path.join(folder, "failures.json"),
            python=python,
        )

    def _bind(self, facts: Facts, right: Binding) -> Binding:
        """Which cores each rank gets: the job's own, else those of its task, else those beside its GPU."""
        if self.order.cpu_bind or not self.tasks.views:
            return binding(self.order, facts, self.node)
        bound = self.tasks.bound(right, facts)
        for finding in bound.findings[len(right.findings) :]:
            if finding.severity in (WARNING, ERROR):
                self._tell_finding(finding)
            else:
                self.events.write("finding", {"finding": replace(finding, node=self.node)})
        return bound

    def _watch(
        self, shared: List[EnvVar], facts: Facts, bound: Binding, right: Binding, first_rank: int
    ) -> List[EnvVar]:
        """The variables of the ranks, with NCCL's log among them where the gate reads one."""
        self.gate = None
        watchers: List[Watcher] = []
        sensors: List[Sensor] = []
        if self.order.checks.get("transport", "off") != "off":
            self.gate = OpenGate(self.order, self.node, self.facts, self.local, self._rank_of, self._out_of)
            shared = self.gate.open(shared, self.folder.attempt(self.attempt))
            watchers, sensors = [self.gate.watcher], list(self.gate.sensors)
        level = self.order.checks.get("affinity", "warn")
        if level != "off":
            ranks = 0 if self.order.launcher == "once" else len(bound.slots)
            seats = Placement(facts, bound, right, shared, first_rank, level, self.node, ranks)
            looks = RankLooks(self.order.run_id, self.node, facts, self.local, lambda: not seats.done)
            seats.on_first_step = looks.look_soon
            watchers.append(seats)
            sensors.append(looks)
        self.watching = Watching(watchers, sensors, self.events.write, self.tell)
        return shared

    def _rank_of(self, pid: int) -> Optional[int]:
        run = self.running.get(pid)
        if run is not None:
            return run.process.rank
        return rank_in_environment(pid)

    def _out_of(self, rank: Optional[int]) -> str:
        return self._log(0, "out") if rank is None else self.logs.log(self.attempt, rank, "out")

    def _start_one(self, process: Process, shared: List[EnvVar], bound: Binding) -> None:
        variables = list(shared)
        own = self.order.launcher in ("ranks", "tasks")
        if own:
            variables += bound.slots[process.local_rank].env
            variables += rank_identity(process.rank, process.local_rank)
        if self.order.trace:
            variables += trace(os.path.join(self.folder.attempt(self.attempt), f"nccl-{process.rank}.%h.%p"))
        added = {variable.name: variable.value for variable in variables}
        cpus = bound.slots[process.local_rank].cpus if own else ()
        out, err = (self._log(process.rank, stream) for stream in ("out", "err"))
        argv = filled(self.order, process.argv, self.folder.attempt(self.attempt))
        if process.local_rank in self.tasks.lines:
            # What the scheduler gave each task in its own way (its devices, say) stays as that task has it.
            added = {name: value for name, value in added.items() if os.environ.get(name) != value}
            pid = self.tasks.start(process.local_rank, argv, added, self.order.workdir, out, err, cpus)
        else:
            env = {name: value for name, value in os.environ.items() if name not in _PRIVATE}
            pid = start(argv, {**env, **added}, self.order.workdir, out, err, cpus)
        self.running[pid] = Running(process, time.monotonic())
        where = {"rank": process.rank, "local_rank": process.local_rank, "pid": pid, "cpus": list(cpus)}
        self.events.write("rank-started", where)

    def _log(self, rank: int, stream: str) -> str:
        """Under torchrun the process we start is no rank: its ranks' shims open the ranks' own logs."""
        if self.order.launcher == "torchrun":
            return os.path.join(self.folder.attempt(self.attempt), f"torchrun.{stream}")
        return self.logs.log(self.attempt, rank, stream)

    def _torchrun_ends(self) -> List[tuple[int, Optional[int], Optional[int], float]]:
        try:
            with open(os.path.join(self.folder.attempt(self.attempt), "failures.json"), encoding="utf-8") as file:
                failures = json.load(file)
        except (OSError, ValueError):
            return []
        ends = []
        for failure in failures:
            code = failure["exit_code"]
            by_signal = -code if code < 0 else None
            ends.append((failure["rank"], None if by_signal else code, by_signal, float(failure["t"])))
        return ends

    def _rank_ended(
        self, rank: int, code: Optional[int], number: Optional[int], at: float, run: Running, core_dumped: bool
    ) -> None:
        seconds = round(time.monotonic() - run.started, 3)
        self.events.write(
            "rank-exited",
            {"rank": rank, "exit_code": code, "signal": number, "seconds": seconds, "core_dumped": core_dumped},
        )
        self.watching.feed("exited", {"rank": rank, "exit_code": code, "signal": number}, time.monotonic())
        if code != 0 and self.gate and not self.stopped_by_us:
            self.gate.failed = True
        finding = None if code == 0 else self._explain(rank, code, number)
        self.tell({
            "say": "exit", "attempt": self.attempt, "rank": rank, "exit_code": code, "signal": number, "t": at,
            "by_us": self.stopped_by_us, "finding": to_plain(finding) if finding else None,
        })  # fmt: skip

    def _explain(self, rank: int, code: Optional[int], number: Optional[int]) -> Finding:
        log, out = (self._written(rank, stream) for stream in ("err", "out"))
        ended_by_us = self.stopped_by_us and number == signal.SIGKILL
        no_memory = self._no_memory(code, number)
        found = explain_exit(code, number, tail(log), self.order.command, ended_by_us, no_memory, tail(out))
        if os.path.exists(out) and any(each.text in line for each in found.evidence for line in tail(out)):
            log = out
        kept = self.folder.merged(self.attempt) if self.shipping else log
        file = os.path.relpath(kept, os.path.dirname(os.path.dirname(self.folder.path)))
        evidence = tuple(replace(each, file=each.file or file) for each in found.evidence)
        if (
            self.order.launcher == "once" and found.rank is not None
        ):  # a launcher in the command: its lines name the rank
            rank = found.rank
        return replace(found, rank=rank, node=self.node, host=self.facts.host, evidence=evidence)

    def _written(self, rank: int, stream: str) -> str:
        """The rank's own log, or its launcher's where the rank wrote nothing."""
        log = self.logs.log(self.attempt, rank, stream)
        return log if os.path.exists(log) and os.path.getsize(log) else self._log(rank, stream)

    def _no_memory(self, code: Optional[int], number: Optional[int]) -> bool:
        """Whether the kernel has killed for lack of memory since the start: only then is a SIGKILL its doing."""
        if signal.SIGKILL not in (number, (code or 0) - 128) or self._oom_kills is None:
            return False
        return (oom_kills(LiveHost()) or 0) > self._oom_kills

    def _tell_finding(self, finding: Finding, stop: bool = False) -> None:
        located = replace(finding, node=self.node, host=self.facts.host)
        self.tell({"say": "finding", "finding": to_plain(located), "stop": stop})

    def _finish(self) -> None:
        """The main processes are gone; whoever they left behind goes too. Only then is this attempt over."""
        self.active = False
        self.tasks.kill()
        sweep(self._kept(), reaped=self.on_exit)
        self._ship_metrics(final=True)
        self.watching.end(time.monotonic())
        if self.gate:
            self.gate.close(self.folder.attempt(self.attempt))
        self.tell({"say": "done", "attempt": self.attempt, "progress": self.progress.to_plain()})

    def _ship_metrics(self, final: bool = False) -> None:
        """From the node's own disk to the run folder, in few writes; and into what we know of the progress."""
        if self.shipping and os.path.isdir(self.folder.attempt(self.attempt)):
            self.shipping.ship(self.attempt, final)
        lines = self._metrics.lines(final) + self._printed_records(final)
        if lines:
            with open(self.folder.metrics, "a", encoding="utf-8") as file:
                file.write("".join(line + "\n" for line in lines))
        for line in lines:
            record = decode(line) or {}
            metric = parse_metric(record, self.node)
            if metric:  # any script may write this file: what cannot be used is left to the readers to count
                self._steps_reported = self._steps_reported or (metric.kind == "step" and not metric.printed)
                self.progress.add(metric)
                self.watching.feed("metric", record, time.monotonic())
        if self.progress.first_t is not None and not self._first_step_told:
            self._first_step_told = True
            self.tell({"say": "first-step", "t": self.progress.first_t})

    def _printed_records(self, final: bool) -> List[str]:
        """Scripts that know nothing of us still print how they get on."""
        if self._printed is None:
            return []
        records = self._printed.read(final)
        if self._steps_reported:  # a program that reports its steps itself is not counted twice
            records = [record for record in records if record["kind"] != "step"]
        return [json.dumps({"t": time.time(), **record}) for record in records]
