"""What a shell script runs in the place of a launcher that failed: `torchrun train.py || python train.py`.

A script's exit code 0 says little in general: it may be that of a pipe into tee, or of a last echo. It proves that the
fallback ended well where `LAUNCHER || FALLBACK` is the last thing that the script does, and only then.
"""

from __future__ import annotations

import os
import re
import shlex
from typing import List, Sequence

_SILENT = frozenset(
    ("true", ":", "echo", "printf", "exit", "return", "break", "continue", "logger", "sleep", "wait", "touch")
)
_LAST_EXIT = re.compile(r"exit(?:[ \t]+\"?\$\?\"?)?")
_OPERATORS = frozenset(("&&", "||", "|", "|&", "&", ";", ";;", "(", ")", "{", "}", "!"))
_COMPOUND = frozenset(
    ("if", "then", "else", "elif", "fi", "for", "while", "until", "do", "done", "case", "esac", "time", "exec")
)


def fallback(text: str, launcher: str) -> str:
    """What stands behind `||` in the last statement of this script, before which `launcher` (its first word) stands; '' where
    the script's exit code 0 does not prove that it ended well."""
    if "<<" in text or re.search(r"\btrap\b", text):
        return ""  # lines of a here-document are no commands; a trap may end the script in another way
    lines = [line for line in _logical_lines(text) if line and not line.startswith("#")]
    if lines and _LAST_EXIT.fullmatch(lines[-1]):
        lines.pop()
    if not lines:
        return ""
    if lines[-1] == "}":
        return _of_group(lines[:-1], launcher)
    left, _, right = lines[-1].partition("||")
    return right.strip() if _starts(left, launcher) and _is_program(right) else ""


def _of_group(lines: Sequence[str], launcher: str) -> str:
    """`LAUNCHER || {`, commands in lines of their own, and `}`: the last command's exit code is the group's."""
    heads = [number for number, line in enumerate(lines) if re.search(r"\|\|\s*\{$", line)]
    if not heads:
        return ""
    body = lines[heads[-1] + 1 :]
    left = lines[heads[-1]].partition("||")[0]
    words = [_words(line) for line in body]
    simple = all(each and not _COMPOUND & set(each) and not {"{", "}", "(", ")"} & set(each) for each in words)
    return body[-1] if body and simple and _starts(left, launcher) and _is_program(body[-1]) else ""


def _logical_lines(text: str) -> List[str]:
    text = re.sub(r"\\\n", " ", text)
    text = re.sub(r"(\|\||&&)[ \t]*\n", r"\1 ", text)
    return [line.strip() for line in text.split("\n")]


def _words(command: str) -> List[str]:
    """Words and operators; nothing where a quote is open: then the line is not a whole statement."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:
        return []


def _starts(left: str, launcher: str) -> bool:
    """Whether the launcher is the last command of this list, so that its exit code decides about the other side of `||`."""
    words = _words(left)
    if not words or _COMPOUND & set(words) or set(words) & (_OPERATORS - {"&&"}):
        return False
    last = words[len(words) - words[::-1].index("&&") :] if "&&" in words else words
    return any(os.path.basename(word) == launcher for word in last)


def _is_program(right: str) -> bool:
    """Whether this is a single command that runs a program: words that only print or end the script replace no training."""
    words = _words(right)
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
        words = words[1:]
    if not words or set(words) & (_OPERATORS - {"&&"}) or _COMPOUND & set(words):
        return False
    return words[0] not in _SILENT
