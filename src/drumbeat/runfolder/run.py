"""`Run`: typed access to one run folder. Every reader goes through it; what is damaged or missing is None or left out.

`Run.open(path)` checks that there is a run of a schema that we know. A `Follower` of it gives what is still written.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from dataclasses import field
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order, load_order
from drumbeat.base.record import RecordError, from_plain
from drumbeat.findings.model import Verdict
from drumbeat.runfolder import derived
from drumbeat.runfolder import events as kinds
from drumbeat.runfolder.derived import Log, Ranks, list_logs
from drumbeat.runfolder.events import Event, parse_event
from drumbeat.runfolder.files import Files, Tail, decode, read_json
from drumbeat.runfolder.layout import RunFolder, stop_line
from drumbeat.runfolder.ledger import PARTS, ledger
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.records import Line, Member, Metric, Sample, parse_member, parse_metric, parse_sample
from drumbeat.runfolder.summary import AttemptEnd, RunRecord, Summary, parse_summary, read_run_record

if TYPE_CHECKING:
    from drumbeat.machine.model import Facts


_LAST_EVENTS = 16 << 10  # bytes of the lead's events that hold how the run ended
_LAST_SAMPLES = 64 << 10  # bytes of a node's telemetry that hold its last sample
_LAST_OUTPUT = 256 << 10  # bytes of the scheduler's output file


@dataclass(frozen=True)
class Run:
    path: str
    record: RunRecord
    files: Files = field(compare=False)

    @classmethod
    def open(cls, path: str, files: Optional[Files] = None) -> Run:
        """Open a run folder. RecordError when there is no run there, or one of a newer drumbeat."""
        path = os.path.abspath(path)
        files = files or Files(path)
        return cls(path, read_run_record(path, files), files)

    @property
    def run_id(self) -> str:
        return self.record.run_id

    @property
    def folder(self) -> RunFolder:
        """Return the paths, for those who write."""
        return RunFolder(self.path)

    def ask_to_stop(self, word: str, reason: str) -> bool:
        """Write a line for the lead, wherever its folder is; false while the lead cannot be reached. `word`: layout.WORDS."""
        return self.files.append(_AT.stop, stop_line(word, reason))

    def was_cancelled(self) -> bool:
        """Return true if `drumbeat cancel` has asked its lead before."""
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

        facts: Optional[Facts] = _parsed(Facts, read_json(_AT.node(node).facts, self.files))
        return facts

    def environment(self, node: int) -> Dict[str, Any]:
        """Return every variable that the node's ranks were given, with reason and source, and their binding; {} if
        unknown."""
        return read_json(_AT.node(node).environment, self.files) or {}

    def code(self) -> Dict[str, Any]:
        """Identify the code: commit, whether files differ from it, the image's digest; {} if unknown."""
        return read_json(_AT.code, self.files) or {}

    def packages(self) -> Dict[str, Any]:
        """Return versions of the Python packages that node 0 found: `packages`, and the `folders` they are in; {} if
        unknown."""
        return read_json(_AT.packages, self.files) or {}

    def results(self, name: str, node: int = 0) -> Optional[Dict[str, Any]]:
        """Return a JSON file that a rank has left in the last attempt's folder."""
        attempts = self.attempts(node)
        return read_json(os.path.join(_AT.node(node).attempt(attempts[-1]), name), self.files) if attempts else None

    def output(self) -> List[str]:
        """Return names of the files that a scheduler's job printed into, the newest last."""
        found = [self.record.output] if self.record.output else []
        found += sorted(name for name in self.files.names("") if name.endswith(".out"))
        return [name for name in dict.fromkeys(found) if self.files.chunk(name, 0, 1) is not None]

    def output_lines(self, names: Sequence[str]) -> List[str]:
        """Return the last lines of these files that a scheduler's job printed into."""
        lines: List[str] = []
        for name in names:
            size = (self.files.chunk(name, 0, 0) or (b"", 0))[1]
            chunk = self.files.chunk(name, max(0, size - _LAST_OUTPUT), _LAST_OUTPUT)
            lines += (chunk.data if chunk else b"").decode("utf-8", "replace").splitlines()
        return lines

    # -- nodes, attempts, logs ---------------------------------------------------------------------------------------

    def nodes(self) -> List[int]:
        """Return node ranks that have a folder here."""
        return sorted(int(name) for name in self.files.names("nodes") if name.isdecimal())

    def size(self) -> int:
        """Number of nodes of the run; 0 if its order cannot be read."""
        try:
            order = self.order()
        except RecordError:
            return 0
        return order.nodes if order else 0

    def attempts(self, node: int = 0) -> List[int]:
        names = self.files.names(_AT.node(node).path)
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
        """Return the logs of one attempt, of the last one if none is named; in large runs one log per node holds all its
        ranks."""
        found: List[Log] = []
        for node in self.nodes():
            numbers = self.attempts(node)[-1:] if attempt is None else [attempt]
            for number in numbers:
                found += list_logs(self.files, _AT.node(node), number)
        return [log for log in found if rank is None or log.rank == rank or log.merged]

    def nccl_logs(self) -> List[Tuple[int, str]]:
        """Return nodes and names of what NCCL wrote in the last attempt: a trace, or a log that was kept after a failure."""
        found = []
        for node in self.nodes():
            for attempt in self.attempts(node)[-1:]:
                folder = _AT.node(node).attempt(attempt)
                names = sorted(name for name in self.files.names(folder) if name.startswith("nccl-"))
                found += [(node, os.path.join(folder, name)) for name in names]
        return found

    def lines(self, log: Log) -> Iterator[Line]:
        """Yield all lines of a log, read in pieces."""
        tail = Tail(log.name, 0, self.files)
        while True:
            texts = tail.lines(final=True)
            for text in texts:
                line = None if log.is_copy(text) else log.line(text)
                if line:
                    yield line
            if not texts and not tail.behind:
                return

    def last_lines(self, log: Log, size: int = 64 << 10) -> List[Line]:
        """Return the lines in the last `size` bytes of a log."""
        found = self.files.chunk(log.name, 0, 0)
        if found is None:
            return []
        chunk = self.files.chunk(log.name, max(0, found.size - size), size)
        texts = (chunk.data if chunk else b"").decode("utf-8", "replace").splitlines()
        own = [text for text in (texts if found.size <= size else texts[1:]) if not log.is_copy(text)]
        lines = (log.line(text) for text in own)
        return [line for line in lines if line]

    # -- records -----------------------------------------------------------------------------------------------------

    def clock_offsets(self) -> Dict[int, float]:
        """Return the seconds to add to a node's clock to get the lead's."""
        return {member.node: member.clock_offset for member in self.members()}

    def run_events(self) -> List[Event]:
        """Return the lead's events, in its order."""
        return list(self._events(_AT.events))

    def last_run_events(self) -> List[Event]:
        """Return the end of the lead's events: how the run ended is there, however many nodes joined before."""
        decoded = (decode(line) for line in self._last_texts(_AT.events, _LAST_EVENTS))
        found = (parse_event(data) for data in decoded if data)
        return [event for event in found if event]

    def node_events(self, node: int) -> Iterator[Event]:
        """Yield one node's events, by its own clock."""
        return self._events(_AT.node(node).events)

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
        for data in self._decoded(_AT.node(node).metrics):
            metric = parse_metric(data, node)
            if metric:
                yield metric

    def telemetry(self, node: int) -> Iterator[Sample]:
        for data in self._decoded(_AT.node(node).telemetry):
            sample = parse_sample(data, node)
            if sample:
                yield sample

    def latest_sample(self, node: int) -> Optional[Sample]:
        """Return the latest sample of the node's devices."""
        for line in reversed(self._last_texts(_AT.node(node).telemetry, _LAST_SAMPLES)):
            data = decode(line)
            sample = parse_sample(data, node) if data else None
            if sample:
                return sample
        return None

    # -- what the records say ----------------------------------------------------------------------------------------

    def attempt_ends(self) -> List[AttemptEnd]:
        """Return the attempts in the run's events. One without an end was cut off: its node, or the whole job, was killed."""
        return derived.attempt_ends(self)

    def ranks(self) -> Ranks:
        """Return the ranks of the last attempt, by the nodes' own events."""
        return derived.ranks(self)

    def progress(self) -> Progress:
        """Return progress and recent speed: from the first and the last metrics of each node, however many there are."""
        return derived.progress(self)

    def ledger(self, now: float, progress: Progress) -> Dict[str, float]:
        """Return the time spent in each part of ledger.py: by the summary, else as far as the events tell at `now`."""
        try:
            summary = self.summary()
        except RecordError:
            summary = None
        if summary and summary.ledger:
            return {**dict.fromkeys(PARTS, 0.0), **summary.ledger}
        queued = self.files.chunk(_AT.script, 0, 0) is not None
        events = self.run_events()
        begin = self.record.created or (events[0].t if events else now)
        return ledger(begin, now, events, queued, progress)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _events(self, name: str) -> Iterator[Event]:
        for data in self._decoded(name):
            event = parse_event(data)
            if event:
                yield event

    def _last_texts(self, name: str, size: int) -> List[str]:
        """Return the lines in the last `size` bytes of a file; the first of them may be torn."""
        found = self.files.chunk(name, 0, 0)
        chunk = self.files.chunk(name, max(0, found.size - size), size) if found else None
        return (chunk.data if chunk else b"").decode("utf-8", "replace").split("\n")

    def _decoded(self, name: str) -> Iterator[Dict[str, Any]]:
        tail = Tail(name, 0, self.files)
        while True:
            texts = tail.lines(final=True)
            for text in texts:
                data = decode(text)
                if data is not None:
                    yield data
            if not texts and not tail.behind:
                return


