"""Packages of drumbeat's own that a job runs: each agent puts a plain copy beside its ranks' logs."""

from __future__ import annotations

import os
from importlib.resources import files
from typing import Sequence, Tuple

from drumbeat.base.order import Order

ATTEMPT = "{attempt}"  # in a command that brings packages: the folder of this node and attempt


def bring(order: Order, folder: str) -> None:
    for package in order.brings:
        target = os.path.join(folder, os.path.basename(package))
        os.makedirs(target, exist_ok=True)
        origin = files("drumbeat")
        for part in package.split("/"):  # its parents are not imported: they may be rooms of the desk
            origin = origin / part
        for source in origin.iterdir():
            if source.name.endswith(".py"):
                with open(os.path.join(target, source.name), "wb") as file:
                    file.write(source.read_bytes())


def filled(order: Order, argv: Sequence[str], folder: str) -> Tuple[str, ...]:
    """A user's own command is left as it is."""
    return tuple(word.replace(ATTEMPT, folder) for word in argv) if order.brings else tuple(argv)
