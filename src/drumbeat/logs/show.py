"""The report for a person, on one screen: the failure with its evidence and fix, then the transport, then the rest."""

from __future__ import annotations

import textwrap
from typing import Iterable, List, Optional, Tuple, Union

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
    lines: List[str] = []
    if report.jobs:
        _put("", f"these are logs of {len(report.jobs)} jobs; each is judged by itself", lines, width)
    for job in report.jobs[:MAX_JOBS]:
        lines.append("")
        _put("job", job.words, lines, width)
        _answers(job, lines, width)
    for job in report.jobs[MAX_JOBS:]:
        failure = job.failure
        title = failure.finding.title if failure.finding else "none seen" if failure.answer == NO_FAILURE else "unknown"
        _put("job", f"{job.words}: {title} [{failure.confidence}]", lines, width)
    if not report.jobs:
        _answers(report, lines, width)
    return "\n".join(lines).strip("\n")


def _answers(report: Union[Report, JobReport], lines: List[str], width: int) -> None:
    for dump in report.dumps:
        _dump(dump, lines, width)
    nothing_else = report.failure.answer == NO_FAILURE and report.transport.path.answer == UNKNOWN
    if not (report.dumps and nothing_else):
        _failure(report.failure, lines, width)
        if _tells(report):
            lines.append("")
            _transport(report.transport, lines, width)
    for finding in _worst_first(report.failure.notes)[:MAX_LIST]:
        _item("note", finding, lines, width)
    for finding in report.environment[:MAX_LIST]:
        _item("setting" if finding.code == "settings-differ" else "note", finding, lines, width)
    if report.dropped:
        _put(
            "note",
            f"{report.dropped} observations were not kept: the log holds more than this reader remembers",
            lines,
            width,
        )


def _tells(report: Union[Report, JobReport]) -> bool:
    """Return False where no line is of a communication library, and the failure is not about communication."""
    path, failure = report.transport.path, report.failure
    nothing = path.answer == UNKNOWN and not path.network and not path.evidence and not report.transport.versions
    found = failure.finding
    return not nothing or found is not None and kind_of(found.code, found.title) in WAITS


def _worst_first(findings: Iterable[Finding]) -> List[Finding]:
    return sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))


def _dump(dump: PastedDump, lines: List[str], width: int) -> None:
    """Render what a pasted dump shows, and what that means for a job."""
    _put("dump", f"{dump.kind} ({dump.file})", lines, width)
    for fact in dump.facts[:MAX_FACTS]:
        _put("", fact, lines, width)
    if len(dump.facts) > MAX_FACTS:
        _put("", f"and {len(dump.facts) - MAX_FACTS} more (--json has all)", lines, width)
    for finding in _worst_first(dump.findings)[:MAX_FACTS]:
        _item(finding.severity if finding.severity != INFO else "note", finding, lines, width)
    lines.append("")


def _transport(transport: Transport, lines: List[str], width: int) -> None:
    path = transport.path
    nothing = path.answer == UNKNOWN and not path.network and not path.evidence
    words = "unknown: no line shows a connection or a chosen network" if nothing else path.words
    sure = "" if path.answer == UNKNOWN else f" [{path.confidence}]"
    _put("transport", words + sure, lines, width)
    about = []
    if transport.library or transport.versions:
        about.append(f"{(transport.library or 'nccl').upper()} {', '.join(transport.versions) or 'version not logged'}")
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
        _put("", "; ".join(about), lines, width)
    _evidence(path.evidence, lines, width)
    _record(transport.seen if path.answer != UNKNOWN else (), transport.unseen, lines, width)
    used = {names for _, names in transport.nics}
    if len(used) > 1 or (transport.nics and len(transport.nics) < 3):
        _put(
            "NIC used",
            "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in transport.nics[:16]),
            lines,
            width,
        )
        if len(transport.nics) > 16:
            _put("", f"and {len(transport.nics) - 16} more ranks (--json has all)", lines, width)
    different = {pair.path.words for pair in transport.pairs}
    if len(different) > 1:
        for pair in transport.pairs[:MAX_LIST]:
            _put("pair", f"{pair.a} - {pair.b}: {pair.path.words}", lines, width)
        if len(transport.pairs) > MAX_LIST:
            _put("", f"and {len(transport.pairs) - MAX_LIST} more pairs (--json has all)", lines, width)
    if len(transport.communicators) > 1:
        groups = [f"{_sizes(c.count, c.nranks)}: {c.path.words}" for c in transport.communicators[:MAX_LIST]]
        _put("groups", "; ".join(groups), lines, width)


