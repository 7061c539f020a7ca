"""The program that a command runs: its script, the launchers that the script starts, and the Python behind a `#!`.

A script's commands are worked out by the interpreter (`interpret`). They only decide how the command is started: once per
node, or once per rank. Which world its processes really form is looked at when they run.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
from typing import TYPE_CHECKING, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex
from drumbeat.commands.launch import (
    SHELLS,
    Found,
    environment_given,
    find_launcher,
    python_module,
    read_by_shell,
    without_wrappers,
)
from drumbeat.commands.syntax import Node, flat, parse
from drumbeat.commands.values import without_marks

if TYPE_CHECKING:
    from drumbeat.commands.interpret import Shell

Read = Callable[[str], str]  # the text of a file that the command names; '' if there is none

_SHEBANG = regex(r"#!\s*(?:\S*/env\s+(?:-S\s+)?)?(?:\S*/)?(\w+)")
_PYTHON = regex(r"(?:python|pypy)[\d.]*")
_PYTHON_NAME = regex(r"python3\.\d{1,2}")
_PATH = regex(r"/(?:[\w.+@-]{1,100}/){1,20}[\w.-]{1,100}")
_LONGEST_SCRIPT = 1 << 16  # characters; a longer one is no script that a person wrote

_SPAWN = regex(
    r"\b(?:mp|multiprocessing|xmp)\.spawn\s*\(|^from torch\.multiprocessing import [^\n#]{0,200}\bspawn\b", re.M
)
_READS_RANK = regex(
    r"""environ\.get\(\s*["'](?:LOCAL_)?RANK|getenv\(\s*["'](?:LOCAL_)?RANK|environ\[["'](?:LOCAL_)?RANK["']\](?!\s*=[^=])"""
    r"|is_torchelastic_launched"
)
_IMPORTS = (
    r"^[ \t]*(?:from|import)[ \t]+(?:[\w. \t]{1,100},[ \t]*){0,10}"  # also behind others: import torch, lightning as L
)
_LIGHTNING = regex(_IMPORTS + r"(?:lightning|pytorch_lightning)\b", re.M)
_MPI4PY = regex(_IMPORTS + r"mpi4py\b", re.M)
_RAY = regex(_IMPORTS + r"ray\b", re.M)
_FRAMEWORK = regex(
    _IMPORTS
    + r"(?:torch|jax|flax|tensorflow|keras|lightning|pytorch_lightning|accelerate|deepspeed|transformers|trl)\b",
    re.M,
)
_DEVICES = regex(r"\b(?:Trainer|Fabric)\s?\([^)]{0,2000}\bdevices\s?=", re.S)


ABOUT_MPI = "; it imports mpi4py: MPI sees one world only with mpirun -n N before drumbeat"


@dataclass(frozen=True)
class Script:
    """The command's own script, if it could be read."""

    shell: str = ""  # the shell that reads it: bash, sh; '' where the command is no shell script
    text: str = ""
    python: str = ""  # the text of a Python program
    arguments: Optional[Tuple[str, ...]] = None  # of a shell script: $1, $2, …; none: not known
    given: Tuple[Tuple[str, str], ...] = ()  # variables that the command itself sets: env NAME=VALUE

    def launcher(self, environ: Mapping[str, str]) -> str:
        """Return the first launcher it starts; '' if it starts none."""
        return next((found.words for found in self.launchers(environ)), "")

    def trained(self, environ: Mapping[str, str]) -> str:
        """Return the program that its launcher starts in each rank; '' if that is not known."""
        return next(("".join(found.script[:1]) for found in self.launchers(environ)), "")

    def pythons(self, environ: Mapping[str, str]) -> List[str]:
        """Return interpreters that it calls by name, if it starts a launcher by `python -m`."""
        called = {os.path.basename(found.python[0]) for found in self.launchers(environ) if found.python}
        return sorted({"python", "python3", *filter(_PYTHON_NAME.fullmatch, called)}) if called else []

    def paths(self, environ: Mapping[str, str]) -> Tuple[List[str], List[str]]:
        """Return launchers, and interpreters of launchers' modules, that it calls by their absolute path."""
        called = {(found.program, bool(found.python)) for found in self.launchers(environ)}
        paths = sorted((path, of_module) for path, of_module in called if _PATH.fullmatch(path))
        return [path for path, of_module in paths if not of_module], [path for path, of_module in paths if of_module]

    def ranks_per_node(self, environ: Mapping[str, str]) -> Optional[int]:
        """Return the number in its launchers' flags; None if they give none, or several."""
        said = {found.said("--nproc-per-node", "--num-gpus") for found in self.launchers(environ)}
        counts = {int(count) for count in said if count.isdecimal()}
        return counts.pop() if len(counts) == 1 else None

    def launchers(self, environ: Mapping[str, str]) -> List[Found]:
        """Return the launchers that it may start, variables and arguments filled in as far as they are known."""
        from drumbeat.commands.interpret import Shell, look_everywhere
        from drumbeat.commands.starts import starts

        if not self.text or len(self.text) > _LONGEST_SCRIPT:
            return []
        shell = Shell({**environ, **dict(self.given)}, lambda words: True, self.arguments)
        try:
            look_everywhere(shell.run(without_marks(self.text)))
            for path in {word for each in shell.started for word in each.words} & set(shell.files):
                shell.run(without_marks(shell.files[path]))
        except Problem:  # too long, or nested too deep
            return []
        return [each.launcher for each in starts(shell) if each.launcher]

    @property
    def trains(self) -> bool:
        """Return true if a Python program imports a framework that trains, or a shell script starts a launcher."""
        return bool(_FRAMEWORK.search(self.python) or self.launcher({}))

    @property
    def spawns(self) -> str:
        """Say how a Python program starts its own ranks; '' if it does not, or also takes ranks from outside."""
        if self.has_ranks_apart:
            return "the program starts its ranks itself (multiprocessing spawn)"
        if _READS_RANK.search(self.python):
            return ""
        if _RAY.search(self.python):
            return "the program starts its own workers (Ray)"
        if _LIGHTNING.search(self.python) and _DEVICES.search(self.python):
            return "the program starts its ranks itself (Lightning, devices=)"
        return ""

    @property
    def has_ranks_apart(self) -> bool:
        """Return true if each rank of a Python program is a process that it spawns, and the program itself is none."""
        return bool(_SPAWN.search(self.python)) and not _READS_RANK.search(self.python)

    @property
    def about_mpi(self) -> str:
        """Say what to know before a program that uses MPI is started; '' for any other."""
        if not _MPI4PY.search(self.python):
            return ""
        return ABOUT_MPI


def read_script(command: Sequence[str], read: Read) -> Script:
    """Read the script that the command runs, behind any wrapper."""
    inner = without_wrappers(command)
    if not inner:
        return Script()
    name = os.path.basename(inner[0])
    given = environment_given(command)
    if name in SHELLS:
        text, arguments = _shell_text(inner, read)
        return Script(name, text, arguments=arguments, given=given)
    if _PYTHON.fullmatch(name):
        return Script(python=_python_text(inner, read))
    text = read(inner[0])
    shebang = _SHEBANG.match(text)
    if shebang and shebang[1] in SHELLS:
        return Script(shebang[1], text, arguments=inner[1:], given=given)
    return Script(python=text) if shebang and _PYTHON.match(shebang[1]) else Script()


def _shell_text(command: Tuple[str, ...], read: Read) -> Tuple[str, Tuple[str, ...]]:
    """Return the text that a shell reads, and its arguments."""
    place, is_text = read_by_shell(command)
    given = "".join(command[place : place + 1])
    if is_text:  # the word behind it is $0
        return given, command[place + 2 :]
    return (read(given) if given else ""), command[place + 1 :]


def _python_text(command: Tuple[str, ...], read: Read) -> str:
    if python_module(command)[1]:
        return ""
    index = 1
    while index < len(command) and command[index].startswith("-"):
        if command[index] in ("-c", "-"):
            return command[index + 1] if command[index] == "-c" and index + 1 < len(command) else ""
        index += 2 if command[index] in ("-W", "-X", "--check-hash-based-pycs") else 1
    return read(command[index]) if index < len(command) else ""


# The fallback of a shell script for a launcher that failed: `torchrun train.py || python train.py`, or `if !
# torchrun train.py; then python train.py; fi`. A script's exit code 0 says little in general: it may be that of a
# pipe into tee, or of a last echo. It proves that the fallback ended well where one of these is the last thing that
# the script does, nothing ends the script before, and the fallback is a program that trains; and only then.


_ENDS_EARLY = frozenset(("exit", "return", "exec", "trap"))
_PYTHON_FLAGS = regex(r"-[uOBEsSIqvb]+")
_NO_TRAINING = frozenset(("pip", "ensurepip", "venv", "virtualenv"))  # modules
_CALLS_TO_TRAIN = regex(r"train|pretrain|finetune|fit|backward|run_path|run_module")
_LONGEST_TEXT = 4000
_ASKS = frozenset(("-h", "--help", "--version"))


def fallback(text: str, launcher: str) -> str:
    """Return what the last statement of this script runs if `launcher` (its first word) has failed; '' if the script's
    exit code 0 does not prove that it ended well."""
    try:
        shlex.split(text, comments=True)
        nodes = parse(text)
        if nodes and _words(nodes[-1]) in (["exit"], ["exit", "$?"]):
            nodes.pop()
        everything = list(flat(nodes))
        if any(node.kind == "unknown" or _ENDS_EARLY & set(_words(node)[:1]) for node in everything):
            return ""  # the last statement may not have been reached
        named = [node for node in everything if any(os.path.basename(word) == launcher for word in _words(node))]
        found = _launcher(_words(named[0])) if len(named) == 1 else None  # another one may be the one that failed
        if found is None or os.path.basename(found.program) != launcher:
            return ""
        failed = (named[0].line, text[named[0].start : named[0].end])
        shell = _supposing(text, {failed: False})
        last = shell.started[-1] if shell.started else None
        words = [shell.marks.shown(word) for word in last.words] if last else []
        if last is None or (last.line, last.text) == failed or not last.certain or not _trains(words):
            return ""
        return last.text if _supposing(text, {failed: False, (last.line, last.text): False}).last is False else ""
    except (Problem, ValueError):  # nested too deep, or too long; a quote that is never closed
        return ""


def _supposing(text: str, results: Dict[Tuple[int, str], bool]) -> Shell:
    """Return what a script does where these commands succeed or fail, each named by its line and text."""
    from drumbeat.commands.interpret import Shell

    shell = Shell({}, lambda words: True, None)
    shell.supposed = results
    return shell.run(without_marks(text))


def _words(node: Node) -> List[str]:
    return [word.text for word in node.words] if node.kind == "simple" else []


def _trains(words: Sequence[str]) -> bool:
    """Return true for a command that is known to train: a Python program, or a launcher. Any other program behind
    `||` may only report the failure, or clean up after it."""
    if not words or _ASKS & set(words):
        return False
    found = _launcher(words)
    if found is not None:
        return not found.prefix and bool(found.script)
    return _PYTHON.fullmatch(os.path.basename(words[0])) is not None and _names_program(words)


def _names_program(words: Sequence[str]) -> bool:
    """Return true if this call of an interpreter names a script or a module, or gives it a text that trains."""
    module = python_module(words)[1]
    if module:
        return module.partition(".")[0] not in _NO_TRAINING
    rest = list(words[1:])
    while rest and rest[0].startswith("-"):
        if rest[0] == "-c":
            return len(rest) > 1 and _text_trains(rest[1])
        if rest[0] in ("-W", "-X"):
            del rest[0]
        elif not _PYTHON_FLAGS.fullmatch(rest[0]):
            return False
        del rest[:1]
    return bool(rest) and (rest[0].endswith(".py") or "$" in rest[0])


def _text_trains(text: str) -> bool:
    """Return true if a Python text calls what trains, by its name: `app.train()`, `model.fit(x)`, `loss.backward()`. Any
    other text may only report the failure, or clean up after it."""
    try:
        tree = ast.parse(text) if len(text) <= _LONGEST_TEXT else ast.Module([], [])
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # the shell fills something in, say
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = (func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls)
    return any(_CALLS_TO_TRAIN.fullmatch(name) for name in names)


def _launcher(words: Sequence[str]) -> Optional[Found]:
    try:
        return find_launcher(words)
    except Problem:
        return None


# The interpreter that a console script names: pip and conda write the path of their own Python into its first line.


_LONG_PATH = regex(r"""^'''exec' (.+?) "\$0" "\$@"$""", re.MULTILINE)  # for paths longer than a kernel's limit


def interpreter(start: str) -> Tuple[str, ...]:
    """Return the Python in the first lines of a script, with its options; empty if it names none."""
    if not start.startswith("#!"):
        return ()
    try:
        words = shlex.split(start.partition("\n")[0][2:])
        long_path = _LONG_PATH.search(start)
        if long_path and words[:1] == ["/bin/sh"]:
            words = shlex.split(long_path.group(1))
    except ValueError:
        return ()
    if words and words[0].endswith("/env"):
        words = words[2:] if words[1:2] == ["-S"] else words[1:]
    name = words[0].rsplit("/", 1)[-1] if words else ""
    return tuple(words) if name.startswith(("python", "pypy")) else ()


def interpreter_of(program: str, workdir: str, path: str) -> Tuple[str, ...]:
    """Return the Python that this program's first line names; empty if it is not there, is no script, or names another."""
    place = os.path.join(workdir, program) if "/" in program else shutil.which(program, path=path)
    try:
        with open(place or "", encoding="utf-8", errors="replace") as file:
            return interpreter(file.read(4096))
    except OSError:
        return ()


def launcher_interpreter(order: Order) -> Tuple[str, ...]:
    """Return the interpreter of the order's launcher by its `#!`; empty if a `setup` or a wrapper decides which one it is."""
    found = find_launcher(order.command)
    if (
        found is None
        or found.python
        or found.other_python
        or ((order.setup or order.on_start) and "/" not in found.program)
    ):
        return ()
    return interpreter_of(found.program, order.workdir, os.environ.get("PATH", os.defpath))


# The text of the script that a command runs, if it can be read on this machine.


_LIMIT = 1 << 18  # bytes


def reader(workdir: str, path: str) -> Callable[[str], str]:
    """Return a reader of scripts by the word that the command has for them: a path from the working directory, or a name
    in PATH. A word that ends with a slash is a folder: its path, if it is there."""

    def read(word: str) -> str:
        place = os.path.join(workdir, word)
        if word.endswith("/"):
            return place if os.path.isdir(place) else ""
        if not os.path.isfile(place):
            place = ("" if "/" in word else shutil.which(word, path=path)) or ""
        try:
            with open(place, "rb") as file:
                data = file.read(_LIMIT)
        except OSError:
            return ""
        return "" if b"\0" in data[:4096] else data.decode("utf-8", "replace")

    return read


def script_of(order: Order) -> Script:
    return script_at(order.command, order.workdir)


def script_at(command: Sequence[str], workdir: str) -> Script:
    return read_script(command, reader(workdir, os.environ.get("PATH", os.defpath)))
