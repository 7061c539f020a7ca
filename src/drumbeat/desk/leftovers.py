"""Processes of a run that outlived everything that would have ended them.

Where the desk, every guard and every agent of a run are killed at the same moment, nobody is left to end what its ranks
have started in sessions of their own. A scheduler's job ends those with its cgroup; on a machine without one they are found
by the run's mark in their environment.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Iterator, List, Tuple

from drumbeat.runfolder.run import Run


def leftovers(run: Run) -> List[int]:
    """This user's live processes on this machine that carry the run's mark; zombies have no environment left."""
    return [pid for pid, words in _processes("environ") if f"DRUMBEAT_RUN={run.run_id}".encode() in words]


def agents(run: Run) -> List[int]:
    """The run's agents, with their guards, that live on this machine: while there are any, they end its processes."""
    order = os.fsencode(os.path.realpath(run.folder.order))
    return [pid for pid, words in _processes("cmdline") if b"_agent" in words and order in map(os.path.realpath, words)]


def _processes(file: str) -> Iterator[Tuple[int, List[bytes]]]:
    """Of each of this user's processes but this one: its pid, and the words of that file of /proc."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if os.stat(f"/proc/{name}").st_uid == os.geteuid():
                    with open(f"/proc/{name}/{file}", "rb") as opened:
                        yield int(name), opened.read(1 << 20).split(b"\0")
            except OSError:
                continue


def end_leftovers(run: Run, seconds: float = 10.0) -> int:
    """Kill them, and what they start meanwhile; how many there were. They were orphans: nobody waits for them to save."""
    ended: List[int] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        alive = leftovers(run)
        if not alive:
            break
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        ended += [pid for pid in alive if pid not in ended]
        time.sleep(0.05)
    return len(ended)
