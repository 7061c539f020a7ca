"""What a check says: one observation is a Finding, the answer of a whole check is a Verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Optional, Tuple

from drumbeat.secret import redact

OK, INFO, WARNING, ERROR = "ok", "info", "warning", "error"
SEVERITIES = (OK, INFO, WARNING, ERROR)


@dataclass(frozen=True)
class Evidence:
    """The line, value or reading that a finding rests on, and where it stands. Secrets in the text are replaced by `…`."""

    text: str
    file: Optional[str] = None
    line: Optional[int] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", redact(self.text))


@dataclass(frozen=True)
class Finding:
    """One observation: what is so, how bad that is, what shows it, and what to do."""

    code: str  # stable, kebab-case: `port-in-use`, `memlock-low`
    severity: str  # one of SEVERITIES; an error is what breaks this job
    title: str  # one line, no full stop
    cause: str = ""
    fix: str = ""
    evidence: Tuple[Evidence, ...] = ()
    node: Optional[int] = None  # node rank
    host: Optional[str] = None
    rank: Optional[int] = None
    support: str = ""  # words for the support desk, where only root can mend it

    def __post_init__(self) -> None:
        assert self.severity in SEVERITIES, self.severity
        object.__setattr__(self, "title", redact(self.title))


@dataclass(frozen=True)
class Verdict:
    """The answer of one check. `answer` is a word of that check; 'unknown' is always allowed, a guess never."""

    check: str
    answer: str
    confidence: str = "certain"  # certain, likely, unknown
    summary: str = ""
    findings: Tuple[Finding, ...] = ()


def worst(findings: Iterable[Finding]) -> str:
    """The worst severity among them; `ok` when there are none."""
    return max((finding.severity for finding in findings), key=SEVERITIES.index, default=OK)
