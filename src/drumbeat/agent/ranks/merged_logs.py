"""Rank logs of a large job: written to the node's own disk, and shipped into one file per node on the shared storage.

Two files per rank would be thousands, and quotas count files. A line of the one file is `RANK STREAM text`.
"""

from __future__ import annotations

from typing import Callable, Dict, List

from drumbeat.order import Order
from drumbeat.runfolder.layout import NodeFolder
from drumbeat.runfolder.read import Tail

LARGE_JOB = 64  # ranks


def is_large(order: Order, ranks_per_node: int) -> bool:
    return order.nodes * ranks_per_node > LARGE_JOB


class Shipping:
    """From `logs`, a node-local folder, to `folder`, by way of `append(path, data)`."""

    def __init__(self, logs: NodeFolder, folder: NodeFolder, append: Callable[[str, bytes], None]) -> None:
        self.logs, self.folder, self.append = logs, folder, append
        self._tails: Dict[str, Tail] = {}

    def ship(self, attempt: int, final: bool = False) -> None:
        lines: List[str] = []
        for rank, stem in sorted(self.logs.ranks(attempt).items()):
            for stream in ("out", "err"):
                path = f"{stem}.{stream}"
                tail = self._tails.setdefault(path, Tail(path))
                lines += [f"{rank} {stream} {text}\n" for text in tail.lines(final)]
        if lines:
            self.append(self.folder.merged(attempt), "".join(lines).encode("utf-8", "replace"))
