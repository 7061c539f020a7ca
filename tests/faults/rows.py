"""The fault table: what is done to a run, and what drumbeat must say about it. Others extend it by adding rows.

A row is data. `runner.py` runs it: a job of 2 nodes x 2 ranks (unless it says otherwise) whose program does what `kind` says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, Optional


@dataclass(frozen=True)
class Row:
    name: str
    kind: str  # what program.py does
    code: str  # of the finding that names it; '': nothing may be found; any: it may or may not be seen in time
    rank: Optional[int] = 2  # that is named
    place: str = ""  # function or collective that the finding must name
    within: float = 10.0  # seconds from the fault to the finding, on an idle machine
    exit_code: int = 1
    world: str = ""  # torch: gloo; alone: ranks that do not wait for each other; '': they meet over TCP
    launcher: str = "ranks"
    hang: str = "stop"  # the job's checks.hang
    at: int = 12  # step at which it happens
    steps: int = 100_000
    env: Dict[str, str] = field(default_factory=dict)
    quick: bool = False  # also in `make test`
    failed: str = ""  # code of the failure in the summary, several with | between; '': that of the finding
    then: str = ""  # what the summary must say of the other ranks


HANGS = (
    Row("rank stopped (SIGSTOP)", "stop", "hang-stopped", quick=True),
    Row("rank asleep", "sleep", "hang-asleep", place="sleep"),
    Row("endless loop", "loop", "hang-loop", place="loop", within=12, quick=True),
    Row("deadlock on a lock", "lock", "hang-waits", place="lock"),
    Row("data loader without an answer", "loader", "hang-waits", place="loader"),
    Row("extension holds Python's lock", "gil", "hang-no-answer"),
    Row("all ranks deadlock", "idle", "hang-all-idle", rank=None, place="lock"),
    Row("one of ranks that do not wait for each other", "sleep", "hang-asleep", place="sleep", world="alone"),
    Row("rank ends with 0 early, the others wait", "leave", "hang-early-exit", quick=True),
    Row(
        "torch: rank asleep before a collective",
        "behind",
        "hang-asleep",
        place="all_reduce 12",
        world="torch",
        quick=True,
    ),
    Row("torch: rank in an endless loop", "loop", "hang-loop", place="loop", world="torch", within=12),
    Row("torch: rank stopped", "stop", "hang-stopped", place="all_reduce 12", world="torch"),
    Row("torch: deadlock on a lock", "lock", "hang-waits", place="lock", world="torch"),
    Row(
        "torch: one rank calls barrier, the others all_reduce", "desync", "hang-desync", place="barrier", world="torch"
    ),
    Row("torchrun: rank asleep", "behind", "hang-asleep", place="all_reduce 12", world="torch", launcher="torchrun"),
    Row("rank asleep, only warned of", "sleep", "hang-asleep", place="sleep", hang="warn", exit_code=143),
)

# The first real failure must be named, whatever else follows from it.
BLAME = (
    Row("rank killed", "kill", "", failed="killed", exit_code=137),
    Row("rank raises", "crash", "", failed="exception", exit_code=1),
    Row("torch: rank ends with 0 early, peers lose it", "exit", "", failed="early-exit", world="torch"),
    Row(
        "torch: time-out of the group, rank asleep",
        "behind",
        "any",
        failed="rank-absent|hang-asleep",
        world="torch",
        env={"FAULT_TIMEOUT": "4"},
    ),  # fmt: skip
)

# Long work that is no hang: nothing may be said. (FAULT_LONG: seconds that it takes.)
HEALTHY = tuple(
    Row(
        f"healthy: {kind}{', torch' if world else ''}", kind, "", None, world=world, exit_code=0, at=15, steps=31,
        quick=(kind, world) == ("announced", ""),
    )
    for kind in ("validation", "announced", "checkpoint", "compile", "uneven")
    for world in ("", "torch")
)  # fmt: skip

REPEATED = 3  # times that each healthy row is run by `make faults`

ALL = (*HANGS, *BLAME, *HEALTHY)
