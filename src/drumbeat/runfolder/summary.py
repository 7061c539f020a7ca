"""summary.json: the result of a run in one small file. The lead writes it, or the desk if the lead was killed.

Both call `summarize`. *Finished* and *target reached* are different things. The file stays small however many ranks failed: ranks
are written as ranges, hosts as a node list, and anything that could grow without limit is cut.
"""

from __future__ import annotations

import dataclasses
import math
import os
from contextlib import suppress
from dataclasses import field
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.base.ranges import fold, ranges
from drumbeat.base.record import RecordError, check_schema, from_plain, to_plain
from drumbeat.base.regex import regex
from drumbeat.findings.model import WARNING, Finding
from drumbeat.machine.model import Facts
from drumbeat.runfolder.events import Event
from drumbeat.runfolder.files import Files, read_json, replace, replace_json
from drumbeat.runfolder.layout import SCHEMA, RunFolder
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.records import Member, is_count
from drumbeat.runfolder.state import (
    ASKED_TO_STOP,
    QUEUE,
    QUEUED,
    RUNNING,
    Condition,
    Course,
    condition,
    hangs_of,
    ranks_seen,
    replaced_nodes,
    seconds_of,
    training_share,
    why_stopped,
    world_of,
)

_MOST_GROUPS = 8  # of ranks that ended in the same way
_MOST_ATTEMPTS = 24
_MOST_EVIDENCE = 12
_LONGEST = 400  # characters of a text
_LONGEST_HOSTS = 8000


@dataclass(frozen=True)
class AttemptEnd:
    attempt: int
    outcome: str  # finished, doubtful, failed, cancelled, time-limit, requeue; cut off: its node, or the whole job, was killed
    exit_code: Optional[int]
    finding: Optional[Finding] = None
    resumable: bool = False  # it was cancelled, and its ranks ended with 75


@dataclass(frozen=True)
class Affected:
    """Ranks that all ended in the same way because another one had failed."""

    ranks: str  # 0-7,9
    count: int
    what: str


@dataclass(frozen=True)
class Throughput:
    value: float
    unit: str


@dataclass(frozen=True)
class Summary:
    run_id: str
    outcome: str
    exit_code: int
    seconds: float  # from the command to the end
    nodes: int
    ranks: int = 0
    hosts: str = ""  # as a node list
    launcher: str = ""
    target_reached: Optional[bool] = None
    attempts: Tuple[AttemptEnd, ...] = ()
    start: int = 0  # how often the scheduler had started this job before
    failure: Optional[Finding] = None
    stopped: str = ""  # why it was asked to stop, if it did not end by itself
    hang: Optional[Finding] = None  # the hang that had been reported and was not over when the run ended
    hang_seconds: Optional[float] = None  # of that hang, or of the one that is the failure, since the last step
    world: Optional[Finding] = None  # why its ranks are not the one training that was planned
    consequences: Tuple[Affected, ...] = ()
    progress: Progress = field(default_factory=Progress)
    throughput: Optional[Throughput] = None
    spares: int = 0  # nodes that were asked for beyond `nodes`
    replaced: Tuple[str, ...] = ()  # which of them took whose place
    ledger: Dict[str, float] = field(default_factory=dict)  # part -> seconds; see state.py
    gpus: Optional[int] = None  # of all nodes; None: not known
    gpu_hours: Optional[float] = None  # GPUs times the time that the job held its nodes
    training_share: Optional[float] = None  # effective training time ratio; None: no steps were reported
    schema: str = SCHEMA

    @property
    def elapsed(self) -> float:
        """Return the duration of the run without its time in a queue."""
        return max(0.0, self.seconds - self.ledger.get(QUEUE, 0.0))


