"""Records that the interpreter makes of a script: variables, one event per statement, started commands, traps."""

from __future__ import annotations

from dataclasses import field
from typing import Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.commands.expand import Value
from drumbeat.commands.shell import Word

MAX_STEPS = 20_000
MAX_MADE = 4096  # characters kept of a variable's assigned text, for comparison
MAX_ROUNDS = 256  # of one loop
MAX_DEPTH = 20  # of functions and substitutions in each other


class Variable(NamedTuple):
    value: Value
    exported: bool = False
    event: int = -1  # the event that set it; -1: set before the script
    maybe: bool = False  # exported by a statement that may not be reached
    line: int = 0  # of that event


@dataclass
class Event:
    """One interpreted statement. `kind`: assign, export, cd, print (nothing to keep), arguments (shift, set --), started (a
    command that the caller wants), shell (changes the shell), part (contained in an event that is kept whole), once (else)."""

    kind: str
    line: int
    text: str
    reads: FrozenSet[str] = frozenset()
    writes: FrozenSet[str] = frozenset()
    value: Optional[Value] = None  # assign: the new value
    words: Tuple[str, ...] = ()
    soft: bool = False  # shell: does not touch the script's own variables
    starts: Sequence[Started] = ()  # wanted commands inside a statement that is kept as it stands
    around: str = ""  # text of the list or condition around it that starts a wanted command


class Statement(NamedTuple):
    """A top-level statement, with the shell's state before it."""

    start: int  # its place in the text
    line: int
    events: int  # how many come before it
    variables: Dict[str, Variable]
    cwd: str


@dataclass
class Started:
    """A started command that the caller wants, with the variables and folder that it gets."""

    line: int
    words: List[str]
    variables: Dict[str, Variable]
    cwd: str
    before: int  # how many events come before it
    certain: bool  # not inside a condition that cannot be decided
    text: str
    prefix: Dict[str, str] = field(default_factory=dict)  # variables for this command alone
    written: Tuple[Word, ...] = ()  # its words before any expansion
    piped: str = ""
    background: bool = False
    redirected: str = ""  # files that it reads or writes: > log 2> err
    within: Optional[Statement] = None  # the statement of the script that starts it
    whole: bool = False  # its words are `bash -c` with the text of several statements


class Trap(NamedTuple):
    line: int
    text: str
    body: str
    signals: Tuple[str, ...]  # without SIG: USR1, EXIT


class Leaves(Exception):
    """Raised by a statement that leaves its block. `result`: whether its exit code is zero; None if unknown."""

    def __init__(self, result: Optional[bool] = None) -> None:
        self.result = result


class Exit(Leaves):
    pass


class Return(Leaves):
    pass


class Next(Leaves):
    """Raised by `continue` (result true) and `break` (result false)."""


class Unclear(Exception):
    """Raised where the text does not decide when a loop ends."""


def options_at(options: Sequence[Tuple[int, str, bool]], place: int) -> FrozenSet[str]:
    """Return the options of `set` that are on at an event."""
    last = {name: on for start, name, on in options if start <= place}
    return frozenset(name for name, on in last.items() if on)
