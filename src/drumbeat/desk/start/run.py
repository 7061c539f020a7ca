"""`drumbeat run`: from a job to a finished run, wherever it was typed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

from drumbeat import backends
from drumbeat.backends.contract import FAILED, FINISHED, job_handle
from drumbeat.backends.local import Queue, own_process
from drumbeat.backends.ssh import start
from drumbeat.backends.ssh.connection import BEAT_EVERY, Notice, Session, Sessions, handle_of, host_python
from drumbeat.base.order import Order, load_order
from drumbeat.base.problem import Problem
from drumbeat.base.proc import children
from drumbeat.base.processes import become_subreaper, fork, leave_terminal, redacting
from drumbeat.base.record import RecordError
from drumbeat.base.signals import EXIT_MUSTER, STOP_REQUESTS, STOPS, heed_stops
from drumbeat.bundle.build import cached_bundle
from drumbeat.bundle.pinned import pinned
from drumbeat.containers import RUNTIMES
from drumbeat.containers.image import check_image
from drumbeat.desk.console import put
from drumbeat.desk.foreground import EVERY, Foreground, guard_rank, joined
from drumbeat.desk.start import place as places
from drumbeat.desk.start.create import create_run, forget_run, fresh_token, users_token
from drumbeat.desk.start.make_order import make_order, named_in_command, on_hosts, site_of
from drumbeat.jobfile.job import Job
from drumbeat.jobfile.site import Site
from drumbeat.machine.gather import read_container
from drumbeat.machine.host import LiveHost
from drumbeat.machine.model import Identity
from drumbeat.machine.vendors import detect, vendor_of
from drumbeat.runfolder.layout import RunFolder, ask_to_stop, stop_word
from drumbeat.runfolder.mirror import Mirror
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.summary import read_run_record, write_run_record

# A run on a list of hosts that ends with this desk: start an agent on each by ssh, show their output, pass signals on.


_LEAD_GONE = 60.0  # seconds for the other hosts to end after the lead's connection has ended


class Hosts:
    """The desk's side of an attached run."""

    def __init__(self, order: Order, folder: RunFolder, bundle: str, token: str) -> None:
        self.order, self.folder, self.bundle, self.token = order, folder, bundle, token
        self.sessions: Optional[Sessions] = None
        self.signals: List[int] = []
        self.notice = Notice(len(order.hosts), lambda text: _say("waiting", text))
        self.started = False
        self.ended: List[str] = []  # hosts whose end was reported

    def run(self, environ: Mapping[str, str]) -> int:
        heed_stops(self._on_signal)
        sessions = Sessions(self.order.hosts, self.bundle, host_python(self.order), environ)
        try:
            start(sessions, self.order, self.token, environ, detach=False, waiting=self._waiting)
            self.sessions, self.started = sessions, True
            for early in self.signals:
                self._pass_on(early)
            self._follow(sessions)
        except _Interrupted:
            return 128 + self.signals[0]
        finally:
            sessions.kill()
        return self._end(sessions.all[0], environ)

    def _follow(self, sessions: Sessions) -> None:
        """Follow all hosts until they end, and send beats to show that the desk is alive."""
        beaten, lead_gone = time.monotonic(), 0.0
        lead = sessions.all[0]
        while any(session.early or not session.over for session in sessions.all):
            sessions.turn(0.5, self._print)
            now = time.monotonic()
            if now - beaten > BEAT_EVERY:
                beaten = now
                for session in sessions.all:
                    session.send(b"beat\n")
            for session in sessions.all:
                if session.over and session.host not in self.ended:
                    self.ended.append(session.host)
                    if session.code == 255:
                        why = session.complaint.strip() or "ssh does not say why"
                        _say("lost", f"{session.host}: the connection was lost: {why}")
            if lead.over and not lead_gone:
                lead_gone = now
            if lead_gone and now - lead_gone > _LEAD_GONE:
                left = ", ".join(session.host for session in sessions.all if not session.over)
                _say("lost", f"hosts that have not ended after their lead: {left}")
                return  # cutting the connections ends the hosts

    def _end(self, lead: Session, environ: Mapping[str, str]) -> int:
        files = backends.get(self.order.backend).run_files(self.folder.path, handle_of(self.order), environ)
        if isinstance(files, Mirror):
            files.sync()
            if not files.complete:
                _say("warning", f"the run folder is not all here; the rest is on {lead.host}: {self.folder.path}")
        summary = Run.open(self.folder.path).summary()
        if summary:
            return summary.exit_code
        code = lead.code
        return EXIT_MUSTER if code is None or code in (0, 255) else 128 - code if code < 0 else code

    # -- what is shown -----------------------------------------------------------------------------------------------

    def _print(self, session: Session, name: str, line: bytes) -> None:
        if name == "err" and session.code == 255:
            session.complaint += line.decode("utf-8", "replace")
        put(sys.stdout if name == "out" else sys.stderr, line.decode("utf-8", "replace"))

    def _waiting(self, hosts: List[str]) -> None:
        if self.signals:
            raise _Interrupted
        self.notice(hosts)

    # -- signals -----------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: Any) -> None:
        self.signals.append(number)
        if self.sessions is not None:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        """Pass a signal on to each host, whose own desk counts requests: a second Ctrl-C ends the run at once."""
        assert self.sessions
        word = "QUIT" if number == signal.SIGQUIT else stop_word(number)
        for session in self.sessions.all:
            session.send(word.encode() + b"\n")


