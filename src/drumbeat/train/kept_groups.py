"""Process groups that are made once per world. Torch keeps the threads and connections of every group as long as the world, and a
process may train more than once (--verify-resume)."""

from __future__ import annotations

from typing import Any, Callable, Dict, Tuple, TypeVar

import torch.distributed as dist

T = TypeVar("T")
_kept: Dict[Tuple[Any, ...], Any] = {}


def once_per_world(make: Callable[[], T], *key: Any) -> T:
    """What `make` has made for this key in this world; all ranks must ask in the same order."""
    whole = (dist.group.WORLD, *key)
    if whole not in _kept:
        _kept[whole] = make()
    made: T = _kept[whole]
    return made


def forget() -> None:
    """The world is left: nothing may keep its groups."""
    _kept.clear()
