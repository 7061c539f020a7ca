"""What one look at a rank shows: data only. The agents look, the lead judges (watchers/hang.py)."""

from __future__ import annotations

from typing import Optional, Tuple

from drumbeat.base.light_dataclass import dataclass


@dataclass(frozen=True)
class Collective:
    """The last collective that a rank has called in one process group, as torch's flight recorder has it."""

    group: str
    number: int
    operation: str
    over: bool


@dataclass(frozen=True)
class RankLook:
    """One rank, or the command of a node that has no ranks, looked at twice, two seconds apart. None is unknown."""

    rank: int  # of a command: the node's first
    pid: int
    host: str = ""
    node: int = 0  # node rank
    step: Optional[int] = None  # that it reported last
    quiet: Optional[float] = None  # seconds since its last report
    state: str = ""  # of the main thread, as /proc names it: R, S, D, T, t; '': gone
    waits_in: str = ""  # the kernel's function, where it waits and may be read
    call: str = ""  # the system call, where it may be read
    cpu: float = 0.0  # cores used by the rank and its helpers
    io: float = 0.0  # bytes per second, read and written
    wakes: Optional[float] = None  # times per second that the main thread woke up; None: not known
    network: float = 0.0  # bytes per second, of the whole node: interfaces but lo, and RDMA ports
    stack: Tuple[str, ...] = ()  # Python frames, innermost first: file:line function
    place: str = ""  # innermost frame of the user's own code
    steady: bool = False  # all looks show the same functions
    spins: bool = False  # a loop in one function of the user's own, that calls nothing
    asked: Optional[bool] = None  # False: there is a thread to ask for stacks, and it did not answer
    collectives: Tuple[Collective, ...] = ()
    compiler: str = ""  # a compiler that works for it
    gpu: Optional[float] = None  # per cent of the time with a kernel running
    power: Optional[float] = None  # share of the GPU's cap
    clock: Optional[float] = None  # MHz
    device: Optional[int] = None  # index of that GPU
    command: bool = (
        False  # no rank, but what was started for the node: a script, or a launcher; none of its ranks is there
    )
    unnumbered: bool = (
        False  # a process that the command has started: which rank it is, is not known; `rank` is the node's first
    )
    had_ranks: bool = False  # a command whose ranks were there: it may go on for as long as it likes
    raised: str = ""  # the exception of a traceback that is the last thing it wrote
    raised_for: float = 0.0  # seconds since then
    ras: str = ""  # what NCCL's RAS says of it
    behind: Optional[bool] = (
        None  # by RAS: it has launched fewer collectives than others of its communicator; False: more
    )

    @property
    def key(self) -> Tuple[int, int]:
        """Tells it from the others of the same look at all nodes."""
        return (self.node, self.pid) if self.unnumbered else (-1, self.rank)
