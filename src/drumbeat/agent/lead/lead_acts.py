"""What the lead may ask for: tell members something, record an event, end the run. `lead_side` carries it out."""

from __future__ import annotations

from typing import Any, Dict, Tuple, Union

from drumbeat.agent.wire.messages import Message
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.record import to_plain
from drumbeat.findings.model import Finding


@dataclass(frozen=True)
class Tell:
    """Send one message to these members."""

    members: Tuple[int, ...]
    message: Message


@dataclass(frozen=True)
class Record:
    kind: str
    data: Dict[str, Any]


@dataclass(frozen=True)
class Finish:
    exit_code: int


Act = Union[Tell, Record, Finish]


def record_finding(finding: Finding, kind: str = "finding") -> Record:
    return Record(kind, {"finding": to_plain(finding)})
