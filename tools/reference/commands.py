"""docs/commands.md, from the parsers."""

from __future__ import annotations

import argparse
import re
from typing import Any, Dict, List

from drumbeat.cli import COMMANDS, parser_for
from drumbeat.jobfile.check import keys_of
from drumbeat.jobfile.job import Job

_COMMON = {"--help", "--help-all", "--json", "--json-schema", "--debug"}
_RUN = "name, run id or the start of one, run folder, or scheduler job"
_JOB = {f"--{name}" for name, (_, key) in keys_of(Job).items() if key.flag}


def page() -> str:
    lines = [
        "<!-- Made by: python -m tools.reference. -->",
        "# Commands",
        "",
        "`drumbeat COMMAND --help` shows what most people need, `--help-all` everything. `--json` prints machine-readable "
        "output, `--json-schema` its schema, `--debug` the traceback of an error. RUN is a name, a run id or the start of "
        "one, a run folder, or a scheduler's job; default: the newest [here](runfolder.md#which-run). Errors are text on "
        "standard error, with `--json` too ([exit codes](agents.md#exit-codes)). "
        "Commands that take JOB.yaml take the keys of a [job file](job.md) as flags, which override it.",
        "",
        "| command | what it does |",
        "|---|---|",
        *(f"| [`{name}`](#drumbeat-{name}) | {_cell(text)} |" for name, text in COMMANDS.items()),
    ]
    tables: Dict[str, str] = {}  # options -> the command that has them
    for name in COMMANDS:
        table = _table(parser_for(name)[0])
        options = "\n".join(row for row in table if row.startswith("| `--"))
        same = tables.setdefault(options, name) if options else name
        lines += ["", f"## drumbeat {name}", ""]
        lines += table if same == name else [f"The arguments of [{same}](#drumbeat-{same})."]
    return "\n".join(lines) + "\n"


def _table(parser: Any) -> List[str]:
    lines: List[str] = []
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or _COMMON & set(action.option_strings):
            continue
        if _JOB & set(action.option_strings):
            continue
        if isinstance(action, argparse._SubParsersAction):
            lines += [f"| `{name}` | {_cell(sub.description or '')} |" for name, sub in action.choices.items()]
            continue
        words = (action.help or "").replace("%%", "%").replace(_RUN, "a run").replace("; flags override it", "")
        words = re.sub(r"; default: the newest( run)? here", "", words)
        if words in ("job file", "a run"):
            continue
        lines.append(f"| {_names(action)} | {_cell(words)} |")
    return ["| argument | meaning |", "|---|---|", *lines] if lines else ["No arguments."]


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
