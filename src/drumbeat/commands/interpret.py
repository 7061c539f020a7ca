"""A small interpreter of shell scripts. It works out what a script does, as far as the text decides it, and runs nothing."""

from __future__ import annotations

from typing import List, Optional, TypeVar

from drumbeat.base.regex import regex
from drumbeat.commands.builtins import BUILTINS
from drumbeat.commands.control import COMPOUND, call
from drumbeat.commands.state import ShellState
from drumbeat.commands.substitution import substitute
from drumbeat.commands.syntax import Node

_ENVIRONMENTS = regex(
    r"(?:source|\.)\s+(?:\$\([^()]*\)|\S)*?(?:bin/activate|conda\.sh|/etc/profile\S*|modules?(?:/\S*)?/init/\S+|\.bashrc)[\"']?(?:\s|$)"
    r"|(?:conda|mamba|micromamba|pyenv|spack|module|ml|source\s+activate)\b|eval\s.*(?:conda|mamba|spack|pyenv)"
)


class Shell(ShellState):
    """A shell with the commands and substitutions of bash."""

    builtins, compound, environments = BUILTINS, COMPOUND, _ENVIRONMENTS

    def substitute(self, text: str) -> str:
        return substitute(self, text)

    def call(self, name: str, words: List[str], node: Node) -> Optional[bool]:
        return call(self, name, words, node)


S = TypeVar("S", bound=Shell)


def look_everywhere(shell: S) -> S:
    """Collect also what the functions start that a script never calls."""
    shell.arguments = None
    for body, source in list(shell.functions.values()):
        shell.text = source
        if not any(each.line >= body.line and each.text in source[body.start : body.end] for each in shell.started):
            shell.look_inside([body])
    return shell
