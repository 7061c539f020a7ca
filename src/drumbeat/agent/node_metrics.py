"""What this node's ranks report: shipped from the node's own disk to the run folder, and added up to its progress."""

from __future__ import annotations

import json
import os
import time
from typing import Any, Dict, List, Optional

from drumbeat.agent.ranks.merged_logs import Shipping
from drumbeat.runfolder.layout import NodeFolder
from drumbeat.runfolder.printed_metrics import read_line
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.read import Tail, decode
from drumbeat.runfolder.records import parse_metric


class NodeMetrics:
    """`local` is a folder on the node's own disk: ranks make many small writes."""

    def __init__(self, folder: NodeFolder, local: str, shipping: Optional[Shipping]) -> None:
        self.folder, self.shipping = folder, shipping
        self.progress = Progress()
        self.path = os.path.join(local, "metrics.jsonl")  # where ranks write
        self._reported = Tail(self.path)
        self._printed: Optional[Tail] = None

    def read_printed(self, path: str) -> None:
        """Scripts that know nothing of us still print how they get on: read that from this log too."""
        self._printed = Tail(path)

    def ship(self, attempt: int, final: bool = False) -> List[Dict[str, Any]]:
        """Carry on what has come, in few writes; the records that could be used."""
        if self.shipping and os.path.isdir(self.folder.attempt(attempt)):
            self.shipping.ship(attempt, final)
        lines = self._reported.lines(final) + self._printed_records(final)
        if lines:
            with open(self.folder.metrics, "a", encoding="utf-8") as file:
                file.write("".join(line + "\n" for line in lines))
        records = []
        for line in lines:
            record = decode(line) or {}
            metric = parse_metric(record, self.folder.node)
            if metric:  # any script may write this file: what cannot be used is left to the readers to count
                self.progress.add(metric)
                records.append(record)
        return records

    def _printed_records(self, final: bool) -> List[str]:
        if self._printed is None:
            return []
        records = (read_line(text) for text in self._printed.lines(final))
        return [json.dumps({"t": time.time(), "rank": 0, "printed": True, **record}) for record in records if record]
