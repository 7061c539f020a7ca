"""The name of a job that was given none: that of its script."""

from __future__ import annotations

import os.path
import re
from typing import Sequence

_SCRIPT = (".py", ".sh", ".jl", ".R")


def default_name(command: Sequence[str]) -> str:
    """train.py gives train, `python -m pkg.train` gives train, anything else its program's name."""
    found = command[0]
    for index, word in enumerate(command):
        if word.endswith(_SCRIPT):
            found = os.path.splitext(word)[0]
            break
        if word == "-m" and index + 1 < len(command):
            found = command[index + 1].rsplit(".", 1)[-1]
            break
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(found)).strip("-._")
    return safe[:64] or "job"
