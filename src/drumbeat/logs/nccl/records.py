"""Contents of NCCL's and RCCL's lines: small records, made by the grammar and collected by the communicators."""

from __future__ import annotations

from typing import Optional, Tuple, Union

from drumbeat.base.light_dataclass import dataclass


@dataclass(frozen=True)
class Init:
    """A communicator begins, completes, or ends, as seen by one rank."""

    comm: str
    rank: int
    nranks: int
    stage: str  # start, complete, abort, destroy
    comm_id: str = ""
    device: Optional[int] = None  # CUDA's number of the GPU within the process


@dataclass(frozen=True)
class Shape:
    """Layout of a communicator over the nodes."""

    comm: str
    rank: int
    nranks: int
    nnodes: int


@dataclass(frozen=True)
class Channel:
    """One connection of one channel: sender, receiver, and transport."""

    sender: int
    receiver: int
    side: str  # send, receive, or empty
    kind: str  # NET, P2P, SHM, COLLNET
    name: str = ""  # of the network: IB, Socket, AWS Libfabric ...
    device: Optional[int] = None
    gdr: Optional[bool] = None  # None: cut off, or not applicable
    comm: str = ""
    nranks: Optional[int] = None


@dataclass(frozen=True)
class Network:
    """The network that a communicator chose, or a plug-in that was loaded."""

    name: str
    chosen: bool


@dataclass(frozen=True)
class Devices:
    """Devices that a network found, with the link type of each; may be empty."""

    network: str  # IB or Socket
    devices: Tuple[Tuple[int, str, str], ...]  # index, name, link
    oob: str = ""


@dataclass(frozen=True)
class Provider:
    name: str  # of libfabric: cxi, efa, tcp ...
    nics: Optional[int] = None


@dataclass(frozen=True)
class Plugin:
    text: str  # 'aws-ofi-nccl 1.9.1-aws'


@dataclass(frozen=True)
class Gdr:
    """GPUDirect: possible (by driver, by distance), or proven unused."""

    possible: bool
    scope: str  # hca, gpu, ring, plugin


@dataclass(frozen=True)
class Version:
    library: str  # nccl or rccl
    version: str


@dataclass(frozen=True)
class Setting:
    name: str
    value: str


@dataclass(frozen=True)
class Ranks:
    """Size of a communicator, as a collective call prints it."""

    comm: str
    nranks: int


@dataclass(frozen=True)
class Interface:
    names: Tuple[str, ...]  # of the bootstrap: control plane, never the data path
    link_local: bool = False  # one of them has an address that no router forwards


@dataclass(frozen=True)
class Used:
    """A network known to be in use, because only then it prints this error."""

    network: str
    device: str = ""  # or libfabric's provider
    link: str = ""


@dataclass(frozen=True)
class Formed:
    """All rings or trees of a communicator are connected; or two ranks are, over this network."""

    network: str = ""


Observation = Union[
    Formed, Init, Shape, Channel, Network, Devices, Provider, Plugin, Gdr, Version, Setting, Ranks, Interface, Used
]
