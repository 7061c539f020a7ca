"""`_host`, as ssh starts it: one node of a run on a list of hosts, and answers to its desk's later questions.

An attached node ends with its connection: the desk writes to its standard input now and then, and an end of file or a long
silence counts as a request to stop. A detached one is on its own; the host keeps a record of it under the run's key.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, Callable, Dict, List, Mapping

from drumbeat.backends.ssh.connection import container_environ, container_script, unpack
from drumbeat.backends.ssh.loader import read_bytes, read_line, reply
from drumbeat.base.folders import make_private, state_folder, unsafe
from drumbeat.base.order import Order, dump_order, load_order
from drumbeat.base.problem import Problem
from drumbeat.base.proc import children, start_time
from drumbeat.base.processes import become_subreaper, die_with_parent, fork, leave_terminal, sweep
from drumbeat.base.record import RecordError
from drumbeat.base.signals import STOPS, heed_interrupts
from drumbeat.bundle.pinned import running_bundle
from drumbeat.desk.foreground import EVERY, Foreground, joined
from drumbeat.desk.start.code_sync import unpack_checked
from drumbeat.desk.start.create import no_place
from drumbeat.runfolder.files import read_json, replace, replace_json
from drumbeat.runfolder.layout import WORDS, RunFolder, ask_to_stop, stop_word
from drumbeat.runfolder.mirror import ENDED, serve
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.summary import RunRecord, is_folder_of, write_run_record

# One node of a run on ssh hosts, in a container. The agent inside cannot be signalled from here: requests to stop go through the
# lead's stop file, and a container that does not end in time is removed.


_LEAD_LEFT = 20.0  # seconds beyond the grace for the lead to end the run
_REMOVED = 30.0  # seconds for the container to end


def run_contained(order: Order, node: int, token: str, shared: bool) -> int:
    folder = RunFolder(order.folder)
    if not shared:
        bundle = running_bundle()
        assert bundle, "_host runs from the bundle"
        replace(folder.order, dump_order(order))
        with suppress(FileNotFoundError):
            os.unlink(folder.bundle)  # other runs may share the file
        shutil.copyfile(bundle, folder.bundle)
    signals: List[int] = []
    for number in STOPS:
        signal.signal(number, lambda number, frame: signals.append(number))
    environ = {**os.environ, **container_environ(order, node), "DRUMBEAT_TOKEN": token}
    process = subprocess.Popen(
        ["sh", "-c", container_script(order, node)], env=environ, stdin=subprocess.DEVNULL, start_new_session=True
    )
    return _wait(process, folder, node, order.stop_grace, signals)


def _wait(process: subprocess.Popen[Any], folder: RunFolder, node: int, grace: float, signals: List[int]) -> int:
    passed, ends = 0, 0.0
    while True:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(0.2)
            return 128 - code if code < 0 else code
        if len(signals) > passed:
            passed = len(signals)
            if node == 0:
                with contextlib.suppress(OSError):  # if this fails, the container is ended after the grace
                    ask_to_stop(folder.stop, stop_word(signals[-1]), "the desk")
            ends = ends or time.monotonic() + grace + _LEAD_LEFT
        if ends and (time.monotonic() > ends or signal.SIGQUIT in signals):
            process.terminate()  # its own trap removes the container
            try:
                process.wait(_REMOVED)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


_KEY = "0123456789abcdef"
_WORDS = {"INT": signal.SIGINT, "TERM": signal.SIGTERM, "QUIT": signal.SIGQUIT, "USR2": signal.SIGUSR2}
_LEFT = 30.0  # seconds beyond the grace for a node to end after its desk is gone


def run_host() -> int:
    """Serve one request from standard input: its size, a newline, and JSON."""
    request = json.loads(read_bytes(int(read_line())))
    heed_interrupts()
    try:
        if request["do"] == "node":
            return _node(request)
        if request["do"] == "files":
            return _files(request)
        answer = {"status": _status, "stop": _stop}[request["do"]](request)
    except (Problem, RecordError, OSError) as error:
        reply(error=str(error))
        return 1
    reply(answer=answer)
    return 0


# -- one node ----------------------------------------------------------------------------------------------------------


def _node(request: Mapping[str, Any]) -> int:
    """Start this host's node. Everything that may fail comes first: nothing starts before every host is ready, and the
    desk says `go`."""
    order, node = load_order(request["order"]), int(request["node"])
    os.chdir(os.sep)  # paths that are printed here are read on the desk's machine
    shared = _open_folder(order, str(request["handle"]), node)
    reply(prepared=True, shared=shared)
    if not shared:
        _take_parcel(order, read_bytes(int(read_line())))
    if read_line() != "go":
        return 1

    def work() -> int:
        os.environ.update({str(name): str(value) for name, value in request["env"].items()})
        code = _run_node(order, node, str(request["token"]), shared)
        if node == 0 and not shared:
            replace(os.path.join(order.folder, ENDED), "")  # for the desk's mirror: nothing more will be written
        return code

    about = {"folder": order.folder, "run_id": order.run_id}
    _keep_record(request["key"], about)  # a full home directory is noticed before anything is started
    pid = _daemon(work, os.path.join(order.folder, f"ssh-{node}.out")) if request["detach"] else os.getpid()
    try:
        _keep_record(request["key"], {**about, "pid": pid, "started": start_time(pid)})
    except OSError:
        if request["detach"]:
            _send(pid, signal.SIGTERM)  # without a record nobody could find it again
        raise
    reply(started=pid)
    if request["detach"]:
        return 0
    return _attached(work, order.stop_grace, float(request["silence"]))


def _open_folder(order: Order, handle: str, node: int) -> bool:
    """Make the run folder if the desk's own is not visible from here; return true if it is visible."""
    folder = RunFolder(order.folder)
    if is_folder_of(folder, order.run_id):
        if node == 0:
            replace(folder.order, dump_order(order))  # it now has the lead's address
        return True
    try:
        os.makedirs(folder.at("nodes"), exist_ok=True)
    except OSError as error:
        raise no_place(folder.path, error) from None
    if node == 0:
        replace(folder.order, dump_order(order))
        replace(folder.stop, "")
        write_run_record(folder, RunRecord(order.run_id, name=order.name, created=order.created, handle=handle))
    return False


