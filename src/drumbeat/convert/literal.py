"""Text that stood in single quotes: no shell expands it, and no job file may. Marks keep it apart until it is written."""

from __future__ import annotations

import re
import shlex
from typing import Any, Iterator, Tuple

from drumbeat.base.regex import regex
from drumbeat.commands.tokens import Word

BLANK = "\x01"  # a blank inside $(...), where no word ends
_MARKS = {"$": "\x02", "`": "\x03", "\\": "\x04"}
_SPECIAL = regex(r"[$`]|\\(?!\n)")
_MARKED = regex(r"[\x02-\x04]")


def literal(word: Word) -> str:
    """The word's text, with marks for what its single quotes took the meaning from."""
    if "'" not in word.raw:
        return word.text
    done, at = [], 0
    for piece in _pieces(word):
        if piece[1] is not None:
            found = max(word.text.find(piece[1], at), at)
            done += [word.text[at:found], marked(word.text[found : found + len(piece[1])])]
            at = found + len(piece[1])
        else:
            shown = next((each for each in _shown(piece[0]) if word.text.startswith(each, at)), "")
            done.append(shown)
            at += len(shown)
    return "".join(done) + word.text[at:]


def _pieces(word: Word) -> Iterator[re.Match[str]]:
    """Each stretch of the word as written; the first group is what stands in single quotes."""
    inner = "".join(f"{re.escape(raw)}|" for raw in sorted({part.raw for part in word.parts}, key=len, reverse=True))
    pattern = rf"""{inner}\\.|"(?:{inner}\\.|[^"\\])*"|\$?'([^']*)'|."""
    return re.finditer(pattern, word.raw, re.DOTALL)


def _shown(raw: str) -> Tuple[str, ...]:
    """What the word's text may hold for a stretch outside single quotes."""
    if len(raw) > 1 and raw[0] == '"':
        return (raw[1:-1].replace('\\"', '"').replace("\\\n", ""), raw[1:-1])
    return (raw, raw[1:]) if raw[0] == "\\" else (raw,)


def marked(text: str) -> str:
    return _SPECIAL.sub(lambda found: _MARKS[found[0]], text)


def has_marks(text: str) -> bool:
    return bool(_MARKED.search(text))


def plain(text: str) -> str:
    """As the script's author reads it."""
    for char, mark in _MARKS.items():
        text = text.replace(mark, char)
    return text.replace(BLANK, " ")


def in_job_file(value: Any) -> Any:
    """A job file expands `$NAME`, and `$$` is a plain `$` there."""
    if isinstance(value, list):
        return [in_job_file(each) for each in value]
    return plain(value.replace(_MARKS["$"], "$$")) if isinstance(value, str) else value


def for_shell(word: str) -> str:
    """One word of a shell's line: variables in it are filled in, but for those that are marked."""
    if re.fullmatch(r"[\w@%+=:,./-]+", word):
        return word
    if has_marks(word) and not re.search(r"[$`]", word):
        return shlex.quote(plain(word))
    word = word.replace('"', '\\"')
    return '"' + _MARKED.sub(lambda found: "\\" + plain(found[0]), word) + '"'
