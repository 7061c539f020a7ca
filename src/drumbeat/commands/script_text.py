"""The text of the script that a command runs, where it can be read on this machine."""

from __future__ import annotations

import os
import shutil
from typing import Callable, Sequence

from drumbeat.base.order import Order
from drumbeat.commands.inside import Script, read_script

_LIMIT = 1 << 18  # bytes


def reader(workdir: str, path: str) -> Callable[[str], str]:
    """Reads a script by the word that the command has for it: a path from the working directory, or a name in PATH."""

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
