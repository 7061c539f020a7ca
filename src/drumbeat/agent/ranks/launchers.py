"""Differences between launchers once the processes of a node are known: who numbers the ranks, which log is whose, and what an
exit status means for ranks."""

from __future__ import annotations

import json
import os
import pkgutil
import re
from dataclasses import replace
from typing import List, Optional, Sequence

from drumbeat.agent.ranks.shim import shim_argv
from drumbeat.agent.ranks.stages import (
    SCRIPT_SEEN,
    Stage,
    Stages,
    ended_well,
    missing,
    no_rank,
    read_report,
    stage_failed,
)
from drumbeat.agent.ranks.stand_ins import install, settings_of
from drumbeat.agent.ranks.start import End, rank_ends
from drumbeat.base import clock
from drumbeat.base.order import EnvVar, Order
from drumbeat.base.regex import regex
from drumbeat.base.signals import EXIT_NOT_FOUND, EXIT_USAGE
from drumbeat.commands.launch import find_launcher, starts_its_own_ranks
from drumbeat.commands.program import Script, fallback, launcher_interpreter, script_of
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import ERROR, WARNING, shown
from drumbeat.machine.model import Peers
from drumbeat.plan.argv import Process, Tools, has_driver, rank_identity
from drumbeat.plan.binding import Binding
from drumbeat.plan.scene import DEFAULT_EPHEMERAL, ports
from drumbeat.runfolder.layout import NodeFolder

find = Catalog("ranks")
_ENDS_PROCESSES = regex(r"(?:^|[;&|({`\"']|\b(?:then|else|do)\b)[ \t]*(?:kill|pkill|killall|timeout)[ \t]", re.M)


class Direct:
    """`ranks` and `tasks`: each process is one rank. A script that starts a launcher in one of them is told so."""

    starts_ranks = True  # we number the ranks; otherwise the command does
    once = False
    is_rank = True  # each process that we start is a rank; otherwise it is the node's command, which starts the ranks

    def __init__(self, order: Order, folder: NodeFolder, logs: NodeFolder, bundle: str, local: str) -> None:
        self.order, self.folder, self.logs, self.bundle, self.local = order, folder, logs, bundle, local
        self.first_rank = 0
        self._stages: Optional[Stages] = None
        self._script = Script()

    def prepare(self, attempt: int, node: int, peers: Peers, bound: Binding) -> List[EnvVar]:
        """Prepare an attempt; return variables that all its processes get."""
        self.first_rank = sum(peer.ranks for peer in peers.nodes[:node])
        self._stages = None
        if self.order.launcher == "tasks" or find_launcher(self.order.command):
            return []
        script = self._script = script_of(self.order)
        if not (script.shell or starts_its_own_ranks(self.order.command)):
            return []
        place = next((each for each in (self.local, self.folder.attempt(attempt)) if may_run_programs(each)), "")
        if not place:
            return []  # the census sees ranks that a launcher inside starts
        folder = os.path.join(place, f"launchers-{attempt}")
        later, _ = ports(f"stages/{self.order.identity}", DEFAULT_EPHEMERAL)  # the same on every node
        tools = self.driver_tools(attempt, node, bound)
        settings = settings_of(folder, node, peers, later, self.once, self.order.ranks_asked, tools)
        self._stages = Stages(folder)
        return install(settings, script, self.bundle, os.environ)

    def has_started_ranks(self, attempt: int) -> bool:
        """Return true if the node's command has started its own ranks, as their logs show. Reads a folder."""
        return False

    def failed_rank(self) -> Optional[End]:
        """Return the rank that made a launcher in the command's script fail; None if there is none."""
        return None

    def early_ends(self, attempt: int) -> List[End]:
        """Return the ranks on this node that ended with 0 since the last call, while their launcher goes on."""
        return []

    def met(self) -> Optional[int]:
        """Count the launchers that the script has started through our stand-ins; None without stand-ins."""
        return None if self._stages is None else len(self._stages.read())

    def new_stages(self) -> List[float]:
        """Return the start times of the script's later launchers, from our stand-ins; each is returned once."""
        return [] if self._stages is None else [clock.own(t) for t in self._stages.begun_since()]

    @property
    def may_hide_failures(self) -> bool:
        """Return true if a shell wraps the program, so that the exit code may be another program's."""
        return self._stages is not None

    @property
    def ranks_ended_well(self) -> bool:
        """Return true if each launcher of the script reported that all its ranks ended with 0, which no pipe can hide."""
        begun = [stage for stage in self._stages.read() if stage.began] if self._stages else []
        return bool(begun) and all(stage.succeeded for stage in begun)

    def tools(self, attempt: int, node: int, bound: Binding) -> Tools:
        """Return the settings that the command line of this node's processes needs."""
        return Tools(python=launcher_interpreter(self.order))

    def driver_tools(self, attempt: int, node: int, bound: Binding) -> Tools:
        """Return the settings of a launcher that starts ranks for us."""
        cpus = [list(slot.cpus) for slot in bound.slots]
        driver = pkgutil.get_data("drumbeat.inrank", "driver.py") or b""
        shim = shim_argv(self.bundle, self.logs.attempt(attempt), self.order.wrap, cpus, node, self.first_rank)
        settings = {
            "report": self._report(attempt),
            "ended": self._ended(attempt),
            "folder": self.logs.attempt(attempt),
            "log": os.path.join(self.folder.attempt(attempt), "launcher"),
            "shim": list(shim),
            "first": self.first_rank,
        }
        return Tools(tuple(shim), driver.decode(), json.dumps(settings), launcher_interpreter(self.order))

    def own_variables(self, process: Process, bound: Binding) -> List[EnvVar]:
        """Return the variables that only this process gets."""
        return [*bound.slots[process.local_rank].env, *rank_identity(process.rank, process.local_rank)]

    def cpus(self, process: Process, bound: Binding) -> Sequence[int]:
        return bound.slots[process.local_rank].cpus

    def log(self, attempt: int, rank: int, stream: str) -> str:
        """Return the log of the process that we start."""
        return self.logs.log(attempt, rank, stream)

    def ends(self, attempt: int, end: End) -> List[End]:
        """Convert the end of a process that we started to ends of ranks. May read files: see `ends.py`."""
        return [end]

    def _report(self, attempt: int) -> str:
        return os.path.join(self.folder.attempt(attempt), "launcher.json")

    def _ended(self, attempt: int) -> str:
        return os.path.join(self.local, f"ended-{attempt}.jsonl")


