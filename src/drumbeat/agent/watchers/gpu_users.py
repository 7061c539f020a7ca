"""Which processes compute on a GPU, as its driver says. One that only has the device open may have it from its parent."""

from __future__ import annotations

import csv
import os
from dataclasses import replace
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.agent.ranks.start import start
from drumbeat.agent.watchers.rank_processes import above
from drumbeat.machine.model import Gpu
from drumbeat.plan.placement import RankSeen

Users = Mapping[int, Tuple[int, ...]]  # process -> GPUs
Seen = Tuple[RankSeen, Mapping[str, str]]

_QUESTION = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader")
_PATIENCE = 2.0  # seconds after which no answer means that the driver names no process of ours


class GpuUsers:
    """Asks nvidia-smi, in a process of its own: a driver that hangs must not hold the agent. Its answer is read later."""

    def __init__(self, gpus: Sequence[Gpu], local: str) -> None:
        self.nvidia = any(gpu.vendor == "nvidia" for gpu in gpus)
        self._index_of = {gpu.uuid: gpu.index for gpu in gpus if gpu.uuid}
        self._file = os.path.join(local, "gpu-users.csv")
        self._asked: Optional[float] = None  # for the first time

    def ask(self, now: float) -> None:
        self._asked = now if self._asked is None else self._asked
        if self.nvidia:
            env = {name: value for name, value in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH", "HOME")}
            start(_QUESTION, env, os.path.sep, self._file, os.devnull)

    def read(self, now: float) -> Optional[Users]:
        """As nvidia-smi last said; inside a container it may name no process of ours. None: it has not answered yet."""
        found: Dict[int, Tuple[int, ...]] = {}
        try:
            with open(self._file, encoding="utf-8", errors="replace") as file:
                for row in csv.reader(file, skipinitialspace=True):
                    if len(row) == 2 and row[0] in self._index_of and row[1].strip().isdecimal():
                        pid = int(row[1])
                        found[pid] = tuple(sorted({*found.get(pid, ()), self._index_of[row[0]]}))
        except OSError:
            pass
        waiting = self._asked is None or (self.nvidia and now - self._asked < _PATIENCE)
        return None if waiting and not found else found


def computing(processes: Sequence[Seen], users: Optional[Users], parents: Mapping[int, int]) -> List[Seen]:
    """Those of the processes without a rank's number that compute on a GPU. A process below another one may have its open
    devices from there (a helper that a library started): then the driver's word counts, and until it is known, no GPU."""
    pids = {about.pid for about, _ in processes}
    tops = [each for each in processes if not above(each[0].pid, parents) & pids]
    if len(tops) == len(processes):
        return list(processes)
    if users is None:
        return [(replace(about, gpus=None), environ) for about, environ in tops]
    return [each for each in processes if each[0].pid in users] or tops


def awaits_driver(about: RankSeen) -> bool:
    """Whether only the driver can tell if this process computes on the one GPU that it has open."""
    return about.rank is None and len(about.open) == 1 and about.gpus is None
