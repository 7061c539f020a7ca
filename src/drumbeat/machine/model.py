"""Facts: the properties of a node. `None` means unknown, and is printed so; it never means zero or no."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Dict, List, Mapping, Optional, Protocol, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass

SCHEMA = "1.0"


@dataclass(frozen=True)
class PciLink:
    """PCIe link of a device. An idle GPU may show a lower speed than it has; the width never changes."""

    speed_gts: Optional[float] = None
    width: Optional[int] = None
    most_speed_gts: Optional[float] = None
    most_width: Optional[int] = None


@dataclass(frozen=True)
class GpuHealth:
    """Settings and health of a GPU, as its driver reports them without root."""

    ecc: Optional[bool] = None
    uncorrected_errors: Optional[int] = None  # uncorrectable memory errors since the driver was loaded
    remapped_rows: Optional[int] = None  # pages retired after uncorrectable errors
    remap_pending: Optional[bool] = None
    remap_failed: Optional[bool] = None
    power_limit_w: Optional[float] = None
    power_default_w: Optional[float] = None
    max_clock_mhz: Optional[int] = None
    max_memory_clock_mhz: Optional[int] = None
    throttle: Optional[Tuple[str, ...]] = None  # reasons for throttling now; None: unknown
    memory_used: Optional[float] = None  # share of its memory, whoever holds it
    # of its driver, as a tool prints them: ("compute mode", "Default")
    settings: Optional[Tuple[Tuple[str, str], ...]] = None


@dataclass(frozen=True)
class Gpu:
    index: int  # in the vendor runtime's order; negative: a pasted dump does not show it
    vendor: str  # a name of machine/vendors
    name: Optional[str] = None
    pci: Optional[str] = None  # 0000:c1:00.0
    uuid: Optional[str] = None
    numa: Optional[int] = None
    memory_bytes: Optional[int] = None
    arch: Optional[str] = None  # gfx90a, sm_90
    module: Optional[int] = None  # the package it shares with others: MI250X has two GCDs
    integrated: bool = False  # an iGPU that jobs must not use
    driver: Optional[str] = None
    pci_path: Optional[str] = None  # pci0000:c0/0000:c0:01.1/0000:c1:00.0: root complex, bridges, device
    pids: Optional[Tuple[int, ...]] = None  # processes that use it now; None: unknown
    link: Optional[PciLink] = None
    device: Optional[str] = None  # its device file: /dev/nvidia0, /dev/dri/renderD128
    mig: Optional[bool] = None  # divided into instances (NVIDIA's MIG)
    health: Optional[GpuHealth] = None
    links: Dict[str, str] = field(default_factory=dict)  # "GPU 1" or NIC -> NV18, XGMI, PCIE, or a distance: PIX, SYS
    no_access: Tuple[int, ...] = ()  # GPUs whose memory it cannot reach
    partition: Optional[str] = None  # SPX: whole; DPX, CPX: divided (AMD)

    @property
    def label(self) -> str:
        """`GPU 3`, or its PCI address if its number is unknown."""
        if self.index >= 0:
            return f"GPU {self.index}"
        return f"GPU at {self.pci or self.uuid}" if self.pci or self.uuid else f"unnumbered GPU {-self.index}"

    @property
    def title(self) -> str:
        """`GPU 3 (0000:c1:00.0)`: the number that programs use, and the address that kernel logs and technicians use."""
        return f"{self.label} ({self.pci})" if self.index >= 0 and self.pci else self.label


@dataclass(frozen=True)
class GpuSample:
    """One GPU at one moment; None is unknown."""

    index: int
    busy: Optional[float] = None  # per cent of the time with any kernel running
    memory_busy: Optional[float] = None
    memory_used: Optional[int] = None  # bytes
    memory_total: Optional[int] = None
    memory_percent: Optional[float] = None  # memory use if a tool gives no bytes
    power: Optional[float] = None  # watts
    power_cap: Optional[float] = None
    temperature: Optional[float] = None  # degrees Celsius
    clock: Optional[float] = None  # MHz
    memory_clock: Optional[float] = None
    fan: Optional[float] = None  # per cent
    throttle: Optional[Tuple[str, ...]] = None  # reasons for throttling now, empty if none
    energy: Optional[float] = None  # joules, since the driver was loaded
    ecc_corrected: Optional[int] = None  # memory errors since the driver was loaded
    ecc_uncorrected: Optional[int] = None
    pcie_received: Optional[int] = None  # bytes since the driver was loaded
    pcie_sent: Optional[int] = None
    link_received: Optional[int] = None  # bytes over NVLink or xGMI since the driver was loaded
    link_sent: Optional[int] = None
    name: Optional[str] = None
    time: Optional[str] = None  # as the tool prints it


@dataclass(frozen=True)
class Gid:
    index: int
    gid: str
    type: Optional[str] = None  # 'IB/RoCE v1', 'RoCE v2'
    netdev: Optional[str] = None


@dataclass(frozen=True)
class RdmaPort:
    port: int
    state: Optional[str] = None  # ACTIVE, DOWN, INIT, ARMED
    physical_state: Optional[str] = None
    link_layer: Optional[str] = None  # InfiniBand, Ethernet
    rate_gbps: Optional[float] = None
    gids: Tuple[Gid, ...] = ()
    mtu: Optional[int] = None  # bytes in one packet, as the port uses it now
    cut: str = ""  # the start of a state, if a pasted text ends inside it


@dataclass(frozen=True)
class RdmaDevice:
    name: str
    driver: Optional[str] = None  # mlx5_core, bnxt_re, ionic_rdma, hfi1, efa
    pci: Optional[str] = None
    numa: Optional[int] = None
    netdevs: Tuple[str, ...] = ()
    ports: Tuple[RdmaPort, ...] = ()
    firmware: Optional[str] = None
    bond: bool = False
    pci_path: Optional[str] = None
    model: Optional[str] = None  # hca_type, as MT4123
    openable: Optional[bool] = None  # it has /dev/infiniband/uverbs here; a container may have it in /sys only


@dataclass(frozen=True)
class CxiDevice:
    name: str  # cxi0
    netdev: Optional[str] = None  # hsn0
    pci: Optional[str] = None
    numa: Optional[int] = None
    speed_gbps: Optional[float] = None
    pci_path: Optional[str] = None


@dataclass(frozen=True)
class Interface:
    name: str
    up: Optional[bool] = None
    addresses: Tuple[str, ...] = ()  # 10.0.0.7/24, fe80::1/64
    speed_mbps: Optional[int] = None
    mtu: Optional[int] = None
    kind: Optional[str] = None  # physical, virtual, bridge, bond, loopback
    driver: Optional[str] = None
    pci: Optional[str] = None
    numa: Optional[int] = None
    pci_path: Optional[str] = None


@dataclass(frozen=True)
class Pool:
    """Similar nodes that a scheduler gives to jobs: a partition, or a part of one."""

    name: str
    usual: bool  # used by jobs that name none
    nodes: int
    cores: int  # per node, as the scheduler counts them
    memory: int  # MiB per node
    gpus: int


@dataclass(frozen=True)
class Cpus:
    model: Optional[str] = None
    online: Tuple[int, ...] = ()
    allowed: Tuple[int, ...] = ()  # CPUs this process may use
    numa: Dict[str, Tuple[int, ...]] = field(default_factory=dict)  # node -> cpus; memory-only nodes have none
    l3: Tuple[Tuple[int, ...], ...] = ()  # groups of cpus that share one
    siblings: Tuple[Tuple[int, ...], ...] = ()  # hardware threads of each core
    reserved: Tuple[int, ...] = ()  # kept for the system: isolated, or never in the allowed set


@dataclass(frozen=True)
class Limits:
    memlock: Optional[int] = None  # bytes; -1 is unlimited
    nofile: Optional[int] = None
    shm_bytes: Optional[int] = None
    cgroup_memory_bytes: Optional[int] = None  # -1 is unlimited
    cgroup_cpuset: Tuple[int, ...] = ()


@dataclass(frozen=True)
class Container:
    inside: Optional[bool] = None
    runtime: Optional[str] = None  # as machine/gather.py names it
    image: Optional[str] = None
    image_arch: Optional[str] = None


@dataclass(frozen=True)
class Library:
    """A fabric plug-in or library on the loader's path, or one that was not found."""

    name: str  # librccl-net.so, libfabric.so.1, libnccl.so.2
    path: Optional[str] = None
    version: Optional[str] = None
    loadable: Optional[bool] = None
    why_not: str = ""
    digest: Optional[str] = None  # sha256 of an RDMA provider: host and container must have the same one


