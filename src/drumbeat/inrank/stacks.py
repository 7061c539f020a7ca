"""A thread inside a rank that tells its node's agent what the rank is doing: its Python stack and its last collectives.

Started by the first `metrics.report` of a process, and by `drumbeat.train`. It listens on a unix socket in the node-local
folder of this run (mode 0700, so only the job's own user reaches it), and costs nothing until it is asked. It answers while
the main thread waits in a collective, sleeps or loops; it cannot answer while the process is stopped, or while a C extension
holds the interpreter's lock.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from opcode import opname
from types import FrameType
from typing import Any, Dict, List, Optional

_DEEPEST = 40  # frames of a stack
_LIBRARY = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", os.path.dirname(os.__file__) + os.sep)
_SECONDS = 2.0  # for whoever asks to read the answer

_serving = False


def serve() -> None:
    """Start to answer; once per process, and never in a process that was forked from one that answers."""
    global _serving
    metrics = os.environ.get("DRUMBEAT_METRICS")
    if _serving or not metrics:
        return
    _serving = True
    try:
        listener = _listen(os.path.dirname(metrics), f"rank-{os.environ.get('RANK', '0')}.{os.getpid()}.sock")
        main = threading.main_thread().ident
        threading.Thread(target=_answer, args=(listener, main), name="drumbeat-stacks", daemon=True).start()
    except (OSError, RuntimeError):
        return  # no socket or no thread to be had: no stacks, then; never a reason to end a training run


def ask(folder: str, name: str, seconds: float) -> Optional[Dict[str, Any]]:
    """Return the answer of the rank behind the socket `name`; None if there is none in that time."""
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


def _listen(folder: str, name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        listener.bind(f"/proc/self/fd/{place}/{name}")
    finally:
        os.close(place)
    listener.listen(4)
    return listener


def _answer(listener: socket.socket, main: Optional[int]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals are the main thread's
    while True:
        try:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(_SECONDS)
                connection.sendall(json.dumps(_look(main)).encode())
        except Exception:  # noqa: BLE001, S112 - whatever a half-imported torch does here, the training goes on
            continue


def _look(main: Optional[int]) -> Dict[str, Any]:
    frame = sys._current_frames().get(main or 0)
    return {"pid": os.getpid(), "stack": _stack(frame), **_instruction(frame), "flight": _flight()}


def _instruction(frame: Optional[FrameType]) -> Dict[str, Any]:
    """Return where in its innermost function the main thread is, and whether it calls something there that is not Python."""
    if frame is None:
        return {"at": 0, "calls": True}
    code, at = frame.f_code.co_code, max(0, frame.f_lasti)
    return {"at": at, "calls": at < len(code) and "CALL" in opname[code[at]]}


def _stack(frame: Optional[FrameType]) -> List[List[Any]]:
    """Return the stack, innermost first: file, line, function, and whether it is a library's."""
    found: List[List[Any]] = []
    while frame is not None and len(found) < _DEEPEST:
        name = frame.f_code.co_filename
        found.append([name, frame.f_lineno, frame.f_code.co_name, any(part in name for part in _LIBRARY)])
        frame = frame.f_back
    return found


def _flight() -> Dict[str, List[Any]]:
    """Map each process group to its last collective on this rank: number, operation, whether it is over, and the first that is
    not over. From torch's own record."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return {}
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
