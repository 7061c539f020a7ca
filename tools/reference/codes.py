"""docs/codes.md, every code of a diagnosis, from the rules."""

from __future__ import annotations

import re
from typing import Dict, List, Tuple

from drumbeat.findings.model import ERROR
from drumbeat.logs.meaning.rules import CAUSE, CONSEQUENCE, NOISE, NOTE, REPORT, SYMPTOM, Rule, rulebook

_INTRO = """\
<!-- Made by: python -m tools.reference. The words are in src/drumbeat/logs/rules and tools/reference/codes.py. -->
# Codes of a diagnosis

Every code that `drumbeat diagnose` can give. Codes are stable; titles may change. Where several rules share a code, the table
has each title once, with the cause of the first; `diagnose` prints the cause of the rule that matched your line.
"""

# What no rule gives, because it does not rest on one line. A test compares this with the source.
_ANSWERS = {
    "none": "no failure was read",
    "unknown": "something failed, or nothing here is about a run; no line names the cause",
    "exception": "an uncaught exception that no rule knows, in its own words",
    "collective-desync": "ranks stand at different collectives (watchdog or flight recorder)",
    "init-incomplete": "a communicator was begun and never complete",
    "lone-worlds": "several processes each believe that they are the whole world",
    "nan-loss": "the training loss became NaN and stayed so, and nothing else failed",
    "rank-absent": "a rank did not come to a collective that the others have called",
    "rank-behind": "a rank is behind the others, by the flight recorder",
    "ranks-missing": "ranks of the world that never came to a communicator",
}
_OF_A_RUN = {
    "cancelled": "the run was cancelled",
    "early-exit": "a rank ended with 0 while the others went on",
    "exit-code": "a rank ended with this exit code, and its last lines name no cause",
    "guard-lost": "the guard of the lead's agent was killed",
    "hang-*": "a rank stands still; the word behind the dash says in what",
    "interrupted": "a rank ended by SIGINT",
    "killed": "a rank ended by SIGKILL, not sent by drumbeat",
    "launcher-refused": "a launcher in the script cannot be run by drumbeat as it stands",
    "lead-hung": "the lead's agent stopped answering",
    "lead-lost": "the lead's agent ended before the run",
    "muster-timeout": "nodes did not come in time",
    "no-rank-started": "the launcher in the script started no rank",
    "node-lost": "a node's agent, its connection or the node itself was lost",
    "node-refused": "a node could not take part",
    "peer-lost": "a rank ended because another one had",
    "preempted": "the run was stopped, and its ranks asked to be started again (exit code 75)",
    "process-stuck": "a process could not be ended",
    "rdma-library-differs": "an RDMA library in the image is not the host's",
    "setup-failed": "the job's setup failed before the command was started",
    "signal": "a rank died from another signal",
    "stopped": "ended by drumbeat: another rank, a limit or the user had ended the run",
    "storage": "the run folder could not be written any more",
    "terminated": "a rank was ended from outside (SIGTERM, SIGHUP, SIGUSR1, SIGUSR2)",
    "time-limit": "the run reached its time limit",
    "workdir-missing": "the working directory of a rank cannot be used",
}
_BESIDE = {
    "child-failed": "a launcher's table says who failed, and not why",
    "earlier-attempt": "an attempt before the last one failed",
    "finished": "a rank ended with 0",
    "logged-error": "the log ends with a line that its logger calls an error and no rule knows",
    "settings-differ": "NCCL settings differ between processes",
    "steps-missing": "fewer steps than announced, or ranks that ended at different steps",
}

_KINDS = {
    CAUSE: "Causes",
    SYMPTOM: "Symptoms: the answer where no line names a cause",
    CONSEQUENCE: "Consequences: `peer-lost` is the answer where nothing else is in the log, the others are shown beside one",
    REPORT: "Reports of launchers: shown beside an answer; alone they are `unknown`",
    NOTE: "Notes: nothing fails because of them",
    NOISE: "What healthy runs print, too",
}


def page() -> str:
    lines = [_INTRO]
    lines += _table("Answers that rest on more than one line", sorted(_ANSWERS.items()))
    kinds: Dict[str, Dict[str, List[Rule]]] = {kind: {} for kind in _KINDS}
    for rule in rulebook().rules:
        kinds[_kind(rule)].setdefault(rule.code, []).append(rule)
    for kind, title in _KINDS.items():
        lines += _table(title, [(code, _meaning(rules)) for code, rules in sorted(kinds[kind].items())])
    lines += _table("Ends that a run folder records", sorted(_OF_A_RUN.items()))
    lines += _table("Findings beside an answer", sorted(_BESIDE.items()))
    return "\n".join(lines)


def _kind(rule: Rule) -> str:
    return NOTE if rule.severity != ERROR and rule.role in (CAUSE, SYMPTOM) else rule.role


def _meaning(rules: List[Rule]) -> str:
    titles = dict.fromkeys(_general(rule.title) for rule in rules)
    named = [title for title in titles if title != "..."]
    return f"{'; or '.join(named)}: {_general(rules[0].cause)}" if named else _general(rules[0].cause)


def _general(words: str) -> str:
    """Without what only one log fills in."""
    whole = re.sub(r"\[([^\[\]]*\{\w+\}[^\[\]]*)\]", r"\1", words)
    return re.sub(r"(?<!=) ?\{\w+\}", " ...", re.sub(r"=\{\w+\}", "=...", whole)).strip()


def _table(title: str, rows: List[Tuple[str, str]]) -> List[str]:
    table = [f"| `{code}` | {meaning.replace('|', chr(92) + '|')} |" for code, meaning in rows]
    return [f"## {title}\n", "| code | means |", "|---|---|", *table, ""]