def _sizes(count: int, nranks: int) -> str:
    return f"{count} x {nranks} ranks" if nranks else f"{count} of unknown size"


def _failure(failure: Failure, lines: List[str], width: int) -> None:
    finding = failure.finding
    if failure.answer == NO_FAILURE:
        again = "in the last attempt" if any(note.code == EARLIER for note in failure.notes) else "seen"
        last = "seen in the last run" if any(EARLIER_RUNS in text for text in failure.unseen) else again
        _put("failure", f"none {last} [{failure.confidence}]", lines, width)
        if failure.in_progress:
            step, _ = of_total(failure.in_progress)
            _put("in progress", f"or cut off{step and f' at {step}'}: {failure.in_progress}", lines, width)
        if failure.last_step:
            _put("last step", failure.last_step, lines, width)
        if failure.reached:
            _put("end", f"its last step was reached ({failure.reached})", lines, width)
    elif failure.answer == NOT_KNOWN:
        _put("failure", f"{'cause not known' if finding else 'unknown'}: {failure.why_first}", lines, width)
        if finding:
            _put("", finding.title + _who(finding), lines, width)
            if finding.fix:
                _put("fix", finding.fix, lines, width)
            _evidence(finding.evidence, lines, width)
    elif finding:
        _put("failure", f"{finding.title}{_who(finding)} [{failure.confidence}]", lines, width)
        for label, words in (("cause", finding.cause), ("fix", finding.fix), ("first", failure.why_first)):
            if words:
                _put(label, words, lines, width)
        _evidence(finding.evidence, lines, width)
        if failure.rule:
            _put("rule", f"{failure.rule} ({failure.source})", lines, width)
    unseen = failure.unseen
    if failure.answer == NO_FAILURE and failure.confidence == CERTAIN and unseen:
        unseen = (*unseen, "the end that is seen is a good one, so this changes nothing")
    _record(failure.seen if failure.answer != NO_FAILURE else (), unseen, lines, width)
    for consequence in failure.consequences[:MAX_LIST]:
        _put("  then", f"{consequence.title}{_who(consequence)}{_where(consequence.evidence)}", lines, width)
    for other in failure.others[:MAX_LIST]:
        _item("also", other, lines, width)


def _record(seen: Tuple[str, ...], unseen: Tuple[str, ...], lines: List[str], width: int) -> None:
    """Render what the answer rests on, and what could not be looked at."""
    if seen:
        shown = [text if len(text) <= MAX_SEEN else text[: MAX_SEEN - 3] + "..." for text in seen[:MAX_LIST]]
        more = f" and {len(seen) - MAX_LIST} more files" if len(seen) > MAX_LIST else ""
        _put("seen", "; ".join(shown) + more, lines, width)
    if unseen:
        _put("not seen", "; ".join(unseen[:MAX_LIST]), lines, width)


def _item(label: str, finding: Finding, lines: List[str], width: int) -> None:
    words = finding.title + _who(finding) + _where(finding.evidence)
    _put(label, words + (f"; {finding.fix}" if finding.fix else ""), lines, width)


def _who(finding: Finding) -> str:
    rank = f"{'local ' if finding.local else ''}rank {finding.rank}" if finding.rank is not None else ""
    rank = "" if finding.title.endswith(f" {rank}") else rank  # it says so itself
    rank = f"task {finding.task}" if finding.rank is None and finding.task is not None else rank
    host = f"on {finding.host}" if finding.host else ""
    who = " ".join(part for part in (rank, host) if part)
    return f" ({who})" if who and not finding.title.endswith((f" {who}", f"({who})")) else ""


def _where(evidence: Tuple[Evidence, ...]) -> str:
    return f" [{evidence[0].place}]" if evidence and evidence[0].file else ""


def _evidence(evidence: Iterable[Evidence], lines: List[str], width: int) -> None:
    for item in list(evidence)[:3]:
        if item.file:
            _put("line", item.place, lines, None)
        _put("", item.text, lines, width)


def plain(text: str) -> str:
    """Remove terminal control characters: logs are untrusted."""
    return printable(text).strip()


def _put(label: str, words: str, lines: List[str], width: Optional[int]) -> None:
    indent = " " * LABEL
    words = plain(words)
    if width is None:
        lines.append(f"{label:<{LABEL}}{words}")
        return
    wrapped = textwrap.wrap(
        words, width, initial_indent=f"{label:<{LABEL}}", subsequent_indent=indent, break_on_hyphens=False
    )
    lines.extend(wrapped or [label])


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
