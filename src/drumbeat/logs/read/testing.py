"""Ends of test runs: the results that runners print for single tests, and the counts at their end.

ctest, pytest, unittest, gtest, Go, cargo, jest and TAP. Tests print any error on purpose, so that their texts prove nothing: a
run failed if a test is reported as failed, and went well if only successes are counted.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import CERTAIN, LIKELY, Evidence, Finding, clipped
from drumbeat.logs.meaning.grammar import is_bare
from drumbeat.logs.read.prefixes import clean, decode

find = Catalog("logs")
LAST = 6  # lines with text in which a run's own count stands alone
MAX_TEXT, MAX_NAMES, MAX_EVIDENCE = 300, 4, 4
# A test's own result. `bad` is the word of a failed one.
_RESULT = regex(
    r"\s*(?:\d+/\d+ Test +#\d+: (?P<ctest>\S+) ?\.*\s*(?:Passed\b|\*{3}(?P<bad1>[A-Z]\w+))"
    r"|\d+ - (?P<listed>\S+) \((?P<bad2>Failed|Timeout|SEGFAULT|[Cc]hild aborted|Subprocess \w+|ILLEGAL|NUMERICAL|BUS|Not Run)\)"
    r"|(?:test )?(?P<unit>\S*test\S*|(?<=test )\S+)(?: \([\w.]+\))? \.\.\. (?:ok|skipped|ignored|(?P<bad3>FAIL(?:ED)?|ERROR))\b"
    r"|--- (?:PASS|SKIP|(?P<bad4>FAIL)): (?P<go>\S+) \("
    r"|\[ +(?:OK|(?P<bad5>FAILED)) +\] (?P<gtest>[\w/.<>-]*[A-Za-z][\w/.<>-]*)(?![ \w]* tests?\b)"
    r"|(?P<node>\S+::\S+) (?:PASSED|SKIPPED|(?P<bad6>FAILED|ERROR))\b"
    r"|(?P<bad7>FAILED|ERROR) (?P<pytest>\S+\.py(?:::\S+)?)(?= - |$)"
    r"|(?P<bad8>FAIL|ERROR): (?P<header>test\w* \([\w.]+\))"
    r"|(?:(?P<bad9>not ok)|ok) \d+ - (?P<tap>\S.{0,80})"
    r"|(?:PASS|(?P<bada>FAIL)) (?P<jest>\S+\.(?:test|spec)\.\w+)"
    r"|(?:\u2713|(?P<badb>\u2715|\u2717)) (?P<case>\S.{0,80}))"
)
# What runners print around results: a heading, or the next test's begin.
_AROUND = regex(
    r"\s*(?:Start +\d+: \S|Test project /|The following tests FAILED:|\[(?:-{6,}|={6,}|[ =]RUN)|=== RUN |running \d+ tests?$"
    r"|collect(?:ed|ing) \d+ items|=+ (?:test session starts|FAILURES|short test summary)|Ran \d+ tests? in |TAP version"
    r"|1\.\.\d+$)"
)
# `5 passed in 3.1s`, `# pass 3`, `ok  pkg/ring  2.7s`, `[  PASSED  ] 3 tests.`; counts of failures: `2 tests failed out of 39`
_PASSED = regex(
    r"(?i)(?:^|[=,;:(.]) {0,12}(?:all )?[1-9]\d*%? (?:tests? |checks? )?(?:pass(?:ed|ing)|succeeded|ok)\b"
    r"|\bpass(?:ed)?(?: *\]|[:=])? [1-9]\d*(?: tests?\.?)?$|^Ran [1-9]\d* tests?\b|^ok\s+\S+\s+(?:[\d.]+s|\(cached\))"
)
_NOT_PASSED = regex(
    r"(?i)(?<![\w.])[1-9]\d* (?:tests? |checks? )?(?:fail(?:ed|ing)|errors?|failures?)\b|\b(?:fail|error)\w*[:=]? [1-9]"
    r"|\b(?-i:FAIL(?:ED)?)\b"
)
_COUNT = regex(
    r"\d+% tests passed, (?P<ctest>[1-9]\d*) tests? failed out of (?P<of>\d+)|FAILED \((?:failures|errors)=(?P<unit>\d+)"
    r"|(?:=+ |^)(?P<pytest>[1-9]\d*) (?:failed|errors?)\b.{0,60} in [\d.]+ ?s"
    r"|^test result: FAILED\. .{0,40}?(?P<cargo>\d+) failed"
    r"|Tests: +(?P<jest>[1-9]\d*) failed|\[ +FAILED +\] (?P<gtest>\d+) tests?, listed below"
)
_ENDED = ("Errors while running CTest", "FAIL\t")


@dataclass(frozen=True)
class TestRun:
    """A test run's end. `number`: the line with its count, else the last one."""

    number: int
    failed: Tuple[Tuple[str, Evidence], ...] = ()  # tests and the lines that report them
    count: int = 0  # of failed tests, as the runner counts them
    of: int = 0
    said: Tuple[Evidence, ...] = ()  # what the failed tests raised

    @property
    def finding(self) -> Finding:
        names = list(dict.fromkeys(name for name, _ in self.failed if name))
        count = self.count or len(names)
        some = ", ".join(names[:MAX_NAMES]) + (f" and {count - MAX_NAMES} more" if names and count > MAX_NAMES else "")
        what = f"{count}{f' of {self.of}' if self.of else ''} test{'s' if max(count, self.of) != 1 else ''}"
        words = f"{what} failed" + (f": {some}" if some else "")
        words += f" ({self.said[0].text})" if count == 1 and self.said else ""
        evidence = (*(each for _, each in self.failed[:MAX_EVIDENCE]), *self.said[:MAX_EVIDENCE])
        return find("tests-failed", words=words, evidence=evidence, confidence=CERTAIN if self.count else LIKELY)


