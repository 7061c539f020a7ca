"""Ends of this node's processes. A forked child reads what the launcher and the logs say about them: storage may hang."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple

from drumbeat.agent.ranks.launchers import Direct
from drumbeat.agent.ranks.stages import STAGE_FAILED
from drumbeat.agent.ranks.start import NO_WORKDIR, End
from drumbeat.base import clock, proc
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.base.processes import Forked
from drumbeat.base.record import from_plain, to_plain
from drumbeat.base.redact import printable
from drumbeat.base.regex import regex
from drumbeat.causes.table import CONSEQUENCES
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import CAUGHT, CERTAIN, ERROR, LIKELY, PEER_LOST, WARNING, Evidence, Finding, shown
from drumbeat.inrank.adapters.sitecustomize import read_missing
from drumbeat.inrank.stacks import read_note
from drumbeat.inspector.kernel_log import node_oom_kills, oom_kills
from drumbeat.inspector.ranks import MOST_LINKS
from drumbeat.inspector.record import Known
from drumbeat.machine.host import LiveHost
from drumbeat.machine.model import Facts, Identity
from drumbeat.metrics.printed import read_line
from drumbeat.runfolder.layout import NodeFolder

find = Catalog("ranks")

# The end of a rank's standard error, used to explain its failure.


Written = Mapping[str, Sequence[Tuple[float, int]]]  # path -> times, and the length of the file at each
_TAIL_BYTES, _TAIL_LINES = 64 << 10, 200


def tail(path: str, begin: int = 0) -> List[str]:
    """Return the last lines of a file that may be huge, binary or missing, from byte `begin` on."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(begin, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return text.splitlines()[-_TAIL_LINES:]


# Last words of processes that ended with exit code 0: a failure that a shell hid, or that the program caught itself.


_TABLE = 40  # lines that may follow a fatal failure: torchrun's table, and the script's last output
_LAST_WORDS = 8  # lines among which an error line counts as the last words
LATER = 0.5  # seconds: both streams of a program that gives up end within this time of each other
_LEFT = 30.0  # seconds after its last line within which it exits
# Messages of programs that catch an exception: "Error: ...", "Exception caught: ...", "Training failed: ...". A number after
# the colon is a metric ("Error: 0.12"), and "none" is no error.
_OWN_WORDS = (
    r"(?i:(?:an? )?(?:(?:fatal|unexpected|caught) )?(?:error|exception)(?: (?:was )?(?:caught|raised|occurred))?"
    r"|(?:[\w-]{1,30} ){1,4}failed) ?:(?!\s*(?:[-+.]?\d|(?i:none|nan|inf|null|false)\b))"
)
_TRACEBACK = "Traceback (most recent call last)"
_SIGN = regex(
    r"Traceback \(most recent call last\)|(?:\b|\x1b\[[\d;]*m)(?:ERROR|CRITICAL|FATAL)\b|^(?:\w+\.)*[A-Z]\w*(?:Error|Exception)\b"
    r"|(?:\b|\x1b\[[\d;]*m)" + _OWN_WORDS
)
_ERROR_LINE = regex(r"(?:ERROR|CRITICAL|FATAL)\b")
_OWN_LINE = regex(_OWN_WORDS)


@dataclass(frozen=True)
class RankStream:
    """The end of one stream of a rank, or of the node's command (rank None)."""

    rank: Optional[int]
    name: str  # out or err
    path: str
    lines: Sequence[str]
    written: float  # time of the last write; 0: there is no such file


def read_stream(rank: Optional[int], name: str, path: str) -> RankStream:
    try:
        written = os.stat(path).st_mtime
    except OSError:
        written = 0.0
    return RankStream(rank, name, path, tail(path), written)


def may_hold_error(lines: Sequence[str]) -> bool:
    """Return false if certainly no rule or reader can find an error; fast."""
    return any(_SIGN.search(line) for line in lines)


