"""Regular expressions that are compiled when they are first used.

A process of drumbeat imports 150 of them and uses a few; compiling them all would take a sixth of its start.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    regex = re.compile
else:

    def regex(text, flags=0):
        return _Pattern(text, flags)


_OFFERED = (
    "search", "match", "fullmatch", "sub", "subn", "split", "findall", "finditer", "pattern", "groups", "groupindex",
)  # fmt: skip


class _Pattern:
    """A pattern with the methods of a compiled one, compiled at its first use."""

    def __init__(self, text: Any, flags: int) -> None:
        self._given = (text, flags)

    def __getattr__(self, name: str) -> Any:
        if name not in _OFFERED:
            raise AttributeError(name)
        compiled = re.compile(*self._given)
        vars(self).update({each: getattr(compiled, each) for each in _OFFERED})
        return getattr(compiled, name)
