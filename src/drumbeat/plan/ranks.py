"""Who a rank is: the variables every training framework reads, each with its reason."""

from __future__ import annotations

from typing import List, Mapping, Optional, Sequence

from drumbeat.base.order import EnvVar, Order
from drumbeat.machine.model import Peers

# Set for every process after everything else, so nobody else can. Their values are known when the run starts.
WHY = {
    "RANK": "this rank among all",
    "LOCAL_RANK": "this rank among those of its node",
    "NNODES": "nodes that mustered",
    "NODE_RANK": "this node's place among the nodes of the run",
    "GROUP_RANK": "the same, as torch elastic calls it",
    "LOCAL_WORLD_SIZE": "ranks on this node",
    "WORLD_SIZE": "ranks of all nodes",
    "MASTER_ADDR": "node 0, by the address at which the others reached it",
    "MASTER_PORT": "free on node 0 when this attempt began",
    "DRUMBEAT_RUN": "marks every process of this run",
    "DRUMBEAT_ATTEMPT": "counts the starts of this run",
    "DRUMBEAT_METRICS": "where drumbeat.metrics writes; one file per node",
    "DRUMBEAT_FOLDER": "this attempt's part of the run folder: profiles go there",
}
IDENTITY = tuple(WHY)
ADAPTERS = "DRUMBEAT_ADAPTERS"
JAX_WHY = {
    "JAX_COORDINATOR_ADDRESS": "where JAX's processes meet",
    "JAX_NUM_PROCESSES": "JAX's processes on all nodes: the ranks, or one per node with `once`",
    "JAX_PROCESS_ID": "this process among them",
    "JAX_LOCAL_DEVICE_IDS": "the GPUs of this rank among those it sees; not with `once`: one process takes all",
}
_JAX_WHEN = "unless you set JAX_COORDINATOR_ADDRESS, or a launcher starts the ranks"
_ADAPTERS_WHY = {
    ADAPTERS: f"folder of the adapter that tells JAX who the rank is; set {ADAPTERS}=off to do without it",
    "PYTHONPATH": f"begins with {ADAPTERS}, so that Python loads the adapter's sitecustomize and then your own",
}
WHO = {**WHY, **{name: f"{why}; {_JAX_WHEN}" for name, why in JAX_WHY.items()}, **_ADAPTERS_WHY}
_NCCL_LOG = (
    "NCCL's own log, in a file; where there are GPUs, or the job expects a transport (checks: {transport: off}: never)"
)
# All whose values are known only when the run starts.
AT_START = {**WHO, **{f"NCCL_DEBUG{name}": _NCCL_LOG for name in ("", "_SUBSYS", "_FILE")}}


def node_identity(order: Order, peers: Peers, node: int, attempt: int, metrics: str, folder: str) -> List[EnvVar]:
    """What all processes of a node share."""
    values = {
        "NNODES": len(peers.nodes), "NODE_RANK": node, "GROUP_RANK": node, "LOCAL_WORLD_SIZE": peers.nodes[node].ranks,
        "WORLD_SIZE": peers.world_size, "MASTER_ADDR": peers.master_addr, "MASTER_PORT": peers.master_port,
        "DRUMBEAT_RUN": order.run_id, "DRUMBEAT_ATTEMPT": attempt, "DRUMBEAT_METRICS": metrics, "DRUMBEAT_FOLDER": folder,
    }  # fmt: skip
    return [_var(name, value, WHY[name]) for name, value in values.items()]


def rank_identity(rank: int, local_rank: int) -> List[EnvVar]:
    return [_var(name, value, WHY[name]) for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank))]


def flight_recorder(variables: Sequence[EnvVar]) -> List[EnvVar]:
    """Torch keeps its last collectives in memory, so that a hang can be told by name; off where the user says so."""
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    if any(variable.name in names for variable in variables):
        return []
    why = "torch keeps its last collectives, so that a hang can be told by name (checks: {hang: off} leaves it alone)"
    return [EnvVar(names[0], "2000", why, "default")]


def jax_identity(known: Mapping[str, str], process: Optional[int], devices: Sequence[int]) -> List[EnvVar]:
    """`known` are the variables so far; `process` is the rank, or None for one process per node, `devices` the GPUs it takes of
    those it sees, if not all."""
    count, number = (known["NNODES"], known["NODE_RANK"]) if process is None else (known["WORLD_SIZE"], process)
    values = (f"{known['MASTER_ADDR']}:{known['MASTER_PORT']}", count, number, ",".join(map(str, devices)))
    return [_var(name, value, why) for (name, why), value in zip(JAX_WHY.items(), values) if value != ""]


def trace(log: str) -> List[EnvVar]:
    """`--trace`: what NCCL, MIOpen and libfabric say, one file per rank. Too much for every day."""
    why = "the job asks for a trace"
    return [
        EnvVar("NCCL_DEBUG", "INFO", why, "user"),
        EnvVar("NCCL_DEBUG_SUBSYS", "INIT,ENV,NET,BOOTSTRAP,GRAPH", why, "user"),
        EnvVar("NCCL_DEBUG_FILE", log, why + "; a file of its own keeps its lines whole", "user"),
        EnvVar("MIOPEN_ENABLE_LOGGING", "1", why + "; goes to the rank's standard error", "user"),
        EnvVar("FI_LOG_LEVEL", "info", why + "; goes to the rank's standard error", "user"),
    ]


def _var(name: str, value: object, why: str) -> EnvVar:
    return EnvVar(name, str(value), why, "detected")
