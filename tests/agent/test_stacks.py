"""The thread that tells a rank's stack must not change how its program ends."""

import dis
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from drumbeat.base import proc
from drumbeat.inrank import stacks
from drumbeat.inspector.activity import _timer_runs
from tests.conftest import wait_for

FOLDER = Path(stacks.__file__).parent
PROGRAM = f"""
import sys, time
sys.path.insert(0, {str(FOLDER)!r})
import stacks
stacks.serve()
print("up", flush=True)
sys.stdin.readline()
print("threading" in sys.modules)
"""


def test_a_program_without_threads_ends_after_it_was_asked(tmp_path):
    """Imported by the answering thread, `threading` would take it for the main thread, and wait for it for ever."""
    environ = {**os.environ, "DRUMBEAT_METRICS": str(tmp_path / "metrics"), "RANK": "0"}
    argv = [sys.executable, "-S", "-c", PROGRAM]
    process = subprocess.Popen(argv, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "up\n"
        time.sleep(0.2)
        (name,) = [each for each in os.listdir(tmp_path) if each.endswith(f".{process.pid}.sock")]
        answer = stacks.ask(str(tmp_path), name, 30.0)
        assert answer and [frame[2] for frame in answer["stack"]] == ["<module>"], "of the main thread"
        moved = proc.moved(process.pid)
        assert stacks.ask(str(tmp_path), name, 30.0) and proc.moved(process.pid) == moved, "an answer is no progress"
        out, _ = process.communicate("go on\n", timeout=60)
        assert (process.returncode, out) == (0, "False\n")
    finally:
        process.kill()
        process.wait()


DIALS = f"""
import sys, traceback
sys.path.insert(0, {str(FOLDER)!r})
import socket, stacks
stacks.adapt(socket)
for tries in range(1, 4):
    try:
        socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    except ConnectionRefusedError as error:
        frames = [each.filename for each in traceback.extract_tb(error.__traceback__)]
    print(tries, stacks._dials())
print(frames[-1])
import threading
thread = threading.Thread(target=int, args="x", name="feed")
thread.start()
thread.join()
print(*stacks._died)
"""


def test_a_process_that_is_refused_again_and_again_or_lost_a_thread_tells_so(tmp_path):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and nobody listens
        port = str(bound.getsockname()[1])
        argv = [sys.executable, "-S", "-c", DIALS, port]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    told, died = done.stdout.split("\nfeed ended with ")
    assert told.split() == ["1", "2", "3", f"127.0.0.1:{port}", "<frozen", "socket>"], "a line of no program"
    assert died == "ValueError: invalid literal for int() with base 10: 'x'\n"


LEAVES = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import os, socket, stacks
stacks.adapt(socket)
server = socket.create_server(("127.0.0.1", 0))
port = server.getsockname()[1]
stays, goes = (socket.create_connection(("127.0.0.1", port)) for _ in range(2))
others = [server.accept()[0] for _ in range(2)]
others[1].close()
assert goes.recv(1) == b""
print(stays.getsockname()[1], goes.getsockname()[1], port, flush=True)
"""


def spins(q):
    while True:
        if q:
            return q.pop()


def breaks(q):
    while True:
        if q:
            break
    return len(q)


def raises(q):
    while True:
        if q:
            raise ValueError(str(q))


def counts(q):
    n = 0
    while True:
        n += 1
        if n > 1000:
            return q


def polls(q):
    while True:
        if q.empty():
            continue
        return q.get()


def retries(q):
    while True:
        try:
            return q.get()
        except OSError:
            time.sleep(1)


def yields(q):
    while True:
        yield q


@pytest.mark.parametrize("loop", [spins, breaks, raises])
def test_what_a_loop_does_on_its_way_out_can_end_no_wait(loop):
    at = {step.offset: stacks._loop(loop.__code__, step.offset)[0] == "endless" for step in dis.get_instructions(loop)}
    calls = [step.offset for step in dis.get_instructions(loop) if step.opname.startswith("CALL")]
    assert any(at.values()) and not any(at[place] for place in calls), "which may take as long as it likes"


@pytest.mark.parametrize("loop", [counts, polls, retries, yields])
def test_a_loop_that_does_something_may_end(loop):
    assert not any(stacks._loop(loop.__code__, step.offset)[0] == "endless" for step in dis.get_instructions(loop))


def test_a_loop_that_calls_a_function_again_and_again_is_named_itself():
    """Python hands the interpreter over just where a function begins, so most looks at such a loop see a call."""
    over = []

    def called():
        if over:
            raise KeyError

    def calls():
        while True:
            called()

    def runs():
        with pytest.raises(KeyError):
            calls()

    thread = threading.Thread(target=runs)
    thread.start()
    seen = []
    for _ in range(20):
        time.sleep(0.006)
        seen.append(stacks._stack(sys._current_frames()[thread.ident], thread.ident)[0])
    over.append(True)
    thread.join()
    assert sum(frame[2] == "calls" and frame[4] for frame in seen) >= 10, seen


LOOPS = f"""
import os, sys, threading, time
sys.path.insert(0, {str(FOLDER)!r})
import stacks

def repeats(number):
    while number != 1:
        number = number // 2 if number % 2 == 0 else number

def advances(number):
    while number:
        number += 1

def settles(number):
    while abs(number - 0.3) > 1e-9:
        number = number * 0.5 + 0.5

def asks(number):
    while abs(number - 0.3) > 1e-9:
        number = answer(number)

def answer(number):
    return number

def waits(lock):
    lock.acquire()

lock = threading.Lock()
lock.acquire()
ends, goes_on = (globals()[name] for name in sys.argv[1:])
threads = [threading.Thread(target=ends, args=(6,)), threading.Thread(target=goes_on, args=(1,))]
threads += [threading.Thread(target=waits, args=(lock,)), threading.Thread(target=advances, args=(5,))]
for thread in threads:
    thread.daemon = True
    thread.start()
time.sleep(0.1)
frame = lambda number: sys._current_frames()[threads[number].ident]
def proven(number, tries):
    return any(stacks._stack(frame(number), threads[number].ident)[0][4] == stacks.PROVEN for _ in range(tries))

print(proven(0, 40), proven(1, 8), stacks._calling(frame(2)), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("loops", [("repeats", "advances"), ("settles", "asks")])
def test_a_loop_that_comes_to_a_state_that_it_had_never_ends_and_the_method_that_is_called_is_named(loops):
    """Beside threads that leave it little time, too: a loop that has not run in between proves nothing."""
    told = subprocess.run(
        [sys.executable, "-S", "-c", LOOPS, *loops], capture_output=True, text=True, timeout=60, check=True
    )
    method = "_thread acquire" if sys.version_info >= (3, 11) else ""
    assert told.stdout.rstrip() == f"True False {method}".rstrip()


ALONE = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import _thread, os, signal, stacks, subprocess, threading, time
main, told = _thread.get_ident(), []

def asked():
    thread = threading.Thread(target=lambda: told.append(stacks._is_alone(main)))
    thread.start()
    thread.join()

asked()
signal.signal(signal.SIGALRM, lambda number, frame: None)
asked()
signal.signal(signal.SIGALRM, signal.SIG_DFL)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
asked()
child = subprocess.Popen(["sleep", "60"])
asked()
child.kill()
asked()
child.wait()
asked()
timer = threading.Timer(0.5, _thread.interrupt_main)
timer.start()
asked()
timer.cancel()
timer.join()
asked()

def trace(*event):
    return trace

sys.settrace(trace)  # a debugger's, or a time limit's
asked()
sys.settrace(None)
asked()
print(*map(int, told))
"""


def test_a_handler_of_a_signal_a_child_or_another_thread_may_break_into_a_loop():
    told = subprocess.run([sys.executable, "-S", "-c", ALONE], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.split() == ["1", "0", "1", "0", "0", "1", "0", "1", "0", "1"]


NATIVE = """
import ctypes, sys
usleep = ctypes.CDLL(None).usleep
usleep.restype, usleep.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
print("alone", flush=True)
sys.stdin.readline()
sleeps = ctypes.cast(usleep, ctypes.c_void_p)
ctypes.CDLL(None).pthread_create(ctypes.byref(ctypes.c_ulong()), None, sleeps, ctypes.c_void_p(900_000_000))
print("two", flush=True)
sys.stdin.readline()
"""


def test_a_thread_of_a_library_that_sleeps_may_break_into_a_loop():
    argv = [sys.executable, "-S", "-c", NATIVE]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout.readline() == "alone\n" and not _timer_runs(rank.pid)
        rank.stdin.write("go\n")
        rank.stdin.flush()
        assert rank.stdout.readline() == "two\n"
        wait_for(lambda: _timer_runs(rank.pid), 20, "its thread to sleep")
        rank.kill()


def test_an_exception_that_the_program_shows_itself_does_not_end_it(tmp_path):
    shows = "\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    sys.excepthook(*sys.exc_info())\nraise KeyError(3)"
    environ = {**os.environ, "DRUMBEAT_METRICS": str(tmp_path / "metrics"), "RANK": "2"}
    done = subprocess.run([sys.executable, "-S", "-c", LEAVES + shows], env=environ, capture_output=True, text=True)
    assert "ZeroDivisionError" in done.stderr and "KeyError: 3" in done.stderr
    assert stacks.read_note(str(tmp_path), 2, [])["raised"] == "KeyError: 3"


def test_a_rank_that_raises_or_exits_notes_who_had_left_it(tmp_path):
    """Of several processes with one rank number, the note of the known one counts."""
    for number, end in enumerate(("raise KeyError(3)", "sys.exit(3)", "", "raise ConnectionError(3)", "os._exit(3)")):
        folder = tmp_path / str(number)
        folder.mkdir()
        environ = {**os.environ, "DRUMBEAT_METRICS": str(folder / "metrics"), "RANK": "2"}
        begin = time.time()
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", LEAVES + end], env=environ, stdout=-1, stderr=-1, text=True
        )
        out, err = process.communicate(timeout=60)
        stays, goes, port = map(int, out.split())
        assert ("KeyError: 3" in err) == (number == 0) and "Error in" not in err, err
        (folder / "end-2.1").write_text('{"t": 1.0, "links": [], "left": [], "own": false}')
        note = stacks.read_note(str(folder), 2, [process.pid])
        assert begin <= note["t"] <= time.time() and note["own"] == (number == 0)
        assert note["raised"] == {0: "KeyError: 3", 3: "ConnectionError: 3"}.get(number, "")
        assert [stays, port] in note["links"] and [port, stays] in note["links"]
        assert [each[:2] for each in note["left"]] == [[goes, port]]
    assert stacks.read_note(str(tmp_path / "0"), 1, []) == {}


NO_FILES = f"""
import resource, sys, time
sys.path.insert(0, {str(FOLDER)!r})
import stacks
stacks.adapt(None)
time.sleep(0.5)  # a thread that starts while the interpreter ends needs a file, too
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
kept = []
while True:
    kept.append(open("/dev/null"))
"""


def test_a_rank_that_can_open_no_more_files_fails_in_its_own_words(tmp_path):
    environ = {**os.environ, "DRUMBEAT_METRICS": str(tmp_path / "metrics"), "RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", NO_FILES], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and done.stderr.splitlines()[-1].endswith("Too many open files: '/dev/null'")
    assert "excepthook" not in done.stderr
