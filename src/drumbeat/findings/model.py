"""Results of a check: one observation is a Finding, the answer of a whole check is a Verdict.

Both say how sure they are and what that rests on. `certain`: what was looked at names it. `likely`: it fits, but other
explanations fit too. `unknown`: it was not or could not be looked at. A verdict that names nothing it looked at is
never certain.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Iterable, Mapping, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.redact import harmless, redact

OK, INFO, WARNING, ERROR = "ok", "info", "warning", "error"
SEVERITIES = (OK, INFO, WARNING, ERROR)
CERTAIN, LIKELY, UNKNOWN = "certain", "likely", "unknown"
CONFIDENCES = (CERTAIN, LIKELY, UNKNOWN)

# Codes of a rank's end that tell nothing about the cause: drumbeat, or another rank, came first.
STOPPED, PEER_LOST = "stopped", "peer-lost"
ENDED_BY_US = "ended by drumbeat"  # in words; the rank itself had not failed
CAUGHT = "caught-error"  # the last words of a rank that ended with 0: a program that catches its own failure hides it


# Codes of earlier versions -> the one of today: run folders keep what was written, and one fault has one code.
WAS = {
    **dict.fromkeys(("deepspeed-missing", "horovod-missing", "maxtext-missing", "mpi4py-missing"), "framework-module"),
    "deepspeed-ops": "deepspeed-operators",
    "deepspeed-other-torch": "deepspeed-torch",
    "gid-no-address": "gid-missing",
    "gid-none": "gid-missing",
    "gpu-mig": "gpu-divided",
    "gpu-partitioned": "gpu-divided",
    "gpu-pcie-narrow": "pcie-narrow",
    "gpu-rows-remapped": "gpu-remap-pending",
    "link-types-mixed": "rdma-mixed",
    "nccl-roce-gid": "gid-index",
    "rdma-port-slow": "rdma-rate-low",
    "tasks-away-from-gpu": "cpu-bind-away-from-gpu",
}


def shown(text: str) -> str:
    """Return the text safe to print and to keep: control characters removed, secrets replaced by `…`."""
    return redact(harmless(text))


def clipped(text: str, most: int) -> str:
    """Return the start of a text. Secrets are replaced first, so that the cut cannot make one unrecognisable."""
    return text if len(text) <= most else shown(text)[:most]


def _clean(record: object, *fields: str) -> None:
    for name in fields:
        value = getattr(record, name)
        clean = shown(value) if isinstance(value, str) else tuple(map(shown, value))
        object.__setattr__(record, name, clean)


@dataclass(frozen=True)
class Evidence:
    """The line, value or reading that a finding rests on, and its place; both are safe to show."""

    text: str
    file: Optional[str] = None
    line: Optional[int] = None

    def __post_init__(self) -> None:
        _clean(self, "text")

    @property
    def place(self) -> str:
        """Return `train.log:12`; empty if the evidence is not from a file."""
        return f"{self.file}:{self.line}" if self.file and self.line else self.file or ""


@dataclass(frozen=True)
class Finding:
    """One observation: what is wrong, how bad it is, the evidence for it, and what to do."""

    code: str  # stable, kebab-case: `port-in-use`, `memlock-low`
    severity: str  # one of SEVERITIES; an error is what breaks this job
    title: str  # one line, no full stop
    cause: str = ""
    fix: str = ""
    evidence: Tuple[Evidence, ...] = ()
    node: Optional[int] = None  # its number in the run, that of its folder
    host: Optional[str] = None
    rank: Optional[int] = None
    local: bool = False  # `rank` counts on its node only: a launcher named no other
    task: Optional[int] = None  # a launcher's number for what it started on that host, where it is no rank
    support: str = ""  # words for the support desk, where only root can fix it
    confidence: str = CERTAIN  # one of CONFIDENCES: that this is what happened
    seen: Tuple[str, ...] = ()  # what was looked at: ranks, lines, files, counters
    unseen: Tuple[str, ...] = ()  # what could not be looked at
    guessed: bool = False  # its code is what a program's words may mean; nothing is decided about machines by it

    def __post_init__(self) -> None:
        assert self.severity in SEVERITIES, self.severity
        assert self.confidence in CONFIDENCES, self.confidence
        if self.code in WAS:
            object.__setattr__(self, "code", WAS[self.code])
        _clean(self, "title", "cause", "fix", "support", "seen", "unseen")


@dataclass(frozen=True)
class Verdict:
    """The answer of one check. `answer` is a word of that check, or 'unknown'; it is never a guess."""

    check: str
    answer: str
    confidence: str = UNKNOWN  # one of CONFIDENCES; certain falls to likely where `seen` is empty
    summary: str = ""
    findings: Tuple[Finding, ...] = ()
    seen: Tuple[str, ...] = ()  # what was looked at: ranks, lines, files, counters
    unseen: Tuple[str, ...] = ()  # what could not be looked at
    count: Optional[int] = None  # of the check `world`: ranks of the one world that was seen

    def __post_init__(self) -> None:
        assert self.confidence in CONFIDENCES, self.confidence
        _clean(self, "summary", "seen", "unseen")
        if self.answer == UNKNOWN:
            object.__setattr__(self, "confidence", UNKNOWN)
        elif self.confidence == CERTAIN and not self.seen:
            object.__setattr__(self, "confidence", LIKELY)

    @property
    def words(self) -> str:
        """Return answer and summary; only the summary if it begins with the answer, or if a good answer is not certain."""
        unproven = self.answer == "as planned" and self.confidence != CERTAIN
        if not self.summary or self.summary.startswith(self.answer) or unproven:
            return self.summary or self.answer
        return f"{self.answer}: {self.summary}"


@dataclass(frozen=True)
class PastedDump:
    """The output of a tool that was pasted beside a log: what it shows, and what that means for a job."""

    kind: str  # the command that printed it
    file: str
    facts: Tuple[str, ...]  # in words
    findings: Tuple[Finding, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)  # the facts for programs


def worst(findings: Iterable[Finding]) -> str:
    """Return the worst severity of the findings; `ok` if there are none."""
    return max((finding.severity for finding in findings), key=SEVERITIES.index, default=OK)