@dataclass(frozen=True)
class Moment:
    """State, times and causes of a run at one moment, as every view shows them; worked out here alone."""

    condition: Condition = Condition("unknown", WARNING)
    seconds: Optional[float] = None  # since its start, or how long it took; waiting time while it is queued
    quiet: Optional[float] = None  # seconds without a step, of a run that runs and usually makes steps much faster
    seconds_left: Optional[float] = None
    rate: Optional[Tuple[float, str]] = None  # of all ranks together, since the first step


def moment(
    told: str, detail: str, summary: Optional[Summary], course: Course, progress: Progress, began: Optional[float], now: float
) -> Moment:  # fmt: skip
    """Return the state of a run. `told`, `detail`: as its folder and its scheduler say. `began`: when it was created, or last
    started. `now`: for a run without a summary that has ended, the last time that is known."""
    seconds = summary.elapsed if summary else max(0.0, now - began) if began and now else None
    quiet = progress.quiet(now) if told == RUNNING else None
    left = progress.seconds_left() if told in (QUEUED, RUNNING) and course.hang is None and quiet is None else None
    said = condition(told, detail, summary.outcome if summary else "", course, progress)
    told_rate = summary.throughput if summary else None
    rate = (told_rate.value, told_rate.unit) if told_rate else None if summary else progress.rate()
    return Moment(said, seconds, quiet, left, rate)


@dataclass(frozen=True)
class Observations:
    """Observations of a run other than its attempts, members and progress."""

    events: Sequence[Event] = ()  # the lead's
    hang: Optional[Finding] = None  # had been reported and was not over
    gpus: Optional[int] = None


def summarize(
    order: Order,
    attempts: Sequence[AttemptEnd],
    members: Sequence[Member],
    affected: Sequence[Affected],
    progress: Progress,
    parts: Mapping[str, float],
    observed: Optional[Observations] = None,
) -> Summary:
    """Summarize a run. `attempts` are all of them; the run ended as the last one did. `parts` is the ledger."""
    observed = observed or Observations()
    last, hang, gpus, events = attempts[-1], observed.hang, observed.gpus, observed.events
    world = world_of(events)
    rate = progress.rate()
    held = sum(parts.values()) - parts.get(QUEUE, 0.0)  # seconds
    hung = seconds_of(hang or last.finding, hangs_of(events, order.created + sum(parts.values()), progress))
    hosts = fold(member.host for member in members)
    return Summary(
        run_id=order.run_id,
        outcome=last.outcome,
        exit_code=1 if last.exit_code is None else last.exit_code,
        seconds=round(sum(parts.values()), 3),
        nodes=len(members) if order.fewest_nodes and members else order.nodes,
        ranks=ranks_seen(events) or sum(member.ranks for member in members),
        hosts=hosts if len(hosts) <= _LONGEST_HOSTS else hosts[:_LONGEST_HOSTS].rpartition(",")[0] + ",...",
        launcher=order.launcher,
        start=order.start,
        target_reached=progress.target_reached,
        attempts=tuple(
            dataclasses.replace(
                each, finding=each.finding and dataclasses.replace(shortened(each.finding), evidence=())
            )
            for each in attempts[-_MOST_ATTEMPTS:]
        ),
        failure=shortened(last.finding) if last.finding else None,
        stopped=_cut(why_stopped(events)) if last.outcome in ASKED_TO_STOP else "",
        hang=shortened(hang) if hang and (last.finding is None or hang.code != last.finding.code) else None,
        hang_seconds=None if hung is None else round(hung, 1),
        world=shortened(world) if world and (last.finding is None or world.code != last.finding.code) else None,
        consequences=tuple(affected) if last.finding else (),
        progress=progress,
        throughput=Throughput(round(rate[0], 3), rate[1]) if rate else None,
        spares=order.spares,
        replaced=tuple(_cut(words) for words in replaced_nodes(events)[-_MOST_ATTEMPTS:]),
        ledger=dict(parts),
        gpus=gpus,
        gpu_hours=None if gpus is None else round(gpus * held / 3600, 4),
        training_share=training_share(parts),
    )


