"""docs/events.md, from the records."""

from __future__ import annotations

import inspect
from typing import Dict, List, Tuple, Type

from drumbeat.base.regex import regex
from drumbeat.runfolder.events import COMMON, TYPES, Event

_FIELD = regex(r"^    (\w+): ([^=#]+?)\s*(?:=[^#]*)?(?:#\s*(.*))?$")
_BY_AGENTS = ("agent-started", "rank-started", "rank-exited", "verdict", "finding", "kernel-log", "agent-ended")


def page() -> str:
    lines = [
        "# Events",
        "",
        "Reference, made from the code. One line of `events.jsonl` is one event of a [run](runfolder.md). The run's own file is",
        "written by the lead; each node's by its agent. Every event has these fields:",
        "",
        *_table(Event),
    ]
    for title, own in (("Written by the lead", False), ("Written by every agent", True)):
        lines += ["", f"## {title}"]
        for kind, record in TYPES.items():
            if (kind in _BY_AGENTS) == own:
                doc = inspect.cleandoc(record.__doc__ or "").split("\n\n")[0].replace("\n", " ")
                about = doc if doc and not doc.startswith(f"{record.__name__}(") else ""
                lines += ["", f"### {kind}", *(["", about] if about else []), "", *_table(record)]
    return "\n".join(lines) + "\n"


def _table(record: Type[Event]) -> List[str]:
    rows = _fields(record)
    lines = ["| field | type | meaning |", "|---|---|---|"]
    return lines + [f"| `{name}` | {kind} | {meaning} |" for name, (kind, meaning) in rows.items()]


def _fields(record: Type[Event]) -> Dict[str, Tuple[str, str]]:
    found: Dict[str, Tuple[str, str]] = {}
    for line in inspect.getsource(record).splitlines():
        match = _FIELD.match(line)
        if match and (record is Event or match.group(1) not in COMMON):
            meaning = (match.group(3) or "").replace("|", "\\|")
            found[match.group(1)] = (f"`{match.group(2).strip()}`", meaning)
    return found
