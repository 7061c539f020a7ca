"""The groups of ranks that follow from a layout."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from drumbeat.train.parallel import ORDER, Layout

T = TypeVar("T")
_kept: Dict[Tuple[Any, ...], Any] = {}


def once_per_world(make: Callable[[], T], *key: Any) -> T:
    """Return what `make` makes for this key, once per world; all ranks must ask in the same order."""
    whole = (dist.group.WORLD, *key)
    if whole not in _kept:
        _kept[whole] = make()
    made: T = _kept[whole]
    return made


GROUPS: Dict[str, dist.ProcessGroup] = {}  # operators take tensors, numbers and texts: a group goes by its name


def name_of(group: dist.ProcessGroup) -> str:
    GROUPS[group.group_name] = group
    return group.group_name


def forget() -> None:
    """Forget the groups of a world that this process has left."""
    _kept.clear()
    GROUPS.clear()


class Meshes:
    """Every group of ranks that a layout needs. `None` stands for a group of one: nothing to do there."""

    def __init__(self, layout: Layout, device_type: str) -> None:
        self.layout = layout
        self.root: Optional[DeviceMesh] = None
        if layout.ranks > 1:
            self.root, self._joined = once_per_world(lambda: _made(layout, device_type), layout, device_type)
        outer = self.coordinate("dp_replicate") * layout.dp_shard + self.coordinate("dp_shard")
        self.data_rank = outer * layout.ep + self.coordinate("ep")

    def one(self, name: str) -> Optional[DeviceMesh]:
        return None if self.root is None or getattr(self.layout, name) == 1 else self.root[name]

    def joined(self, *names: str) -> Optional[DeviceMesh]:
        """Return several dimensions as one, such as all ranks that hold different tokens."""
        real = tuple(name for name in names if getattr(self.layout, name) > 1)
        if self.root is None or not real:
            return None
        if len(real) == 1:
            return self.root[real[0]]
        if real not in self._joined:
            self._joined[real] = self.root[real]._flatten("_".join(real))
        return self._joined[real]

    @property
    def tokens(self) -> Optional[DeviceMesh]:
        """Return the ranks whose losses add up: all that see different samples or different parts of a sequence."""
        return self.joined("dp_replicate", "dp_shard", "ep", "cp")

    def sharding(self, *inner: str) -> Optional[DeviceMesh]:
        """The mesh for fully_shard: the dimensions `inner` as one, or (replicas, those). Ranks that hold other tokens shard
        parameters, whatever made them hold others; None: there is nothing to share."""
        inner = inner or ("dp_shard", "ep", "cp")
        shard = self.joined(*inner)
        if self.root is None or self.layout.dp_replicate == 1:
            return shard
        name = "_".join(name for name in inner if getattr(self.layout, name) > 1) or "dp_shard"
        return self.root["dp_replicate", name]

    def coordinate(self, name: str) -> int:
        mesh = self.one(name)
        return 0 if mesh is None else mesh.get_local_rank()


def _made(layout: Layout, device_type: str) -> Tuple[DeviceMesh, Dict[Tuple[str, ...], DeviceMesh]]:
    """The mesh of all ranks, and room for the meshes that are joined from its dimensions. Dimensions of one rank are left out,
    but for the shards of replicas under tensor or expert parallelism: fully_shard wants (replicas, shards)."""
    names = [name for name in ORDER if getattr(layout, name) > 1]
    if layout.dp_replicate > 1 and layout.dp_shard == 1 and layout.tp * layout.ep > 1:
        names.insert(names.index("dp_replicate") + 1, "dp_shard")
    sizes = tuple(getattr(layout, name) for name in names)
    return init_device_mesh(device_type, sizes, mesh_dim_names=tuple(names)), {}


def gathered(value: Any, group: Any = None) -> List[Any]:
    """Return the values of all ranks of the group (none: of all there are), which call this together."""
    every: List[Any] = [value] * (dist.get_world_size(group) if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(every, value, group=group)
    return every
