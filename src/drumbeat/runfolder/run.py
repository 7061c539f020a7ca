"""`Run`: typed access to one run folder. All readers go through it; damaged or missing data is None or left out.

`Run.open(path)` checks that the folder holds a run of a known schema. A `Follower` of it returns what is still being written.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import socket
import time
from dataclasses import field
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
)

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order, load_order
from drumbeat.base.record import RecordError, from_plain
from drumbeat.base.redact import last_state
from drumbeat.base.regex import regex
from drumbeat.findings.model import Verdict
from drumbeat.runfolder import events as kinds
from drumbeat.runfolder.events import Event, parse_event
from drumbeat.runfolder.files import Files, Tail, decode, read_json
from drumbeat.runfolder.layout import NodeFolder, RunFolder, stop_line
from drumbeat.runfolder.progress import PACES, Progress, merged
from drumbeat.runfolder.records import (
    SO_FAR,
    Line,
    Member,
    Metric,
    Sample,
    parse_member,
    parse_metric,
    parse_sample,
    parse_so_far,
)  # fmt: skip
from drumbeat.runfolder.state import PARTS, ledger, ranks_seen
from drumbeat.runfolder.summary import AttemptEnd, RunRecord, Summary, parse_summary, read_run_record

if TYPE_CHECKING:
    from drumbeat.machine.model import Facts


T = TypeVar("T")
_LAST_EVENTS = 16 << 10  # bytes of the lead's events that hold how the run ended
_LAST_SAMPLES = 64 << 10  # bytes of a node's telemetry that hold its last sample
_LAST_OUTPUT = 256 << 10  # bytes of the scheduler's output file
_HEAD = 16 << 10  # bytes at the start of each node's metrics that show how it began
_FAR = 1 << 20  # bytes from the end of a node's metrics in which its ranks' paces are looked for
_MANY = 64  # nodes: with more, only some are asked how they began


# The logs of an attempt: two files per rank, or one file per node if the job is large, and the launcher's own output.


_RANK = regex(r"rank-(\d{1,9})\.(out|err)")
_LAUNCHER = regex(r"(?:launcher|torchrun)\.(out|err)")
# A rank's line that was copied into the script's own log: it is in the rank's log too.
_COPY = regex(r"\[rank \d{1,9}\] ")
_MERGED_LINE = regex(r"(\d{1,9}) (out|err) (.*)", re.DOTALL)


@dataclass(frozen=True)
class Log:
    name: str  # relative to its Files
    node: int
    attempt: int
    rank: Optional[int] = None  # None: several ranks, or a launcher
    stream: str = ""  # out, err; empty: both
    merged: bool = False
    launcher: bool = False

    def is_copy(self, text: str) -> bool:
        """Return true if this line of a launcher's log is a copy of a rank's line."""
        return self.launcher and _COPY.match(text) is not None

    def parsed(self, texts: Iterable[str]) -> Iterator[Line]:
        """Yield the parsed lines of this file."""
        found = (self.line(text) for text in texts if not self.is_copy(text))
        return (line for line in found if line)

    def line(self, text: str) -> Optional[Line]:
        """Parse one line of this file; None for a torn line of a merged log. Of a progress bar only the last state counts,
        as on a terminal."""
        if not self.merged:
            return Line(self.node, self.attempt, self.rank, self.stream, last_state(text))
        found = _MERGED_LINE.fullmatch(text)
        return Line(self.node, self.attempt, int(found[1]), found[2], last_state(found[3])) if found else None


def list_logs(files: Files, node: NodeFolder, attempt: int) -> List[Log]:
    """List logs by rank, standard output before standard error; the launcher's own come last."""
    folder = node.attempt(attempt)
    names = files.names(folder)
    ranked = [found for found in map(_RANK.fullmatch, names) if found]
    logs = [Log(os.path.join(folder, each[0]), node.node, attempt, int(each[1]), each[2]) for each in ranked]
    logs.sort(key=lambda log: (log.rank, log.stream != "out"))
    if os.path.basename(node.merged(attempt)) in names:
        logs.append(Log(node.merged(attempt), node.node, attempt, merged=True))
    own = sorted((found for found in map(_LAUNCHER.fullmatch, names) if found), key=lambda each: each[1] != "out")
    return logs + [Log(os.path.join(folder, each[0]), node.node, attempt, None, each[1], launcher=True) for each in own]


