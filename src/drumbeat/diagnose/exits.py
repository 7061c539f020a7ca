"""Why did one rank end? For the agent, at every rank's end: exit code, signal and the last lines of its stderr.

The codes are stable: the agent's decisions (restart, next port, first failure) are made by them.
"""

from __future__ import annotations

import re
import signal as signals
from typing import List, Optional, Sequence, Tuple

from drumbeat.diagnose.lines import clean
from drumbeat.diagnose.rulebook import CAUSE, CONSEQUENCE, SYMPTOM, Match, rulebook
from drumbeat.finding import ERROR, INFO, OK, Evidence, Finding

FINISHED, STOPPED, PEER_LOST = "finished", "stopped", "peer-lost"

# Ends that tell nothing about the cause: another rank, or we, came first.
CONSEQUENCES = frozenset({STOPPED, PEER_LOST})

_LOST = "find the rank that stopped first; its own log has the cause"
_EXCEPTION = re.compile(r"^(?P<name>(?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?:: (?P<message>.*))?$")
_EXCEPTION_NAME = re.compile(r"(?:Error|Exception|Warning|Exit|Interrupt|Timeout|Failure|Failed|Iteration)\w*$")

_BY_SIGNAL = {
    signals.SIGSEGV: "segfault",
    signals.SIGBUS: "bus-error",
    signals.SIGABRT: "aborted",
}


def explain_exit(
    exit_code: Optional[int],
    signal: Optional[int],
    stderr_tail: Sequence[str],
    command: Sequence[str],
    killed_by_us: bool,
    oom_kill_seen: bool = False,
) -> Finding:
    """One rank's end as a Finding. `signal` is set when it died from one; a shell's 128+N counts as that too."""
    signal, exit_code = _ending(signal, exit_code)
    if exit_code == 0 and signal is None:
        return Finding(FINISHED, OK, "finished")
    matches = _matches(stderr_tail)
    cause = _first(matches, CAUSE)
    if killed_by_us and (cause is None or signal in (signals.SIGTERM, signals.SIGKILL)):
        return Finding(STOPPED, INFO, "ended by drumbeat", "another rank, a limit or the user had ended the run")
    if oom_kill_seen and signal == signals.SIGKILL:
        return _from_rule("oom-kill", _evidence(matches, "oom-kill"))
    if cause:
        return _finding(cause)
    lost = _first(matches, CONSEQUENCE)
    if lost and signal not in _BY_SIGNAL and not _own_exception(stderr_tail, lost[1]):
        return Finding(PEER_LOST, ERROR, lost[0].title, lost[0].rule.cause, _LOST, (lost[1],))
    if signal is not None:
        return _by_signal(signal, stderr_tail, matches)
    return _by_code(exit_code, stderr_tail, command, matches)


def last_exception(lines: Sequence[str]) -> Optional[Tuple[str, str, int]]:
    """Name, message and index of the last Python exception line."""
    for index in range(len(lines) - 1, -1, -1):
        match = _EXCEPTION.match(clean(lines[index]).text)
        if match and (_EXCEPTION_NAME.search(match["name"]) or _after_traceback(lines, index)):
            return match["name"], (match["message"] or "").strip(), index
    return None


Found = Tuple[Match, Evidence]


def _ending(signal: Optional[int], exit_code: Optional[int]) -> Tuple[Optional[int], Optional[int]]:
    if signal is None and exit_code is not None and 128 < exit_code < 128 + 65:
        return exit_code - 128, None
    return signal, exit_code


def _matches(lines: Sequence[str]) -> List[Found]:
    """Matches in the order of the lines; rules that need the rest of the job's log are left to `diagnose`."""
    book = rulebook()
    found: List[Found] = []
    for raw in lines:
        text = clean(raw).text
        found += ((match, Evidence(text[:500])) for match in book.match(text) if not match.rule.conditional)
    return found


def _first(found: Sequence[Found], role: str) -> Optional[Found]:
    return next((item for item in found if item[0].rule.role == role and item[0].rule.severity == ERROR), None)


def _finding(found: Found) -> Finding:
    match, evidence = found
    return Finding(match.rule.code, ERROR, match.title, match.rule.cause, match.rule.fix, (evidence,))


def _from_rule(code: str, evidence: Tuple[Evidence, ...] = ()) -> Finding:
    rule = next(rule for rule in rulebook().rules if rule.code == code)
    return Finding(code, ERROR, Match(rule, {}).title, rule.cause, rule.fix, evidence)


