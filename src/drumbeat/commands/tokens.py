"""What the lexer of shell text gives: words, tokens, heredocs, and what it stumbled over."""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple


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