@dataclass(frozen=True)
class EndedRank:
    rank: int
    node: int
    exit_code: Optional[int]
    signal: Optional[int]
    t: float  # the lead's clock
    of_command: bool = False  # how its node's command ended, which had started it

    @property
    def failed(self) -> bool:
        return self.exit_code != 0

    @property
    def words(self) -> str:
        how = f"ended by signal {self.signal}" if self.signal else f"ended with {self.exit_code}"
        return f"its command {how}" if self.of_command else how


@dataclass(frozen=True)
class Ranks:
    """Ranks of the last attempt: how many were started, and which have ended. Ranks that a node's command starts (a launcher, a
    script) are counted by their logs; without logs of their own they are not counted."""

    started: int = 0
    ended: Tuple[EndedRank, ...] = ()
    commands: int = 0  # nodes whose command starts its ranks itself
    counted: bool = True
    seen: Optional[int] = None  # in one world; None: unknown


@dataclass(frozen=True)
class Run:
    path: str
    record: RunRecord
    files: Files = field(compare=False)

    @classmethod
    def open(cls, path: str, files: Optional[Files] = None) -> Run:
        """Open a run folder. RecordError if it holds no run, or one of a newer drumbeat."""
        path = os.path.abspath(path)
        files = files or Files(path)
        return cls(path, read_run_record(path, files), files)

    @property
    def run_id(self) -> str:
        return self.record.run_id

    @property
    def folder(self) -> RunFolder:
        """Return the folder's paths, for code that writes."""
        return RunFolder(self.path)

    def ask_to_stop(self, word: str, reason: str) -> bool:
        """Ask the lead to stop, wherever its folder is; false if the lead cannot be reached. `word`: one of layout.WORDS."""
        return self.files.append(_AT.stop, stop_line(word, reason))

    def was_cancelled(self) -> bool:
        """Return true if `drumbeat cancel` has asked the lead to stop."""
        return any(line.startswith(b"CANCEL") for line in (self.files.read(_AT.stop) or b"").splitlines())

    # -- whole files -------------------------------------------------------------------------------------------------

    def order(self) -> Optional[Order]:
        """Return the order. RecordError for an order of a newer drumbeat."""
        data = self.files.read(_AT.order)
        if data is None:
            return None
        try:
            return load_order(data.decode("utf-8", "replace"), os.path.join(self.path, _AT.order))
        except (AssertionError, OverflowError) as error:
            raise RecordError(f"{self.path}/{_AT.order}: {error}") from None

    def summary(self) -> Optional[Summary]:
        """Return the summary; None while the run goes on, or if nobody could write it."""
        return parse_summary(read_json(_AT.summary, self.files), os.path.join(self.path, _AT.summary))

    def members(self) -> Tuple[Member, ...]:
        peers = read_json(_AT.peers, self.files) or {}
        nodes = peers.get("nodes")
        found = [parse_member(each) for each in nodes] if isinstance(nodes, list) else []
        return tuple(member for member in found if member)

    def facts(self, node: int) -> Optional[Facts]:
        from drumbeat.machine.model import Facts

        data = read_json(_AT.node(node).facts, self.files)
        try:
            return None if data is None else from_plain(Facts, data)
        except (RecordError, AssertionError, OverflowError):
            return None

    def environment(self, node: int) -> Dict[str, Any]:
        """Return every variable that the node's ranks were given, with reason and source, and the ranks' binding;
        {} if unknown."""
        return read_json(_AT.node(node).environment, self.files) or {}

    def code(self) -> Dict[str, Any]:
        """Identify the code: commit, whether files differ from it, the image's digest; {} if unknown."""
        return read_json(_AT.code, self.files) or {}

    def packages(self) -> Dict[str, Any]:
        """Return versions of the Python packages that node 0 found: `packages`, and the `folders` they are in; {} if
        unknown."""
        return read_json(_AT.packages, self.files) or {}

    def results(self, name: str, node: int = 0) -> Optional[Dict[str, Any]]:
        """Return the content of a JSON file that a rank has left in the last attempt's folder."""
        attempts = self.attempts(node)
        return read_json(os.path.join(_AT.node(node).attempt(attempts[-1]), name), self.files) if attempts else None

    def output(self) -> List[str]:
        """Return the names of the files that the scheduler's job printed into, the newest last."""
        found = [self.record.output] if self.record.output else []
        found += sorted(name for name in self.files.names("") if name.endswith(".out"))
        return [name for name in dict.fromkeys(found) if self.files.chunk(name, 0, 1) is not None]

    def output_lines(self, names: Sequence[str]) -> List[str]:
        """Return the last lines of these output files of the scheduler's job."""
        return [line for name in names for line in self.files.end(name, _LAST_OUTPUT)[0].splitlines()]

    # -- nodes, attempts, logs ---------------------------------------------------------------------------------------

    def nodes(self) -> List[int]:
        """Return the node ranks that have a folder here."""
        return sorted(int(name) for name in self.files.names("nodes") if name.isdecimal())

    def size(self) -> int:
        """Return the number of nodes of the run; 0 if its order cannot be read."""
        try:
            order = self.order()
        except RecordError:
            return 0
        return order.nodes if order else 0

    def attempts(self, node: Optional[int] = None) -> List[int]:
        """Return the attempts that a node took part in, or those of the run if no node is given."""
        nodes = self.nodes() if node is None else [node]
        names = {name for each in nodes for name in self.files.names(_AT.node(each).path)}
        return sorted(int(name[8:]) for name in names if name.startswith("attempt-") and name[8:].isdecimal())

    def array(self) -> List[Run]:
        """Return the runs of a job array; each task has a run folder of its own."""
        tasks = sorted((name for name in self.files.names("array") if name.isdecimal()), key=int)
        runs = []
        for name in tasks:
            try:
                runs.append(Run.open(os.path.join(self.path, "array", name)))
            except RecordError:
                continue
        return runs

    def logs(self, attempt: Optional[int] = None, rank: Optional[int] = None) -> List[Log]:
        """Return the logs of one attempt, by default the last; in large runs one log per node holds all its ranks."""
        numbers = self.attempts()[-1:] if attempt is None else [attempt]
        found = [
            log for number in numbers for node in self.nodes() for log in list_logs(self.files, _AT.node(node), number)
        ]
        return [log for log in found if rank is None or log.rank == rank or log.merged]

    def nccl_logs(self) -> List[Tuple[int, str]]:
        """Return node and name of each file that NCCL wrote in the last attempt: a trace, or a log that was kept
        after a failure."""
        found = []
        for attempt in self.attempts()[-1:]:
            for node in self.nodes():
                folder = _AT.node(node).attempt(attempt)
                names = sorted(name for name in self.files.names(folder) if name.startswith("nccl-"))
                found += [(node, os.path.join(folder, name)) for name in names]
        return found

    def lines(self, log: Log) -> Iterator[Line]:
        """Yield all lines of a log, read in pieces."""
        return log.parsed(Tail(log.name, 0, self.files).rest())

    def last_lines(self, log: Log, size: int = 64 << 10) -> List[Line]:
        """Return the lines in the last `size` bytes of a log."""
        *whole, rest = self.files.end(log.name, size)[0].split("\n")
        return list(log.parsed([*whole, rest] if rest else whole))

    # -- records -----------------------------------------------------------------------------------------------------

    def clock_offsets(self) -> Dict[int, float]:
        """Return the seconds to add to a node's clock to get the lead's."""
        return {member.node: member.clock_offset for member in self.members()}

    def run_events(self) -> List[Event]:
        """Return the lead's events, in its order."""
        return list(self._read(_AT.events, parse_event))

    def last_run_events(self) -> List[Event]:
        """Return the last of the lead's events: they tell how the run ended, however many nodes joined before."""
        return list(_records(self.files.end(_AT.events, _LAST_EVENTS)[0].split("\n"), parse_event))

    def node_events(self, node: int) -> Iterator[Event]:
        """Yield one node's events, by its own clock."""
        return self._read(_AT.node(node).events, parse_event)

    def events(self) -> List[Event]:
        """Return all events of all nodes, by the lead's clock."""
        offsets = self.clock_offsets()
        found = self.run_events()
        for node in self.nodes():
            shift = offsets.get(node, 0.0)
            found += (dataclasses.replace(event, t=event.t + shift) for event in self.node_events(node))
        return sorted(found, key=lambda event: (event.t, event.node, event.seq))

    def verdicts(self) -> List[Verdict]:
        return [event.verdict for event in self.run_events() if isinstance(event, kinds.VerdictGiven)]

    def metrics(self, node: int) -> Iterator[Metric]:
        return self._read(_AT.node(node).metrics, lambda data: parse_metric(data, node))

    def metric_lines(self, node: int) -> Iterator[str]:
        """Yield the raw lines that `metrics` parses, for readers that need few of them."""
        return Tail(_AT.node(node).metrics, 0, self.files).rest()

    def telemetry(self, node: int) -> Iterator[Sample]:
        return self._read(_AT.node(node).telemetry, lambda data: parse_sample(data, node))

    def latest_sample(self, node: int) -> Optional[Sample]:
        """Return the latest sample of the node's devices."""
        lines = reversed(self.files.end(_AT.node(node).telemetry, _LAST_SAMPLES)[0].split("\n"))
        return next(_records(lines, lambda data: parse_sample(data, node)), None)

    # -- what the records say ----------------------------------------------------------------------------------------

    def attempt_ends(self) -> List[AttemptEnd]:
        """Return the attempts in the run's events. An attempt without an end was cut off: its node, or the whole
        job, was killed."""
        found: List[AttemptEnd] = []
        for event in self.run_events():
            if isinstance(event, kinds.AttemptStarted):
                found.append(AttemptEnd(event.attempt, "cut off", None))
            elif found and isinstance(event, kinds.Failed):
                found[-1] = dataclasses.replace(found[-1], finding=event.finding)
            elif found and isinstance(event, kinds.AttemptEnded):
                found[-1] = dataclasses.replace(found[-1], outcome=event.outcome, exit_code=event.exit_code)
        return found

    def ranks(self) -> Ranks:
        """Return the ranks of the last attempt, from the nodes' own events and the logs of ranks that a command has started."""
        offsets = self.clock_offsets()
        attempt, started = -1, 0
        commands: List[int] = []  # nodes
        ends: List[Tuple[int, kinds.RankExited]] = []
        for node in self.nodes():
            for event in self.node_events(node):
                if not isinstance(event, (kinds.RankStarted, kinds.RankExited)) or event.attempt < attempt:
                    continue
                if event.attempt > attempt:
                    attempt, started, commands, ends = event.attempt, 0, [], []
                if isinstance(event, kinds.RankExited):
                    ends.append((node, event))
                elif event.of_command:
                    commands.append(node)
                else:
                    started += 1
        logged = {node: self._logged_ranks(node, attempt) for node in commands}
        ended: Dict[int, EndedRank] = {}
        for node, event in ends:
            t = event.t + offsets.get(node, 0.0)
            for rank in (event.of_command and logged.get(node)) or [event.rank]:
                ended.setdefault(rank, EndedRank(rank, node, event.exit_code, event.signal, t, event.of_command))
        in_order = tuple(sorted(ended.values(), key=lambda end: (end.t, end.rank)))
        counted = all(each is not None for each in logged.values())
        started += sum(len(each or ()) for each in logged.values())
        return Ranks(started, in_order, len(commands), counted, ranks_seen(self.run_events()))

    def progress(self, parts: Optional[Mapping[int, Progress]] = None) -> Progress:
        """Return the run's progress, and its speed in this attempt. `parts`: the nodes' progress, if already read."""
        parts, offsets, first = parts or self.parts(), self.clock_offsets(), Progress()
        nodes = sorted(parts)
        for node in nodes:
            if len(nodes) > _MANY and first.first_loss is not None:
                break
            head = self.files.chunk(_AT.node(node).metrics, 0, _HEAD)
            for metric in _metrics((head.data if head else b"").decode("utf-8", "replace").split("\n")[:-1], node):
                first.add(metric)
        total = merged((parts[node], offsets.get(node, 0.0)) for node in nodes)
        if first.first_loss is not None:
            total.first_loss, total.first_loss_step = first.first_loss, first.first_loss_step
        if first.first_validation is not None:
            total.first_validation = first.first_validation
        return total

    def losses(self) -> List[float]:
        """Return the finite losses of the lowest rank that reports any; for a long run, only those at both ends of its record."""
        found: Dict[Tuple[int, bool], List[float]] = {}  # by rank, and those of a step first: not an epoch's average
        for node in self.nodes()[:_MANY]:
            name = _AT.node(node).metrics
            text, whole = self.files.end(name, _FAR)
            head = None if whole else self.files.chunk(name, 0, _FAR)
            lines = (
                text.split("\n")
                if head is None
                else [*head.data.decode("utf-8", "replace").split("\n"), *text.split("\n")]
            )
            for metric in _metrics(lines, node):
                if metric.kind == "step" and metric.loss is not None and math.isfinite(metric.loss):
                    found.setdefault((metric.rank, metric.step is None), []).append(metric.loss)
            if found:
                break
        return found[min(found)] if found else []

    def parts(self, paced: bool = False, stepped: bool = False) -> Dict[int, Progress]:
        """Return the progress of each node in this attempt; `stepped`: in the last one with steps; `paced`: with the paces of all
        its ranks. Only the end of a long file is read: there the agent writes the sum of everything before."""
        return {node: self._counted(node, paced, stepped) for node in self.nodes()}

    def _counted(self, node: int, paced: bool, stepped: bool) -> Progress:
        size, whole, part = _HEAD, False, None
        while part is None:
            text, whole = self.files.end(_AT.node(node).metrics, size)
            lines = text.split("\n")[:-1]
            part = _part(lines, node, paced, stepped)
            # an earlier drumbeat recorded no paces, or no sum has been written yet
            if part is None and (whole or size >= _FAR):
                part = _part(lines, node, stepped=stepped) or (_added(Progress(), lines, node) if whole else None)
            size *= 8
        return part

    def ledger(self, now: float, progress: Progress) -> Dict[str, float]:
        """Return the time spent in each part of the ledger: from the summary, else from the events up to `now`."""
        try:
            summary = self.summary()
        except RecordError:
            summary = None
        if summary and summary.ledger:
            return {**dict.fromkeys(PARTS, 0.0), **summary.ledger}
        queued = any(self.files.chunk(name, 0, 0) is not None for name in (_AT.script, _AT.desk_log))
        events = self.run_events()
        begin = self.record.created or (events[0].t if events else now)
        return ledger(begin, now, events, queued, progress)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _read(self, name: str, parse: Callable[[Dict[str, Any]], Optional[T]]) -> Iterator[T]:
        return _records(Tail(name, 0, self.files).rest(), parse)

    def _logged_ranks(self, node: int, attempt: int) -> Optional[List[int]]:
        """Return the ranks that a node's command has started so far; None if they have no logs of their own: then the command is
        not a launcher of ours, or all logs are in one file."""
        logs = list_logs(self.files, _AT.node(node), attempt)
        if any(log.merged for log in logs) or not any(log.launcher for log in logs):
            return None
        return sorted({log.rank for log in logs if log.rank is not None})


