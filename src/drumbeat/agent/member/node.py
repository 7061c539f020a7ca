"""The node: starts this node's processes, ends them, and reports how each one ended. All its acts are decided by the lead."""

from __future__ import annotations

import math
import os
import shutil
import time
from dataclasses import replace
from typing import Callable, Dict, List, Optional, Sequence, Set, Tuple

from drumbeat.agent.folder.child import FolderChild, Shipping, is_large
from drumbeat.agent.guard import warn
from drumbeat.agent.member.looks import NodeLooks
from drumbeat.agent.member.monitor import MonitorProcess
from drumbeat.agent.member.progress import NodeMetrics
from drumbeat.agent.ranks.ends import Ends, Explainer, rank_meant, with_last_step
from drumbeat.agent.ranks.handles import Rank, Ranks, Starter, bring, inherited, install_adapters
from drumbeat.agent.ranks.launchers import launcher_of
from drumbeat.agent.ranks.start import End, plain_end
from drumbeat.agent.ranks.tasks import Tasks
from drumbeat.agent.watchers.build import build_watchers
from drumbeat.agent.watchers.contract import Record, Tell, WatchedAttempt, Watching
from drumbeat.agent.watchers.kernel_log import KernelLog
from drumbeat.agent.watchers.nccl_log import LogFiles
from drumbeat.agent.watchers.transport import OpenGate
from drumbeat.agent.wire.messages import Beat, Done, FirstStep, Found, KillRank, Look, Message, RankEnded
from drumbeat.base import clock, proc
from drumbeat.base.folders import make_private, make_temporary
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import EnvVar, Order
from drumbeat.base.proc import children
from drumbeat.base.processes import IN_KERNEL, describe, kill_children, on_storage, sweep
from drumbeat.base.record import to_json, to_plain
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import ERROR, WARNING, Finding
from drumbeat.inspector.kernel_log import own_log
from drumbeat.inspector.ranks import identity_in
from drumbeat.inspector.record import Known
from drumbeat.machine.model import Facts, Peers
from drumbeat.plan.argv import node_identity, processes
from drumbeat.plan.binding import binding, right_binding
from drumbeat.plan.environment import environment
from drumbeat.plan.network import compute_nics, lone_rails
from drumbeat.runfolder.files import EventLog
from drumbeat.runfolder.layout import NodeFolder, RunFolder

find = Catalog("lead")

# Caches of compiled kernels on a node's own disk. Their files are loaded and run, so nobody else may write there. Their paths
# are the same for every run, so that a cache is reused, but also predictable: each folder is created with mode 0700, and one
# that another user owns or can write to is not used.


