"""Keys of a job: how long it runs, how it stops and comes back, and what is checked meanwhile."""

from __future__ import annotations

from typing import Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.jobfile.fields import key
from drumbeat.jobfile.job_tables import JobChecks, JobExpect, JobWrap


@dataclass(frozen=True)
class JobCourse:
    time: Optional[int] = key(
        "duration",
        "When to end the job, with its unit: 90s, 30m, 1h, 2d6h30m, hours:minutes:seconds, or "
        "days-hours:minutes:seconds. It counts from the start of node 0's agent; the ranks then have `stop-grace` to save.",
        "1h30m",
        None,
        minimum=1,
        flag="TIME",
        default_text="no limit of drumbeat's own",
    )
    restarts: int = key(
        "number", "How often the whole job is started again after a failure.", "2", 0, minimum=0, flag="N"
    )
    spares: int = key(
        "number",
        "Nodes beyond `nodes` that wait without ranks. One takes the place of a node that is lost or bad: the job goes on from "
        "its checkpoint, without waiting in a queue (docs/comeback.md). Of `hosts` the last ones are spares.",
        "1",
        0,
        minimum=0,
        flag="N",
    )
    stop_grace: int = key(
        "duration",
        "How long ranks may go on saving after a stop signal before they are killed.",
        "2m",
        60,
        minimum=1,
        flag="TIME",
        default_text="60s",
    )
    on_end: Tuple[str, ...] = key(
        "command",
        "A command that the lead runs once on its node when the run has ended for good: to send a message, say. Split into "
        "words, no shell; `{run_id}`, `{outcome}`, `{exit_code}`, `{seconds}` and `{folder}` are filled in, and stand in "
        "DRUMBEAT_RUN_ID and so on. It has 15 s, writes to on-end.log in the run folder, and changes no exit code.",
        "ntfy publish my-topic '{run_id} {outcome}'",
        (),
        default_text="nothing",
    )
    wrap: Optional[JobWrap] = key(
        "table",
        "A prefix (a profiler, a debugger) before the command of chosen ranks.",
        '{ranks: [2], command: "nsys profile -o prof-{rank}"}',
        None,
        inner=JobWrap,
        default_text="none",
    )
    trace: bool = key(
        "switch",
        "Turn on the logs of NCCL/RCCL, MIOpen and libfabric, one file per rank.",
        "true",
        False,
        flag="switch",
    )
    expect: Optional[JobExpect] = key(
        "table",
        "Which network must carry the traffic between nodes. It is read off NCCL's own log and the NICs' counters at "
        "the first collective.",
        "{transport: ofi, gdr: true}",
        None,
        inner=JobExpect,
        default_text="the site's, else any",
    )
    checks: JobChecks = key(
        "table",
        "How strict the checks of a running job are: off, warn or stop.",
        "{transport: stop}",
        JobChecks(),
        inner=JobChecks,
        default_text="each check's own",
    )
    oversubscribe: int = key(
        "number",
        "How many ranks a core may carry where nodes are emulated on one machine.",
        "8",
        4,
        minimum=1,
        flag="N",
    )
    stop_signal: str = key(
        "choice",
        "What the main process of each rank is sent when it should save and end: on a cancel, before a time limit, on a "
        "preemption. A rank that saves and then ends with 75 is started again by the scheduler.",
        "USR2",
        "TERM",
        allowed=("TERM", "INT", "USR1", "USR2"),
        flag="NAME",
    )