def _take_parcel(order: Order, data: bytes) -> None:
    folder = RunFolder(order.folder)
    unpack(data, folder.path)
    if order.code != "sync":
        return
    with open(folder.code_archive, "rb") as file:
        unpack_checked(file.read(), order, folder.code_copy)


def _run_node(order: Order, node: int, token: str, shared: bool) -> int:
    if order.container:
        return run_contained(order, node, token, shared)
    bundle = running_bundle()
    assert bundle, "_host runs from the bundle"
    return joined(Foreground(order, [node], bundle, token, EVERY), node, os.environ)


def _attached(work: Callable[[], int], grace: float, silence: float) -> int:
    """Run `work` in a child, and end it when the connection ends. This process only listens, so that it does not fail."""
    become_subreaper()
    me = os.getpid()
    child = fork()
    if child == 0:
        code = 70  # EX_SOFTWARE: an error of our own
        try:
            die_with_parent(me, signal.SIGTERM)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            code = work()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, frame: _send(child, signal.SIGTERM))
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    code = _listen(child, grace, silence)
    deadline = time.monotonic() + grace + _LEFT  # agents whose desk was killed save first and then end by themselves
    while children() and time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.1)
    sweep()
    return code


def _listen(child: int, grace: float, silence: float) -> int:
    """Pass on the desk's messages until the child has ended; return its exit code."""
    heard, rest, ends = time.monotonic(), b"", 0.0
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        readable = [] if ends else select.select([0], [], [], 0.2)[0]
        data = os.read(0, 4096) if readable else None
        now = time.monotonic()
        if data:
            heard = now
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                number = _WORDS.get(line.decode("ascii", "replace"))
                if number:
                    _send(child, number)
        if not ends and (data == b"" or now - heard > silence):
            ends = now + grace + _LEFT
            _send(child, signal.SIGTERM)
        if ends:
            time.sleep(0.2)
            if now > ends:
                _send(child, signal.SIGQUIT)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _daemon(work: Callable[[], int], output: str) -> int:
    """Run `work` in a process of its own session that outlives ours; return its pid."""
    read_fd, write_fd = os.pipe()
    first = os.fork()
    if first == 0:
        code = 70
        try:
            if os.fork():
                os._exit(0)
            os.write(write_fd, f"{os.getpid()}\n".encode())
            os.close(write_fd)
            os.close(read_fd)
            leave_terminal(output)
            code = work()
        finally:
            os._exit(code)
    os.waitpid(first, 0)
    os.close(write_fd)
    with open(read_fd, "rb") as pipe:
        return int(pipe.readline())


# -- what a desk may ask about a detached run ---------------------------------------------------------------------------


def _records() -> str:
    folder = state_folder(os.environ, "hosted")
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    why = make_private(folder)
    if why:
        raise Problem(f"no place for what runs here: {why}")
    return folder


def _keep_record(key: str, record: Dict[str, Any]) -> None:
    replace_json(os.path.join(_records(), f"{_checked(key)}.json"), {**record, "host": socket.gethostname()})


def _record(key: str) -> Dict[str, Any]:
    """Return the record of the run under this key, ended or not; only from a file that nobody else can have changed."""
    path = os.path.join(_records(), f"{_checked(key)}.json")
    if not os.path.exists(path) or unsafe(os.lstat(path)):
        return {}
    return read_json(path) or {}


def _checked(key: Any) -> str:
    if not isinstance(key, str) or not key or set(key) - set(_KEY):
        raise Problem(f"{key!r} is not the key of a run")
    return key


def _alive(record: Mapping[str, Any]) -> bool:
    pid = record.get("pid")
    return isinstance(pid, int) and record.get("started") is not None and start_time(pid) == record["started"]


def _status(request: Mapping[str, Any]) -> Dict[str, Any]:
    record = _record(request["key"])
    if "pid" not in record:  # also if it was prepared but never started
        return {"known": False}
    answer: Dict[str, Any] = {"known": True, "alive": _alive(record), "folder": record["folder"]}
    try:
        summary = Run.open(record["folder"]).summary()
    except RecordError:
        summary = None
    if summary:
        answer.update(outcome=summary.outcome, exit_code=summary.exit_code)
    return answer


def _stop(request: Mapping[str, Any]) -> Dict[str, Any]:
    record = _record(request["key"])
    alive = _alive(record)
    if alive and request["word"] in WORDS:
        ask_to_stop(RunFolder(record["folder"]).stop, request["word"], str(request["why"])[:200])
    return {"alive": alive}


def _files(request: Mapping[str, Any]) -> int:
    """Send the files that a mirror requests, as bytes on standard output after a one-line header."""
    record = _record(request["key"])
    if not record:
        raise Problem("no such run is known here")
    reply(answer={"bytes": True})
    return serve(record["folder"], io.BytesIO(str(request["request"]).encode()), sys.stdout.buffer)
