"""The groups of ranks that follow from a layout."""

from __future__ import annotations

from typing import Dict, Optional, Tuple

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from drumbeat.train.parallel.layout import ORDER, Layout


class Meshes:
    """Every group of ranks that a layout needs. `None` stands for a group of one: nothing to do there."""

    def __init__(self, layout: Layout, device_type: str) -> None:
        self.layout = layout
        self.data_rank = 0
        self.root: Optional[DeviceMesh] = None
        if layout.ranks == 1:
            return
        self.root = init_device_mesh(device_type, tuple(getattr(layout, name) for name in ORDER), mesh_dim_names=ORDER)
        self._joined: Dict[Tuple[str, ...], DeviceMesh] = {}
        self.data_rank = self.root["dp_replicate"].get_local_rank() * layout.dp_shard
        self.data_rank += self.root["dp_shard"].get_local_rank()

    def one(self, name: str) -> Optional[DeviceMesh]:
        return None if self.root is None or getattr(self.layout, name) == 1 else self.root[name]

    def joined(self, *names: str) -> Optional[DeviceMesh]:
        """Several dimensions as one, such as all ranks that hold different tokens."""
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
        """The ranks whose losses add up: all that see different samples or different parts of a sequence."""
        return self.joined("dp_replicate", "dp_shard", "cp")

    def sharding(self) -> Optional[DeviceMesh]:
        """The mesh for fully_shard: one dimension, or (replicas, shards). Context parallelism shards parameters too."""
        if self.root is None:
            return None
        shard = self.joined("dp_shard", "cp")
        if self.layout.dp_replicate == 1:
            return shard
        if self.layout.cp > 1:
            self.joined("dp_shard", "cp")
            return (
                self.root["dp_replicate", "dp_shard_cp"]
                if self.layout.dp_shard > 1
                else self.root["dp_replicate", "cp"]
            )
        return self.root["dp_replicate", "dp_shard"]

    def coordinate(self, name: str) -> int:
        return 0 if self.root is None else self.root[name].get_local_rank()
