"""Everything that diagnose says about a log, as one record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Tuple

from drumbeat.diagnose import environment, failure, missing, transport
from drumbeat.diagnose.communicators import Communicators
from drumbeat.diagnose.conditions import whole
from drumbeat.diagnose.elastic import ElasticSummary
from drumbeat.diagnose.events import Events
from drumbeat.diagnose.failure import Failure
from drumbeat.diagnose.transport import Transport
from drumbeat.diagnose.watchdog import Timeouts
from drumbeat.finding import Finding

SCHEMA = "1.0"


@dataclass(frozen=True)
class Report:
    lines: int
    transport: Transport
    failure: Failure
    environment: Tuple[Finding, ...] = ()
    dropped: int = 0  # observations beyond the bounds of memory
    schema: str = SCHEMA


def make_report(
    lines: int,
    state: Communicators,
    events: Events,
    timeouts: Timeouts,
    elastic: ElasticSummary,
    extra: Tuple[Finding, ...] = (),
) -> Report:
    verdict = transport.judge(state)
    seen = whole(state, verdict, events.marks)
    more = [*extra, *timeouts.findings(verdict.nranks), *missing.different_networks(state), *missing.incomplete(state)]
    failed = failure.judge(events, seen, state, elastic.first, more)
    settings = (*environment.differences(state), *missing.lone_worlds(state))
    return Report(lines, verdict, failed, settings, state.dropped)
