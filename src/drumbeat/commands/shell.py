"""Shell text into tokens: comments, quotes, heredocs, continuations and substitutions; nothing is ever expanded or run.

Not a shell: just enough of its grammar that a rule never fires on a comment or on a string. Time is bounded: nesting
has a limit, and after a few quotes or brackets that never close the rest is taken literally.
"""

from __future__ import annotations

import bisect
import re
from typing import List, NamedTuple, Optional, Tuple

from drumbeat.base.regex import regex

# Output of the lexer: words, tokens, heredocs, and faults.


class Part(NamedTuple):
    """Shell text inside a word that is run by itself: `$(...)` or backticks."""

    text: str
    line: int
    column: int  # of its first character
    raw: str


class Word(NamedTuple):
    text: str  # without its quotes; expansions as written
    raw: str
    line: int
    column: int
    parts: Tuple[Part, ...] = ()
    active: Tuple[str, ...] = ()  # variables that the shell replaces here
    nested: str = ""  # the word as a script of its own: substitutions done outside are blanked


class Token(NamedTuple):
    kind: str  # word, operator, redirect, comment
    text: str
    line: int
    word: Optional[Word] = None
    start: int = 0  # its place in the text
    end: int = 0


class Fault(NamedTuple):
    """Something the lexer itself stumbled over."""

    kind: str  # quote, continuation, typographic
    line: int
    column: int
    text: str


class Heredoc(NamedTuple):
    text: str
    line: int  # of its first line
    literal: bool  # its mark was quoted: nothing in it is expanded
    owner: int  # line of the command it belongs to
    end: int = 0  # its place in the text, behind its mark


# Where a bracket, a quote or a backtick of shell text ends. Time is bounded: nesting has a limit, and after a few
# that never close nothing is looked for any more.


MAX_DEPTH = 8
MAX_UNCLOSED = 24


class Brackets:
    """Searches for closing brackets. Each gives the position behind the end, or 0 when there is none."""

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
        """Search from an opening bracket."""
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
        """Search from an opening double quote."""
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
                at = self.brace(at + 1, depth + 1) or at + 2
            elif char == "`":
                at = self.backtick(at) or at + 1
            else:
                at += 1
        return 0

    def brace(self, at: int, depth: int = 0) -> int:
        """Search from the { of ${; it does not reach over a line's end."""
        if self.given_up:
            return 0
        level, end = 0, min(self.line_end(at), at + 2000)
        while at < end:
            char = self.text[at]
            if char == '"':  # ${x:-"}"}
                at = self.quoted(at, depth + 1)
                if not at:
                    break
                continue
            level += (char == "{") - (char == "}")
            at += 2 if char == "\\" else 1
            if not level:
                return at
        self.unclosed += 1
        return 0


TYPOGRAPHIC = "‐‑‒–—―−“”„‟‘’‚‛«»…\u00a0\u200b\u200c\u200d\u2060\ufeff"

_OPERATOR = regex(r"\|\||&&|;;&?|\|&|&>>?|<<<|<<-?|<>|>>|>&|<&|>\||[|&;()<>]")
_REDIRECTS = frozenset(("&>", "&>>", "<<<", "<<", "<<-", "<>", ">>", ">&", "<&", ">|", "<", ">"))
_BROKEN_CONTINUATION = regex(r"\\[ \t]+(#[^\n]*)?(?=\n|\Z)")
_PLACEHOLDER = regex(r"<[A-Za-z/][\w/.-]*>(?=[\s\"';|&)]|\Z)")  # <num_nodes>: meant for the reader, not for the shell
_NAME = regex(r"[A-Za-z_]\w*")
_ARRAY = regex(r"[A-Za-z_]\w*\+?=\Z")


