"""The messages between agents, and between an agent and the tasks of its node: frozen records, listed in one table.

On the wire a message is one line of JSON: its fields, and under `is` the name of its type.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import signal as signals
from dataclasses import field, fields, replace
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Type,
    Union,
)

from drumbeat.agent.ranks.start import End
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.base.record import RecordError, from_plain, to_plain
from drumbeat.base.regex import regex
from drumbeat.findings.model import Finding, Verdict
from drumbeat.inspector.ras import RasNote
from drumbeat.inspector.record import RankLook, Row
from drumbeat.machine.model import CxiDevice, Facts, Gpu, Peer, Peers, Rail, RdmaDevice, Reach
from drumbeat.plan.network import addresses_of, compute_nics, rails_of
from drumbeat.plan.reach import Comparison
from drumbeat.plan.scene import own_fabric
from drumbeat.runfolder.files import append, create
from drumbeat.runfolder.layout import NodeFolder
from drumbeat.runfolder.progress import Progress

# What every member must know about the others to plan its own part. Its size does not depend on the number of nodes.


_SLOW = ("ethernet", "unknown")


Place = Tuple[str, int]  # address and port


@dataclass(frozen=True)
class Network:
    """One member's network, as far as the others' plans depend on it."""

    addresses: Optional[Tuple[str, ...]] = None  # by which others could reach it, with prefix length; None: unknown
    fabric: str = "unknown"
    rdma: Tuple[RdmaDevice, ...] = ()  # without their GIDs
    cxi: Tuple[CxiDevice, ...] = ()
    rails: Tuple[Rail, ...] = ()
    doors: Tuple[Place, ...] = ()  # where it listens for `Try`


@dataclass(frozen=True)
class Fast:
    """The first node with a fast network. If there is one, a node without it is broken, not part of an Ethernet cluster."""

    node: int
    host: str
    rdma: Tuple[RdmaDevice, ...] = ()
    cxi: Tuple[CxiDevice, ...] = ()


@dataclass(frozen=True)
class World:
    """One attempt, as every member must know it."""

    ranks: Tuple[Tuple[int, int], ...]  # (ranks per node, number of nodes), in the order of node ranks
    master_addr: str
    master_port: int
    reach: Reach = Reach()
    fast: Optional[Fast] = None
    replaced: Tuple[Tuple[int, str], ...] = ()  # (node rank, host) where a spare has taken over

    def ranks_per_node(self) -> Iterator[int]:
        for ranks, count in self.ranks:
            for _ in range(count):
                yield ranks


def network_of(facts: Facts) -> Network:
    nics = compute_nics(facts)
    fabric = own_fabric(facts, nics)[0]
    own = addresses_of(facts)
    if fabric in _SLOW:
        return Network(own, fabric)
    rdma = tuple(
        replace(device, ports=tuple(replace(port, gids=()) for port in device.ports)) for device in nics.devices
    )
    return Network(own, fabric, rdma, facts.cxi, rails_of(facts))


class Common:
    """The comparison of all members, updated as they join; and the first node with a fast network."""

    def __init__(self) -> None:
        self.fast: Dict[int, Fast] = {}  # only the lowest member
        self.compared = Comparison()

    def add(self, member: int, host: str, network: Network) -> None:
        self.compared.add(host, network.addresses, network.rails)
        if network.fabric not in _SLOW and member < min(self.fast, default=member + 1):
            self.fast = {member: Fast(member, host, network.rdma, network.cxi)}


def make_world(
    ranks: Sequence[int],
    common: Common,
    nodes: Mapping[int, int],
    master: Tuple[str, int],
    replaced: Tuple[Tuple[int, str], ...] = (),
) -> World:
    """Return the world. `ranks` are in the order of node ranks; `nodes`: member -> node rank."""
    fast = next((replace(fast, node=nodes[member]) for member, fast in common.fast.items() if member in nodes), None)
    return World(tuple(run_lengths(ranks)), *master, common.compared.reach, fast, replaced)


def run_lengths(values: Iterable[int]) -> List[Tuple[int, int]]:
    found: List[Tuple[int, int]] = []
    for value in values:
        if found and found[-1][0] == value:
            found[-1] = (value, found[-1][1] + 1)
        else:
            found.append((value, 1))
    return found


def peers_of(world: World, order: Order, node: int, address: str, facts: Facts) -> Peers:
    """Return the peers for planning: this node with its own facts, and one other node with the facts that the others share."""
    counts = list(world.ranks_per_node())
    hosts = list(order.hosts[: len(counts)] if len(order.hosts) == order.members else ("",) * len(counts))
    for role, host in world.replaced:
        hosts[role] = host
    fast = world.fast if world.fast and world.fast.node != node else None
    speaker = fast.node if fast else next((other for other in range(len(counts)) if other != node), node)
    shared = Facts(fast.host if fast else hosts[speaker])
    if fast:
        shared = replace(shared, rdma=fast.rdma, cxi=fast.cxi)
    nodes = []
    nothing = Facts("")  # nothing more is known of the others
    for number, ranks in enumerate(counts):
        about = facts if number == node else shared if number == speaker else nothing
        host = about.host or hosts[number]
        nodes.append(Peer(number, host, address if number == node else "", about, 0.0, ranks))
    return Peers(tuple(nodes), world.master_addr, world.master_port, reach=world.reach)


class WireError(Exception):
    """The other side is not one of our agents, or violates the protocol."""


_MOST_RANKS = 1 << 20
_LAST_DAY = 1e11  # seconds since 1970
_LAST_SIGNAL = 64
_LONGEST_REASON = 200  # characters

# -- a member to the lead ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    member: Optional[int]
    host: str
    address: str  # at which the others reach it
    run: str  # the order's `identity`
    terms: Dict[str, Any]  # values that all members must agree on
    ranks: int = 1
    gpus: int = 0  # that the job may use there
    network: Network = field(default_factory=Network)
    findings: Tuple[Finding, ...] = ()
    start: int = 0  # earlier starts of its agent

    def __post_init__(self) -> None:
        _within("ranks", self.ranks, 0, _MOST_RANKS)
        _within("start", self.start, 0, _MOST_RANKS)


@dataclass(frozen=True)
class Pong:
    t: float

    def __post_init__(self) -> None:
        _within("t", self.t, 0.0, _LAST_DAY)


@dataclass(frozen=True)
class Pace:
    rank: int
    seconds: float  # per step, as reported by the rank


@dataclass(frozen=True)
class Beat:
    """A sign of life; a member's also has the progress of its ranks. Its size does not depend on the number of ranks."""

    step: Optional[int] = None
    t: Optional[float] = None  # of that step's report, on the member's clock
    silent: Optional[float] = None  # seconds since any rank reported anything
    # seconds since the last report of the rank that is most overdue by its own pace
    stale: Optional[float] = None
    stale_rank: Optional[int] = None
    every: Optional[float] = None  # median of the seconds between two reported steps
    phase: str = ""  # announced by a rank and not over yet: validation, checkpoint
    slowest: Optional[Pace] = None
    usual: Optional[float] = None  # median of the ranks' own seconds per step
    done: bool = False  # all ranks that report have made the steps that they announced
    waits_least: Optional[Pace] = None  # the rank that waits least for the others; `seconds` per second
    waits: Optional[float] = None  # median share of the time that the node's other ranks wait
    rests: Optional[float] = (
        None  # seconds for which the ranks have used almost no CPU; None after a first step was reported
    )

    def __post_init__(self) -> None:
        for name in ("t", "silent", "stale", "every", "usual", "waits", "rests"):
            _within(name, getattr(self, name), -_LAST_DAY, _LAST_DAY)