def gpus_used(order: Order, facts: Facts) -> int:
    """Return the number of GPUs of one node that the job may use."""
    here = sum(not gpu.integrated for gpu in facts.gpus)
    return min(here, order.gpus) if order.gpus is not None else here


def gpus_of_run(order: Order, of_nodes: Sequence[int]) -> int:
    """Count the GPUs of a run. Emulated nodes are one machine with one set of GPUs, whatever their number."""
    return max(of_nodes, default=0) if order.emulated else sum(of_nodes)


def write_summary(folder: RunFolder, summary: Summary) -> None:
    replace_json(folder.summary, summary)


def parse_summary(data: Optional[Mapping[str, Any]], where: str) -> Optional[Summary]:
    """Parse a summary; None if it is missing or damaged, RecordError if a newer drumbeat wrote it."""
    if data is None:
        return None
    check_schema(str(data.get("schema", "?")), SCHEMA, where)
    try:
        summary = from_plain(Summary, data)
    except (RecordError, AssertionError, OverflowError):
        return None
    counts = (summary.nodes, summary.ranks, summary.start, summary.spares, summary.gpus or 0, abs(summary.exit_code))
    return summary if math.isfinite(summary.seconds) and all(map(is_count, counts)) else None


def group(ends: Iterable[Tuple[int, str]]) -> Tuple[Affected, ...]:
    """Group ranks that ended in the same way, the largest group first."""
    groups: Dict[str, List[int]] = {}
    for rank, what in ends:
        groups.setdefault(_cut(what), []).append(rank)
    order = sorted(groups, key=lambda what: (-len(groups[what]), min(groups[what])))
    shown, rest = order[:_MOST_GROUPS], order[_MOST_GROUPS:]
    if rest:
        shown, rest = order[: _MOST_GROUPS - 1], order[_MOST_GROUPS - 1 :]
        others = [rank for what in rest for rank in groups.pop(what)]
        words = f"ended in {len(rest)} other ways"
        shown.append(words)
        groups[words] = others
    return tuple(Affected(ranges(groups[what]), len(groups[what]), what) for what in shown)


def shortened(finding: Finding) -> Finding:
    """Shorten the evidence so that it fits on a page."""
    evidence = tuple(dataclasses.replace(each, text=_cut(each.text)) for each in finding.evidence[:_MOST_EVIDENCE])
    title, cause, fix = _cut(finding.title), _cut(finding.cause, 1000), _cut(finding.fix, 1000)
    return dataclasses.replace(finding, title=title, cause=cause, fix=fix, evidence=evidence)


def _cut(text: str, longest: int = _LONGEST) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."


# RUN/verdict: how the run ended, for the script or process that started the agents and cannot read JSON. Lines NAME=VALUE:
# `code`, the exit code; `next`, end or requeue; `stopped`, 1 if the run ended only because its scheduler asked for it (the
# scheduler then decides if it comes back); `cancelled`, 1 if the user cancelled it; `lost`, every node that this run has lost so
# far, if the job is to be queued again without them. The lead writes it once per start. `lost` and `requeues` beside it are kept
# between starts.


VERDICT = "verdict"
END, REQUEUE = "end", "requeue"
_HOST = regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


def write_verdict(
    folder: RunFolder, code: int, next_step: str, lost: Sequence[str], counts: bool, mark: str = "",
    bad: Sequence[str] = (),
) -> None:  # fmt: skip
    """Write the verdict. `counts`: this requeue counts toward the limit that the job sets. `mark`: "stopped" or "cancelled".
    `bad`: nodes that no other job of the user's array should get."""
    assert next_step in (END, REQUEUE), next_step
    hosts = ",".join(host for host in dict.fromkeys([*lost_nodes(folder), *lost]) if _HOST.fullmatch(host))
    if lost:
        replace(folder.lost, hosts + "\n")
    if counts:
        replace(folder.requeues, f"{requeues(folder) + 1}\n")
    again = hosts if lost and next_step == REQUEUE else ""
    lines = [f"code={int(code)}", f"next={next_step}", f"lost={again}", *([f"{mark}=1"] if mark else [])]
    lines += [f"bad={','.join(filter(_HOST.fullmatch, bad))}"] if bad else []
    replace(folder.verdict, "\n".join(lines) + "\n")


