"""Starting one process: fork, own session, affinity, logs, exec. No Popen: one reaper must see every exit status."""

from __future__ import annotations

import errno
import os
import sys
from typing import Mapping, Optional, Sequence

from drumbeat.base.process_signals import plain_signals
from drumbeat.base.processes import die_with_parent, fork
from drumbeat.base.signals import EXIT_NOT_FOUND

NO_WORKDIR = "drumbeat: cannot start: the working directory cannot be entered:"


def start(
    argv: Sequence[str], env: Mapping[str, str], workdir: str, out: str, err: str, cpus: Optional[Sequence[int]] = None
) -> int:
    """Fork and exec; the pid. What goes wrong between the two is written to the process's own standard error.

    The new process opens its logs itself: storage that hangs holds it, and not the agent.
    """
    agent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = fork()
    if pid == 0:
        _become(argv, env, workdir, out, err, cpus, agent)
    return pid


def _bind(cpus: Sequence[int]) -> None:
    """A cgroup may allow fewer cores than were planned: the rank runs on, and the placement table shows where."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        os.write(2, f"drumbeat: cannot bind to cores {sorted(cpus)}: {error.strerror}\n".encode())


def _become(
    argv: Sequence[str], env: Mapping[str, str], workdir: str, out: str, err: str, cpus: Optional[Sequence[int]], agent: int
) -> None:  # fmt: skip
    """In the child. It never returns: whatever happens, it ends here."""
    code = EXIT_NOT_FOUND
    try:
        os.setsid()
        plain_signals()
        die_with_parent(agent)
        for path, number in ((err, 2), (out, 1)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if cpus:
            _bind(cpus)
        try:
            os.chdir(workdir)
        except OSError as error:
            os.write(2, f"{NO_WORKDIR} {workdir}: {error.strerror}\n".encode())
            return
        os.execvpe(argv[0], list(argv), dict(env))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            code = 126
        what = f"{argv[0]}: {error.strerror}" if error.filename in (None, argv[0]) else str(error)
        os.write(2, f"drumbeat: cannot start: {what}\n".encode())
    except BaseException as error:
        os.write(2, f"drumbeat: cannot start: {error!r}\n".encode())
    finally:
        os._exit(code)
