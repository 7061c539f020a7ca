"""Find drumbeat's own verdict in a text: the end of its console, the output of `status` or `report`.

Such a block is a record with fields (outcome, rank, host, node, title, cause), and the best evidence there is: drumbeat saw
the run end. It is removed from the text. The last one in a file counts unless another attempt follows.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

from drumbeat.base.ranges import numbers
from drumbeat.base.regex import regex
from drumbeat.findings.catalog import OPTIONAL, entries
from drumbeat.findings.model import CERTAIN, ENDED_BY_US, ERROR, INFO, LIKELY, Evidence, Finding
from drumbeat.findings.recorded import Recorded
from drumbeat.logs.meaning.grammar import is_bare
from drumbeat.logs.meaning.rules import rulebook
from drumbeat.logs.meaning.senses import sense
from drumbeat.logs.read.prefixes import decode, without_colour
from drumbeat.logs.reader import Reader
from drumbeat.logs.recorded import with_record
from drumbeat.logs.report import Report
from drumbeat.logs.tiers import is_own_failure

_WIDTH = 11  # of a label with its gap
_PREFIX = r"(?P<prefix>(?:\[[^\]]{1,40}\](?:<\w+>)?:? ?|[\w.:+-]{1,40}[: ] ?){0,3}?)"  # srun -l, a time, a host
_ROW = regex(rf"{_PREFIX}(?P<row>(?P<label>[A-Za-z][A-Za-z -]{{0,8}}[A-Za-z\d]) +(?P<text>\S.*))")
_MORE = regex(rf"{_PREFIX} {{{_WIDTH}}}(?P<text>\S.*)")
_BEGINS = {"drumbeat": regex(r"\S+: \d+ nodes? x "), "run": regex(r"\S+$")}
_END = regex(r"(?P<outcome>finished|failed|cancelled|time-limit|doubtful)\b.*\bexit code (?P<code>-?\d+)")
_WHO = regex(
    r"(?:rank (?P<rank>\d+)(?: on (?P<host>[\w.-]+)(?: \(node (?P<node>\d+)\))?)?|ranks (?P<ranks>\d+)[\d,. -]*)"
    r"(?P<colon>:)? (?P<title>.+)"
)
_STANDS = r"(?:no step|nothing moves) for [\d.]+ \w+: "
_HANG = regex(rf"{_STANDS}(?:rank (?P<rank>\d+) )?")
_HEADS = ("failed", "doubt", "hang", "error")  # the most informative one first
_FRAME = ("run", "state", "end")
_GROUP = regex(r"ranks? ([\d,-]+)[^:;]*: (.+?)(?=; ranks? \d|$)")
_NAMED = regex(r"\{\w+(?::[\w.,%]+)?\}")
_WORK = ("progress", "loss", "step")  # as lines of any program
_PARTS = ("cause", "log", "fix", "then")  # of the head above them
_CATALOGS = ("lead", "logs", "machine", "plan", "ranks", "watchers")
_LASTED = r"(?:; it lasted [\d.]+ \w+(?: \d+ \w+)?)?"
_IN_ONE = regex(r"(?P<title>.+?)(?: \((?P<cause>.+)\))?(?P<fix>)")
_LONGEST = 1000  # characters of a verdict
_FEWEST = 8  # letters needed to recognise a known text

_Fields = Dict[str, Tuple[str, int]]  # label -> text, line


class _Block:
    """Rows of a text that may form a verdict."""

    def __init__(self) -> None:
        self.fields: _Fields = {}
        self.head = self.last = ""
        self.sure = False  # it is a verdict, and continues

    def add(self, label: str, text: str, number: int) -> bool:
        """Add a row; return False if it is not part of a verdict."""
        name = self.last = self._name(label, text)
        if name in _HEADS or label in ("error", "warning"):
            self.head = name
            for part in _PARTS if name in _HEADS else ():
                self.fields.pop(part, None)
        if name in _WORK or not self.sure and name not in (*_HEADS, *_PARTS, *_FRAME):
            return False
        self.fields[name] = (text, number)
        told = _WHO.match(text) if name == "failed" else None
        self.sure = self.sure or bool(
            name == "end" and _END.match(text)
            or name == "state" and "run" in self.fields
            or name == "hang" and _HANG.match(text)
            or told and told["node"]
        )  # fmt: skip
        return True

    def _name(self, label: str, text: str) -> str:
        if label in ("error", "warning"):  # while the run goes on; in a report, the first error is the failure
            of_report = label == "error" and "end" in self.fields and "error" not in self.fields
            return "hang" if _HANG.match(text) else "error" if of_report else ""
        return label if label not in _PARTS or self.head else ""

    def go_on(self, text: str) -> bool:
        """Add a continuation line to the last row; return False for one that quotes a log."""
        if self.last in self.fields and self.last != "log":
            self.fields[self.last] = (f"{self.fields[self.last][0]} {text}", self.fields[self.last][1])
        return self.last != "log"


class OwnVerdicts:
    """The last verdict of each file."""

    def __init__(self) -> None:
        self._verdicts: Dict[str, _Fields] = {}

    def take(self, file: str, first: int, lines: Sequence[bytes]) -> List[bytes]:
        """Return the lines at the end of a file, with those of verdicts blanked. Log lines that `status` quotes are kept."""
        kept, block = list(lines), _Block()
        own: List[int] = []
        for place, raw in enumerate(lines):
            text = without_colour(decode(raw)).rstrip()
            row = _ROW.match(text)
            label, words = (
                (row["label"], row["text"]) if row and row["row"] == f"{row['label']:<10} {row['text']}" else ("", "")
            )
            more = _MORE.match(text) if block.last and not label else None
            begins = label in _BEGINS and bool(_BEGINS[label].match(words))
            if begins or label == "restart":
                block, own = _Block(), []
                self._verdicts.pop(file, None)
            elif label == "resumed":
                block.fields.pop("hang", None)
            if label and block.add(label, words, first + place) or more and block.go_on(more["text"]):
                own.append(place)
            elif not label and not more:
                block.last, block.sure, own = "", False, []
            if block.sure:
                self._verdicts[file] = block.fields
                for number in own:
                    kept[number] = b""
        return kept

    def judged(self, reader: Reader) -> Report:
        """Return the reader's report, corrected by the verdict on the run."""
        reader.of_a_run = reader.of_a_run or bool(self._verdicts)
        report = reader.report()
        for file, fields in reversed(list(self._verdicts.items()) if reader.recorded is None else []):
            last = max((number for _, number in fields.values()), default=0)
            behind = [e for e in reader.events.kept if e.evidence.file == file and e.number > last]
            if last and last >= reader.runs.begins.get(file, 0) and not any(map(is_own_failure, behind)):
                failure = with_record(report.failure, _recorded(file, fields))
                codes = {each.code for each in (failure.finding, *failure.others, *failure.consequences) if each}
                then = _consequences(file, *fields["then"]) if "then" in fields else ()
                more = tuple(each for each in then if each.code not in codes)
                return replace(report, failure=replace(failure, consequences=failure.consequences + more))
        return report


