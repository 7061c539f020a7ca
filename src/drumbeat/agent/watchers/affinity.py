"""Where the ranks sit: a sensor that reads /proc, and a watcher that judges once each rank has a GPU open or has stepped."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from drumbeat.agent.watchers.contract import Action, Emit, Saw, Stop, Warn
from drumbeat.agent.watchers.gpu_users import GpuUsers, Users, awaits_driver, computing
from drumbeat.agent.watchers.mig import mig_instances
from drumbeat.agent.watchers.rank_processes import carries, environ_of, identity_in, launchers, read_parents
from drumbeat.base.order import EnvVar
from drumbeat.base.processes import open_files, start_time
from drumbeat.findings.model import ERROR, WARNING
from drumbeat.machine.model import Facts, Gpu
from drumbeat.machine.parse import cpulist
from drumbeat.plan.binding import Binding
from drumbeat.plan.placement import UNKNOWN, RankSeen, changed, rows, text_table, verdict
from drumbeat.plan.variables import steers

_FIRST = 1.0  # seconds after the start
_SLOWER = 1.3  # each look that shows nothing new makes the next one wait so many times longer
_LONGEST = 15.0
_APART = 0.9  # seconds between two looks that must agree
_REFUTED = 60.0  # seconds in which a later look may refute a mismatch
_UNNUMBERED = 60.0  # seconds that the processes of a command without steps must look alike


class RankLooks:
    """A sensor: what /proc shows of this node's ranks, less often as time passes, at once after the first step."""

    def __init__(
        self, run_id: str, node: int, facts: Facts, local: str, wanted: Callable[[], bool],
        commands: Callable[[], Sequence[int]] = tuple,
    ) -> None:  # fmt: skip
        """`commands`: processes of the agent that start ranks, and are none."""
        self.run_id, self.node, self.wanted, self.commands = run_id, node, wanted, commands
        self.gpus = [gpu for gpu in facts.gpus if not gpu.integrated]
        self._users = GpuUsers(self.gpus, local)
        self._next: Optional[float] = None
        self._wait = _FIRST
        self._last: List[Tuple[Any, ...]] = []

    def look_soon(self, now: float) -> None:
        if self._next is not None:
            self._next, self._wait = min(self._next, now), _FIRST

    def poll(self, now: float, final: bool = False) -> List[Saw]:
        if final or not self.wanted():
            return []
        if self._next is None:
            self._next = now + self._wait
        if now < self._next:
            return []
        seen = look_at_ranks(self.run_id, self.node, self.gpus, self._users.read(now), self.commands())
        shown = [(about.rank, about.pid, *_facts_of(about)) for about, _ in seen]
        self._wait = min(self._wait * _SLOWER, _LONGEST) if shown == self._last else _FIRST
        self._next, self._last = now + self._wait, shown
        if any(each.open and (each.gpus is None or each.rank is None) for each, _ in seen):
            self._users.ask(now)
        seen = [each for each in seen if not awaits_driver(each[0])]
        return [Saw("ranks", {"seen": seen})] if seen else []


def look_at_ranks(
    run_id: str, node: int, gpus: Sequence[Gpu], users: Optional[Users], commands: Sequence[int] = ()
) -> List[Tuple[RankSeen, Mapping[str, str]]]:
    """Each rank's main process, with its environment. Read from outside, so it holds for any command and any launcher.

    Of the processes that carry a rank's number (wrappers, the rank, its data loaders) the oldest that has a GPU open
    counts, else the oldest. A launcher that was given a number is no rank.
    """
    found: Dict[Optional[int], List[Tuple[RankSeen, Mapping[str, str]]]] = {}
    divided = any(gpu.mig for gpu in gpus)
    parents = read_parents()
    own = {
        pid: environ for pid in parents for environ in [environ_of(pid)] if environ and _is_ours(environ, run_id, node)
    }
    identities = {pid: identity_in(environ) for pid, environ in own.items()}
    carried = carries(parents, identities, commands)
    start_others = launchers(parents, identities, carried)
    for pid in sorted(own, key=lambda pid: (int(start_time(pid) or 0), pid)):
        environ, rank = own[pid], None if pid in carried else identities[pid].rank
        if pid in start_others:
            continue
        opened = _open_gpus(pid, gpus)
        if (rank is None and not opened) or _is_shim(pid):
            continue
        about = RankSeen(
            rank,
            pid,
            _cpus(pid),
            _used(pid, opened, users or {}),
            opened or (),
            mig_instances(pid, environ) if divided else (),
        )
        found.setdefault(rank, []).append((about, environ))
    chosen = []
    for rank, processes in found.items():
        if rank is None:
            processes = computing(processes, users, parents) if len(processes) > 1 else processes
            chosen += [each for each in processes if each[0].gpus] or processes[:1]
        else:
            chosen.append(next((each for each in processes if each[0].open), processes[0]))
    return [each for each in chosen if each[0].rank is not None] or chosen


