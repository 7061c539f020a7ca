"""Data that is read about ranks. The agents look, the lead judges (watchers/hang.py, watchers/world.py)."""

from __future__ import annotations

from dataclasses import field
from typing import Dict, Iterable, Optional, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.proc import Ports


@dataclass(frozen=True)
class Collective:
    """The last collective that a rank has called in one process group, as torch's flight recorder has it."""

    group: str
    number: int
    operation: str
    over: bool
    waits_in: Optional[int] = None  # number of the first call that is not over; None: the last one, unless that is over


@dataclass(frozen=True)
class RankLook:
    """One rank, or the command of a node that has no ranks, looked at twice, two seconds apart. None is unknown."""

    rank: int  # of a command: the node's first
    pid: int
    host: str = ""
    node: int = 0
    step: Optional[int] = None  # that it reported last
    quiet: Optional[float] = None  # seconds since its last report
    state: str = ""  # of the main thread, as /proc names it: R, S, D, T, t; '': gone
    waits_in: str = ""  # the kernel's function, where it waits and may be read
    call: str = ""  # the system call, where it may be read
    waits_for: str = ""  # in words: what in the kernel (state D), or whose answer over a pipe or a connection
    cpu: float = 0.0  # cores used by the rank and its helpers, or wanted by its main thread
    io: float = 0.0  # bytes per second, read and written, over TCP too
    wakes: Optional[float] = None  # times per second that the main thread woke up; None: not known
    signs: str = ""  # of work while it waits: it wakes, moves bytes, or waits for a reply or a child that works
    still: float = 0.0  # seconds without any sign of progress, as far as looks at this silence have shown
    network: float = 0.0  # bytes per second, of the whole node: interfaces but lo, and RDMA ports
    stack: Tuple[str, ...] = ()  # Python frames, innermost first: file:line function
    place: str = ""  # innermost frame of the user's own code
    spins: bool = False  # it is in a loop that nothing in it can end
    asked: Optional[bool] = None  # False: there is a thread to ask for stacks, and it did not answer
    collectives: Tuple[Collective, ...] = ()
    compiler: str = ""  # a compiler that works for it
    gpu: Optional[float] = None  # per cent of the time with a kernel running
    power: Optional[float] = None  # share of the GPU's cap
    traffic: Optional[float] = None  # per cent of the time that the GPU's memory was read or written
    clock: Optional[float] = None  # MHz
    device: Optional[int] = None  # index of that GPU
    ails: str = ""  # what slows that GPU down, by its driver and its PCIe link
    waits: Optional[float] = None  # share of the time that it waited for the other ranks
    granted: Optional[float] = None  # share of the CPU time that its main thread wanted, and got
    doing: str = ""  # what its main thread does most, but for waiting for the others
    command: bool = False  # no rank, but what was started for the node, a script or a launcher, without its ranks
    unnumbered: bool = False  # started by the command, as which rank is not known; `rank` is the node's first
    had_ranks: bool = False  # a command whose ranks were there: it may go on for as long as it likes
    raised: str = ""  # the exception of a traceback that is the last thing it wrote
    raised_for: float = 0.0  # seconds since then
    ras: str = ""  # what NCCL's RAS says of it
    # by RAS: it has launched fewer collectives than others of its communicator; False: more
    behind: Optional[bool] = None

    @property
    def key(self) -> Tuple[int, int]:
        """Tells it from the others of the same look at all nodes."""
        return (self.node, self.pid) if self.unnumbered else (-1, self.rank)


ENOUGH = 4096  # bytes: more than ranks need to meet, and for a barrier or two


@dataclass(frozen=True)
class Row:
    """One process, as /proc shows it."""

    node: int
    pid: int
    rank: Optional[int]  # None: it carries no number, but holds a connection to the meeting point
    world_size: Optional[int] = None
    meeting: str = ""  # address:port; with the node where the address is a loopback that nodes do not share
    starts_others: bool = False  # processes below it have another rank or world: a launcher, or its shell
    alone: Optional[bool] = None  # it and its helpers have no TCP connection at all; None: not looked at
    joined: bool = False  # one of its connections is to its own meeting point
    later: bool = False  # of a script's second launcher, or a later one: the steps seen so far may be another's
    links: Tuple[Tuple[int, int], ...] = ()  # if it is not joined: local and remote port of its TCP connections
    inner: int = 0  # processes below it that have TCP connections to each other: helpers, or ranks of its own
    complete: bool = True  # its identity is its own, and nothing is missing; else it is unknown who it is
    cpu: float = 0.0  # seconds of CPU time that it and its helpers have used
    mapped: int = 0  # files in its memory: while a program is still importing, they become more
    framework: str = ""  # that is loaded
    met: int = 0  # bytes over its connections to the meeting point, so far
    sent: int = 0  # bytes over its other connections to ranks of this node,
    out: int = 0  # and over those that lead elsewhere
    ends: Tuple[Ports, ...] = ()  # the busiest of the latter
    hidden: str = ""  # why its exchange with other ranks cannot be seen

    @property
    def world(self) -> Tuple[str, Optional[int]]:
        return self.meeting, self.world_size

    @property
    def has_sent(self) -> bool:
        """It has exchanged data with somebody, or it cannot be seen whether it has."""
        return bool(self.hidden) or self.sent + self.out >= ENOUGH or (not self.framework and self.met >= ENOUGH)

    @property
    def proven(self) -> bool:
        """It is certainly a rank of that world."""
        return self.complete and self.joined and not self.starts_others


@dataclass(frozen=True)
class RankSeen:
    """One rank's main process, as read while it ran."""

    rank: Optional[int]  # None: the process uses a GPU, but carries no rank number
    pid: int
    cpus: Optional[Tuple[int, ...]] = None  # None: its mask could not be read
    gpus: Optional[Tuple[int, ...]] = None  # those it uses; (): it has none open; None: which ones is not shown
    open: Tuple[int, ...] = ()  # those whose device file it holds: a runtime opens all that it is shown
    instances: Tuple[str, ...] = ()  # of a divided GPU (MIG), where open files or the environment name them
    stepped: bool = False  # the job has reported a step
    settled: bool = True  # two looks in a row saw the same


@dataclass
class Known:
    """The ranks of one attempt on this node, as looks have shown them so far: who is gone can still be named."""

    ranks: Dict[int, int] = field(default_factory=dict)  # pid -> rank
    links: Dict[int, Set[Ports]] = field(default_factory=dict)  # rank -> its TCP connections

    def note(self, pid: int, rank: int, links: Iterable[Ports] = ()) -> None:
        self.ranks[pid] = rank
        self.links.setdefault(rank, set()).update(links)
