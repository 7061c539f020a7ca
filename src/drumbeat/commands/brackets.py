"""Where a bracket, a quote or a backtick of shell text ends.

Time is bounded: nesting has a limit, and after a few that never close nothing is looked for any more.
"""

from __future__ import annotations

MAX_DEPTH = 8
MAX_UNCLOSED = 24


class Brackets:
    """Each search gives the position behind the end, or 0 when there is none."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.unclosed = 0

    @property
    def given_up(self) -> bool:
        return self.unclosed >= MAX_UNCLOSED

    def line_end(self, at: int) -> int:
        end = self.text.find("\n", at)
        return len(self.text) if end < 0 else end

    def paren(self, at: int, depth: int) -> int:
        """From an opening bracket."""
        if depth > MAX_DEPTH or self.given_up:
            return 0
        level, text = 0, self.text
        start, size = at, len(text)
        while at < size:
            char = text[at]
            if char == "\\":
                at += 2
                continue
            if char == "'":
                at = text.find("'", at + 1) + 1
                if not at:
                    break
                continue
            if char == '"':
                at = self.quoted(at, depth + 1)
                if not at:
                    break
                continue
            if char == "`":
                at = self.backtick(at) or at + 1
                continue
            if char == "#" and text[at - 1] in " \t\n;(" and at > start:
                at = self.line_end(at)
                continue
            level += (char == "(") - (char == ")")
            at += 1
            if not level:
                return at
        self.unclosed += 1
        return 0

    def backtick(self, at: int) -> int:
        while not self.given_up:
            at = self.text.find("`", at + 1)
            if at < 0:
                self.unclosed += 1
            elif self.text[at - 1] != "\\":
                return at + 1
        return 0

    def quoted(self, at: int, depth: int) -> int:
        """From an opening double quote."""
        if depth > MAX_DEPTH:
            return 0
        at += 1
        while at < len(self.text):
            char = self.text[at]
            if char == '"':
                return at + 1
            if char == "\\":
                at += 2
            elif self.text.startswith("$(", at):
                at = self.paren(at + 1, depth + 1) or at + 2
            elif self.text.startswith("${", at):
                at = self.brace(at + 1) or at + 2
            elif char == "`":
                at = self.backtick(at) or at + 1
            else:
                at += 1
        return 0

    def brace(self, at: int) -> int:
        """From the { of ${; it does not reach over a line's end."""
        if self.given_up:
            return 0
        level, end = 0, min(self.line_end(at), at + 2000)
        while at < end:
            char = self.text[at]
            if char == '"':  # ${x:-"}"}
                at = self.text.find('"', at + 1, end)
                if at < 0:
                    break
            level += (char == "{") - (char == "}")
            at += 2 if char == "\\" else 1
            if not level:
                return at
        self.unclosed += 1
        return 0
