"""Start exactly the drumbeat.pyz and the order that were submitted.

A run folder may be writable by others, and a job may wait for days before it starts. So the order holds the SHA-256 of
drumbeat.pyz, and whatever starts a node (the scheduler's script, a launcher's argument) holds the SHA-256 of both, with the few
lines of Python below. They read both files once, check them, and run private copies, because the program is read again and
again while the run goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shlex
import shutil
import signal
import sys
from typing import Iterator, List, Optional, Sequence, Tuple

import drumbeat
from drumbeat.base.order import Order, dump_order
from drumbeat.base.signals import EXIT_PREFLIGHT, EXIT_STORAGE, STOPS, let_stops_in


def running_bundle() -> Optional[str]:
    """Return the .pyz we run from, or None."""
    archive = getattr(drumbeat.__loader__, "archive", None)
    return os.path.abspath(archive) if archive else None


# It is what a node's start waits for, so it imports what is quick: `signal` alone takes as long as Python itself, and `tempfile`
# twice that. Others are imported where something is wrong.
LOADER = f"""
import _signal, fcntl, hashlib, os, stat, sys, time

def end(code, words):
    sys.stderr.write("drumbeat: " + words + "\\n")
    sys.exit(code)

def checked(path, digest):
    with open(path, "rb") as file:
        data = file.read()
    if hashlib.sha256(data).hexdigest() != digest:
        end({EXIT_PREFLIGHT}, path + " was changed after the job was submitted, so it is not run: submit the job again")
    return data

def replaceable(folder):
    while True:
        found = os.stat(folder)
        others = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
        if others or found.st_uid not in (os.geteuid(), 0):
            return True
        if folder == os.sep:
            return False
        folder = os.path.dirname(folder)

def remove(folder):
    import shutil
    shutil.rmtree(folder, ignore_errors=True)

def private_copies(files):
    chosen = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")]
    usable = [folder for folder in chosen + ["/tmp", "/var/tmp", "/dev/shm"] if folder and os.access(folder, os.W_OK | os.X_OK)]
    safe = [folder for folder in usable if not replaceable(os.path.realpath(folder))]
    failed = OSError("no folder for temporary files can be written: set TMPDIR")
    for folder in safe or usable:
        for name in os.listdir(folder):
            if name.startswith("drumbeat-node-"):  # a start that was killed outright left its own
                old = os.path.join(folder, name)
                found = hold(old, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if found and found.st_uid == os.geteuid() and found.st_mtime < time.time() - 3600:
                    remove(old)
        made = os.path.join(os.path.abspath(folder), "drumbeat-node-" + os.urandom(8).hex())
        try:
            os.mkdir(made, 0o700)
            hold(made, fcntl.LOCK_SH)
            for name, data in files.items():
                with open(os.path.join(made, name), "wb") as file:
                    file.write(data)
            return made
        except OSError as error:  # it is full
            remove(made)
            failed = error
    raise failed

def hold(folder, how):
    try:
        file = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
        os.set_inheritable(file, how == fcntl.LOCK_SH)  # kept by the program
        fcntl.flock(file, how)
        return os.fstat(file)
    except OSError:
        return None  # it is in use, or another user's

word, request, digest, program = sys.argv[1:]
name = os.path.basename(request)
_signal.pthread_sigmask(_signal.SIG_BLOCK, {list(map(int, STOPS))})  # heard when the private copies can be removed
try:
    bundle = os.path.join(os.path.dirname(request), "drumbeat.pyz")
    private = private_copies({{name: checked(request, digest), "drumbeat.pyz": checked(bundle, program)}})
except OSError as error:
    end({EXIT_STORAGE}, str(error))
words = [os.path.join(private, "drumbeat.pyz"), word, os.path.join(private, name), private]
os.execv(sys.executable, [sys.executable, "-I", "-S"] + words)
""".strip()


def pinned(order: Order, bundle: str) -> Order:
    """Return the order with the SHA-256 of the running bundle."""
    with open(bundle, "rb") as file:
        return dataclasses.replace(order, program=hashlib.sha256(file.read()).hexdigest())


def start_argv(python: str, request: str, text: str, word: str = "_node") -> Tuple[str, ...]:
    """Return the command that starts `drumbeat.pyz WORD` with the file `request`, which must contain `text`; the bundle lies
    beside it.

    -I -S: neither the caller's PYTHONPATH nor an installed package may change drumbeat.
    """
    return (python, "-I", "-S", "-c", LOADER, word, request, *_digests(text))


def _digests(text: str) -> Tuple[str, str]:
    """Return the SHA-256 of a request, and that of the bundle, which the request holds."""
    return hashlib.sha256(text.encode()).hexdigest(), json.loads(text)["program"]


def shell_start(python: str, folder: str, name: str, text: str, word: str = "_node") -> Tuple[List[str], str]:
    """Return the start of `start_argv` as shell: preparatory lines, and the command. `python` and `folder` are shell words."""
    lines = [
        "# Run the very drumbeat.pyz and the very request that were submitted, from private copies: days may pass until this",
        "# starts, and others may be able to write to the run folder.",
        f"LOADER={shlex.quote(LOADER)}",
    ]
    return lines, f'{python} -I -S -c "$LOADER" {word} "{folder}/{name}" {" ".join(_digests(text))}'


@contextlib.contextmanager
def removed_after(private: Sequence[str]) -> Iterator[None]:
    """Remove the private copies that the loader made and listed after its command word, also if a signal ends this process
    early."""
    try:
        for number in STOPS:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, lambda number, frame: sys.exit(128 + number))
        let_stops_in()
        yield
    finally:
        for folder in private:
            shutil.rmtree(folder, ignore_errors=True)


def node_start(python: str, folder: str, order: Order) -> Tuple[List[str], str]:
    """Return the lines and the command that start a node's agent from a shell script."""
    return shell_start(python, folder, "order.json", dump_order(order))