@dataclass(frozen=True)
class RankEnded:
    attempt: int
    end: End

    def __post_init__(self) -> None:
        _within("rank", self.end.rank, 0, _MOST_RANKS)
        _within("exit_code", self.end.exit_code, -255, 255)
        _within("signal", self.end.signal, 0, _LAST_SIGNAL)
        _within("at", self.end.at, 0.0, _LAST_DAY)


@dataclass(frozen=True)
class Done:
    """No process of this attempt is left on this member."""

    attempt: int
    progress: Dict[str, Any] = field(default_factory=dict)
    stuck: str = ""  # processes that could not be ended
    # rank -> its last step, for ranks whose reports end before their total
    short: Dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from_plain(Progress, self.progress)  # RecordError where it is none


@dataclass(frozen=True)
class StopAsked:
    signal: int
    orphaned: bool = False  # the process that started the agent was gone

    def __post_init__(self) -> None:
        if self.signal not in signals.Signals._value2member_map_:
            raise RecordError(f"signal {self.signal}")


@dataclass(frozen=True)
class FirstStep:
    t: float

    def __post_init__(self) -> None:
        _within("t", self.t, 0.0, _LAST_DAY)


@dataclass(frozen=True)
class Judged:
    verdict: Verdict


@dataclass(frozen=True)
class Found:
    finding: Finding
    stop: bool = False


@dataclass(frozen=True)
class Tried:
    """The answer to `Try`."""

    unreached: Dict[str, str]  # subnet -> why


@dataclass(frozen=True)
class Looked:
    """The answer to `Look`: all ranks of this node that could be observed."""

    attempt: int
    number: int
    looks: Tuple[RankLook, ...] = ()
    ras: Tuple[RasNote, ...] = ()  # from NCCL's RAS, about all nodes; only node 0 asks


@dataclass(frozen=True)
class Counted:
    """The processes of this node that carry a rank."""

    attempt: int
    rows: Tuple[Row, ...]
    t: float


@dataclass(frozen=True)
class FilePart:
    """A piece of one of the member's files; pieces of a file are sent in order."""

    name: str
    data: str  # base64
    first: bool


# -- the lead to a member ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ping:
    pass


@dataclass(frozen=True)
class Refuse:
    why: str
    another_run: bool = False  # the member belongs to another run, whose lead may use another port


@dataclass(frozen=True)
class Welcome:
    run_id: str
    folder: str
    host: str


@dataclass(frozen=True)
class Prepare:
    """The world of the next attempt: the same message for every member."""

    world: World