def test_run(file: str, lines: Sequence[Tuple[int, bytes]]) -> Optional[TestRun]:
    """Read the end of a test run from a file's last lines; None if they are none's."""
    texts = [(number, clean(decode(raw)).text) for number, raw in lines if raw.strip()]
    failed: List[Tuple[str, Evidence]] = []
    counts: Dict[int, Tuple[int, int]] = {}
    shown, said = 0, []
    for number, text in texts:
        raised = text.removeprefix("E ").lstrip()
        if is_bare(raised):
            said.append(Evidence(clipped(raised, MAX_TEXT), file, number))
        result, counted = _RESULT.match(text), _COUNT.search(text)
        shown += bool(result or counted or _AROUND.match(text))
        if counted or text.startswith(_ENDED):
            groups = counted.groupdict() if counted else {}
            of = int(groups.pop("of", None) or 0)
            shown += 1
            counts[number] = int(next(filter(None, groups.values()), 0)), of
        elif result:
            groups = {key: value for key, value in result.groupdict().items() if value}
            if any(key.startswith("bad") for key in groups):
                name = next(value for key, value in groups.items() if not key.startswith("bad"))
                failed.append((name, Evidence(clipped(text.strip(), MAX_TEXT), file, number)))
    if counts and shown > 1 or failed and shown > 1:
        number = max(counts, default=texts[-1][0])  # without a count the run was cut: its last lines are a test's
        count, of = max(counts.values(), default=(0, 0))
        if not failed:
            failed = [("", Evidence(clipped(text.strip(), MAX_TEXT), file, at)) for at, text in texts if at in counts]
        return TestRun(
            number, tuple(failed), count or len({name for name, _ in failed}) * bool(counts), of, tuple(said)
        )
    good = [number for number, text in texts[-LAST:] if _PASSED.search(text)]
    return TestRun(good[-1]) if good and not any(_NOT_PASSED.search(text) for _, text in texts[-LAST:]) else None
