"""What of a text was looked at, in words. Nothing in it that lint can read: no words."""

from __future__ import annotations

import re
import sys

from drumbeat.commands.script import Command, Script
from drumbeat.lint import python_program
from drumbeat.lint.document import COMMANDS, SCRIPTS

_RESERVED = frozenset(["if", "then", "else", "fi", "for", "while", "do", "done", "case", "esac", "time"])
_BUILTINS = frozenset(
    ["[", "[[", ":", "true", "false", "test", "eval", "local", "declare", "readonly", "exit", "shift", "return"]
)
_KNOWN = (frozenset(COMMANDS.split()) | _BUILTINS) - _RESERVED
_OPTION = re.compile(r"--?[A-Za-z]")
_LEAST = 4  # one command in so many must be known, or a text that nothing calls a script is none


def in_page(pieces: int) -> str:
    return f"{_counted(pieces, 'piece')} of code in a page" if pieces else "a page without shell or Python code"


def in_python(text: str) -> str:
    lines = sum(1 for line in text.split("\n") if line.strip())
    if not lines:
        return ""
    words = f"{_counted(lines, 'line')} of Python"
    if python_program.parse(text, 1, True) is None:
        version = ".".join(map(str, sys.version_info[:2]))
        words += f", each by itself, because Python {version} cannot parse the file"
    return words


def in_shell(script: Script, name: str) -> str:
    """A name or a first line that says so makes any text a script; else enough of its commands must be known ones."""
    outer = [command for command in script.commands if not command.within]
    directives = len({directive.line for directive in script.directives} | set(script.late))
    if not outer and not directives:
        return ""
    called = name.endswith(SCRIPTS) or script.text.startswith("#!") or directives
    known = sum(map(_known, outer))
    if not called and not (known and known * _LEAST >= len(outer)):
        return ""
    words = [_counted(len(outer), "command")] if outer else []
    words += [_counted(directives, "#SBATCH line")] if directives else []
    return " and ".join(words)


def _known(command: Command) -> bool:
    if command.assignments or not command.words:
        return True
    first = command.words[0].text
    options = any(_OPTION.match(word.text) for word in command.words[1:])
    return command.name in _KNOWN or "/" in first or first.startswith("$") or options


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"