def _evidence(found: Sequence[Found], code: str) -> Tuple[Evidence, ...]:
    return tuple(evidence for match, evidence in found if match.rule.code == code)[:1]


def _own_exception(lines: Sequence[str], lost: Evidence) -> bool:
    """Is there an exception that does not itself speak of the lost peer?"""
    last = last_exception(lines)
    if last is None:
        return False
    texts = [clean(line).text for line in lines]
    start = last[2]
    book = rulebook()
    roles = {match.rule.role for text in texts[start : start + 8] for match in book.match(text)}
    return CONSEQUENCE not in roles and not last[0].startswith(("torch.distributed", "DistBackendError"))


def _after_traceback(lines: Sequence[str], index: int) -> bool:
    return index > 0 and clean(lines[index - 1]).text.startswith("  ")


def _by_signal(signal: int, lines: Sequence[str], found: Sequence[Found]) -> Finding:
    name = signals.Signals(signal).name if signal in signals.Signals._value2member_map_ else f"signal {signal}"
    evidence = _tail_evidence(lines)
    if signal in _BY_SIGNAL:
        code = _BY_SIGNAL[signals.Signals(signal)]
        return _from_rule(code, _evidence(found, code) or evidence)
    if signal == signals.SIGKILL:
        return Finding(
            "killed",
            ERROR,
            "killed from outside (SIGKILL)",
            "not known: the kernel's out-of-memory killer, the scheduler or a person; nothing here says which",
            "dmesg on that host, or sacct -j JOB -o State,MaxRSS; watch the host memory",
            evidence,
        )
    if signal == signals.SIGINT:
        return Finding(
            "interrupted", ERROR, "interrupted (SIGINT)", "Ctrl-C, or scancel with that signal", "", evidence
        )
    if signal in (signals.SIGTERM, signals.SIGHUP, signals.SIGUSR1, signals.SIGUSR2, signals.SIGXCPU):
        limit = next((item for item in found if item[0].rule.code == "time-limit"), None)
        if limit or signal == signals.SIGXCPU:
            return _from_rule("time-limit", (limit[1],) if limit else evidence)
        return Finding(
            "terminated",
            ERROR,
            f"ended from outside ({name})",
            "the scheduler, a launcher or a person sent it; nothing here says which",
            "sacct -j JOB -o State,Reason says whether it was a limit, a preemption or scancel",
            evidence,
        )
    return Finding("signal", ERROR, f"died from {name}", "", "", evidence)


def _by_code(exit_code: Optional[int], lines: Sequence[str], command: Sequence[str], found: Sequence[Found]) -> Finding:
    name = command[0] if command else "the command"
    if exit_code == 127:
        finding = _from_rule("command-not-found", _tail_evidence(lines))
        return Finding(finding.code, ERROR, f"{name}: not found", finding.cause, finding.fix, finding.evidence)
    if exit_code == 126:
        finding = _from_rule("not-executable", _tail_evidence(lines))
        return Finding(finding.code, ERROR, f"{name}: not executable", finding.cause, finding.fix, finding.evidence)
    symptom = _first(found, SYMPTOM)
    exception = last_exception(lines)
    if exception and (symptom is None or not exception[0].startswith("torch.distributed")):
        name, message, index = exception
        title = f"{name}: {message}" if message else name
        where = _raised_at(lines, index)
        return Finding("exception", ERROR, title[:300], where, "", (Evidence(clean(lines[index]).text[:500]),))
    if symptom:
        return _finding(symptom)
    if exit_code == 124:
        return _from_rule("time-limit", _tail_evidence(lines))
    title = f"exit code {exit_code}" if exit_code is not None else "ended, nobody knows how"
    return Finding("exit-code", ERROR, title, "not known: nothing it wrote says why", "", _tail_evidence(lines))


def _raised_at(lines: Sequence[str], index: int) -> str:
    """`raised at FILE:LINE`, the frame nearest to the exception."""
    for earlier in range(index - 1, max(-1, index - 12), -1):
        match = re.match(r'\s+File "([^"]+)", line (\d+)', clean(lines[earlier]).text)
        if match:
            return f"raised at {match[1]}:{match[2]}"
    return ""


def _tail_evidence(lines: Sequence[str]) -> Tuple[Evidence, ...]:
    texts = [text for text in (clean(line).text.rstrip() for line in lines[-20:]) if text.strip()]
    return tuple(Evidence(text[:500]) for text in texts[-1:])
