"""docs/codes.md: every code of a finding, from the rules and the catalogs."""

from __future__ import annotations

import re
from typing import Dict, List, Mapping, Set, Tuple

from drumbeat.findings.catalog import entries
from drumbeat.findings.model import ERROR, INFO, OK, WAS
from drumbeat.logs.meaning.rules import CAUSE, CONSEQUENCE, NOTE, REPORT, SYMPTOM, Rule, rulebook

_INTRO = """\
---
search: {boost: 1.5}
---
<!-- Made by: python -m tools.reference. The words are in src/drumbeat/findings and src/drumbeat/logs/rules. -->
# Codes of findings

Cause, evidence and fix come with each finding. Codes are stable, titles may change; `...` stands for a value. A code that several
parts of drumbeat give stands once. Notes are left out (`drumbeat diagnose --rules` lists those of logs).
"""

# What no rule gives, because it does not rest on one line. A test compares this with the source.
_ANSWERS = {
    "none": "no failure was read",
    "peer-lost": "a rank ended because another one had",
    "unknown": "something failed, or nothing here is about a run; no line names the cause",
    "exception": "an uncaught exception that no rule knows, in its own words",
    "nan-loss": "the training loss became NaN and stayed so, and nothing else failed",
}
_BESIDE = {
    "child-failed": "a launcher's table says who failed, and not why",
    "logged-error": "the log ends with a line that its logger calls an error and no rule knows",
}

_CATALOGS = {
    "Findings of `diagnose` that rest on more than one line": ("logs",),
    "Findings of a run": ("lead", "ranks", "watchers"),
    "Findings of `doctor`": ("doctor", "machine", "software"),
    "Findings of `plan`": ("plan",),
    "Findings of `verify`": ("verify",),
}
_KINDS = {
    CAUSE: "Causes",
    SYMPTOM: "Symptoms: the answer where no line names a cause",
    CONSEQUENCE: "Consequences: `peer-lost` is the answer where nothing else is in the log, the others are shown beside one",
    REPORT: "Reports of launchers: shown beside an answer; alone they are `unknown`",
}


def page() -> str:
    lines = [_INTRO]
    shown: Set[str] = set()
    lines += _list("Answers that rest on more than one line", sorted(_ANSWERS.items()), shown)
    kinds: Dict[str, Dict[str, List[Rule]]] = {}
    for rule in rulebook().rules:
        kinds.setdefault(_kind(rule), {}).setdefault(rule.code, []).append(rule)
    for kind, title in _KINDS.items():
        lines += _list(title, [(code, _meaning(rules)) for code, rules in sorted(kinds[kind].items())], shown)
    lines += _list("Findings beside an answer", sorted(_BESIDE.items()), shown)
    for title, files in _CATALOGS.items():
        found: Dict[str, List[Mapping[str, str]]] = {}
        for name, entry in [pair for file in files for pair in entries(file).items()]:
            found.setdefault(name.partition("/")[0], []).append(entry)
        lines += _list(title, [(code, _of_entries(each)) for code, each in sorted(found.items()) if warns(each)], shown)
    lines += _list("Renamed codes: old, new", [(old, f"`{new}`") for old, new in sorted(WAS.items())], set())
    return "\n".join(lines)


def warns(found: List[Mapping[str, str]]) -> bool:
    """Return false for a code that only ever says that something is right, or notes something."""
    return any(entry.get("severity") not in (OK, INFO) for entry in found)


def _kind(rule: Rule) -> str:
    return NOTE if rule.severity != ERROR and rule.role in (CAUSE, SYMPTOM) else rule.role


def _meaning(rules: List[Rule]) -> str:
    return _first([rule.title for rule in rules], rules[0].cause)


def _of_entries(found: List[Mapping[str, str]]) -> str:
    return found[0].get("means") or _first([entry["title"] for entry in found], found[0].get("cause", ""))


def _first(titles: List[str], cause: str) -> str:
    """Return the first title that says something without its values, else the cause."""
    return next((text for text in map(_general, (*titles, cause)) if text.strip(" .,:")), "")


def _general(words: str) -> str:
    """Return a template without what one log or node fills in."""
    whole = re.sub(r"\{(\w+):([A-Za-z]{2,})\}", r"{\1} \2s", words)
    whole = re.sub(r"\{(\w+):[\w.,%]+\}", r"{\1}", whole)
    whole = re.sub(r"\[([^\[\]]*\{\w+\}[^\[\]]*)\]", r"\1", whole)
    return re.sub(r"(?<!=) ?\{\w+\}", " ...", re.sub(r"=\{\w+\}", "=...", whole)).replace("( ", "(").strip()


def _list(title: str, rows: List[Tuple[str, str]], shown: Set[str]) -> List[str]:
    """Return the section, without the codes that are shown already."""
    new = [(code, meaning) for code, meaning in rows if code not in shown]
    shown.update(code for code, _ in new)
    return [f"## {title}\n", *(f"- `{code}`: {meaning}" for code, meaning in new), ""]