def _is_ours(environ: Mapping[str, str], run_id: str, node: int) -> bool:
    return environ.get("DRUMBEAT_RUN") == run_id and environ.get("NODE_RANK") == str(node)


def _used(pid: int, opened: Optional[Tuple[int, ...]], users: Users) -> Optional[Tuple[int, ...]]:
    if opened is None:
        return None
    if len(opened) <= 1:
        return opened
    return _kfd_gpus(pid, opened) or users.get(pid)


_KFD: Dict[str, int] = {}  # gpu_id of the kernel's compute driver -> place among the GPUs


def _kfd_gpus(pid: int, opened: Tuple[int, ...]) -> Optional[Tuple[int, ...]]:
    """AMD's driver shows for each process how much memory it has on each GPU."""
    base = f"/sys/class/kfd/kfd/proc/{pid}"
    try:
        names = [name for name in os.listdir(base) if name.startswith("vram_")]
    except OSError:
        return None
    if not _KFD:
        _KFD.update(_kfd_order())
    used = []
    for name in names:
        index = _KFD.get(name[len("vram_") :])
        if index in opened and _number(f"{base}/{name}") > _IDLE_BYTES:
            used.append(index)
    return tuple(sorted(index for index in used if index is not None)) or None


_IDLE_BYTES = 64 << 20  # a context that only looks at a GPU has less


def _kfd_order() -> Dict[str, int]:
    base = "/sys/class/kfd/kfd/topology/nodes"
    found: Dict[str, int] = {}
    try:
        nodes = sorted((name for name in os.listdir(base) if name.isdigit()), key=int)
    except OSError:
        return {}
    for node in nodes:
        try:
            with open(f"{base}/{node}/gpu_id", encoding="ascii") as file:
                identity = file.read().strip()
        except OSError:
            continue  # a GPU that a cgroup keeps from us is not counted
        if identity not in ("", "0"):
            found[identity] = len(found)
    return found


def _number(path: str) -> int:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


