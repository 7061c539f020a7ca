"""Data that is read about ranks. The agents read it, the lead judges it (watchers/hang.py, watchers/world.py)."""

from __future__ import annotations

from dataclasses import field
from typing import Dict, Iterable, Optional, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.proc import Ports


@dataclass(frozen=True)
class Collective:
    """The last collective that a rank has called in one process group, from torch's flight recorder."""

    group: str
    number: int
    operation: str
    over: bool
    waits_in: Optional[int] = None  # number of the first unfinished call; None: the last one, unless it is finished


@dataclass(frozen=True)
class RankLook:
    """One rank, or the command of a node that has no ranks, observed over two seconds. None means unknown."""

    rank: int  # for a command: the node's first rank
    pid: int
    host: str = ""
    node: int = 0
    step: Optional[int] = None  # last step it reported
    quiet: Optional[float] = None  # seconds since its last report
    state: str = ""  # of the main thread, as /proc names it: R, S, D, T, t
    waits_in: str = ""  # the kernel's function, where it waits and may be read
    call: str = ""  # the system call, where it may be read
    waits_for: str = ""  # in words: the kernel resource (state D), or whose answer over a pipe or a connection
    cpu: float = 0.0  # cores used by the rank and its helpers, or wanted by its main thread
    io: float = 0.0  # bytes per second, read and written, over TCP too
    carried: float = 0.0  # of these, over TCP
    wakes: Optional[float] = None  # times per second that the main thread woke up; None: not known
    signs: str = ""  # why it may be working while it waits: it wakes, moves bytes, or waits for a reply or a busy child
    still: float = 0.0  # seconds without any sign of progress, as far as looks at this silence have shown
    network: float = 0.0  # bytes per second, of the whole node: interfaces but lo, and RDMA ports
    stack: Tuple[str, ...] = ()  # Python frames, innermost first: file:line function
    place: str = ""  # innermost frame of the user's own code
    spins: bool = False  # it is in a loop that nothing in the loop can end
    endless: bool = False  # and nothing else can: it was seen to repeat itself, or only computes and has no way out
    asked: Optional[bool] = None  # False: there is a thread to ask for stacks, and it did not answer
    collectives: Tuple[Collective, ...] = ()
    program: str = ""  # name of its executable
    compiler: str = ""  # name of a compiler that runs for it
    gpu: Optional[float] = None  # per cent of the time with a kernel running
    power: Optional[float] = None  # share of the GPU's cap
    traffic: Optional[float] = None  # per cent of the time that the GPU's memory was read or written
    clock: Optional[float] = None  # MHz
    device: Optional[int] = None  # index of that GPU
    ails: str = ""  # what slows that GPU down, by its driver and its PCIe link
    waits: Optional[float] = None  # share of the time that it waited for the other ranks
    granted: Optional[float] = None  # share of the CPU time its main thread wanted that it got
    doing: str = ""  # what its main thread mostly does, apart from waiting for the others
    command: bool = False  # not a rank, but the node's script or launcher while it has no ranks
    unnumbered: bool = False  # started by the command, rank unknown; `rank` is the node's first
    had_ranks: bool = False  # a command that had ranks: it may go on for as long as it likes
    left: bool = False  # it has left Python, by an exception or by its end, and is still alive
    raised: str = ""  # the exception by which it has left
    raised_for: float = 0.0  # seconds since then
    died: str = ""  # a thread of its that ended with an exception, and which
    meets: str = ""  # host:port at which it waits for the other ranks in the rendezvous
    dials: str = ""  # host:port to which it tries to connect again and again
    missed: str = ""  # why it reaches nobody there
    ras: str = ""  # what NCCL's RAS says about it
    # from RAS: true if it has launched fewer collectives than others of its communicator, false if more
    behind: Optional[bool] = None

    @property
    def key(self) -> Tuple[int, int]:
        """Return the key of this look among those of all nodes."""
        return (self.node, self.pid) if self.unnumbered else (-1, self.rank)


ENOUGH = 4096  # bytes: more than ranks need for the rendezvous and a barrier or two
SHARED = "they share memory"
PLENTY = 1 << 20  # bytes: more than the figures for a log of a program that has just begun


@dataclass(frozen=True)
class Row:
    """One process, as /proc shows it."""

    node: int
    pid: int
    rank: Optional[int]  # None: no rank number, but a connection to the meeting point
    world_size: Optional[int] = None
    meeting: str = ""  # address:port; plus the node if the address is a loopback that nodes do not share
    starts_others: bool = False  # processes below it have another rank or world: a launcher, or its shell
    alone: Optional[bool] = None  # it and its helpers have no TCP connection at all; None: not looked at
    joined: bool = False  # one of its connections is to its own meeting point
    later: bool = False  # of a script's second or later launcher: the steps seen so far may be another's
    links: Tuple[Tuple[int, int], ...] = ()  # if it is not joined: local and remote port of its TCP connections
    inner: int = 0  # processes below it that have TCP connections to each other: helpers, or ranks of its own
    complete: bool = True  # its identity is complete and its own; otherwise unknown
    cpu: float = 0.0  # seconds of CPU time that it has used; if it has no connections, its helpers' included
    mapped: int = 0  # mapped files: more and more while a program is importing
    framework: str = ""  # that it has loaded
    versions: Tuple[str, ...] = ()  # of its torch and NCCL so far, as its packages say: `torch 2.4.0`
    met: int = 0  # bytes over its connections to the meeting point, so far
    sent: int = 0  # bytes over its other connections to ranks of this node
    out: int = 0  # bytes over connections that leave the node
    ends: Tuple[Ports, ...] = ()  # the busiest connections that leave the node
    hidden: str = ""  # why its exchange with other ranks cannot be seen

    @property
    def world(self) -> Tuple[str, Optional[int]]:
        return self.meeting, self.world_size

    @property
    def has_sent(self) -> bool:
        """Return true if it has exchanged data with other ranks, or if that cannot be seen."""
        return bool(self.hidden) or self.sent + self.out >= ENOUGH or (not self.framework and self.met >= ENOUGH)

    @property
    def exchanged(self) -> int:
        """Return the bytes exchanged with ranks of this node, including those over the meeting point if no framework's store is
        there."""
        return self.sent + (0 if self.framework else self.met)

    @property
    def proven(self) -> bool:
        """Return true if this is certainly a rank of its world."""
        return self.complete and self.joined and not self.starts_others


@dataclass(frozen=True)
class RankSeen:
    """One rank's main process, as read while it ran."""

    rank: Optional[int]  # None: the process uses a GPU, but carries no rank number
    pid: int
    cpus: Optional[Tuple[int, ...]] = None  # None: its mask could not be read
    gpus: Optional[Tuple[int, ...]] = None  # GPUs it uses; (): none open; None: unknown
    open: Tuple[int, ...] = ()  # GPUs whose device file it holds: a runtime opens all visible ones
    instances: Tuple[str, ...] = ()  # MIG instances, if open files or the environment name them
    stepped: bool = False  # the job has reported a step
    settled: bool = True  # two looks in a row saw the same


@dataclass
class Known:
    """The ranks of one attempt on this node, as seen so far; ranks that have ended stay listed."""

    ranks: Dict[int, int] = field(default_factory=dict)  # pid -> rank
    links: Dict[int, Set[Ports]] = field(default_factory=dict)  # rank -> its TCP connections

    def note(self, pid: int, rank: int, links: Iterable[Ports] = ()) -> None:
        self.ranks[pid] = rank
        self.links.setdefault(rank, set()).update(links)
