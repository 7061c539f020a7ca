"""Flight-recorder dumps of torch: the last calls of each rank, and where the ranks diverge.

A dump is JSON or a pickle: of NCCL, RCCL or gloo, in the formats of all versions of torch. Logs are untrusted, so a pickle is
read only by our own reader, which accepts plain data alone and is bounded in time and memory.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import Evidence, Finding
from drumbeat.logs.read.collectives import NEVER, Position, culprits
from drumbeat.logs.read.launchers import ranks
from drumbeat.logs.read.pickles import MAX_CONTAINERS, PlainPickleError, load

find = Catalog("logs")
MAX_BYTES = 64 << 20
_MOST_GROUPS = 1024
_RANK = re.compile(r"(\d+)(?:\.(?:json|pickle|pkl))?$")


@dataclass(frozen=True)
class Call:
    sequence: int
    operation: str
    state: str  # scheduled, started, completed
    sizes: str

    @property
    def over(self) -> bool:
        return self.state == "completed"


@dataclass(frozen=True)
class Group:
    """A process group. Many groups of a job share one description, and local names may repeat; the members tell them apart."""

    name: str
    description: str = ""
    members: FrozenSet[int] = frozenset()  # empty: not recorded

    def __str__(self) -> str:
        return self.description or self.name or "?"


@dataclass(frozen=True)
class Dump:
    """One rank's dump. A group without calls is one for which the rank recorded nothing."""

    file: str
    rank: Optional[int]
    groups: Dict[Group, Tuple[Call, ...]]


class DumpError(ValueError):
    """Raised for data that is not a flight-recorder dump, or not a safe one."""


def looks_like_dump(name: str, start: bytes) -> bool:
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return b"entries" in start or b"pg_config" in start or "trace" in name
    return start.lstrip()[:1] == b"{" and (b'"entries"' in start or b'"pg_config"' in start)


def parse(file: str, data: bytes) -> Dump:
    """Parse a dump; DumpError says why it cannot be read."""
    if len(data) > MAX_BYTES:
        raise DumpError(f"larger than {MAX_BYTES >> 20} MB")
    try:
        if data[:1] == b"\x80":
            content = load(data)
        elif data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
            raise DumpError(f"more than {MAX_CONTAINERS} lists and mappings")
        else:
            content = json.loads(data)
    except PlainPickleError as error:
        raise DumpError(str(error)) from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, DumpError):
            raise
        raise DumpError(f"cannot be read: {type(error).__name__}") from None
    if isinstance(content, list) and content and isinstance(content[0], dict):  # torch 2.2
        content = {"entries": content}
    entries = content.get("entries") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise DumpError("has no list of entries")
    groups: Dict[str, Group] = {group.name: group for group in _configured(content.get("pg_config"))}
    calls: Dict[str, List[Call]] = {name: [] for name in groups}
    for entry in entries[-20_000:]:
        call = _call(entry) if isinstance(entry, dict) else None
        if call:
            group = _group(entry)
            known = groups.setdefault(group.name, group)
            groups[group.name] = known if known.description else replace(known, description=group.description)
            calls.setdefault(group.name, []).append(call)
    rank = content.get("rank")
    named = _RANK.search(file)
    if not isinstance(rank, int):
        rank = int(named[1]) if named and len(named[1]) < 8 else None
    return Dump(file, rank, {groups[name]: tuple(made) for name, made in calls.items()})


def compare(dumps: List[Dump]) -> List[Finding]:
    """Find where the ranks diverge: different calls under one number, or ranks that the others wait for."""
    found: List[Finding] = []
    positions: Dict[Group, Dict[int, Position]] = {}
    by_rank = {dump.rank: dump for dump in dumps if dump.rank is not None}
    called = sorted({group for dump in dumps for group, calls in dump.groups.items() if calls}, key=_order)
    for group in called[:_MOST_GROUPS]:
        calls = {rank: dump.groups[group] for rank, dump in by_rank.items() if group in dump.groups}
        finding = _different_calls(group, calls, by_rank)
        if finding:
            found.append(finding)
        else:
            positions[group] = {rank: _position(made) for rank, made in calls.items()}
    late = culprits(positions)
    return [*found, _behind(late, positions, by_rank)] if late else found


def _order(group: Group) -> Tuple[str, str, List[int]]:
    return (group.description, group.name, sorted(group.members))


