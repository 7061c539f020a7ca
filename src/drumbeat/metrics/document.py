"""The table of formats in docs/metrics.md, from the rules themselves: python -m drumbeat.metrics.document"""

from __future__ import annotations

import sys
from typing import List

from drumbeat.metrics.grammar import rules

BEGIN, END = "<!-- formats: made by python -m drumbeat.metrics.document -->", "<!-- end of formats -->"
_UNITS = {"tokens_per_s": "tokens/s", "samples_per_s": "samples/s"}


def format_table() -> str:
    lines = [BEGIN, "| program | rule | values | per | source |", "|---|---|---|---|---|"]
    for rule in rules():
        values = ", ".join(f"`{name}`" for name in rule.gives)
        whose = ", ".join(f"{_UNITS.get(name, name)}: {owner}" for name, owner in rule.per.items()) or "-"
        kind = "" if rule.kind == "step" else f" ({rule.kind})"
        lines.append(f"| {rule.program}{kind} | `{rule.id}` | {values} | {whose} | {rule.source} |")
    return "\n".join([*lines, END]) + "\n"


def with_table(page: str) -> str:
    """The page with its table made anew."""
    before, _, rest = page.partition(BEGIN)
    return before + format_table() + rest.partition(END)[2].lstrip("\n")


def main(arguments: List[str]) -> None:
    path = arguments[0] if arguments else "docs/metrics.md"
    with open(path, encoding="utf-8") as file:
        page = file.read()
    with open(path, "w", encoding="utf-8") as file:
        file.write(with_table(page))


if __name__ == "__main__":
    main(sys.argv[1:])
