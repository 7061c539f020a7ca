"""Comparison of a finished job file with its script: both are read, and all that reaches a rank is set side by side."""

from __future__ import annotations

import re
from typing import Dict, List, Mapping, NamedTuple, Optional

from drumbeat.commands.interpret import Shell, Variable
from drumbeat.commands.launch import find_launcher
from drumbeat.commands.values import MARK, SUBMIT, Marks, Unknown, whole_marks
from drumbeat.convert.draft import Difference
from drumbeat.convert.job_shell import JobShell
from drumbeat.convert.launch import AS_TEXT, OURS, PLACE, Launch
from drumbeat.jobfile.job import Job
from drumbeat.plan.argv import rank_argv

_DOLLAR = re.compile(r"\$(?:(\$)|\{(\w+)\}|(\w+))")
_UNSET = "not set"


class Reached(NamedTuple):
    """Start of a rank: its words, variables and directory. Values may hold marks."""

    words: List[str]
    environment: Dict[str, str]
    cwd: str


def from_script(launch: Launch) -> Reached:
    shell = launch.shell
    given = {name: str(each.value) for name, each in _exported(shell.variables).items() if each.event >= 0}
    return Reached(list(launch.in_rank) or launch.words, given, launch.workdir or shell.cwd)


def from_job(job: Job, marks: Marks, launch: Launch, known: Mapping[str, str]) -> Reached:
    """Read the job file as drumbeat will: `on-start` where the batch script runs, `env`, `setup`, then the command."""
    workdir = absolute(_expanded(job.workdir or "", marks), marks)
    batch = JobShell(known, lambda words: False, (), marks, read=launch.shell.read)
    batch.cwd = workdir
    batch.run(job.on_start)
    shell = JobShell(launch.shell.known, lambda words: False, (), marks, True, launch.shell.read)
    shell.cwd, shell.foreign = workdir, launch.shell.foreign
    shell.variables = _handed_on(batch, launch)
    for name, value in job.env.items():
        shell.variables[name] = Variable(_expanded(value, marks) if value is not None else f"pass {name}", True)
    shell.run(job.setup)
    words, variables = [_expanded(word, marks) for word in job.command], shell.variables
    if launch.whole is not None:
        inner = JobShell(launch.shell.known, lambda words: False, (), marks, True)
        inner.variables = _handed_on(shell, launch)
        inner.run(re.sub(rf'eval "\${AS_TEXT}\w+"; ', "", words[2][: -len(launch.words[2])]))
        words, variables = launch.words, inner.variables
    elif words[:2] == ["bash", "-c"] and len(words) == 3 and not _same(marks, words[2:], launch.words[2:3]):
        inner = JobShell(launch.shell.known, lambda words: True, (), marks, task=True)
        inner.variables = _handed_on(shell, launch)
        inner.cwd, inner.foreign = shell.cwd, shell.foreign
        inner.run(re.sub(rf'eval "\${AS_TEXT}\w+"; ', "", words[2]))  # they are there
        if inner.started:
            words, variables = inner.started[-1].words, inner.started[-1].variables
    found = find_launcher(words) if launch.in_rank else None
    words = [*found.kept, *rank_argv(found, "python")] if found else words
    return Reached(words, {name: str(each.value) for name, each in _exported(variables).items()}, shell.cwd)


def absolute(folder: str, marks: Marks) -> str:
    """Return a folder that is written down relative to where the job is submitted."""
    return f"{_expanded('$PWD', marks)}/{folder}" if folder and folder[0] != "/" and not MARK.match(folder) else folder


def _handed_on(shell: Shell, launch: Launch) -> Dict[str, Variable]:
    as_text = {name: each for name, each in shell.variables.items() if name in launch.as_text}
    return {name: each._replace(event=-1) for name, each in {**_exported(shell.variables), **as_text}.items()}


def _exported(variables: Mapping[str, Variable]) -> Dict[str, Variable]:
    """Return what a shell hands on: no lists."""
    return {name: each for name, each in variables.items() if each.exported and isinstance(each.value, str)}


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
    def value(unknown: Unknown) -> str:  # what drumbeat works out counts by its name
        return unknown.text if unknown.text[2:-1] in OURS - {PLACE} else unknown.made or unknown.text

    def shown(text: Optional[str]) -> str:
        return _UNSET if text is None else marks.shown(whole_marks(text), value)

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
