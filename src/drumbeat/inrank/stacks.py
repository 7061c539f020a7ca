"""A thread inside a rank that tells its node's agent what the rank is doing: its Python stack and its last collectives. A rank
that raises or exits also leaves a note: the time, and the connections that others had closed by then.

The thread is started by the adapters when a rank imports `socket`, by its first `metrics.report`, and by `drumbeat.train`. It
listens on a unix socket in the node-local folder of this run (mode 0700, so only the job's own user reaches it), and costs
nothing until it is asked. It answers while the main thread waits in a collective, sleeps or loops; it cannot answer while the
process is stopped, or while a C extension holds the interpreter's lock. It is also loaded as a stand-alone file, and imports
nothing of drumbeat.
"""

from __future__ import annotations

import _socket
import _thread
import atexit
import functools
import os
import signal
import socket
import stat
import struct
import sys
import time
from types import CodeType, FrameType
from typing import Any, Collection, Dict, List, Optional, Set, Tuple

_DEEPEST = 40  # frames of a stack
_LIBRARY = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", os.path.dirname(os.__file__) + os.sep)
_KEPT = 4096  # code positions whose loops are known
_SECONDS = 2.0  # seconds to read the answer
# Prefixes of the instructions that leave a loop, and of those that may change what it waits for.
_LEAVES = ("RETURN", "RAISE", "RERAISE", "YIELD")
_ACTS = ("CALL", "STORE", "DELETE", "FOR_ITER", "SEND", "YIELD", "IMPORT", "BEFORE_", "SETUP_", "WITH_")
# Prefixes of those that only compute; values whose operators have no other effect; seconds between two states of such a loop,
# in all, and of CPU time between two equal ones: to wait for the interpreter's lock takes some, too.
_COMPUTES = (
    "LOAD_FAST", "LOAD_CONST", "LOAD_SMALL", "STORE_FAST", "BINARY_", "INPLACE_", "UNARY_", "COMPARE_", "CONTAINS_", "IS_OP",
    "JUMP_", "POP_JUMP", "POP_TOP", "COPY", "SWAP", "DUP_", "ROT_", "NOP", "CACHE", "EXTENDED_ARG", "TO_BOOL", "NOT_TAKEN",
)  # fmt: skip
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_CALLS = ("LOAD_GLOBAL", "PUSH_NULL", "PRECALL", "CALL")  # of functions that only compute
_FUNCTIONS = (abs, bool, divmod, float, int, len, max, min, pow, round)
_SWITCH, _WATCHED, _RAN = 0.005, 0.1, 0.004
_ENDLESS, _PURE, _SEALED = "endless", "pure", "sealed"
PROVEN = 2  # the loop can only be broken from outside (see `_is_alone`): one such sample is enough

_CLOSED, _CLOSE_WAIT, _LISTENS = 7, 8, 10  # states of a TCP connection
_NOTE = "end-"  # prefix of the names of notes

_BEGINS = ("<module>", "_run_module_as_main", "_bootstrap")  # functions in which a program, or a thread, begins

# As tracebacks show what stands between a program and its connection: no line of the program.
_SHOWN = "<frozen socket>"
_TRIES, _LATELY = 3, 20.0  # refused connections that count as trying again and again; seconds since the first of them
_refused: List[Tuple[float, Any]] = []  # the last refused connections: when, and the address
_died: List[str] = []  # the thread that ended last with an exception, and which

_serving = 0  # pid of the process that answers; its forks do not


def adapt(module: Any) -> None:
    """Answer in a process that may be a rank. A process that certainly is one calls `serve`."""
    if getattr(module, "__name__", "") == "mpi4py":
        return  # this file has imported `socket`, for which it adapts
    if getattr(module, "__name__", "").startswith("torch."):
        store = sys.modules["torch._C._distributed_c10d"].TCPStore
        store.__init__ = _noting_places(store.__init__)
        return
    serve("python")
    socket.socket.connect = _noting_refusals(socket.socket.connect)  # type: ignore[method-assign]
    show, leave = sys.excepthook, os._exit

    def note_and_show(kind: Any, value: Any, trace: Any) -> None:
        if not _goes_on(sys._getframe()):
            note_end(not _of_connection(value), _words(kind, value))
        show(kind, value, trace)

    def note_and_leave(status: int) -> None:
        note_end()
        leave(status)

    def note_thread_and_show(about: Any) -> None:
        if about.exc_type is not SystemExit:
            _died[:] = [f"{getattr(about.thread, 'name', '')} ended with {_words(about.exc_type, about.exc_value)}"]
        show_thread(about)

    loaded = "threading" in sys.modules  # otherwise it will take its hook from there
    holder, name = (sys.modules["threading"], "excepthook") if loaded else (_thread, "_excepthook")
    show_thread = getattr(holder, name)
    setattr(holder, name, note_thread_and_show)
    sys.excepthook, os._exit = note_and_show, note_and_leave  # type: ignore[assignment]
    atexit.register(note_end)