def _position(calls: Tuple[Call, ...]) -> Position:
    if not calls:
        return NEVER
    return Position(
        max(call.sequence for call in calls), min((call.sequence for call in calls if not call.over), default=None)
    )


def _configured(config: Any) -> List[Group]:
    """Return the groups of `pg_config`: name -> name, description and ranks (a list or text)."""
    found = []
    for name, about in list(config.items())[:_MOST_GROUPS] if isinstance(config, dict) else ():
        if isinstance(about, dict):
            members = about.get("ranks", "")
            words = members[:100_000] if isinstance(members, str) else _words(members)
            numbers = frozenset(int(number) for number in re.findall(r"\d{1,7}", words))
            found.append(Group(_words(about.get("name", name))[:80], _description(about.get("desc")), numbers))
    return found


def _description(value: Any) -> str:
    words = _words(value or "")[:80]
    return "" if words == "undefined" else words


def _call(entry: Dict[str, Any]) -> Optional[Call]:
    if entry.get("is_p2p"):
        return None
    sequence = entry.get("collective_seq_id", entry.get("seq_id"))
    if not isinstance(sequence, int):
        return None
    operation = _words(entry.get("profiling_name", "?")).split(":")[-1][:80]
    state = "completed" if entry.get("retired") is True else _words(entry.get("state", "?"))[:20]  # gloo retires alone
    return Call(sequence, operation, state, _words(entry.get("input_sizes", "")))


def _words(value: Any, depth: int = 3) -> str:
    """Like str, but bounded for any value: a small nest of shared lists can expand without end."""
    if isinstance(value, (list, tuple)):
        if not depth:
            return "[...]"
        return f"[{', '.join(_words(item, depth - 1) for item in value[:8])}]"[:200]
    if isinstance(value, (str, int, float, bool)) or value is None:
        return str(value)[:200]
    return "?"


def _group(entry: Dict[str, Any]) -> Group:
    """Return the group as the entry names it: gloo and old versions have no pg_config."""
    group = entry.get("process_group")
    if isinstance(group, (list, tuple)) and group:
        return Group(_words(group[0])[:80], _description(group[1]) if len(group) > 1 else "")
    return Group(_words(entry.get("pg_name", entry.get("pg_id", group or "")))[:80])


def _different_calls(
    group: Group, calls: Mapping[int, Tuple[Call, ...]], dumps: Mapping[int, Dump]
) -> Optional[Finding]:
    numbered: Dict[int, Dict[str, List[int]]] = {}
    for rank, made in calls.items():
        for call in made:
            numbered.setdefault(call.sequence, {}).setdefault(call.operation, []).append(rank)
    for sequence in sorted(numbered):
        if len(numbered[sequence]) > 1:
            words = "; ".join(f"{operation} on {ranks(who)}" for operation, who in sorted(numbered[sequence].items()))
            shown = _evidence(calls, dumps)
            return find("collective-desync", sequence=sequence, group=group, words=words, evidence=shown)
    return None


def _behind(
    late: Mapping[Group, List[int]], positions: Mapping[Group, Mapping[int, Position]], dumps: Mapping[int, Dump]
) -> Finding:
    """Return one finding for all groups, worded for the group that names most ranks."""
    every = sorted({rank for members in late.values() for rank in members})
    group = max(late, key=lambda each: (len(late[each]), len(positions[each])))
    members, shown = positions[group], late[group]
    first = members[shown[0]]
    top = max(each.made for each in members.values())
    if first is NEVER:
        waited = min(each.waits_in for each in members.values() if each.waits_in is not None)
        words = f"did not make call {waited} in group {group}, in which the others wait"
    elif all(members[rank].made < top for rank in shown):
        words = f"made {first.made} calls in group {group}, others up to {top}"
    else:
        furthest = max(each.finished for each in members.values())
        words = f"finished {first.finished} calls in group {group}, others up to {furthest}"
    rest = [rank for rank in every if rank not in shown]
    more = f"; {ranks(rest)} in other groups" if rest else ""
    return find(
        "rank-behind",
        who=f"{ranks(shown)} {words}{more}",
        ranks=ranks(every),
        evidence=_evidence(every, dumps),
        rank=every[0] if len(every) == 1 else None,
    )


def _evidence(numbers: Iterable[int], dumps: Mapping[int, Dump]) -> Tuple[Evidence, ...]:
    return tuple(Evidence(f"flight recorder of rank {rank}", dumps[rank].file) for rank in sorted(numbers)[:3])