@dataclass(frozen=True)
class Start:
    """Begin an attempt in the world that was sent before, as this node rank."""

    attempt: int
    node_rank: int


@dataclass(frozen=True)
class Stop:
    signal: int
    grace: float
    why: str = ""


@dataclass(frozen=True)
class Try:
    """Try to reach another member in these subnets, and report."""

    doors: Dict[str, Tuple[Place, ...]]  # subnet -> where it listens


@dataclass(frozen=True)
class Look:
    """Look at your ranks, and report."""

    attempt: int
    number: int  # of this look


@dataclass(frozen=True)
class RunEnded:
    exit_code: int
    again: bool = False  # the lead is restarted, and waits for its members again


# -- between an agent and the tasks of its node ------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskHello:
    local_id: int
    cpus: Tuple[int, ...] = ()
    gpus: Tuple[Gpu, ...] = ()  # visible to this task
    visible: Dict[str, str] = field(default_factory=dict)  # variables that limit the visible GPUs


@dataclass(frozen=True)
class StartRank:
    argv: Tuple[str, ...]
    env: Dict[str, str]
    workdir: str
    out: str
    err: str
    cpus: Tuple[int, ...] = ()


@dataclass(frozen=True)
class SignalRank:
    number: int


@dataclass(frozen=True)
class KillRank:
    pass


@dataclass(frozen=True)
class EndTask:
    pass


@dataclass(frozen=True)
class RankStarted:
    pid: int


@dataclass(frozen=True)
class RankExited:
    status: int  # as waitpid gives it


Message = Union[
    Hello, Pong, Beat, RankEnded, Done, StopAsked, FirstStep, Judged, Found, Looked, Counted, FilePart,
    Tried, Ping, Refuse, Welcome, Prepare, Start, Stop, Try, Look, RunEnded,
    TaskHello, StartRank, SignalRank, KillRank, EndTask, RankStarted, RankExited,
]  # fmt: skip

_TYPES: Dict[str, Type[Any]] = {cls.__name__: cls for cls in Message.__args__}  # type: ignore[attr-defined]


@functools.cache
def _fields(cls: Any) -> List[Tuple[str, Any]]:
    return [(each.name, each.default) for each in fields(cls)]


def encode(message: Message) -> bytes:
    kind: Any = type(message)
    plain: Dict[str, Any] = {"is": kind.__name__}
    for name, default in _fields(kind):
        value = getattr(message, name)
        if value is not default:  # the reader knows the defaults: most beats are only a few bytes
            plain[name] = to_plain(value)
    return json.dumps(plain, separators=(",", ":")).encode() + b"\n"


def decode(plain: Dict[str, Any]) -> Message:
    """Convert a received message; raise WireError if it is not one of ours, or from an incompatible version."""
    cls = _TYPES.get(str(plain.get("is")))
    if cls is None:
        raise WireError(f"a message of unknown type {str(plain.get('is'))[:40]!r}")
    try:
        message: Message = from_plain(cls, plain)
    except (RecordError, AssertionError, ArithmeticError, ValueError, TypeError) as error:
        raise WireError(f"a message that does not fit: {str(error)[:_LONGEST_REASON]}") from None
    return message


def _within(name: str, value: Optional[float], low: float, high: float) -> None:
    """Reject a member's number outside its valid range before it is used."""
    if value is not None and not low <= value <= high:
        raise RecordError(f"'{name}' is {str(value)[:40]}")


# A node's files, sent to the lead over the muster if nodes share no storage; bounded in size and checked in name.


_FILE_BYTES = 1 << 20  # of one file: its end, where failures are explained
_NODE_BYTES = 64 << 20
_PART_BYTES = 256 << 10
Write = Callable[[str, bytes], None]
_NAME = regex(r"(attempt-\d{1,4}/)?[a-z][a-z0-9.-]{0,60}")


def files_of(folder: NodeFolder) -> Iterator[FilePart]:
    """Yield a node's files in pieces; each piece is read when it is needed."""
    left = _NODE_BYTES
    for base, _, names in os.walk(folder.path):
        for name in sorted(names):
            path = os.path.join(base, name)
            size = os.path.getsize(path)
            count = min(size, _FILE_BYTES, left)
            left -= count
            note = f"[the first {size - count} bytes stayed on the node]\n".encode() if size > count else b""
            with open(path, "rb") as file:
                file.seek(size - count)
                data, first = note + file.read(_PART_BYTES), True
                while data or first:
                    yield FilePart(os.path.relpath(path, folder.path), base64.b64encode(data).decode(), first)
                    data, first = file.read(_PART_BYTES), False


def take(folder: NodeFolder, part: FilePart, begin: Write = create, add: Write = append) -> None:
    """Write a piece of a member's file: `begin(path, data)` creates it, `add(path, data)` appends. The name is checked, so
    that nothing is written outside that member's folder."""
    if not _NAME.fullmatch(part.name) or ".." in part.name:
        return
    try:
        data = base64.b64decode(part.data)
    except ValueError:
        return
    write = begin if part.first else add
    write(folder.at(part.name), data)