_AT = RunFolder("")  # names relative to the run folder


def _records(lines: Iterable[str], parse: Callable[[Dict[str, Any]], Optional[T]]) -> Iterator[T]:
    """Yield the result of `parse` for each line of JSON; lines that cannot be used are left out."""
    found = (parse(data) for data in map(decode, lines) if data is not None)
    return (record for record in found if record is not None)


def _part(lines: Sequence[str], node: int, paced: bool = False, stepped: bool = False) -> Optional[Progress]:
    """Return the sum of a node's metrics from their last lines; None if none of these lines holds the sum so far."""
    for at in range(len(lines) - 1, -1, -1):
        so_far = parse_so_far(decode(lines[at]) or {}, node) if SO_FAR in lines[at] else None
        if so_far and (not paced or PACES in so_far.progress):
            try:
                part = _added(Progress.restored(so_far.progress), lines[at + 1 :], node)
            except RecordError:
                continue
            if part.reports or not stepped:
                return part
    return None


def _added(part: Progress, lines: Iterable[str], node: int) -> Progress:
    for metric in _metrics(lines, node):
        part.add(metric)
    return part


def _metrics(lines: Iterable[str], node: int) -> Iterator[Metric]:
    for line in lines:
        metric = parse_metric(decode(line) or {}, node)
        if metric:
            yield metric


