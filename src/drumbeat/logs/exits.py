"""Judge why a rank or a run ended: live, for the agent at every rank's end, and offline.

The ranks' output (the last lines of both streams, including torchrun's own table) is read by the same reader as `drumbeat
diagnose`; exit codes and signals fill the gaps. The codes are stable: the agent bases its decisions on them (restart, next
port, first failure).
"""

from __future__ import annotations

import re
import signal as signals
from dataclasses import replace
from typing import Dict, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import (
    CERTAIN,
    ERROR,
    LIKELY,
    PEER_LOST,
    STOPPED,
    UNKNOWN,
    Evidence,
    Finding,
    clipped,
)
from drumbeat.logs.failure import NO_FAILURE, NOT_KNOWN, WORDS, Failure
from drumbeat.logs.meaning.rules import CAUSE, CONSEQUENCE, Match, rule_of_code, rulebook
from drumbeat.logs.meaning.senses import CODE_OF_SIGNAL
from drumbeat.logs.read.launchers import FirstFailure
from drumbeat.logs.read.prefixes import clean
from drumbeat.logs.reader import Reader
from drumbeat.machine.model import Identity
from drumbeat.metrics.printed import read_line
from drumbeat.plan.argv import SETUP_FAILED

find = Catalog("logs")
FINISHED = "finished"

# Ends that say nothing about the cause: another rank failed first, or drumbeat ended this one.
CONSEQUENCES = frozenset({STOPPED, PEER_LOST})

_SETUP_FAILED = re.compile(rf"{SETUP_FAILED} \(exit (\d+)\)$")
_OF_SETUP = re.compile(r"^(?:setup|bash|/bin/bash): line \d+: ")
_NO_COMMAND = re.compile(r"(\S+): command not found$")
MAX_TAIL = 2_000  # lines of each stream that are read
_NO_SCRIPT = re.compile(r"[Cc]an't open file '?(/[^':]+)'?: \[Errno 2\]")
# Ranks reported by torch.multiprocessing.spawn are local ranks.
_SPAWNED = re.compile(
    r"ProcessExitedException: process (\d+) terminated with (?:signal (SIG[A-Z0-9]+)|exit code (\d+))"
)
_OF_TABLE = re.compile(r"\s*(?:exitcode|traceback) {1,4}: ")  # a line of torchrun's table
_LOST = "find the rank that stopped first; its own log has the cause"
_TELLING = re.compile(
    r"(?i)\b(?:error|fail|refus|cannot|can't|could not|must|invalid|unknown|not (?:found|allowed|supported))"
)
_BY_SIGNAL = {signals.SIGSEGV, signals.SIGBUS, signals.SIGABRT}  # whose rules say all that is known


@dataclass(frozen=True)
class RankEnd:
    """One rank's end and the last lines that it wrote."""

    rank: Optional[int]  # None for a launcher that starts ranks itself: its own table names them
    exit_code: Optional[int]
    signal: Optional[int] = None
    stdout: Sequence[str] = ()
    stderr: Sequence[str] = ()
    host: str = ""
    time: Optional[float] = None  # time of the end, by one clock for all ranks
    killed_by_us: bool = False
    oom_kill_seen: bool = False
    one_process: bool = False  # only its main process has written these lines

    @property
    def failed(self) -> bool:
        return bool(self.exit_code or self.signal) and not self.killed_by_us


def explain_run(ends: Sequence[RankEnd], command: Sequence[str] = ()) -> Failure:
    """Find what failed first among all ranks, from all their streams and exit codes."""
    failed = sorted((end for end in ends if end.failed), key=lambda end: (end.time is None, end.time or 0.0))
    failure = _read(ends, failed[0] if failed else None)
    if not failed or failure.answer not in (NO_FAILURE, NOT_KNOWN):
        return failure
    end = failed[0]
    finding = explain_exit(
        end.exit_code, end.signal, end.stderr, command, end.killed_by_us, end.oom_kill_seen, end.stdout
    )
    finding = replace(finding, rank=end.rank, host=end.host or None)
    return replace(
        failure, answer=finding.code, confidence=finding.confidence, finding=finding, why_first="ended first"
    )