def last_failure(streams: Sequence[RankStream], command: Sequence[str]) -> Optional[Tuple[Finding, RankStream]]:
    """Return the failure that the rules find at the end of the output, if no work went on after it in the same stream."""
    from drumbeat.logs.exits import RankEnd, explain_run  # not needed by the agent of a healthy run
    from drumbeat.logs.failure import NO_FAILURE, NOT_KNOWN

    by_rank = {rank: {each.name: each.lines for each in streams if each.rank == rank} for rank in _ranks(streams)}
    ends = [RankEnd(rank, 0, None, each.get("out", ()), each.get("err", ())) for rank, each in by_rank.items()]
    failure = explain_run(ends, command)
    found = failure.finding
    if found is None or failure.answer in (NO_FAILURE, NOT_KNOWN, PEER_LOST) or not found.evidence:
        return None
    text = found.evidence[0].text
    for stream in sorted(streams, key=lambda each: (_ranks(streams).index(each.rank), each.name)):  # err before out
        place = max((number for number, line in enumerate(stream.lines) if text in shown(line)), default=None)
        if place is not None:
            return (found, stream) if not _works(stream.lines[place + 1 :], _TABLE) else None
    return None


def last_error(streams: Sequence[RankStream]) -> Optional[Tuple[Finding, RankStream]]:
    """Return the last line that a program itself calls an error, if it is at the end of its stream."""
    from drumbeat.logs.read.prefixes import clean, without_colour

    for stream in streams:
        lines = [line for line in stream.lines if line.strip()][-_LAST_WORDS:]
        for number in reversed(range(len(lines))):
            line = clean(lines[number])
            own = not line.only_warns and _OWN_LINE.match(line.text)
            if line.level in ("E", "F") or _ERROR_LINE.match(line.text) or own:
                if _works(lines[number + 1 :], _LAST_WORDS):
                    break
                text = shown(printable(without_colour(lines[number]))).strip()[:500]
                return Finding("", WARNING, text, evidence=(Evidence(text),), rank=stream.rank), stream
    return None


def _raised_at(lines: Sequence[str]) -> Optional[int]:
    """Return the index of the line that names the exception of the last traceback, if no work went on after it and few lines
    follow. Python prints uncaught exceptions like this; after a caught one the program would go on."""
    begin = max((number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)), default=len(lines))
    place = next((number for number in range(begin + 1, len(lines)) if lines[number][:1] not in ("", " ", "\t")), None)
    return None if place is None or _works(lines[place + 1 :], _LAST_LINES) else place


def wrote_on(streams: Sequence[RankStream], stream: RankStream, ended: float) -> bool:
    """Return true if the work went on after the error at the end of `stream`: the rank's other stream is newer, the rank lived
    on in silence, or it reports success."""
    from drumbeat.logs.read.attempts import is_good_end

    own = [each for each in streams if each.rank == stream.rank]
    newest = max([ended - _LEFT, *(each.written - LATER for each in own)])
    return newest > stream.written or any(is_good_end(line) for each in own for line in each.lines[-_LAST_WORDS:])


def _works(lines: Sequence[str], most: int) -> bool:
    """Return true if the lines after an error show that the work went on: they report a step, or are too many."""
    after = [line for line in lines if line.strip()]
    return len(after) > most or any(read_line(line) for line in after)


def _ranks(streams: Sequence[RankStream]) -> List[Optional[int]]:
    return list(dict.fromkeys(each.rank for each in streams))


# Why one rank ended, from its exit status, the end of its standard error, and what the kernel counted.


_STREAM = regex(r"std(err|out) of (?:process|rank) \d+:(?:.*\D)?(\d+)$")  # how diagnose names lines that it was given
_MOST_LATER = 4
_LAST_LINES = 40  # with more lines after it, a line is not among the last ones


