"""Values derived from a run folder's records: attempts, ranks, progress. `Run` has them as methods."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Dict, Iterable, Iterator, List, Mapping, Optional, Protocol, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.record import RecordError
from drumbeat.base.regex import regex
from drumbeat.runfolder import events as kinds
from drumbeat.runfolder.events import Event
from drumbeat.runfolder.files import Files, decode
from drumbeat.runfolder.layout import NodeFolder, RunFolder
from drumbeat.runfolder.progress import Progress, merged
from drumbeat.runfolder.records import SO_FAR, Line, Metric, parse_metric, parse_so_far
from drumbeat.runfolder.state import ranks_seen
from drumbeat.runfolder.summary import AttemptEnd

# The logs of an attempt: two files per rank, or one file per node where the job is large, and a launcher's own
# output.


_RANK = regex(r"rank-(\d{1,9})\.(out|err)")
_LAUNCHER = regex(r"(?:launcher|torchrun)\.(out|err)")
# A rank's line, copied for the script's own log: it is in the rank's log too.
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
        """Return true if this line of a launcher's log is one of its ranks' own."""
        return self.launcher and _COPY.match(text) is not None

    def line(self, text: str) -> Optional[Line]:
        """Return the line that a line of this file stands for; None for a torn one of a merged log."""
        if not self.merged:
            return Line(self.node, self.attempt, self.rank, self.stream, text)
        found = _MERGED_LINE.fullmatch(text)
        return Line(self.node, self.attempt, int(found[1]), found[2], found[3]) if found else None


def list_logs(files: Files, node: NodeFolder, attempt: int) -> List[Log]:
    """List logs by rank, standard output before standard error; then the launcher's own."""
    folder = node.attempt(attempt)
    names = files.names(folder)
    ranked = [found for found in map(_RANK.fullmatch, names) if found]
    logs = [Log(os.path.join(folder, each[0]), node.node, attempt, int(each[1]), each[2]) for each in ranked]
    logs.sort(key=lambda log: (log.rank, log.stream != "out"))
    if os.path.basename(node.merged(attempt)) in names:
        logs.append(Log(node.merged(attempt), node.node, attempt, merged=True))
    own = sorted((found for found in map(_LAUNCHER.fullmatch, names) if found), key=lambda each: each[1] != "out")
    return logs + [Log(os.path.join(folder, each[0]), node.node, attempt, None, each[1], launcher=True) for each in own]


_RECENT = 1 << 20  # bytes of metrics that are read to say how fast a run is now, over all nodes
_HEAD = 16 << 10  # bytes of each node's metrics that tell how it began
_MANY = 64  # nodes: of more, not every one is asked how it began
_AT = RunFolder("")  # names relative to the run folder


class Records(Protocol):
    """The part of a `Run` that is needed here."""

    @property
    def files(self) -> Files: ...

    def nodes(self) -> List[int]: ...

    def run_events(self) -> List[Event]: ...

    def node_events(self, node: int) -> Iterator[Event]: ...

    def clock_offsets(self) -> Dict[int, float]: ...


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
    """Ranks of the last attempt: how many were started, and those that have ended. Ranks that a node's command starts (a
    launcher, a script) are counted by their logs; without logs of their own they are not counted."""

    started: int = 0
    ended: Tuple[EndedRank, ...] = ()
    commands: int = 0  # nodes whose command starts its ranks itself
    counted: bool = True
    seen: Optional[int] = None  # in one world, whoever started them; None: not known


def replaced_nodes(events: Iterable[Event]) -> Tuple[str, ...]:
    """Say which spares replaced which nodes."""
    return tuple(words for event in events if isinstance(event, kinds.Decided) for words in event.replaced)


def lost_spares(events: Iterable[Event]) -> Tuple[str, ...]:
    """Name the nodes that were lost while they had no ranks."""
    lost = (event for event in events if isinstance(event, kinds.NodeLost) and event.spare)
    return tuple(f"node {each.peer} ({each.peer_host}), which had no ranks" for each in lost)


def spares_left(events: Iterable[Event]) -> int:
    """Return nodes that waited without a role when the last attempt began."""
    return next((len(each.spares) for each in reversed(list(events)) if isinstance(each, kinds.AttemptStarted)), 0)


def attempt_ends(run: Records) -> List[AttemptEnd]:
    """Return the attempts in the run's events. One without an end was cut off: its node, or the whole job, was killed."""
    found: List[AttemptEnd] = []
    for event in run.run_events():
        if isinstance(event, kinds.AttemptStarted):
            found.append(AttemptEnd(event.attempt, "cut off", None))
        elif found and isinstance(event, kinds.Failed):
            found[-1] = dataclasses.replace(found[-1], finding=event.finding)
        elif found and isinstance(event, kinds.AttemptEnded):
            found[-1] = dataclasses.replace(found[-1], outcome=event.outcome, exit_code=event.exit_code)
    return found