class Lexer:
    def __init__(self, text: str, line: int = 1, column: int = 0, depth: int = 0) -> None:
        self.text, self.line, self.column, self.depth = text, line, column, depth
        self.tokens: List[Token] = []
        self.faults: List[Fault] = []
        self.heredocs: List[Heredoc] = []
        self._newlines = [match.start() for match in re.finditer("\n", text)]
        self._brackets = Brackets(text)
        self._parts: List[Part] = []
        self._active: List[str] = []
        self._waiting: List[Tuple[str, bool, bool, int]] = []  # heredocs: mark, literal, tabs stripped, owner

    def run(self) -> Lexer:
        position, size = 0, len(self.text)
        while position < size:
            start, known = position, len(self.tokens)
            position = self._step(position)
            if self.tokens and len(self.tokens) >= known and self.tokens[-1].end == 0:
                end = start + 1 if self.tokens[-1].text == "\n" else position
                self.tokens[-1] = self.tokens[-1]._replace(start=start, end=end)
        return self

    def place(self, position: int) -> Tuple[int, int]:
        row = bisect.bisect_left(self._newlines, position)
        start = self._newlines[row - 1] + 1 if row else 0
        return self.line + row, position - start + (0 if row else self.column)

    def _fault(self, kind: str, position: int, text: str) -> None:
        self.faults.append(Fault(kind, *self.place(position), text))

    def _step(self, at: int) -> int:
        text, char = self.text, self.text[at]
        if char == "\n":
            self.tokens.append(Token("operator", "\n", self.place(at)[0]))
            return self._bodies(at + 1)
        if char in " \t\r":
            return at + 1
        if char == "\\":
            if text.startswith("\\\n", at):
                return at + 2
            broken = _BROKEN_CONTINUATION.match(text, at)
            if broken:  # read on as it was meant
                self._fault("continuation", at, broken.group())
                return min(broken.end() + 1, len(text))
            if re.match(r"\\[ \t]+-", text[at : at + 40]):
                self._fault("joined", at, "\\")
                return at + 1
        if char == "#":
            end = self._brackets.line_end(at)
            self.tokens.append(Token("comment", text[at:end], self.place(at)[0]))
            return end
        if self._process(at) or self._placeholder(at):
            return self._word(at)
        operator = _OPERATOR.match(text, at)
        if operator:
            return self._operator(at, operator.group())
        return self._word(at)

    def _operator(self, at: int, operator: str) -> int:
        line, end = self.place(at)[0], at + len(operator)
        if operator not in _REDIRECTS:
            self.tokens.append(Token("operator", operator, line))
            return end
        before = self.tokens[-1] if self.tokens else None
        if before and before.word and before.text.isdigit() and at and self.text[at - 1].isdigit():
            self.tokens.pop()  # the 2 of 2>
        while end < len(self.text) and self.text[end] in " \t":
            end += 1
        if end >= len(self.text) or (self.text[end] in "\n|&;()<>" and not self._process(end)):
            self.tokens.append(Token("operator", operator, line))
            return end
        stop = self._word(end)
        word = self.tokens.pop().word
        assert word is not None
        if operator in ("<<", "<<-"):
            literal = word.raw != word.text
            self._waiting.append((word.text, literal, operator == "<<-", line))
        self.tokens.append(Token("redirect", operator, line, word))
        return stop

    def _bodies(self, at: int) -> int:
        """Read the heredocs that were announced on the line just ended."""
        for mark, literal, tabs, owner in self._waiting:
            first, lines = self.place(at)[0], []
            while at < len(self.text):
                end = self._brackets.line_end(at)
                line, at = self.text[at:end], end + 1
                if (line.lstrip("\t") if tabs else line) == mark:
                    break
                lines.append(line)
            self.heredocs.append(Heredoc("\n".join(lines), first, literal, owner, min(at - 1, len(self.text))))
        self._waiting.clear()
        return min(at, len(self.text))

    def _word(self, start: int) -> int:
        self._parts, self._active = [], []
        shown: List[str] = []
        nested: List[str] = []
        at = start
        while at < len(self.text):
            char = self.text[at]
            if char in " \t\n\r|&;" or (char in "<>()" and not self._process(at) and not self._placeholder(at)):
                if char == "(" and self.depth < MAX_DEPTH and _ARRAY.match(self.text[start:at]):
                    end = self._brackets.paren(at, 0)
                    if end:
                        inner = Lexer(self.text[at + 1 : end - 1], *self.place(at + 1), self.depth + 1).run()
                        words = [token.word for token in inner.tokens if token.word]
                        self._parts += [part for word in words for part in word.parts]
                        self._active += [name for word in words for name in word.active]
                        shown.append(self.text[at:end])
                        at = end
                        continue
                if at > start:
                    break
            before = at
            end = self._placeholder(at)
            if end:
                self._fault("placeholder", at, self.text[at:end])
                shown.append(self.text[at:end])
                nested.append(self.text[at:end])
                at = end
                continue
            at = self._piece(at, shown, nested)
            if at == before:  # a bracket that stands by itself
                break
        at = max(at, start + 1)
        raw = self.text[start:at]
        word = Word("".join(shown), raw, *self.place(start), tuple(self._parts), tuple(self._active), "".join(nested))
        self.tokens.append(Token("word", word.text, word.line, word))
        return at

    def _placeholder(self, at: int) -> int:
        found = _PLACEHOLDER.match(self.text, at) if self.text[at] == "<" else None
        return found.end() if found else 0

    def _process(self, at: int) -> bool:
        return self.text[at] in "<>" and self.text.startswith("(", at + 1)

    def _piece(self, at: int, shown: List[str], nested: List[str]) -> int:
        """Read one character, quote or expansion of a word outside quotes."""
        text, char = self.text, self.text[at]
        if char == "\\":
            if text.startswith("\\\n", at):
                return at + 2
            both = text[at : at + 2]
            shown.append(both if both[1:] == "$" else both[1:])
            nested.append(both)
            return at + 2
        if char == "'" or text.startswith("$'", at):
            open_at = at if char == "'" else at + 1
            end = text.find("'", open_at + 1) if not self._brackets.given_up else -1
            if end < 0:
                return self._literal(at, open_at + 1, "'", shown, nested)
            shown.append(text[open_at + 1 : end])
            nested.append(text[open_at + 1 : end])
            return end + 1
        if char == '"':
            end = self._brackets.quoted(at, 0) if not self._brackets.given_up else 0
            if not end:
                return self._literal(at, at + 1, '"', shown, nested)
            self._inside(at + 1, end - 1, shown, nested)
            return end
        if char in "$`" or self._process(at):
            return self._expansion(at, shown, nested)
        if char in TYPOGRAPHIC:
            self._fault("typographic", at, char)
        shown.append(char)
        nested.append(char)
        return at + 1

    def _literal(self, at: int, end: int, quote: str, shown: List[str], nested: List[str]) -> int:
        if not self._brackets.given_up:
            self._fault("quote", at, quote)
        self._brackets.unclosed += 1
        shown.append(self.text[at:end])
        nested.append(self.text[at:end])
        return end

    def _inside(self, at: int, end: int, shown: List[str], nested: List[str]) -> None:
        """Read the content of double quotes."""
        while at < end:
            char = self.text[at]
            if char == "\\":
                both = self.text[at : at + 2]
                shown.append(both if both[1:] not in ('"', "\\") else both[1:])
                nested.append(both if both[1:] not in ('"', "$", "`") else both[1:])
                at += 2
            elif char in "$`":
                at = self._expansion(at, shown, nested)
            else:
                shown.append(char)
                nested.append(char)
                at += 1

    def _expansion(self, at: int, shown: List[str], nested: List[str]) -> int:
        text = self.text
        name = _NAME.match(text, at + 1) if text[at] == "$" else None
        end = at + 1
        if name:
            self._active.append(name.group())
            end = name.end()
        elif text.startswith("${", at):
            end = self._brackets.brace(at + 1) or end
            inner = _NAME.match(text, at + 2)
            if inner and end > at + 1:
                self._active.append(inner.group())
        elif text.startswith("$((", at):
            end = self._brackets.paren(at + 1, 0) or end
        elif text[at] == "`":
            end = self._brackets.backtick(at) or end
            if end > at + 1:
                return self._hidden(at, at + 1, end, shown, nested)
        elif text.startswith("(", at + 1):  # $( <( >(
            end = self._brackets.paren(at + 1, 0) or end
            if end > at + 1:
                return self._hidden(at, at + 2, end, shown, nested)
        shown.append(text[at:end])
        nested.append(text[at:end])
        return end

    def _hidden(self, at: int, first: int, end: int, shown: List[str], nested: List[str]) -> int:
        """Read a substitution: a script of its own, of which the word around it only sees the outcome."""
        raw = self.text[at:end]
        inner = self.text[first : end - 1]
        inner = inner.replace("\\`", "`") if raw[0] == "`" else inner
        self._parts.append(Part(inner, *self.place(first), raw))
        shown.append(raw)
        nested.append("_" + "\n" * raw.count("\n"))
        return end
