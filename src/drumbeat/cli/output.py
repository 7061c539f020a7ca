"""Output of commands besides text for people: JSON, and files that the user names."""

from __future__ import annotations

import sys
from typing import Any, Optional


def print_json(value: Any, indent: Optional[int] = 2) -> None:
    """Print records, lists and mappings as JSON. NaN and infinity, which it does not have, become null."""
    from drumbeat.base.record import plain_json, to_plain

    print(plain_json(_finite(to_plain(value)), indent=indent))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and value - value != 0 else value


def warn(order: Any) -> None:
    """Say which settings of an order the scheduler would accept but are probably mistakes."""
    from drumbeat import backends

    for note in backends.get(order.backend).notes(order):
        print(f"{'warning':<9} {note}", file=sys.stderr)


def write_file(path: str, text: str) -> None:
    """Write a file that the user named, and say so."""
    from drumbeat.base.problem import Problem
    from drumbeat.base.redact import printable

    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise Problem(f"cannot write {path}: {error.strerror}") from None
    print(f"written to {printable(path)}", file=sys.stderr)
