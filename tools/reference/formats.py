"""The table of formats in docs/metrics.md, from the rules."""

from __future__ import annotations

import os

from drumbeat.metrics.grammar import rules

BEGIN, END = "<!-- formats: made by python -m tools.reference -->", "<!-- end of formats -->"
_UNITS = {"tokens_per_s": "tokens/s", "samples_per_s": "samples/s"}


def format_table() -> str:
    lines = [BEGIN, "| program | rule | values | per | source |", "|---|---|---|---|---|"]
    for rule in rules():
        values = ", ".join(f"`{name}`" for name in rule.gives)
        whose = ", ".join(f"{_UNITS.get(name, name)}: {owner}" for name, owner in rule.per.items()) or "-"
        kind = "" if rule.kind == "step" else f" ({rule.kind})"
        lines.append(f"| {rule.program}{kind} | `{rule.id}` | {values} | {whose} | {rule.source} |")
    return "\n".join([*lines, END]) + "\n"


def page() -> str:
    """Return docs/metrics.md with its table of formats up to date."""
    with open(os.path.join(os.path.dirname(__file__), "..", "..", "docs", "metrics.md"), encoding="utf-8") as file:
        before, _, rest = file.read().partition(BEGIN)
    return before + format_table() + rest.partition(END)[2].lstrip("\n")