def with_last_step(finding: Finding, step: Optional[int]) -> Finding:
    """Add the last known step to the finding of an end without words."""
    if step is None or not finding.cause.endswith("it wrote nothing"):
        return finding
    return replace(finding, cause=f"{finding.cause}; the last step seen on this node was {step}")


class Explainer:
    """Explains the ends of one attempt; evidence names files relative to `run_folder`. `kept` is the merged log in which a
    reader of the run folder finds the rank's lines, if logs are merged."""

    def __init__(
        self, order: Order, logs: NodeFolder, launcher: Direct, attempt: int, run_folder: str, kept: str = "",
        facts: Optional[Facts] = None,
    ) -> None:  # fmt: skip
        self.written: Written = {}
        self.hosts: Sequence[str] = ()  # of all nodes, and where the ranks meet
        self.order, self.logs, self.launcher, self.attempt = order, logs, launcher, attempt
        self.run_folder, self.kept = run_folder, kept
        self.no_gpu, self.identity = (facts.has_no_gpu, facts.identity) if facts else (False, Identity())
        self._oom_kills, self._node_kills = oom_kills(LiveHost()), node_oom_kills(LiveHost())  # before the ranks start

    def explained(self, end: End) -> End:
        """Add the finding, and those from what was written after the words that it rests on, if the rank lived on."""
        from drumbeat.logs.read.progress import says_it_is_over

        found = self.explain(end)
        explained = replace(end, finding=found)
        later: List[Tuple[float, Finding]] = []
        for _ in range(_MOST_LATER):
            said = self._said(end, found)
            if said is None or said > end.at - LATER:
                break
            words, over = found.evidence[0].text[:200], says_it_is_over(found.evidence[0].text)
            found = self.explain(end, after=said)
            if not found.evidence:
                found = replace(found, cause=f"not known: its last words are older than the run's last steps: {words}")
            elif over and not later:
                explained = replace(end, finding=found)
            later.append((said, found))
        return replace(explained, later=tuple(later))

    def _said(self, end: End, found: Finding) -> Optional[float]:
        """Return the time by which the words of a finding had been written; None if unknown."""
        text = found.evidence[0].text if found.evidence else ""
        for path in (self._written(end, stream) for stream in ("err", "out") if text):
            if any(text in shown(line) for line in tail(path)):
                rests = ((t, tail(path, begin=length)) for t, length in self.written.get(path, ()))
                return next((t for t, rest in rests if not any(text in shown(line) for line in rest)), None)
        return None

    def explain(self, end: End, after: float = 0.0) -> Finding:
        # here and below: not needed by the agent of a healthy run
        from drumbeat.logs.exits import explain_exit, for_place
        from drumbeat.logs.report import quoted as without_gpu

        log, out = (self._written(end, stream) for stream in ("err", "out"))
        # from the length on that each file had by then
        begins = [
            max((length for at, length in self.written.get(path, ()) if at <= after), default=0) for path in (log, out)
        ]
        lines, printed = (tail(path, begin=begin) for path, begin in zip((log, out), begins))
        missing = next((line for line in lines if line.startswith(NO_WORKDIR)), None)
        if missing:
            why = missing[len(NO_WORKDIR) :].strip() or "it does not exist there"
            found = find("workdir-missing", workdir=self.order.workdir, why=why, evidence=[missing])
        else:
            ended_by_us = end.by_us and end.signal == signal.SIGKILL
            command, kills = self.order.command, self._kills(end)
            alone = not end.of_command
            found = explain_exit(end.exit_code, end.signal, lines, command, ended_by_us, bool(kills), printed, alone)
            if found.code == "oom-kill" and kills and kills != _OWN_COUNT:
                found = replace(found, confidence=LIKELY, seen=(kills,))
            before = _raised_before(found, lines)
            if before:
                first = explain_exit(1, None, before, command, killed_by_us=False)
                found = found if first.code in CONSEQUENCES else first
        if any(each.text in line for line in map(shown, printed) for each in found.evidence):
            log = out
        file = os.path.relpath(self.kept or log, self.run_folder)
        if self.no_gpu:
            found = without_gpu(found)
        found = _of_service(for_place(found, self.identity), self.hosts)
        if found.code == "file-missing" and _RELATIVE.fullmatch(found.title):
            found = replace(
                found, title=f"{found.title} (workdir {printable(self.order.workdir)})",
                fix=f"check the path, and workdir: in the job file; {found.fix}",
            )  # fmt: skip
        # The lines after the last evidence in a stream; of several streams, the fewest.
        places = [(match[1], int(match[2])) for match in map(_STREAM.match, found.seen) if match]
        rests = [(lines if stream == "err" else printed)[number:] for stream, number in places]
        behind = min(rests, key=len, default=[])
        steps = any(read_line(line) for line in behind)
        if steps and end.exit_code is not None and found.confidence == CERTAIN:
            found = replace(found, confidence=LIKELY)  # the rank went on after this line and chose its exit code itself
        place = f"the last lines of {file}"
        if steps or len(behind) > _LAST_LINES:
            place = f"{file}, {len(behind)} lines before its end{', with steps behind it' if steps else ''}"
        seen = tuple(place if _STREAM.match(each) else each for each in found.seen)
        evidence = tuple(replace(each, file=each.file or file) for each in found.evidence)
        return replace(found, evidence=evidence, seen=tuple(dict.fromkeys(seen)))

    def unread(self, end: End, seconds: float) -> Finding:
        """Explain an end by the exit status alone, if the logs could not be read."""
        from drumbeat.logs.exits import explain_exit

        ended_by_us = end.by_us and end.signal == signal.SIGKILL
        found = explain_exit(end.exit_code, end.signal, (), self.order.command, ended_by_us)
        if found.severity != ERROR:
            return found
        why = f"not known: the rank's log could not be read within {seconds:g} s"
        fix = f"look at the file system of {self.logs.path} on this node"
        return replace(found, cause=why, fix=fix, unseen=("the rank's log",))

    def doubt(self, end: End, every_rank: bool) -> Optional[Finding]:
        """Return why a command that ended with 0 may still have failed: its exit code can be that of a pipe into tee, or of a
        final echo. None if its processes' output shows no failure, or if the work went on after it. Errors of ranks that are
        known to have ended with 0 count as caught."""
        streams, well = self._streams(end, every_rank), self.launcher.ranks_ended_well
        found = last_failure([each for each in streams if each.rank is None or not well], self.order.command)
        if found:
            return None if self._trained_after(found[1], streams) else self._quoted(*found)
        return self.caught(end, every_rank) if well else None

    def _trained_after(self, failed: RankStream, streams: Sequence[RankStream]) -> bool:
        """Return true if the rank's other stream shows step after step since the failure: a script that tries again."""
        from drumbeat.logs.read.progress import Steps

        steps = Steps()
        for each in streams:
            begin = next((length for t, length in self.written.get(each.path, ()) if t >= failed.written), None)
            if each.rank == failed.rank and each is not failed and begin is not None:
                steps.error(each.name, 0, "")
                for number, line in enumerate(tail(each.path, begin=begin), 1):
                    if steps.watches(each.name):
                        steps.feed(each.name, number, line.encode("utf-8", "replace"))
        return any(steps.trained(each.name, 0) for each in streams)

    def caught(self, end: End, every_rank: bool) -> Optional[Finding]:
        """Return the last error of a program that then ended with 0 by itself, in its own words: it caught its own failure.
        None if there is none, or if the work went on after it."""
        streams = self._streams(end, every_rank)
        if not any(may_hold_error(each.lines) for each in streams):
            return None  # the usual case; the code below reads all rules
        found = last_failure(streams, self.order.command) or last_error(streams)
        if found is None or wrote_on(streams, found[1], end.at):
            return None
        quoted = self._quoted(*found)
        return replace(quoted, code=CAUGHT, title=quoted.evidence[0].text[:200])

    def _streams(self, end: End, every_rank: bool) -> List[RankStream]:
        """Return the output of the rank; for a node's command, that of the command and all its ranks."""
        ranks = sorted(self.logs.ranks(self.attempt)) if every_rank else [end.rank]
        logs: List[Tuple[Optional[int], str, str]]
        logs = [(rank, name, self.logs.log(self.attempt, rank, name)) for rank in ranks for name in ("out", "err")]
        if every_rank:
            own = {name: self.launcher.log(self.attempt, end.rank, name) for name in ("out", "err")}
            known = {path for _, _, path in logs}
            logs += [(None, name, path) for name, path in own.items() if path not in known]
        return [read_stream(rank, name, path) for rank, name, path in logs]

    def _quoted(self, finding: Finding, stream: RankStream) -> Finding:
        file = os.path.relpath(self.kept or stream.path, self.run_folder)
        evidence = (Evidence(finding.evidence[0].text, file),)
        seen = (f"the last lines of {file}",)
        quoted = replace(finding, severity=WARNING, confidence=LIKELY, evidence=evidence, seen=seen)
        if self.no_gpu:
            from drumbeat.logs.report import quoted as without_gpu

            quoted = without_gpu(quoted)
        return quoted

    def _written(self, end: End, stream: str) -> str:
        """Return the rank's own log, or its launcher's if the rank was never started."""
        log, own = self.logs.log(self.attempt, end.rank, stream), self.launcher.log(self.attempt, end.rank, stream)
        return log if not end.of_command and os.path.exists(log) else own

    def _kills(self, end: End) -> str:
        """Return the out-of-memory kill count that has risen since the start; only then may a SIGKILL be due to it. The node's
        count proves less: another job's process may have been killed."""
        if signal.SIGKILL not in (end.signal, (end.exit_code or 0) - 128):
            return ""
        if self._oom_kills is not None and (oom_kills(LiveHost()) or 0) > self._oom_kills:
            return _OWN_COUNT
        more = (node_oom_kills(LiveHost()) or 0) - (self._node_kills or 0)
        if self._node_kills is None or more <= 0:
            return ""
        return f"out-of-memory kills on this node since the ranks started: {more}; in the run's own memory group: 0"