def _goes_on(frame: FrameType) -> bool:
    """Return true if an exception hook was called by the program, to show an exception that it has caught: when Python calls it,
    nothing of the program is left."""
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name in _BEGINS


def _noting_refusals(plain: Any) -> Any:
    """Return `socket.connect` that keeps where it was refused: a rank that tries again and again looks like one that sleeps."""

    def connect(self: socket.socket, address: Any) -> None:
        try:
            return plain(self, address)  # type: ignore[no-any-return]
        except ConnectionRefusedError:
            if isinstance(address, tuple):
                _refused[:] = [*_refused, (time.monotonic(), address[:2])][-_TRIES:]
            raise

    connect.__code__ = connect.__code__.replace(co_filename=_SHOWN)
    return connect


def _noting_places(plain: Any) -> Any:
    """Return the start of torch's store, with the places at which it is connecting now."""

    def connect(self: Any, host_name: str, port: int, *more: Any, **named: Any) -> None:
        connect.places.append((host_name, port))  # type: ignore[attr-defined]
        try:
            plain(self, host_name, port, *more, **named)
        finally:
            connect.places.pop()  # type: ignore[attr-defined]

    connect.places = []  # type: ignore[attr-defined]
    connect.__code__ = connect.__code__.replace(co_filename=_SHOWN)
    return connect


def _dials() -> str:
    """Return host:port to which this process tries to connect again and again, and is refused; '' if it does not."""
    store = getattr(sys.modules.get("torch._C._distributed_c10d"), "TCPStore", None)
    places = set(getattr(getattr(store, "__init__", None), "places", ()))  # see `adapt`
    if len(_refused) == _TRIES and time.monotonic() - _refused[0][0] < _LATELY:
        places.update(address for _, address in _refused)
    return "{}:{}".format(*places.pop()) if len(places) == 1 else ""


def serve(kind: str = "rank") -> None:
    """Start to answer, once per process."""
    global _serving
    metrics = os.environ.get("DRUMBEAT_METRICS")
    if _serving == os.getpid() or not metrics:
        return
    _serving = os.getpid()
    try:
        folder, rank = os.path.dirname(metrics), os.environ.get("RANK", "0")
        own = f"{rank}.{_serving}.sock"
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if kind == "rank" and f"python-{own}" in os.listdir(place):  # the adapter's thread already answers
                os.rename(f"python-{own}", f"rank-{own}", src_dir_fd=place, dst_dir_fd=place)
                return
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(f"/proc/self/fd/{place}/{kind}-{own}")
            listener.listen(4)
        finally:
            os.close(place)
        _thread.start_new_thread(_answer, (listener, _thread.get_ident()))
    except (OSError, RuntimeError):
        return  # no socket or no thread available: no stacks, but the training goes on


def ask(folder: str, name: str, seconds: float) -> Optional[Dict[str, Any]]:
    """Return the answer of the rank behind the socket `name`; None if there is none within the time limit."""
    import json

    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(seconds)
            place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                connection.connect(f"/proc/self/fd/{place}/{name}")  # a path of any length: a socket's own is short
            finally:
                os.close(place)
            data = b""
            while True:
                part = connection.recv(1 << 16)
                if not part:
                    break
                data += part
        answer = json.loads(data)
        return answer if isinstance(answer, dict) else None
    except (OSError, ValueError):
        return None


def _words(kind: Any, value: Any) -> str:
    """Return an exception as the last line of its traceback shows it."""
    try:
        lines = str(value).strip().splitlines()
    except Exception:  # noqa: BLE001 - its class may be the user's
        lines = []
    return ": ".join([kind.__name__, *lines[:1]])[:200]