def next_step(folder: RunFolder) -> str:
    """Return END or REQUEUE from the verdict; END if there is none."""
    return REQUEUE if f"next={REQUEUE}" in _text(folder.verdict).splitlines() else END


def lost_nodes(folder: RunFolder) -> List[str]:
    return [name for name in _text(folder.lost).split(",") if name]


def requeues(folder: RunFolder) -> int:
    """Return how often drumbeat has queued this job again, counting only requeues that count toward the limit."""
    text = _text(folder.requeues)
    return int(text) if text.isdigit() and len(text) < 6 else 0


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(1 << 20).strip()
    except OSError:
        return ""


def forget_end(folder: RunFolder) -> None:
    """Remove the recorded end of a job that starts again."""
    for path in (folder.summary, folder.verdict):
        with suppress(FileNotFoundError):
            os.unlink(path)


# run.json: the record of a run from its first moment on.


_RUN_JSON = RunFolder("").run_json


@dataclass(frozen=True)
class Desk:
    """The process that started the run and stays with it."""

    host: str
    pid: int
    started: Optional[str] = None  # its start time, as the kernel counts it: pids are used again


@dataclass(frozen=True)
class RunRecord:
    run_id: str
    schema: str = SCHEMA
    name: str = ""
    created: float = 0.0  # seconds since 1970; 0: not known
    handle: str = ""  # BACKEND://CLUSTER/JOB
    version: str = ""
    desk: Optional[Desk] = None
    output: str = ""  # what a scheduler's job prints; a path, or a name in the run folder
    cancelled: bool = False  # the desk has taken the job out of the queue: a scheduler may forget it at once
    last_state: str = ""  # what its scheduler said last, kept where the desk has removed the job after its end
    last_detail: str = ""
    submitting: bool = False  # the desk is handing it over; if that desk is dead, nobody knows how far it came
    forgotten: bool = False  # the scheduler no longer knows the job, so that it cannot come back
    lead: str = ""  # the lead's host, in the folder of a node that does not see the lead's


def read_run_record(path: str, files: Optional[Files] = None) -> RunRecord:
    """Read run.json. RecordError if there is no run, or one of a newer drumbeat."""
    place = os.path.join(path, _RUN_JSON)
    data = read_json(_RUN_JSON, files or Files(path))
    if data is None:
        raise RecordError(f"{path}: not a run folder (no readable run.json)")
    check_schema(str(data.get("schema", "?")), SCHEMA, place)
    try:
        record = from_plain(RunRecord, {"run_id": os.path.basename(path), **data}, place)
    except OverflowError as error:
        raise RecordError(f"{place}: {error}") from None
    return record if math.isfinite(record.created) else dataclasses.replace(record, created=0.0)


def is_folder_of(folder: RunFolder, run_id: str) -> bool:
    """Return true if the folder visible here is this run's. A folder that a member has for itself under the same path, in another
    pod, is not."""
    try:
        record = read_run_record(folder.path)
    except RecordError:
        return False
    return record.run_id == run_id and not record.lead


def keep_last_word(path: str, state: str, detail: str) -> None:
    """Record the cluster's last state of the job, which is about to be deleted."""
    record = dataclasses.replace(read_run_record(path), last_state=state, last_detail=detail)
    write_run_record(RunFolder(path), record)


def write_run_record(folder: RunFolder, record: RunRecord) -> None:
    """Replace run.json. Unknown values are left out."""
    known = {key: value for key, value in to_plain(record).items() if value not in ("", None, False)}
    replace_json(folder.run_json, known)
