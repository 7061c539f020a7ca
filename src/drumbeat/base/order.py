"""The Order: one complete, frozen request. Every value is settled in it, and every node gets the same one."""

from __future__ import annotations

import hashlib
import json
import os.path
import re
from dataclasses import field
from typing import Any, Dict, Mapping, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.record import RecordError, check_schema, from_json, to_json, to_plain
from drumbeat.base.signals import STOP_SIGNAL

SCHEMA = "2.0"

LAUNCHERS = ("ranks", "torchrun", "tasks", "once")
VISIBILITIES = ("all", "own")
TRANSPORTS = ("any", "rdma", "roce", "ib", "ofi", "tcp")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
CODES = ("shared", "image", "sync")
CHECK_LEVELS = ("off", "warn", "stop")
SOURCES = ("user", "site", "detected", "default")  # strongest first
_TERMS = (
    "command", "nodes", "ranks_per_node", "launcher", "gpus", "setup", "wrap", "restarts", "spares", "time_limit",
)  # fmt: skip
FUNCTION = "inrank/call.py"  # one of Order.brings: the ranks call a function that was submitted


@dataclass(frozen=True)
class EnvVar:
    """One environment variable of a rank, and why it is set."""

    name: str
    value: str
    why: str
    source: str  # one of SOURCES

    def __post_init__(self) -> None:
        assert self.source in SOURCES, self.source


@dataclass(frozen=True)
class Wrap:
    """A prefix (such as a profiler) before the command of chosen ranks; `{rank}` and `{node}` are filled in."""

    ranks: Tuple[int, ...]
    command: Tuple[str, ...]


@dataclass(frozen=True)
class HostPath:
    """A folder or file of the host that the job needs. Its pattern is expanded on the node; the newest match is used."""

    name: str
    pattern: str
    why: str
    prepend: str = ""  # in a container: the variable that gets its folder in front (LD_LIBRARY_PATH, CPATH)
    target: str = ""  # its place in a container; empty: /opt/host/NAME where something is prepended, else the same


@dataclass(frozen=True)
class Option:
    """One option of a scheduler, and why it is given."""

    text: str
    why: str
    place: str = ""  # of a site's option: where its profile has it


@dataclass(frozen=True)
class AvoidedNode:
    """A node that the scheduler is asked to leave out, and why."""

    host: str
    why: str


@dataclass(frozen=True)
class Resources:
    """Resources that any scheduler can be asked for besides nodes and time; an empty value leaves its own default."""

    account: str = ""
    partition: str = ""  # or queue
    memory: str = ""  # per node: 440G
    cpus: Optional[int] = None  # per node
    gpus: Optional[int] = None  # per node; none: none are requested
    exclusive: bool = False
    array: str = ""  # 0-3%2
    requeues: int = 3  # how often drumbeat queues the job again
    specific: Dict[str, str] = field(default_factory=dict)  # what only some backends know (qos, constraint, ...)
    options: Tuple[Option, ...] = ()  # in the scheduler's own words
    avoided: Tuple[AvoidedNode, ...] = ()  # as past runs say (drumbeat nodes)


@dataclass(frozen=True)
class Container:
    """The image that each node's agent, and so its ranks, runs in."""

    runtime: str  # a name in containers/__init__.py
    image: str
    binds: Tuple[str, ...] = ()  # HOST or HOST:INSIDE
    vendor: str = ""  # nvidia, amd: how GPUs get in
    python: str = "python3"  # inside; 3.9 or newer
    options: Tuple[str, ...] = ()  # the runtime's own


@dataclass(frozen=True)
class Expect:
    """The network that traffic between nodes must use."""

    transport: str = "any"  # one of TRANSPORTS; rdma also takes libfabric over a provider that is not TCP
    gdr: Optional[bool] = None  # GPU memory straight to the NIC; none: not said

    def __post_init__(self) -> None:
        assert self.transport in TRANSPORTS, self.transport


@dataclass(frozen=True)
class Floor:
    """The minimum bandwidth that `drumbeat verify` must measure for one operation, set by the site."""

    busbw: float  # GB/s
    nodes: Optional[int] = None  # it was measured with; none: any number
    source: str = ""


