"""docs/commands.md, from the parsers."""

from __future__ import annotations

import argparse
from typing import Any, List

from drumbeat.cli import COMMANDS, parser_for


def page() -> str:
    lines = [
        "# Commands",
        "",
        "Reference, made from the code. `drumbeat COMMAND --help` shows what most people need, `--help-all` everything. "
        "An error is text on standard error, with `--json` too, where standard output then stays empty or has what could "
        "still be said; the exit code is not 0, and 2 for wrong input.",
        "",
        "| command | what it does |",
        "|---|---|",
        *(f"| [`{name}`](#drumbeat-{name}) | {_cell(text)} |" for name, text in COMMANDS.items()),
    ]
    for name, text in COMMANDS.items():
        lines += ["", f"## drumbeat {name}", "", text[0].upper() + text[1:] + ".", "", *_table(parser_for(name)[0])]
    return "\n".join(lines) + "\n"


def _table(parser: Any) -> List[str]:
    lines = ["| argument | meaning |", "|---|---|"]
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or "--help" in action.option_strings:
            continue
        if isinstance(action, argparse._SubParsersAction):
            lines += [f"| `{name}` | {_cell(sub.description or '')} |" for name, sub in action.choices.items()]
            continue
        lines.append(f"| {_names(action)} | {_cell((action.help or '').replace('%%', '%'))} |")
    return lines


def _names(action: Any) -> str:
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    value = value[0] if isinstance(value, tuple) else value
    if not action.option_strings:
        return f"`{_escaped(str(value))}`"
    takes = "" if action.nargs == 0 else f" {_escaped(str(value))}"
    return ", ".join(f"`{name}{takes}`" for name in action.option_strings)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split()))
