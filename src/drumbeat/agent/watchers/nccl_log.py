"""A private NCCL log: one node-local file per process, narrow enough to cost nothing, read as it grows.

NCCL has one level and one file. If the user has set up a log too, NCCL gets the wider settings of both, and the lines that the
user wants are copied to the user's file.
"""

from __future__ import annotations

import os
from typing import Callable, Dict, List, Mapping, Optional, Tuple

from drumbeat.agent.watchers.contract import Saw
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import EnvVar
from drumbeat.base.regex import regex
from drumbeat.runfolder.files import Tail

SUBSYSTEMS = ("INIT", "ENV", "NET", "BOOTSTRAP")  # NET is in no version's default, and has the lines that prove
_DEFAULT_SUBSYSTEMS = ("INIT", "ENV", "BOOTSTRAP")
_WIDE = ("INFO", "ABORT", "TRACE")
_NAME = regex(r"nccl(?:-\d+)?\.(?P<host>.+)\.(?P<pid>\d+)")
_KEPT = 1 << 20  # bytes kept of each end of a file


@dataclass(frozen=True)
class Asked:
    """The user's own settings of NCCL's log."""

    level: str = ""
    file: str = ""

    def wants(self, line: str) -> bool:
        if self.level in _WIDE:
            return True  # lines do not name their subsystem, so the user may get a few too many
        if self.level == "WARN":
            return " NCCL WARN " in line or "CCL version " in line
        return self.level == "VERSION" and "CCL version " in line


def private_log(
    variables: List[EnvVar], environ: Mapping[str, str], folder: str, workdir: str
) -> Tuple[List[EnvVar], Asked]:
    """Return the ranks' variables with our log added, and the user's own settings."""
    known = {**environ, **{variable.name: variable.value for variable in variables}}
    file = known.get("NCCL_DEBUG_FILE", "")
    asked = Asked(known.get("NCCL_DEBUG", "").upper(), os.path.join(workdir, file) if file else "")
    theirs = known.get("NCCL_DEBUG_SUBSYS", "")
    subsystems = ",".join(SUBSYSTEMS)
    if asked.level in _WIDE:
        words = [word for word in theirs.upper().split(",") if word] or list(_DEFAULT_SUBSYSTEMS)
        all_of_them = "ALL" in words or theirs.startswith("^")
        subsystems = "ALL" if all_of_them else ",".join(dict.fromkeys((*SUBSYSTEMS, *words)))
    why = "to see at the first collective which network carries it (checks: {transport: off} leaves it alone)"
    if asked.level:
        why += f"; your {asked.level} lines are copied to {asked.file or 'standard output'}"
    ours = [
        EnvVar("NCCL_DEBUG", asked.level if asked.level in _WIDE else "INFO", why, "detected"),
        EnvVar("NCCL_DEBUG_SUBSYS", subsystems, why, "detected"),
        EnvVar("NCCL_DEBUG_FILE", os.path.join(folder, "nccl.%h.%p"), why, "detected"),
    ]
    names = {variable.name for variable in ours}
    return [variable for variable in variables if variable.name not in names] + ours, asked


class LogFiles:
    """A sensor: new lines of NCCL's files in a folder. `rank_of` returns the rank of a pid, if known."""

    def __init__(
        self,
        folder: str,
        asked: Asked,
        rank_of: Callable[[int], Optional[int]],
        out_of: Callable[[Optional[int]], str],
        wanted: Callable[[], bool],
        shown_in: str,
    ) -> None:
        """Create the sensor. `shown_in`: the files' place, as named for a reader of the run folder, if they are kept."""
        self.folder, self.asked, self.rank_of, self.out_of, self.wanted = folder, asked, rank_of, out_of, wanted
        self.shown_in = shown_in
        self._tails: Dict[str, Tail] = {}
        self._lines: Dict[str, int] = {}
        self._ranks: Dict[str, Optional[int]] = {}

    def poll(self, now: float, final: bool = False) -> List[Saw]:
        wanted = self.wanted()
        if not wanted and not self.asked.level:
            return []
        seen = []
        for name in self._names():
            tail = self._tails.setdefault(name, Tail(os.path.join(self.folder, name)))
            if name not in self._ranks:
                self._ranks[name] = self.rank_of(int(_NAME.fullmatch(name)["pid"]))  # type: ignore[index]
            lines = tail.lines(final)
            self._copy(name, [line for line in lines if self.asked.wants(line)])
            for line in lines if wanted else ():
                self._lines[name] = self._lines.get(name, 0) + 1
                about = {"rank": self._ranks[name], "stream": "nccl", "file": f"{self.shown_in}/{self.kept_name(name)}"}
                seen.append(Saw("line", {**about, "number": self._lines[name], "text": line}))
        return seen

    def kept_name(self, name: str) -> str:
        rank = self._ranks.get(name)
        return f"nccl-{name.rpartition('.')[2]}.log" if rank is None else f"nccl-rank{rank}.log"

    def keep(self, folder: str) -> None:
        """Copy both ends of every file into the run folder."""
        for name in self._names():
            with open(os.path.join(self.folder, name), "rb") as file:
                data = file.read(_KEPT)
                size = os.fstat(file.fileno()).st_size
                rest = size - len(data)
                if rest > _KEPT:
                    file.seek(-_KEPT, os.SEEK_END)
                    data += f"\n[{rest - _KEPT} bytes are left out]\n".encode()
                data += file.read(_KEPT)
            with open(os.path.join(folder, self.kept_name(name)), "ab") as target:
                target.write(data)

    def _names(self) -> List[str]:
        try:
            return sorted(name for name in os.listdir(self.folder) if _NAME.fullmatch(name))
        except OSError:
            return []

    def _copy(self, name: str, lines: List[str]) -> None:
        if not lines:
            return
        found = _NAME.fullmatch(name)
        assert found
        path = self.asked.file.replace("%h", found["host"]).replace("%p", found["pid"]) or self.out_of(
            self._ranks[name]
        )
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write("".join(line + "\n" for line in lines))
        except OSError:
            pass  # like NCCL: a log that cannot be written stops nothing
