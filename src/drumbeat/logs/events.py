"""Events found by the rules and in tracebacks, line by line: bounded, in log order."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Callable, Collection, Dict, List, Optional, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.ranges import Places
from drumbeat.causes.events import fault_in, is_observed
from drumbeat.findings.model import Evidence
from drumbeat.logs.meaning.rules import REPORT, Match
from drumbeat.logs.meaning.senses import PROGRAM, of_library, remedy, sense
from drumbeat.logs.meaning.subject import is_of_program
from drumbeat.logs.nccl.communicators import Communicators, Process
from drumbeat.logs.nccl.grammar import Record
from drumbeat.logs.read.labels import Labels
from drumbeat.logs.read.prefixes import Line
from drumbeat.logs.read.tracebacks import Raised, Span

MAX_PER_RULE_AND_SOURCE = 3
MAX_ENDS = 64  # lines that end a job: a file may hold several jobs, and the last of them counts
ENDS = frozenset({"time-limit", "cancelled", "preempted"})
MAX_EVENTS = 20_000
MAX_WORDS = 300  # characters of an exception
MAX_SOURCES = 20_000
_Source = Tuple[str, str, Optional[int], str]  # rule or exception, file, rank, host

_RANK_IN_NAME = re.compile(r"(?:rank|local_rank)[-_.]?(\d{1,6})(?!\d)|/(\d{1,6})/std(?:err|out)\.log$", re.IGNORECASE)
# Launchers name the process they report on.
_REPORTED = re.compile(
    r"srun: error: (?P<host>[\w.-]+): task (?P<task>\d+): "
    r"|process rank (?P<process>\d+) with PID \S+ on node (?P<node>\S+)"
    r"|; (?:Local host|Host|Node|Process [^;]{1,40} is on host): (?P<boxed>[\w.-]+)"
    r"|\*\*\* (?:JOB|STEP) \S+ ON (?P<ended>\S+) CANCELLED"
    r"|\b[Rr]ank (?P<rank>\d+) (?:\(PID \d+\) )?(?:died from|(?:crashed|exited) with|exited on)"
    r"|\(exitcode: -?\d+\) local_rank: (?P<local>\d+)|'--local[-_]rank=(?P<launched>\d+)'.*\] exits with return code"
    r"|\b[Pp]od(?:/| \"?)(?:[\w-]+/)?(?P<pod>[a-z][\w.]*-[\w.-]*\d)\b"
    r"|\b(?:[Ww]orker|[Pp]eer|[Tt]ask|[Nn]ode) ?[\[(](?P<address>\d{1,3}(?:\.\d{1,3}){3})(?::\d+)?[\])]"
    r"|-- Process (?P<spawned>\d+) terminated with|\bprocess (?P<exited>\d+) terminated with (?:signal|exit code)"
)


@dataclass(frozen=True)
class Event:
    """An event that a rule or a traceback found on a line. `match` is None for an exception that no rule knows."""

    sequence: int
    evidence: Evidence
    match: Optional[Match] = None
    exception: str = ""
    raised_at: str = ""  # `raised at train.py:12`, `crashed at data.py:33`
    beside: Tuple[Evidence, ...] = ()  # other lines that its rule rests on
    rank: Optional[int] = None
    local: bool = False  # `rank` is a local rank
    host: Optional[str] = None
    pid: int = 0
    device: Optional[int] = None  # of NCCL's own line, where one process has several
    time: Optional[float] = None
    level: str = ""  # of the line's own logger; I where the line only talks about an error
    bare: bool = False  # an exception's last line without its traceback
    own: bool = False  # raised by a line of the program itself, not inside a library
    caught: bool = False  # an exception that somebody caught and printed
    lines: int = 1  # length of the traceback
    again: bool = False  # similar events came several times before
    of_launcher: bool = False  # a launcher's own traceback: it says that a rank failed, not why
    of_helper: bool = False  # an exception of a thread or a worker process
    said: bool = False  # plain words of a program or its logger that no rule knows
    meant: str = ""  # the code of plain words, read with the log's own names for ranks
    task: Optional[int] = None  # the task label of srun -l
    unit: Optional[int] = None  # a launcher's number for what it started, where no other words name the rank
    of_table: bool = False  # a launcher-table entry other than the one marked as first

    @property
    def sense(self) -> str:
        """Return the meaning of an exception that no rule knows, as a rule's code."""
        if self.match or self.of_launcher or self.meant == PROGRAM or self.own and fault_in(self.exception):
            return ""
        if (
            self.own
            and not (is_observed(self.exception) or of_library(self.exception))
            and is_of_program(self.exception)
        ):
            return ""
        found = self.meant or sense(self.exception)
        return found if found != PROGRAM else ""

    @property
    def code(self) -> str:
        return self.match.rule.code if self.match else self.sense or "exception"

    @property
    def whole(self) -> str:
        """Return the exception, with the line below that holds its message if its own words end with a colon."""
        below = (
            self.beside[0].text.strip() if self.meant and self.beside and self.exception.rstrip().endswith(":") else ""
        )
        return f"{self.exception.rstrip()} {below}"[:MAX_WORDS] if below else self.exception

    @property
    def guessed(self) -> bool:
        """Return True if its code is only what its words may mean."""
        return bool(self.sense) and not is_observed(self.exception)

    @property
    def advice(self) -> Optional[str]:
        """The fix that the line itself suggests."""
        return remedy(self.evidence.text)

    @property
    def mention(self) -> bool:
        """True if the line has the words of an error but not the error's own form."""
        return self.match is not None and self.match.mention

    @property
    def only_exits(self) -> bool:
        """True for `SystemExit: 1`: the program ended itself and does not say why."""
        return self.match is None and bool(_ONLY_EXITS.fullmatch(self.exception.strip()))

    @property
    def number(self) -> int:
        return self.evidence.line or 0


