"""Who a rank is: the variables every training framework reads, each with its reason."""

from __future__ import annotations

from typing import List, Mapping, Sequence

from drumbeat.facts.model import Peers
from drumbeat.order import EnvVar, Order

# Set for every process after everything else, so nobody else can.
IDENTITY = (
    "RANK", "LOCAL_RANK", "NNODES", "NODE_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "DRUMBEAT_RUN", "DRUMBEAT_ATTEMPT", "DRUMBEAT_METRICS", "DRUMBEAT_FOLDER",
)  # fmt: skip


def node_identity(order: Order, peers: Peers, node: int, attempt: int, metrics: str, folder: str) -> List[EnvVar]:
    """What all processes of a node share."""
    return [
        _var("NNODES", len(peers.nodes), "nodes that mustered"),
        _var("NODE_RANK", node, "this node's place among the nodes of the run"),
        _var("GROUP_RANK", node, "the same, as torch elastic calls it"),
        _var("LOCAL_WORLD_SIZE", peers.nodes[node].ranks, "ranks on this node"),
        _var("WORLD_SIZE", peers.world_size, "ranks of all nodes"),
        _var("MASTER_ADDR", peers.master_addr, "node 0, by the address at which the others reached it"),
        _var("MASTER_PORT", peers.master_port, "free on node 0 when this attempt began"),
        _var("DRUMBEAT_RUN", order.run_id, "marks every process of this run"),
        _var("DRUMBEAT_ATTEMPT", attempt, "counts the starts of this run"),
        _var("DRUMBEAT_METRICS", metrics, "where drumbeat.metrics writes; one file per node"),
        _var("DRUMBEAT_FOLDER", folder, "this attempt's part of the run folder: profiles go there"),
    ]


def rank_identity(rank: int, local_rank: int) -> List[EnvVar]:
    return [
        _var("RANK", rank, "this rank among all"),
        _var("LOCAL_RANK", local_rank, "this rank among those of its node"),
    ]


def flight_recorder(variables: Sequence[EnvVar], environ: Mapping[str, str]) -> List[EnvVar]:
    """Torch keeps its last collectives in memory, so that a hang can be told by name; off where the user says so."""
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    if any(variable.name in names for variable in variables) or any(name in environ for name in names):
        return []
    why = "torch keeps its last collectives, so that a hang can be told by name"
    return [EnvVar(names[0], "2000", why, "default")]


def jax_identity(known: Mapping[str, str], rank: int) -> List[EnvVar]:
    """`known` are the rank's variables so far."""
    return [
        _var("JAX_COORDINATOR_ADDRESS", f"{known['MASTER_ADDR']}:{known['MASTER_PORT']}", "where JAX's processes meet"),
        _var("JAX_NUM_PROCESSES", known["WORLD_SIZE"], "ranks of all nodes, as JAX calls them"),
        _var("JAX_PROCESS_ID", rank, "this rank, as JAX calls it"),
    ]


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
