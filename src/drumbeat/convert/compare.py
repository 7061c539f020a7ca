"""Comparison of a finished job file with its script: what reaches a rank from each of them."""

from __future__ import annotations

import re
from typing import Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence

from drumbeat.base.problem import Problem
from drumbeat.commands.events import Started, Variable
from drumbeat.commands.interpret import Shell
from drumbeat.commands.launch import find_launcher, started_per_node
from drumbeat.commands.starts import starts_of
from drumbeat.commands.values import JOB, MARK, SUBMIT, Marks, Unknown, whole_marks
from drumbeat.convert.draft import Difference
from drumbeat.convert.job_shell import JobShell, by_own_name
from drumbeat.convert.launch import AS_TEXT, OURS, PLACE, Launch, starts_something
from drumbeat.jobfile.job import Job
from drumbeat.plan.argv import rank_argv

_DOLLAR = re.compile(r"\$(?:(\$)|\{(\w+)\}|(\w+))")
_UNSET = "not set"


class Reached(NamedTuple):
    """Start of a rank: its words, variables and directory. Values may hold marks."""

    words: List[str]
    environment: Dict[str, str]
    cwd: str
    before: Sequence[Sequence[str]] = ()  # words of what on-start starts


def from_script(launch: Launch) -> Reached:
    shell, events = launch.shell, launch.events

    def as_before(each: Variable) -> bool:  # `:=`, which has no line, leaves one from outside exported if it was
        return each.maybe and each.event < len(events) and not events[each.event].line

    own = {name: each for name, each in _exported(shell.variables).items() if each.event >= 0}
    given = {name: str(each.value) for name, each in own.items() if not as_before(each)}
    return Reached(list(launch.in_rank) or launch.words, given, launch.workdir or shell.cwd)


def from_job(job: Job, marks: Marks, launch: Launch, known: Mapping[str, str]) -> Reached:
    """Read the job file as drumbeat will: `on-start` where the batch script runs, `env`, `setup`, then the command."""
    workdir = absolute(_expanded(job.workdir or "", marks), marks)
    batch = JobShell(known, starts_something, (), marks, read=launch.shell.read)
    batch.cwd = workdir
    modules = [f"module {each if each in ('purge', 'reset') else 'load ' + each}" for each in job.modules]
    batch.run("\n".join([*modules, job.on_start]))
    shell = JobShell(launch.shell.known, lambda words: False, (), marks, True, launch.shell.read)
    shell.cwd, shell.foreign = workdir, launch.shell.foreign
    shell.variables = _handed_on(batch, launch)
    for name, value in job.env.items():
        passed = marks.mark(Unknown(f"${{{name}}}", JOB, frozenset((name,))))
        shell.variables[name] = Variable(_expanded(value, marks) if value is not None else passed, True)
    shell.run(job.setup)
    words, variables = [_expanded(word, marks) for word in job.command], shell.variables
    if launch.whole is not None:
        inner = JobShell(launch.shell.known, lambda words: False, (), marks, True)
        inner.variables = _handed_on(shell, launch)
        inner.run(re.sub(rf'eval "\${AS_TEXT}\w+"; ', "", words[2][: -len(launch.words[2])]))
        words, variables = launch.words, inner.variables
    elif words[:2] == ["bash", "-c"] and [marks.shown(words[-1])] != list(map(marks.shown, launch.words[2:3])):
        inner = JobShell(launch.shell.known, lambda words: True, (), marks, task=True)
        inner.variables = _handed_on(shell, launch)
        inner.cwd, inner.foreign = shell.cwd, shell.foreign
        inner.run(re.sub(rf'eval "\${AS_TEXT}\w+"; ', "", words[2]))  # they are there
        if inner.started:
            words, variables = inner.started[-1].words, inner.started[-1].variables
    found = find_launcher(words) if launch.in_rank else None
    words = [*found.kept, *rank_argv(found, "python")] if found else words
    environment = {name: str(each.value) for name, each in _exported(variables).items()}
    return Reached(words, environment, shell.cwd, [each.words for each in batch.started])


