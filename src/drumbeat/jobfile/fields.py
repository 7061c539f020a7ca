"""Self-describing fields of Job and Site: each is documented once, next to its definition.

The checker, the flags of `drumbeat run`, its --help and the pages in docs/ are all made from this.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import MISSING
from typing import Any, Dict, Mapping, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.base.redact import is_secret
from drumbeat.base.regex import regex

# kind -> how a message and the docs name it. What a value of each kind becomes is in check.py.
KINDS = {
    "name": "a name (letters, digits, '.', '_', '-'; at most 64)",
    "text": "text",
    "path": "a path",
    "shell": "shell text",
    "command": "a command line, or a list of words",
    "choice": "one of a few words",
    "number": "a whole number",
    "count": "a whole number, or a range such as 4-8",
    "numbers": "a list of whole numbers",
    "words": "a list of words",
    "names": "a word, or a list of words",
    "hosts": "a list of hosts, such as [a, b] or n[1-4]",
    "size": "a size such as 440G, 64Gi or 512000M",
    "duration": "a time such as 90s, 30m, 1h, 2d6h30m, 1:30:00 or 1-02:00:00",
    "switch": "true or false",
    "variables": "a mapping NAME: value",
    "lists": "a mapping NAME: [values]",
    "table": "a mapping",
    "tables": "a mapping of mappings",
}


class Count(int):
    """A number that may be a range: as an int it is the most that is wanted, `least` is enough."""

    least: int

    def __new__(cls, most: int, least: int) -> Count:
        made = super().__new__(cls, most)
        made.least = least
        return made

    def __str__(self) -> str:
        return f"{self.least}-{int(self)}"

    def at_most(self, most: int) -> int:
        """Return the range with another upper end, where that is inside it."""
        return Count(most, self.least) if self.least <= most <= self else self


def least_of(number: Optional[int]) -> Optional[int]:
    """Return the lower end of a range; None for a plain number."""
    return number.least if isinstance(number, Count) else None


@dataclass(frozen=True)
class Key:
    """Description of one key of a YAML file."""

    kind: str
    help: str
    example: str
    allowed: Tuple[str, ...] = ()
    minimum: Optional[int] = None
    flag: str = ""  # the flag's placeholder (`N`); empty: no flag. A switch needs none, any text will do.
    inner: Any = None  # the dataclass of a `table`, or of each value of `tables`
    default_text: str = ""  # what the default is, where the value itself does not say it

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind


def key(kind: str, help: str, example: str, default: Any = MISSING, **more: Any) -> Any:
    """Make a dataclass field with its Key. Without a default it is required."""
    metadata = {"key": Key(kind, help, example, **more)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def origins_field() -> Any:
    """Make the field that holds the origin of each value: key -> `job.yaml:3: nodes` or `--nodes`. It is not part of the
    request."""
    return dataclasses.field(default_factory=dict, compare=False, repr=False)


def keys_of(cls: Any) -> Dict[str, Tuple[str, Key]]:
    """Map each YAML key to the field's name and Key, in the order of their definition."""
    return {
        field.name.replace("_", "-"): (field.name, field.metadata["key"])
        for field in dataclasses.fields(cls)
        if "key" in field.metadata
    }


def required_keys(cls: Any) -> Tuple[str, ...]:
    return tuple(
        field.name.replace("_", "-")
        for field in dataclasses.fields(cls)
        if "key" in field.metadata and field.default is MISSING and field.default_factory is MISSING
    )


def default_words(cls: Any, field: str, key: Key) -> str:
    default = {each.name: each.default for each in dataclasses.fields(cls)}[field]
    if key.default_text or default in (None, (), ""):
        return key.default_text or "none"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


# Times as people and schedulers write them, in seconds. A bare number is refused: some mean minutes, others seconds.


_UNITS = regex(r"(?:([0-9]{1,6})d)?(?:([0-9]{1,6})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,7})s)?")
_CLOCK = regex(r"(?:([0-9]{1,6})-)?([0-9]{1,6}):([0-5][0-9]):([0-5][0-9])")


def parse_duration(text: str) -> int:
    """Return seconds; ValueError says what to write instead."""
    if re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError(f"needs a unit: write {text}s, {text}m or {text}h")
    if re.fullmatch(r"[0-9]{1,6}:[0-9]{2}", text):
        first, second = text.split(":")
        raise ValueError(f"{text} can be read in two ways: write {first}h{second}m or {first}m{second}s")
    clock = _CLOCK.fullmatch(text)
    match = clock or (_UNITS.fullmatch(text) if text else None)
    if match is None:
        raise ValueError("expected a time such as 90s, 30m, 1h, 2d6h30m, 1:30:00 or 1-02:00:00")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    if clock and clock[1] is not None and hours > 23:
        raise ValueError(f"{hours} hours after the days: at most 23")
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


# `$NAME` and `${NAME}` in a job's text, filled in once, where the order is made. `$$` is a plain `$`.


_DOLLAR = regex(r"\$(?:(\$)|([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})?")


def expand(text: str, environ: Mapping[str, str], place: str) -> str:
    """Expand variables once; the result is not expanded again. `place` begins a message: `job.yaml:3: command`."""

    def fill(match: re.Match[str]) -> str:
        if match.group(1):
            return "$"
        name = match.group(2) or match.group(3)
        if not name:
            raise Problem(
                f"{place}: a '$' without a name after it",
                "write $$ for a plain '$'; no shell reads this text, so $(...) and $1 mean nothing here",
            )
        if name not in environ:
            raise Problem(
                f"{place}: ${name} is not defined", f"export {name}, or write $${name} for the text '${name}'"
            )
        if is_secret(name, environ[name]):
            raise Problem(
                f"{place}: the value of ${name} looks secret and would be written into the run folder",
                f"pass it on by name (env: {{{name}: pass}}) and read it in the command",
            )
        return environ[name]

    return _DOLLAR.sub(fill, text)


def literal(text: str) -> str:
    """Escape text that has been through the user's shell already, so that `expand` returns it unchanged."""
    return text.replace("$", "$$")
