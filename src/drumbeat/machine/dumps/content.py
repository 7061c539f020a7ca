"""What a reader of pasted dumps gives back."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Mapping, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.model import Finding


@dataclass(frozen=True)
class Content:
    """One dump as its reader understands it."""

    kind: str  # the command that printed it
    facts: Tuple[str, ...]  # what it shows, in words
    findings: Tuple[Finding, ...] = ()  # what that means for a job
    data: Mapping[str, Any] = field(default_factory=dict)  # the same for programs


@dataclass(frozen=True)
class Dump:
    """A dump and the file that it stood in."""

    kind: str
    file: str
    facts: Tuple[str, ...]
    findings: Tuple[Finding, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