class _Interrupted(Exception):
    """Raised when asked to stop before anything was started."""


def _say(label: str, text: str) -> None:
    print(f"{label:<10} {text}", file=sys.stderr)


# Fan out: in a batch script or an interactive allocation the backend starts one agent per node. After that the desk only passes
# on requests to stop.


Create = Callable[..., RunFolder]  # arguments: an order, its bundle and its handle


def start_in_allocation(order: Order, place: places.Place, environ: Mapping[str, str], create: Create) -> int:
    """Start in an allocation: the backend reaches the nodes, and the run folder is created here."""
    backends.get(order.backend).check_allocation(place.identity, environ)
    if order.container:
        check_image(order)
    else:
        places.check_command(order, environ)
    handle = job_handle(place.identity)
    bundle = cached_bundle(environ)
    order = pinned(order, bundle)
    environ = after_on_start(order, environ)
    folder = create(order, bundle, handle)
    try:
        return _fan_out(order, folder, environ)
    finally:
        backends.get(order.backend).finish(handle, environ)


def _fan_out(order: Order, folder: RunFolder, environ: Mapping[str, str]) -> int:
    launch = backends.get(order.backend).fan_out(order, environ)
    env = {**launch.environ, "DRUMBEAT_TOKEN": fresh_token()}
    # A session of its own: a Ctrl-C reaches only us. A launcher might pass it to every process of the job.
    launcher = subprocess.Popen(list(launch.argv), env=env, stdin=subprocess.DEVNULL, start_new_session=True)

    def on_signal(number: int, frame: Any) -> None:
        name = signal.Signals(number)
        try:
            ask_to_stop(folder.stop, stop_word(number), f"the desk was sent {name.name}")
        except OSError as error:
            print(f"drumbeat: cannot ask the lead to stop: {error}; ending the launcher", file=sys.stderr)
            launcher.send_signal(signal.SIGTERM)

    for number in STOP_REQUESTS:
        signal.signal(number, on_signal)
    code = launcher.wait()
    summary = Run.open(folder.path).summary()
    if summary:
        return summary.exit_code
    return 128 - code if code < 0 else code or 1


# Inside a scheduler's step, an MPI task or a pod: join the job as one of its nodes.


