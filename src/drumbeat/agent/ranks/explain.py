"""Why one rank ended, from its exit status, the end of its standard error, and what the kernel counted."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import List, Mapping, Optional, Sequence, Tuple

from drumbeat.agent.lead.rank_end import CONSEQUENCES
from drumbeat.agent.ranks.end import End
from drumbeat.agent.ranks.last_words import (
    Stream,
    last_error,
    last_failure,
    may_hold_error,
    raised_at,
    read_stream,
    wrote_on,
)
from drumbeat.agent.ranks.launchers import Direct
from drumbeat.agent.ranks.log_tail import tail
from drumbeat.agent.ranks.start import NO_WORKDIR
from drumbeat.agent.watchers.oom import oom_kills
from drumbeat.base.order import Order
from drumbeat.base.regex import regex
from drumbeat.findings.model import CAUGHT, CERTAIN, ERROR, LIKELY, WARNING, Evidence, Finding, shown
from drumbeat.machine.host import LiveHost
from drumbeat.machine.model import Identity
from drumbeat.metrics.reader import read_line
from drumbeat.runfolder.layout import NodeFolder

_STREAM = regex(r"std(err|out) of (?:process|rank) \d+:(?:.*\D)?(\d+)$")  # as diagnose names lines that it was given
_LAST = 40  # lines: what has more behind it is not called the last lines


def with_last_step(finding: Finding, step: Optional[int]) -> Finding:
    """Of an end without words, the last step that was seen is all there is."""
    if step is None or not finding.cause.endswith("it wrote nothing"):
        return finding
    return replace(finding, cause=f"{finding.cause}; the last step seen on this node was {step}")


class Explainer:
    """For one attempt; evidence names files relative to `run_folder`. `kept` is the log in which a reader of the run folder finds
    the rank's lines, where they are merged."""

    def __init__(
        self, order: Order, logs: NodeFolder, launcher: Direct, attempt: int, run_folder: str, kept: str = "",
        no_gpu: bool = False, identity: Optional[Identity] = None,
    ) -> None:  # fmt: skip
        self.order, self.logs, self.launcher, self.attempt = order, logs, launcher, attempt
        self.run_folder, self.kept, self.no_gpu, self.identity = run_folder, kept, no_gpu, identity or Identity()
        self._oom_kills = oom_kills(LiveHost())  # before the ranks start

    def explain(self, end: End, by_us: bool) -> Finding:
        from drumbeat.logs.exits import explain_exit  # here and below: the agent of a healthy run starts without it
        from drumbeat.logs.place_advice import for_place
        from drumbeat.logs.without_gpu import quoted as without_gpu

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
            before = _raised_before(found, lines)
            if before:
                first = explain_exit(1, None, before, command, killed_by_us=False)
                found = found if first.code in CONSEQUENCES else first
        if any(each.text in line for line in map(shown, printed) for each in found.evidence):
            log = out
        file = os.path.relpath(self.kept or log, self.run_folder)
        if self.no_gpu:
            found = without_gpu(found)
        found = for_place(found, self.identity)
        behind = _behind(found.seen, {"err": lines, "out": printed})
        steps = any(read_line(line) for line in behind)
        if steps and end.exit_code is not None and found.confidence == CERTAIN:
            found = replace(found, confidence=LIKELY)  # the line did not end the rank, which chose its exit code itself
        place = f"the last lines of {file}"
        if steps or len(behind) > _LAST:
            place = f"{file}, {len(behind)} lines before its end{', with steps behind it' if steps else ''}"
        seen = tuple(place if _STREAM.match(each) else each for each in found.seen)
        evidence = tuple(replace(each, file=each.file or file) for each in found.evidence)
        return replace(found, evidence=evidence, seen=tuple(dict.fromkeys(seen)))

    def unread(self, end: End, by_us: bool, seconds: float) -> Finding:
        """By the exit status alone, where the logs could not be read."""
        from drumbeat.logs.exits import explain_exit

        found = explain_exit(end.exit_code, end.signal, (), self.order.command, by_us and end.signal == signal.SIGKILL)
        if found.severity != ERROR:
            return found
        why = f"not known: the rank's log could not be read within {seconds:g} s"
        return replace(found, cause=why, fix=f"look at the file system of {self.logs.path} on this node")

    def doubt(self, end: End, every_rank: bool) -> Optional[Finding]:
        """Why a command that ended with 0 may have failed all the same: its exit code can be that of a pipe into tee, or of a
        last echo. None if what its processes wrote shows no failure, or if the work went on after it. Ranks that are known to
        have ended with 0 have caught what they wrote."""
        streams, well = self._streams(end, every_rank), self.launcher.ranks_ended_well
        found = last_failure([each for each in streams if each.rank is None or not well], self.order.command)
        if found:
            return self._quoted(*found)
        return self.caught(end, every_rank) if well else None

    def caught(self, end: End, every_rank: bool) -> Optional[Finding]:
        """The error that a program wrote last before it ended with 0 by itself, in its own words: it caught its own failure.
        None if it wrote none, or if its work went on after it."""
        streams = self._streams(end, every_rank)
        if not any(may_hold_error(each.lines) for each in streams):
            return None  # most programs: what follows reads all rules
        found = last_failure(streams, self.order.command) or last_error(streams)
        if found is None or wrote_on(streams, found[1], end.at):
            return None
        quoted = self._quoted(*found)
        return replace(quoted, code=CAUGHT, title=quoted.evidence[0].text[:200])

    def _streams(self, end: End, every_rank: bool) -> List[Stream]:
        """What the rank has written; of a node's command, what all its ranks and the command itself have."""
        ranks = sorted(self.logs.ranks(self.attempt)) if every_rank else [end.rank]
        logs: List[Tuple[Optional[int], str, str]]
        logs = [(rank, name, self.logs.log(self.attempt, rank, name)) for rank in ranks for name in ("out", "err")]
        if every_rank:
            own = {name: self.launcher.log(self.attempt, end.rank, name) for name in ("out", "err")}
            known = {path for _, _, path in logs}
            logs += [(None, name, path) for name, path in own.items() if path not in known]
        return [read_stream(rank, name, path) for rank, name, path in logs]

    def _quoted(self, finding: Finding, stream: Stream) -> Finding:
        file = os.path.relpath(self.kept or stream.path, self.run_folder)
        evidence = (Evidence(finding.evidence[0].text, file),)
        seen = (f"the last lines of {file}",)
        quoted = replace(finding, severity=WARNING, confidence=LIKELY, evidence=evidence, seen=seen)
        if self.no_gpu:
            from drumbeat.logs.without_gpu import quoted as without_gpu

            quoted = without_gpu(quoted)
        return quoted

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


def _raised_before(found: Finding, lines: Sequence[str]) -> Sequence[str]:
    """The lines up to the exception that had ended a rank's work before it waited for the others at its exit, in vain."""
    place = raised_at(lines, _LAST) if found.code in CONSEQUENCES and found.evidence else None
    if place is None:
        return ()
    later = any(found.evidence[0].text in shown(line) for line in lines[place + 1 :])
    return lines[: place + 1] if later else ()


def _behind(seen: Sequence[str], tails: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """The lines behind the last one of a stream that was seen."""
    places = [(match[1], int(match[2])) for match in map(_STREAM.match, seen) if match]
    return min((tails[stream][number:] for stream, number in places), key=len, default=())