_ONLY_EXITS = re.compile(r"SystemExit(?:: (?:-?\d{1,3}|True))?")


def rank_of_file(file: str) -> Optional[int]:
    matches = list(_RANK_IN_NAME.finditer(file))  # use the last match: a folder above may have such a name too
    return int(matches[-1][1] or matches[-1][2]) if matches else None


class Events:
    def __init__(self) -> None:
        self._first: List[Event] = []
        # sources that used up their limit: a log may repeat itself to its end
        self._latest: Dict[_Source, Event] = {}
        self.counts: Dict[str, int] = {}  # rule -> number of matches, including those not kept
        self.marks: Set[str] = set()
        self.mark_lines: Dict[Tuple[str, str], List[int]] = {}  # mark and file -> its first lines
        self.owners: Dict[str, Tuple[Optional[int], Optional[str]]] = {}  # file -> rank, host
        self.of_one_process: Set[str] = set()  # files that the caller knows to have one writer
        self.tracebacks: List[Span] = []  # tracebacks of streams that belong to one process
        self.raised: Dict[str, List[int]] = {}  # file -> lines that end a traceback
        self.by_launcher: Set[Tuple[str, int]] = set()  # file and line: where a launcher's own traceback ends
        self.places: Dict[str, Places] = {}  # code -> every line that shows it
        self._where: Dict[Tuple[str, int], str] = {}  # file and line -> where in the program it happened
        self._per_source: Dict[_Source, int] = {}
        self.reported: Set[Tuple[str, str]] = set()  # (rule, file) of launcher reports in this run
        self.labels = Labels()

    @property
    def kept(self) -> List[Event]:
        """The first events of each source and the last one, in log order, each with its rank and place."""
        latest = (replace(event, again=True) for event in self._latest.values())
        return sorted(map(self._located, (*self._first, *latest)), key=lambda event: event.sequence)

    def add_match(
        self,
        sequence: int,
        match: Match,
        line: Line,
        evidence: Evidence,
        record: Optional[Record] = None,
        of_table: bool = False,
    ) -> None:
        """Add a rule's match. `record`: the NCCL header of the line. `of_table`: a launcher-table entry other than its root
        cause."""
        rule = match.rule
        if rule.role == REPORT and len(self.reported) < MAX_SOURCES:
            self.reported.add((rule.id, evidence.file or ""))
        self.counts[rule.id] = self.counts.get(rule.id, 0) + 1
        self._place(rule.code, evidence)
        named = match.groups.get("rank", "").strip()
        line = replace(line, rank=int(named)) if named.isdigit() else line
        rank, host, local = self._who(line, evidence, record.device if record else None)
        host = match.groups.get("host", "").strip() or (record.host if record else "") or host
        unit = rank if rank is not None and not local and rank == _unit(evidence.text) else None
        most = MAX_ENDS if rule.code in ENDS else MAX_PER_RULE_AND_SOURCE
        event = Event(
            sequence,
            evidence,
            match,
            rank=rank,
            local=local,
            host=host or None,
            pid=record.pid if record else 0,
            device=record.device if record else None,
            time=line.time,
            level=line.level or ("I" if match.talk else ""),
            task=line.task,
            unit=line.task if unit is None and line.rank_is_task else unit,
            of_table=of_table,
        )
        self._keep((rule.id, evidence.file or "", rank, host), event, most)

    def _who(self, line: Line, evidence: Evidence, device: Optional[int] = None) -> Tuple[Optional[int], str, bool]:
        """Return rank and host that a line is about, or else those of its file, and True for a local rank."""
        reported, host, local = _reported(evidence.text)
        owner = self.owner(evidence.file or "")
        host = line.host or host or owner[1] or ""
        ranks = (line.rank, reported, owner[0])
        rank = next((each for each in ranks if each is not None), None)
        if rank is None:  # all may call their only GPU the first one
            rank = line.local if device is None else device or None
            return rank, host, rank is not None
        return rank, host, local and line.rank is None

    def add_words(self, sequence: int, line: Line, evidence: Evidence, meant: str = "") -> None:
        """Add an event for plain words that mean a failure."""
        self.add_exception(sequence, Raised(line.text.strip(), "", "", 1), line, evidence, True, True, meant)

    def add_exception(
        self,
        sequence: int,
        raised: Raised,
        line: Line,
        evidence: Evidence,
        bare: bool = False,
        said: bool = False,
        meant: str = "",
    ) -> None:
        name = raised.text.split(":")[0]
        self._place("exception", evidence, raised.lines) if not said else None
        rank, host, local = self._who(line, evidence)
        event = Event(
            sequence,
            evidence,
            exception=raised.text[:MAX_WORDS],
            raised_at=raised.where,
            beside=(Evidence(raised.asserted, evidence.file, (evidence.line or 1) - 1),) if raised.asserted else (),
            rank=rank,
            local=local,
            host=host or None,
            time=line.time,
            level=line.level,
            bare=bare,
            own=bool(raised.own_frame) and raised.own_frame == raised.frame,
            caught=raised.caught,
            lines=raised.lines,
            of_launcher=raised.of_launcher,
            of_helper=raised.of_helper,
            said=said,
            meant=meant,
            task=line.task,
            unit=line.task if line.rank_is_task else None,
        )
        self._keep((name, evidence.file or "", line.rank, ""), event)

    def add_traceback(self, raised: Raised, line: Line, file: str, number: int) -> None:
        """Note where a traceback ends; keep all of it if its lines come from one process (known rank, or a one-process file)."""
        if len(self.raised) < MAX_SOURCES:
            ends = self.raised.setdefault(file, [])
            if len(ends) < MAX_EVENTS:
                ends.append(number)
        if raised.of_launcher and len(self.by_launcher) < MAX_EVENTS:
            self.by_launcher.add((file, number))
        rank = line.rank if line.rank is not None else self.owner(file)[0]
        if (rank is not None or file in self.of_one_process) and len(self.tracebacks) < MAX_EVENTS:
            self.tracebacks.append(Span(file, rank, number - raised.lines + 1, number, raised))

    def locate(self, file: str, number: int, where: str) -> None:
        """Note where in the program the error happened: `raised at train.py:12`."""
        if where and ((file, number) in self._where or len(self._where) < MAX_EVENTS):
            self._where[(file, number)] = where

    def _located(self, event: Event) -> Event:
        file = event.evidence.file or ""
        where = event.raised_at or self._where.get((file, event.number), "")
        rank = event.rank
        if event.unit is not None and rank == event.unit and self.labels.of_units(file, ""):
            rank = self.owner(file)[0]
        speaker = self.labels.speaker(file, event.number) if rank is None else None
        units = self.labels.units
        if event.local and event.device is not None and units.has_several_gpus(event.pid):
            return replace(event, raised_at=where, rank=None, local=False)
        known = units.of_local(file, event.host, rank) if event.local and rank is not None else None
        if rank is None and speaker is None:
            known = units.of_name(file, event.host)
            known = units.writer(file) if known is None else known
        if known is not None:
            return replace(event, raised_at=where, rank=known, local=False)
        if (where, rank, speaker) == (event.raised_at, event.rank, None):
            return event
        # Text before the line that looks like a host is such a label: `s4: `
        return replace(
            event,
            raised_at=where,
            rank=rank if speaker is None else speaker,
            host=event.host if speaker is None else None,
        )

    def forget(self, lines: Collection[Tuple[str, int]]) -> None:
        """Drop the events of these lines of files: Python calls the exception ignored, or an earlier attempt is meant."""
        self._only(lambda event: (event.evidence.file, event.number) not in lines)

    def ends_of_run(self, file: str) -> None:
        """Reset the limits of a file where a run seems to have ended: later lines may belong to another run."""
        self._per_source = {key: count for key, count in self._per_source.items() if key[1] != file}
        self.reported = {key for key in self.reported if key[1] != file}

    def drop(self, file: str, below: int) -> None:
        """Forget the events of this file before line `below`: they belong to an earlier run."""
        self._only(lambda event: event.evidence.file != file or event.number >= below)
        self.tracebacks = [span for span in self.tracebacks if span.file != file or span.first >= below]
        for places in self.places.values():
            places.drop(file, below)
        self.places = {code: places for code, places in self.places.items() if places}
        for (mark, name), numbers in list(self.mark_lines.items()):
            if name == file:
                self.mark_lines[(mark, name)] = [number for number in numbers if number >= below]
        self.mark_lines = {key: numbers for key, numbers in self.mark_lines.items() if numbers}
        self.marks = {mark for mark, _ in self.mark_lines}

    def add_marks(self, marks: List[str], file: str, number: int) -> None:
        for mark in marks:
            self.marks.add(mark)
            if len(self.mark_lines) < MAX_SOURCES:
                numbers = self.mark_lines.setdefault((mark, file), [])
                if len(numbers) < MAX_SOURCES:
                    numbers.append(number)

    def _place(self, code: str, evidence: Evidence, lines: int = 1) -> None:
        if evidence.line:
            self.places.setdefault(code, Places()).add(evidence.file or "", evidence.line, lines)

    def owner(self, file: str) -> Tuple[Optional[int], Optional[str]]:
        """Return rank and host of the file's only writer, as given by the caller or by the file name."""
        return self.owners.get(file) or (rank_of_file(file), None)

    def _only(self, wanted: Callable[[Event], bool]) -> None:
        self._first = list(filter(wanted, self._first))
        self._latest = {source: event for source, event in self._latest.items() if wanted(event)}

    def _keep(self, source: _Source, event: Event, most: int = MAX_PER_RULE_AND_SOURCE) -> None:
        count = self._per_source.get(source, 0)
        if count == 0 and len(self._per_source) >= MAX_SOURCES:
            return
        if count >= most or len(self._first) >= MAX_EVENTS:
            self._latest[source] = event
        else:
            self._first.append(event)
        self._per_source[source] = count + 1


