"""The launchers that a script has started on this node, one after another: one line for each, and how it ended."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shlex
import time
from dataclasses import replace
from itertools import islice
from typing import Any, Dict, List, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.base.signals import EXIT_NOT_FOUND
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import ERROR, WARNING, Finding, shown

find = Catalog("ranks")
_MOST = 1_000  # launchers of one script that are told apart; any program below it may write that file
_MOST_BYTES = 1 << 20  # bytes of ranks' ends that are read at a time


@dataclass(frozen=True)
class LauncherReport:
    """Record written by a launcher's driver at its end; without failures all its ranks ended well."""

    failures: Tuple[Dict[str, Any], ...] = ()  # rank, exit_code (negative: a signal), t, by_launcher
    refused: str = ""  # why no rank was started, and in the next line what to type
    exit_code: int = 0  # of a launcher that failed by itself, or was told to stop

    @property
    def succeeded(self) -> bool:
        return not (self.failures or self.refused or self.exit_code)


@dataclass(frozen=True)
class Stage(LauncherReport):
    """One launcher, with its driver's report. `refused` also by its stand-in."""

    command: str = ""
    began: bool = False  # its stand-in started it
    missing: bool = False  # the program does not exist
    reported: bool = False  # otherwise it has not ended, or broke off before its report
    unended: bool = False  # its driver never came to its end: it still runs, or was killed
    t: Optional[float] = None  # when it began
    ended: Tuple[Dict[str, Any], ...] = ()  # ranks that ended with 0: rank, exit_code, t; read only if a rank failed

    @property
    def succeeded(self) -> bool:
        return self.reported and super().succeeded


class Stages:
    """The stages of one attempt, in the folder of its stand-ins."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._file = os.path.join(folder, ".stages.jsonl")
        self._size = self._told = 0  # as of the last call of `begun_since`

    def begin(self, command: Sequence[str]) -> int:
        """Return the number of the stage that this process becomes. It holds the lock while it lives."""
        lock = os.open(os.path.join(self.folder, ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            running = next((stage.command for stage in reversed(self.read()) if stage.began), "another launcher")
            raise Problem(
                f"{shlex.join(command)[:200]}: this script's {running[:200]} is still running on this node",
                "two trainings at once are two jobs: start each with a drumbeat run of its own",
            ) from None
        os.set_inheritable(lock, True)  # launchers close it before they start ranks
        number = sum(1 for stage in self.read() if stage.began)
        self._add({"command": shlex.join(command), "t": time.time()})
        return number

    def refuse(self, command: Sequence[str], why: str) -> None:
        self._add({"command": shlex.join(command), "refused": why})

    def miss(self, command: Sequence[str]) -> None:
        self._add({"command": shlex.join(command), "missing": True})

    def report(self, number: int) -> str:
        """Return the file in which the driver of this stage records how it ended."""
        return os.path.join(self.folder, f".report-{number}.json")

    def ended(self, number: int) -> str:
        """Return the file in which the driver of this stage records each rank's end."""
        return os.path.join(self.folder, f".ended-{number}.jsonl")

    def read(self) -> List[Stage]:
        stages: List[Stage] = []
        number = 0
        for line in _lines(self._file):
            refused, missing = str(line.get("refused", "")), bool(line.get("missing"))
            command, began = str(line.get("command", "")), not (refused or missing)
            stage = Stage(refused=refused, command=command, began=began, missing=missing)
            if began:
                report = read_report(self.report(number))
                unended = report is None and os.path.exists(self.report(number) + ".running")
                t = line.get("t")
                ended = ended_well(self.ended(number))[0] if report and report.failures else []
                t = t if isinstance(t, float) and math.isfinite(t) else None
                reported = {**vars(report), "reported": True} if report else {}
                stage = replace(stage, unended=unended, ended=tuple(ended), t=t, **reported)
                number += 1
            stages.append(stage)
        return stages

    def begun_since(self) -> List[float]:
        """Return the start times of launchers that began since the last call, except the script's first one."""
        try:
            size = os.stat(self._file).st_size
        except OSError:
            return []
        if size == self._size:
            return []
        self._size = size
        times = [stage.t for stage in self.read() if stage.began and stage.t is not None]
        new, self._told = times[max(1, self._told) :], len(times)
        return new

    def _add(self, record: Dict[str, Any]) -> None:
        fd = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def read_report(path: str) -> Optional[LauncherReport]:
    """Read the report of a driver; None if there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return None
    failures = found.get("failures") if isinstance(found, dict) else None
    if not isinstance(failures, list):
        return None
    code = found.get("exit_code")
    code = code if isinstance(code, int) else 0
    return LauncherReport(
        tuple(each for each in failures if isinstance(each, dict)), str(found.get("refused", "")), code
    )


def ended_well(path: str, start: int = 0) -> Tuple[List[Dict[str, Any]], int]:
    """Return the ranks that the driver has seen end with 0, in the order of their ends: rank, exit_code, t; and the position
    to read on from. Reads only whole lines from `start` on."""
    try:
        with open(path, "rb") as file:
            file.seek(start)
            whole = file.read(_MOST_BYTES).rpartition(b"\n")[0]
    except OSError:
        return [], start
    found = []
    for line in whole.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            each = json.loads(line)
            if each["exit_code"] == 0 and isinstance(each["rank"], int) and math.isfinite(each["t"]):
                found.append(each)
    return found, start + len(whole) + bool(whole)


def _lines(path: str) -> List[Dict[str, Any]]:
    try:
        with open(path, encoding="utf-8") as file:
            found: List[Optional[Any]] = [json.loads(line) for line in islice(file, _MOST)]
    except (OSError, ValueError, RecursionError):
        return []
    return [each for each in found if isinstance(each, dict)]


# Findings about the launchers of a script: one that failed, did not exist, or had not ended.


STAGE_FAILED = "stage-failed"  # a doubt: a launcher in the script failed, and the script ended with 0
SCRIPT_SEEN = ("the launchers that the script called", "the script's exit code")


def stage_failed(stage: Stage, later: str) -> Finding:
    """Report a launcher that failed in a script that ended with 0. `later`: the command after it that is known to have
    succeeded."""
    first = stage.failures[0] if stage.failures else {}
    how = _words(int(first.get("exit_code", stage.exit_code)), bool(stage.failures))
    return find(
        "stage-failed", "later" if later else "", command=shown(stage.command)[:200], how=how, later=shown(later)[:200],
        seen=SCRIPT_SEEN, rank=first.get("rank"),
    )  # fmt: skip


def _words(code: int, of_rank: bool) -> str:
    """Describe an exit code: for a launcher it may mean that it was told to stop; a rank's code may be its own."""
    if not of_rank and code > 128:
        return f"was told to stop (signal {code - 128})"
    return f"failed (exit code {code})" if code >= 0 else f"failed (signal {-code})"


def missing(stage: Stage, exit_code: Optional[int], then: str = "") -> Finding:
    name, severity = stage.command.partition(" ")[0], ERROR if exit_code else WARNING
    shell = [f"{name}: command not found"]
    return find("command-not-found", name=name, then=then, severity=severity, evidence=shell, seen=SCRIPT_SEEN[:1])


def no_rank(stage: Stage) -> Finding:
    """Report a launcher without ranks. The script's exit code proves nothing: it may be that of a pipe into tee."""
    if stage.missing:
        return missing(stage, EXIT_NOT_FOUND, "the script went on without it, and no rank was started")
    return find("no-rank-started", evidence=[shown(stage.command)[:200]], seen=(SCRIPT_SEEN[0], "rank logs"))
