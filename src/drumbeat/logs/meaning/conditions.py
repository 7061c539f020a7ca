"""Conditions of a rule on the log as a whole: versions, transport, settings, and other lines in the log."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Sequence, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.model import Evidence
from drumbeat.logs.events import Event, Events
from drumbeat.logs.meaning.rules import NEAR, Rule, RuleError
from drumbeat.logs.nccl.communicators import Communicators
from drumbeat.logs.nccl.transport import Transport

MAX_VALUES = 3  # values of one setting shown in an answer

# fmt: off
KEYS = (
    "transport", "selected", "link", "provider", "network", "gdr", "partial_gdr", "nodes", "env", "device", "interface",
    "link_local",
)
# fmt: on


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


def holds(rule: Rule, seen: Whole, event: Optional[Event] = None) -> bool:
    """Return True if a rule's conditions hold. Unknown is no: a rule that asks for a version does not match a log without one."""
    if not rule.conditional:
        return True
    if any(mark not in seen.marks for mark in rule.seen) or any(mark in seen.marks for mark in rule.unseen):
        return False
    if event is not None and any(_beside(mark, event, seen) for mark in rule.not_near):
        return False
    if rule.library and rule.library not in seen.transport.library:
        return False
    if rule.versions and not _version_holds(rule.versions, seen.transport.versions):
        return False
    return all(_holds(key, value, seen, rule) for key, value in (rule.when or {}).items())


def _holds(key: str, value: Any, seen: Whole, rule: Rule) -> bool:
    path = seen.transport.path
    if key == "transport":
        return path.answer in _list(value)
    if key == "selected":
        return any(name in _list(value) for name in seen.transport.selected)
    if key == "link":
        return path.link in _list(value)
    if key == "provider":
        return path.provider.split(";")[0] in _list(value)
    if key == "network":
        return any(re.search(pattern, path.network) for pattern in _list(value))
    if key == "partial_gdr":
        return path.partial_gdr is value
    if key == "gdr":
        return path.gdr is value
    if key == "nodes":
        return seen.transport.nnodes is not None and _compare(str(value), (seen.transport.nnodes,))
    if key == "device":
        return any(re.search(pattern, device) for pattern in _list(value) for device in seen.transport.devices)
    if key == "interface":
        names = (*seen.transport.interfaces, *seen.transport.sockets)
        return any(re.search(pattern, name) for pattern in _list(value) for name in names)
    if key == "link_local":
        return seen.link_local is value
    if key == "env":
        return all(_setting(name, str(pattern), seen) for name, pattern in dict(value).items())
    raise RuleError(f"{rule.file}: rule {rule.id}: 'when' has unknown key '{key}'; known: {', '.join(KEYS)}")


def _beside(mark: str, event: Event, seen: Whole) -> bool:
    numbers = seen.mark_lines.get((mark, event.evidence.file or ""), ())
    return any(abs(number - event.number) <= NEAR for number in numbers)


def _setting(name: str, pattern: str, seen: Whole) -> bool:
    return any(re.search(pattern, value) for value in seen.settings.get(name, ()))


def _list(value: Any) -> Tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, (list, tuple)) else (str(value),)


def _version_holds(ranges: str, versions: Tuple[str, ...]) -> bool:
    """Return True if every part of `>=2.22 <2.27` holds for one of the versions seen."""
    return any(
        all(_compare(part, numbers) for part in ranges.split()) for numbers in map(_numbers, versions) if numbers
    )


def _numbers(version: str) -> Optional[Tuple[int, ...]]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else None


_COMPARISON = re.compile(r"(<=|>=|<|>|=)(\d+(?:\.\d+)*)$")


def _compare(condition: str, numbers: Optional[Tuple[int, ...]]) -> bool:
    match = _COMPARISON.match(condition)
    if not match or numbers is None:
        raise RuleError(f"'{condition}' is not a comparison such as <2.21 or >=2")
    bound = tuple(int(part) for part in match[2].split("."))
    given = numbers[: len(bound)]  # 2.21.5 counts as 2.21 where the rule says 2.21
    return {
        "<": given < bound,
        "<=": given <= bound,
        ">": given > bound,
        ">=": given >= bound,
        "=": given == bound,
    }[match[1]]
