"""Console output of a run in the foreground: one line per event, with the job's own output unchanged in between."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import time
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, TextIO, Tuple

from drumbeat.base.order import Order
from drumbeat.base.ranges import fold, ranges
from drumbeat.base.record import RecordError
from drumbeat.base.redact import visible
from drumbeat.base.regex import regex
from drumbeat.base.text import count, duration, folded, some
from drumbeat.causes.table import HARDWARE
from drumbeat.findings.model import Finding
from drumbeat.metrics.trackers import shown_tracker
from drumbeat.plan.argv import replaced_flags
from drumbeat.runfolder import events as kinds
from drumbeat.runfolder.events import Event
from drumbeat.runfolder.follow import EVENTS, LINES, METRICS, Follower, Record
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.lines import Lines, closing_lines, failed_words, near, progress_line
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.records import Line, Metric
from drumbeat.runfolder.run import LeadClock, Run
from drumbeat.runfolder.state import CODE as HANG
from drumbeat.runfolder.summary import Summary

# Verdicts of nodes, held until all have reported: equal ones become one line.


_MOST = 4  # lines


class NodeVerdicts:
    """Verdicts of all nodes about one attempt."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self._said: Dict[int, str] = {}

    def add(self, node: int, words: str) -> List[str]:
        """Add a node's verdict and return the lines to show once every node has reported; `words` may be empty. Later
        verdicts are shown at once."""
        late = len(self._said) >= self.nodes
        self._said[node] = words
        if late:
            return _lines({node: words})
        return _lines(self._said) if len(self._said) == self.nodes else []

    def take(self) -> List[str]:
        """Return the lines that are still held when the attempt is over; some nodes may not have reported."""
        held = {} if len(self._said) >= self.nodes else self._said
        self._said = {}
        return _lines(held)


def _lines(said: Dict[int, str]) -> List[str]:
    groups: Dict[str, List[int]] = {}
    for node, words in sorted(said.items()):
        if words:
            groups.setdefault(words, []).append(node)
    lines = [
        f"nodes {ranges(nodes, 8)}, each: {words}" if len(nodes) > 1 else f"node {nodes[0]}: {words}"
        for words, nodes in groups.items()
    ]
    more = [f"{len(lines) - _MOST} more differ: drumbeat status --placement"] if len(lines) > _MOST else []
    return lines[:_MOST] + more


# Passes the ranks' output on to the user; a reader that goes away never ends the run.


_OWN_PREFIX = regex(r"\[rank\d+\]: ?")  # torch's, before each line of a traceback


def write_lines(lines: Iterable[Line]) -> None:
    """Write lines by rank. The same error output of several ranks, such as a traceback, is shown once."""
    blocks: Dict[Tuple[Optional[int], str], List[str]] = {}
    for line in lines:
        blocks.setdefault((line.rank, line.stream), []).append(line.text)
    shown: Dict[Tuple[str, ...], List[int]] = {}
    for (rank, stream), texts in sorted(blocks.items(), key=lambda item: (item[0][0] or 0, item[0][1] != "out")):
        if stream == "err" and rank is not None and len(texts) > 1:
            shown.setdefault(tuple(_OWN_PREFIX.sub("", text, count=1) for text in texts), []).append(rank)
        else:
            write(sys.stdout if stream == "out" else sys.stderr, mark(rank), map(visible, texts))
    for block, ranks in shown.items():
        if ranks == [0]:
            write(sys.stderr, "", map(visible, blocks[0, "err"]))
        else:
            write(sys.stderr, f"[{ranges(ranks)}] ", map(visible, block))


def mark(rank: Optional[int]) -> str:
    """Return the prefix of a rank's lines; rank 0 has none."""
    return f"[{rank}] " if rank else ""


def write(stream: TextIO, prefix: str, texts: Iterable[str]) -> None:
    put(stream, "".join(f"{prefix}{text}\n" for text in texts))


def put(stream: TextIO, text: str) -> None:
    """Write text. A reader that went away (`| head`) or a closed terminal costs the view, never the run."""
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