_AT = RunFolder("")  # names relative to the run folder


def _parsed(record: Any, data: Optional[Dict[str, Any]]) -> Any:
    try:
        return None if data is None else from_plain(record, data)
    except (RecordError, AssertionError, OverflowError):
        return None


# The time by the clock of a run's lead, whose records a desk reads: the desk's own clock may be minutes apart
# from it.


class LeadClock:
    """The lead's clock for a view that goes on: the newest record's time, plus what has passed here since it was read."""

    def __init__(self) -> None:
        self._newest: Optional[float] = None
        self._read = 0.0

    def saw(self, t: float) -> None:
        """Take in a record of this time, by the lead's clock."""
        if self._newest is None or t > self._newest:
            self._newest, self._read = t, time.monotonic()

    def now(self) -> float:
        """Return the lead's time; our own while there is no record."""
        return time.time() if self._newest is None else self._newest + time.monotonic() - self._read


def lead_now(run: Run) -> float:
    """Return the lead's time for a single look: our own clock if the lead is on this machine, else the time of its newest
    record. While its node is alive that is a few seconds ago, as its devices are sampled all the time."""
    lead = next((member for member in run.members() if member.node == 0), None)
    if lead is None or lead.host == socket.gethostname():
        return time.time()
    sample, events = run.latest_sample(0), run.last_run_events()
    if sample is None:
        return time.time()
    return max(sample.t + lead.clock_offset, *(event.t for event in events), sample.t)
