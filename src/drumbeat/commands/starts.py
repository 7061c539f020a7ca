"""Programs that a script starts, and what reaches them: batch script (once, on the first node) -> task -> launcher -> rank."""

from __future__ import annotations

import os
import re
from typing import Dict, FrozenSet, Iterator, List, Mapping, NamedTuple, Optional, Tuple

from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex
from drumbeat.commands.events import Started
from drumbeat.commands.interpret import Shell
from drumbeat.commands.launch import (
    SHELLS,
    STARTERS,
    Found,
    environment_given,
    find_launcher,
    options,
    read_by_shell,
    runs_text,
)
from drumbeat.commands.syntax import names_read
from drumbeat.commands.values import Unknown

PER_TASK = frozenset(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"))
# Variables that every launcher sets for its ranks, whatever it inherits.
OF_LAUNCHERS = frozenset(("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))

_MOST_WORDS, _DEEPEST = 60, 3
# Other names of options of srun and sbatch -> the long one.
LONG = {
    "A": "account", "J": "job-name", "o": "output", "e": "error", "t": "time", "p": "partition", "N": "nodes",
    "n": "ntasks", "c": "cpus-per-task", "G": "gpus", "w": "nodelist", "x": "exclude", "C": "constraint", "q": "qos",
    "d": "dependency", "a": "array", "D": "chdir", "tasks-per-node": "ntasks-per-node",
}  # fmt: skip
_LONG_OF_MPI = {"np": "ntasks", "n": "ntasks", "N": "ntasks-per-node", "npernode": "ntasks-per-node"}
_PYTHON = regex(r"python[\d.]*")
_VALUE = regex(r"[A-Za-z_]\w*=")
_NAMED_LAUNCHER = regex(r"\$\{?TORCHRUN\w*\}?")  # a variable that comes from outside
_ON_PATH = regex(r"\$\((?:which|command -v|type -p) ([\w.+-]+)\)")


_SILENT = frozenset(("echo", "printf", "export", "which", "type", "command", "pip", "pip3", "man"))  # start no launcher


class Inherited(NamedTuple):
    value: str
    line: int  # of the batch script, which sets it once for all tasks


class Start(NamedTuple):
    line: int
    step: str  # srun, mpirun or mpiexec; '' if the batch script starts the program itself
    flags: Mapping[str, str]  # options of the step, by their long names
    words: Tuple[str, ...]  # from the launcher or interpreter on; the whole command if neither is there
    launcher: Optional[Found]
    inherited: Mapping[str, Inherited]  # exported by the batch script, and not set again by the task
    own: Mapping[str, str]  # set in the task
    reads: FrozenSet[str]  # variables that the text of `bash -c` in the task reads
    background: bool = False
    wrapped: bool = False  # the task runs or sources a script before it, which may set anything
    before: Tuple[str, ...] = ()  # the words before `words`
    certain: bool = True  # not inside a condition that cannot be decided

    @property
    def program(self) -> str:
        """Return the Python file that a rank runs, or ''."""
        words = self.launcher.script if self.launcher else self.words[1:] if self.python else ()
        return next((word for word in words if word.endswith(".py")), "")

    @property
    def python(self) -> bool:
        return bool(self.words) and bool(_PYTHON.fullmatch(os.path.basename(self.words[0])))

    def started_by(self, *kinds: str) -> bool:
        """Return true if a launcher of one of these kinds starts its ranks."""
        return self.launcher is not None and self.launcher.kind in kinds

    def value(self, name: str) -> str:
        """Return a variable's value in the program; '' if the script does not set it."""
        return self.own[name] if name in self.own else self.inherited[name].value if name in self.inherited else ""


def starts(shell: Shell) -> List[Start]:
    """Return everything that the script starts, including programs in the text of `bash -c`, behind srun and containers."""
    try:
        return [found for each in shell.started for found in starts_of(shell, each)]
    except Problem:
        return []  # too long to follow


def starts_of(shell: Shell, each: Started) -> List[Start]:
    """Return what one command starts: several programs where it is `bash -c`."""
    return list(_of(shell, each, {}, None, 0))


def _of(
    shell: Shell, each: Started, above: Mapping[str, Inherited], outer: Optional[Start], depth: int
) -> Iterator[Start]:
    words = [shell.marks.shown(word, _meant) for word in each.words]
    if not words or os.path.basename(words[0]) in _SILENT or "pip" in words[1:3]:
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
    if outer:
        start = start._replace(background=outer.background, before=outer.before, certain=outer.certain)
    start = start._replace(background=start.background or each.background, certain=start.certain and each.certain)
    wrapped = bool(outer and outer.wrapped)
    for place, word in enumerate(words[:_MOST_WORDS]):
        if _VALUE.match(word):  # TORCHRUN=/usr/bin/torchrun starts nothing
            continue
        name = os.path.basename(word)
        at, is_text = read_by_shell(words[place:]) if name in SHELLS else (0, False)
        if name in STARTERS and not start.step:
            start = _step(shell, start, name, each.words[place + 1 :])
        elif is_text and words[place + at :] and depth < _DEEPEST:
            yield from _inside(shell, _finished(start, words, place, above, wrapped), words[place + at :], each, depth)
            return
        elif re.search(r"\.(?:sh|bash)$", word) or word.startswith("./"):
            wrapped = True
        found = find_launcher(words[place:], strict=False)
        if found or _PYTHON.fullmatch(name):
            yield _finished(start, words, place, above, wrapped)._replace(launcher=found, words=tuple(words[place:]))
            return
    yield _finished(start, words, len(words), above, wrapped)


def _meant(unknown: Unknown) -> str:
    """Return what an unknown part of a word was made of; the program's name where it is looked up, or is torchrun's variable."""
    text = unknown.made or unknown.text
    return "torchrun" if _NAMED_LAUNCHER.fullmatch(text) else _ON_PATH.sub(r"bin/\1", text)


def _step(shell: Shell, start: Start, name: str, words: List[str]) -> Start:
    """Add a step with its options, and the variables that they give."""
    long, own = LONG if name == "srun" else _LONG_OF_MPI, dict(start.own)
    pairs = [(each, shell.marks.resolved(value)) for each, value in options(words, name)[0]]
    flags = {long.get(each, each): value for each, value in pairs}
    for each, value in pairs:
        if each == "export" or each in ("x", "genv", "env") and name != "srun":
            own.update(re.findall(r"(?:^|,)(\w+)[= ]([^,]*)", value))
    return start._replace(step=name, flags=flags, own=own)


def _finished(start: Start, words: List[str], place: int, above: Mapping[str, Inherited], wrapped: bool) -> Start:
    own = {**start.own, **dict(environment_given(words[place:])), **dict(environment_given(words[:place] or ("",)))}
    for place_of, word in enumerate(words[:place]):  # env A=1, apptainer --env A=1
        before = words[place_of - 1] if place_of else ""
        given = re.match(r"(?:--env=)?([A-Za-z_]\w*)=(.*)", word)
        if given and (word.startswith("--env=") or before in ("env", "--env", "-e") or before in own):
            own[given[1]] = given[2]
    inherited = {name: value for name, value in above.items() if name not in own}
    return start._replace(own=own, inherited=inherited, wrapped=wrapped, before=(*start.before, *words[:place]))


def _inside(shell: Shell, start: Start, words: List[str], each: Started, depth: int) -> Iterator[Start]:
    """Return what the text of `bash -c` starts: `words` are the text, its $0 and its arguments."""
    text, known = words[0], {name: value for name, value in shell.known.items() if name not in PER_TASK}
    lines = [word for before, word in zip(each.written, each.written[1:]) if runs_text(before.text)]
    # what is filled in may have lines of its own
    exact = len(lines) == 1 and lines[0].raw.count("\n") == text.count("\n")
    inner = Shell(known, bool, words[2:], marks=shell.marks)
    inner.variables = {name: value._replace(event=-1) for name, value in each.variables.items() if value.exported}
    start = start._replace(reads=start.reads | names_read(text))
    above = {**start.inherited}
    inner.run(text, lines[0].line if exact else each.line)
    sourced = any(event.words[:1] in (("source",), (".",)) and not event.soft for event in inner.events)
    start = start._replace(wrapped=start.wrapped or sourced)
    for child in inner.started:
        for found in _of(inner, child, above, start, depth + 1):
            yield found if exact else found._replace(line=each.line)


def _exported(shell: Shell, each: Started) -> Dict[str, Inherited]:
    found = {
        name: Inherited(_text(shell, variable.value), variable.line)
        for name, variable in each.variables.items()
        if variable.exported
    }
    return {**found, **{name: Inherited(shell.marks.resolved(value), each.line) for name, value in each.prefix.items()}}


def _text(shell: Shell, value: object) -> str:
    return shell.marks.resolved(value if isinstance(value, str) else " ".join(value))  # type: ignore[arg-type]
