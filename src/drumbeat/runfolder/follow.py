"""`Follower`: the records added to a run folder since the last poll.

The cost of a poll does not grow with the run's length: each file is read from where the last poll stopped, a poll opens a limited
number of files and reads a limited number of bytes, and logs of attempts that are over are dropped once they are read. In a large
run the nodes take turns. New attempts, files that are cut short or replaced, and folders that vanish for a while are all
expected.
"""

from __future__ import annotations

from collections import deque
from dataclasses import field
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, Optional, Tuple, Union

from drumbeat.base.light_dataclass import dataclass
from drumbeat.runfolder.events import Event, parse_event
from drumbeat.runfolder.files import Files, Tail, decode
from drumbeat.runfolder.layout import NodeFolder, RunFolder
from drumbeat.runfolder.records import Line, Metric, Sample, SoFar, parse_metric, parse_sample, parse_so_far
from drumbeat.runfolder.run import Log, Run, list_logs

Record = Union[Event, Line, Metric, Sample, SoFar]

EVENTS, METRICS, TELEMETRY, LINES = "events", "metrics", "telemetry", "lines"
_FILES = 512  # files opened per poll
_BYTES = 8 << 20  # bytes read per poll
_BYTES_PER_FILE = 1 << 20
_LIST_EVERY = 16  # polls between two searches for nodes that no record has named

_AT = RunFolder("")


@dataclass
class _Budget:
    """The number of files and bytes that one poll may still read."""

    files: int = _FILES
    bytes: int = _BYTES

    @property
    def spent(self) -> bool:
        return self.files <= 0 or self.bytes <= 0


@dataclass
class _LogTail:
    log: Log
    tail: Tail
    over: bool = False  # a later attempt has begun


@dataclass
class _Node:
    """The files of one node that are followed."""

    number: int
    tails: Dict[str, Tail]  # kind of record -> its file
    logs_at: NodeFolder
    logs_files: Files
    logs: Dict[str, _LogTail] = field(default_factory=dict)
    attempt: int = -1  # the newest one that is known; logs of earlier ones are only read to their end

    @property
    def behind(self) -> bool:
        return any(tail.behind for tail in self.tails.values()) or any(each.tail.behind for each in self.logs.values())