@dataclass(frozen=True)
class Identity:
    """Identity of this node in its job, from the scheduler's own variables."""

    scheduler: str = "plain"  # what started this process: name of a file in facts/identity, or of a backend
    job_id: Optional[str] = None
    step_id: Optional[str] = None
    node_rank: Optional[int] = None
    nodes: Optional[int] = None
    hosts: Tuple[str, ...] = ()  # in the scheduler's order
    local_id: Optional[int] = None  # of this task on its node
    tasks_per_node: Optional[int] = None
    master: Optional[str] = None
    master_port: Optional[int] = None
    cluster: Optional[str] = None
    batch: str = ""  # the batch system of this job, also below mpirun
    place: str = "here"  # here, allocation (a shell that may start tasks on all nodes), inside (a task or step)
    gpus: Optional[int] = None  # of this node, for this job
    array_job: str = ""  # id of the array, and index of this job in it
    array_task: str = ""
    starts: int = 0  # how often the scheduler has started this job before
    ends_at: Optional[float] = None  # when the scheduler ends the job, in seconds since 1970
    began_at: Optional[float] = None  # when the scheduler started the job
    own_home: bool = False  # home is not shared with the other nodes: a pod

    @property
    def by_mpirun(self) -> bool:
        return self.scheduler in ("openmpi", "mpich")


