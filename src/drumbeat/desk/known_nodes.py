"""What the desk does with what is known about nodes: show it, exclude nodes by hand, keep new jobs away from bad ones."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from drumbeat import backends
from drumbeat.base.hostlist import HostlistError, expand
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import AvoidedNode, Order
from drumbeat.base.printable import printable
from drumbeat.base.problem import Problem
from drumbeat.base.record import to_plain
from drumbeat.base.regex import regex
from drumbeat.desk.node_history import KINDS, learn
from drumbeat.desk.node_store import Exclusion, Sighting, Store, change_store
from drumbeat.jobfile.duration import parse_duration
from drumbeat.jobfile.site import Site

_HOST = regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_MOST_HOSTS = 500
_LONGEST_WHY = 300


@dataclass(frozen=True)
class Node:
    """All that is known about one node of a site."""

    site: str
    host: str
    sightings: Tuple[Sighting, ...]  # the newest first
    excluded: Optional[Exclusion]

    def count(self, what: str) -> int:
        return sum(1 for each in self.sightings if each.what == what)


@dataclass(frozen=True)
class Table:
    site: str
    nodes: Tuple[Node, ...]
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
            return [f"nothing bad is known about nodes of {self.site}: {runs} read"]
        width = max(4, *(len(node.host) for node in self.nodes))
        heads = ("lost", "bad", "failed first", "slow", "last seen", "excluded until")
        lines = [f"{'node':<{width}}  " + "  ".join(heads)]
        for node in self.nodes:
            counts = [f"{node.count(what):>{len(head)}}" for what, head in zip(KINDS, heads)]
            last = _day(node.sightings[0].t) if node.sightings else "-"
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


@dataclass(frozen=True)
class Changed:
    words: Tuple[str, ...]
    hosts: Tuple[str, ...]
    excluded_until: Optional[float] = None

    def plain(self) -> Dict[str, Any]:
        return {"hosts": list(self.hosts), "excluded_until": self.excluded_until}

    def lines(self) -> List[str]:
        return list(self.words)


def site_here(named: Optional[str], environ: Mapping[str, str]) -> Site:
    """The site whose nodes are meant."""
    from drumbeat.desk.start.make_order import site_of
    from drumbeat.desk.start.place import find_place
    from drumbeat.jobfile.job import Job
    from drumbeat.machine.host import LiveHost

    return site_of(Job(site=named), find_place(LiveHost()), environ)


def host_names(words: Sequence[str]) -> List[str]:
    """Single names from node lists as schedulers write them."""
    hosts: List[str] = []
    for word in words:
        try:
            hosts += expand(word, _MOST_HOSTS)
        except (HostlistError, ValueError) as error:
            raise Problem(f"{word[:80]!r} is no node list: {error}", "write nid001 or nid[001-004]") from None
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise Problem(f"{host[:80]!r} is no host name", "letters, digits, dots, - and _; a list: nid[001-004]")
    if len(hosts) > _MOST_HOSTS:
        raise Problem(f"{len(hosts)} nodes at once; at most {_MOST_HOSTS}")
    return hosts


def table(of: Site, hosts: Sequence[str], environ: Mapping[str, str], now: Optional[float] = None) -> Table:
    moment, site = time.time() if now is None else now, of.name
    store = learn(environ, moment)
    excluded = {each.host: each for each in store.excluded(site, moment)}
    seen: Dict[str, List[Sighting]] = {}
    for sighting in sorted(store.sightings, key=lambda each: -each.t):
        if sighting.site == site:
            seen.setdefault(sighting.host, []).append(sighting)
    names = sorted(set(hosts) & {*seen, *excluded} if hosts else {*seen, *excluded})
    nodes = [Node(site, name, tuple(seen.get(name, ())), excluded.get(name)) for name in names]
    nodes.sort(key=lambda node: (node.excluded is None, -len(node.sightings), node.host))
    return Table(site, tuple(nodes), len(store.read), _without_effect(of))


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
    why = " ".join(printable(why).split())
    why = why[:_LONGEST_WHY] or "excluded by hand"
    until = now + seconds
    new = [Exclusion(site, host, why, now, until, by_hand=True) for host in hosts]
    change_store(environ, lambda store: replace(store, exclusions=(*_without(store, site, hosts), *new)))
    words = f"new jobs on {site} avoid {', '.join(hosts[:8])}{' …' * (len(hosts) > 8)} until {_moment(until)}: {why}"
    without = _without_effect(of)
    return Changed((f"noted; but {without}" if without else words,), tuple(hosts), until)


def forget(of: Site, hosts: Sequence[str], environ: Mapping[str, str]) -> Changed:
    now, site = time.time(), of.name
    known: List[str] = []

    def change(store: Store) -> Store:
        known.extend(host for host in hosts if _is_known(store, site, host))
        sightings = tuple(each for each in store.sightings if (each.site, each.host) not in {(site, h) for h in hosts})
        forgotten = {**store.forgotten, **{f"{site}/{host}": now for host in hosts}}
        exclusions = _without(store, site, hosts)
        return replace(store, sightings=sightings, exclusions=exclusions, forgotten=forgotten)

    learn(environ, now)
    change_store(environ, change)
    words = [f"{host}: forgotten" if host in known else f"{host}: nothing was known about it" for host in hosts]
    return Changed(tuple(words), tuple(hosts))


def avoiding(order: Order, environ: Mapping[str, str]) -> Order:
    """The order, with the nodes that its scheduler is asked to leave out. Whatever is wrong with what is known about nodes is
    said in one line, and no job fails for it."""
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
        print(f"drumbeat: {backend.title} knows no node {names}: drumbeat nodes forget {unknown[0]}", file=sys.stderr)
    avoided = tuple(AvoidedNode(each.host, avoided_words(each)) for each in excluded if each.host in there)
    return replace(order, resources=replace(order.resources, avoided=avoided))


def avoided_words(exclusion: Exclusion) -> str:
    until = f"; until {_moment(exclusion.until)}" if exclusion.until is not None else ""
    return f"{exclusion.why}{until}"


def _without(store: Store, site: str, hosts: Iterable[str]) -> Tuple[Exclusion, ...]:
    named = {(site, host) for host in hosts}
    return tuple(each for each in store.exclusions if (each.site, each.host) not in named)


def _is_known(store: Store, site: str, host: str) -> bool:
    places = {(each.site, each.host) for each in store.sightings} | {
        (each.site, each.host) for each in store.exclusions
    }
    return (site, host) in places


def _day(t: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(t))


def _moment(t: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(t))