_FLOOD = 2 << 20  # bytes of one log: output beyond this is skipped if ranks print faster than it can be shown
_PROGRESS_EVERY = 15.0  # seconds between progress lines if there is no terminal on which to redraw one
_WAITING_AFTER = 5.0  # seconds after which missing nodes are named
_WAITING_EVERY = 30.0
_ALL_NODES = 64  # up to this many, the lead's console reads the metrics of all nodes; above, only those of its own
_LAUNCHERS = {
    "ranks": "drumbeat starts each rank directly",
    "torchrun": "torchrun starts the ranks of each node",
    "tasks": "each scheduler task is one rank",
    "once": "one process per node",
}
_COLOURS = {
    **dict.fromkeys(("failed", "error", "lost"), 31),
    **dict.fromkeys(("doubt", "warning", "restart", "requeue", "excluded", "stop", "waiting"), 33),
    "end": 1,
}


def opening_lines(order: Order, name: str = "") -> Lines:
    """Return the lines about what will run, and where. `name` is the run's if it differs from the order's."""
    ranks = count(order.ranks_per_node, "rank") if order.ranks_per_node else "one rank per GPU"
    if order.launcher == "once" and order.ranks_per_node == 1:
        ranks = "1 process"  # which may start ranks; their number is known once they run
    where = ", emulated on this machine" if order.nodes_emulated else ""
    spares = f", {count(order.spares, 'spare node')}" if order.spares else ""
    size = f"{count(order.nodes, 'node')} x {ranks}{spares}{where}"
    lines = [("drumbeat", f"{name or order.run_id}: {size} (site {order.site})")]
    lines.append(("launcher", f"{_LAUNCHERS[order.launcher]} ({order.launcher_why})"))
    replaced = replaced_flags(order.command)
    if replaced:
        lines.append(("replaced", f"{replaced} (drumbeat sets these itself)"))
    return [*lines, ("folder", near(order.folder))]


