"""Calls of the schedulers' own tools, each with a deadline, and their complaints in one line with what to do."""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any, Mapping, Sequence, Tuple

from drumbeat.base.problem import Problem
from drumbeat.base.redact import printable


def ask_tool(
    argv: Sequence[str], environ: Mapping[str, str], missing: str, silent: str, seconds: float = 30.0, **how: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a tool and return its answer, whatever its exit code. `missing` and `silent` say what to do if it is not installed or
    does not answer in time; `how` holds further arguments of subprocess.run."""
    how.setdefault("input", "" if how.get("text") else b"")
    env = {**environ, "LC_ALL": "C"}
    try:
        return subprocess.run(
            list(argv), env=env, capture_output=True, timeout=seconds, check=False, cwd=os.path.sep, **how
        )
    except FileNotFoundError:
        raise Problem(f"there is no {argv[0]} here", missing) from None
    except subprocess.TimeoutExpired:
        called = [word for word in argv if not word.startswith("-")][:2]
        raise Problem(f"{' '.join(called)} has not answered for {seconds:g} s", silent) from None


def text_of(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def complaint(text: str, noise: str = "") -> str:
    """Return a tool's output as one line, each sentence once. `noise` is a pattern of what is left out."""
    lines = (re.sub(noise, "", printable(line).strip()).strip() for line in text.splitlines())
    return "; ".join(dict.fromkeys(filter(None, lines)))


def advised(text: str, table: Sequence[Tuple[str, str]], otherwise: str = "") -> str:
    """Return the advice of the first row of the table whose words stand in a message."""
    return next((advice for words, advice in table if words in text.lower()), otherwise)