def join(job: Job, site: Site, place: places.Place, environ: Mapping[str, str], create: Create) -> int:
    """Run this node's part of a job that a launcher or scheduler has started on all nodes."""
    identity = place.identity
    if environ.get("NODE_RANK", "").isdigit():  # exported variables win
        identity = dataclasses.replace(identity, node_rank=int(environ["NODE_RANK"]))
    places.check_joinable(identity)
    order = make_order(job, site, dataclasses.replace(place, identity=identity), environ)
    check_inside(order)
    _check_on_start(order)
    places.check_command(order, environ)
    if identity.own_home and not environ.get("DRUMBEAT_TOKEN"):
        raise Problem(
            "pods do not share a home directory, so the nodes of this run have no common token",
            "give all of them the same secret: DRUMBEAT_TOKEN",
        )
    token = users_token(environ)
    node = identity.node_rank
    assert node is not None
    if order.launcher == "tasks" and identity.local_id:
        return guard_rank(order, identity, token, environ)
    bundle = cached_bundle(environ)
    headline = f"joined {job_name(identity)} as {order.run_id}"
    if node == 0:
        create(order, bundle, job_handle(identity))
        return joined(Foreground(order, [0], bundle, token, EVERY, headline, identity.by_mpirun), 0, environ)
    foreground = Foreground(order, [node], bundle, token, EVERY)
    return joined(foreground, node, environ, identity.by_mpirun, own_pod=identity.own_home)


def check_inside(order: Order) -> None:
    """Check that a joining node is already in the job's container; otherwise its ranks would silently run outside it."""
    used = order.container
    if used and read_container(LiveHost()).runtime not in RUNTIMES[used.runtime].inside:
        by_hand = f"put it before: {used.runtime} exec {used.image} python3 drumbeat.pyz run ...; or "
        raise Problem(
            f"the job names the container {used.image}, but this is not inside it",
            f"{by_hand if RUNTIMES[used.runtime].lines else ''}leave it out with --container none; drumbeat submit starts it "
            "itself, and so does drumbeat run in an allocation",
        )


def _check_on_start(order: Order) -> None:
    if order.on_start:
        raise Problem(
            "on-start runs once before all nodes, but this is one of several that start by themselves",
            "run it before they start; or use drumbeat submit, or drumbeat run in the batch script itself",
        )


def job_name(identity: Identity) -> str:
    if identity.step_id:
        return f"step {identity.job_id}.{identity.step_id}"
    return f"{identity.scheduler} job {identity.job_id}" if identity.job_id else f"a job of {identity.scheduler}"


def run_job(
    job: Job,
    job_file: Optional[str],
    node_rank: Optional[int],
    master: str,
    nodes: Optional[int],
    on_created: Optional[Callable[[RunFolder], None]] = None,
) -> int:
    """Run a job. `on_created` is called with the run folder if it is created here: on the lead's machine, before
    anything starts."""
    environ = os.environ

    def create(order: Order, bundle: str, handle: str = "") -> RunFolder:
        folder = create_run(order, job_file, bundle, environ, handle)
        if on_created:
            on_created(folder)
        return folder

    if job.hosts and node_rank is None:  # here --master is the address by which the other hosts reach the first
        place = dataclasses.replace(places.find_place(LiveHost()), master=master)
    else:
        place = places.find_place(LiveHost(), node_rank, master, nodes)
    site = site_of(job, place, environ)
    if on_hosts(job, site):
        return _run_on_hosts(job, site, place, create)
    places.check_not_login(place, site)
    if place.kind not in (places.ALLOCATION, places.INSIDE):
        by_hand = place.node_rank, place.master, place.nodes
        if place.node_rank is None:
            by_hand = named_in_command(job, environ, nodes)
        place = places.Place(places.HERE, place.identity, "", *by_hand)
        places.check_all_nodes(place, job.site)
        places.check_scheduler_here(place, site)
    if place.kind == places.INSIDE:
        return join(job, site, place, environ, create)
    order = make_order(job, site, place, environ)
    if place.kind == places.ALLOCATION:
        return start_in_allocation(order, place, environ, create)
    return _run_here(order, place, create)


