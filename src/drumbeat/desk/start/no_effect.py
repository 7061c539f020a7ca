"""What a job asks of a scheduler, where there is none: named, so that nobody believes it was done."""

from __future__ import annotations

import dataclasses
from typing import List, Tuple

from drumbeat.base.order import Order, Resources

_ASKED = ("account", "partition", "memory", "cpus", "exclusive", "array")


def as_run_here(order: Order) -> Tuple[Order, List[str]]:
    """The order as this machine carries it out, and the names of what has no effect on it."""
    asked, nothing = order.resources, Resources()
    names = [name for name in _ASKED if getattr(asked, name) != getattr(nothing, name)]
    names += sorted(asked.specific)
    names += [option.text for option in asked.options]
    if order.modules:
        names.append("modules")
    if order.container and order.container.binds:
        names.append("binds")
    return dataclasses.replace(order, resources=dataclasses.replace(asked, array="")), names
