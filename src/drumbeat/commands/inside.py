"""Launchers that a command starts itself, as far as the text of its script says so.

The text only decides how the command is started: once per node, or once per rank. Which world its processes really form
is looked at when they run.
"""

from __future__ import annotations

import os
import re
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.commands.find import python_module
from drumbeat.commands.others import SHELLS, runs_text, without_wrappers
from drumbeat.commands.wrappers import environment_given

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
_DEVICES = regex(r"\b(?:Trainer|Fabric)\s?\([^)]{0,2000}\bdevices\s?=", re.S)


@dataclass(frozen=True)
class Script:
    """What the command's own script says, where it could be read."""

    shell: str = ""  # the shell that reads it: bash, sh; '' where the command is no shell script
    text: str = ""
    python: str = ""  # the text of a Python program
    arguments: Optional[Tuple[str, ...]] = None  # of a shell script: $1, $2, …; none: not known
    given: Tuple[Tuple[str, str], ...] = ()  # variables that the command itself sets: env NAME=VALUE

    def launcher(self, environ: Mapping[str, str]) -> str:
        """The first launcher it starts, in its own words; '' if it names none."""
        text = self.expanded(environ)
        word = _LAUNCHER.search(text)
        if word:
            return " ".join(word[1].split())
        module = _PYTHON_MODULE.search(text)
        return f"python {' '.join(module[0].split())}" if module else ""

    def pythons(self, environ: Mapping[str, str]) -> List[str]:
        """Interpreters that it calls by name, if it starts a launcher by `python -m`."""
        text = self.expanded(environ)
        return sorted({"python", "python3", *_PYTHON_NAME.findall(text)}) if _PYTHON_MODULE.search(text) else []

    def paths(self, environ: Mapping[str, str]) -> Tuple[List[str], List[str]]:
        """Launchers, and interpreters of launchers' modules, that it calls by their absolute path."""
        text = self.expanded(environ)
        return sorted(set(_LAUNCHER_PATH.findall(text))), sorted(set(_PYTHON_PATH.findall(text)))

    def ranks_per_node(self, environ: Mapping[str, str]) -> Optional[int]:
        """As its launcher's flags say; None if they do not, or give no number."""
        found = {int(count) for count in _RANKS.findall(self.expanded(environ))}
        return found.pop() if len(found) == 1 else None

    def expanded(self, environ: Mapping[str, str]) -> str:
        """Its commands, with its arguments and with variables filled in that are exported already or that it sets to one plain
        value; without comments and what it only prints."""
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
        """$1, $2 and so on; where they are not known they stay as they are, without their defaults."""
        if self.arguments is None or _MOVED.search(text):
            return {str(number): f"${number}" for number in range(1, _MOST_ARGUMENTS)}
        return {str(number): word for number, word in enumerate(self.arguments[:_MOST_ARGUMENTS], 1)}

    @property
    def spawns(self) -> str:
        """How a Python program starts its own ranks, in words; '' if it does not, or also takes ranks from outside."""
        if self.has_ranks_apart:
            return "the program starts its ranks itself (multiprocessing spawn)"
        if _READS_RANK.search(self.python):
            return ""
        if _LIGHTNING.search(self.python) and _DEVICES.search(self.python):
            return "the program starts its ranks itself (Lightning, devices=)"
        return ""

    @property
    def has_ranks_apart(self) -> bool:
        """Whether each rank of a Python program is a process that it spawns, and the program itself is none."""
        return bool(_SPAWN.search(self.python)) and not _READS_RANK.search(self.python)

    @property
    def about_mpi(self) -> str:
        """What to know before a program that uses MPI is started; '' for any other."""
        if not _MPI4PY.search(self.python):
            return ""
        return "; it imports mpi4py: MPI sees one world only with mpirun -n N before drumbeat"


def _assigned(text: str) -> List[Tuple[str, str]]:
    """Names and values of the script's own assignments, in their order; '$' for what a command puts together."""
    return [(found[1], found[2] or found[3] or found[4] or "") for found in _ASSIGNMENT.finditer(text)]


def _filled(text: str, known: Mapping[str, str]) -> str:
    return _NAME.sub(lambda name: known.get(name[1] or name[2], name[0] if name[3] is None else name[3]), text)


def read_script(command: Sequence[str], read: Read) -> Script:
    """The script that the command runs, behind any wrapper."""
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
    """The text that a shell reads, and its arguments."""
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