def _is_shim(pid: int) -> bool:
    """Whether this is our own program, about to bind itself and become the rank."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"\0_shim\0" in file.read(4096)
    except OSError:
        return False


def _open_gpus(pid: int, gpus: Sequence[Gpu]) -> Optional[Tuple[int, ...]]:
    """GPUs whose device file this process holds; None: its open files cannot be read."""
    index_of = {gpu.device: gpu.index for gpu in gpus if gpu.device}
    try:
        return tuple(sorted({index_of[target] for target in open_files(pid) if target in index_of}))
    except OSError:
        return None


def _cpus(pid: int) -> Optional[Tuple[int, ...]]:
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            line = next(line for line in file if line.startswith("Cpus_allowed_list:"))
    except (OSError, StopIteration):
        return None
    return cpulist(line.split(":", 1)[1].strip())


class Placement:
    """A watcher: says where the ranks sit. What two looks in a row do not show alike is not said. A mismatch ends a run only
    if the next look shows it too, and is withdrawn if a later one refutes it."""

    def __init__(
        self, facts: Facts, bound: Binding, right: Binding, expected: Sequence[EnvVar], first_rank: int, level: str,
        node: int, ranks: int,
    ) -> None:  # fmt: skip
        """`ranks`: how many this node must have; 0 where the command itself starts them."""
        self.facts, self.bound, self.right, self.expected = facts, bound, right, expected
        self.first_rank, self.level, self.node, self.ranks = first_rank, level, node, ranks
        self.gpus = any(not gpu.integrated for gpu in facts.gpus)
        self.done = False
        self.stepped = False
        self.on_first_step: Callable[[float], None] = lambda now: None
        self._seen: Dict[Tuple[Optional[int], int], RankSeen] = {}
        self._since: Dict[Tuple[Optional[int], int], float] = {}
        self._environ: Dict[int, Mapping[str, str]] = {}
        self._ended: Set[int] = set()  # ranks; what was seen of one before still counts
        self._wrong: Tuple[str, ...] = ()  # codes of the mismatch that was seen last
        self._said_at: Optional[float] = None  # when it was said

    def on(self, saw: Saw, now: float) -> List[Action]:
        if self.done:
            return []
        if saw.kind == "metric" and not self.stepped:
            self.stepped = True
            self.on_first_step(now)
        elif saw.kind == "ranks":
            self._note(saw.data["seen"], now)
            if self._complete(now):
                return self._say(now)
        elif saw.kind == "exited" and isinstance(saw.data.get("rank"), int):
            self._ended.add(saw.data["rank"])
        elif saw.kind == "ended" and self._said_at is None and (self.ranks or self._seen):
            return self._say(now, ended=True)
        return []

    def _numbered(self, about: RankSeen, alone: bool) -> Optional[RankSeen]:
        """Where a launcher must number its ranks, a process without a number is the launcher's own, or the only rank of one
        that numbers none (accelerate's). Where the command starts the ranks itself, it is one of them."""
        if not self.ranks or about.rank is not None:
            return about
        return replace(about, rank=self.first_rank) if alone and self.ranks == 1 and self.stepped else None

    def _note(self, looks: Sequence[Tuple[RankSeen, Mapping[str, str]]], now: float) -> None:
        known = [(self._numbered(about, len(looks) == 1), environ) for about, environ in looks]
        seen = [(about, environ) for about, environ in known if about is not None]
        alive = {about.rank for about, _ in seen}
        fresh = {key: each for key, each in self._seen.items() if key[0] in self._ended and key[0] not in alive}
        kept = {rank: environ for rank, environ in self._environ.items() if rank in self._ended}
        self._environ = {**kept, **{about.rank: environ for about, environ in looks if about.rank is not None}}
        for about, _ in seen:
            key = (about.rank, about.pid)
            before = self._seen.get(key)
            same = before is not None and _facts_of(before) == _facts_of(about)
            if not same:
                self._since[key] = now
            settled = same and now - self._since[key] >= _APART
            fresh[key] = replace(about, stepped=self.stepped, settled=settled)
        self._seen = fresh

    def _complete(self, now: float) -> bool:
        """Every rank that has not ended was seen twice alike, with a GPU open or after a step (where there are GPUs). A process
        without a number may be about to start the ranks: only a step, or time, shows that it is one."""
        ready = [
            each for key, each in self._seen.items()
            if each.settled and each.cpus is not None and (not self.gpus or each.open or each.stepped)
            and (each.rank is not None or each.stepped or now - self._since[key] >= _UNNUMBERED)
        ]  # fmt: skip
        going_on = [each for each in self._seen.values() if each.rank not in self._ended]
        enough = len(ready) + len(self._ended - {each.rank for each in ready}) >= max(1, self.ranks)
        return bool(ready) and enough and all(each in ready for each in going_on)

    def _say(self, now: float, ended: bool = False) -> List[Action]:
        table = rows(self.facts, self.bound, self.right, list(self._seen.values()), self.first_rank, self._ended)
        # A command that starts the ranks itself gives them addresses and numbers of its own, and cores.
        expected = self.expected if self.ranks else [each for each in self.expected if steers(each.name)]
        more = changed(self._environ, expected, self.bound, self.first_rank)
        answer = verdict(table, self.facts, self.bound, more)
        wrong = [each for each in answer.findings if each.severity in (WARNING, ERROR)]
        before, self._wrong = self._wrong, tuple(each.code for each in wrong)
        stops = self.level == "stop" and not ended
        if stops and wrong and self._wrong != before:
            return []  # the next look decides
        if self._said_at is not None:
            self.done = not wrong or now - self._said_at > _REFUTED
            if wrong or answer.answer == UNKNOWN:
                return []
            answer = replace(answer, summary=f"{answer.summary}; withdrawn: mismatch, as said before")
        self._said_at = now
        self.done = self.done or ended or stops or not wrong
        actions: List[Action] = [Emit("verdict", {"verdict": answer, "table": text_table(table), "rows": table})]
        for finding in wrong:
            located = replace(finding, node=self.node, host=self.facts.host)
            actions.append(Stop(located) if stops else Warn(located))
        return actions


def _facts_of(about: RankSeen) -> Tuple[Any, ...]:
    return about.cpus, about.gpus, about.open, about.instances
