"""The interpreter that a console script names: pip and conda write the path of their own Python into its first line."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from typing import Callable, Sequence, Tuple

from drumbeat.base.order import Order
from drumbeat.base.regex import regex
from drumbeat.commands.inside import Script, read_script
from drumbeat.commands.launch import find_launcher

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
    if found is None or found.python or found.other_python or (order.setup and "/" not in found.program):
        return ()
    return interpreter_of(found.program, order.workdir, os.environ.get("PATH", os.defpath))


# The text of the script that a command runs, if it can be read on this machine.


_LIMIT = 1 << 18  # bytes


def reader(workdir: str, path: str) -> Callable[[str], str]:
    """Return a reader of scripts by the word that the command has for them: a path from the working directory, or a name
    in PATH."""

    def read(word: str) -> str:
        place = os.path.join(workdir, word)
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
