"""Known nodes: show them, exclude nodes by hand, keep new jobs away from bad ones."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import field, replace
from typing import Any, Callable, Container, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from drumbeat import backends
from drumbeat.base.folders import index_folder, make_private, state_folder, unsafe
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import AvoidedNode, Order
from drumbeat.base.problem import Problem
from drumbeat.base.ranges import HostlistError, expand
from drumbeat.base.record import RecordError, check_schema, from_plain, to_json, to_plain
from drumbeat.base.redact import printable
from drumbeat.base.regex import regex
from drumbeat.causes.table import HARDWARE, PROGRAM, cause_of
from drumbeat.desk.runs import open_run
from drumbeat.findings.model import Finding
from drumbeat.jobfile.check import parse_duration
from drumbeat.jobfile.site import Site
from drumbeat.runfolder import events as kinds
from drumbeat.runfolder.events import Event
from drumbeat.runfolder.files import replace as replace_file
from drumbeat.runfolder.layout import RunFolder

# The store of nodes, known from this user's past runs, and of the nodes that new jobs avoid: one small file in the user's state
# folder. Only the desk reads and writes it. It is replaced as a whole under a lock, belongs to this user alone, and never grows
# beyond a few hundred kilobytes. If the store cannot be used, that costs a line of text, never a run.


SCHEMA = "1.0"
MOST_RECORDS = 2_000  # the newest are kept
MOST_EXCLUSIONS = 500
LOOKED_AT = 200  # newest runs that are looked at again; older ones are skipped once they have been read
_LARGEST = 4 << 20  # bytes that are read
_WAIT = 3.0  # seconds for the lock
_LONGEST = 300  # characters of a reason


class NotKept(Problem):
    """The store cannot be written. It may still be readable."""


@dataclass(frozen=True)
class Sighting:
    """One thing that a run says about a node."""

    t: float  # seconds since 1970
    site: str
    host: str
    run: str
    what: str  # one of KINDS
    detail: str = ""
    avoid: float = 0.0  # seconds for which new jobs should avoid the node


@dataclass(frozen=True)
class Exclusion:
    """A node that new jobs avoid."""

    site: str
    host: str
    why: str
    t: float  # since when
    until: Optional[float] = None  # none: until it is forgotten
    by_hand: bool = False


@dataclass(frozen=True)
class Store:
    sightings: Tuple[Sighting, ...] = ()  # the oldest first
    exclusions: Tuple[Exclusion, ...] = ()
    read: Dict[str, int] = field(default_factory=dict)  # run -> bytes of its events that have been read
    forgotten: Dict[str, float] = field(default_factory=dict)  # SITE/HOST -> what came before that time does not count
    schema: str = SCHEMA

    def excluded(self, site: str, now: float) -> Tuple[Exclusion, ...]:
        """Return the exclusions that count now, by host."""
        valid = [each for each in self.exclusions if each.site == site and (each.until is None or each.until > now)]
        return tuple(sorted(valid, key=lambda each: each.host))

    def bounded(self, now: float) -> Store:
        """Drop what has expired, and what exceeds the store's size."""
        valid = [each for each in self.exclusions if each.until is None or each.until > now]
        sightings = sorted(self.sightings, key=lambda each: each.t)[-MOST_RECORDS:]
        shortened = tuple(replace(each, detail=each.detail[:_LONGEST]) for each in sightings)
        newest = dict(list(self.read.items())[-MOST_RECORDS:])
        kept = sorted(valid, key=lambda each: each.t)[-MOST_EXCLUSIONS:]
        forgotten = dict(list(self.forgotten.items())[-MOST_EXCLUSIONS:])
        return replace(self, sightings=shortened, exclusions=tuple(kept), read=newest, forgotten=forgotten)


def store_folder(environ: Mapping[str, str]) -> str:
    return state_folder(environ, "nodes")