def _run_on_hosts(job: Job, site: Site, place: places.Place, create: Create) -> int:
    if place.kind == places.INSIDE or place.node_rank is not None:
        who = place.identity.scheduler if place.kind == places.INSIDE else "--node-rank"
        raise Problem(
            f"{job.where('hosts')}: hosts are named, but {who} says that this is one node already",
            "leave hosts out, or type it elsewhere",
        )
    bundle = cached_bundle(os.environ)
    order = pinned(make_order(job, site, place, os.environ), bundle)
    for note in backends.get("ssh").notes(order):
        print(f"drumbeat run: {note}", file=sys.stderr)
    hosts = Hosts(order, create(order, bundle, handle_of(order)), bundle, fresh_token())
    try:
        return hosts.run(os.environ)
    finally:
        if not hosts.started:
            forget_run(order, os.environ)


def _run_here(order: Order, place: places.Place, create: Create) -> int:
    """Run all nodes on this machine, or only this machine's node if the command is typed by hand on several."""
    environ: Mapping[str, str] = os.environ
    node_rank = place.node_rank
    for note in [] if node_rank else backends.get("local").notes(order):
        print(f"drumbeat run: {note}", file=sys.stderr)
    order = dataclasses.replace(order, resources=dataclasses.replace(order.resources, array=""))
    check_inside(order)
    places.check_command(order, environ)
    if node_rank is not None and node_rank >= order.members:
        raise Problem(f"node rank {node_rank} of {order.members} nodes: ranks count from 0 to {order.members - 1}")
    bundle = cached_bundle(environ)
    alone = node_rank is None or order.members == 1
    if not alone:
        _check_on_start(order)
    token = fresh_token() if alone else users_token(environ)
    if not alone and node_rank:
        return Foreground(order, [node_rank], bundle, token).run(environ)
    foreground = Foreground(order, range(order.members) if alone else [0], bundle, token)
    environ = before_ranks(foreground, environ)
    create(order, bundle)
    return foreground.run(environ)


# A job's `on-start`: shell that runs once before all ranks, and whose exports reach them.

_ENDS = 5.0  # seconds for it to end after a stop signal


def before_ranks(foreground: Foreground, environ: Mapping[str, str], output: Optional[int] = None) -> Mapping[str, str]:
    """Run on-start for a run in the foreground: processes that it leaves in the background end with that run."""
    foreground.found = set(children())
    if foreground.order.on_start:
        become_subreaper()
    return after_on_start(foreground.order, environ, foreground.signals, output)


def after_on_start(
    order: Order, environ: Mapping[str, str], came: Optional[List[int]] = None, output: Optional[int] = None
) -> Mapping[str, str]:
    """Run the job's on-start here; return the resulting environment. A Problem if it does not reach its end. `came`: stop signals
    received, which end it with everything that it has started; `output`: where it prints to, if not to our own."""
    if not order.on_start:
        return environ
    came = [] if came is None else came
    own = [number for number in STOPS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in own}
    try:
        with tempfile.TemporaryFile() as file:
            show = shutil.which("env") or "/usr/bin/env"  # looked up first: on-start may change PATH
            text = f"set -e; {order.on_start}\nexec {show} -0 >&{file.fileno()}"
            process = subprocess.Popen(
                ["bash", "-c", text], env=environ, cwd=order.workdir, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, pass_fds=[file.fileno()], start_new_session=True,
            )  # fmt: skip
            _until_end(process, came)
            file.seek(0)
            pairs = [os.fsdecode(each).partition("=") for each in file.read().split(b"\0") if each]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came or not pairs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # processes that it left in the background
        code = 128 + came[0] if came else process.returncode if process.returncode >= 0 else 128 - process.returncode
        why = f"was stopped by {signal.Signals(came[0]).name}" if came else f"ended the job (exit {code})"
        raise Problem(f"on-start {why}; no rank was started", exit_code=code)
    return {name: value for name, _, value in pairs if name != "_"}


def _until_end(process: subprocess.Popen[bytes], came: List[int]) -> None:
    """Wait for a process that leads its session; end it if a stop signal arrives."""
    until = None
    while process.poll() is None:
        if came and until is None:
            until = time.monotonic() + _ENDS
            os.killpg(process.pid, signal.SIGTERM)
        if until is not None and time.monotonic() > until:
            process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)


# `_queued`: the process behind a run that was submitted to this machine. It waits for the run's turn, then becomes its desk.
# `_now`: the same without a turn, for a run that somebody waits for.