def ranks(run: Records) -> Ranks:
    """Return the ranks of the last attempt, by the nodes' own events and by the logs of ranks that a command has started."""
    offsets = run.clock_offsets()
    attempt, started = -1, 0
    commands: List[int] = []  # nodes
    ends: List[Tuple[int, kinds.RankExited]] = []
    for node in run.nodes():
        for event in run.node_events(node):
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
    logged = {node: _logged_ranks(run, node, attempt) for node in commands}
    ended: Dict[int, EndedRank] = {}
    for node, event in ends:
        t = event.t + offsets.get(node, 0.0)
        for rank in (event.of_command and logged.get(node)) or [event.rank]:
            ended.setdefault(rank, EndedRank(rank, node, event.exit_code, event.signal, t, event.of_command))
    in_order = tuple(sorted(ended.values(), key=lambda end: (end.t, end.rank)))
    counted = all(each is not None for each in logged.values())
    started += sum(len(each or ()) for each in logged.values())
    return Ranks(started, in_order, len(commands), counted, ranks_seen(run.run_events()))


def _logged_ranks(run: Records, node: int, attempt: int) -> Optional[List[int]]:
    """Return the ranks that a node's command has started so far; None if they have no logs of their own: then the command
    is not a launcher of ours, which has one as well, or the logs are one file."""
    logs = list_logs(run.files, _AT.node(node), attempt)
    if any(log.merged for log in logs) or not any(log.launcher for log in logs):
        return None
    return sorted({log.rank for log in logs if log.rank is not None})


def progress(run: Records) -> Progress:
    """Return how far the run is, and its speed in this attempt. Of long files only the ends are read: there the agent says
    what everything before adds up to."""
    nodes = run.nodes()
    size = max(_HEAD, _RECENT // max(1, len(nodes)))
    offsets = run.clock_offsets()
    first = Progress()
    parts: Dict[int, Progress] = {}
    ends: Dict[int, List[str]] = {}
    exact = True
    for node in nodes:
        head, ends[node], whole = _ends(run, _AT.node(node).metrics, size)
        if len(nodes) <= _MANY or first.first_loss is None:
            for metric in _metrics(head, node):
                first.add(metric)
        parts[node], counted = _part(ends[node], node)
        exact = exact and (counted or whole)
    if exact:
        total = merged((parts[node], offsets.get(node, 0.0)) for node in nodes)
    else:
        total = _recent({node: list(_metrics(lines, node)) for node, lines in ends.items()}, offsets)
    if first.first_loss is not None:
        total.first_loss, total.first_loss_step = first.first_loss, first.first_loss_step
    if first.first_validation is not None:
        total.first_validation = first.first_validation
    return total


def _part(lines: Sequence[str], node: int) -> Tuple[Progress, bool]:
    """Return what a node's last lines add up to, and whether one of them says what came before."""
    part, counted, begin = Progress(), False, 0
    for at in range(len(lines) - 1, -1, -1):
        so_far = parse_so_far(decode(lines[at]) or {}, node) if SO_FAR in lines[at] else None
        if so_far:
            try:
                part, counted, begin = Progress.restored(so_far.progress), True, at + 1
                break
            except RecordError:
                continue
    for metric in _metrics(lines[begin:], node):
        part.add(metric)
    return part, counted


def _recent(ends: Mapping[int, Sequence[Metric]], offsets: Mapping[int, float]) -> Progress:
    """Restrict to the time that the ends of all files cover, if the files do not say what their beginning adds up to."""
    recent: List[Metric] = []
    starts: List[float] = []
    for node, metrics in ends.items():
        shift = offsets.get(node, 0.0)
        steps = [metric.t + shift for metric in metrics if metric.kind == "step"]
        starts += [min(steps)] if steps else []
        recent += [metric._replace(t=metric.t + shift) if shift else metric for metric in metrics]
    total = Progress()
    begin = max(starts, default=0.0)
    for metric in sorted(recent, key=lambda metric: metric.t):
        if metric.t >= begin or metric.kind != "step":
            total.add(metric)
    return total


def _ends(run: Records, name: str, size: int) -> Tuple[List[str], List[str], bool]:
    """Return the first and the last lines of a file: the first `_HEAD` bytes, the last `size`; and whether those are all
    of it."""
    found = run.files.chunk(name, 0, _HEAD)
    if found is None:
        return [], [], True
    last = run.files.chunk(name, max(0, found.size - size), size)
    texts = (last.data if last else b"").decode("utf-8", "replace").split("\n")[:-1]
    head = found.data.decode("utf-8", "replace").split("\n")[:-1]
    whole = found.size <= size
    return head, texts if whole else texts[1:], whole


def _metrics(lines: Iterable[str], node: int) -> Iterator[Metric]:
    for line in lines:
        metric = parse_metric(decode(line) or {}, node)
        if metric:
            yield metric