def world(chosen: Started, batch: Shell, gpus: Optional[int]) -> Optional[int]:
    """Count the rank processes that a command of the batch script starts on all nodes; None where it does not say."""
    nodes = int(batch.known.get("SLURM_NNODES") or 1)
    try:
        found = [each for each in starts_of(batch, chosen) if each.certain and starts_something(each.words)]
    except Problem:
        return None
    if not found:
        return None
    start, flags = found[-1], found[-1].flags
    own_nodes, total, tasks = flags.get("nodes", ""), flags.get("ntasks", ""), 1
    per_rank = re.match(r"ppr:(\d+):node", flags.get("map-by", ""))
    per_node = per_rank[1] if per_rank else flags.get("ntasks-per-node", "")
    if start.step:
        used = int(own_nodes) if own_nodes.isdigit() else nodes
        total = total or (str(int(per_node) * used) if per_node.isdigit() else "")
        total = total or (str(used) if used != nodes else batch.known.get("SLURM_NTASKS") or str(used))
        if "$" in own_nodes + per_node or not total.isdigit():
            return None
        tasks = int(total)
    if start.launcher is None:
        return tasks
    each = started_per_node(start.launcher, nodes)
    if start.launcher.kind == "deepspeed" and start.launcher.flags.keys() & {"--hostfile", "--num-nodes"}:
        tasks *= start.launcher.nodes or nodes  # it goes to the other nodes itself
    return (gpus * tasks if gpus else None) if each is None else each * tasks


def world_of_job(job: Job, marks: Marks, alone: bool) -> Optional[int]:
    """Count the rank processes that drumbeat starts for a job file; None where the node decides."""
    each = job.ranks_per_node or (job.gpus * job.ranks_per_gpu // job.gpus_per_rank if job.gpus else 1)
    return job.nodes * each if isinstance(job.nodes, int) else each


def absolute(folder: str, marks: Marks) -> str:
    """Return a folder as an absolute path; a relative one starts at the submitting shell's PWD."""
    return f"{_expanded('$PWD', marks)}/{folder}" if folder and folder[0] != "/" and not MARK.match(folder) else folder


def _handed_on(shell: Shell, launch: Launch) -> Dict[str, Variable]:
    as_text = {name: each for name, each in shell.variables.items() if name in launch.as_text}
    return {name: each._replace(event=-1) for name, each in {**_exported(shell.variables), **as_text}.items()}


def _exported(variables: Mapping[str, Variable]) -> Dict[str, Variable]:
    """Return the variables that a shell exports; arrays are never exported."""
    return {name: each for name, each in variables.items() if each.exported and isinstance(each.value, str)}


def _expanded(text: str, marks: Marks) -> str:
    def value(found: re.Match[str]) -> str:
        return (
            "$"
            if found[1]
            else marks.mark(Unknown(f"${{{found[2] or found[3]}}}", SUBMIT, frozenset((found[2] or found[3],))))
        )

    return _DOLLAR.sub(value, text)


def differences(
    script: Reached, job: Reached, marks: Marks, secrets: Dict[str, str], ours: FrozenSet[str]
) -> List[Difference]:
    def value(unknown: Unknown) -> str:  # what drumbeat works out counts by its name
        return unknown.text if unknown.text[2:-1] in OURS - {PLACE} else by_own_name(unknown.made or unknown.text)

    def shown(text: Optional[str]) -> str:
        return _UNSET if text is None else marks.shown(whole_marks(text), value)

    found = []
    for place in range(max(len(script.words), len(job.words))):
        one = shown(script.words[place]) if place < len(script.words) else _UNSET
        other = shown(job.words[place]) if place < len(job.words) else _UNSET
        if one != other:
            found.append(Difference(f"argument {place}", one, other))
    names = {name for name in {*script.environment, *job.environment} - OURS - ours if not name.startswith(AS_TEXT)}
    for name in sorted(names):
        one, other = shown(script.environment.get(name)), shown(job.environment.get(name))
        if one != other and secrets.get(name) != "pass":
            found.append(
                Difference(f"env {name}", one, other, "only a variable of the shell there" if one == _UNSET else "")
            )
    folders = [re.sub(r"(?:^|/)\.?$", "", shown(each)) or "${PWD}" for each in (script.cwd, job.cwd)]
    if folders[0] != folders[1]:
        found.append(Difference("working directory", *folders))
    return found
