"""Rank logs of a large job: written to the node's own disk, and shipped into one file per node on the shared storage.

Two files per rank would be thousands, and quotas count files. A line of the one file is `RANK STREAM text`.
"""

from __future__ import annotations

import time
from typing import Callable, Dict, List

from drumbeat.base.order import Order
from drumbeat.runfolder.layout import NodeFolder
from drumbeat.runfolder.read import Tail

LARGE_JOB = 64  # ranks
_LAST_WORDS = 30.0  # seconds for what the ranks have written at the end of an attempt
_KEPT = 1 << 20  # bytes of each rank's end that are kept where even that is too short


def is_large(order: Order, ranks_per_node: int) -> bool:
    return order.nodes * ranks_per_node > LARGE_JOB


class Shipping:
    """From `logs`, a node-local folder, to `folder`, by `append(path, data)`. `beat` is called between two pieces at the end."""

    def __init__(
        self,
        logs: NodeFolder,
        folder: NodeFolder,
        append: Callable[[str, bytes], None],
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.logs, self.folder, self._write, self._beat = logs, folder, append, beat
        self._tails: Dict[str, Tail] = {}

    def ship(self, attempt: int, final: bool = False, seconds: float = _LAST_WORDS) -> None:
        """A piece of what has come; `final`: all of it, as far as `seconds` allow, and the end in any case."""
        until = time.monotonic() + seconds
        while self._ship_piece(attempt, final) and final:
            self._beat()
            if time.monotonic() > until:
                self._leave_out(attempt)

    def _ship_piece(self, attempt: int, final: bool) -> bool:
        """Whether there is more."""
        lines: List[str] = []
        more = False
        for rank, stem in sorted(self.logs.ranks(attempt).items()):
            for stream in ("out", "err"):
                tail = self._tail(f"{stem}.{stream}")
                lines += [f"{rank} {stream} {text}\n" for text in tail.lines(final)]
                more = more or tail.behind
        self._append(attempt, lines)
        return more

    def _leave_out(self, attempt: int) -> None:
        """Go on near the end of each log, and say so in its place."""
        lines: List[str] = []
        for rank, stem in sorted(self.logs.ranks(attempt).items()):
            for stream in ("out", "err"):
                tail = self._tail(f"{stem}.{stream}")
                before = tail.position
                if tail.behind:
                    tail.skip(_KEPT // 2)
                    lines.append(f"{rank} {stream} [drumbeat: {tail.position - before} bytes are left out here]\n")
        self._append(attempt, lines)

    def _tail(self, path: str) -> Tail:
        return self._tails.setdefault(path, Tail(path))

    def _append(self, attempt: int, lines: List[str]) -> None:
        if lines:
            self._write(self.folder.merged(attempt), "".join(lines).encode("utf-8", "replace"))