_RELATIVE = regex(r"no such file '[^/'].*'")  # as FileNotFoundError names it


def _raised_before(found: Finding, lines: Sequence[str]) -> Sequence[str]:
    """Return the lines up to the exception that ended a rank's work, if the found failure only came later, while the rank
    waited for the others."""
    place = _raised_at(lines) if found.code in CONSEQUENCES and found.evidence else None
    if place is None:
        return ()
    later = any(found.evidence[0].text in shown(line) for line in lines[place + 1 :])
    return lines[: place + 1] if later else ()


_ENDPOINT = regex(r"(?<![\w./-])(?:\w+://)?((?!localhost)[A-Za-z][\w-]*(?:\.[\w-]+)+):\d{2,5}\b")
_OF_SOURCE = regex(r".*\.(?:py|pyx|c|cc|cpp|cxx|cu|cuh|h|hpp|rs|go)")


def _of_service(found: Finding, hosts: Sequence[str]) -> Finding:
    """Return the finding of a lost peer as the rank's own failure if its words name a peer that is no node of the job. An
    address proves nothing, since a node has several."""
    text = found.evidence[0].text if found.code == PEER_LOST and found.evidence and hosts else ""
    own = tuple(host.partition(".")[0].lower() for host in hosts)
    named = [match for match in _ENDPOINT.finditer(text) if not _OF_SOURCE.fullmatch(match[1])]
    if not named or any(match[1].lower().startswith(own) for match in named):
        return found
    return find("service-lost", service=named[0][0], evidence=found.evidence, seen=found.seen, confidence=LIKELY)