@dataclass(frozen=True)
class Kernel:
    release: Optional[str] = None
    numa_balancing: Optional[bool] = None
    iommu: Optional[str] = None  # pt, on, off as on the kernel command line
    acs_enabled: Optional[bool] = None
    ephemeral_ports: Optional[Tuple[int, int]] = None
    nvidia_peermem: Optional[bool] = None  # the module through which a NIC accesses an NVIDIA GPU's memory


@dataclass(frozen=True)
class Facts:
    host: str
    arch: Optional[str] = None
    os: Optional[str] = None
    python: Optional[str] = None
    memory_bytes: Optional[int] = None
    cpus: Cpus = field(default_factory=Cpus)
    gpus: Tuple[Gpu, ...] = ()  # GPUs that this process can open
    rdma: Tuple[RdmaDevice, ...] = ()
    cxi: Tuple[CxiDevice, ...] = ()
    interfaces: Tuple[Interface, ...] = ()
    libraries: Tuple[Library, ...] = ()
    versions: Dict[str, str] = field(default_factory=dict)  # rocm, cuda, nvidia-driver, nccl, rccl, libfabric
    limits: Limits = field(default_factory=Limits)
    kernel: Kernel = field(default_factory=Kernel)
    container: Container = field(default_factory=Container)
    identity: Identity = field(default_factory=Identity)
    environment: Dict[str, str] = field(default_factory=dict)  # variables that matter to a job, without secrets
    unknown: Tuple[str, ...] = ()  # what could not be read, and why
    gpus_on_bus: Dict[str, int] = field(default_factory=dict)  # vendor -> GPUs in the machine, ours or not
    default_route: Optional[str] = None  # the interface of the default route; empty: there is none
    nvme_disks: Optional[int] = None
    virtual_machine: Optional[bool] = None
    hypervisor: Optional[str] = None  # the hypervisor's name, if the machine is virtual and shows it
    driver_errors: Tuple[str, ...] = ()  # a driver's message instead of values, after the GPU's address if it gives one
    gpu_events: Optional[Tuple[str, ...]] = None  # Xid and amdgpu errors in the kernel's log; None: not readable
    schema: str = SCHEMA

    @property
    def has_no_gpu(self) -> bool:
        """Return true if the machine was checked and has none; a GPU that this process may not open still counts."""
        unread = any(words.startswith("gpus:") for words in self.unknown)
        return not (self.gpus or any(self.gpus_on_bus.values()) or unread)


