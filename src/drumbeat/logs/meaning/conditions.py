"""Conditions of a rule on the log as a whole: versions, transport, settings, and other lines in the log."""

from __future__ import annotations

import operator
import re
from dataclasses import replace
from typing import Any, Callable, Dict, FrozenSet, Iterable, List, Mapping, Sequence, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.model import Evidence
from drumbeat.logs.events import Event, Events
from drumbeat.logs.meaning.rules import Rule
from drumbeat.logs.nccl.communicators import Communicators
from drumbeat.logs.nccl.transport import Transport

MAX_VALUES = 3  # values of one setting shown in an answer


@dataclass(frozen=True)
class Whole:
    """Facts about a whole log that conditions are checked against."""

    transport: Transport
    settings: Mapping[str, FrozenSet[str]]  # NCCL_* -> values seen
    marks: FrozenSet[str]
    mark_lines: Mapping[Tuple[str, str], Sequence[int]]  # mark and file -> numbers of its lines
    setting_lines: Mapping[str, Sequence[Tuple[str, str, Evidence]]]  # NCCL_* -> host, value and line
    link_local: bool = False  # the bootstrap of a process uses a link-local address


def whole(state: Communicators, transport: Transport, events: Events) -> Whole:
    settings: Dict[str, Set[str]] = {}
    lines: Dict[str, List[Tuple[str, str, Evidence]]] = {}
    for process in state.processes.values():
        for name, (value, evidence) in process.settings.items():
            settings.setdefault(name, set()).add(value)
            lines.setdefault(name, []).append((process.host, value, evidence))
    known = {name: frozenset(values) for name, values in settings.items()}
    link_local = any(process.link_local for process in state.processes.values())
    return Whole(transport, known, frozenset(events.marks), events.mark_lines, lines, link_local)


def with_settings(event: Event, seen: Whole) -> Event:
    """Return the event with the settings that its rule asks for (its own host's first) and the lines that show them."""
    names = dict((event.match.rule.when or {}).get("env", {})) if event.match else {}
    if not names or event.match is None:
        return event
    values: Dict[str, str] = {}
    beside: List[Evidence] = []
    for name in names:
        lines = seen.setting_lines.get(name, ())
        lines = [line for line in lines if line[0] == event.host] or lines
        values[name] = " or ".join(sorted({value for _, value, _ in lines})[:MAX_VALUES])
        beside += [evidence for _, _, evidence in lines[:1]]
    return replace(event, match=replace(event.match, groups={**event.match.groups, **values}), beside=tuple(beside))


def holds(rule: Rule, seen: Whole, event: Event) -> bool:
    """Return True if a rule's conditions hold. Unknown is no: a rule that asks for a version does not match a log without one."""
    if not rule.conditional:
        return True
    if any(mark not in seen.marks for mark in rule.seen) or any(mark in seen.marks for mark in rule.unseen):
        return False
    lines = (seen.mark_lines.get((mark, event.evidence.file or ""), ()) for mark in rule.until)
    if any(number > event.number for numbers in lines for number in numbers):
        return False
    if rule.library and rule.library not in seen.transport.library:
        return False
    found = list(filter(None, map(_numbers, seen.transport.versions)))  # every part of `>=2.22 <2.27` must hold for one
    if rule.versions and not any(all(_compare(part, each) for part in rule.versions.split()) for each in found):
        return False
    return all(CONDITIONS[key](value, seen) for key, value in (rule.when or {}).items())


CONDITIONS: Mapping[str, Callable[[Any, Whole], bool]] = {
    "transport": lambda value, seen: seen.transport.path.answer in _list(value),
    "selected": lambda value, seen: any(name in _list(value) for name in seen.transport.selected),
    "link": lambda value, seen: seen.transport.path.link in _list(value),
    "provider": lambda value, seen: seen.transport.path.provider.split(";")[0] in _list(value),
    "network": lambda value, seen: _any_matches(value, (seen.transport.path.network,)),
    "partial_gdr": lambda value, seen: seen.transport.path.partial_gdr is value,
    "gdr": lambda value, seen: seen.transport.path.gdr is value,
    "nodes": lambda value, seen: bool(seen.transport.nnodes) and _compare(value, (seen.transport.nnodes or 0,)),
    "device": lambda value, seen: _any_matches(value, seen.transport.devices),
    "interface": lambda value, seen: _any_matches(value, (*seen.transport.interfaces, *seen.transport.sockets)),
    "link_local": lambda value, seen: seen.link_local is value,
    "env": lambda value, seen: all(_any_matches(each, seen.settings.get(name, ())) for name, each in value.items()),
}


def _any_matches(patterns: Any, texts: Iterable[str]) -> bool:
    return any(re.search(pattern, text) for text in texts for pattern in _list(patterns))


def _list(value: Any) -> Tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, (list, tuple)) else (str(value),)


def _numbers(version: str) -> Tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


_SIGNS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq}


def _compare(condition: str, numbers: Tuple[int, ...]) -> bool:
    sign = condition.rstrip("0123456789.")
    bound = _numbers(condition[len(sign) :])
    return bool(_SIGNS[sign](numbers[: len(bound)], bound))  # 2.21.5 counts as 2.21 where the rule says 2.21