_EVERY = 0.5  # seconds between two looks at the queue
_SUBMITTED = 20.0  # seconds for the desk to record the process that it has started


def run_queued(command: Sequence[str], waits: bool = True) -> int:
    """Read the order from standard input, print this process for the handle, and go on alone. `command`: one of drumbeat's own,
    to run in place of the order."""
    order, folder = load_order(sys.stdin.read()), os.getcwd()
    if fork():
        return 0  # the parent exits: the run must not have a parent that could end with it or fail to reap it
    os.chdir(os.path.sep)
    queue = Queue(os.environ)
    ticket = queue.join(order.run_id) if waits else ""
    try:
        print(own_process(), flush=True)
        leave_terminal(RunFolder(order.folder).desk_log, 0o600, quiet=True)
        sys.stderr = sys.stdout  # nobody reads it; desk.log gets tracebacks and what on-start prints
        return _become(command, folder, order, queue, ticket) if command else _in_turn(order, queue, ticket)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        raise
    finally:
        with contextlib.suppress(OSError):
            os.unlink(ticket)


def _become(command: Sequence[str], folder: str, order: Order, queue: Queue, ticket: str) -> int:
    """Wait for the turn and run the command as this very process, whose handle and place in the queue it keeps."""
    for number in STOPS:
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        environ = _turn(order, queue, ticket)
        while environ is None:
            time.sleep(_EVERY)
            environ = _turn(order, queue, ticket)
    except SystemExit:
        with contextlib.suppress(RecordError):  # cancelled before its desk had written run.json
            _record(order, cancelled=True)
        raise
    os.dup2(2, 1)
    os.chdir(folder)
    os.execve(command[0], [*command], environ)


def _in_turn(order: Order, queue: Queue, ticket: str) -> int:
    foreground = Foreground(order, range(order.members), cached_bundle(os.environ), fresh_token())
    foreground.heed()
    environ = _turn(order, queue, ticket)
    waits = environ is None
    while environ is None and not foreground.signals:
        time.sleep(_EVERY)
        environ = _turn(order, queue, ticket)
    if environ is not None and not foreground.signals:
        if waits:  # else what has passed was the start
            environ["DRUMBEAT_BEGAN"] = str(int(time.time()))
        try:
            with open(redacting(2), "wb") as pipe:
                given = before_ranks(foreground, environ, output=pipe.fileno())
            return foreground.run(given)
        except Problem as problem:  # on-start did not reach its end
            os.write(2, f"{problem}\n".encode())
            if not foreground.signals:
                state = FAILED if problem.exit_code else FINISHED
                _record(order, last_state=state, last_detail=f"{problem}; desk.log has what it printed")
                return problem.exit_code
    _record(order, cancelled=True)  # cancelled before it began
    return 143


def _record(order: Order, **ended: Any) -> None:
    """Record in run.json how the run ended, once the desk that submitted it has written that file."""
    folder, until = RunFolder(order.folder), time.monotonic() + _SUBMITTED
    record = read_run_record(folder.path)
    while (record.desk is None or record.desk.pid != os.getpid()) and time.monotonic() < until:
        time.sleep(0.05)
        record = read_run_record(folder.path)
    write_run_record(folder, replace(record, **ended))


def _turn(order: Order, queue: Queue, ticket: str) -> Optional[Dict[str, str]]:
    """Return the run's environment once it is its turn, with only the GPUs that it was given. No ticket: at once, with all."""
    environ: Mapping[str, str] = os.environ
    if not ticket:
        return dict(environ)
    gpus = [gpu for gpu in detect(LiveHost()) if not gpu.integrated]
    vendor = vendor_of(gpus)
    gpus = vendor.visible(gpus, environ)[0]
    wanted = min(order.members * order.ranks_per_node, len(gpus)) or len(gpus)
    given = queue.take(ticket, gpus, wanted)
    if given is None:
        return None
    shown = {variable.name: variable.value for variable in vendor.show(given, "its turn in the queue")} if given else {}
    return {**environ, **shown}
