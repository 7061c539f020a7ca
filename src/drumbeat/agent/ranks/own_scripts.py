"""Scripts of drumbeat's own that a job runs: each agent puts a plain copy beside its ranks' logs."""

from __future__ import annotations

import os
import pkgutil
from typing import Sequence, Tuple

from drumbeat.order import Order

ATTEMPT = "{attempt}"  # in a command that brings scripts: the folder of this node and attempt


def bring(order: Order, folder: str) -> None:
    for name in order.brings:
        data = pkgutil.get_data("drumbeat", name)
        assert data is not None, name
        with open(os.path.join(folder, os.path.basename(name)), "wb") as file:
            file.write(data)


def filled(order: Order, argv: Sequence[str], folder: str) -> Tuple[str, ...]:
    """A user's own command is left as it is."""
    return tuple(word.replace(ATTEMPT, folder) for word in argv) if order.brings else tuple(argv)
