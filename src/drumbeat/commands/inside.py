"""Launchers that a command starts itself, as far as the text of its script says so.

The text only decides how the command is started: once per node, or once per rank. Which world its processes really form
is looked at when they run.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex
from drumbeat.commands.launch import (
    SHELLS,
    Found,
    environment_given,
    find_launcher,
    python_module,
    runs_text,
    without_wrappers,
)

_MOST_ARGUMENTS = 100
Read = Callable[[str], str]  # the text of a file that the command names; '' if there is none

_VALUED = {"-o", "+o", "-O", "+O", "--rcfile", "--init-file"}  # options of a shell that take a value
_SHEBANG = regex(r"#!\s*(?:\S*/env\s+(?:-S\s+)?)?(?:\S*/)?(\w+)")
_PYTHON = regex(r"(?:python|pypy)[\d.]*")
# Lines that start nothing: comments, what is only printed or looked up, and installations.
_SILENT = regex(
    r"^[ \t]*(?:#|echo\b|printf\b|which\b|command[ \t]+-v"
    r"|(?:[\w./-]{0,200}python[\d.]{0,6}[ \t]+-m[ \t]+)?(?:uv[ \t]+)?pip\b).*$",
    re.M,
)
_MODULE = (
    r"(?:torch\.distributed\.(?:run|launch)|accelerate(?:\.commands\.launch)?|deepspeed(?:\.launcher\.runner)?)"
    r"(?=[\s\"'\\])"
)
_LAUNCHER = regex(
    r"(?:^|[\s;&|(/=\"'`])"
    r"(torchrun|accelerate(?:-|\s+)launch|deepspeed(?=\s+(?:-|\\|\$|\S+\.py\b))|composer(?=\s+-)|fabric\s+run)"
    r"(?=[\s\"'`;)]|$)",
    re.M,
)
_PYTHON_MODULE = regex(r"\s-\w*m\s*" + _MODULE)
_PYTHON_NAME = regex(r"(?<![\w./-])python3\.\d{1,2}(?=\s)")
_BEFORE, _FOLDER = r"(?:^|[\s;&|(\"'`])", r"(/(?:[\w.+@-]{1,100}/){1,20}"
_LAUNCHER_PATH = regex(
    _BEFORE + _FOLDER + r"(?:torchrun|accelerate|accelerate-launch|deepspeed|fabric))(?=[\s\"'`;)]|$)", re.M
)
_PYTHON_PATH = regex(_BEFORE + _FOLDER + r"python[\d.]{0,6})(?=\s[^\n]{0,200}?-\w{0,3}m\s*" + _MODULE + ")", re.M)
_RANKS = regex(r"--(?:nproc[-_]per[-_]node|num[-_]gpus)[=\s]+[\"']?(\d{1,4})\b")
_NAME = regex(r"\$(?:([A-Za-z_]\w{0,99}|\d)|\{(\w{1,100})(?::?-([^{}$`]{0,200}))?\})")  # ${NAME:-DEFAULT} too
# After these, $1 is another argument than the script was started with.
_MOVED = regex(
    r"(?:^|[;&|{(]|\b(?:do|then|else)\b)[ \t]*(?:shift|getopts|set[ \t]+--)(?=\s|;|$)|^[ \t]*(?:function\b|[\w-]+[ \t]*\(\))",
    re.M,
)
_ASSIGNMENT = regex(
    r"^[ \t]{0,40}(?:(?:export|readonly|local)[ \t]+)?([A-Za-z_]\w{0,99})="
    r"(?:\"([^\"`\n]{0,400})\"|'([^'\n]{0,400})'|([^\s;&|()`\"'<>]{0,400}))[ \t]*(?:[;&#].*)?$",
    re.M,
)

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
_DEVICES = regex(r"\b(?:Trainer|Fabric)\s?\([^)]{0,2000}\bdevices\s?=", re.S)


@dataclass(frozen=True)
class Script:
    """The command's own script, if it could be read."""

    shell: str = ""  # the shell that reads it: bash, sh; '' where the command is no shell script
    text: str = ""
    python: str = ""  # the text of a Python program
    arguments: Optional[Tuple[str, ...]] = None  # of a shell script: $1, $2, …; none: not known
    given: Tuple[Tuple[str, str], ...] = ()  # variables that the command itself sets: env NAME=VALUE

    def launcher(self, environ: Mapping[str, str]) -> str:
        """Return the first launcher it starts, as written; '' if it names none."""
        text = self.expanded(environ)
        word = _LAUNCHER.search(text)
        if word:
            return " ".join(word[1].split())
        module = _PYTHON_MODULE.search(text)
        return f"python {' '.join(module[0].split())}" if module else ""

    def pythons(self, environ: Mapping[str, str]) -> List[str]:
        """Return interpreters that it calls by name, if it starts a launcher by `python -m`."""
        text = self.expanded(environ)
        return sorted({"python", "python3", *_PYTHON_NAME.findall(text)}) if _PYTHON_MODULE.search(text) else []

    def paths(self, environ: Mapping[str, str]) -> Tuple[List[str], List[str]]:
        """Return launchers, and interpreters of launchers' modules, that it calls by their absolute path."""
        text = self.expanded(environ)
        return sorted(set(_LAUNCHER_PATH.findall(text))), sorted(set(_PYTHON_PATH.findall(text)))

    def ranks_per_node(self, environ: Mapping[str, str]) -> Optional[int]:
        """Return the number in its launcher's flags; None if they give none."""
        found = {int(count) for count in _RANKS.findall(self.expanded(environ))}
        return found.pop() if len(found) == 1 else None

    def expanded(self, environ: Mapping[str, str]) -> str:
        """Return its commands, with its arguments and with variables filled in that are exported already or that it sets
        to one plain value; without comments and what it only prints."""
        text = _SILENT.sub("", self.text.replace("\\\n", " "))
        known = {**environ, **dict(self.given), **self._positional(text)}
        for name, value in _assigned(text):
            value = _filled(value, known)
            if "$" in value or known.get(name, value) != value:
                known[name] = f"${name}"  # not known, or not the same everywhere
            else:
                known[name] = value
        return _filled(text, known)

    def _positional(self, text: str) -> Dict[str, str]:
        """Fill in $1, $2 and so on; unknown ones stay as they are, without their defaults."""
        if self.arguments is None or _MOVED.search(text):
            return {str(number): f"${number}" for number in range(1, _MOST_ARGUMENTS)}
        return {str(number): word for number, word in enumerate(self.arguments[:_MOST_ARGUMENTS], 1)}

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
        return "; it imports mpi4py: MPI sees one world only with mpirun -n N before drumbeat"


