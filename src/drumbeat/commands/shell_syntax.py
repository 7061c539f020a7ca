"""What only a shell would understand in a job's command: no shell reads it, so its words would all become arguments."""

from __future__ import annotations

import shlex
from typing import NoReturn, Optional, Sequence

from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex

_OPERATOR = regex(r"(&&|\|\||\||;|&|\|&|\d?>>?|\d?<|<<<?|&>>?|\d?>&\d|\(|\))$")

_ASSIGNMENT = regex(r"[A-Za-z_]\w*=")


def shell_syntax(text: str) -> Optional[str]:
    """The first word, or line break, that only a shell understands; None if there is none. What is quoted is text."""
    word, quote, whole = "", "", True
    index = 0
    text = text.strip()
    while index < len(text):
        char = text[index]
        if char == "\\" and quote != "'":
            whole = whole and text[index + 1 : index + 2] == "\n"
            index += 2
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote, whole = char, False
        elif char == "#" and not word and whole:
            return "#"
        elif char.isspace():
            found = _operator(word, whole)
            if found:
                return found
            if char == "\n":
                return "a line break"
            word, whole = "", True
            index += 1
            continue
        word += char
        index += 1
    return _operator(word, whole)


def refuse_shell(found: str, place: str) -> NoReturn:
    what = "a line break ends a command in a shell" if found == "a line break" else f"{found} is for a shell"
    raise Problem(
        f"{place}: {what}, and no shell reads this: all that follows would be arguments",
        "what comes before the command belongs into setup; or write a shell line: bash -c 'first && second'"
        + ("; one command over several lines is written with >- instead of |" if found == "a line break" else ""),
    )


def refuse_assignment(command: Sequence[str], place: str) -> None:
    """`NAME=value program`: only a shell takes the first word for anything but the program's name."""
    if _ASSIGNMENT.match(command[0]):
        raise Problem(
            f"{place}: {command[0]} before the command is for a shell, and no shell reads this: it would be the program's name",
            f"put env before it: env {shlex.join(command)}",
        )


def _operator(word: str, whole: bool) -> Optional[str]:
    """`whole` says that nothing in the word was quoted."""
    if whole and _OPERATOR.match(word):
        return word
    return ";" if whole and len(word) > 1 and word.endswith(";") else None
