"""Comparison of a finished job file with its script: what reaches a rank from each of them."""

from __future__ import annotations

import re
from typing import Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence

from drumbeat.base.problem import Problem
from drumbeat.commands.events import Variable
from drumbeat.commands.interpret import Shell
from drumbeat.commands.launch import find_launcher, runs_text, started_per_node
from drumbeat.commands.values import JOB, MARK, SUBMIT, Marks, Unknown, whole_marks
from drumbeat.convert.draft import Difference
from drumbeat.convert.job_shell import JobShell, by_own_name
from drumbeat.convert.launch import (
    AS_TEXT,
    CONTAINERS,
    OURS,
    PER_NODE,
    PLACE,
    SHELLS,
    STARTERS,
    Launch,
    behind_wrapper,
    found_on_path,
    options,
    starts_something,
    starts_training,
    unwrapped,
)
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
    elif words[:2] == ["bash", "-c"] and len(words) == 3 and not _same(marks, words[2:], launch.words[2:3]):
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


def world(
    words: Sequence[str], shell: Shell, variables: Mapping[str, Variable], gpus: Optional[int], tasks: int = 1
) -> Optional[int]:
    """Count the rank processes that a command of the batch script starts on all nodes; None where it does not say."""
    known, words = shell.known, unwrapped(found_on_path(shell.marks, words))
    nodes = int(known.get("SLURM_NNODES") or 1)
    program = words[0].rsplit("/", 1)[-1] if words else ""
    if program in STARTERS:
        found, at = options(words[1:], program)
        own, srun = {"ntasks-per-node" if name in PER_NODE else name: value for name, value in found}, program == "srun"
        for value in (own.get("map-by", ""),):
            own.update({"ntasks-per-node": value.split(":")[1]} if re.match(r"ppr:\d+:node", value) else {})
        own_nodes = (own.get("N") or own.get("nodes")) if srun else ""
        said = (own.get("n") or own.get("ntasks")) if srun else (own.get("n") or own.get("np"))
        per_node = own.get("ntasks-per-node", "")
        if any(MARK.search(each or "") for each in (own_nodes, said, per_node)):
            return None
        used = int(own_nodes) if own_nodes and own_nodes.isdigit() else nodes
        if not said and per_node.isdigit():
            said = str(int(per_node) * used)
        inherited = str(used) if own_nodes and used != nodes else known.get("SLURM_NTASKS") or str(used)
        total = said or inherited
        return world(words[1 + at :], shell, variables, gpus, int(total)) if total.isdigit() else None
    if program in CONTAINERS:
        place = next((at for at, word in enumerate(words[1:], 1) if word in ("exec", "run")), 0)
        _, at = options(words[place + 1 :], program) if place else ([], 0)
        return world(words[place + 2 + at :], shell, variables, gpus, tasks) if place else tasks
    place = next((at for at, word in enumerate(words) if runs_text(word)), 0)
    if program in SHELLS and place == 1 and len(words) > 2:
        inner = JobShell(known, starts_training, words[4:], shell.marks, task=True)
        inner.variables = {
            re.sub(r"^(APPTAINER|SINGULARITY)ENV_", "", name): each for name, each in _exported(variables).items()
        }
        inner.run(whole_marks(words[2]))
        found_inside = [each for each in inner.started if each.certain]
        return world(found_inside[-1].words, shell, inner.variables, gpus, tasks) if found_inside else None
    try:
        launcher = find_launcher(words) or behind_wrapper(words)
    except Problem:
        return None
    if launcher is None:
        return tasks
    each = started_per_node(launcher, nodes)
    if launcher.kind == "deepspeed" and launcher.flags.keys() & {"--hostfile", "--num-nodes"}:
        tasks *= launcher.nodes or nodes  # it goes to the other nodes itself
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