@dataclass(frozen=True)
class Timing:
    """Deadlines of the agents, in seconds."""

    muster: float = 300.0  # by then all nodes must have joined
    heartbeat: float = 1.0
    agent_deadline: float = 15.0  # the guard ends an agent that has not sent a beat for this long
    lost_node: float = 15.0  # the lead gives up a node that is silent for this long
    settle: float = 0.7  # wait after the first failure, so that other ranks can report failures of their own
    failure_grace: float = 1.5  # after a failure: from TERM to KILL

    @property
    def longest_beat(self) -> float:
        """Return the longest time between two beats: short enough that two fit into the silence that counts as a loss."""
        return self.lost_node / 2.2


@dataclass(frozen=True)
class Order:
    run_id: str
    name: str
    created: float  # seconds since 1970
    command: Tuple[str, ...]
    nodes: int
    ranks_per_node: int  # 0: one per GPU, settled at the muster
    launcher: str
    launcher_why: str
    workdir: str
    folder: str  # the run folder
    site: str
    backend: str
    emulated: bool = False  # nodes are processes of this machine; one alone is not emulated: see `nodes_emulated`
    gpus: Optional[int] = None  # per node; none: all of them
    hosts: Tuple[str, ...] = ()  # in the scheduler's order, where it is known at the desk
    master: str = ""  # host or address of node 0 that the others dial
    muster_ports: Tuple[int, ...] = ()  # candidates, in order
    meeting: str = ""  # see `identity`; empty where all nodes read one order
    env: Tuple[EnvVar, ...] = ()  # what user and site ask for
    agreed_command: Tuple[str, ...] = ()  # without what each node's launcher says about itself; empty: as `command`
    passed: Tuple[str, ...] = ()  # variables handed on by name; their values are never written
    setup: str = ""  # shell, before the command
    wrap: Optional[Wrap] = None
    trace: bool = False
    restarts: int = 0
    spares: int = 0  # nodes beyond `nodes` that take the place of lost or bad ones
    queued: bool = False  # made for a scheduler's queue: it can start the run again
    fewest_nodes: Optional[int] = None  # so many are enough to start, and to go on after a loss; none: all are needed
    wanted_nodes: Optional[int] = None  # of a range, where the scheduler gave fewer
    on_start: str = ""  # shell, once before the agents start, by whoever starts all of them
    on_end: Tuple[str, ...] = ()  # run once by the lead, or by the desk if the lead was killed, when the run has ended
    textfile: str = ""  # folder of node-exporter's textfile collector, for the lead; empty: none
    track: Tuple[str, ...] = ()  # NAME=PLACE: trackers that get the metrics while the run goes on (metrics/trackers.py)
    doubtful_ok: bool = False  # a run in which a failure was seen ends with 0 if its command did
    stop_grace: float = 60.0
    stop_signal: int = int(STOP_SIGNAL)  # what each rank's main process is sent when it should save and end
    time_limit: Optional[float] = None
    user: str = ""  # whose job it is: names node-local caches
    gpus_per_rank: int = 1
    ranks_per_gpu: int = 1
    visibility: str = "all"  # one of VISIBILITIES: does a rank see all GPUs of the job on its node, or its own
    cpu_bind: Tuple[str, ...] = ()  # a mask or core list per local rank; ("none",): no affinity; empty: by the facts
    reserved_cpus: Tuple[int, ...] = ()  # kept for the system, as the site says
    threads_per_core: Optional[int] = None  # hardware threads of a core that a rank is bound to; none: all it may use
    local_dir: str = "/tmp"  # node-local storage, for caches that many processes lock  # noqa: S108
    host_paths: Tuple[HostPath, ...] = ()
    arch: str = ""  # of the nodes, as the site says; empty: not known
    modules: Tuple[str, ...] = ()  # environment modules, loaded before the agent starts
    python: str = ""  # the agent's interpreter, 3.9 or newer; a pattern is looked up on the node; empty: python3
    before_agent: str = ""  # shell, on each node (inside the container) before the agent starts
    vendor: str = ""  # of the nodes' GPUs, as the site says: nvidia, amd; empty: not known
    missing: Tuple[str, ...] = ()  # what the site needs a job to say, and this one does not
    container: Optional[Container] = None
    resources: Resources = field(default_factory=Resources)
    cache_dir: str = ""  # the project's storage, for downloads that all nodes share; empty: not known
    expect: Expect = field(default_factory=Expect)
    checks: Dict[str, str] = field(default_factory=dict)  # a watcher's check -> one of CHECK_LEVELS
    floors: Dict[str, Floor] = field(default_factory=dict)  # one of COLLECTIVES -> the site's floor
    brings: Tuple[str, ...] = ()  # drumbeat's own modules and packages that agents copy to `{attempt}`: inrank/call.py
    sweep: Tuple[
        Dict[str, str], ...
    ] = ()  # name -> value of `{name}` in the command: of each job of an array, or of this job
    code: str = "shared"  # one of CODES: how the working tree gets to the nodes
    code_root: str = ""  # sync: where it was packed
    code_digest: str = ""  # sync: SHA-256 of RUN/code.tar.gz
    code_bytes: int = 0  # sync: the size of that archive
    program: str = ""  # SHA-256 of the drumbeat.pyz that the nodes run; filled in when a run is submitted or fanned out
    timing: Timing = field(default_factory=Timing)
    ranks_asked: bool = False  # the job itself says `ranks_per_node`; else a launcher in its script may say otherwise
    start: int = 0  # how often the scheduler has started this job before; filled in on the node
    schema: str = SCHEMA

    def __post_init__(self) -> None:
        assert self.launcher in LAUNCHERS, f"launcher {self.launcher!r}"
        assert self.visibility in VISIBILITIES, f"visibility {self.visibility!r}"

    @property
    def source_workdir(self) -> str:
        """Return the folder of the code on the submitting machine: the workdir itself, unless the job runs in a copy that was
        sent."""
        if self.code != "sync":
            return self.workdir
        return os.path.normpath(
            os.path.join(self.code_root, os.path.relpath(self.workdir, os.path.join(self.folder, "code")))
        )

    @property
    def members(self) -> int:
        """Count the machines that take part: the nodes and the spares."""
        return self.nodes + self.spares

    @property
    def survives_loss(self) -> bool:
        """Return true if the run may go on after a node is lost: a spare takes its place, or fewer nodes are enough."""
        return self.spares > 0 or self.fewest_nodes is not None

    @property
    def may_come_back(self) -> bool:
        """Return true if the ranks may be started again, here or by the scheduler."""
        return self.restarts > 0 or self.survives_loss or (self.queued and self.resources.requeues > 0)

    @property
    def has_range(self) -> bool:
        """Return true if fewer than `nodes` are enough."""
        return self.fewest_nodes is not None and self.fewest_nodes < self.nodes

    @property
    def dispensable(self) -> int:
        """Count the members that the run can do without."""
        return self.members - (self.fewest_nodes or self.nodes)

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def terms(self) -> Dict[str, Any]:
        """Return the values that all nodes must agree on. Run id, folders and times may differ if each node made its own
        order."""
        terms = {key: to_plain(getattr(self, key)) for key in _TERMS}
        return {**terms, "command": list(self.agreed_command or self.command)}

    @property
    def nodes_emulated(self) -> bool:
        """Return true if several nodes are emulated on this machine. One node on this machine is not emulated."""
        return self.emulated and self.nodes > 1

    @property
    def here_why(self) -> str:
        """Explain why nothing crosses a network, if all nodes are on this machine."""
        return "the nodes are processes of one machine" if self.nodes > 1 else "all ranks are on this machine"

    @property
    def identity(self) -> str:
        """Return a value that is the same on all nodes of one run and differs between runs: the run id if all nodes read one
        order; the scheduler's job and step if each node of a joined job made its own order."""
        return self.meeting or self.run_id

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.terms(), sort_keys=True).encode()).hexdigest()[:16]


def swept_name(name: str, values: Mapping[str, str]) -> str:
    """Return the name of a sweep's job, from the sweep's name and the job's values."""
    whole = "-".join([name, *(f"{key}-{value}" for key, value in values.items())])
    return re.sub(r"[^A-Za-z0-9._-]+", "-", whole)[:64]


def dump_order(order: Order) -> str:
    return to_json(order) + "\n"


def load_order(text: str, where: str = "order.json") -> Order:
    order = from_json(Order, text, where)
    check_schema(order.schema, SCHEMA, where)
    return order


def read_order(path: str) -> Order:
    """Read an order from its file; raise OSError or RecordError if that fails."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        return load_order(data.decode(), path)
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: {error}") from None
