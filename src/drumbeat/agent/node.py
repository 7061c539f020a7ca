"""The node: starts this node's processes, ends them, and says how each one went. What it does, the lead has decided."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from dataclasses import replace
from typing import Callable, List, Optional, Set

from drumbeat import clock
from drumbeat.agent.folder_child import FolderChild
from drumbeat.agent.guard import warn
from drumbeat.agent.local_caches import private_caches
from drumbeat.agent.looks.child import Looker
from drumbeat.agent.looks.ras import RasNote
from drumbeat.agent.looks.record import RankLook
from drumbeat.agent.monitor import monitor_argv
from drumbeat.agent.node_metrics import NodeMetrics
from drumbeat.agent.ranks.explain import Explainer
from drumbeat.agent.ranks.handles import Rank, Ranks
from drumbeat.agent.ranks.launchers import End, launcher_of
from drumbeat.agent.ranks.merged_logs import Shipping, is_large
from drumbeat.agent.ranks.own_scripts import bring, filled
from drumbeat.agent.ranks.start import start
from drumbeat.agent.ranks.tasks import Tasks
from drumbeat.agent.watchers.build import Scene, build_watchers, gate_of
from drumbeat.agent.watchers.feed import Watching
from drumbeat.agent.watchers.transport_sensors import OpenGate
from drumbeat.agent.wire.messages import Beat, Done, FirstStep, Found, Look, Looked, Message, RankEnded, StartRank
from drumbeat.facts.identity import rank_variables
from drumbeat.facts.model import Facts, Peers
from drumbeat.finding import ERROR, WARNING, Finding
from drumbeat.order import EnvVar, Order
from drumbeat.plan.argv import Process, processes
from drumbeat.plan.binding import Binding, binding, right_binding
from drumbeat.plan.environment import environment
from drumbeat.plan.ranks import flight_recorder, jax_identity, node_identity, trace
from drumbeat.processes import children, describe, kill_children, rank_in_environment, sweep
from drumbeat.record import to_plain
from drumbeat.runfolder.layout import NodeFolder
from drumbeat.runfolder.write import EventLog, replace_json

_PRIVATE = ("DRUMBEAT_TOKEN",)  # the ranks have no use for it
_SWEEP = 10.0  # seconds after which a process that was killed and is still there counts as stuck


class Node:
    """`tell` sends a message to the lead; `beat` is called where something takes its time; `child` writes the run folder."""

    def __init__(
        self,
        order: Order,
        member: int,
        facts: Facts,
        folder: NodeFolder,
        bundle: str,
        tell: Callable[[Message], None],
        tasks: Tasks,
        beat: Callable[[], None],
        child: FolderChild,
    ) -> None:
        self.order, self.facts, self.folder, self.bundle = order, facts, folder, bundle
        self.tell, self.tasks, self.beat, self.child = tell, tasks, beat, child
        os.makedirs(folder.path, exist_ok=True)
        self.events = EventLog(folder.events, member, child.append)
        self.local = tempfile.mkdtemp(prefix=f"drumbeat-{order.run_id[:40]}-{member}-")  # node-local: many small writes
        self.attempt = 0
        self.node_rank = member
        self.active = False
        self.stopped_by_us = False
        self.kill_at: Optional[float] = None  # when the grace ends
        self.sweep_until: Optional[float] = None  # all is being killed; what is there then is stuck
        self.ranks = Ranks(tasks)
        self.gates: List[OpenGate] = []
        self.watching = Watching((), (), self.events.write, tell)
        self.reaped = 0
        self.logs = folder
        shipping: Optional[Shipping] = None
        if is_large(order, order.ranks_per_node or len(facts.gpus) or 1):
            self.logs = NodeFolder(tempfile.mkdtemp(prefix=f"drumbeat-logs-{order.run_id[:40]}-{member}-"), member)
            shipping = Shipping(self.logs, folder, child.append, self._make_room)
        self.local_logs = self.logs.path if shipping else ""
        self.metrics = NodeMetrics(folder, self.local, shipping, child)
        self.launcher = launcher_of(order, folder, self.logs, bundle, self.local)
        self.explainer = self._new_explainer()
        self.looker = Looker(order.run_id, self.local, facts.gpus, self._looked)
        self._first_step_told = False
        replace_json(folder.facts, facts)
        self.monitor = 0 if order.emulated and member else self._start_monitor()  # one machine needs one

    # -- what the lead asks ------------------------------------------------------------------------------------------

    def start(self, attempt: int, node_rank: int, peers: Peers) -> None:
        assert not self.active, "an attempt begins when nothing of the last one is alive"
        self.attempt = self.events.attempt = attempt
        self.node_rank = node_rank
        self.active, self.kill_at, self.sweep_until, self.stopped_by_us = True, None, None, False
        self.ranks = Ranks(self.tasks)
        os.makedirs(self.folder.attempt(attempt), exist_ok=True)
        os.makedirs(self.logs.attempt(attempt), exist_ok=True)
        facts = self.tasks.facts(self.facts)
        right = right_binding(self.order, facts, node_rank)
        bound = self._bind(facts, right)
        variables, unsafe_caches = private_caches(environment(self.order, self.facts, peers, node_rank), self.local)
        for finding in unsafe_caches:
            self._tell_finding(finding)
        place = os.path.abspath(self.folder.attempt(attempt))
        variables += node_identity(self.order, peers, node_rank, attempt, self.metrics.path, place)
        stand_ins = self.launcher.prepare(attempt, node_rank, peers, bound)
        self.gates = gate_of(self.order, self._gate)
        for gate in self.gates:
            variables = gate.open(variables, self.folder.attempt(attempt))
        if self.order.checks.get("hang", "off") != "off":
            variables += flight_recorder(variables, os.environ)
        bring(self.order, self.folder.attempt(attempt))
        known = {"attempt": attempt, "variables": [*variables, *stand_ins], "binding": bound}
        replace_json(self.folder.environment, known)
        self._watch(peers, facts, bound, right, variables)
        self.explainer = self._new_explainer()
        for process in processes(self.order, peers, node_rank, self.launcher.tools(attempt, node_rank, bound)):
            self._start_one(process, [*variables, *stand_ins], bound)
        self.watching.feed("started", {"pids": self.ranks.pids}, time.monotonic())
        self.metrics.begin_attempt(self.logs.attempt(attempt))
        self._first_step_told = False

    def stop(self, number: int, grace: float) -> None:
        """Signal what trains, once; a second request can only make the grace end earlier."""
        if not self.active:
            return
        ends = time.monotonic() + grace
        self.kill_at = ends if self.kill_at is None else min(ends, self.kill_at)
        if not self.stopped_by_us:
            self.stopped_by_us = True
            self.ranks.stop(number, self.beat)

    # -- what happens ------------------------------------------------------------------------------------------------

    def on_exit(self, pid: int, status: int) -> None:
        """A child was reaped; it may be an orphan that only became ours."""
        if pid == self.monitor:
            self.monitor = 0
            return
        self.reaped += 1
        rank = self.ranks.own_ended(pid)
        if rank:
            self._process_ended(rank, status)

    def on_task_started(self, local_id: int, pid: int) -> None:
        rank = self.ranks.guarded(local_id)
        if rank:
            self.ranks.guarded_pids[local_id] = pid
            self._write_started(rank.process, pid, ())

    def on_task_ended(self, local_id: int, status: int) -> None:
        rank = self.ranks.task_ended(local_id)
        if rank:
            self._process_ended(rank, status)

    def tick(self, now: float) -> None:
        self._ship()
        if not self.active:
            return
        self.watching.tick(now)
        self.looker.poll(now)
        grace_is_over = self.kill_at is not None and now >= self.kill_at
        if self.sweep_until is None and (grace_is_over or not (self.ranks or self.ranks.saving())):
            self.sweep_until = now + _SWEEP
            self.tasks.kill()
        if self.sweep_until is not None:
            self._sweep(now)

    def kill(self) -> None:
        """End everything now, whatever the lead thinks: it may be gone."""
        self.stopped_by_us = True
        self.tasks.kill()
        for stuck in sweep(self._kept(), reaped=self.on_exit):
            warn(f"cannot be ended: {stuck}")
        self.active = False

    def mute(self) -> None:
        """The run folder cannot be written any more: go on without it, until the ranks have saved."""
        self.events.muted = True

    def close(self, seconds: float) -> None:
        self._ship(final=True)
        self._end_monitor()
        times = os.times()
        self.events.write(
            "agent-ended",
            {
                "cpu_seconds": round(times.user + times.system, 3),
                "seconds": round(seconds, 3),
                "reaped": self.reaped,
            },
        )
        self.events.close()
        shutil.rmtree(self.local, ignore_errors=True)

    def progress_beat(self) -> Beat:
        if not self.active:
            return Beat()
        return self.metrics.ranks.beat(self.metrics.progress.last_t, time.monotonic())

    def look(self, request: Look) -> None:
        """Somebody wants to know what the ranks are doing; the answer comes when a child has looked."""
        if self.active and request.attempt == self.attempt:
            self.looker.start(request.number, self.node_rank, self.ranks.rank_of, time.monotonic())

    def _looked(self, number: int, found: List[RankLook], notes: List[RasNote]) -> None:
        now, looks = time.monotonic(), []
        for look in found:
            step, quiet = self.metrics.ranks.last(look.rank, now)
            looks.append(replace(look, host=self.facts.host, node=self.node_rank, step=step, quiet=quiet))
        shown = to_plain({"t": clock.now(), "ranks": looks, "ras": notes})
        self.child.replace(self.folder.looks(self.attempt), json.dumps(shown, indent=2) + "\n")
        self.tell(Looked(self.attempt, number, tuple(looks), tuple(notes)))

    # -- starting ----------------------------------------------------------------------------------------------------

    def _gate(self) -> OpenGate:
        return OpenGate(self.order, self.node_rank, self.facts, self.local, self._rank_of, self._out_of)

    def _bind(self, facts: Facts, right: Binding) -> Binding:
        """Which cores each rank gets: the job's own, else those of its task, else those beside its GPU."""
        if self.order.cpu_bind or not self.tasks.views:
            return binding(self.order, facts, self.node_rank)
        bound = self.tasks.bound(right, facts)
        for finding in bound.findings[len(right.findings) :]:
            if finding.severity in (WARNING, ERROR):
                self._tell_finding(finding)
            else:
                self.events.write("finding", {"finding": replace(finding, node=self.node_rank)})
        return bound

    def _tell_finding(self, finding: Finding) -> None:
        self.tell(Found(replace(finding, node=self.node_rank, host=self.facts.host)))

    def _watch(self, peers: Peers, facts: Facts, bound: Binding, right: Binding, variables: List[EnvVar]) -> None:
        first = sum(peer.ranks for peer in peers.nodes[: self.node_rank])
        ranks = len(bound.slots) if self.launcher.starts_ranks else 0
        scene = Scene(
            self.node_rank, first, facts, bound, right, variables, ranks, self.local, self.attempt,
            peers.nodes[self.node_rank].ranks, peers.master_port, lambda: self.ranks.mains, self.beat,
        )  # fmt: skip
        self.watching = build_watchers(self.order, scene, self.gates, self.events.write, self.tell)
        self.watching.tick(time.monotonic())  # how the counters stood before

    def _new_explainer(self) -> Explainer:
        kept = self.folder.merged(self.attempt) if self.local_logs else ""
        return Explainer(self.order, self.logs, self.launcher, self.attempt, kept)

    def _start_one(self, process: Process, shared: List[EnvVar], bound: Binding) -> None:
        variables = [*shared, *self.launcher.own_variables(process, bound)]
        variables += self._for_jax(process, variables)
        if self.order.trace:
            variables += trace(os.path.join(self.folder.attempt(self.attempt), f"nccl-{process.rank}.%h.%p"))
        added = {variable.name: variable.value for variable in variables}
        cpus = tuple(self.launcher.cpus(process, bound))
        out, err = (self.launcher.log(self.attempt, process.rank, stream) for stream in ("out", "err"))
        argv = filled(self.order, process.argv, self.folder.attempt(self.attempt))
        if process.local_rank in self.tasks.lines:
            # What the scheduler gave each task in its own way (its devices, say) stays as that task has it.
            added = {name: value for name, value in added.items() if os.environ.get(name) != value}
            self.ranks.add_guarded(process.local_rank, process)
            self.tasks.start(process.local_rank, StartRank(argv, added, self.order.workdir, out, err, cpus))
            return
        env = {name: value for name, value in os.environ.items() if name not in _PRIVATE}
        environ = {**env, **added}
        if self.order.launcher == "ranks":  # one task has started several: each is told which one it is
            environ.update(rank_variables(environ))
        pid = start(argv, environ, self.order.workdir, out, err, cpus)
        self.ranks.add_own(pid, process)
        self._write_started(process, pid, cpus)

    def _for_jax(self, process: Process, variables: List[EnvVar]) -> List[EnvVar]:
        """What jax.distributed.initialize needs, unless somebody has set it, or a launcher inside starts other ranks."""
        known = {**os.environ, **{variable.name: variable.value for variable in variables}}
        alone = self.order.launcher == "once" and known.get("LOCAL_WORLD_SIZE") == "1"
        if "JAX_COORDINATOR_ADDRESS" in known or not (alone or self.order.launcher in ("ranks", "tasks")):
            return []
        return jax_identity(known, process.rank)

    def _write_started(self, process: Process, pid: int, cpus: tuple[int, ...]) -> None:
        where = {"rank": process.rank, "local_rank": process.local_rank, "pid": pid, "cpus": list(cpus)}
        self.events.write("rank-started", where)

    def _rank_of(self, pid: int) -> Optional[int]:
        rank = self.ranks.own(pid)
        return rank.process.rank if rank else rank_in_environment(pid)

    def _out_of(self, rank: Optional[int]) -> str:
        if rank is None:
            return self.launcher.log(self.attempt, 0, "out")
        return self.logs.log(self.attempt, rank, "out")

    # -- ending ------------------------------------------------------------------------------------------------------

    def _process_ended(self, rank: Rank, status: int) -> None:
        for end in self.launcher.ends(self.attempt, rank.process, status):
            self._rank_ended(end, round(time.monotonic() - rank.started, 3))

    def _rank_ended(self, end: End, seconds: float) -> None:
        about = {"rank": end.rank, "exit_code": end.exit_code, "signal": end.signal}
        self.events.write("rank-exited", {**about, "seconds": seconds, "core_dumped": end.core_dumped})
        self.metrics.ranks.ended(end.rank)
        self.watching.feed("exited", about, time.monotonic())
        finding = None
        if end.exit_code != 0:
            run_folder = os.path.dirname(os.path.dirname(self.folder.path))
            finding = end.finding or self.explainer.explain(end, self.stopped_by_us, run_folder)
            rank: Optional[int] = end.rank
            if not self.launcher.starts_ranks or end.of_command:  # a launcher names the rank in its own lines
                rank = finding.rank if end.of_command or finding.rank is not None else end.rank
            finding = replace(finding, rank=rank, node=self.node_rank, host=self.facts.host)
            for gate in self.gates:
                gate.failed = gate.failed or not self.stopped_by_us
        elif self.launcher.may_hide_failures and not self.stopped_by_us:
            run_folder = os.path.dirname(os.path.dirname(self.folder.path))
            finding = self.explainer.doubt(end, self.launcher.once, run_folder)
            if finding:
                rank = finding.rank if self.launcher.once else end.rank
                finding = replace(finding, rank=rank, node=self.node_rank, host=self.facts.host)
        by_us = self.stopped_by_us
        self.tell(RankEnded(self.attempt, end.rank, end.exit_code, end.signal, end.at, by_us, finding))

    def _sweep(self, now: float) -> None:
        """Kill what is left, turn by turn; the loop reaps. Only when nothing is left is this attempt over."""
        alive = kill_children(self._kept())
        if not alive and not len(self.ranks):
            self._finish("")
        elif self.sweep_until is not None and now >= self.sweep_until:
            stuck = [describe(pid) for pid in children() if pid not in self._kept()]
            self.ranks.forget()
            self._finish("; ".join(stuck) or "a task of the scheduler does not answer")

    def _finish(self, stuck: str) -> None:
        self.active, self.sweep_until = False, None
        self.looker.end()
        try:
            self.metrics.finish(self.beat)
            self._ship(final=True)
            self.watching.end(time.monotonic())
            for gate in self.gates:
                gate.close(self.folder.attempt(self.attempt))
        except OSError:
            if not self.events.muted:
                raise
        self.tell(Done(self.attempt, self.metrics.progress.to_plain(), stuck))

    def _make_room(self) -> None:
        """Between two pieces of a long log: what waits to be written stays small."""
        self.beat()
        self.child.pump()
        if self.child.full:
            self.child.flush(1.0, self.beat)

    def _ship(self, final: bool = False) -> None:
        if self.events.muted:
            return
        for record in self.metrics.ship(self.attempt, final):
            self.watching.feed("metric", record, time.monotonic())
        if self.metrics.progress.first_t is not None and not self._first_step_told:
            self._first_step_told = True
            self.tell(FirstStep(self.metrics.progress.first_t))

    # -- the monitor -------------------------------------------------------------------------------------------------

    def _kept(self) -> Set[int]:
        """The monitor and the folder's child go on between attempts."""
        return {self.child.pid, self.monitor} - {0}

    def _start_monitor(self) -> int:
        argv = monitor_argv(self.bundle, self.folder.telemetry, self.facts, self.order, self.folder.node)
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