class Once(Direct):
    """One process per node, which starts its ranks itself, or is the node's only rank."""

    starts_ranks = False
    once = True

    def prepare(self, attempt: int, node: int, peers: Peers, bound: Binding) -> List[EnvVar]:
        variables = super().prepare(attempt, node, peers, bound)
        alone = peers.nodes[node].ranks == 1 and self._stages is None
        self.is_rank = alone and not self._script.has_ranks_apart
        return variables

    def has_started_ranks(self, attempt: int) -> bool:
        return self._stages is not None and bool(self.logs.ranks(attempt))

    def own_variables(self, process: Process, bound: Binding) -> List[EnvVar]:
        return []

    def cpus(self, process: Process, bound: Binding) -> Sequence[int]:
        return ()

    def log(self, attempt: int, rank: int, stream: str) -> str:
        """Return the log of the process that we start. Ranks started by a stand-in have their own logs; then this has the
        script's output."""
        if self._stages is not None:
            return os.path.join(self.folder.attempt(attempt), f"launcher.{stream}")
        return self.logs.log(attempt, rank, stream)

    def ends(self, attempt: int, end: End) -> List[End]:
        """Return the ends of ranks or of the script. A script may end well although a rank failed (behind a pipe into tee,
        say), so ask its launchers. A failed rank is the run's failure, unless a later command of the script is known to have
        succeeded. The same holds for a launcher that was killed, or that still runs when its script ends. A launcher that
        failed by itself, or was told to stop, is a doubt."""
        stages = self._stages.read() if self._stages else []
        end = replace(end, of_command=not self.is_rank)
        if not stages:
            return [end]
        last = stages[-1]
        if last.refused:
            return [_refused_end(end, last.refused)]
        reported = [stage for stage in stages if stage.reported]
        failed = next((stage for stage in reversed(reported) if stage.failures), None)
        begun = [stage for stage in stages if stage.began]
        running = begun[-1] if begun and begun[-1].unended and end.exit_code == 0 else None
        if failed is not None:
            later = _later(failed, reported, self._script) if end.exit_code == 0 and running is None else ""
            if not later and not reported[-1].succeeded:
                return rank_ends([*failed.ended, *failed.failures])
            if later:
                return [replace(end, finding=stage_failed(failed, later))]
        if running is not None:
            return [_unended_end(end, running, self._script)]
        if end.exit_code == 0 and not self.logs.ranks(attempt):
            failed_code = EXIT_NOT_FOUND if last.missing else 1
            return [End(end.rank, failed_code, None, end.at, of_command=True, finding=no_rank(last))]
        if last.missing:
            return [replace(end, finding=missing(last, end.exit_code))]
        broken = next((stage for stage in reversed(reported) if stage.exit_code), None)
        if broken and end.exit_code == 0:
            return [replace(end, finding=stage_failed(broken, _later(broken, reported, self._script)))]
        return [end]

    def failed_rank(self) -> Optional[End]:
        """Return the first failed rank of the script's last launcher: the logs of earlier ones hold later output, too."""
        begun = [stage for stage in self._stages.read() if stage.began] if self._stages else []
        return next(iter(rank_ends(begun[-1].failures)), None) if begun else None


