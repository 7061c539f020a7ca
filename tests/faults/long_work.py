"""Long work that is no hang: what a rank of program.py does while the others wait for it. Each function ends at `until`."""

import asyncio
import concurrent.futures
import fcntl
import hashlib
import itertools
import multiprocessing
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

FILE = os.environ.get("FAULT_FILE", "")


def _python(code, *arguments, **more):
    return subprocess.Popen([sys.executable, "-S", "-c", code, *map(str, arguments)], **more)


def _left(until):
    return max(0.0, until - time.monotonic())


COMPUTES = (
    "import sys,time; end = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: sum(range(100_000))"
)


def paced(until):
    with open(FILE + ".bytes", "wb", buffering=0) as file:
        while time.monotonic() < until:
            file.write(b"x" * 4096)
            time.sleep(5)


def polls(until):
    while time.monotonic() < until:
        time.sleep(1)


def reply(until):
    """It waits for the answer of a server that is not its own, which takes its time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
        code = f"import os,time; time.sleep({_left(until)}); os.write({server.fileno()}, b'.')"
        outside = ["setsid", "--fork", sys.executable, "-S", "-c", code]
        subprocess.run(outside, pass_fds=[server.fileno()], env={}, check=True)
        server.close()
        client.recv(1)


def uploads(until):
    """A process of its own sends a little now and then."""
    code = (
        "import socket,sys,time; a, b = socket.socketpair()\n"
        "for _ in range(int(sys.argv[1])): a.send(b'x'); b.recv(1); time.sleep(1)"
    )
    _python(code, round(_left(until))).wait()


def sends(until):
    """It sends slowly over a socket, as an upload does that is held back."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
        while time.monotonic() < until:
            client.sendall(b"x" * 512)
            server.recv(512)
            time.sleep(3)


def own_work(until):
    """It computes, in Python, outside it, and in calls into C that hold Python's lock."""
    total = 0
    while time.monotonic() < until:
        for number in range(100_000):
            total += number * number
        sorted(range(200_000), key=lambda each: -each)
        sum(range(300_000_000))


def waits_for_file(until):
    while time.monotonic() < until:
        os.path.exists(FILE + ".none")
        time.sleep(0.5)


def computes(until):
    """One short process after the other computes for it."""
    while time.monotonic() < until:
        subprocess.run([sys.executable, "-S", "-c", "sum(range(5_000_000))"], check=True, env={})


def one_c_call(until):
    """A single call into C that holds Python's lock for the whole time."""
    any(map(until.__lt__, iter(time.monotonic, None)))


def nested(until):
    """A child of a child of a shell computes."""
    inner = f"{sys.executable} -S -c '{COMPUTES}' {_left(until)}; true"
    subprocess.run(["sh", "-c", 'sh -c "$1"; true', "sh", inner], check=True)


def pipeline(until):
    """A shell's pipeline packs what one of its processes makes, as an archive of a dataset is packed."""
    code = (
        "import os,sys,time; end = time.monotonic() + float(sys.argv[1])\n"
        "while time.monotonic() < end: sys.stdout.buffer.write(os.urandom(200_000)); time.sleep(1)"
    )
    shell = f"{sys.executable} -S -c '{code}' {_left(until)} | gzip -1 | wc -c"
    subprocess.run(["sh", "-c", shell], check=True, capture_output=True)


def reads_pipe(until):
    """It reads, line by line, what a slow process prints."""
    code = (
        "import sys,time; end = time.monotonic() + float(sys.argv[1])\n"
        "while time.monotonic() < end: print('line', flush=True); time.sleep(8)"
    )
    child = _python(code, _left(until), stdout=subprocess.PIPE)
    for _ in child.stdout:
        pass
    child.wait()


def threads(until):
    """Threads compute, and the main thread waits for them."""

    def hashes():
        while time.monotonic() < until:
            hashlib.sha256(b"x" * 1_000_000).digest()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(hashes) for _ in range(4)]:
            each.result()


def thread_saves(until):
    """A thread writes a checkpoint slowly, and the main thread waits for it."""

    def saves():
        with open(FILE + ".bytes", "wb", buffering=0) as file:
            while time.monotonic() < until:
                file.write(b"x" * 200_000)
                time.sleep(1)

    thread = threading.Thread(target=saves)
    thread.start()
    thread.join()


def _crunch(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(100_000))


def pool(until):
    """A pool of processes computes."""
    with multiprocessing.get_context("fork").Pool(2) as workers:
        workers.map(_crunch, [_left(until)] * 2)


def _samples(queue, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        _crunch(min(12.0, max(0.1, end - time.monotonic())))
        queue.put(b"sample")
    queue.put(None)


def slow_loader(until):
    """A data loader's worker computes 12 s for each sample."""
    queue = multiprocessing.get_context("fork").Queue()
    worker = multiprocessing.get_context("fork").Process(target=_samples, args=(queue, _left(until)), daemon=True)
    worker.start()
    while queue.get() is not None:
        pass
    worker.join()


def alarm(until):
    """A loop that a signal's handler ends."""

    class Over(Exception):
        pass

    def over(*_):
        raise Over

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, _left(until))
    number = 0
    try:
        while True:
            number += 1
    except Over:
        signal.signal(signal.SIGALRM, before)


def flag(until):
    """A loop that a thread ends by a variable."""
    over = []
    threading.Timer(_left(until), over.append, [1]).start()
    while not over:
        pass


def child_signals(until):
    """It rests until a child, which computes, sends it a signal."""
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    code = COMPUTES + "\nimport os, signal; os.kill(os.getppid(), signal.SIGUSR1)"
    child = _python(code, _left(until))
    signal.pause()
    child.wait()
    signal.signal(signal.SIGUSR1, before)


