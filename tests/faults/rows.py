"""The fault table: what is done to a run, and what drumbeat must say about it. Others extend it by adding rows.

A row is data. `runner.py` runs it: a job of 2 nodes x 2 ranks (unless it says otherwise) whose program does what `kind` says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, Optional, Tuple


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
    node: Optional[int] = None  # that is named, where no rank is
    act: str = ""  # what is done from outside once the fault begins (acts.py)
    how: str = (
        ""  # words for program.py: once, restarts (it saves every 5 steps), saves (ends with 75 on SIGTERM), deaf
    )
    job: Dict[str, Any] = field(default_factory=dict)  # more keys of the job file
    outcome: str = ""  # of the run, where it is not `failed`
    comes_back: bool = False  # a later attempt makes steps again, and no more than 5 are repeated
    unheard: str = ""  # what must not stand in the output
    heard: str = ""  # what must
    without_summary: bool = False  # the run folder is gone, or there never was one
    before: str = ""  # what is there before the run starts (strangers.py)
    desk: Dict[str, str] = field(default_factory=dict)  # variables for drumbeat itself; {folder} is the row's own
    joined: bool = False  # two desks, one per node, that find each other; `second` has variables for the other one
    second: Dict[str, str] = field(default_factory=dict)
    command: Tuple[str, ...] = ()  # another program than program.py; {folder} in it
    when: str = ""  # the fault begins when two files match this, and the act says so
    until_back: bool = False  # it is ended once it makes steps again
    lost_at_most: int = 5  # steps
    absent: str = ""  # a file of the row's folder that must not be there


# At once: stopped and dead peers, and collectives that do not match. After 30 s without progress: everything else.
_AT_ONCE, _STANDS = 15.0, 45.0

HANGS = (
    # Proven: nothing can end the wait, and `hang: stop` ends the run.
    Row("rank stopped (SIGSTOP)", "stop", "hang-stopped", within=_AT_ONCE, quick=True, job={"stop-grace": "600s"}),
    Row("endless loop", "loop", "hang-loop", place="loop", within=_STANDS),
    Row("torch: rank in an endless loop", "loop", "hang-loop", place="loop", world="torch", within=_STANDS),
    Row("torch: rank stopped", "stop", "hang-stopped", place="all_reduce 12", world="torch", within=_AT_ONCE),
    Row("torch: one rank calls barrier, the others all_reduce", "desync", "hang-desync", place="barrier", world="torch",
        within=_AT_ONCE),
    Row("torch: one rank makes a call more", "skipped", "hang-desync", place="broadcast", world="torch", within=_AT_ONCE),
    # The same where a program only prints its steps.
    *(
        Row(f"printed steps: {kind}", kind, code, place=place, how="prints", within=within)
        for kind, code, place, within in (
            ("stop", "hang-stopped", "", _AT_ONCE), ("loop", "hang-loop", "loop", _STANDS),
        )
    ),
    Row("printed steps, torch: one rank calls barrier", "desync", "hang-desync", place="barrier", world="torch", how="prints",
        within=_AT_ONCE),
    Row("printed steps, torch: one rank makes a call more", "skipped", "hang-desync", place="broadcast", world="torch",
        how="prints", within=_AT_ONCE),
    # Not proven: warned of; a run may end for it after five minutes (tests/agent/test_hang.py).
    *(
        Row(name, kind, code, place=place, world=world, hang="warn", exit_code=143, **{"within": _STANDS, **more})
        for name, kind, code, place, world, more in (
            ("rank asleep", "sleep", "hang-asleep", "sleep", "", {}),
            ("endless loop that calls functions", "calls", "hang-loop", "calls", "", {}),
            ("deadlock on a lock", "lock", "hang-waits", "lock", "", {}),
            ("data loader without an answer", "loader", "hang-waits", "loader", "", {}),
            ("data loader that asks in vain, again and again", "asks", "hang-waits", "asks", "", {}),
            ("extension holds Python's lock", "gil", "hang-no-answer", "", "", {}),
            ("all ranks deadlock", "idle", "hang-all-idle", "lock", "", {"rank": None}),
            ("one of ranks that do not wait for each other", "sleep", "hang-asleep", "sleep", "alone", {}),
            ("rank ends with 0 early, the others wait", "leave", "hang-early-exit", "", "", {"quick": True, "within": _AT_ONCE}),
            ("torch: rank asleep before a collective", "behind", "hang-asleep", "all_reduce 12", "torch", {"quick": True}),
            ("torch: deadlock on a lock", "lock", "hang-waits", "lock", "torch", {}),
            ("torchrun: rank asleep", "behind", "hang-asleep", "all_reduce 12", "torch", {"launcher": "torchrun"}),
            ("printed steps: sleep", "sleep", "hang-asleep", "sleep", "", {"how": "prints"}),
            ("printed steps: calls", "calls", "hang-loop", "calls", "", {"how": "prints"}),
            ("printed steps: lock", "lock", "hang-waits", "lock", "", {"how": "prints"}),
            ("printed steps: gil", "gil", "hang-no-answer", "", "", {"how": "prints"}),
            ("printed steps: leave", "leave", "hang-early-exit", "", "", {"how": "prints", "within": _AT_ONCE}),
            ("printed steps, torch: rank asleep", "behind", "hang-asleep", "main", "torch", {"how": "prints"}),
            ("NCCL's RAS names who is behind (stand-in)", "ras", "hang-asleep", "NCCL's RAS: has launched AllReduce", "",
             {"env": {"NCCL_RAS_ADDR": "127.0.0.1:{port}"}}),
        )
    ),
)  # fmt: skip

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

# What ends a rank, and what a fault in a program looks like.
PROGRAMS = (
    Row("segmentation fault", "segfault", "", failed="segfault", exit_code=139),
    Row("abort", "abort", "", failed="aborted", exit_code=134),
    Row("exit code without a word", "code", "", failed="exit-code", exit_code=3),
    Row("GPU memory used up", "gpu-memory", "", failed="gpu-out-of-memory"),
    Row("host memory used up", "host-memory", "", failed="host-out-of-memory"),
    Row("loss is not a number", "nan", "", failed="nan-loss"),
    Row("module is missing", "module", "", failed="import-error"),
    Row("GPU with memory errors (ECC)", "bad-gpu", "", failed="gpu-ecc"),
    Row("checkpoint's disk is full", "full-disk", "", failed="disk-full"),
    Row("fork storm, then a failure", "forks", "", failed="exception"),
    Row("the others ignore SIGTERM after a failure", "crash", "", failed="exception", how="deaf"),
    Row("torchrun: rank raises", "crash", "", failed="exception", world="torch", launcher="torchrun"),
    Row("output storm (20 MB in a second)", "output", "", None, exit_code=0, outcome="finished", steps=20),
    Row("hostile metrics", "bad-metrics", "", None, exit_code=0, outcome="finished", steps=20),
    Row("helper outlives its rank", "daemon", "", None, exit_code=0, outcome="finished", steps=20),
    Row("garbage on the lead's port", "outside", "", None, act="garbage", exit_code=0, outcome="finished", steps=25,
        absent="listens"),
)  # fmt: skip

# Agents, guards, nodes, the desk, the run folder, the scheduler. (Nodes are lost by killing or stopping their guard and agent.)
OUTSIDE = (
    Row("agent of node 1 killed", "outside", "", None, failed="node-lost", node=1, act="kill agent 1", exit_code=69),
    Row("node 1 lost", "outside", "", None, failed="node-lost", node=1, act="kill node 1", exit_code=69),
    Row(
        "link to node 1 half open: no word, no end", "outside", "", None, failed="node-lost", node=1, act="stop node 1",
        exit_code=69, within=25.0,
    ),
    Row("agent of node 1 stopped", "outside", "", None, failed="node-lost", node=1, act="stop agent 1", exit_code=69),
    Row("lead killed", "outside", "", None, failed="lead-lost", act="kill the lead", exit_code=137),
    Row("lead's guard killed", "outside", "", None, failed="guard-lost", act="kill the lead's guard", exit_code=143),
    Row("lead's node lost", "outside", "", None, failed="lead-lost", act="kill node 0", exit_code=137),
    Row("desk killed", "outside", "", None, act="kill the desk", exit_code=-9, outcome="cancelled"),
    Row("terminal closed", "outside", "", None, act="hang up", exit_code=129, outcome="cancelled"),
    Row("Ctrl-C", "outside", "", None, act="interrupt", exit_code=130, outcome="cancelled"),
    Row(
        "Ctrl-C twice, ranks ignore it", "outside", "", None, act="interrupt twice", exit_code=130, outcome="cancelled",
        how="deaf", job={"stop-grace": "600s"},
    ),
    Row("drumbeat cancel", "outside", "", None, act="cancel", exit_code=143, outcome="cancelled"),
    Row("preempted, the ranks save", "outside", "", None, act="terminate", exit_code=75, outcome="requeue", how="saves"),
    Row("time limit", "outside", "", None, exit_code=124, outcome="time-limit", job={"time": "6s"}),
    Row(
        "run folder deleted", "outside", "", None, act="delete the folder", exit_code=74, without_summary=True,
        heard="the run folder cannot be written",
    ),
)  # fmt: skip

_CLOCK = {"LD_PRELOAD": "{folder}/clock.so", "CLOCK_OFFSET": "{folder}/offset"}

# What others have put in the way, or a clock that is set. All go on as if nothing had happened, or end with a word.
STRANGERS = (
    Row(
        "another user holds the lead's first port", "outside", "", None, before="squat one port", joined=True, exit_code=0,
        outcome="finished", steps=15,
    ),
    Row(
        "another user holds all of the lead's ports", "outside", "", None, before="squat all ports", joined=True,
        exit_code=69, without_summary=True, heard="none of the ports",
    ),
    Row(
        "another user relays from the lead's first port", "outside", "", None, before="relay", joined=True, exit_code=0,
        outcome="finished", steps=15, heard="relay",
    ),
    Row(
        "another user's bundle in the cache", "outside", "", None, before="plant a bundle", exit_code=0, outcome="finished",
        steps=15, desk={"XDG_CACHE_HOME": "{folder}/cache"}, absent="it-ran",
    ),
    Row(
        "the clock of one agent and its ranks is set back by a day", "outside", "", None, before="clock", joined=True,
        second=_CLOCK, act="set the clock back", exit_code=0, outcome="finished", steps=60, at=15,
    ),
    Row(
        "the clock of one agent and its ranks is set forward by a day", "outside", "", None, before="clock", joined=True,
        second=_CLOCK, act="set the clock forward", exit_code=0, outcome="finished", steps=60, at=15,
    ),
)  # fmt: skip

_TRAIN = (
    "{python}", "-m", "drumbeat", "train", "llama", "--set", "batch=2", "length=16", "data=synthetic", "validation=0",
    "report_every=1", "steps=100000", "save_every=3", "checkpoint={folder}/checkpoints",
)  # fmt: skip
_KERNEL_LOG = {"DRUMBEAT_KERNEL_LOG": "{folder}/kernel-{node}"}

# It comes back: from the last save, in the same allocation.
RETURNS = (
    Row(
        "rank killed once, restarts: 2", "kill", "", 2, exit_code=0, outcome="finished", how="once restarts", steps=30,
        job={"restarts": 2}, comes_back=True,
    ),
    Row(
        "same bug twice at the same step, restarts: 5", "crash", "", failed="exception", how="restarts", job={"restarts": 5},
        heard="the same failure at step|in the same way at step",
    ),
    Row(
        "GPU memory used up twice, restarts: 5", "gpu-memory", "", failed="gpu-out-of-memory", how="restarts",
        job={"restarts": 5}, heard="the same failure|out of memory again",
    ),
    Row(
        "rendezvous port taken, restarts: 0", "port", "", None, exit_code=0, outcome="finished", how="restarts", steps=15,
        comes_back=True,
    ),
    Row(
        "node lost, a spare takes its place", "outside", "", None, act="kill node 1", exit_code=0, outcome="finished",
        how="once restarts", steps=60, job={"spares": 1}, comes_back=True,
    ),
    Row(
        "bad GPU, its node is excluded for a spare", "bad-gpu", "", 2, exit_code=0, outcome="finished", how="once restarts",
        steps=30, job={"spares": 1}, comes_back=True, heard="excluded",
    ),
    Row(
        "rank hangs once, restarts: 1", "loop", "hang-loop", place="loop", exit_code=0, outcome="finished",
        how="once restarts", steps=30, job={"restarts": 1}, comes_back=True, within=_STANDS,
    ),
    Row(
        "kernel log: a GPU fell off the bus (stand-in), a spare takes its node's place", "xid", "", 2, exit_code=0,
        outcome="finished", how="once restarts", steps=30, job={"spares": 1}, comes_back=True, heard="fell off the bus (Xid 79)",
        before="kernel logs", desk=_KERNEL_LOG,
    ),
    Row(
        "kernel log: amdgpu reset (stand-in), the rank hangs, a spare takes its node's place", "amd-reset", "any", 2, exit_code=0,
        outcome="finished", how="once restarts", steps=30, job={"spares": 1}, comes_back=True, heard="was reset by its driver",
        before="kernel logs", desk=_KERNEL_LOG,
    ),
    Row(
        "kernel log: the program's own Xid (31, stand-in): nobody is excluded", "own-xid", "", failed="illegal-memory-access",
        how="restarts", job={"spares": 1}, unheard="excluded", before="kernel logs", desk=_KERNEL_LOG,
    ),
    Row(
        "NaN once, saved before it, restarts: 2", "nan-once", "", 0, exit_code=0, outcome="finished", how="once restarts",
        steps=30, job={"restarts": 2}, comes_back=True, heard="only a checkpoint older than step 12 helps",
    ),
    Row(
        "NaN, and a checkpoint was saved after it, restarts: 2", "nan-saved", "", 0, failed="nan-loss", how="restarts",
        job={"restarts": 2}, heard="was saved after the loss had become NaN at step 12",
    ),
    Row(
        "torn checkpoint (drumbeat train, 1 node): the one before is used", "train", "", None, exit_code=75, outcome="requeue",
        command=_TRAIN, when="checkpoints/step-*/commit.json", act="tear the newest checkpoint", comes_back=True,
        job={"restarts": 1, "nodes": 1, "stop-grace": "90s"}, until_back=True, lost_at_most=8, within=200,
    ),
    Row(
        "corrupt checkpoint (drumbeat train, 1 node): left out, the one before is used", "train", "", None, exit_code=75,
        outcome="requeue", command=_TRAIN, when="checkpoints/step-*/commit.json", act="corrupt the newest checkpoint",
        comes_back=True, job={"restarts": 1, "nodes": 1, "stop-grace": "90s"}, until_back=True, lost_at_most=8, within=200,
        heard="CANNOT BE READ and is left out",
    ),
    Row(
        "one flipped bit in a checkpoint (drumbeat train, 1 node): left out, the one before is used", "train", "", None,
        exit_code=75, outcome="requeue", command=_TRAIN, when="checkpoints/step-*/commit.json",
        act="flip a bit of the newest checkpoint", comes_back=True,
        job={"restarts": 1, "nodes": 1, "stop-grace": "90s"}, until_back=True, lost_at_most=8, within=200,
        heard="it is damaged, its checksum is not that of what was saved",
    ),
)  # fmt: skip

_SLOW = ("{python}", "{program}/slow.py")

# A rank that is slower than the others: by its own time, and in a gloo world that says nothing, by who waits for whom.
SLOW = (
    Row("rank five times slower", "slow", "slow-rank", within=100.0, exit_code=143, hang="warn", at=20, world="alone"),
    *(
        Row(f"no reports, torch: {what}", kind, "slow-rank", place=place, within=200.0, exit_code=143, hang="warn",
            command=(*_SLOW, kind, "2"))
        for what, kind, place in (
            ("one rank computes for longer", "longer", "does more than the others"),
            ("one rank waits for its input", "reads", "waits for its input"),
            ("others use one rank's core", "neighbour", "something else uses its cores"),
        )
    ),
)  # fmt: skip

# Long work that is no hang: nothing may be said. (FAULT_LONG: seconds that it takes.)
_WORK = (
    "validation", "announced", "checkpoint", "compile", "uneven", "paced", "polls", "reply", "uploads", "computes", "sends",
    "own-work", "file",
)  # fmt: skip
_MORE_WORK = (
    "c-call", "nested", "pipeline", "reads-pipe", "threads", "thread-saves", "pool", "slow-loader", "alarm", "flag",
    "child-signals", "polls-http", "downloads", "knocks", "serves", "database", "unpacks", "backs-off", "compiles", "copies",
    "file-lock", "late-file",
)  # fmt: skip
HEALTHY = tuple(
    Row(
        f"healthy: {kind}{', torch' if world else ''}", kind, "", None, world=world, exit_code=0, at=15, steps=31,
        quick=(kind, world) == ("announced", ""),
    )
    for kind in _WORK
    for world in ("", "torch")
)  # fmt: skip

# The same for longer than a hang may stay unnamed. `make proofs` runs these (test_rows.py). A loop that stands on one line is
# warned of, but may not be ended: a signal's handler or a thread ends it. Work that hardly uses its core takes longer than any
# wait that shows nothing may take.
_LITTLE = ("paced", "polls", "reply", "sends", "downloads", "polls-http", "copies", "reads-pipe", "thread-saves")
LONG = tuple(
    Row(
        f"long work: {kind}", kind, "any" if kind in ("alarm", "flag") else "", None, exit_code=0, at=15, steps=16,
        within=500.0 if kind in _LITTLE else 150.0, env={"FAULT_LONG": "400" if kind in _LITTLE else "75"}, outcome="finished",
    )
    for kind in (*_WORK, *_MORE_WORK)
)  # fmt: skip

# The same for programs that report nothing, for three minutes: no rank may be called slow.
EVEN = tuple(
    Row(f"no reports, torch: {kind}", kind, "", None, exit_code=0, command=(*_SLOW, kind, "-1"), within=200.0,
        env={"FAULT_SECONDS": "180"})
    for kind in ("balanced", "uneven")
)  # fmt: skip

REPEATED = 3  # times that each healthy row is run by `make faults`

ALL = (*HANGS, *BLAME, *PROGRAMS, *OUTSIDE, *STRANGERS, *RETURNS, *SLOW, *EVEN, *HEALTHY)
