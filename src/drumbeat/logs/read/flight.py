"""Flight-recorder dumps of torch: what each rank had called last, and where the ranks part.

A dump is JSON or a pickle. Logs come from anywhere, so a pickle is opened only by a reader of our own that knows plain
data alone and is bounded in time and memory.
"""

from __future__ import annotations

import json
import re
from typing import Any, Dict, List, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.model import ERROR, Evidence, Finding
from drumbeat.logs.read.launchers import ranks
from drumbeat.logs.read.pickles import MAX_CONTAINERS, PlainPickleError, load

MAX_BYTES = 64 << 20
_RANK = re.compile(r"(\d+)(?:\.(?:json|pickle|pkl))?$")


@dataclass(frozen=True)
class Call:
    sequence: int
    operation: str
    state: str  # scheduled, started, completed
    sizes: str


@dataclass(frozen=True)
class Dump:
    """One rank's record: process group -> its last calls, oldest first."""

    file: str
    rank: Optional[int]
    groups: Dict[str, Tuple[Call, ...]]


class DumpError(ValueError):
    """Not a flight-recorder dump, or not one that may be read."""


def looks_like_dump(name: str, start: bytes) -> bool:
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return b"entries" in start or b"pg_config" in start or "trace" in name
    return start.lstrip()[:1] == b"{" and (b'"entries"' in start or b'"pg_config"' in start)


def parse(file: str, data: bytes) -> Dump:
    """A dump from its bytes; DumpError says why it is none."""
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
    entries = content.get("entries") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise DumpError("has no list of entries")
    groups: Dict[str, List[Call]] = {}
    for entry in entries[-20_000:]:
        if isinstance(entry, dict):
            call = _call(entry)
            if call:
                groups.setdefault(_group(entry), []).append(call)
    rank = content.get("rank")
    named = _RANK.search(file)
    if not isinstance(rank, int):
        rank = int(named[1]) if named and len(named[1]) < 8 else None
    return Dump(file, rank, {name: tuple(calls) for name, calls in groups.items()})


def compare(dumps: List[Dump]) -> List[Finding]:
    """Where the ranks part: a rank behind the others, or different calls under the same number."""
    found: List[Finding] = []
    names = sorted({name for dump in dumps for name in dump.groups})
    for name in names[:256]:
        members = [dump for dump in dumps if dump.rank is not None and name in dump.groups]
        finding = _different_calls(name, members) or _behind(name, members)
        if finding:
            found.append(finding)
    return found


def _call(entry: Dict[str, Any]) -> Optional[Call]:
    if entry.get("is_p2p"):
        return None
    sequence = entry.get("collective_seq_id", entry.get("seq_id"))
    if not isinstance(sequence, int):
        return None
    operation = _words(entry.get("profiling_name", "?")).split(":")[-1][:80]
    return Call(sequence, operation, _words(entry.get("state", "?"))[:20], _words(entry.get("input_sizes", "")))


def _words(value: Any, depth: int = 3) -> str:
    """Like str, but short whatever the value holds: a small nest of shared lists can be endless in words."""
    if isinstance(value, (list, tuple)):
        if not depth:
            return "[...]"
        return f"[{', '.join(_words(item, depth - 1) for item in value[:8])}]"[:200]
    if isinstance(value, (str, int, float, bool)) or value is None:
        return str(value)[:200]
    return "?"


def _group(entry: Dict[str, Any]) -> str:
    """gloo leaves pg_config empty, so the group is taken from the entries themselves."""
    group = entry.get("process_group")
    if isinstance(group, (list, tuple)) and group:
        return _words(group[-1] if len(group) > 1 and group[-1] != "undefined" else group[0])[:80]
    return _words(entry.get("pg_id", entry.get("pg_name", "")))[:80]


def _different_calls(name: str, dumps: List[Dump]) -> Optional[Finding]:
    calls: Dict[int, Dict[str, List[int]]] = {}
    for dump in dumps:
        for call in dump.groups[name]:
            if dump.rank is not None:
                calls.setdefault(call.sequence, {}).setdefault(call.operation, []).append(dump.rank)
    for sequence in sorted(calls):
        if len(calls[sequence]) > 1:
            words = "; ".join(f"{operation} on {ranks(who)}" for operation, who in sorted(calls[sequence].items()))
            return Finding(
                "collective-desync",
                ERROR,
                f"collective {sequence} of group {name or '?'} differs: {words}",
                "the ranks took different branches or have different amounts of data",
                "every rank must make the same collective calls in the same order",
                tuple(Evidence(f"flight recorder of rank {dump.rank}", dump.file) for dump in dumps[:3]),
            )
    return None


def _behind(name: str, dumps: List[Dump]) -> Optional[Finding]:
    last = {dump.rank: max(call.sequence for call in dump.groups[name]) for dump in dumps if dump.rank is not None}
    if len(last) < 2 or len(set(last.values())) == 1:
        return None
    low = min(last.values())
    behind = [rank for rank, sequence in last.items() if sequence == low]
    return Finding(
        "rank-behind",
        ERROR,
        f"{ranks(behind)} made {low} calls in group {name or '?'}, others up to {max(last.values())}",
        "it is late or stuck outside of the collectives",
        f"look at the stack of {ranks(behind)}",
        tuple(Evidence(f"flight recorder of rank {dump.rank}", dump.file) for dump in dumps if dump.rank in behind)[:3],
        rank=behind[0] if len(behind) == 1 else None,
    )
