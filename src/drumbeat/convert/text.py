"""The draft as a job file with comments."""

from __future__ import annotations

import re
from typing import Any, List

import yaml

from drumbeat.base.printable import printable
from drumbeat.convert.draft import Draft

_ORDER = (
    "name", "nodes", "ranks-per-node", "gpus", "command", "setup", "modules", "container", "container-runtime", "binds", "env",
    "workdir", "time", "account", "partition", "qos", "memory", "cpus",
)  # fmt: skip


def job_file(draft: Draft, source: str) -> str:
    keys = {**draft.keys}
    if draft.setup:
        keys["setup"] = "\n".join(draft.setup)
    if draft.modules:
        keys["modules"] = draft.modules
    if draft.env:
        keys["env"] = draft.env
    if draft.options:
        keys["submit-options"] = draft.options
    lines = [
        f"# From {printable(source)} by drumbeat convert. drumbeat plan --render shows the batch script that this becomes."
    ]
    for key in [*(key for key in _ORDER if key in keys), *(key for key in keys if key not in _ORDER)]:
        lines += _entry(key, keys[key], f"  # line {draft.lines[key]}" if key in draft.lines else "")
    for title, notes in (("Please check", draft.to_check), ("Left out", draft.left_out)):
        if notes:
            lines += ["", f"# {title}:"]
            for why in dict.fromkeys(note.why for note in notes):
                lines.append(f"#   {why}:")
                lines += [f"#     line {note.line}: {note.text}" for note in sorted(notes) if note.why == why]
    return "\n".join(lines) + "\n"


def _entry(key: str, value: Any, comment: str) -> List[str]:
    if isinstance(value, str) and "\n" in value:
        return [f"{key}: |-{comment}", *(f"  {line}" for line in value.split("\n"))]
    if isinstance(value, dict):
        return [f"{key}:{comment}", *(f"  {name}: {_scalar(text)}" for name, text in value.items())]
    if key == "command" and all(re.fullmatch(r"[\w@%+=:,./$-]+", word) for word in value):
        return [f"{key}: {_scalar(' '.join(value))}{comment}"]
    return [f"{key}: {_scalar(value)}{comment}"]


def _scalar(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.replace("\n...", "").rstrip("\n")
