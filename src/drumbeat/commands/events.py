"""The state that the interpreter of scripts keeps: variables, one event per statement, and the commands that are started."""

from __future__ import annotations

from dataclasses import field
from typing import Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.commands.expand import Value
from drumbeat.commands.shell import Word

MAX_STEPS = 20_000
MAX_MADE = 4096  # characters of what a variable was given, for comparison
MAX_ROUNDS = 256  # of one loop
MAX_DEPTH = 20  # of functions and substitutions in each other


class Variable(NamedTuple):
    value: Value
    exported: bool = False
    event: int = -1  # the one that gave it its value; -1: it was there before
    maybe: bool = False  # exported by a statement that may not be reached


@dataclass
class Event:
    """One statement. `kind`: assign, export, cd, print (nothing to keep), started (asked for by
    the caller), shell (changes the shell), part (of another one that is kept whole), once (all else)."""

    kind: str
    line: int
    text: str
    reads: FrozenSet[str] = frozenset()
    writes: FrozenSet[str] = frozenset()
    value: Optional[Value] = None  # assign: what it gives
    words: Tuple[str, ...] = ()
    soft: bool = False  # shell: brings an environment, and leaves the script's own variables alone
    starts: Sequence[Started] = ()  # what the caller asked for, inside a statement that is kept as it stands
    around: str = ""  # the list or condition that it is part of, where that starts something


class Statement(NamedTuple):
    """A statement of the script itself, and the shell before it."""

    start: int  # its place in the text
    line: int
    events: int  # before it
    variables: Dict[str, Variable]
    cwd: str


@dataclass
class Started:
    """A command that the caller asked for, with what reaches it."""

    line: int
    words: List[str]
    variables: Dict[str, Variable]
    cwd: str
    before: int  # events before it
    certain: bool  # not inside a condition that cannot be decided
    text: str
    prefix: Dict[str, str] = field(default_factory=dict)  # variables for this command alone
    written: Tuple[Word, ...] = ()  # its words before any expansion
    piped: str = ""
    background: bool = False
    redirected: str = ""  # files that it reads or writes: > log 2> err
    within: Optional[Statement] = None  # the statement of the script that starts it
    whole: bool = False  # several statements: `bash -c` with their text


class Trap(NamedTuple):
    line: int
    text: str
    body: str
    signals: Tuple[str, ...]  # without SIG: USR1, EXIT


class Leaves(Exception):
    """A statement that ends what it is in. `result`: that of its exit code, as far as it is known."""

    def __init__(self, result: Optional[bool] = None) -> None:
        self.result = result


class Exit(Leaves):
    pass


class Return(Leaves):
    pass


class Next(Leaves):
    """`continue`, or `break` with a result of False."""


class Unclear(Exception):
    """A loop whose end its text does not decide."""


def options_at(options: Sequence[Tuple[int, str, bool]], place: int) -> FrozenSet[str]:
    """Return the options of `set` that hold at an event."""
    last = {name: on for start, name, on in options if start <= place}
    return frozenset(name for name, on in last.items() if on)
