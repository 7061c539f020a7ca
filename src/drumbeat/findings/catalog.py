"""Findings as data: their words are in the YAML files beside this one, and Python fills in values.

An entry is a code, or `code/variant`, which takes what it leaves out from the code. The title is the value of its severity, or of
`title` if the caller gives the severity; without one it is a warning, and the caller gives `title`. An entry that is only a text
is `ok`. `{name}` and `{name:.1f}` are filled in,
`{count:rank}` gives "1 rank" or "2 ranks", and `[ ({name})]` is dropped if the value is empty. docs/codes.md shows `means`, else
the title; `source` says where it is documented.
"""

from __future__ import annotations

import functools
import re
from typing import Any, Dict, Mapping

from drumbeat.base.data import load
from drumbeat.base.regex import regex
from drumbeat.findings.model import OK, SEVERITIES, WARNING, Evidence, Finding

FIELDS = frozenset(("severity", "evidence", "node", "host", "rank", "local", "confidence", "seen", "unseen"))
WORDS = ("title", "cause", "fix", "support")
NAME = regex(r"\{(\w+)(?::([\w.,%]+))?\}")
OPTIONAL = regex(r"\[([^\[\]]*\{\w+(?::[\w.,%]+)?\}[^\[\]]*)\]")
_NOUN = regex(r"[A-Za-z]{2,}")
_BY_CALLER = {"severity": WARNING, "title": "{title}"}


@functools.lru_cache(None)
def entries(file: str) -> Dict[str, Dict[str, str]]:
    """Return the entries of one file, each with the values that it inherits."""
    whole: Dict[str, Dict[str, str]] = {}
    for name, entry in load(__package__, file).items():
        entry = {OK: entry} if isinstance(entry, str) else entry
        severity = next((key for key in entry if key in SEVERITIES), None)
        own = {"severity": severity, "title": entry[severity]} if severity else {}
        rest = {key: words for key, words in entry.items() if key != severity}
        whole[name] = {**whole.get(name.partition("/")[0], _BY_CALLER), **own, **rest}
    return whole


def filled(template: str, values: Mapping[str, Any]) -> str:
    """Fill in a template; every name in it must be given."""

    def one(match: re.Match[str]) -> str:
        value, form = values[match[1]], match[2] or ""
        if _NOUN.fullmatch(form):
            return f"{value} {form}" if value == 1 else f"{value} {form}{'es' if form.endswith('s') else 's'}"
        return "" if value is None else format(value, form)

    def optional(match: re.Match[str]) -> str:
        return match[1] if all(values[name] not in (None, "") for name, _ in NAME.findall(match[1])) else ""

    return NAME.sub(one, OPTIONAL.sub(optional, template))


class Catalog:
    """Make the findings of one file: `find = Catalog("plan")`, then `find("port-taken", port=29500, rank=3)`."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __call__(self, code: str, variant: str = "", /, **values: Any) -> Finding:
        """Return a finding; values named like a field of Finding set that field too."""
        entry = entries(self.file)[f"{code}/{variant}" if variant else code]
        fields = {key: value for key, value in values.items() if key in FIELDS}
        fields.setdefault("severity", entry.get("severity"))
        fields.update((key, filled(entry[key], values)) for key in WORDS if key in entry)
        evidence = fields.pop("evidence", ())
        shown = tuple(Evidence(each) if isinstance(each, str) else each for each in evidence)
        return Finding(code, evidence=shown, **fields)