class Console:
    """Shows drumbeat's own lines on standard error, and each line of a rank on the stream to which it was printed."""

    def __init__(
        self,
        order: Order,
        nodes: List[int],
        joined: str = "",
        by_mpirun: bool = False,
        show: Optional[Callable[[str], Any]] = None,
    ) -> None:
        """`show` gets each line, drumbeat's own and those of ranks, in place of the terminal."""
        self._show_line = show
        self.order, self.nodes, self.joined, self.by_mpirun = order, nodes, joined, by_mpirun
        self._several = order.members > 1
        self._goes_on = bool(order.restarts or order.survives_loss)  # after a failure
        self.leads = 0 in nodes  # with several machines, only the lead's console reports on the run itself
        self.live = show is None and sys.stderr.isatty()
        self.colour = self.live and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.progress = Progress()
        self._clock = LeadClock()
        self.follower: Optional[Follower] = None
        self._others: Optional[Follower] = None  # the other nodes' metrics
        self._unshown = 0  # bytes of output that were skipped because ranks printed faster than it can be shown
        self._logs: Dict[int, str] = {}  # node -> where its ranks write, if that is not the run folder
        self._begun = time.monotonic()
        self._connected: Dict[int, str] = {}
        self.started = False  # the ranks
        self._between = False  # true while waiting for the next attempt
        self._waiting_said = 0.0
        self._node_findings: Dict[Tuple[str, str], List[Finding]] = {}  # severity and text -> one per node
        self._affinity = NodeVerdicts(order.nodes)
        self._environment_said = False
        self._drawn = ""
        self._last_progress = time.monotonic()
        self._said_progress = ""
        self._hangs = self._stops = False  # either makes the time left unknown
        self._said: Set[str] = set()  # findings and activities of this attempt
        self._ends = False  # a rank of this attempt has ended, or all were asked to: no time left is shown
        self._failed = False  # a rank has failed, and the others are being ended for it

    def begin(self, from_end: bool = True) -> None:
        """`from_end`: leave out what an earlier start of the run has written."""
        order = self.order
        self._open(order.folder, from_end)
        if not self.leads:
            return
        for label, text in opening_lines(order, self.joined):
            self.say(label, text)
        for text in order.track:
            tracker, _, place = text.partition("=")
            place = near(place or RunFolder(order.folder).at(tracker))
            board = f"tensorboard --logdir {shlex.quote(place)}"
            self.say("tracker", board if tracker == "tensorboard" else shown_tracker(text, order))

    def logs_at(self, node: int, path: str) -> None:
        """Follow node-local logs: this node's ranks write there."""
        self._logs[node] = path
        if self.follower:
            self.follower.read_logs_from(node, path)

    @property
    def local_logs(self) -> List[str]:
        return list(self._logs.values())

    def poll(self, folder: Optional[RunFolder], final: bool = False) -> None:
        if folder is not None:
            self._open(folder.path)
        if self.follower:
            if self.follower.behind or final:
                self._unshown += self.follower.skip_lines(_FLOOD)
            for records in self.follower.drain() if final else [self.follower.poll()]:
                self._show(records)
        if self._others:
            for records in self._others.drain() if final else [self._others.poll()]:
                self._add_metrics(records)
        if self.leads:
            self._say_environment()
            self._say_waiting()
        self._show_progress(final)

    def stopping(self, number: int, grace: float) -> None:
        self._stops = True
        if not self.leads:
            return
        name = signal.Signals(number).name
        if number == signal.SIGQUIT:
            words = "asked again: ending now"
        elif self._between:
            words = f"{name}: ending; no rank runs between two attempts"
        elif self._failed:
            words = f"{name}: a rank failed, and the others are ending already"
        elif self.started and self.by_mpirun:
            how = f"drumbeat status {self.order.run_id}"
            words = f"{name} from mpirun, which ends this process soon; how the run ended: {how}"
        elif self.started:
            words = f"{name}: the ranks have {grace:g} s to save; a second Ctrl-C or drumbeat cancel ends them now"
        else:
            words = f"{name}: ending; no rank had been started"
        self.say("stop", words)

    def end(self, run: Run, summary: Summary) -> None:
        self._say_node_findings()
        if self._unshown:
            words = f"{self._unshown / 1e6:,.0f} MB of what the ranks printed were not shown here"
            self.say("output", f"{words}: drumbeat logs {run.run_id} has all")
        for label, text in closing_lines(run, summary, printed=self.nodes):
            self.say(label, text)

    def say(self, label: str, text: str) -> None:
        self._clear()
        shown = f"{label:<10}"
        if self._show_line:
            self._show_line(f"{shown} {text}")
            return
        if self.colour and label in _COLOURS:
            shown = f"\x1b[{_COLOURS[label]}m{shown}\x1b[0m"
        first, *more = folded(text, shutil.get_terminal_size((80, 24)).columns) if self.live else [text]
        write(sys.stderr, "", [f"{shown} {first}", *(" " * 11 + line for line in more)])

    # -- inside ------------------------------------------------------------------------------------------------------

    def _open(self, path: str, from_end: bool = False) -> None:
        """Follow the run folder at `path`; without shared storage, a node learns that path from its agent."""
        path = os.path.abspath(path)
        if self.follower and self.follower.run.path == path:
            return
        try:
            run = Run.open(path)
        except RecordError:
            return  # not there yet
        what = (EVENTS, METRICS, LINES)
        self.follower = Follower(run, self.nodes, what, from_end=from_end)
        for node, logs in self._logs.items():
            self.follower.read_logs_from(node, logs)
        others = [node for node in range(self.order.members) if node not in self.nodes]
        if self.leads and others and self.order.members <= _ALL_NODES:
            self._others = Follower(run, others, (METRICS,), from_end=from_end)

    def _show(self, records: Sequence[Record]) -> None:
        if self.leads:
            for record in records:
                if isinstance(record, Event):
                    self._show_event(record)
        lines = [record for record in records if isinstance(record, Line)]
        if self._show_line:
            for line in lines:
                self._show_line(mark(line.rank) + line.text)
        elif lines:
            self._clear()
            write_lines(lines)
        self._add_metrics(records)

    def _add_metrics(self, records: Iterable[Record]) -> None:
        for record in records:
            if isinstance(record, Metric):
                self.progress.add(record)
                self._clock.saw(record.t)

    def _show_event(self, event: Event) -> None:
        if isinstance(event, kinds.NodeJoined):
            self._connected[event.peer] = event.peer_host
            if self.started:
                self.say("returned", f"node {event.peer} ({event.peer_host}): the next attempt uses it")
        elif isinstance(event, kinds.Mustered):
            host = f"[{event.master_addr}]" if ":" in event.master_addr else event.master_addr
            size = f"{host}:{event.master_port}"
            here = len(self._connected) if self.order.survives_loss else self.order.nodes
            nodes = f"{here} of {count(self.order.members, 'node')} in {event.seconds:.1f} s"
            self.say("connected", f"{nodes}; MASTER_ADDR:PORT = {size}")
            self._say_node_findings()
        elif isinstance(event, kinds.AttemptStarted):
            self.started, self._between, self._hangs, self._ends, self._failed = True, False, False, False, False
            self.progress = Progress()  # steps and speed count from the start of the attempt
            self._said.clear()
            if event.resized:
                self.say("smaller", event.resized)
        elif isinstance(event, kinds.Decided) and event.action == "restart":
            self._between = event.wait > 0
            self.say("restart", event.why)
        elif isinstance(event, kinds.Decided) and event.cause:
            # The run could go on but does not, or a node is to blame; any other decision explains itself.
            if self._goes_on or event.action == "requeue" or event.cause == HARDWARE.name:
                self.say(event.action, event.why)
        elif isinstance(event, kinds.Excluded):
            self.say("excluded", f"node {event.peer} ({event.peer_host}): {event.why}")
        elif isinstance(event, kinds.Failed) and self._goes_on:
            self.say("failed", failed_words(event.finding))
        elif isinstance(event, kinds.AttemptEnded):
            for line in self._affinity.take():
                self.say("affinity", line)
        elif isinstance(event, kinds.RankExited):
            self._ends = True
        elif isinstance(event, kinds.Stopping):
            self._ends, self._failed = True, event.why == "a rank failed"
            if event.why.startswith("the time limit"):  # this is not the user's Ctrl-C
                self.say("stop", f"{event.why}: the ranks have {event.grace:g} s to save")
        elif isinstance(event, kinds.NodeLost):
            if not self.started:
                self._connected.pop(event.peer, None)
            self.say("lost", event.words)
        elif isinstance(event, (kinds.NodeSilent, kinds.NodeHeard)):
            self.say("silent" if isinstance(event, kinds.NodeSilent) else "heard", event.words)
        elif isinstance(event, kinds.VerdictGiven) and event.peer is not None:
            self._show_verdict(event)
        elif isinstance(event, kinds.Activity):
            if event.what:
                self.say("waiting", event.words(event.seconds))
        elif isinstance(event, kinds.Resumed):
            self._hangs = False
            steps = f"steps come again, after {duration(event.seconds)} without one"
            steps = steps if event.stepped else f"the ranks go on, after {duration(event.seconds)}"
            self.say("resumed", "all ranks have ended well: it was no hang" if event.ended else steps)
        # Every node checks itself before it joins, so others may report the same.
        elif (
            isinstance(event, kinds.FindingMade)
            and not self.started
            and event.finding.node is not None
            and self._several
        ):
            found = event.finding
            self._node_findings.setdefault((found.severity, f"{found.title}: {found.fix}"), []).append(found)
        elif isinstance(event, kinds.FindingMade):
            self._hangs = self._hangs or event.finding.code.startswith(HANG)
            text = f"{event.finding.title}: {event.finding.fix}"
            if event.finding.code.startswith(HANG) and self.order.checks.get("hang") != "stop":
                text += "" if text.endswith("?") else "."
                text += f" The run goes on; drumbeat cancel {self.order.run_id} ends it"
            if event.finding.node is None or text not in self._said:  # several nodes may find the same
                self.say(event.finding.severity, text)
            self._said.add(text)

    def _show_verdict(self, event: kinds.VerdictGiven) -> None:
        verdict = event.verdict
        # Unknown verdicts are in the events; they do not help the user.
        silent = verdict.answer == "unknown" and (verdict.check in ("transport", "traffic") or not verdict.seen)
        words = verdict.summary if verdict.answer == "as planned" else verdict.words
        if verdict.check == "affinity" and self.order.nodes > 1 and event.peer is not None:  # about one node
            wrong = verdict.answer == "mismatch"  # a mismatch is shown at once
            lines = [f"node {event.peer}: {words}"] if wrong else []
            for line in [*lines, *self._affinity.add(event.peer, "" if silent or wrong else words)]:
                self.say(verdict.check, line)
        elif not silent and (event.peer == 0 or verdict.answer == "mismatch"):
            self.say(verdict.check, words)  # node 0 stands for all nodes that match the plan

    def _say_node_findings(self) -> None:
        """Show what nodes found before the ranks start: if several have the same warning, one line names them all."""
        for (severity, text), findings in self._node_findings.items():
            nodes = sorted(finding.node for finding in findings if finding.node is not None)
            hosts = () if self.order.emulated else fold([finding.host for finding in findings if finding.host])
            named = f"{'node' if len(nodes) == 1 else 'nodes'} {ranges(nodes)}"
            self.say(severity, f"{named} ({hosts}): {text}" if hosts else f"{named}: {text}")
        self._node_findings.clear()

    def _say_waiting(self) -> None:
        """Say which nodes are missing while the nodes join."""
        now = time.monotonic()
        if self.started or self.order.members == 1 or now - self._begun < _WAITING_AFTER:
            return
        if self._waiting_said and now - self._waiting_said < _WAITING_EVERY:
            return
        self._waiting_said = now
        self._say_node_findings()
        missing = [node for node in range(self.order.members) if node not in self._connected]
        if not missing:
            return
        hosts = () if self.order.emulated else self.order.hosts
        names = [f"{node} ({hosts[node]})" if node < len(hosts) else str(node) for node in missing]
        here = self.order.members - len(missing)
        left = max(0.0, self.order.timing.muster - (now - self._begun))
        self.say(
            "waiting",
            f"{here} of {count(self.order.members, 'node')} connected; still missing: node {some(names, 4)}; "
            f"giving up in {duration(left)}",
        )

    def _say_environment(self) -> None:
        """Show one of the chosen variables, and where to find the others."""
        if self._environment_said or not self.started or self.follower is None:
            return
        run, node = self.follower.run, self.nodes[0]
        environment = run.environment(node)
        found, attempt = environment.get("variables"), environment.get("attempt")
        variables = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
        if not variables or not isinstance(attempt, int) or attempt < self.follower.first_attempt:
            return  # not written yet, or left by an earlier start
        self._environment_said = True
        chosen = [v for v in variables if v.get("source") in ("site", "detected") and "_IFNAME" in str(v.get("name"))]
        first = (chosen or variables)[0]
        path = near(run.folder.node(node).environment)
        what = f"{first.get('name')}={first.get('value')} ({first.get('why')})"
        self.say("set", f"{what}, {len(variables) - 1} more: {path}")

    def _show_progress(self, final: bool) -> None:
        if not self.progress.place or not self.leads:
            return
        trains = not (self._stops or self._ends or final)
        line = progress_line(self.progress, trains and not self._hangs, self._clock.now() if trains else None)
        made = progress_line(self.progress, left=False)
        if self.live and not final:
            line = line[: shutil.get_terminal_size((80, 24)).columns - 1]  # a longer one could not be drawn over
            if line != self._drawn:
                put(sys.stderr, f"\r\x1b[K{line}")
                self._drawn = line
        elif time.monotonic() - self._last_progress > _PROGRESS_EVERY and made != self._said_progress:
            self._last_progress, self._said_progress = time.monotonic(), made  # shown only if there is progress
            self.say("progress", line)

    def _clear(self) -> None:
        if self._drawn:
            put(sys.stderr, "\r\x1b[K")
            self._drawn = ""