def polls_http(until):
    """It asks a server again and again, which is not ready yet."""
    code = (
        "import http.server,sys,time; end = time.monotonic() + float(sys.argv[1])\n"
        "class Answer(http.server.BaseHTTPRequestHandler):\n"
        "  def do_GET(self): self.send_response(200 if time.monotonic() > end else 503); self.end_headers()\n"
        "  def log_message(self, *_): pass\n"
        "server = http.server.HTTPServer(('127.0.0.1', 0), Answer); print(server.server_port, flush=True); server.serve_forever()"
    )
    server = _python(code, _left(until), stdout=subprocess.PIPE)
    url = f"http://127.0.0.1:{int(server.stdout.readline())}/ready"
    try:
        while True:
            try:
                urllib.request.urlopen(url, timeout=5).close()
                return
            except urllib.error.HTTPError:
                time.sleep(2)
    finally:
        server.kill()
        server.wait()


def downloads(until):
    """A slow server sends 20 kB per second."""
    code = (
        "import socket,sys,time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)\n"
        "c = s.accept()[0]; end = time.monotonic() + float(sys.argv[1])\n"
        "while time.monotonic() < end: c.sendall(b'x' * 20_000); time.sleep(1)"
    )
    server = _python(code, _left(until), stdout=subprocess.PIPE)
    with socket.create_connection(("127.0.0.1", int(server.stdout.readline()))) as sock:
        while sock.recv(65536):
            pass
    server.wait()


def knocks(until):
    """It tries to reach a service of its own that comes up late."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    code = (
        "import socket,sys,time; time.sleep(float(sys.argv[1]))\n"
        "socket.create_server(('127.0.0.1', int(sys.argv[2]))).accept()"
    )
    service = _python(code, _left(until), address[1])
    while True:
        try:
            socket.create_connection(address).close()
            break
        except ConnectionRefusedError:
            time.sleep(1)
    service.wait()


def serves(until):
    """An event loop answers requests now and then; it computes for each."""

    async def main():
        async def answer(reader, writer):
            await reader.read(1)
            _crunch(0.5)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        while time.monotonic() < until:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b".")
            await asyncio.sleep(4)
            writer.close()
        server.close()

    asyncio.run(main())


def database(until):
    """It writes rows into a database, each of them committed."""
    with tempfile.TemporaryDirectory() as folder:
        rows = sqlite3.connect(os.path.join(folder, "rows.db"))
        rows.execute("create table samples (number integer)")
        while time.monotonic() < until:
            rows.execute("insert into samples values (1)")
            rows.commit()
            time.sleep(0.3)
        rows.close()


def unpacks(until):
    """It makes and removes many small files, as a dataset is unpacked."""
    with tempfile.TemporaryDirectory() as folder:
        for number in itertools.count():
            if time.monotonic() > until:
                return
            path = os.path.join(folder, str(number % 100))
            with open(path, "wb") as file:
                file.write(b"x" * 3000)
            time.sleep(0.02)


def backs_off(until):
    """It tries again after 1, 2, 4, ... 16 s."""
    for number in itertools.count():
        if time.monotonic() > until:
            return
        time.sleep(min(2.0 ** (number % 5), _left(until) + 0.1))


def compiles(until):
    """A real compiler, again and again, as for an extension with many files."""
    tool = shutil.which("gcc") or shutil.which("cc")
    text = "\n".join(
        f"double f{n}(double x) {{ for (int i = 0; i < {n}; i++) x = x * x + {n}; return x; }}" for n in range(3000)
    )
    while time.monotonic() < until:
        subprocess.run([tool, "-O2", "-x", "c", "-c", "-", "-o", FILE + ".o"], input=text, text=True, check=True)


def copies(until):
    """A child copies slowly, and the rank waits for it."""
    code = (
        "import sys,time; end = time.monotonic() + float(sys.argv[1])\n"
        "with open(sys.argv[2], 'wb', 0) as f:\n  while time.monotonic() < end: f.write(b'x' * 30_000); time.sleep(1)"
    )
    _python(code, _left(until), FILE + ".copy").wait()


# Done by rank 0 alone.
ALONE = {
    "paced": paced, "polls": polls, "reply": reply, "uploads": uploads, "computes": computes, "sends": sends,
    "own-work": own_work, "file": waits_for_file, "c-call": one_c_call, "nested": nested, "pipeline": pipeline,
    "reads-pipe": reads_pipe, "threads": threads, "thread-saves": thread_saves, "pool": pool, "slow-loader": slow_loader,
    "alarm": alarm, "flag": flag, "child-signals": child_signals, "polls-http": polls_http, "downloads": downloads,
    "knocks": knocks, "serves": serves, "database": database, "unpacks": unpacks, "backs-off": backs_off, "compiles": compiles,
    "copies": copies,
}  # fmt: skip


def file_lock(until, rank):
    """Rank 0 holds a file's lock while it works; the others wait for the lock."""
    with open(FILE + ".lock", "w") as file:
        if rank:
            time.sleep(1)
        fcntl.flock(file, fcntl.LOCK_EX)
        if rank == 0:
            _crunch(_left(until))


_rounds = itertools.count()


def late_file(until, rank):
    """The others look again and again for a file that rank 0 writes when its work is done."""
    done = f"{FILE}.done-{next(_rounds)}"
    if rank == 0:
        _crunch(_left(until))
        open(done, "w").close()
    while not os.path.exists(done):
        time.sleep(0.2)


TOGETHER = {"file-lock": file_lock, "late-file": late_file}
