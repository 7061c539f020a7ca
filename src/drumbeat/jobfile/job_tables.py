"""The tables inside a job: `wrap`, `expect` and `checks`, documented like the job's own keys."""

from __future__ import annotations

from typing import Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import CHECK_LEVELS, TRANSPORTS
from drumbeat.jobfile.fields import key


@dataclass(frozen=True)
class JobWrap:
    ranks: Tuple[int, ...] = key(
        "numbers", "The ranks, counted over all nodes, whose command gets the prefix.", "[0, 3]"
    )
    command: Tuple[str, ...] = key(
        "command",
        "The prefix; `{rank}` and `{node}` are filled in on the node.",
        "rocprofv3 --hip-trace --stats -o prof-{rank} --",
    )


@dataclass(frozen=True)
class JobExpect:
    transport: str = key(
        "choice",
        "The network: rdma (InfiniBand, RoCE, or libfabric over such a NIC), one of its kinds (ib, roce, ofi), tcp, "
        "or any.",
        "ofi",
        "any",
        allowed=TRANSPORTS,
    )
    gdr: Optional[bool] = key(
        "switch", "Whether NICs read GPU memory directly.", "true", None, default_text="either is right"
    )


@dataclass(frozen=True)
class JobChecks:
    preflight: str = key(
        "choice",
        "What follows when a node would fail this job: looked at on every node before ranks are started.",
        "warn",
        "stop",
        allowed=CHECK_LEVELS,
    )
    affinity: str = key(
        "choice",
        "What follows when ranks do not sit on the cores, or do not see the devices, that the plan gave them.",
        "stop",
        "warn",
        allowed=CHECK_LEVELS,
    )
    hang: str = key(
        "choice",
        "What follows when steps stop coming and one rank, or all of them, can be seen to hang. stop keeps the ranks' stacks, "
        "then ends the attempt as failed. Programs that report no steps are never stopped.",
        "stop",
        "warn",
        allowed=CHECK_LEVELS,
    )
    transport: Optional[str] = key(
        "choice",
        "What follows when another network carries the traffic than `expect` says, or than the variables name. off also "
        "leaves NCCL's log alone.",
        "warn",
        None,
        allowed=CHECK_LEVELS,
        default_text="stop where the job says what to expect, else warn",
    )
    world: Optional[str] = key(
        "choice",
        "What follows when the ranks that really run do not form one world: every rank is seen twice, or each node trains "
        "alone.",
        "warn",
        None,
        allowed=CHECK_LEVELS,
        default_text="stop; warn where drumbeat joins a job",
    )
