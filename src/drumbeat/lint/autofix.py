"""Edits into a new text: only what is safe, and only where the old text still stands as it was judged."""

from __future__ import annotations

import difflib
from typing import Dict, List, Sequence, Tuple

from drumbeat.lint.context import LONGEST_FIXED, Edit
from drumbeat.lint.engine import Review


def apply_edits(review: Review) -> str:
    """The text with its edits made; line ends are \\n."""
    lines = review.text.split("\n")
    for edit in sorted(set(review.edits), key=lambda edit: (edit.line, edit.column), reverse=True):
        place = edit.line - 1
        if 0 <= place < len(lines) and (edit.old or edit.new):
            lines[place] = _changed(lines[place], edit)
    above = _insertions(review.edits)
    fixed: List[str] = []
    for place, line in enumerate(lines):
        indent = line[: len(line) - len(line.lstrip())]
        fixed += [indent + text for text in above.get(place, ())]
        fixed.append(line)
    return "\n".join(fixed)


def _changed(line: str, edit: Edit) -> str:
    if len(line) > LONGEST_FIXED:
        return line
    end = edit.column + len(edit.old)
    if line[edit.column : end] == edit.old:
        return line[: edit.column] + edit.new + line[end:]
    if (
        edit.old and line.count(edit.old) == 1
    ):  # inside quotes with escapes columns shift; the text itself is proof enough
        return line.replace(edit.old, edit.new)
    return line


def _insertions(edits: Sequence[Edit]) -> Dict[int, List[str]]:
    wanted: Dict[int, List[str]] = {}
    for line, text in dict.fromkeys(edit.above for edit in edits if edit.above):
        wanted.setdefault(line - 1, []).append(text)
    return wanted


def difference(before: str, after: str, name: str) -> Tuple[str, ...]:
    lines = difflib.unified_diff(before.split("\n"), after.split("\n"), name, name + " (fixed)", lineterm="", n=1)
    return tuple(lines)