def explain_exit(
    exit_code: Optional[int],
    signal: Optional[int],
    stderr_tail: Sequence[str],
    command: Sequence[str],
    killed_by_us: bool,
    oom_kill_seen: bool = False,
    stdout_tail: Sequence[str] = (),
    one_process: bool = True,
) -> Finding:
    """Explain one rank's end as a Finding. `signal` is set when a signal killed it. Shells and containers report signal N as
    exit code 128+N, but a program may choose such a code itself, so the code never proves the signal."""
    given, signal = signal, signal or _signal_of_code(exit_code)
    if exit_code == 0 and signal is None:
        return find("finished")
    if signal is None and not killed_by_us:
        setup = _failed_setup(stderr_tail)
        if setup is not None:
            return setup
    end = RankEnd(None, exit_code, given, stdout_tail, stderr_tail, one_process=one_process)
    failure = _read([end], end)
    finding, role = failure.finding, _role(failure)
    ended_itself = signal not in (signals.SIGTERM, signals.SIGKILL) and role in (CAUSE, CONSEQUENCE)
    if killed_by_us and not ended_itself:
        return find("stopped")
    if oom_kill_seen and signal == signals.SIGKILL:
        shown = finding.evidence if finding and finding.code == "oom-kill" else ()
        seen = ("the kernel's count of out-of-memory kills",)
        sure = CERTAIN if given else LIKELY
        return replace(_from_rule("oom-kill", shown), seen=seen, confidence=sure)
    in_table = finding is not None and any(_OF_TABLE.match(each.text) for each in finding.evidence)
    if finding is not None and in_table and one_process and signal is None:
        return _own(_in_a_table(finding, exit_code))
    if finding is not None and role == CAUSE:
        if failure.why_first == WORDS and signal is None and exit_code is not None:
            if exit_code in (124, 126, 127):  # these say more than a program's words
                return _by_code(exit_code, [*stdout_tail, *stderr_tail], command, None)
            finding = replace(finding, title=f"exit code {exit_code}: {finding.title}")
        return _own(_missing_script(finding, command))
    if finding is not None and role == CONSEQUENCE and signal not in _BY_SIGNAL:
        return _own(replace(finding, code=PEER_LOST, severity=ERROR, fix=_LOST))
    lines = [*stdout_tail, *stderr_tail]
    if given:
        return _by_signal(given, lines, finding)
    if signal is not None:
        return _like_signal(signal, lines, finding)
    return _by_code(exit_code, lines, command, finding if role else None)


def _failed_setup(lines: Sequence[str]) -> Optional[Finding]:
    """Return a finding if the job's setup failed before the command started: the shell trap around it says so in the last
    line."""
    texts = [text for text in (clean(line).text.strip() for line in lines) if text]
    match = _SETUP_FAILED.fullmatch(texts[-1]) if texts else None
    if match is None:
        return None
    words = texts[-2] if len(texts) > 1 else ""
    said = _OF_SETUP.sub("", words)
    missing = _NO_COMMAND.search(said)
    return find(
        "setup-failed",
        "command" if missing else "",
        code=match[1],
        said=clipped(said, 200),
        command=missing[1] if missing else "",
        why="" if said else "unknown: it wrote nothing",
        evidence=[words or texts[-1]],
        seen=(f"setup ended with exit code {match[1]}",),
    )


def _in_a_table(finding: Finding, exit_code: Optional[int]) -> Finding:
    """Report the exit code of a rank that printed a launcher's table: the table is about other processes."""
    title = f"exit code {exit_code}; a launcher's table that it printed says: {finding.title}"
    cause = "not known: the table is about another process, which it may have started or only quoted"
    seen = (f"exit code {exit_code}", *finding.seen)
    return replace(
        finding, code="exit-code", title=title, cause=cause, fix="", confidence=UNKNOWN, seen=seen, rank=None
    )


