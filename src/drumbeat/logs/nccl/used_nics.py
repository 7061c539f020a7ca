"""Which cards each rank's connections between nodes really use, as NCCL's Channel lines say."""

from __future__ import annotations

from typing import Dict, List, Set, Tuple

from drumbeat.logs.first import RankOf
from drumbeat.logs.nccl.communicators import Communicators
from drumbeat.logs.nccl.paths import RDMA, family
from drumbeat.logs.nccl.processes import Edge, Process

UsedNics = Tuple[Tuple[int, Tuple[str, ...]], ...]  # rank, names of its cards
MAX_RANKS = 100_000


def used_nics(state: Communicators) -> UsedNics:
    """Sorted by rank. A card that no line names stands as its network and number, such as `AWS Libfabric/3`."""
    ranks = RankOf.of(state)
    found: Dict[int, Set[str]] = {}
    for process in state.processes.values():
        own = ranks.processes.get((process.host, process.pid))
        largest = max((member.nranks for member in process.members), default=0)
        for member in process.members:
            if own is None and member.nranks != largest:
                continue  # ranks of a smaller group count for themselves
            for (sender, receiver, side, *_), edge in member.edges.items():
                rank = own if own is not None else receiver if side == "receive" else sender
                if edge.kind == "NET" and len(found) < MAX_RANKS:
                    found.setdefault(rank, set()).update(_names(process, edge))
    return tuple((rank, tuple(sorted(names))) for rank, names in sorted(found.items()) if names)


def _names(process: Process, edge: Edge) -> List[str]:
    if edge.name == "Socket":
        return sorted(process.sockets) if len(process.sockets) == 1 else []
    known = process.devices if family(edge.name, process.provider) == RDMA else {}
    return [known[device][0] if device in known else f"{edge.name}/{device}" for device in edge.devices]