def is_reported(text: str) -> bool:
    """Return True if a launcher or scheduler speaks of a process that it started."""
    return bool(_REPORTED.search(text)) or text.startswith(("srun: ", "slurmstepd: "))


def _reported(text: str) -> Tuple[Optional[int], str, bool]:
    """Return the rank and host that a launcher's report names, and True if that rank is a local rank."""
    found = _REPORTED.search(text)
    if not found:
        return None, "", False
    rank = next(
        (found[name] for name in ("task", "process", "rank", "local", "launched", "spawned", "exited") if found[name]),
        None,
    )
    host = next(filter(None, found.group("host", "node", "pod", "address", "ended", "boxed")), "")
    return (int(rank) if rank else None), host, bool(found["local"] or found["launched"])


def _unit(text: str) -> Optional[int]:
    """Return the number of the task or process in a launcher's report."""
    found = _REPORTED.search(text)
    number = found and (found["task"] or found["process"])
    return int(number) if number else None


@dataclass(frozen=True)
class RankOf:
    """Global ranks of processes, by host and pid; also by device where one process drives several ranks."""

    processes: Dict[Tuple[str, int], int]
    devices: Dict[Tuple[str, int, int], int]

    @staticmethod
    def of(state: Communicators) -> RankOf:
        processes: Dict[Tuple[str, int], int] = {}
        devices: Dict[Tuple[str, int, int], int] = {}
        for process in state.processes.values():
            largest = max((member.nranks for member in process.members), default=0)
            world = [member for member in process.members if member.nranks == largest and member.rank >= 0]
            own = {member.rank for member in world} or _own_ends(process)
            if len(own) == 1:
                processes[(process.host, process.pid)] = own.pop()
            for member in world:
                if member.device is not None:
                    devices[(process.host, process.pid, member.device)] = member.rank
        for rank, (host, pid) in state.test_ranks.items():
            processes.setdefault((host, pid), rank)
        return RankOf(processes, devices)

    def local(self, event: Event) -> bool:
        """Return True if the event's rank is only a local rank."""
        return event.local and self._of_process(event) is None

    def rank(self, event: Event) -> Optional[int]:
        known = self._of_process(event)
        return event.rank if known is None else known

    def _of_process(self, event: Event) -> Optional[int]:
        """Return the rank of the process that wrote the event, as its communicators name it."""
        host, pid = event.host or "", event.pid
        known = self.processes.get((host, pid)) if pid else None
        if known is not None or not pid or event.device is None:
            return known
        return self.devices.get((host, pid, event.device))


def _own_ends(process: Process) -> Set[int]:
    """Return the ranks from which a process connects, for processes whose lines name no communicator."""
    return {
        receiver if side == "receive" else sender
        for member in process.members
        for sender, receiver, side, *_ in member.edges
    }