def _missing_script(finding: Finding, command: Sequence[str]) -> Finding:
    """Name a missing script as the command does: Python's message has only the full path."""
    match = _NO_SCRIPT.search(finding.evidence[0].text) if finding.evidence else None
    script = match and next((word for word in command if word and match[1].endswith(f"/{word}")), None)
    if not match or not script:
        return finding
    title = f"no such script: {script} (workdir {match[1][: -len(script) - 1]})"
    return replace(finding, title=title, fix="check the name, and workdir: in the job file")


def _read(ends: Sequence[RankEnd], first: Optional[RankEnd]) -> Failure:
    reader = Reader()
    reader.of_a_run = reader.work.seen = True  # how the ranks ended is known
    for number, end in enumerate(ends):
        for stream, tail in (("stderr", end.stderr), ("stdout", end.stdout)):
            name = f"{stream} of {f'process {number}' if end.rank is None else f'rank {end.rank}'}"
            reader.name_file(name, end.rank, end.host or None)
            if end.one_process:
                reader.of_one_process(name)
            reader.feed_lines(name, 1, [line.encode("utf-8", "replace") for line in tail[-MAX_TAIL:]])
    if first is not None and reader.elastic.first is None:
        code = first.exit_code if first.exit_code is not None else -(first.signal or 0)
        where = Evidence("the rank that ended first")
        reader.elastic.first = FirstFailure(first.rank, first.host, code, where, "drumbeat")
    return reader.report().failure


def _role(failure: Failure) -> str:
    """Return cause, symptom or consequence; empty if the streams name nothing."""
    if failure.finding is None or failure.answer in (NO_FAILURE, NOT_KNOWN):
        return ""
    # An exception, which has no rule, is the rank's own.
    return next((rule.role for rule in rulebook().rules if rule.id == failure.rule), CAUSE)


def _own(finding: Finding) -> Finding:
    """Drop host and file, which the agent knows better. Keep the rank if the lines or torchrun's table name one."""
    return replace(finding, host=None, evidence=tuple(Evidence(item.text) for item in finding.evidence))


def _signal_of_code(exit_code: Optional[int]) -> Optional[int]:
    """Return the signal that shells and containers report with this exit code."""
    return exit_code - 128 if exit_code is not None and 128 < exit_code < 128 + 65 else None


def _from_rule(code: str, evidence: Tuple[Evidence, ...] = ()) -> Finding:
    return Match(rule_of_code(code), {}).finding(tuple(Evidence(each.text) for each in evidence))


_SAYS_ALL: Dict[int, str] = {signals.SIGKILL: "killed", signals.SIGINT: "interrupted", signals.SIGXCPU: "cpu-limit"}


def _by_signal(signal: int, lines: Sequence[str], known: Optional[Finding]) -> Finding:
    name = _signal_name(signal)
    evidence = _last_words(lines)
    seen = (f"the process ended by {name}",)
    if signal in _BY_SIGNAL:
        code = CODE_OF_SIGNAL[signals.Signals(signal)]
        if known is not None and known.code == code:
            return replace(_from_rule(code, known.evidence), cause=known.cause, fix=known.fix, seen=seen)
        return replace(_from_rule(code, evidence), seen=seen)
    if signal in _SAYS_ALL:
        return find(_SAYS_ALL[signal], evidence=evidence, seen=seen)
    if signal in (signals.SIGTERM, signals.SIGHUP, signals.SIGUSR1, signals.SIGUSR2):
        if known is not None and known.code == "time-limit":
            return replace(_from_rule("time-limit", known.evidence), seen=seen)
        return find("terminated", signal=name, evidence=evidence, seen=seen)
    return find("signal", signal=name, evidence=evidence, seen=seen)


def _like_signal(signal: int, lines: Sequence[str], known: Optional[Finding]) -> Finding:
    """Judge an exit code that looks like a signal's when no signal was seen; what the streams say counts for more."""
    finding = _by_signal(signal, lines, known)
    if known is not None and known.code == finding.code:
        return _own(known)
    code, name = 128 + signal, _signal_name(signal)
    title = f"exit code {code}, which shells and containers use for {name}"
    cause = f"not known: {name} to a process of the command, or a code that the program chose itself"
    return replace(finding, title=title, cause=cause, confidence=LIKELY, seen=(f"exit code {code}",))