def read_store(environ: Mapping[str, str]) -> Store:
    """Read the store; empty if there is none. Problem: there is one, and it cannot be used."""
    folder = store_folder(environ)
    path = os.path.join(folder, "nodes.json")
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            why = unsafe(os.fstat(file.fileno())) or unsafe(os.lstat(folder))
            if why:
                raise Problem(f"{path} is not used: it {why}", "remove it, or give it back to its owner with mode 0600")
            text = file.read(_LARGEST + 1)
    except FileNotFoundError:
        return Store()
    except OSError as error:
        raise Problem(f"{path} cannot be read: {error.strerror}") from None
    try:
        if len(text) > _LARGEST:
            raise ValueError("too large")
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError("it holds no mapping")
        check_schema(str(data.get("schema", "?")), SCHEMA, path)
        return from_plain(Store, data)
    except (ValueError, RecordError, AttributeError, RecursionError, OverflowError) as error:
        why = str(error)[:120] if isinstance(error, (ValueError, RecordError)) else "its contents have the wrong form"
        lost = "nodes that were excluded or forgotten by hand must be named again"
        raise Problem(f"{path} is damaged ({why})", f"remove it: past runs are read again, but {lost}") from None


def update_store(environ: Mapping[str, str], change: Callable[[Store], Store], now: Optional[float] = None) -> Store:
    """Read, change and write under a lock; return the new store. NotKept: it cannot be written; Problem: it cannot be
    read."""
    folder = store_folder(environ)
    try:
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        why = make_private(folder)
        if why:
            raise NotKept(f"records of nodes cannot be saved: {why}")
        with open(os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "rb") as lock:
            _lock(lock.fileno(), folder)
            before = read_store(environ)
            after = change(before).bounded(time.time() if now is None else now)
            if after != before:
                replace_file(os.path.join(folder, "nodes.json"), to_json(after) + "\n")
            return after
    except OSError as error:
        raise NotKept(f"records of nodes cannot be saved in {folder}: {error.strerror}") from None


def _lock(number: int, folder: str) -> None:
    deadline = time.monotonic() + _WAIT
    while True:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise NotKept(f"{folder} is locked by another drumbeat", "try again") from None
            time.sleep(0.05)
        except OSError:
            return  # a file system without locks: the file is still replaced as a whole


# From the events of past runs to what is known about nodes: who was lost, who failed first, who was slow. Runs on
# emulated nodes say nothing about a machine and are left out.


LOST, BAD, FIRST, SLOW = "lost", "bad hardware", "failed first", "slow rank"
KINDS = (LOST, BAD, FIRST, SLOW)
# Seconds for which a node is avoided: after a hardware failure; after it fell silent, or was left out without a clear reason;
# after one of our processes was killed there, though the machine is fine.
KEPT_FOR, SUSPECTED, KILLED = 7 * 86400.0, 86400.0, 3600.0
MOST_BY_ITSELF = 16  # nodes of a site that may be avoided without the user's request
_LARGEST_EVENTS = 64 << 20  # bytes


def learn(environ: Mapping[str, str], now: Optional[float] = None) -> Store:
    """Read what runs have recorded since the last time; if the store cannot be written, say so and read them again next time.
    Problem: the store cannot be used."""
    moment = time.time() if now is None else now
    try:
        return update_store(environ, lambda store: _with_runs(store, environ, moment), moment)
    except NotKept as problem:
        print(f"drumbeat: {problem.what}", file=sys.stderr)
        return _with_runs(read_store(environ), environ, moment).bounded(moment)


def _with_runs(store: Store, environ: Mapping[str, str], now: float) -> Store:
    """Return the store updated from runs that are new or have gone on since. Of the runs read before, only the newest are looked
    at again."""
    read: Dict[str, int] = {}
    sightings, exclusions = list(store.sightings), list(store.exclusions)
    known = {(each.run, each.t, each.host, each.what) for each in sightings}
    try:
        with os.scandir(index_folder(environ)) as entries:
            dated = sorted((entry.stat(follow_symlinks=False).st_mtime, entry.path) for entry in entries)
    except OSError:
        dated = []
    links = [path for _, path in dated][-MOST_RECORDS:]
    for place, link in enumerate(links):
        name = os.path.basename(link)
        before = store.read.get(name)
        if before is not None and place < len(links) - LOOKED_AT:
            read[name] = before
            continue
        if not os.path.isdir(link):
            continue  # its folder is gone
        read[name] = size = _size(link)
        if size == before or size > _LARGEST_EVENTS:
            continue
        for seen in _seen(os.path.realpath(link), environ):
            after = seen.t > store.forgotten.get(f"{seen.site}/{seen.host}", 0.0)
            if after and (seen.run, seen.t, seen.host, seen.what) not in known:
                known.add((seen.run, seen.t, seen.host, seen.what))
                sightings.append(seen)
                exclusions = _avoided(exclusions, seen, now)
    return replace(store, sightings=tuple(sightings), exclusions=tuple(exclusions), read=read)