class Follower:
    """Reads what is added to a run folder. `nodes`: only these; `what`: kinds of records; `rank`: lines of this rank alone;
    `attempts`: lines of the first to the last of these; `from_end`: only what is written from now on; `thin`: of existing metrics
    and telemetry, read only this many last bytes per file, and of samples written since the last poll, only every so many, always
    including the last. `damaged` counts lines that could not be used."""

    def __init__(
        self,
        run: Run,
        nodes: Optional[Iterable[int]] = None,
        what: Iterable[str] = (EVENTS, METRICS, TELEMETRY, LINES),
        rank: Optional[int] = None,
        attempts: Tuple[int, Optional[int]] = (0, None),
        from_end: bool = False,
        thin: Tuple[Optional[int], int] = (None, 1),
    ) -> None:
        self.run, self.rank, self.what = run, rank, frozenset(what)
        self.first_attempt, self.last_attempt = attempts
        self.damaged, (self._recent, self._every) = 0, thin
        self.behind = False  # the last poll could not read everything that was there
        self._chosen = None if nodes is None else sorted(nodes)
        self._nodes: Dict[int, _Node] = {}
        self._turn: Deque[int] = deque()  # nodes, the one that has waited longest first
        self._size = 0 if nodes is not None else run.size()
        self._polls = 0
        self._events = Tail(_AT.events, 0, run.files)
        self._find_nodes()
        if from_end:
            self._skip()

    def read_logs_from(self, node: int, path: str) -> None:
        """Read this node's lines from another folder: ranks of a large job write to node-local storage."""
        state = self._node(node)
        state.logs_at, state.logs_files, state.logs = NodeFolder("", node), Files(path), {}

    def poll(self) -> List[Record]:
        """Return new records, up to a fixed amount; call again at once if `behind`."""
        return self._poll(_Budget())

    def drain(self) -> Iterator[List[Record]]:
        """Yield the remaining records piece by piece once nobody writes any more, including a last line without an
        end of line."""
        self._polls = 0  # search for nodes once more
        while True:
            budget = _Budget(files=1 << 30)
            yield self._poll(budget)
            if not self.behind and not budget.spent:
                break
        if EVENTS in self.what:
            yield self._read(self._events, parse_event, _Budget(), final=True)
        for state in self._nodes.values():
            yield self._poll_node(state, _Budget(files=1 << 30), final=True)

    def skip_lines(self, keep: int) -> int:
        """Skip the ranks' output except the last `keep` bytes of each log; return how many bytes were skipped."""
        return sum(each.tail.leave_out(keep) for state in self._nodes.values() for each in state.logs.values())

    # -- inside ------------------------------------------------------------------------------------------------------

    def _poll(self, budget: _Budget) -> List[Record]:
        records: List[Record] = []
        if EVENTS in self.what:
            records += self._read(self._events, parse_event, budget)
        self._find_nodes()
        for _ in range(len(self._turn)):
            if budget.spent:
                break
            records += self._poll_node(self._nodes[self._turn[0]], budget)
            self._turn.rotate(-1)
        self.behind = self._events.behind or any(state.behind for state in self._nodes.values())
        return records

    def _poll_node(self, state: _Node, budget: _Budget, final: bool = False) -> List[Record]:
        records: List[Record] = []
        number = state.number
        if EVENTS in state.tails:
            records += self._read(state.tails[EVENTS], parse_event, budget, final)
        if METRICS in state.tails:
            records += self._read(state.tails[METRICS], lambda data: _metric(data, number), budget, final)
        if TELEMETRY in state.tails:
            tail, every = state.tails[TELEMETRY], self._every
            records += self._read(tail, lambda data: parse_sample(data, number), budget, final, every)
        if LINES in self.what:
            self._find_logs(state, budget)
            for name, each in list(state.logs.items()):
                records += self._read_log(each, budget, final)
                if each.over and not each.tail.behind:
                    del state.logs[name]
        return records

    def _read(
        self,
        tail: Tail,
        parse: Callable[[Dict[str, Any]], Optional[Record]],
        budget: _Budget,
        final: bool = False,
        every: int = 1,
    ) -> List[Record]:
        records: List[Record] = []
        texts = self._texts(tail, budget, final)
        for text in texts if every == 1 else reversed(texts[::-every]):
            data = decode(text)
            record = None if data is None else parse(data)
            if record is not None:
                records.append(record)
            elif text.strip():
                self.damaged += 1
        return records

    def _read_log(self, each: _LogTail, budget: _Budget, final: bool) -> List[Record]:
        records: List[Record] = []
        for text in self._texts(each.tail, budget, final or each.over):
            if each.log.is_copy(text):
                continue
            line = each.log.line(text)
            if line is None:
                self.damaged += 1
            elif self.rank is None or line.rank == self.rank:
                records.append(line)
        return records

    @staticmethod
    def _texts(tail: Tail, budget: _Budget, final: bool) -> List[str]:
        before = tail.position
        texts = tail.lines(final, _BYTES_PER_FILE)
        budget.files -= 1
        budget.bytes -= max(0, tail.position - before)
        return texts

    def _find_nodes(self) -> None:
        """Find nodes whose folders have appeared; search for all of them only now and then, and only until all are known."""
        self._polls += 1
        if self._chosen is not None:
            numbers = self._chosen
        elif self._polls % _LIST_EVERY == 1 or len(self._nodes) < self._size:
            numbers = self.run.nodes()
        else:
            return
        for number in numbers:
            self._node(number)

    def _node(self, number: int) -> _Node:
        state = self._nodes.get(number)
        if state is None:
            at, files = _AT.node(number), self.run.files
            paths = {EVENTS: at.events, METRICS: at.metrics, TELEMETRY: at.telemetry}
            tails = {kind: Tail(path, 0, files) for kind, path in paths.items() if kind in self.what}
            for kind, tail in tails.items():
                if self._recent is not None and kind != EVENTS:
                    tail.skip(self._recent)
            state = self._nodes[number] = _Node(number, tails, at, files)
            self._turn.append(number)
        return state

    def _find_logs(self, state: _Node, budget: _Budget) -> None:
        """Find logs of the newest attempt, and of any attempt that began since the last look."""
        budget.files -= 2
        names = state.logs_files.names(state.logs_at.path)
        found = [int(name[8:]) for name in names if name.startswith("attempt-") and name[8:].isdecimal()]
        last = max(found, default=0) if self.last_attempt is None else self.last_attempt
        wanted = sorted(number for number in found if max(state.attempt, self.first_attempt) <= number <= last)
        for attempt in wanted:
            for log in list_logs(state.logs_files, state.logs_at, attempt):
                if log.name not in state.logs and (self.rank is None or log.merged or log.rank == self.rank):
                    state.logs[log.name] = _LogTail(log, Tail(log.name, 0, state.logs_files))
        if wanted and wanted[-1] > state.attempt:
            state.attempt = wanted[-1]
            for each in state.logs.values():
                each.over = each.log.attempt < state.attempt

    def _skip(self) -> None:
        """Mark everything that exists now as read."""
        for state in self._nodes.values():
            for tail in state.tails.values():
                tail.skip()
            attempts = self.run.attempts(state.number)
            self.first_attempt = max(self.first_attempt, attempts[-1] + 1 if attempts else 0)
        self._events.skip()


def _metric(data: Dict[str, Any], node: int) -> Union[Metric, SoFar, None]:
    return parse_metric(data, node) or parse_so_far(data, node)