def _assigned(text: str) -> List[Tuple[str, str]]:
    """Yield names and values of the script's own assignments, in their order; '$' for what a command puts together."""
    return [(found[1], found[2] or found[3] or found[4] or "") for found in _ASSIGNMENT.finditer(text)]


def _filled(text: str, known: Mapping[str, str]) -> str:
    return _NAME.sub(lambda name: known.get(name[1] or name[2], name[0] if name[3] is None else name[3]), text)


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
    index = 1
    while index < len(command) and command[index][:1] in ("-", "+") and len(command[index]) > 1:
        if runs_text(command[index]):  # the word behind the text is $0
            return (command[index + 1] if index + 1 < len(command) else ""), command[index + 3 :]
        index += 2 if command[index] in _VALUED else 1
    return (read(command[index]) if index < len(command) else ""), command[index + 1 :]


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


_LAST_EXIT = regex(r"exit(?:[ \t]+\"?\$\?\"?)?")
_ENDS_EARLY = regex(r"\b(?:exit|return|exec)\b")
_COMMENT = regex(r"(?:^|\s)#")
_OPERATORS = frozenset(("&&", "||", "|", "|&", "&", ";", ";;", "(", ")", "{", "}", "!"))
_COMPOUND = frozenset(
    ("if", "then", "else", "elif", "fi", "for", "while", "until", "do", "done", "case", "esac", "time", "exec")
)
_PYTHON_PROGRAM = regex(r"python(?:\d+(?:\.\d+)*)?")
_PYTHON_FLAGS = regex(r"-[uOBEsSIqvb]+")
_NO_TRAINING = frozenset(("pip", "ensurepip", "venv", "virtualenv"))  # modules
_CALLS_TO_TRAIN = regex(r"train|pretrain|finetune|fit|backward|run_path|run_module")
_LONGEST_TEXT = 4000
_ASKS = frozenset(("-h", "--help", "--version"))


def fallback(text: str, launcher: str) -> str:
    """Return what the last statement of this script runs if `launcher` (its first word) has failed; '' if the script's
    exit code 0 does not prove that it ended well."""
    if "<<" in text or re.search(r"\btrap\b", text):
        return ""  # lines of a here-document are no commands; a trap may end the script in another way
    lines = [line for line in _logical_lines(text) if line and not line.startswith("#")]
    if lines and _LAST_EXIT.fullmatch(lines[-1]):
        lines.pop()
    if not lines or any(_ENDS_EARLY.search(line) for line in lines):
        return ""  # the last statement may not have been reached
    if lines[-1] == "}":
        return _of_group(lines[:-1], launcher)
    if re.search(r"(?:^|[\s;])fi$", lines[-1]):
        return _of_if(lines, launcher)
    left, _, right = lines[-1].partition("||")
    return right.strip() if _decides([*lines[:-1], left], launcher) and _trains(right) else ""