def _recorded(file: str, fields: _Fields) -> Recorded:
    end = _END.match(fields["end"][0]) if "end" in fields else None
    outcome = end["outcome"] if end else fields["state"][0].partition(":")[0] if "state" in fields else ""
    code = int(end["code"]) if end else None
    outcome = "requeue" if outcome == "cancelled" and code == 75 else outcome
    head = next((head for head in _HEADS if head in fields), None)
    stopped = _groups(fields["then"][0]) if "then" in fields else []
    ended = (rank for ranks, what in stopped if what == ENDED_BY_US for rank in numbers(ranks))
    source = Evidence("", file, fields[head][1] if head else max(fields.values(), key=lambda row: row[1])[1]).place
    cause = _finding(file, head, fields) if head and outcome != "finished" else None
    return Recorded(source, outcome, code, cause, ended_by_us=frozenset(ended))


def _finding(file: str, head: str, fields: _Fields) -> Finding:
    text, number = fields[head]
    who, hang = _WHO.match(text), _HANG.match(text)
    title, rank, told = text, hang["rank"] if hang else None, who.groupdict() if who else {}
    if who:
        rank = who["rank"] or who["ranks"]
        title = who["title"] if who["colon"] else f"rank {rank} {who['title']}"
    cause, fix = (fields[part][0] if part in fields else "" for part in ("cause", "fix"))
    whole = title + (f" ({cause})" if cause else "") + (f": {fix}" if fix else "")
    code, parts = _known(whole)
    if head in ("error", "hang") and not cause and not fix:  # of a report, in one line
        found = parts if head == "hang" else parts or _IN_ONE.fullmatch(title)
        title, cause, fix = (found[part] or "" for part in ("title", "cause", "fix")) if found else (title, "", "")
    code = code or ("exception" if is_bare(title) else sense(title) or "unknown")
    sure = LIKELY if head == "doubt" or code.startswith("hang-") else CERTAIN
    evidence = Evidence(text, file, number)
    return Finding(
        code, ERROR, title, cause, fix, (evidence,), int(told["node"]) if told.get("node") else None, told.get("host"),
        int(rank) if rank else None, confidence=sure, seen=(evidence.place,),
    )  # fmt: skip


