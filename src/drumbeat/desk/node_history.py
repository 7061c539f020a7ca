"""From the events of past runs to what is known about nodes: who was lost, who failed first, who was slow.

Runs on emulated nodes say nothing about a machine and are left out.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.order import Order
from drumbeat.base.record import RecordError
from drumbeat.causes.table import HARDWARE, PROGRAM, cause_of
from drumbeat.desk.node_store import Exclusion, NotKept, Sighting, Store, change_store, read_store
from drumbeat.desk.runs import all_runs
from drumbeat.findings.model import Finding
from drumbeat.runfolder import events as kinds
from drumbeat.runfolder.events import Event
from drumbeat.runfolder.run import Run

LOST, BAD, FIRST, SLOW = "lost", "bad hardware", "failed first", "slow rank"
KINDS = (LOST, BAD, FIRST, SLOW)
KEPT_FOR = 7 * 86400.0  # seconds that a node is avoided after its hardware failed
MOST_BY_ITSELF = 16  # nodes of a site that are avoided without anybody having said so
_LARGEST_EVENTS = 64 << 20  # bytes


def learn(environ: Mapping[str, str], now: Optional[float] = None) -> Store:
    """Read what runs have recorded since the last time; where that cannot be kept, it is said, and read again the next time.
    Problem: the store cannot be used."""
    found = [run for run in all_runs(environ).runs for run in (run, *run.array())]
    moment = time.time() if now is None else now
    try:
        return change_store(environ, lambda store: _with_runs(store, found, moment), moment)
    except NotKept as problem:
        print(f"drumbeat: {problem.what}", file=sys.stderr)
        return _with_runs(read_store(environ), found, moment).bounded(moment)


def _with_runs(store: Store, runs: Sequence[Run], now: float) -> Store:
    read: Dict[str, int] = {}
    sightings, exclusions = list(store.sightings), list(store.exclusions)
    known = {(each.run, each.t, each.host, each.what) for each in sightings}
    for run in runs:
        size = _size(run)
        read[run.run_id] = size
        if size == store.read.get(run.run_id, -1) or size > _LARGEST_EVENTS:
            continue
        try:
            order = run.order()
            events = run.run_events()
        except RecordError:
            continue
        if order is None or order.emulated:
            continue
        for seen in sightings_of(run.run_id, order, events):
            after = seen.t > store.forgotten.get(f"{seen.site}/{seen.host}", 0.0)
            if after and (seen.run, seen.t, seen.host, seen.what) not in known:
                known.add((seen.run, seen.t, seen.host, seen.what))
                sightings.append(seen)
                exclusions = _avoided(exclusions, seen, now)
    return replace(store, sightings=tuple(sightings), exclusions=tuple(exclusions), read=read)


def sightings_of(run_id: str, order: Order, events: Sequence[Event]) -> List[Sighting]:
    """What one run says about its nodes, by the names that its scheduler has for them."""
    names = {event.peer_host: event.name or event.peer_host for event in events if isinstance(event, kinds.NodeJoined)}
    members = len(names)
    ran = any(isinstance(event, kinds.AttemptStarted) for event in events)  # else the job may be wrong, not the node
    found: List[Sighting] = []
    for event in events:
        judged: Optional[Tuple[str, str, str]] = None
        if isinstance(event, (kinds.Failed, kinds.FindingMade)) and event.finding.host:
            judged = _judge(event.finding, isinstance(event, kinds.Failed))
        elif isinstance(event, kinds.Excluded) and ran:
            judged = BAD, event.peer_host, event.why
        if judged and judged[1] in names:
            what, host, detail = judged
            found.append(Sighting(round(event.t, 3), order.site, names[host], run_id, what, detail))
    lost = {each.host for each in found if each.what == LOST}
    if len(lost) > max(1, members // 4):  # then the network, or the node that said so, is more likely
        found = [replace(each, what=FIRST) if each.what == LOST else each for each in found]
    return found


def _judge(finding: Finding, failed: bool) -> Optional[Tuple[str, str, str]]:
    assert finding.host
    cause = cause_of(finding, 1)
    if finding.code == "node-lost":
        return (LOST, finding.host, finding.cause) if failed else None
    if cause is HARDWARE:
        return BAD, finding.host, finding.title
    if finding.code == "slow-rank":
        return SLOW, finding.host, finding.title
    return (FIRST, finding.host, finding.title) if failed and cause is not PROGRAM else None


def _avoided(exclusions: List[Exclusion], seen: Sighting, now: float) -> List[Exclusion]:
    """A node that was lost or whose hardware failed is avoided for a while; what somebody said by hand stays."""
    until = seen.t + KEPT_FOR
    if seen.what not in (LOST, BAD) or until <= now:
        return exclusions
    same = [each for each in exclusions if (each.site, each.host) == (seen.site, seen.host)]
    if any(each.by_hand or (each.until or until) >= until for each in same):
        return exclusions
    others = [each for each in exclusions if each not in same]
    by_itself = [each for each in others if each.site == seen.site and not each.by_hand and (each.until or 0) > now]
    if len(by_itself) >= MOST_BY_ITSELF:
        return exclusions
    why = f"{seen.what} in {seen.run}" + (f": {seen.detail}" if seen.detail else "")
    return [*others, Exclusion(seen.site, seen.host, why[:300], seen.t, until)]


def _size(run: Run) -> int:
    try:
        return os.path.getsize(run.folder.events)
    except OSError:
        return 0