class Driven(Once):
    """torchrun, accelerate or deepspeed once per node, behind our driver; a shim before each rank opens the rank's logs."""

    starts_ranks = True
    is_rank = False
    _heard = 0  # bytes read so far of the file of ended ranks

    def tools(self, attempt: int, node: int, bound: Binding) -> Tools:
        return self.driver_tools(attempt, node, bound)

    def prepare(self, attempt: int, node: int, peers: Peers, bound: Binding) -> List[EnvVar]:
        self.first_rank = sum(peer.ranks for peer in peers.nodes[:node])
        self._heard = 0
        return []

    def early_ends(self, attempt: int) -> List[End]:
        """Read the ends from a file on the node's own disk. Failed ranks are in the driver's report, when its launcher has
        ended."""
        found, self._heard = ended_well(self._ended(attempt), self._heard)
        return rank_ends(found)

    def has_started_ranks(self, attempt: int) -> bool:
        return bool(self.logs.ranks(attempt))

    def log(self, attempt: int, rank: int, stream: str) -> str:
        return os.path.join(self.folder.attempt(attempt), f"launcher.{stream}")

    def ends(self, attempt: int, end: End) -> List[End]:
        """Return the failed ranks from the driver's report, as the launcher's own status says little. A launcher that fails
        before its first rank failed by itself."""
        report = read_report(self._report(attempt)) if end.exit_code != 0 else None
        if report and report.refused:
            return [_refused_end(end, report.refused)]
        found = rank_ends(report.failures) if report else []
        return found or [replace(end, of_command=end.exit_code == 0 or not self.logs.ranks(attempt))]


def may_run_programs(folder: str) -> bool:
    """Return true if programs in this folder can be started: /tmp is mounted noexec on some clusters."""
    return not os.statvfs(folder).f_flag & os.ST_NOEXEC


def _refused_end(end: End, why: str) -> End:
    what, _, fix = why.partition("\n")
    finding = find("launcher-refused", what=what, how=fix.strip())
    return End(end.rank, EXIT_USAGE, None, end.at, of_command=True, finding=finding)


def _later(failed: Stage, reported: Sequence[Stage], script: Script) -> str:
    """Return the command that succeeded after a failed stage of a script that ended with 0; '' if there is none."""
    last = reported[-1]
    if last.succeeded:
        return last.command
    return _fallback(failed, script) if last is failed else ""


def _fallback(stage: Stage, script: Script) -> str:
    return fallback(script.text, os.path.basename(stage.command.partition(" ")[0]))


def _unended_end(end: End, stage: Stage, script: Script) -> End:
    """Return the end of a script that ended with 0 although its last launcher has not ended by itself. If the script ends
    processes itself, that may be intended: then it is a doubt."""
    later = _fallback(stage, script)
    if later:
        done = shown(later)[:200]
        finding = find("stage-failed", "unended", command=shown(stage.command)[:200], later=done, seen=SCRIPT_SEEN)
        return replace(end, finding=finding)
    ends = bool(_ENDS_PROCESSES.search(script.text))
    finding = find(
        "launcher-unended", "ends" if ends else "", command=shown(stage.command)[:200],
        severity=WARNING if ends else ERROR, seen=SCRIPT_SEEN,
    )  # fmt: skip
    return replace(end, finding=finding) if ends else End(end.rank, 1, None, end.at, of_command=True, finding=finding)


def launcher_of(order: Order, folder: NodeFolder, logs: NodeFolder, bundle: str, local: str) -> Direct:
    """Return the launcher for this order. `local` is a private folder on the node's own disk."""
    kind = Driven if has_driver(order) else Once if order.launcher == "once" else Direct
    return kind(order, folder, logs, bundle, local)
