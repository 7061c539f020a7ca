"""The batch that a script takes when nobody says one: the default of the option in whose place `{batch}` stands."""

from __future__ import annotations

import ast
import os
from typing import Optional, Sequence

_LARGEST_SCRIPT = 4 << 20  # bytes
_DECLARES = ("add_argument", "option", "Option")  # argparse; click; typer


def own_batch(command: Sequence[str], expanded: Sequence[str]) -> Optional[int]:
    """`python train.py --batch-size {batch}` -> the default of --batch-size in train.py, if it is written there.

    `expanded`: the same command with its variables filled in, for the path of the script."""
    option = _option(command)
    script = next((word for word in expanded if word.endswith(".py") and os.path.isfile(word)), None)
    if option is None or script is None or os.path.getsize(script) > _LARGEST_SCRIPT:
        return None
    try:
        with open(script, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) in _DECLARES and option in map(_text, node.args):
            values = [keyword.value for keyword in node.keywords if keyword.arg == "default"]
            found = [value.value for value in values if isinstance(value, ast.Constant)]
            return found[0] if found and type(found[0]) is int and found[0] > 0 else None
    return None


def _option(command: Sequence[str]) -> Optional[str]:
    for before, word in zip(["", *command], command):
        if word == "{batch}":
            return before if before.startswith("-") else None
        name, equals, value = word.partition("=")
        if equals and value == "{batch}" and name.startswith("-"):
            return name
    return None


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _text(argument: ast.expr) -> object:
    return argument.value if isinstance(argument, ast.Constant) else None