READ_WITHIN = 10.0  # seconds
_OWN_COUNT = "the kernel's count of out-of-memory kills"
_RECENT = 5.0  # seconds before a rank's end: earlier closed connections may be those to a server
_BY_A_SIGNAL = ("terminated", "killed")  # codes of ends of which only the signal is known


# An end, and whether it is that of a process that we started: else of a rank whose launcher goes on.
_Given = Tuple[End, bool]


class Ends:
    """Collects the ends of one attempt. `done` gets every rank's end, in the order in which the processes ended."""

    def __init__(
        self, launcher: Direct, explainer: Explainer, attempt: int, done: Callable[[End], None], known: Known,
        within: float = READ_WITHIN, notes: str = "",
    ) -> None:  # fmt: skip
        self.launcher, self.explainer, self.attempt, self.done, self.within = launcher, explainer, attempt, done, within
        self.known, self.notes = known, notes  # the folder in which ranks note their ends
        self._waiting: List[_Given] = []
        self._reading: Tuple[_Given, ...] = ()
        self._child: Optional[Forked] = None
        self._began = clock.now()

    def __bool__(self) -> bool:
        """Return true if an end has not been reported yet."""
        return bool(self._waiting or self._reading)

    @property
    def pid(self) -> int:
        """Return the pid of the child that reads; 0 if there is none."""
        return self._child.pid if self._child else 0

    def add(self, end: End) -> None:
        """Add the end of a process that was started for this node."""
        self.hear(end.by_us)
        if end.exit_code == 0 and end.by_us and not self.launcher.may_hide_failures and not self:
            self.done(replace(end, of_command=not self.launcher.is_rank))
        else:
            self._waiting.append((end, True))

    def hear(self, by_us: bool) -> None:
        """Add the ranks that ended with 0 while their launcher goes on, as recorded by its driver."""
        for end in self.launcher.early_ends(self.attempt):
            seconds = round(max(0.0, end.at - self._began), 3)
            self._waiting.append((replace(end, since=end.at, seconds=seconds, by_us=by_us), False))

    def poll(self) -> None:
        if self._child is not None and self._child.poll():
            answer, given = self._child.answer, self._reading
            self._child, self._reading = None, ()
            read = [from_plain(End, each) for each in json.loads(answer)] if answer else map(self._unread, given)
            for each in read:
                self.done(each)
        if self._child is None and self._waiting:
            self._reading, self._waiting = tuple(self._waiting), []
            self._child = Forked(self._read, self.within)

    def give_up(self) -> None:
        """Report the remaining ends without reading anything."""
        if self._child is not None:
            self._child.end()
            self._child = None
        given, self._reading, self._waiting = [*self._reading, *self._waiting], (), []
        for each in given:
            self.done(self._unread(each))

    def _read(self) -> bytes:
        """Read, in the child, first which connections were closed by which end: the kernel remembers that for a minute at
        most."""
        now, closed_first = time.time(), proc.closed_first(os.getpid())
        found = []
        for ended, own in self._reading:
            for end in read_exit(self.launcher, self.explainer, self.attempt, ended, own):
                lacks = read_missing(self.notes, end.rank) if end.finding else []
                end = replace(end, since=ended.since, finding=_with_python(end.finding, lacks))
                noted = self._noted(end)
                if noted.own and noted.signal and ended.by_us:  # it had raised before the signal reached it
                    raised = replace(noted, exit_code=1, signal=None, by_us=False)
                    noted = replace(noted, finding=self.explainer.explain(raised))
                links = sorted({*self.known.links.get(end.rank, ()), *noted.links})
                closed = [(*link, round(now - closed_first[link], 2)) for link in links if link in closed_first]
                if end.exit_code == 0 and not end.finding:
                    links = []  # a lost peer is of no interest for a rank that ended well
                found.append(replace(noted, links=tuple(links[:MOST_LINKS]), closed=tuple(closed[:MOST_LINKS])))
        return json.dumps(to_plain(found)).encode()

    def _noted(self, end: End) -> End:
        """Add the rank's own record of when it raised or exited."""
        try:
            pids = [pid for pid, rank in self.known.ranks.items() if rank == end.rank]
            note = {} if end.of_command else read_note(self.notes, end.rank, pids)
            at = clock.own(float(note["t"]))
            left = tuple((here, there, age) for here, there, age in note["left"] if age < _RECENT)
            links = tuple((here, there) for here, there in note["links"])
            noted = replace(end, noted=at, own=bool(note["own"]), links=links, left=left[:MOST_LINKS])
            words, found = str(note.get("died") or "").partition(" ended with ")[2], end.finding
            noted = replace(noted, of_thread=bool(words and found and found.title.endswith(words)))
            return noted if self._began <= at <= end.at else end
        except (OSError, KeyError, TypeError, ValueError):
            return end

    def _unread(self, given: _Given) -> End:
        end, _ = given
        return replace(end, finding=self.explainer.unread(end, self.within) if end.exit_code != 0 else None)


