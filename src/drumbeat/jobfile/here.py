"""Here: what must be known about the place where an order is made. Filled in at the desk, read by resolve."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.commands.inside import Script


@dataclass(frozen=True)
class Here:
    hostname: str
    cwd: str
    environ: Mapping[str, str]
    cpus: int  # that this process may use
    gpus: Optional[int]  # None: unknown
    user: str
    now: float  # seconds since 1970
    entropy: str  # new for every run
    job_id: Optional[str] = None  # the scheduler's
    step_id: Optional[str] = None
    hosts: Tuple[str, ...] = ()  # in the scheduler's order
    master: str = ""  # HOST or HOST:PORT of node 0, where the user or the scheduler names it
    read_yaml: Callable[[str], Any] = lambda path: None  # a launcher's configuration file; None: it is not there
    script: Callable[[Tuple[str, ...], str], Script] = lambda command, workdir: Script()  # what the command runs
