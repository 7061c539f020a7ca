"""A run in the foreground: start the agents, show the run folder's news, pass signals on, and leave no process behind."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import Any, Container, Dict, Iterable, List, Mapping, Optional, Set, Tuple

from drumbeat.agent.place import own_node, placed, task_meeting
from drumbeat.backends.contract import job_handle
from drumbeat.base import clock, proc
from drumbeat.base.order import Order, dump_order, read_order
from drumbeat.base.problem import Problem
from drumbeat.base.proc import children
from drumbeat.base.processes import become_subreaper, launcher_descriptors, sweep
from drumbeat.base.record import RecordError, from_plain
from drumbeat.base.signals import EXIT_REQUEUE, EXIT_STORAGE, EXIT_USAGE, heed_stops, stops_held_back
from drumbeat.bundle.pinned import running_bundle
from drumbeat.desk.console import Console
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import Finding
from drumbeat.machine import identity as identities
from drumbeat.machine.host import LiveHost
from drumbeat.machine.model import Identity
from drumbeat.runfolder.files import replace
from drumbeat.runfolder.layout import RunFolder, ask_to_stop
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.state import Course, ledger
from drumbeat.runfolder.summary import (
    AttemptEnd,
    Observations,
    RunRecord,
    Summary,
    forget_end,
    gpus_of_run,
    gpus_used,
    group,
    summarize,
    write_run_record,
    write_summary,
)

find = Catalog("lead")

# The summary of a run whose lead was killed before it could write one: the same record, from what the run folder
# holds.


def summary_without_lead(
    run: Run, order: Order, code: int, now: float, hung: str = "", said: Optional[Finding] = None
) -> Summary:
    """Summarize a run whose lead wrote no summary. `code` is the exit code of the lead's agent, negative or above 128 for a
    signal; `now` is the wall clock; `hung` says why we ended the agent, `said` is the agent's own last message."""
    number = code - 128 if code > 128 else -code if code < 0 else 0
    finding = find("lead-hung", why=hung, evidence=[hung]) if hung else said or _finding(number, code)
    attempts = run.attempt_ends()
    if attempts and attempts[-1].outcome == "cut off":
        attempts.pop()
        last = run.attempts()[-1:] or [len(attempts)]
    else:
        last = [attempts[-1].attempt + 1 if attempts else 0]
    attempts.append(AttemptEnd(last[0], "failed", 128 + number if number else code or 1, finding))
    affected = group((end.rank, end.words) for end in run.ranks().ended if end.failed)
    progress = run.progress()
    queued = os.path.exists(run.folder.script)
    events = run.run_events()
    parts, hang = ledger(order.created, now, events, queued, progress), Course(events).hang
    facts = [run.facts(node) for node in run.nodes()]
    known = [gpus_used(order, each) for each in facts if each]
    gpus = gpus_of_run(order, known) if len(known) == len(facts) else None
    observed = Observations(events, hang.finding if hang else None, gpus)
    return summarize(order, attempts, run.members(), affected, progress, parts, observed)


def _finding(number: int, code: int) -> Finding:
    if number:
        return find("lead-lost", "killed", signal=signal.Signals(number).name)
    if code == EXIT_STORAGE:
        return find("storage", why="the disk is full, its storage does not answer, or the folder is gone")
    return find("lead-lost", code=code)


# Agents of this machine: one guard with its agent per node, as children of this process.


def agent_argv(
    bundle: str, order_path: str, node: int, report_fd: int, with_signal: int, order_fd: int
) -> Tuple[str, ...]:
    # -I -S: neither the caller's PYTHONPATH nor any installed package may change what the agent is
    own = str(os.getpid())
    about = (order_path, str(node), str(report_fd), bundle, own, str(int(with_signal)), str(order_fd))
    return (sys.executable, "-I", "-S", bundle, "_agent", *about)


def is_agent(pid: int) -> bool:
    """Return true for a live guard or agent. A process that an agent has forked has another name, or ends soon."""
    return b"_agent" in proc.command(pid).split(b"\0") and not proc.word(pid, "comm").startswith("drumbeat-")