def note_end(own: bool = False, raised: str = "") -> None:
    """Record, once, that this rank leaves: the time, its TCP connections (own port, peer's port), and those that the peer has
    closed, with the seconds since their last data. `own`: it has raised, and no lost connection was the reason. A thread that
    ended with an exception before is noted too."""
    metrics = os.environ.get("DRUMBEAT_METRICS")
    if not metrics or _serving != os.getpid():
        return
    try:
        import json  # fails if no more files can be opened

        name = f"{_NOTE}{os.environ.get('RANK', '0')}.{_serving}"
        place = os.open(os.path.join(os.path.dirname(metrics), name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        now, (links, left) = time.time(), _connections()
        note = {"t": now, "links": links, "left": left, "own": own, "raised": raised, "died": "".join(_died)}
        with open(place, "w") as file:
            file.write(json.dumps(note))
    except Exception:  # noqa: BLE001, S110 - an exception's own words must come out
        pass


def _of_connection(value: Optional[BaseException]) -> bool:
    """Return true if an exception, or one in its chain, is about a connection: an EOFError, or an OSError without a file name."""
    for _ in range(_DEEPEST):
        if isinstance(value, EOFError) or isinstance(value, OSError) and value.filename is None:
            return True
        value = value.__cause__ or value.__context__ if value else None
    return False


def read_notes(folder: str, rank: str = "") -> Dict[int, Dict[str, Any]]:
    """Return the notes of the processes that have left Python: they have raised or exited, and may still be alive."""
    import json

    found = {}
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if name.startswith(f"{_NOTE}{rank}"):
            try:
                with open(os.path.join(folder, name)) as file:
                    found[int(name.rpartition(".")[2])] = json.load(file)
            except (OSError, ValueError):
                continue
    return found


def read_note(folder: str, rank: int, pids: Collection[int]) -> Dict[str, Any]:
    """Return the note of a rank; if several processes left one, that of one of `pids`, else the one with the most connections."""
    found = read_notes(folder, f"{rank}.")
    return found[max(found, key=lambda pid: (pid in pids, len(found[pid]["links"])))] if found else {}


def _connections() -> Tuple[List[Tuple[int, int]], List[Tuple[int, int, float]]]:
    """Return the TCP connections of this process, and which of them the peer has closed or reset."""
    links, left = [], []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if not stat.S_ISSOCK(os.stat(number).st_mode):
                continue
            held = _socket.socket(fileno=os.dup(number))
            try:
                if held.family == socket.AF_UNIX or held.type != socket.SOCK_STREAM:
                    continue
                about = held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                state, since = about[0], min(struct.unpack_from("=2I", about, 52))
                received = struct.unpack_from("=Q", about, 128)
                here, there = held.getsockname()[1], 0
                if state not in (_CLOSED, _LISTENS):
                    there = held.getpeername()[1]
                    links.append((here, there))
                if state == _CLOSE_WAIT or state == _CLOSED and received[0]:
                    left.append((here, there, since / 1000))
            finally:
                held.close()
        except (OSError, struct.error):
            continue
    return links, left


def _answer(listener: socket.socket, starter: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals are for the main thread
    while True:
        try:
            connection, _ = listener.accept()
            import json

            with connection:
                connection.settimeout(_SECONDS)
                main = _main_thread(starter)
                frame = sys._current_frames().get(main)
                answer = {"pid": os.getpid(), "stack": _stack(frame, main), "flight": _flight(), "rank": _number()}
                answer.update(meets=_meets(frame), dials=_dials(), calling=_calling(frame), died="".join(_died))
                answer.update(alone=_is_alone(main))
                del frame
                connection.sendall(json.dumps(answer).encode())
        except Exception:  # noqa: BLE001, S112 - whatever a half-imported torch does here, the training goes on
            continue


def _main_thread(starter: int) -> int:
    """Return the main thread's number. `threading` is never imported here: it would take the importing thread for the main
    one, and wait for it at the program's end. If it is not loaded, only the main thread can have started us."""
    main_thread = getattr(sys.modules.get("threading"), "main_thread", None)
    return (main_thread().ident if main_thread else 0) or starter


def _stack(frame: Optional[FrameType], thread: int) -> List[List[Any]]:
    """Return the stack, innermost first: file, line, function, whether it is library code, and whether the frame is in a loop
    that nothing in the loop can end (1, or PROVEN)."""
    found: List[List[Any]] = []
    if frame is not None and frame.f_back is not None and _is_only_called(frame.f_code.co_code, frame.f_lasti):
        frame = frame.f_back
    while frame is not None and len(found) < _DEEPEST:
        name = frame.f_code.co_filename
        library = name == _SHOWN or any(part in name for part in _LIBRARY)
        kind, names = _loop(frame.f_code, frame.f_lasti)
        proven = kind == _SEALED or (kind == _PURE and _only_compute(frame, names) and _repeats(frame, thread))
        endless = PROVEN if proven else int(kind == _ENDLESS)
        found.append([name, frame.f_lineno, frame.f_code.co_name, library, endless])
        frame = frame.f_back
    return found


def _is_alone(main: int) -> bool:
    """Return true if nothing can break into what the main thread does: neither the program's handler of a signal or its trace
    function, nor another thread or a child, which may interrupt it."""
    for handler in map(signal.getsignal, signal.valid_signals()):
        own = handler is signal.default_int_handler or _is_ours(getattr(handler, "__module__", ""))
        if callable(handler) and not own:
            return False
    for thread, frame in sys._current_frames().items():
        inner: Optional[FrameType] = frame
        while inner is not None and not _is_ours(inner.f_globals.get("__name__")):
            if inner.f_trace is not None and thread == main:
                return False
            inner = inner.f_back
        if inner is None and thread not in (main, _thread.get_ident()):
            return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # which leaves them as they are
    except ChildProcessError:
        return True
    return False


def _is_ours(module: Any) -> bool:
    """Return true for a module of drumbeat: its handlers and threads let the main thread go on."""
    return str(module).startswith("drumbeat.")


def _is_only_called(code: bytes, at: int) -> bool:
    """Return true if a function has done nothing yet. Python lets other threads look just then, so they see it all the time
    where a loop calls it again and again."""
    import opcode

    return at < 0 or (code[at] == opcode.opmap.get("RESUME") and code[at + 1] & 3 == 0)


@functools.lru_cache(_KEPT)
def _loop(code: CodeType, at: int) -> Tuple[str, Tuple[str, ...]]:
    """Return the kind of loop that the code is in, and the global names that it reads: one that is endless, as it has no exit, or
    waits for a change and makes none itself; one that only computes with its own variables, if its globals do too; or, sealed,
    both without an exit and only computing."""
    import dis

    steps = list(dis.get_instructions(code))
    jumps = {each.offset: int(each.argval) for each in steps if each.opcode in (*dis.hasjrel, *dis.hasjabs)}
    loops = {to: max(jump for jump in jumps if jumps[jump] == to) for jump, to in jumps.items() if to <= jump}
    around = ((to, jump) for to, jump in loops.items() if to <= at <= jump)
    begin, end = min(around, key=lambda loop: loop[1] - loop[0], default=(0, -1))
    inside = {each.offset: each.opname for each in steps if begin <= each.offset <= end}
    exits = any(name.startswith(_LEAVES) for name in inside.values())
    exits = exits or any(not begin <= jumps.get(step, begin) <= end for step in inside)
    exits = exits or not inside.get(end, "").startswith("JUMP_")  # a condition at its end
    stays = _stays(inside, jumps, begin)
    handles = bool(getattr(code, "co_exceptiontable", b"")) or any(
        name.startswith("SETUP_") for name in inside.values()
    )
    counted = inside if handles or at not in stays else stays
    acts = any(inside[step].startswith(_ACTS) for step in counted)
    if end < 0:
        return "", ()
    names = {str(each.argval) for each in steps if each.offset in inside and each.opname == "LOAD_GLOBAL"}
    plain = all(name.startswith(_COMPUTES) for name in inside.values())
    if not (exits and acts):
        return _SEALED if plain and not exits else _ENDLESS, ()
    pure = all(name.startswith((*_COMPUTES, *_CALLS)) for name in inside.values())
    return _PURE if pure else "", tuple(names)


def _only_compute(frame: FrameType, names: Collection[str]) -> bool:
    """Return true if these globals are plain values and functions that have no other effect than their result."""
    values = [frame.f_globals.get(name, frame.f_builtins.get(name)) for name in names]
    return all(type(value) in _PLAIN or any(value is each for each in _FUNCTIONS) for value in values)


def _repeats(frame: FrameType, thread: int) -> bool:
    """Return true if a frame whose loop only computes with its own plain values comes to a state that it had before, after it
    has run for a while: such a loop never ends. The frame is held meanwhile, so that it is the same call."""
    clock, until = time.pthread_getcpuclockid(thread), time.monotonic() + _WATCHED
    seen: Dict[Any, float] = {}  # state -> the thread's CPU time by then
    while time.monotonic() < until:
        ran, values = time.clock_gettime(clock), dict(frame.f_locals)
        if not all(type(value) in _PLAIN for value in values.values()):
            return False
        state = (frame.f_lasti, *((name, type(value), value) for name, value in values.items()))
        if ran - seen.setdefault(state, ran) >= _RAN:
            return True
        time.sleep(_SWITCH)  # the thread goes on
    return False


def _calling(frame: Optional[FrameType]) -> str:
    """Return module and name of the method of a library in C that a frame is calling, such as `mpi4py.MPI recv`; '' if
    unknown. Nothing of the program is run for that, not even a property, and no file is read."""
    name, *rest = _called(frame.f_code, frame.f_lasti) if frame else ("",)
    if frame is None or not rest:
        return ""
    value = frame.f_locals.get(name, frame.f_globals.get(name))
    for each in rest[:-1]:
        value = getattr(value, "__dict__", {}).get(each)
    return f"{type(value).__module__} {rest[-1]}"


@functools.lru_cache(_KEPT)
def _called(code: CodeType, at: int) -> Tuple[str, ...]:
    """Return the dotted name that the code calls at this place: what is loaded where the text of the call begins. Python 3.10
    and older do not record places."""
    import dis

    steps = {each.offset: each for each in dis.get_instructions(code)}
    begin = getattr(steps.get(at), "positions", None)
    if begin is None or not steps[at].opname.startswith("CALL"):
        return ("",)
    loads = (each for each in steps.values() if each.offset < at and each.opname.startswith("LOAD_"))
    return tuple(str(each.argval) for each in loads if getattr(each, "positions", ())[::2] == begin[::2]) or ("",)


def _stays(inside: Dict[int, str], jumps: Dict[int, int], begin: int) -> Set[int]:
    """Return the instructions of a loop after which it may begin again: what is done on the way out can end no wait. Exceptions
    are not followed."""
    found: Set[int] = set()
    before = -1
    while before != len(found):
        before, following = len(found), -1
        for step in sorted(inside, reverse=True):
            goes_on = not inside[step].startswith(("RETURN_V", "RETURN_C", "RAISE", "RERAISE")) and (
                not inside[step].startswith("JUMP_") or "_IF_" in inside[step]
            )
            if jumps.get(step) == begin or jumps.get(step) in found or (goes_on and following in found):
                found.add(step)
            following = step
    return found


def _number() -> Optional[int]:
    """Return the rank that a framework has given this process; None if it has given none."""
    torch, jax = (sys.modules.get(name) for name in ("torch.distributed", "jax._src.distributed"))
    if torch is not None and torch.is_available() and torch.is_initialized():
        return int(torch.get_rank())
    return jax.global_state.process_id if jax is not None and jax.global_state.client is not None else None


def _meets(frame: Optional[FrameType]) -> str:
    """Return host:port at which torch or JAX waits for the other ranks now; '' if it does not."""
    while frame is not None:
        name, path = frame.f_code.co_name, frame.f_code.co_filename
        if name == "_create_c10d_store" and path.endswith("rendezvous.py"):
            return "{hostname}:{port}".format_map(frame.f_locals)
        if name == "initialize" and path.endswith(os.path.join("jax", "_src", "distributed.py")):
            return str(frame.f_locals.get("coordinator_address") or "")
        frame = frame.f_back
    return ""


def _flight() -> Dict[str, List[Any]]:
    """Map each process group to its last collective on this rank, from torch's flight recorder: number, operation, whether it
    is over, and the first one that is not over."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return {}
    import json

    last: Dict[str, List[Any]] = {}
    for entry in json.loads(dump()).get("entries", ()):
        number = entry.get("collective_seq_id")
        if entry.get("is_p2p") or not isinstance(number, int):
            continue
        group = " ".join(map(str, entry.get("process_group") or [entry.get("pg_id")]))  # its name and description
        over = bool(entry.get("retired")) or entry.get("state") == "completed"
        known = last.setdefault(group, [-1, "", True, None])
        if number >= known[0]:
            known[:3] = [number, str(entry.get("profiling_name", "")).split(":")[-1], over]
        if not over and (known[3] is None or number < known[3]):
            known[3] = number
    return last
