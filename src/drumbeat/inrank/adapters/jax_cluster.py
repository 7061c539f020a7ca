"""JAX: a JAX `ClusterEnv` that answers from the variables that drumbeat sets for each rank.

`jax.distributed.initialize()` asks it for the values that the program does not pass. It comes before JAX's own clusters for
schedulers and Open MPI, which take one device per task even if a task is the only one on its node.
"""

from __future__ import annotations

import os
from typing import Any, Optional

_NEEDED = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def adapt(clusters: Any) -> None:
    """Add our cluster. `clusters` is jax._src.clusters."""

    class DrumbeatCluster(clusters.ClusterEnv):  # type: ignore[misc]  # a subclass registers itself
        name = "drumbeat"

        @classmethod
        def is_env_present(cls) -> bool:
            below_torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # its ranks have other numbers than this process had
            return all(os.environ.get(name) for name in _NEEDED) and not below_torchrun

        @classmethod
        def get_coordinator_address(cls, *_: Any, **__: Any) -> str:
            return os.environ["JAX_COORDINATOR_ADDRESS"]

        @classmethod
        def get_process_count(cls) -> int:
            return int(os.environ["JAX_NUM_PROCESSES"])

        @classmethod
        def get_process_id(cls) -> int:
            return int(os.environ["JAX_PROCESS_ID"])

        @classmethod
        def get_local_process_id(cls) -> Optional[int]:
            return local_device()

    known = clusters.ClusterEnv._cluster_types
    known.insert(0, known.pop(known.index(DrumbeatCluster)))


def local_device() -> Optional[int]:
    """Return the one device that this process uses among those visible to it; None: all of them."""
    environ = os.environ
    processes, nodes = int(environ["JAX_NUM_PROCESSES"]), int(environ.get("NNODES", "1"))
    if processes <= nodes or "LOCAL_RANK" not in environ:
        return None
    here = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    # NVIDIA_VISIBLE_DEVICES is for the container's runtime, not for the process.
    masks = [environ[name] for name in environ if name.endswith("_VISIBLE_DEVICES") and not name.startswith("NVIDIA_")]
    if any(len(mask.split(",")) < here for mask in masks):
        return None  # only its own devices are visible
    return int(environ["LOCAL_RANK"])