_CACHES = ("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def private_caches(variables: Sequence[EnvVar], own: str) -> Tuple[List[EnvVar], List[Finding]]:
    """Return the variables with each planned cache set to a private folder: the planned one, or a new one below `own` if that
    is not safe. Values set by the user or the site are kept."""
    chosen: List[EnvVar] = []
    problems: Dict[str, str] = {}  # planned path -> why it is not used
    for variable in variables:
        if variable.name in _CACHES and variable.source == "default":
            path = variable.value
            if path not in problems:
                problems[path] = make_private(path)
            if problems[path]:
                path = os.path.join(own, os.path.basename(path))
                os.makedirs(path, mode=0o700, exist_ok=True)
                why = f"empty and for this run only: {problems[variable.value]}"
                variable = replace(variable, value=path, why=why, source="detected")
        chosen.append(variable)
    findings = [find("cache-not-private", why=why, path=path, evidence=[why]) for path, why in problems.items() if why]
    return chosen, findings


# The watchers of this node's ranks: the transport gate, the watchers of each attempt, and the kernel log reader.


class NodeWatch(Watching):
    """Watches one node. `local`: a folder on the node's own disk; `record` writes an event of this node; `tell` sends a
    message to the lead."""

    def __init__(self, order: Order, member: int, facts: Facts, local: str, record: Record, tell: Tell) -> None:
        super().__init__(record, tell)
        self.order, self.member, self.facts, self.local = order, member, facts, local
        self._gates: List[OpenGate] = []
        self._kernel_log: Optional[KernelLog] = None

    def open_gates(
        self, variables: List[EnvVar], folder: str, rank_of: Callable[[int], Optional[int]],
        out_of: Callable[[Optional[int]], str],
    ) -> List[EnvVar]:  # fmt: skip
        """Open the transport gate, if the job wants one, before the ranks' variables are final: it may add some. `folder`: the
        attempt's part of the run folder; `rank_of`: the rank of a pid; `out_of`: the output file of a rank, or of the node's
        command."""
        if self.order.checks.get("transport", "off") != "off":
            self._gates = [OpenGate(self.order, self.member, self.facts, self.local, rank_of, out_of)]
            variables = self._gates[0].open(variables, folder)
        return variables

    def begin(self, scene: WatchedAttempt) -> None:
        scene = replace(scene, kernel_log=self._follow_kernel_log())
        self.attempt, (self.watchers, self.sensors) = scene.attempt, build_watchers(self.order, scene, self._gates)
        self.tick(time.monotonic())  # read the counters' initial values

    def rank_failed(self) -> None:
        for gate in self._gates:
            gate.failed = True

    @property
    def kept_logs(self) -> List[LogFiles]:
        """Return the logs that help to explain a failure."""
        return [gate.log for gate in self._gates if gate.log and gate.keeps_log]

    @property
    def pid(self) -> int:
        """Return the pid of the process that reads the kernel's log; 0 if there is none."""
        return self._kernel_log.pid if self._kernel_log else 0

    def _follow_kernel_log(self) -> List[KernelLog]:
        """Follow the kernel's log if the node has GPUs. Emulated nodes share a machine, so only one of them reads its log."""
        own = own_log(self.member)
        gpus = any(not gpu.integrated for gpu in self.facts.gpus)
        if not own and (not gpus or (self.order.emulated and self.member)):
            return []
        self._kernel_log = KernelLog(own)
        return [self._kernel_log]


_MAKE_FOLDERS, _KEEP = 30.0, 30.0  # seconds to create an attempt's folders, and to keep logs at its end
_SETTLED = 30.0  # seconds after the start of an attempt in which much happens
_READ_WITHIN = 1.0  # seconds that a printed step may wait for its reader
_TOLD_WITHIN = 2.0  # seconds that a task's message may take
_SWEEP = 20.0  # seconds after which a killed process that waits in the kernel counts as stuck
_DYING = 30.0  # the same for a killed process that only takes long to end


@dataclass(frozen=True)
class Services:
    """Parts of the agent that its node uses."""

    tell: Callable[[Message], None]  # sends a message to the lead
    tasks: Tasks
    beat: Callable[[], None]  # called during long work
    child: FolderChild  # writes the run folder
    monitor: MonitorProcess


class Node:
    """One node of a run: starts, watches and ends its ranks, attempt after attempt."""

    def __init__(
        self, order: Order, member: int, facts: Facts, folder: NodeFolder, bundle: str, services: Services
    ) -> None:
        self.order, self.member, self.facts, self.folder, self.bundle = order, member, facts, folder, bundle
        tell, tasks, child = self.tell, self.tasks, self.child = services.tell, services.tasks, services.child
        self.beat, self.monitor = services.beat, services.monitor
        self.events = EventLog(folder.events, member, child.append)
        self.local = make_temporary(f"drumbeat-{order.run_id[:40]}-{member}-", bundle)  # node-local: many small writes
        # Unnamed files, four per rank: they outlive the ranks, and end with the agent.
        self.memory: List[int] = []
        self.beside: Set[int] = set()  # processes of the lead that stay alive between attempts
        self.attempt = 0
        self.failed_in = -1  # the last attempt in which a rank of this node failed by itself
        self.node_rank = member
        self.active = False
        self.stopped_by_us = False
        self.kill_at: Optional[float] = None  # end of the grace period
        self.sweep_until: Optional[float] = None  # all is being killed; whatever is left at this time is stuck
        self.ranks, self.known, self.reaped_at = Ranks(tasks), Known(), clock.now()
        self.watch = NodeWatch(order, member, facts, self.local, self.events.write, tell)
        self.reaped = 0
        self.logs = folder
        shipping: Optional[Shipping] = None
        if is_large(order, order.ranks_per_node or len(facts.gpus) or 1):
            self.logs = NodeFolder(make_temporary(f"drumbeat-logs-{order.run_id[:40]}-{member}-"), member)
            shipping = Shipping(self.logs, folder, child.append, self._make_room)
        self.local_logs = self.logs.path if shipping else ""
        self.metrics = NodeMetrics(folder, self.local, shipping, child)
        self.launcher = launcher_of(order, folder, self.logs, bundle, self.local)
        self.starter = Starter(order, folder, self.launcher, tasks, self.events)
        self._calm_from = math.inf
        self.ends = self._new_ends()
        self.looks = NodeLooks(order, facts, self.local, folder, self.metrics, child, tell)
        self._first_step_told = False

    # -- requests of the lead ----------------------------------------------------------------------------------------

    def start(self, attempt: int, node_rank: int, peers: Peers) -> None:
        assert not self.active, "an attempt begins when nothing of the last one is alive"
        self.attempt = self.events.attempt = attempt
        self.node_rank = node_rank
        self.active, self.kill_at, self.sweep_until, self.stopped_by_us = True, None, None, False
        self.ranks = Ranks(self.tasks)
        self._calm_from = time.monotonic() + _SETTLED
        self.known = Known()
        self.looks.begin_attempt(attempt, node_rank, self.member, self.known)
        on_storage(lambda: self._make_folders(attempt), _MAKE_FOLDERS, self.beat, self.folder.path)
        scene = self._plan(peers)
        bound, variables = scene.bound, list(scene.variables)
        known = {**inherited(), **{variable.name: variable.value for variable in variables}}
        run_folder = os.path.dirname(os.path.dirname(os.path.abspath(self.folder.path)))
        trackers = RunFolder(run_folder).trackers if self.order.may_come_back else ""
        helpers = self.launcher.prepare(attempt, node_rank, peers, bound)
        helpers += install_adapters(self.local, known, trackers)
        folder = self.folder.attempt(attempt)
        variables = self.watch.open_gates(variables, folder, self._rank_of, self._out_of)
        record = {"attempt": attempt, "variables": [*variables, *helpers], "binding": bound}
        self.child.replace(self.folder.environment, to_json(record) + "\n")
        final = {each.name: each for each in helpers}  # a PYTHONPATH of the job gets the adapters' folder prepended
        self.watch.begin(replace(scene, variables=[final.get(each.name, each) for each in variables]))
        self.ends = self._new_ends((peers.master_addr, *(peer.host for peer in peers.nodes)))
        to_start = processes(self.order, peers, node_rank, self.launcher.tools(attempt, node_rank, bound))
        self.starter.start(self.ranks, attempt, to_start, [*variables, *helpers], bound)
        self._note_ranks()
        self.watch.feed("started", {"pids": list(self.ranks.own)}, time.monotonic())
        self.metrics.begin_attempt(self.logs.attempt(attempt))
        self._first_step_told = False

    def stop(self, number: int, grace: float) -> None:
        """Signal the processes that train, once; a later request only changes the end of the grace period."""
        if not self.active:
            return
        self.kill_at = time.monotonic() + grace
        if not self.stopped_by_us:
            self.stopped_by_us = True
            self.ranks.stop(number, self.beat)

    # -- events ------------------------------------------------------------------------------------------------------

    def on_exit(self, pid: int, status: int) -> None:
        """Handle a reaped child, which may be an adopted orphan."""
        if self.monitor.ended(pid):
            return
        self.beside.discard(pid)
        self.reaped += 1
        rank = self.ranks.own.pop(pid, None)
        if rank:
            self._process_ended(rank, status, self.reaped_at)

    def on_task_started(self, local_id: int, pid: int) -> None:
        rank = self.ranks.guarded.get(local_id)
        if rank:
            self.ranks.guarded_pids[local_id] = pid
            self._note_ranks()
            self.starter.note_started(rank.process, pid, ())

    def on_task_ended(self, local_id: int, status: int) -> None:
        rank = self.ranks.guarded.pop(local_id, None)
        if rank:  # its task reaped it, and told us later
            self._process_ended(rank, status, self.reaped_at - _TOLD_WITHIN)

    def tick(self, now: float) -> None:
        self._ship()
        if not self.active:
            return
        self.watch.tick(now)
        self.looks.poll(self.ranks, self.launcher)
        if len(self.ranks):
            self.ends.hear(self.stopped_by_us)
        self.ends.poll()
        grace_is_over = self.kill_at is not None and now >= self.kill_at
        if self.sweep_until is None and (grace_is_over or not (self.ranks or self.ranks.saving())):
            self.sweep_until = now + _SWEEP
            self.tasks.send_all(KillRank())
        if self.sweep_until is not None:
            self._sweep(now)

    @property
    def calm(self) -> bool:
        """Return true if the ranks have worked for a while, and none has ended or been asked to."""
        return self.active and not (self.stopped_by_us or self.ends) and time.monotonic() > self._calm_from

    def kill(self) -> None:
        """End everything now, without the lead, which may be gone."""
        self.stopped_by_us = True
        self.tasks.send_all(KillRank())
        for stuck in sweep(self._kept(), reaped=self.on_exit):
            warn(f"cannot be ended: {stuck}")
        self.ends.give_up()
        self.active = False

    def mute(self) -> None:
        """Stop writing to the run folder, which fails; go on until the ranks have saved."""
        self.events.muted = True

    def close(self, seconds: float) -> None:
        self._ship(final=True)
        self.monitor.end()
        times = os.times()
        self.events.write(
            "agent-ended",
            {"cpu_seconds": round(times.user + times.system, 3), "seconds": round(seconds, 3), "reaped": self.reaped},
        )
        self.events.close()
        shutil.rmtree(self.local, ignore_errors=True)

    def progress_beat(self) -> Beat:
        if not self.active:
            return Beat()
        beat = self.metrics.ranks.beat(self.metrics.progress.last_t, time.monotonic())
        return replace(beat, waits_least=self.looks.waits_least, waits=self.looks.waits, rests=self.looks.rests)

    def look(self, request: Look) -> None:
        """Start a look at the ranks for a request; the answer follows when the child has finished."""
        if self.active and request.attempt == self.attempt:
            self.looks.start(request.number, self.ranks, self.launcher)

    # -- starting ----------------------------------------------------------------------------------------------------

    def _make_folders(self, attempt: int) -> None:
        """Create, in a child, the attempt's folders and the files that the job brings."""
        os.makedirs(self.folder.attempt(attempt), exist_ok=True)
        os.makedirs(self.logs.attempt(attempt), exist_ok=True)
        bring(self.order, self.folder.attempt(attempt))

    def _note(self, finding: Finding) -> None:
        """Tell the user about possible errors; only record the rest."""
        finding = replace(finding, node=self.member)
        if finding.severity in (WARNING, ERROR):
            self.tell(Found(replace(finding, host=self.facts.host)))
        else:
            self.events.write("finding", {"finding": finding})

    def _plan(self, peers: Peers) -> WatchedAttempt:
        """Plan cores, GPUs and variables of the attempt on this node, and report what is wrong with them. Each rank's cores are
        those set by the job, else those of its task, else those near its GPU."""
        order, node, facts = self.order, self.node_rank, self.tasks.facts(self.facts)
        right = right_binding(order, facts, node, peers=peers)
        findings: Tuple[Finding, ...] = ()
        if order.cpu_bind or not self.tasks.views:
            bound = binding(order, facts, node, peers)
        else:
            bound = self.tasks.bound(right, facts)
            findings = bound.findings[len(right.findings) :]
        variables, unsafe_caches = private_caches(environment(order, facts, peers, node), self.local)
        folder = os.path.abspath(self.folder.attempt(self.attempt))
        while hasattr(os, "memfd_create") and len(self.memory) < 4 * peers.nodes[node].ranks:
            self.memory.append(os.memfd_create("drumbeat"))
        memory = f"{os.getpid()}:{','.join(map(str, self.memory))}"
        variables += node_identity(order, peers, node, self.attempt, self.metrics.path, folder, memory)
        lone = lone_rails(compute_nics(facts, peers), facts.host)
        for finding in (*findings, *unsafe_caches, *lone):
            self._note(finding)
        first = sum(peer.ranks for peer in peers.nodes[:node])
        ranks = len(bound.slots) if self.launcher.starts_ranks else 0
        return WatchedAttempt(
            self.member, node, first, facts, bound, right, variables, ranks, self.attempt,
            peers.nodes[node].ranks, peers.master_port, lambda: list(self.ranks.rank_of),
            lambda: self.launcher.is_rank, self.launcher.met, self.known,
        )  # fmt: skip

    def _note_ranks(self) -> None:
        for pid, rank in self.ranks.rank_of.items() if self.launcher.is_rank else ():
            self.known.note(pid, rank)

    def _new_ends(self, hosts: Sequence[str] = ()) -> Ends:
        run_folder = os.path.dirname(os.path.dirname(self.folder.path))
        kept = self.folder.merged(self.attempt) if self.local_logs else ""
        explainer = Explainer(self.order, self.logs, self.launcher, self.attempt, run_folder, kept, self.facts)
        explainer.written, explainer.hosts = self.child.printed.written, hosts
        return Ends(self.launcher, explainer, self.attempt, self._rank_ended, self.known, notes=self.local)

    def _rank_of(self, pid: int) -> Optional[int]:
        rank = self.ranks.own.get(pid)
        return rank.process.rank if rank else identity_in(proc.environ(pid) or {}).rank

    def _out_of(self, rank: Optional[int]) -> str:
        if rank is None:
            return self.launcher.log(self.attempt, 0, "out")
        return self.logs.log(self.attempt, rank, "out")

    # -- ending ------------------------------------------------------------------------------------------------------

    def _process_ended(self, rank: Rank, status: int, since: float) -> None:
        seconds = round(time.monotonic() - rank.started, 3)
        end = plain_end(rank.process.rank, status, clock.now())
        self.ends.add(replace(end, since=since, seconds=seconds, by_us=self.stopped_by_us))

    def _rank_ended(self, end: End) -> None:
        self._calm_from = math.inf
        about = {"rank": end.rank, "exit_code": end.exit_code, "signal": end.signal, "of_command": end.of_command}
        self.events.write("rank-exited", {**about, "seconds": end.seconds, "core_dumped": end.core_dumped})
        own, silent = self.metrics.ranks.last(end.rank, time.monotonic())
        step = own or self.metrics.progress.step
        last = math.inf if silent is None else clock.now() - silent - _READ_WITHIN
        self.metrics.ranks.ended(None if end.of_command else end.rank)
        self.watch.feed("exited", about, time.monotonic())

        def placed(finding: Finding) -> Finding:
            rank = rank_meant(self.launcher, end, finding)
            return replace(with_last_step(finding, step), rank=rank, node=self.member, host=self.facts.host)

        finding = placed(end.finding) if end.finding else None
        # Its own steps say more than those of others.
        later = tuple((t, placed(each)) for t, each in end.later if t < last)
        if end.exit_code != 0 and not end.by_us:
            self.failed_in = self.attempt
            self.watch.rank_failed()
        self.tell(RankEnded(self.attempt, replace(end, finding=finding, later=later)))

    def _sweep(self, now: float) -> None:
        """Kill the remaining processes, once per turn; the loop reaps them. The attempt is over only when none is left."""
        alive = kill_children(self._kept())
        if self.ends:  # the child that reads the ends has its own deadline
            self.sweep_until = now + _SWEEP
            return
        if not alive and not len(self.ranks):
            self._finish("")
        elif self.sweep_until is not None and now >= self.sweep_until:
            stuck = [describe(pid) for pid in children() if pid not in self._kept()]
            if stuck and IN_KERNEL not in " ".join(stuck) and now < self.sweep_until + _DYING - _SWEEP:
                return
            self.ranks.forget()
            self._finish("; ".join(stuck) or "a task of the scheduler does not answer")

    def _finish(self, stuck: str) -> None:
        """End the attempt. An error is handled by the loop, which mutes this node; the next tick then calls this again."""
        self.looks.end()
        try:
            self.metrics.finish(self.beat)
            self._ship(final=True)
            self.watch.end(time.monotonic())
            kept = self.watch.kept_logs
            if kept:

                def keep() -> None:  # in a child; other files are removed with the node's own folder
                    for log in kept:
                        log.keep(self.folder.attempt(self.attempt))

                on_storage(keep, _KEEP, self.beat, self.folder.path)
        except OSError:
            if not self.events.muted:
                raise
        self.active, self.sweep_until = False, None
        self.tell(Done(self.attempt, to_plain(self.metrics.progress), stuck, self.metrics.ranks.short()))

    def _make_room(self) -> None:
        """Send pending data between two pieces of a long log, so that it stays small."""
        self.beat()
        self.child.pump()
        if self.child.full:
            self.child.flush(1.0, self.beat)

    def _ship(self, final: bool = False) -> None:
        if self.events.muted:
            return
        for began in self.launcher.new_stages():
            self.metrics.stage_began(self.launcher.first_rank, began)
        for record in self.metrics.ship(self.attempt, final):
            self.watch.feed("metric", record, time.monotonic())
        if self.metrics.progress.first_t is not None and not self._first_step_told:
            self._first_step_told = True
            self.tell(FirstStep(self.metrics.progress.first_t))

    def _kept(self) -> Set[int]:
        """Return the pids that a sweep must not kill: the monitor and the folder's processes stay between attempts, the reader
        of ranks' ends has a deadline, and the kernel log is read until the attempt is over."""
        return {
            self.child.pid,
            self.child.printed.pid,
            self.monitor.pid,
            self.ends.pid,
            self.watch.pid,
            *self.beside,
        } - {0}
