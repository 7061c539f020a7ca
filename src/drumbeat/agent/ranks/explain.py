"""Why one rank ended, from its exit status, the end of its standard error, and what the kernel counted."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from typing import Optional

from drumbeat.agent.ranks.launchers import Direct, End
from drumbeat.agent.ranks.log_tail import tail
from drumbeat.agent.ranks.start import NO_WORKDIR
from drumbeat.agent.watchers.oom import oom_kills
from drumbeat.facts.host import LiveHost
from drumbeat.finding import ERROR, LIKELY, PEER_LOST, WARNING, Evidence, Finding
from drumbeat.order import Order
from drumbeat.printed.reader import read_line
from drumbeat.runfolder.layout import NodeFolder

_STREAM = re.compile(r"std(?:err|out) of (?:process|rank) \d+:")  # as diagnose names what it was given
_TABLE = 40  # lines that may follow a failure that ended the work: torchrun's table, and what the script says last


class Explainer:
    """For one attempt; evidence names files relative to `run_folder`. `kept` is the log in which a reader of the run folder finds
    the rank's lines, where they are merged."""

    def __init__(
        self, order: Order, logs: NodeFolder, launcher: Direct, attempt: int, run_folder: str, kept: str = ""
    ) -> None:
        self.order, self.logs, self.launcher, self.attempt = order, logs, launcher, attempt
        self.run_folder, self.kept = run_folder, kept
        self._oom_kills = oom_kills(LiveHost())  # before the ranks start

    def explain(self, end: End, by_us: bool) -> Finding:
        from drumbeat.diagnose.exits import explain_exit  # here and below: the agent of a healthy run starts without it

        log, out = (self._written(end, stream) for stream in ("err", "out"))
        lines, printed = tail(log), tail(out)
        missing = next((line for line in lines if line.startswith(NO_WORKDIR)), None)
        if missing:
            found = self._no_workdir(missing)
        else:
            ended_by_us = by_us and end.signal == signal.SIGKILL
            command, no_memory = self.order.command, self._no_memory(end)
            alone = not end.of_command
            found = explain_exit(end.exit_code, end.signal, lines, command, ended_by_us, no_memory, printed, alone)
        if any(each.text in line for each in found.evidence for line in printed):
            log = out
        file = os.path.relpath(self.kept or log, self.run_folder)
        seen = tuple(f"the last lines of {file}" if _STREAM.match(each) else each for each in found.seen)
        evidence = tuple(replace(each, file=each.file or file) for each in found.evidence)
        return replace(found, evidence=evidence, seen=tuple(dict.fromkeys(seen)))

    def unread(self, end: End, by_us: bool, seconds: float) -> Finding:
        """By the exit status alone, where the logs could not be read."""
        from drumbeat.diagnose.exits import explain_exit

        found = explain_exit(end.exit_code, end.signal, (), self.order.command, by_us and end.signal == signal.SIGKILL)
        if found.severity != ERROR:
            return found
        why = f"not known: the rank's log could not be read within {seconds:g} s"
        return replace(found, cause=why, fix=f"look at the file system of {self.logs.path} on this node")

    def doubt(self, end: End, every_rank: bool) -> Optional[Finding]:
        """Why a command that ended with 0 may have failed all the same: its exit code can be that of a pipe into tee, or of a
        last echo. None if what its processes wrote shows no failure, or if the work went on after it."""
        from drumbeat.diagnose.exits import RankEnd, explain_run
        from drumbeat.diagnose.failure import NO_FAILURE, NOT_KNOWN

        ranks = sorted(self.logs.ranks(self.attempt)) if every_rank else [end.rank]
        paths = [[self.logs.log(self.attempt, rank, stream) for stream in ("out", "err")] for rank in ranks]
        ends = [RankEnd(rank, 0, None, tail(out), tail(err)) for rank, (out, err) in zip(ranks, paths)]
        if every_rank:
            paths.append([self.launcher.log(self.attempt, end.rank, stream) for stream in ("out", "err")])
            ends.append(RankEnd(None, 0, None, tail(paths[-1][0]), tail(paths[-1][1])))
        failure = explain_run(ends, self.order.command)
        found = failure.finding
        if found is None or failure.answer in (NO_FAILURE, NOT_KNOWN, PEER_LOST) or not found.evidence:
            return None
        text = found.evidence[0].text
        for written, (out, err) in zip(ends, paths):
            for lines, path in ((written.stderr, err), (written.stdout, out)):
                place = max((number for number, line in enumerate(lines) if text in line), default=None)
                if place is not None:
                    after = [line for line in lines[place + 1 :] if line.strip()]
                    if len(after) > _TABLE or any(read_line(line) for line in after):
                        return None
                    file = os.path.relpath(self.kept or path, self.run_folder)
                    return replace(found, severity=WARNING, confidence=LIKELY, evidence=(Evidence(text, file),))
        return None

    def _written(self, end: End, stream: str) -> str:
        """The rank's own log, or its launcher's where the rank was never started."""
        log, own = self.logs.log(self.attempt, end.rank, stream), self.launcher.log(self.attempt, end.rank, stream)
        return log if not end.of_command and os.path.exists(log) else own

    def _no_workdir(self, line: str) -> Finding:
        return Finding(
            "workdir-missing", ERROR, f"the working directory {self.order.workdir} cannot be used on this node",
            line[len(NO_WORKDIR) :].strip() or "it does not exist there",
            "use a folder on storage that all nodes share (workdir: in the job file), and bind it into the container",
            (Evidence(line),),
        )  # fmt: skip

    def _no_memory(self, end: End) -> bool:
        """Whether the kernel has killed for lack of memory since the start: only then is a SIGKILL its doing."""
        if signal.SIGKILL not in (end.signal, (end.exit_code or 0) - 128) or self._oom_kills is None:
            return False
        return (oom_kills(LiveHost()) or 0) > self._oom_kills