def _of_group(lines: Sequence[str], launcher: str) -> str:
    """Match `LAUNCHER || {`, commands in lines of their own, and `}`: the last command's exit code is the group's."""
    heads = [number for number, line in enumerate(lines) if re.search(r"\|\|\s*\{$", line)]
    if not heads:
        return ""
    body = lines[heads[-1] + 1 :]
    before = [*lines[: heads[-1]], lines[heads[-1]].partition("||")[0]]
    return body[-1] if _are_simple(body) and _decides(before, launcher) and _trains(body[-1]) else ""


def _of_if(lines: Sequence[str], launcher: str) -> str:
    """Match `if ! LAUNCHER; then`, commands, `fi`; or `if LAUNCHER; then`, commands, `else`, commands, `fi`."""
    heads = [number for number, line in enumerate(lines) if re.match(r"if\s", line)]
    if not heads:
        return ""
    text = re.sub(r"\s*(?:;|\n)\s*(then|else|fi)\b", r"\n\1", "\n".join(lines[heads[-1] :]))
    text = re.sub(r"^(then|else)[ \t]+", r"\1\n", text, flags=re.M)
    parts = [part.strip() for part in re.split(r"^(?:then|else|fi)$", text, flags=re.M)]  # condition, branches, nothing
    negated = re.match(r"if\s+!\s", parts[0]) is not None
    if len(parts) != (3 if negated else 4) or "\n" in parts[0] or (negated and "&&" in parts[0]):
        return ""
    before = [*lines[: heads[-1]], re.sub(r"^if\s+(?:!\s+)?", "", parts[0])]
    branches = [[line.strip() for line in part.split("\n")] for part in parts[1:-1]]
    last = branches[-1][-1]
    return last if all(map(_are_simple, branches)) and _decides(before, launcher) and _trains(last) else ""


def _are_simple(commands: Sequence[str]) -> bool:
    """Return true if each of these lines is a whole statement, and none is a compound one."""
    words = [_words(line) for line in commands]
    return bool(words) and all(
        each and not _COMPOUND & set(each) and not {"{", "}", "(", ")"} & set(each) for each in words
    )


def _logical_lines(text: str) -> List[str]:
    text = re.sub(r"\\\n", " ", text)
    text = re.sub(r"(\|\||&&)[ \t]*\n", r"\1 ", text)
    return [line.strip() for line in text.split("\n")]


def _words(command: str) -> List[str]:
    """Return words and operators; nothing if a quote is open: then the line is not a whole statement."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:
        return []


def _decides(lines: Sequence[str], launcher: str) -> bool:
    """Return true if the launcher is the last command of the last of these lines, so that its exit code decides about the
    other side of `||`, and is named nowhere before: otherwise another one may be the one that failed."""
    words = _words(lines[-1])
    if not words or _COMMENT.search(lines[-1]) or _COMPOUND & set(words) or set(words) & (_OPERATORS - {"&&"}):
        return False
    if len(re.findall(rf"(?<![\w-]){re.escape(launcher)}(?![\w-])", "\n".join(lines))) != 1:
        return False
    last = words[len(words) - words[::-1].index("&&") :] if "&&" in words else words
    found = _launcher(_without_assignments(last))
    return found is not None and os.path.basename(found.program) == launcher


def _trains(right: str) -> bool:
    """Return true for a single command that is known to train: a Python program, or a launcher. Any other program behind
    `||` may only report the failure, or clean up after it."""
    words = _words(right)
    if not words or _COMMENT.search(right) or set(words) & (_OPERATORS - {"&&"}) or _COMPOUND & set(words):
        return False
    words = _without_assignments(words[: words.index("&&")] if "&&" in words else words)
    if not words or _ASKS & set(words):
        return False
    found = _launcher(words)
    if found is not None:
        return not found.prefix and bool(found.script)
    return _PYTHON_PROGRAM.fullmatch(os.path.basename(words[0])) is not None and _names_program(words)


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


def _without_assignments(words: Sequence[str]) -> List[str]:
    words = list(words)
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
        del words[0]
    return words


def _launcher(words: Sequence[str]) -> Optional[Found]:
    try:
        return find_launcher(words)
    except Problem:
        return None