def _groups(text: str) -> List[Tuple[str, str]]:
    """Parse groups of ranks and their ends: `rank 0: a connection was closed; ranks 2-3: ended by drumbeat`."""
    return [(found[1], found[2]) for found in _GROUP.finditer(text)]


def _consequences(file: str, text: str, number: int) -> Iterator[Finding]:
    for ranks, what in _groups(text):
        rank = int(ranks) if ranks.isdigit() else None
        title = what if rank is not None else f"ranks {ranks}: {what}"
        evidence = (Evidence(text, file, number),)
        yield Finding(_known(what)[0] or "unknown", INFO, title, evidence=evidence, rank=rank)


def _known(text: str) -> Tuple[str, Optional[re.Match[str]]]:
    """Return code and parts of a `title (cause): fix` text by matching drumbeat's own finding texts."""
    text = text[:_LONGEST]
    best: Tuple[str, Optional[re.Match[str]]] = ("", None)
    found = _FEWEST - 1
    for code, templates, literals in _templates():
        letters = [sum(map(len, pieces)) for pieces in literals]
        there = [all(piece in text for piece in pieces) for pieces in literals]
        if not there[0] or sum(count for count, here in zip(letters, there) if here) <= found:
            continue
        title, *others = map(_pattern, templates)
        for (cause, fix), counted in ((others, letters), ((".+", ".+"), letters[:1])):  # its own words, or others
            pattern = rf"(?P<title>{title}{_LASTED})(?: \((?P<cause>{cause})\))?(?:: (?P<fix>{fix}))?"
            match = re.fullmatch(pattern, text)
            score = sum(count for count, part in zip(counted, ("title", "cause", "fix")) if match and match[part])
            if score > found:
                best, found = (code, match), score
    return best


@functools.lru_cache(None)
def _templates() -> List[Tuple[str, Tuple[str, ...], List[List[str]]]]:
    """Return code, then title, cause and fix, with the literal words of each."""
    known: List[Tuple[str, Tuple[str, ...]]] = [
        (rule.code, (rule.title, rule.cause, rule.fix)) for rule in rulebook().rules
    ]
    for file in _CATALOGS:
        for name, entry in entries(file).items():
            known.append((name.partition("/")[0], tuple(entry.get(part, "") for part in ("title", "cause", "fix"))))
    return [(code, templates, list(map(_literals, templates))) for code, templates in known]


def _literals(template: str) -> List[str]:
    return [piece for piece in _NAMED.sub("\0", OPTIONAL.sub("\0", template)).split("\0") if piece]


def _pattern(template: str) -> str:
    parts = OPTIONAL.split(template)  # every second one is optional
    filled = (".*?".join(map(re.escape, _NAMED.split(part))) for part in parts)
    return "".join(f"(?:{part})?" if place % 2 else part for place, part in enumerate(filled))
