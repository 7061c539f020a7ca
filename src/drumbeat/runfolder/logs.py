"""The logs of an attempt: two files per rank, or one file per node where the job is large, and a launcher's own output."""

from __future__ import annotations

import os
import re
from typing import List, Optional

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.runfolder.layout import NodeFolder
from drumbeat.runfolder.read import Files
from drumbeat.runfolder.records import Line

_RANK = regex(r"rank-(\d{1,9})\.(out|err)")
_LAUNCHER = regex(r"(?:launcher|torchrun)\.(out|err)")
# A rank's line, copied for the script's own log: it stands in the rank's log too.
_COPY = regex(r"\[rank \d{1,9}\] ")
_MERGED_LINE = regex(r"(\d{1,9}) (out|err) (.*)", re.DOTALL)


@dataclass(frozen=True)
class Log:
    name: str  # relative to its Files
    node: int
    attempt: int
    rank: Optional[int] = None  # None: several ranks, or a launcher
    stream: str = ""  # out, err; empty: both
    merged: bool = False
    launcher: bool = False

    def is_copy(self, text: str) -> bool:
        """Whether this line of a launcher's log is one of its ranks' own."""
        return self.launcher and _COPY.match(text) is not None

    def line(self, text: str) -> Optional[Line]:
        """The line that a line of this file stands for; None for a torn one of a merged log."""
        if not self.merged:
            return Line(self.node, self.attempt, self.rank, self.stream, text)
        found = _MERGED_LINE.fullmatch(text)
        return Line(self.node, self.attempt, int(found[1]), found[2], found[3]) if found else None


def list_logs(files: Files, node: NodeFolder, attempt: int) -> List[Log]:
    """By rank, standard output before standard error; then the launcher's own."""
    folder = node.attempt(attempt)
    names = files.names(folder)
    ranked = [found for found in map(_RANK.fullmatch, names) if found]
    logs = [Log(os.path.join(folder, each[0]), node.node, attempt, int(each[1]), each[2]) for each in ranked]
    logs.sort(key=lambda log: (log.rank, log.stream != "out"))
    if os.path.basename(node.merged(attempt)) in names:
        logs.append(Log(node.merged(attempt), node.node, attempt, merged=True))
    own = sorted((found for found in map(_LAUNCHER.fullmatch, names) if found), key=lambda each: each[1] != "out")
    return logs + [Log(os.path.join(folder, each[0]), node.node, attempt, None, each[1], launcher=True) for each in own]