def read_exit(launcher: Direct, explainer: Explainer, attempt: int, ended: End, own: bool) -> List[End]:
    found = []
    for end in launcher.ends(attempt, ended) if own else [ended]:
        end, by_us = replace(end, seconds=ended.seconds, by_us=ended.by_us), ended.by_us
        finding = end.finding
        if finding is None and end.exit_code != 0:
            end = explainer.explained(end)
            finding = end.finding
            if finding and end.by_launcher and end.signal and finding.code in _BY_A_SIGNAL:
                finding, by_us, end = find("stopped"), True, replace(end, later=())
        elif finding is None and not ended.by_us:
            one_of_many = not (launcher.is_rank or end.of_command)  # the driver of its launcher has seen its exit code
            look = explainer.doubt if launcher.may_hide_failures and not one_of_many else explainer.caught
            finding = look(end, launcher.once and not one_of_many)
        elif finding is not None and finding.code == STAGE_FAILED:
            finding = _with_cause(finding, launcher, explainer, end)
        found.append(replace(end, finding=finding, by_us=by_us))
    return found


def _with_python(finding: Optional[Finding], notes: Sequence[Mapping[str, Any]]) -> Optional[Finding]:
    """Say of a missing module which Python lacks it, and which environment in reach has it, as the rank noted."""
    note = next((each for each in notes if finding and finding.title.endswith(f" '{each.get('module')}'")), None)
    if note is None or finding is None:
        return finding
    python = printable(str(note.get("python")))
    cases = {"taken": "taken", "have": "elsewhere", "near": "near"}
    case, others = next(((case, note[name]) for name, case in cases.items() if note.get(name)), ("nowhere", [""]))
    other = printable(str(others[0]))
    known = find("import-error", case, what="", python=python, other=other)
    _, raised, place = finding.cause.partition("; raised at ")
    own = case == "nowhere" and note["module"].partition(".")[0] == "drumbeat"  # it is not to be had by its name
    return replace(finding, cause=f"{known.cause}{raised}{place}", fix=finding.fix if own else known.fix)


def _with_cause(finding: Finding, launcher: Direct, explainer: Explainer, end: End) -> Finding:
    """Prepend the cause of a launcher's failure to the finding about its script."""
    failed = launcher.failed_rank()
    why = explainer.explain(failed) if failed else explainer.doubt(end, launcher.once)
    if why is None:
        return finding
    words = f"{why.title}: {why.cause}" if failed and why.cause else why.title
    return replace(finding, cause=f"{words}; {finding.cause}", evidence=why.evidence or finding.evidence)


def rank_meant(launcher: Direct, end: End, finding: Finding) -> Optional[int]:
    """Return the rank that a finding is about: launchers name ranks in their own lines."""
    if end.exit_code == 0:
        return finding.rank if launcher.once else end.rank
    if end.of_command or (not launcher.starts_ranks and finding.rank is not None):
        return finding.rank
    return end.rank
