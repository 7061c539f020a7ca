"""What `drumbeat lint` finds in the script is carried into the job file too, unless the conversion takes it away."""

from __future__ import annotations

import re
from typing import Set

from drumbeat.base.secret import redact
from drumbeat.commands.script import Script
from drumbeat.convert.draft import Draft
from drumbeat.findings.model import Finding
from drumbeat.lint.engine import lint
from drumbeat.lint.rules import rules


def ask_about_findings(draft: Draft, script: Script) -> None:
    gone = {rule.id for rule in rules() if rule.converted}
    dropped = {note.line for note in draft.left_out} - _carried(draft, script)
    for finding in lint(script.text, "script.sh").findings:
        place = finding.evidence[0]
        line = place.line or 0
        if finding.code not in gone and line not in dropped and not _asked(draft, finding, line):
            draft.question(line, place.text, redact(f"{finding.title}; {finding.fix} [{finding.code}]"))


def _carried(draft: Draft, script: Script) -> Set[int]:
    """Lines of which something stands in the job file."""
    exported = {found[1] for found in (re.match(r"export (\w+)=", line) for line in draft.setup) if found}
    variables = {each.line for each in script.assignments if each.name in exported | set(draft.env)}
    return variables | set(draft.lines.values()) | {note.line for note in draft.to_check}


def _asked(draft: Draft, finding: Finding, line: int) -> bool:
    """A secret and an open quote have a question of their own."""
    known = {"secret-in-script": "looks secret", "quote-unclosed": "never closed"}.get(finding.code)
    return bool(known) and any(note.line == line and str(known) in note.why for note in draft.to_check)
