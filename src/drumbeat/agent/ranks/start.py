"""Start one process: fork, own session, affinity, logs, exec. Not Popen: one reaper must see every exit status."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base import clock
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.proc import Closed, Ports
from drumbeat.base.processes import die_with_parent, fork, redacting
from drumbeat.base.signals import EXIT_NOT_FOUND, code_of_start, plain_signals
from drumbeat.findings.model import Finding

NO_WORKDIR = "drumbeat: cannot start: the working directory cannot be entered:"


def start(
    argv: Sequence[str], env: Mapping[str, str], workdir: str, out: str, err: str = "",
    cpus: Optional[Sequence[int]] = None,
) -> int:  # fmt: skip
    """Fork and exec; return the pid. Errors between the two are written to the process's own standard error.

    The new process opens its logs itself, so that hanging storage blocks it and not the agent. Without `err`, both streams go
    to `out`, with secrets removed.
    """
    agent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = fork()
    if pid == 0:
        _become(argv, env, workdir, out, err, cpus, agent)
    return pid


def _bind(cpus: Sequence[int]) -> None:
    """Set the cores. A cgroup may allow fewer than planned: then the rank runs on, and the placement table shows it."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        os.write(2, f"drumbeat: cannot bind to cores {sorted(cpus)}: {error.strerror}\n".encode())


def _become(
    argv: Sequence[str], env: Mapping[str, str], workdir: str, out: str, err: str, cpus: Optional[Sequence[int]], agent: int
) -> None:  # fmt: skip
    """Run in the child; never returns, whatever happens."""
    code = EXIT_NOT_FOUND
    try:
        os.setsid()
        plain_signals()
        die_with_parent(agent)
        for path, number in ((err or out, 2), (out, 1)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644), number)
        if not err:
            pipe = redacting(1)
            os.dup2(pipe, 1)
            os.dup2(pipe, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if cpus:
            _bind(cpus)
        with suppress(OSError):
            env = {**env, "OLDPWD": os.getcwd()}  # as `cd` does: in a container the folder of its image
        try:
            os.chdir(workdir)
        except OSError as error:
            os.write(2, f"{NO_WORKDIR} {workdir}: {error.strerror}\n".encode())
            return
        os.execvpe(argv[0], list(argv), dict(env))
    except OSError as error:
        code = code_of_start(error)
        what = f"{argv[0]}: {error.strerror}" if error.filename in (None, argv[0]) else str(error)
        os.write(2, f"drumbeat: cannot start: {what}\n".encode())
    except BaseException as error:
        os.write(2, f"drumbeat: cannot start: {error!r}\n".encode())
    finally:
        os._exit(code)


# How one rank ended, from its exit status or its launcher.


@dataclass(frozen=True)
class End:
    """End of one rank, as its node reports it to the lead."""

    rank: int
    exit_code: Optional[int]
    signal: Optional[int]
    at: float  # wall clock
    seconds: float = 0.0  # after its start
    by_us: bool = False
    core_dumped: bool = False
    of_command: bool = False  # the end of the command that starts this node's ranks; `rank` is the node's first
    finding: Optional[Finding] = None  # why
    by_launcher: bool = False  # its launcher ended it because another rank had failed
    links: Tuple[Ports, ...] = ()  # its known TCP connections
    closed: Tuple[Closed, ...] = ()  # connections that it closed before its peer did, and when both had
    left: Tuple[Closed, ...] = ()  # those that its peer had closed when it raised or exited; seconds before that
    own: bool = False  # it raised, and no lost connection was the reason
    of_thread: bool = False  # the finding is the exception of a thread, which had ended before
    noted: Optional[float] = None  # when it raised or exited, by its own record
    since: Optional[float] = None  # when it was last seen alive
    # What explains its end if the run still made steps after this time, when the words of the finding had been written.
    later: Tuple[Tuple[float, Finding], ...] = ()


def plain_end(rank: int, status: int, at: float) -> End:
    """Return the end of a process from its status, as waitpid gives it."""
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    return End(rank, code, number, at, core_dumped=bool(os.WCOREDUMP(status)))


def rank_ends(noted: Sequence[Dict[str, Any]]) -> List[End]:
    """Convert the ends recorded by a launcher's driver: rank, exit_code (negative: a signal), t, by_launcher."""
    ends = []
    for each in noted:
        code, at = each["exit_code"], clock.own(float(each["t"]))
        code, number = (None, -code) if code < 0 else (code, None)
        ends.append(End(each["rank"], code, number, at, by_launcher=each.get("by_launcher") is True))
    return ends
