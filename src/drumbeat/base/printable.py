"""Text of others as it may be printed: names of files and runs, lines of logs, what a cluster says."""

from __future__ import annotations

import re

from drumbeat.base.regex import regex

_ESCAPES = regex(r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)?|[@-Z\\^_])?")
# Control characters but tabs and line ends, and marks that turn the direction of writing.
_CONTROLS = regex(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """Without what steers a terminal; lines and tabs stay."""
    return text if text.isprintable() else _CONTROLS.sub("", _ESCAPES.sub("", text))


def indented(text: str) -> str:
    """Harmless lines, all but the first indented: one that a name brings along does not look like a line of ours."""
    return re.sub(r"\n(?!  )", "\n  ", harmless(text))


def printable(text: str) -> str:
    """One line: a name with a line end in it must not look like a line of ours."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else " " for letter in _ESCAPES.sub("", text))
