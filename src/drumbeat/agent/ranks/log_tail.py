"""The end of a rank's standard error, for saying why it failed."""

from __future__ import annotations

import os
from typing import List

_TAIL_BYTES = 64 << 10


def tail(path: str, lines: int = 200) -> List[str]:
    """The last lines of a file that may be huge, binary or missing."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return text.splitlines()[-lines:]
