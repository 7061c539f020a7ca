"""What this node's ranks are doing, for whoever asks: a child looks, the answer goes to the run folder and to the lead."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from typing import Callable, List

from drumbeat.agent.folder.folder_child import FolderChild
from drumbeat.agent.looks.ras import RasNote
from drumbeat.agent.looks.record import RankLook
from drumbeat.agent.member.child import Looker
from drumbeat.agent.member.node_metrics import NodeMetrics
from drumbeat.agent.ranks.handles import Ranks
from drumbeat.agent.ranks.launchers import Direct
from drumbeat.agent.wire.messages import Look, Looked, Message
from drumbeat.base import clock
from drumbeat.base.order import Order
from drumbeat.base.record import to_plain
from drumbeat.machine.model import Facts
from drumbeat.runfolder.layout import NodeFolder


class NodeLooks:
    """`metrics` knows how far each rank is; `child` writes the run folder; `tell` sends a message to the lead."""

    def __init__(
        self,
        order: Order,
        facts: Facts,
        local: str,
        folder: NodeFolder,
        metrics: NodeMetrics,
        child: FolderChild,
        tell: Callable[[Message], None],
    ) -> None:
        self.host, self.folder, self.metrics, self.child, self.tell = facts.host, folder, metrics, child, tell
        self.attempt = self.node_rank = 0
        self._looker = Looker(order.run_id, local, facts.gpus, self._looked)

    def begin_attempt(self, attempt: int, node_rank: int) -> None:
        self.attempt, self.node_rank = attempt, node_rank

    def start(self, request: Look, ranks: Ranks, launcher: Direct) -> None:
        had_ranks = partial(launcher.has_started_ranks, self.attempt)
        self._looker.start(request.number, self.node_rank, ranks.rank_of, not launcher.is_rank, had_ranks)

    def poll(self) -> None:
        self._looker.poll()

    def end(self) -> None:
        self._looker.end()

    def _looked(self, number: int, found: List[RankLook], notes: List[RasNote]) -> None:
        now, looks = time.monotonic(), []
        for look in found:
            step, quiet = (None, None) if look.unnumbered else self.metrics.ranks.last(look.rank, now)
            looks.append(replace(look, host=self.host, node=self.node_rank, step=step, quiet=quiet))
        shown = to_plain({"t": clock.now(), "ranks": looks, "ras": notes})
        self.child.replace(self.folder.looks(self.attempt), json.dumps(shown, indent=2) + "\n")
        self.tell(Looked(self.attempt, number, tuple(looks), tuple(notes)))
