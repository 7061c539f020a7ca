"""Comparison of a finished job file with its script: both are read, and all that reaches a rank is set side by side."""

from __future__ import annotations

import re
from typing import Dict, List, NamedTuple, Optional

from drumbeat.commands.interpret import Variable
from drumbeat.commands.values import MARK, SUBMIT, Marks, Unknown, whole_marks
from drumbeat.convert.draft import Difference
from drumbeat.convert.job_shell import JobShell
from drumbeat.convert.launch import OURS, Launch
from drumbeat.jobfile.job import Job

_DOLLAR = re.compile(r"\$(?:(\$)|\{(\w+)\}|(\w+))")
_UNSET = "not set"


class Reached(NamedTuple):
    """Start of a rank: its words, variables and directory. Values may hold marks."""

    words: List[str]
    environment: Dict[str, str]
    cwd: str


def from_script(launch: Launch) -> Reached:
    shell = launch.shell
    given = {name: each.value for name, each in shell.variables.items() if each.exported and each.event >= 0}
    texts = {name: value for name, value in given.items() if isinstance(value, str) and name not in launch.also}
    return Reached(launch.words, texts, launch.workdir or shell.cwd)


def from_job(job: Job, marks: Marks, launch: Launch) -> Reached:
    """Read the job file as drumbeat will: `env`, then `setup`, then the command."""
    shell = JobShell(launch.shell.known, lambda words: True, (), marks, True, launch.shell.read)
    shell.cwd = _expanded(job.workdir or "", marks)
    if shell.cwd and not shell.cwd.startswith("/") and not MARK.match(shell.cwd):
        shell.cwd = _expanded("$PWD/", marks) + shell.cwd
    shell.foreign = launch.shell.foreign
    for name, value in job.env.items():
        shell.variables[name] = Variable(_expanded(value, marks) if value is not None else f"pass {name}", True, 0)
    shell.wanted = lambda words: False
    shell.run(job.setup)
    words = [_expanded(word, marks) for word in job.command]
    if words[:2] == ["bash", "-c"] and len(words) == 3 and not _same(marks, words[2:], launch.words[2:3]):
        inner = JobShell(launch.shell.known, lambda words: True, (), marks, task=True)
        inner.variables = {name: each for name, each in shell.variables.items() if each.exported}
        inner.cwd, inner.foreign = shell.cwd, shell.foreign
        inner.run(words[2])
        words = inner.started[-1].words if inner.started else words
    exported = {name: each.value for name, each in shell.variables.items() if each.exported}
    return Reached(words, {name: value for name, value in exported.items() if isinstance(value, str)}, shell.cwd)


def _same(marks: Marks, some: List[str], others: List[str]) -> bool:
    return [marks.shown(each) for each in some] == [marks.shown(each) for each in others]


def _expanded(text: str, marks: Marks) -> str:
    def value(found: re.Match[str]) -> str:
        return (
            "$"
            if found[1]
            else marks.mark(Unknown(f"${{{found[2] or found[3]}}}", SUBMIT, frozenset((found[2] or found[3],))))
        )

    return _DOLLAR.sub(value, text)


def differences(script: Reached, job: Reached, marks: Marks, secrets: Dict[str, str]) -> List[Difference]:
    def shown(text: Optional[str]) -> str:
        return _UNSET if text is None else marks.resolved(whole_marks(text))

    found = []
    for place in range(max(len(script.words), len(job.words))):
        one = shown(script.words[place]) if place < len(script.words) else _UNSET
        other = shown(job.words[place]) if place < len(job.words) else _UNSET
        if one != other:
            found.append(Difference(f"argument {place}", one, other))
    for name in sorted({*script.environment, *job.environment} - OURS):
        one, other = shown(script.environment.get(name)), shown(job.environment.get(name))
        if one != other and secrets.get(name) != "pass":
            found.append(
                Difference(f"env {name}", one, other, "only a variable of the shell there" if one == _UNSET else "")
            )
    folders = [re.sub(r"(?:^|/)\.?$", "", shown(each)) or "${PWD}" for each in (script.cwd, job.cwd)]
    if folders[0] != folders[1]:
        found.append(Difference("working directory", *folders))
    return found