def _seen(path: str, environ: Mapping[str, str]) -> List[Sighting]:
    """Return what a run, or each job of an array, recorded about its nodes."""
    found: List[Sighting] = []
    with suppress(RecordError):  # damaged, or of a newer drumbeat
        whole = open_run(path, environ)
        for run in (whole, *whole.array()):
            order = run.order()
            if order is not None and not order.emulated:
                found += sightings_of(run.run_id, order, run.run_events())
    return found


def sightings_of(run_id: str, order: Order, events: Sequence[Event]) -> List[Sighting]:
    """Collect what one run recorded about its nodes, by their names in the scheduler."""
    names = {event.peer_host: event.name or event.peer_host for event in events if isinstance(event, kinds.NodeJoined)}
    members = len(names)
    ran = any(isinstance(event, kinds.AttemptStarted) for event in events)  # else the job may be wrong, not the node
    killed = {event.peer_host for event in events if isinstance(event, kinds.NodeLost) and not event.silent}
    found: List[Sighting] = []
    for event in events:
        judged: Optional[Tuple[str, str, str, float]] = None
        if isinstance(event, (kinds.Failed, kinds.FindingMade)) and event.finding.host:
            judged = _judge(event.finding, isinstance(event, kinds.Failed), killed)
        elif isinstance(event, kinds.Excluded) and ran:
            judged = BAD, event.peer_host, event.why, SUSPECTED
        if judged and judged[1] in names:
            what, host, detail, avoid = judged
            found.append(Sighting(round(event.t, 3), order.site, names[host], run_id, what, detail, avoid))
    lost = {each.host for each in found if each.what == LOST}
    if len(lost) > max(1, members // 4):  # then the network, or the node that reported them, is more likely at fault
        found = [replace(each, what=FIRST, avoid=0.0) if each.what == LOST else each for each in found]
    return found


def _judge(finding: Finding, failed: bool, killed: Container[str]) -> Optional[Tuple[str, str, str, float]]:
    assert finding.host
    host, cause = finding.host, cause_of(finding, 1)
    if finding.code == "node-lost":
        return (LOST, host, finding.cause, KILLED if host in killed else SUSPECTED) if failed else None
    if cause is HARDWARE:
        return BAD, host, finding.title, KEPT_FOR
    if finding.code == "slow-rank":
        return SLOW, host, finding.title, 0.0
    return (FIRST, host, finding.title, 0.0) if failed and cause is not PROGRAM else None


def _avoided(exclusions: List[Exclusion], seen: Sighting, now: float) -> List[Exclusion]:
    """Return the exclusions with this node added for a while if it was lost or its hardware failed; those made by hand stay."""
    until = seen.t + seen.avoid
    if not seen.avoid or until <= now:
        return exclusions
    same = [each for each in exclusions if (each.site, each.host) == (seen.site, seen.host)]
    if any(each.by_hand or (each.until or until) >= until for each in same):
        return exclusions
    others = [each for each in exclusions if each not in same]
    by_itself = [each for each in others if each.site == seen.site and not each.by_hand and (each.until or 0) > now]
    if len(by_itself) >= MOST_BY_ITSELF:
        return exclusions
    why = f"{seen.what} in {seen.run}" + (f": {seen.detail}" if seen.detail else "")
    return [*others, Exclusion(seen.site, seen.host, why[:_LONGEST], seen.t, until)]


def _size(folder: str) -> int:
    """Return the bytes of all events of a run and of the jobs of an array."""
    try:
        jobs = [os.path.join(folder, "array", name) for name in os.listdir(os.path.join(folder, "array"))]
    except OSError:
        jobs = []
    size = 0
    for each in (folder, *jobs):
        with suppress(OSError):
            size += os.path.getsize(RunFolder(each).events)
    return size


_HOST = regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_MOST_HOSTS = 500


@dataclass(frozen=True)
class RememberedNode:
    """All that is known about one node of a site."""

    site: str
    host: str
    sightings: Tuple[Sighting, ...]  # the newest first
    excluded: Optional[Exclusion]

    def count(self, what: str) -> int:
        return sum(1 for each in self.sightings if each.what == what)


@dataclass(frozen=True)
class NodeTable:
    site: str
    nodes: Tuple[RememberedNode, ...]
    runs: int  # that were read
    without_effect: str = ""  # why new jobs do not avoid excluded nodes there; empty: they do

    def plain(self) -> Dict[str, Any]:
        return {
            "site": self.site,
            "runs": self.runs,
            "nodes": [
                {**to_plain(node), "counts": {what: node.count(what) for what in KINDS}} for node in self.nodes
            ],
        }  # fmt: skip

    def lines(self) -> List[str]:
        if not self.nodes:
            runs = f"{self.runs} run{'' if self.runs == 1 else 's'} of yours"
            return [f"no problems recorded for nodes of {self.site}: {runs} read"]
        width = max(4, *(len(node.host) for node in self.nodes))
        heads = ("lost", "bad", "failed first", "slow", "last seen", "excluded until")
        lines = [f"{'node':<{width}}  " + "  ".join(heads)]
        for node in self.nodes:
            counts = [f"{node.count(what):>{len(head)}}" for what, head in zip(KINDS, heads)]
            last = _moment(node.sightings[0].t)[:10] if node.sightings else "-"
            until = "-"
            if node.excluded:
                until = "forgotten" if node.excluded.until is None else _moment(node.excluded.until)
            lines.append(f"{node.host:<{width}}  {'  '.join(counts)}  {last:<10} {until}".rstrip())
            if node.excluded:
                lines.append(f"{'':<{width}}  {node.excluded.why}")
            elif node.sightings:
                newest = node.sightings[0]
                lines.append(f"{'':<{width}}  {newest.what} in {newest.run}: {newest.detail}")
        without = self.without_effect and f"{self.without_effect}: none is avoided there"
        kept = "submit keeps new jobs away from excluded nodes; drumbeat nodes forget HOST ends that"
        lines.append(without or kept)
        return lines


class Changed(NamedTuple):
    words: List[str]
    hosts: List[str]
    excluded_until: Optional[float] = None

    def plain(self) -> Dict[str, Any]:
        return {"hosts": self.hosts, "excluded_until": self.excluded_until}

    def lines(self) -> List[str]:
        return self.words


def site_here(named: Optional[str], environ: Mapping[str, str]) -> Site:
    """Return the named site, else the one detected here."""
    from drumbeat.desk.start.make_order import site_of
    from drumbeat.desk.start.place import find_place
    from drumbeat.jobfile.job import Job
    from drumbeat.machine.host import LiveHost

    return site_of(Job(site=named), find_place(LiveHost()), environ)


def host_names(words: Sequence[str]) -> List[str]:
    """Expand node lists as schedulers write them into single names."""
    hosts: List[str] = []
    for word in words:
        try:
            hosts += expand(word, _MOST_HOSTS)
        except (HostlistError, ValueError) as error:
            raise Problem(f"{word[:80]!r} is not a valid node list: {error}", "write nid001 or nid[001-004]") from None
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise Problem(
                f"{host[:80]!r} is not a valid host name", "letters, digits, dots, - and _; a list: nid[001-004]"
            )
    if len(hosts) > _MOST_HOSTS:
        raise Problem(f"{len(hosts)} nodes at once; at most {_MOST_HOSTS}")
    return hosts


def table(of: Site, hosts: Sequence[str], environ: Mapping[str, str], now: Optional[float] = None) -> NodeTable:
    moment, site = time.time() if now is None else now, of.name
    store = learn(environ, moment)
    excluded = {each.host: each for each in store.excluded(site, moment)}
    seen: Dict[str, List[Sighting]] = {}
    for sighting in sorted(store.sightings, key=lambda each: -each.t):
        if sighting.site == site:
            seen.setdefault(sighting.host, []).append(sighting)
    names = sorted(set(hosts) & {*seen, *excluded} if hosts else {*seen, *excluded})
    nodes = [RememberedNode(site, name, tuple(seen.get(name, ())), excluded.get(name)) for name in names]
    nodes.sort(key=lambda node: (node.excluded is None, -len(node.sightings), node.host))
    return NodeTable(site, tuple(nodes), len(store.read), _without_effect(of))


def _without_effect(site: Site) -> str:
    backend = backends.get(site.backend)
    return "" if backend.avoids_nodes else f"jobs on {site.name} run on the machines that they are given"


def exclude(of: Site, hosts: Sequence[str], how_long: str, why: str, environ: Mapping[str, str]) -> Changed:
    try:
        seconds = parse_duration(how_long)
    except ValueError as error:
        raise Problem(f"--for {how_long}: {error}") from None
    if seconds <= 0:
        raise Problem(
            f"--for {how_long}: no time at all", "write --for 7d; drumbeat nodes forget HOST ends an exclusion"
        )
    now, site = time.time(), of.name
    why = " ".join(printable(why).split())[:_LONGEST] or "excluded by hand"
    until = now + seconds
    new = [Exclusion(site, host, why, now, until, by_hand=True) for host in hosts]
    update_store(environ, lambda store: replace(store, exclusions=(*_without(store, site, hosts), *new)))
    words = f"new jobs on {site} avoid {', '.join(hosts[:8])}{' …' * (len(hosts) > 8)} until {_moment(until)}: {why}"
    without = _without_effect(of)
    return Changed([f"noted; but {without}" if without else words], [*hosts], until)


def forget(of: Site, hosts: Sequence[str], environ: Mapping[str, str]) -> Changed:
    now, site = time.time(), of.name
    known: Set[Tuple[str, str]] = set()

    def change(store: Store) -> Store:
        known.update((each.site, each.host) for kept in (store.sightings, store.exclusions) for each in kept)
        sightings = tuple(each for each in store.sightings if each.site != site or each.host not in hosts)
        forgotten = {**store.forgotten, **{f"{site}/{host}": now for host in hosts}}
        exclusions = _without(store, site, hosts)
        return replace(store, sightings=sightings, exclusions=exclusions, forgotten=forgotten)

    learn(environ, now)
    update_store(environ, change)
    return Changed(
        [f"{host}: forgotten" if (site, host) in known else f"{host}: no record" for host in hosts], [*hosts]
    )


def avoiding(order: Order, environ: Mapping[str, str]) -> Order:
    """Return the order with the nodes that its scheduler is asked to avoid. A problem with the store of nodes is reported in one
    line and never fails a job."""
    backend = backends.get(order.backend)
    if not backend.avoids_nodes:
        return order
    try:
        excluded = learn(environ).excluded(order.site, time.time())
    except Problem as problem:
        print(f"drumbeat: no node is avoided: {problem}", file=sys.stderr)
        return order
    if not excluded:
        return order
    there = backend.existing_nodes([each.host for each in excluded], environ)
    unknown = [each.host for each in excluded if each.host not in there]
    if unknown:
        names = ", ".join(unknown[:8])
        print(f"drumbeat: {backend.title} has no node {names}: drumbeat nodes forget {unknown[0]}", file=sys.stderr)
    ends = {each.host: f"; until {_moment(each.until)}" if each.until is not None else "" for each in excluded}
    avoided = tuple(AvoidedNode(each.host, each.why + ends[each.host]) for each in excluded if each.host in there)
    return replace(order, resources=replace(order.resources, avoided=avoided))


def _without(store: Store, site: str, hosts: Container[str]) -> Tuple[Exclusion, ...]:
    return tuple(each for each in store.exclusions if each.site != site or each.host not in hosts)


def _moment(t: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(t))