def _signal_name(signal: int) -> str:
    return signals.Signals(signal).name if signal in signals.Signals._value2member_map_ else f"signal {signal}"


def _by_code(
    exit_code: Optional[int], lines: Sequence[str], command: Sequence[str], known: Optional[Finding]
) -> Finding:
    evidence = _last_words(lines)
    seen = (f"exit code {exit_code}",) if exit_code is not None else ()
    if exit_code in (126, 127):
        finding = _from_rule("command-not-found" if exit_code == 127 else "not-executable", evidence)
        title = f"{command[0] if command else 'the command'}: {'not found' if exit_code == 127 else 'not executable'}"
        return replace(finding, title=title, seen=seen)
    spawned = _SPAWNED.search(evidence[-1].text) if evidence else None
    if known is not None and not (spawned and known.evidence[-1:] and known.evidence[-1].text == evidence[-1].text):
        return _own(known)
    if exit_code == 124:
        return replace(_from_rule("time-limit", evidence), confidence=LIKELY, seen=seen)
    if exit_code is None:
        return find("exit-code", "none", evidence=evidence, confidence=UNKNOWN)
    if spawned:
        signal = getattr(signals, spawned[2] or "", None)
        how = _by_signal(signal, lines, None) if signal else None
        said = ("the last words of the program",)
        if how is None:
            which = {"process": spawned[1], "code": spawned[3]}
            return find("exit-code", "spawned", **which, evidence=evidence, confidence=UNKNOWN, seen=said)
        title = f"process {spawned[1]} that the program spawned: {how.title}"
        return replace(how, title=title, evidence=evidence, seen=said)
    if evidence:  # its own last words (a refusal, a setup script's message) are better than none
        words = evidence[-1].text[:200]
        return find("exit-code", "words", code=exit_code, words=words, evidence=evidence, confidence=UNKNOWN, seen=seen)
    silent = not any(line.strip() for line in lines)
    return find("exit-code", "silent" if silent else "", code=exit_code, confidence=UNKNOWN, seen=seen)


def _last_words(lines: Sequence[str]) -> Tuple[Evidence, ...]:
    """Return the last line, or a more telling one among the last few. Lines logged as info say nothing about an end, and an
    indented line (a hint, a quotation) continues the one above it."""
    # A step of training says nothing about the program's end.
    spoken = (line for line in lines[-20:] if not any("step" in record for record in read_line(line)))
    cleaned = [line.text for line in map(clean, spoken) if line.level != "I" and line.text.strip()]
    texts = [text.strip() for text in [text for text in cleaned if not text[:1].isspace()] or cleaned]
    telling = [text for text in texts[-8:] if _TELLING.search(text)]
    return tuple(Evidence(clipped(text, 500)) for text in (telling or texts)[-1:])


__all__ = ["CERTAIN", "CONSEQUENCES", "FINISHED", "RankEnd", "explain_exit", "explain_run"]


# Adapt advice to the place of the run: Slurm's tools do not help on a machine without Slurm.


# Words of a fix that name a Slurm tool -> the same advice in a pod, and on a machine without a scheduler.
_ELSEWHERE: Dict[str, Tuple[str, str]] = {
    "dmesg on that host, or sacct -j JOB -o State,MaxRSS": (
        "kubectl describe pod POD says whether it was memory (OOMKilled)",
        "dmesg on that host (it may need root) says whether it was memory",
    ),
    "sacct -j JOB -o State,Reason says whether it was a limit, a preemption or scancel": (
        "kubectl describe pod POD says whether it was evicted, preempted or deleted",
        "journalctl on that host may say who ended it",
    ),
}


def for_place(finding: Finding, identity: Identity) -> Finding:
    """Return the finding with a fix that suits the place described by `identity`."""
    started_by = (identity.scheduler, identity.batch)
    if "slurm" in started_by:
        return finding
    pod = any(name in ("kubernetes", "runai") for name in started_by)
    fix = finding.fix
    for words, (in_pod, alone) in _ELSEWHERE.items():
        fix = fix.replace(words, in_pod if pod else alone)
    return replace(finding, fix=fix)
