"""Programs that a script starts, and what reaches them: batch script (once, on the first node) -> task -> launcher -> rank."""

from __future__ import annotations

import functools
import os
import re
from typing import Dict, FrozenSet, Iterator, List, Mapping, NamedTuple, Optional, Tuple

from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex
from drumbeat.commands.events import Started
from drumbeat.commands.interpret import Shell
from drumbeat.commands.launch import SHELLS, Found, environment_given, find_launcher, runs_text
from drumbeat.commands.script import options
from drumbeat.commands.syntax import names_read

PER_TASK = frozenset(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"))
STARTERS = ("srun", "mpirun", "mpiexec")
# Variables that every launcher sets for its ranks, whatever it inherits.
OF_LAUNCHERS = frozenset(("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))

_MOST_WORDS, _DEEPEST = 60, 3
_MPI = {"-np": "--ntasks", "--np": "--ntasks", "-x": "--export-one", "-N": "--ntasks-per-node"}
_PYTHON = regex(r"python[\d.]*")


class Inherited(NamedTuple):
    value: str
    line: int  # of the batch script, which sets it once for all tasks


class Start(NamedTuple):
    line: int
    step: str  # srun, mpirun or mpiexec; '' if the batch script starts the program itself
    flags: Mapping[str, str]  # options of the step
    words: Tuple[str, ...]  # from the launcher or interpreter on; the whole command if neither is there
    launcher: Optional[Found]
    inherited: Mapping[str, Inherited]  # exported by the batch script, and not set again by the task
    own: Mapping[str, str]  # set in the task
    reads: FrozenSet[str]  # variables that the text of `bash -c` in the task reads
    background: bool = False
    wrapped: bool = False  # a script of the user stands between step and program: it may set anything

    @property
    def program(self) -> str:
        """Return the Python file that a rank runs, or ''."""
        words = self.launcher.script if self.launcher else self.words[1:] if self.python else ()
        return next((word for word in words if word.endswith(".py")), "")

    @property
    def python(self) -> bool:
        return bool(self.words) and bool(_PYTHON.fullmatch(os.path.basename(self.words[0])))

    def value(self, name: str) -> str:
        """Return a variable's value in the program; '' if the script does not set it."""
        return self.own[name] if name in self.own else self.inherited[name].value if name in self.inherited else ""


@functools.lru_cache(maxsize=1)  # the checks of one script ask in turn
def starts(shell: Shell) -> List[Start]:
    """Return everything that the script starts, including programs in the text of `bash -c`, behind srun and containers."""
    try:
        return [found for each in shell.started for found in _of(shell, each, {}, None, 0)]
    except Problem:
        return []  # too long to follow


def _of(
    shell: Shell, each: Started, above: Mapping[str, Inherited], outer: Optional[Start], depth: int
) -> Iterator[Start]:
    words = list(map(shell.marks.resolved, each.words))
    if not words or words[0] in ("echo", "printf", "export"):
        return
    own: Dict[str, str] = dict(outer.own) if outer else {}
    if outer is None:
        above = _exported(shell, each)
    else:
        for name, variable in each.variables.items():
            if variable.event >= 0 and variable.exported:
                own[name] = _text(shell, variable.value)
        own.update({name: shell.marks.resolved(value) for name, value in each.prefix.items()})
    step, flags = (outer.step, outer.flags) if outer else ("", {})
    start = Start(each.line, step, flags, tuple(words), None, {}, own, outer.reads if outer else frozenset())
    start = start._replace(background=each.background or bool(outer and outer.background))
    at, wrapped = 0, bool(outer and outer.wrapped)
    for place, word in enumerate(words[:_MOST_WORDS]):
        name = os.path.basename(word)
        text = words[place + 2] if words[place + 2 :] and runs_text(words[place + 1]) else ""
        if name in STARTERS and not start.step:
            start, at = start._replace(step=name), place
        elif name in SHELLS and text and depth < _DEEPEST:
            start = _finished(start, words, at, place, above, wrapped)
            yield from _inside(shell, start, text, each, depth)
            return
        elif re.search(r"\.(?:sh|bash)$", word) or word.startswith("./"):
            wrapped = True
        try:
            found = find_launcher(words[place:])
        except Problem:
            continue
        if found or _PYTHON.fullmatch(name):
            start = _finished(start, words, at, place, above, wrapped)
            yield start._replace(launcher=found, words=tuple(words[place:]))
            return
    yield _finished(start, words, at, len(words), above, wrapped)


def _finished(
    start: Start, words: List[str], at: int, place: int, above: Mapping[str, Inherited], wrapped: bool
) -> Start:
    own = {**start.own, **dict(environment_given(words[place:])), **dict(environment_given(words[:place] or ("",)))}
    flags = start.flags
    if not flags and start.step:
        own_words = words[at:place]
        flags = dict(options(own_words if start.step == "srun" else [_MPI.get(word, word) for word in own_words]))
        own.update(re.findall(r"(?:^|,)(\w+)=([^,]*)", flags.get("export", "")))
    for place_of, word in enumerate(words[:place]):  # env A=1, apptainer --env A=1
        before = words[place_of - 1] if place_of else ""
        given = re.match(r"(?:--env=)?([A-Za-z_]\w*)=(.*)", word)
        if given and (word.startswith("--env=") or before in ("env", "--env", "-e", "-x") or before in own):
            own[given[1]] = given[2]
    inherited = {name: value for name, value in above.items() if name not in own}
    return start._replace(flags=flags, own=own, inherited=inherited, wrapped=wrapped)


def _inside(shell: Shell, start: Start, text: str, each: Started, depth: int) -> Iterator[Start]:
    inner = Shell({}, bool, None, marks=shell.marks)
    inner.variables = {name: value._replace(event=-1) for name, value in each.variables.items() if value.exported}
    start = start._replace(reads=start.reads | names_read(text))
    above = {**start.inherited}
    for child in inner.run(text).started:
        yield from (found._replace(line=each.line) for found in _of(inner, child, above, start, depth + 1))


def _exported(shell: Shell, each: Started) -> Dict[str, Inherited]:
    found = {
        name: Inherited(_text(shell, variable.value), variable.line)
        for name, variable in each.variables.items()
        if variable.exported
    }
    return {**found, **{name: Inherited(shell.marks.resolved(value), each.line) for name, value in each.prefix.items()}}


def _text(shell: Shell, value: object) -> str:
    return shell.marks.resolved(value if isinstance(value, str) else " ".join(value))  # type: ignore[arg-type]
