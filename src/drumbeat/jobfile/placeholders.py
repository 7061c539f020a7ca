"""Words of a command that `drumbeat tune` fills in: `{batch}` stands for a value that is still to be found.

`${batch}` is a variable, as ever.
"""

from __future__ import annotations

from typing import Mapping, Sequence, Tuple

from drumbeat.base.regex import regex

DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
NAMES = ("batch", "accumulate", "hook", "layout", *DEGREES)
_PLACE = regex(r"(?<!\$)\{(" + "|".join(NAMES) + r")\}")


def places(command: Sequence[str]) -> Tuple[str, ...]:
    """The names that stand in a command, each once, in their order there."""
    found = (match.group(1) for word in command for match in _PLACE.finditer(word))
    return tuple(dict.fromkeys(found))


def fill(command: Sequence[str], values: Mapping[str, str]) -> Tuple[str, ...]:
    """What has no value stays; braces of any other name are the command's own."""
    return tuple(_PLACE.sub(lambda match: values.get(match.group(1), match.group(0)), word) for word in command)