def start_agents(
    bundle: str,
    order: Order,
    nodes: Iterable[int],
    token: str,
    environ: Mapping[str, str],
    report_fd: int = -1,
    with_signal: int = signal.SIGTERM,
) -> Dict[int, subprocess.Popen[bytes]]:
    """Start agents and map each node to its guard. Each has its own session: a Ctrl-C reaches only the desk, which passes
    it on. The kernel sends each `with_signal` if this process is killed."""
    env = {**environ, "DRUMBEAT_TOKEN": token}
    started: Dict[int, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryFile() as file:
        file.write(dump_order(order).encode())
        file.flush()
        keep = [file.fileno(), *([report_fd] if report_fd >= 0 else []), *launcher_descriptors(environ)]
        for node in nodes:
            started[node] = subprocess.Popen(
                agent_argv(bundle, RunFolder(order.folder).order, node, report_fd, with_signal, file.fileno()),
                env=env, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=keep, cwd=os.path.sep,
            )  # fmt: skip
    return started


_GUARD_SWEEP = 15.0  # seconds without a beat that a guard may take while it ends what its agent left behind
_AGENT_ENDS = 20.0  # seconds until an agent whose guard was killed must have ended by itself
_RETURN_AFTER, _RETURN = 2.0, 60.0  # seconds until a killed member starts again, and for it to find the lead
_PASSED_ON = 0.3  # seconds in which a wrapper may pass on a signal that the terminal has already sent to the desk


def _may_be_wrapped() -> bool:
    """Return true if the terminal signals our parent as well: a wrapper that passes it on, or a script."""
    try:
        return os.getpgid(os.getppid()) == os.getpgrp()
    except OSError:
        return True


class Foreground:
    """The desk's side of a run. `nodes` are those whose agents start here: all of them, or this machine's own if it joins
    others.

    `every` is the pause between two looks at the run folder, in seconds: on shared storage each look of each node counts.
    """

    def __init__(
        self,
        order: Order,
        nodes: Iterable[int],
        bundle: str,
        token: str,
        every: float = 0.1,
        joined: str = "",
        by_mpirun: bool = False,
    ) -> None:
        self.every = every
        self.ended_by_lead = False
        self.failed_here = False  # a rank of this node failed by itself
        self.again = False  # the lead comes back, or was lost and may be replaced
        self.interrupted: Optional[float] = None  # when the last Ctrl-C came
        self.passed_on = _PASSED_ON if _may_be_wrapped() else 0.0
        self.order, self.nodes, self.bundle, self.token = order, list(nodes), bundle, token
        self.guards: Dict[int, subprocess.Popen[bytes]] = {}
        self.heard: Dict[int, float] = {}  # node -> when its guard last said that it is alive
        self.returning: Dict[int, float] = {}  # node -> when its agent starts again
        self.told: Set[int] = set()  # nodes whose early end the lead was told of
        self.hung: Dict[int, str] = {}  # node -> why its agent was ended by us
        self.failure: Optional[Finding] = None  # that ended the lead's agent, as it said itself
        self.looked = time.monotonic()
        self.folder: Optional[RunFolder] = None
        self.console = Console(order, self.nodes, joined, by_mpirun)
        self.signals: List[int] = []
        self.found: Optional[Set[int]] = None  # children of this process from before on-start

    def run(self, environ: Mapping[str, str], if_killed: int = signal.SIGTERM) -> int:
        """Run the agents to their end. `if_killed`: the signal for the guards if this process is killed. A desk's death is
        a request to stop; the death of a process that only starts its own node may be the loss of that node, and the run
        goes on without it."""
        # Children from before an exec: a script that execs us as its last command may have started a tee that shows our output,
        # or a background job.
        not_ours = set(children())
        become_subreaper()  # if a guard and its agent are killed at once, their orphans come to us
        self.heed()
        reports, report_fd = os.pipe()
        os.set_inheritable(report_fd, True)
        os.set_blocking(reports, False)
        os.set_blocking(report_fd, False)  # a desk that is stopped (Ctrl-Z) must not stop its guards
        self.console.begin()
        with stops_held_back():  # until the guards can pass them on: none is lost, and none kills a guard
            self.guards = start_agents(self.bundle, self.order, self.nodes, self.token, environ, report_fd, if_killed)
        for early in self.signals:  # signals that came before there were guards to pass them on to
            self._signal_guards(early)
        codes: Dict[int, int] = {}
        returns = self.order.fewest_nodes is not None  # a run with a range of nodes uses them in its next attempt
        lead_gone: Optional[float] = None
        while len(codes) < len(self.guards) or self.returning:
            self._read_reports(reports)
            self._end_silent(time.monotonic())
            self.console.poll(self.folder)
            for node, guard in self.guards.items():
                if node not in codes and guard.poll() is not None:
                    code = codes[node] = guard.returncode
                    if (code < 0 or code > 128) and node and returns and not (self.again or self.signals):
                        self.returning[node] = time.monotonic() + _RETURN_AFTER  # it was killed
                    lead_gone = time.monotonic() if node == 0 else lead_gone
                    if guard.returncode < 0 and node not in self.hung:
                        self._let_agent_end()
                    sweep(keep=not_ours | {other.pid for other in self.guards.values() if other.poll() is None})
            for node in self._due(lead_gone is not None):
                del codes[node]
                again = dataclasses.replace(self.order, timing=dataclasses.replace(self.order.timing, muster=_RETURN))
                with stops_held_back():
                    started = start_agents(self.bundle, again, [node], self.token, environ, report_fd, if_killed)
                self.guards.update(started)
            self._tell_lead(codes)
            if lead_gone is not None and time.monotonic() - lead_gone > 2.0:
                self._signal_guards(signal.SIGTERM)  # a node that never found its lead would keep looking for it
            self._pause(codes)
        os.close(report_fd)
        sweep(keep=not_ours if self.found is None else self.found)
        self._read_reports(reports)
        self.console.poll(self.folder, final=True)
        for logs in self.console.local_logs:  # read to the end by now
            shutil.rmtree(logs, ignore_errors=True)
        ended = self._ended(codes)
        if ended is None:
            return next((code for code in codes.values() if code), 0)
        self.console.end(*ended)
        return ended[1].exit_code

    def _due(self, lead_gone: bool) -> List[int]:
        """Return the members to restart now; none once the run is ending."""
        if lead_gone or self.ended_by_lead or self.signals:
            self.returning.clear()
        due = [node for node, at in self.returning.items() if time.monotonic() >= at]
        for node in due:
            del self.returning[node]
            self.heard.pop(node, None)
            self.hung.pop(node, None)
        return due

    def heed(self) -> None:
        """Handle stop signals from now on; those that come before `run` are passed on when it starts."""
        heed_stops(self._on_signal)

    def _let_agent_end(self) -> None:
        """Wait for the agent of a killed guard: the kernel notifies the agent, which ends its ranks and records why."""
        until = time.monotonic() + _AGENT_ENDS
        guards = {guard.pid for guard in self.guards.values()}
        while time.monotonic() < until and any(is_agent(pid) for pid in children() if pid not in guards):
            time.sleep(0.05)

    def _tell_lead(self, codes: Mapping[int, int]) -> None:
        """Tell the lead about a node that ended before all had joined; otherwise the lead would wait for it until its timeout. A
        machine that only joins the lead cannot know when all have joined."""
        if 0 not in self.nodes:
            return
        for node, code in codes.items():
            if node and code and 0 not in codes and node not in self.told and self.folder and not self.console.started:
                self.told.add(node)
                why = f"the agent of node {node} ended with {code} before all nodes had joined"
                with suppress(OSError):  # the lead says what is wrong with the run folder
                    ask_to_stop(self.folder.stop, "LOST", why)

    def _pause(self, codes: Container[int]) -> None:
        """Pause until the next poll, or until an agent that is not in `codes` has ended."""
        until = time.monotonic() + self.every
        going = [guard for node, guard in self.guards.items() if node not in codes]
        while going and time.monotonic() < until and all(guard.poll() is None for guard in going):
            time.sleep(0.1)

    def _end_silent(self, now: float) -> None:
        """Kill a guard that was stopped or hangs: its agent and ranks then become our children.

        The time for which this process itself was stopped does not count as silence.
        """
        late = max(0.0, now - self.looked - self.every - 1.0)
        self.looked = now
        limit = self.order.timing.agent_deadline + _GUARD_SWEEP
        for node in self.heard:
            self.heard[node] += late
            if now - self.heard[node] > limit and self.guards[node].poll() is None:
                self.console.say("lost", f"node {node}: its guard has not answered for {limit:g} s; ending it")
                self.hung[node] = f"neither it nor its guard had answered for {limit:g} s, so they were ended"
                self.heard[node] = now
                self.guards[node].kill()

    def _signal_guards(self, number: int) -> None:
        for guard in self.guards.values():
            if guard.poll() is None:
                guard.send_signal(number)

    def _on_signal(self, number: int, frame: Any) -> None:
        """Pass the first signal on unchanged. A second Ctrl-C becomes QUIT: no more grace."""
        now = time.monotonic()
        interrupt = number == signal.SIGINT
        again = interrupt and self.interrupted is not None and now - self.interrupted > self.passed_on
        if interrupt and (again or self.interrupted is None):
            self.interrupted = now
        elif self.signals and number != signal.SIGQUIT:
            return  # the same request in another form: TERM and HUP come from wrappers, schedulers and closed terminals
        number = signal.SIGQUIT if again else number
        self.signals.append(number)
        self._signal_guards(number)
        self.console.stopping(number, self.order.stop_grace)

    def _read_reports(self, reports: int) -> None:
        try:
            data = os.read(reports, 1 << 16)
        except BlockingIOError:
            return
        for line in data.splitlines():
            report = json.loads(line)
            if "folder" in report:
                self.folder = RunFolder(report["folder"])
                if report.get("logs"):
                    self.console.logs_at(int(report["node"]), report["logs"])
            if "alive" in report:
                self.heard[int(report["alive"])] = time.monotonic()
            if "hung" in report:
                self.hung[int(report["hung"])] = str(report["why"])
            if report.get("failed") == 0:
                self.failure = from_plain(Finding, report["finding"])
            self.ended_by_lead = self.ended_by_lead or "ended" in report
            self.again = self.again or bool(report.get("again"))
            self.failed_here = self.failed_here or bool(report.get("failed_here"))

    def _ended(self, codes: Dict[int, int]) -> Optional[Tuple[Run, Summary]]:
        """Return the lead's summary, or write one if the lead was killed before it could."""
        if 0 not in codes:
            return None  # a joined node: the lead's machine has the summary
        try:
            run = Run.open(self.folder.path if self.folder else self.order.folder)
            summary = run.summary()
        except RecordError as error:
            print(f"drumbeat: {error}", file=sys.stderr)
            return None
        if summary is None:
            summary = summary_without_lead(run, self.order, codes[0], clock.now(), self.hung.get(0, ""), self.failure)
            try:
                write_summary(run.folder, summary)
            except OSError as error:
                print(f"drumbeat: no summary could be written: {error}", file=sys.stderr)
            from drumbeat.agent.lead.summary import run_on_end  # imported here: it loads all of the lead

            problem = run_on_end(self.order, run.folder, summary, lambda: None)
            if problem:
                self.console.say("warning", problem)
        return run, summary


EVERY = 0.5  # seconds between two looks at the ranks' output, which is on shared storage


def run_node(order_file: str) -> int:
    """Run one node (or rank) of a fanned-out or submitted run: `_node ORDER.json`, as a backend starts it."""
    environ = os.environ
    identity = identities.read(LiveHost(), [])
    token = environ.get("DRUMBEAT_TOKEN", "")
    bundle = running_bundle()
    assert bundle, "_node runs from the bundle"
    try:
        order = placed(read_order(order_file), identity)
        if not token:
            raise Problem("no DRUMBEAT_TOKEN reached this node", "the launch command must pass it on")
        node = own_node(order, identity)
        if order.launcher == "tasks" and identity.local_id:
            return guard_rank(order, identity, token, environ)
        if node == 0:
            _open_again(order, identity)
    except (OSError, RecordError, Problem) as error:
        print(f"drumbeat: {error}", file=sys.stderr)
        return EXIT_USAGE
    return joined(Foreground(order, [node], bundle, token, EVERY), node, environ)


def _open_again(order: Order, identity: Identity) -> None:
    """Prepare the run folder for this start: a job of an array has a folder of its own, and a requeued run has not ended after
    all."""
    folder = RunFolder(order.folder)
    if not os.path.exists(folder.run_json):
        os.makedirs(folder.at("nodes"), exist_ok=True)
        replace(folder.order, dump_order(order))
        if not os.path.exists(folder.stop):  # the batch script may have written into it already
            replace(folder.stop, "")
        record = RunRecord(order.run_id, name=order.name, created=order.created, handle=job_handle(identity))
        write_run_record(folder, record)
    forget_end(folder)


def guard_rank(order: Order, identity: Identity, token: str, environ: Mapping[str, str]) -> int:
    # imported here: few jobs have such tasks, and all would wait for it
    from drumbeat.agent.ranks.tasks import own_view, run_task

    node = own_node(order, identity)
    assert identity.local_id is not None
    meeting = task_meeting(identity, environ, node, token)
    return run_task(meeting, token, order.timing.muster, own_view(identity.local_id))


def joined(
    foreground: Foreground, node: int, environ: Mapping[str, str], by_mpirun: bool = False, own_pod: bool = False
) -> int:
    """Return the job's exit code on the lead. A node that the lead has ended returns 0, or a launcher that ends a job at its
    first failure would kill the lead while it still writes the summary. A pod (`own_pod`) fails where its own ranks failed.

    DRUMBEAT_REJOIN is set by a backend that starts the agent again on this very machine: it is told by 75 when to do so."""
    # mpirun kills its tasks, including our agents, when a rank has called MPI_Abort: members go on and record which rank it was.
    # The lead always goes on, to end the others.
    code = foreground.run(environ, if_killed=signal.SIGKILL if node and not by_mpirun else signal.SIGTERM)
    if node and foreground.again and environ.get("DRUMBEAT_REJOIN"):
        return EXIT_REQUEUE
    return 0 if node and foreground.ended_by_lead and not (own_pod and foreground.failed_here) else code
