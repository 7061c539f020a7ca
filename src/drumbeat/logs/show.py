"""The report for a person, on one screen: the failure with its evidence and fix, then the transport, then the rest."""

from __future__ import annotations

import textwrap
from typing import Iterable, List, Sequence, Tuple, Union

from drumbeat.base.redact import printable
from drumbeat.causes.events import WAITS
from drumbeat.causes.table import kind_of
from drumbeat.findings.model import CERTAIN, INFO, SEVERITIES, UNKNOWN, Evidence, Finding, PastedDump
from drumbeat.logs.failure import EARLIER, EARLIER_RUNS, NO_FAILURE, NOT_KNOWN, Failure
from drumbeat.logs.meaning.rules import Rulebook
from drumbeat.logs.nccl.paths import LOCAL
from drumbeat.logs.nccl.transport import Transport
from drumbeat.logs.read.progress import of_total
from drumbeat.logs.report import JobReport, Report

LABEL = 12
MAX_LIST = 6
MAX_FACTS = 40
MAX_JOBS = 4  # that are shown in full; of the others, a line each
MAX_SEEN = 120  # characters of one file's line numbers


def render(report: Report, width: int = 110) -> str:
    screen = _Screen(width)
    if report.jobs:
        screen.put("", f"these are logs of {len(report.jobs)} jobs; each is judged by itself")
    for job in report.jobs[:MAX_JOBS]:
        screen.lines.append("")
        screen.put("job", job.words)
        screen.answers(job)
    for job in report.jobs[MAX_JOBS:]:
        failure = job.failure
        title = failure.finding.title if failure.finding else "none seen" if failure.answer == NO_FAILURE else "unknown"
        screen.put("job", f"{job.words}: {title} [{failure.confidence}]")
    if not report.jobs:
        screen.answers(report)
    return "\n".join(screen.lines).strip("\n")