@dataclass(frozen=True)
class Peer:
    """One node of a mustered job."""

    node: int
    host: str
    address: str  # the address that the others use
    facts: Facts
    clock_offset: float = 0.0  # seconds to add to its clock to get the lead's
    ranks: int = 1


@dataclass(frozen=True)
class Rail:
    """One RDMA device, as the other members of a job must know it."""

    device: str
    layer: str  # InfiniBand, Ethernet; of its active ports
    places: Tuple[str, ...] = ()  # its addresses with prefix length; on InfiniBand the subnet prefixes of its ports
    fault: str = ""  # why its own node does not use it


@dataclass(frozen=True)
class Reach:
    """The subnets that connect all members of a job: one judgement, whose size does not depend on their number."""

    subnets: Optional[Tuple[str, ...]] = None  # of interfaces; None: unknown
    rails: Optional[Tuple[str, ...]] = None  # of compute NICs; empty: not one; None: unknown
    why: Dict[str, str] = field(default_factory=dict)  # other subnets -> why they do not connect all
    broken: str = ""  # why no compute NIC can reach its partner, though their subnets were meant to connect
    unequal: Tuple[str, ...] = ()  # subnets whose prefix length is not the same on all members
    first: str = ""  # the member that the others were compared with, and its RDMA devices
    first_rails: Tuple[Rail, ...] = ()


@dataclass(frozen=True)
class Peers:
    """All nodes in node-rank order, and the meeting point of the ranks."""

    nodes: Tuple[Peer, ...]
    master_addr: str
    master_port: int
    schema: str = SCHEMA
    reach: Optional[Reach] = None  # None: follows from the facts of the nodes

    @property
    def world_size(self) -> int:
        return sum(peer.ranks for peer in self.nodes)


class Host(Protocol):
    """Interface to a machine. Methods never raise: unreadable data is None or empty, and a reader turns that into unknown."""

    def read(self, path: str) -> Optional[str]: ...

    def data(self, path: str, start: int, size: int) -> Optional[bytes]:
        """Return a piece of a binary file; shorter if the file ends earlier."""

    def version_in(self, path: str, text: str, start: int, size: int) -> Optional[str]:
        """Return the version number (1.2 or 1.2.3) that follows `text` in a piece of a (large) binary file."""

    def digest(self, path: str) -> Optional[str]:
        """Return the sha256 of a file; only for small files."""

    def list(self, path: str) -> List[str]: ...

    def resolve(self, path: str) -> Optional[str]:
        """Return the target of a symbolic link, or None if it does not exist."""

    def command(self, argv: Sequence[str], timeout: float = 5.0) -> Optional[str]:
        """Return the standard output of a command that exited with 0, or None."""

    def library(self, name: str) -> Any:
        """Open a shared library of this machine; None if there is none, or if the machine is only replayed."""

    @property
    def environ(self) -> Mapping[str, str]: ...

    def addresses(self) -> Optional[Dict[str, Tuple[str, ...]]]:
        """Return interface -> addresses with prefix length, from the kernel; None if it cannot be asked."""

    def affinity(self) -> Tuple[int, ...]: ...

    def limit(self, name: str) -> Optional[int]:
        """Return a resource limit by its lower-case name (memlock, nofile); -1 is unlimited."""

    def disk_bytes(self, path: str) -> Optional[int]: ...

    def hostname(self) -> str: ...

    def python(self) -> str:
        """Return the version of the Python that runs the readers."""
