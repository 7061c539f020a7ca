"""How one attempt ended, as far as what follows depends on it."""

from __future__ import annotations

from typing import Optional

from drumbeat.agent.lead.member import Assignment
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.causes.table import PROGRAM, Cause, cause_of
from drumbeat.findings.model import Finding

FINISHED, FAILED, CANCELLED, TIME_LIMIT, REQUEUE = "finished", "failed", "cancelled", "time-limit", "requeue"
DOUBTFUL = "doubtful"  # all exit codes are 0, but what a rank wrote last is a failure, or it ended before its last step

PORT_IN_USE = "port-in-use"
_PORT = regex(r"(?:\bport[:=]? ?|:)(\d{4,5})\b")


@dataclass(frozen=True)
class Outcome:
    """How one attempt ended, and who took part."""

    outcome: str
    exit_code: int
    finding: Optional[Finding] = None
    assignment: Assignment = ()
    port: int = 0  # where its ranks met; 0: they did not
    port_taken: bool = False  # somebody else had that port when the attempt was over
    member: Optional[int] = None  # on which it failed first; none: not known
    step: Optional[int] = None  # the last one reported; none: none was
    nan_since: Optional[int] = None  # the first of the steps at the end whose loss was NaN or infinite; none: not known
    saved: Optional[int] = None  # the step of the last checkpoint; none: not known
    t: float = 0.0  # when it ended, on the lead's monotonic clock

    @property
    def cause(self) -> Cause:
        if self.finding is not None and self.finding.code == PORT_IN_USE and not self._was_our_port():
            return PROGRAM  # a port that the program chose itself would be taken again
        return cause_of(self.finding, self.exit_code)

    def _was_our_port(self) -> bool:
        """As the failure's own line says; where it names no port, as the machine says."""
        assert self.finding
        named = {int(port) for each in self.finding.evidence for port in _PORT.findall(each.text)}
        return self.port in named if named and self.port else self.port_taken