class _Screen:
    def __init__(self, width: int) -> None:
        self.lines: List[str] = []
        self._width = width

    def put(self, label: str, words: str, wrap: bool = True) -> None:
        """Add a text with its label. Control characters are left out: logs are untrusted."""
        words, label = printable(words).strip(), f"{label:<{LABEL}}"
        if not wrap:
            self.lines.append(label + words)
            return
        indent = " " * LABEL
        wrapped = textwrap.wrap(
            words, self._width, initial_indent=label, subsequent_indent=indent, break_on_hyphens=False
        )
        self.lines.extend(wrapped or [label.rstrip()])

    def answers(self, report: Union[Report, JobReport]) -> None:
        for dump in report.dumps:
            self._dump(dump)
        nothing_else = report.failure.answer == NO_FAILURE and report.transport.path.answer == UNKNOWN
        if not (report.dumps and nothing_else):
            self._failure(report.failure)
            if _tells(report):
                self.lines.append("")
                self._transport(report.transport)
        for finding in _worst_first(report.failure.notes)[:MAX_LIST]:
            self._item("note", finding)
        for finding in report.environment[:MAX_LIST]:
            self._item("setting" if finding.code == "settings-differ" else "note", finding)
        if report.dropped:
            many = "observations were not kept: the log holds more than this reader remembers"
            self.put("note", f"{report.dropped} {many}")

    def _dump(self, dump: PastedDump) -> None:
        """Render what a pasted dump shows, and what that means for a job."""
        self.put("dump", f"{dump.kind} ({dump.file})")
        self._list("", dump.facts, MAX_FACTS, "")
        for finding in _worst_first(dump.findings)[:MAX_FACTS]:
            self._item(finding.severity if finding.severity != INFO else "note", finding)
        self.lines.append("")

    def _list(self, label: str, texts: Sequence[str], most: int, what: str) -> None:
        for text in texts[:most]:
            self.put(label, text)
        if len(texts) > most:
            self.put("", f"and {len(texts) - most} more{what} (--json has all)")

    def _transport(self, transport: Transport) -> None:
        path = transport.path
        nothing = path.answer == UNKNOWN and not path.network and not path.evidence
        words = "unknown: no line shows a connection or a chosen network" if nothing else path.words
        self.put("transport", words + ("" if path.answer == UNKNOWN else f" [{path.confidence}]"))
        about = []
        if transport.library or transport.versions:
            versions = ", ".join(transport.versions) or "version not logged"
            about.append(f"{(transport.library or 'nccl').upper()} {versions}")
        if transport.nranks:
            about.append(f"{transport.nranks} ranks" + (f" on {transport.nnodes} nodes" if transport.nnodes else ""))
        if transport.nodes:
            about.append("hosts " + _some(transport.nodes))
        if path.network and path.answer != LOCAL:
            about.append(f"network {path.network}")
        if path.answer == LOCAL and transport.selected:
            about.append(f"network chosen but idle: {', '.join(transport.selected)}")
        if transport.plugin:
            about.append(f"plug-in {transport.plugin}")
        if path.devices or transport.devices:
            about.append(("used " if path.devices else "found ") + _some(path.devices or transport.devices))
        if transport.interfaces:
            about.append(f"bootstrap over {_some(transport.interfaces)} (control only)")
        if about:
            self.put("", "; ".join(about))
        self._evidence(path.evidence)
        self._record(transport.seen if path.answer != UNKNOWN else (), transport.unseen)
        used = {names for _, names in transport.nics}
        if len(used) > 1 or (transport.nics and len(transport.nics) < 3):
            self.put("NIC used", "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in transport.nics[:16]))
            if len(transport.nics) > 16:
                self.put("", f"and {len(transport.nics) - 16} more ranks (--json has all)")
        if len({pair.path.words for pair in transport.pairs}) > 1:
            pairs = [f"{pair.a} - {pair.b}: {pair.path.words}" for pair in transport.pairs]
            self._list("pair", pairs, MAX_LIST, " pairs")
        if len(transport.communicators) > 1:
            sizes = [f"{one.nranks} ranks" if one.nranks else "of unknown size" for one in transport.communicators]
            groups = zip(sizes, transport.communicators[:MAX_LIST])
            words = "; ".join(f"{one.count}{' x' * bool(one.nranks)} {size}: {one.path.words}" for size, one in groups)
            self.put("groups", words)

    def _failure(self, failure: Failure) -> None:
        finding = failure.finding
        if failure.answer == NO_FAILURE:
            again = "in the last attempt" if any(note.code == EARLIER for note in failure.notes) else "seen"
            last = "seen in the last run" if any(EARLIER_RUNS in text for text in failure.unseen) else again
            self.put("failure", f"none {last} [{failure.confidence}]")
            if failure.in_progress:
                step, _ = of_total(failure.in_progress)
                self.put("in progress", f"or cut off{step and f' at {step}'}: {failure.in_progress}")
            if failure.last_step:
                self.put("last step", failure.last_step)
            if failure.reached:
                self.put("end", f"its last step was reached ({failure.reached})")
        elif failure.answer == NOT_KNOWN:
            self.put("failure", f"{'cause not known' if finding else 'unknown'}: {failure.why_first}")
            if finding:
                self.put("", finding.title + _who(finding))
                if finding.fix:
                    self.put("fix", finding.fix)
                self._evidence(finding.evidence)
        elif finding:
            self.put("failure", f"{finding.title}{_who(finding)} [{failure.confidence}]")
            for label, words in (("cause", finding.cause), ("fix", finding.fix), ("first", failure.why_first)):
                if words:
                    self.put(label, words)
            self._evidence(finding.evidence)
            if failure.rule:
                self.put("rule", f"{failure.rule} of drumbeat diagnose --rules ({failure.source})")
        unseen = failure.unseen
        if failure.answer == NO_FAILURE and failure.confidence == CERTAIN and unseen:
            unseen = (*unseen, "the end that is seen is a good one, so this changes nothing")
        self._record(failure.seen if failure.answer != NO_FAILURE else (), unseen)
        for consequence in failure.consequences[:MAX_LIST]:
            self.put("  then", f"{consequence.title}{_who(consequence)}{_where(consequence.evidence)}")
        for other in failure.others[:MAX_LIST]:
            self._item("also", other)

    def _record(self, seen: Tuple[str, ...], unseen: Tuple[str, ...]) -> None:
        """Render what the answer rests on, and what could not be looked at."""
        if seen:
            shown = [text if len(text) <= MAX_SEEN else text[: MAX_SEEN - 3] + "..." for text in seen[:MAX_LIST]]
            more = f" and {len(seen) - MAX_LIST} more files" if len(seen) > MAX_LIST else ""
            self.put("seen", "; ".join(shown) + more)
        if unseen:
            self.put("not seen", "; ".join(unseen[:MAX_LIST]))

    def _item(self, label: str, finding: Finding) -> None:
        words = finding.title + _who(finding) + _where(finding.evidence)
        self.put(label, words + (f"; {finding.fix}" if finding.fix else ""))

    def _evidence(self, evidence: Iterable[Evidence]) -> None:
        for item in list(evidence)[:3]:
            if item.file:
                self.put("line", item.place, wrap=False)
            self.put("", item.text)


def _tells(report: Union[Report, JobReport]) -> bool:
    """Return False where no line is of a communication library, and the failure is not about communication."""
    path, failure = report.transport.path, report.failure
    nothing = path.answer == UNKNOWN and not path.network and not path.evidence and not report.transport.versions
    found = failure.finding
    return not nothing or found is not None and kind_of(found.code, found.title) in WAITS


def _worst_first(findings: Iterable[Finding]) -> List[Finding]:
    return sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))


def _who(finding: Finding) -> str:
    rank = f"{'local ' if finding.local else ''}rank {finding.rank}" if finding.rank is not None else ""
    rank = "" if finding.title.endswith(f" {rank}") else rank  # it says so itself
    rank = f"task {finding.task}" if finding.rank is None and finding.task is not None else rank
    host = f"on {finding.host}" if finding.host else ""
    who = " ".join(part for part in (rank, host) if part)
    return f" ({who})" if who and not finding.title.endswith((f" {who}", f"({who})")) else ""


def _where(evidence: Tuple[Evidence, ...]) -> str:
    return f" [{evidence[0].place}]" if evidence and evidence[0].file else ""


def _some(names: Tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def render_rules(book: Rulebook) -> str:
    """Every rule in a few lines: `drumbeat diagnose --rules`."""
    lines: List[str] = []
    for rule in book.rules:
        marks = [rule.role] + [f"{rule.library or 'library'} {rule.versions}".strip()] * bool(
            rule.versions or rule.library
        )
        lines.append(f"{rule.id:<5}{rule.code}  [{', '.join(marks)}]  {rule.file}")
        lines.append(f"     {rule.title}")
        lines.append(f"     cause: {rule.cause}")
        lines.append(f"     fix: {'; '.join(filter(None, (rule.locate, rule.fix)))}")
        lines.append(f"     source: {rule.source}")
    return "\n".join(lines)