def lost_spares(events: Iterable[Event]) -> Tuple[str, ...]:
    """Name the nodes that were lost while they had no ranks."""
    lost = (event for event in events if isinstance(event, kinds.NodeLost) and event.spare)
    return tuple(f"node {each.peer} ({each.peer_host}), which had no ranks" for each in lost)


def spares_left(events: Iterable[Event]) -> int:
    """Return the number of nodes that waited without a role when the last attempt began."""
    return next((len(each.spares) for each in reversed(list(events)) if isinstance(each, kinds.AttemptStarted)), 0)


# The time by the clock of a run's lead, whose records a desk reads: the desk's own clock may differ by minutes.


class LeadClock:
    """The lead's clock for a view that keeps running: the newest record's time plus the time passed here since it was read."""

    def __init__(self) -> None:
        self._newest: Optional[float] = None
        self._read = 0.0

    def saw(self, t: float) -> None:
        """Note a record's time, by the lead's clock."""
        if self._newest is None or t > self._newest:
            self._newest, self._read = t, time.monotonic()

    def now(self) -> float:
        """Return the lead's time; the local time while there is no record."""
        return time.time() if self._newest is None else self._newest + time.monotonic() - self._read


def lead_now(run: Run) -> float:
    """Return the lead's time for a single reading: the local clock if the lead is on this machine, else the time of its newest
    record. While its node is alive that record is a few seconds old, because devices are sampled all the time."""
    lead = next((member for member in run.members() if member.node == 0), None)
    if lead is None or lead.host == socket.gethostname():
        return time.time()
    sample, events = run.latest_sample(0), run.last_run_events()
    if sample is None:
        return time.time()
    return max(sample.t + lead.clock_offset, *(event.t for event in events), sample.t)
