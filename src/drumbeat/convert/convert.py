"""A batch script as a job file. Pure: text in, draft out. What cannot be carried over is named with its line."""

from __future__ import annotations

import re
from typing import Dict, List, Optional, Set

from drumbeat.base.redact import is_secret, redact
from drumbeat.base.regex import regex
from drumbeat.commands.script import Assignment, Command, Script, foreign_directives, read
from drumbeat.convert.directives import read_directives, tasks_per_node
from drumbeat.convert.draft import BLANK, Draft, for_shell, in_job_file, literal
from drumbeat.convert.launch import OURS, STARTERS, WORKED_OUT, Launch, peel, starts_training
from drumbeat.findings.model import Finding
from drumbeat.lint.context import rules
from drumbeat.lint.engine import lint
from drumbeat.plan.variables import DEBUGGING

# Findings of `drumbeat lint` are carried into the job file too, unless the conversion fixes them.


def ask_about_findings(draft: Draft, script: Script) -> None:
    gone = {rule.id for rule in rules() if rule.converted}
    dropped = {note.line for note in draft.left_out} - _carried(draft, script)
    for finding in lint(script.text, "script.sh").findings:
        place = finding.evidence[0]
        line = place.line or 0
        if finding.code not in gone and line not in dropped and not _asked(draft, finding, line):
            draft.question(line, place.text, redact(f"{finding.title}; {finding.fix} [{finding.code}]"))


def _carried(draft: Draft, script: Script) -> Set[int]:
    """Return lines of which something is in the job file."""
    exported = {found[1] for found in (re.match(r"export (\w+)=", line) for line in draft.setup) if found}
    variables = {each.line for each in script.assignments if each.name in exported | set(draft.env)}
    return variables | set(draft.lines.values()) | {note.line for note in draft.to_check}


def _asked(draft: Draft, finding: Finding, line: int) -> bool:
    """Return lines with a question of their own: a secret, an open quote."""
    known = {"secret-in-script": "looks secret", "quote-unclosed": "never closed"}.get(finding.code)
    return bool(known) and any(note.line == line and str(known) in note.why for note in draft.to_check)


_IN_THE_JOB = regex(r"\$\{?(SLURM|RANK|LOCAL_RANK|WORLD_SIZE|MASTER_|NODE_RANK|PMI|OMPI|HOSTNAME)\w*")
_BASH_ONLY = regex(r"\$\{\w*[^\w}]|\$[@*#?0-9]|\$\(|`|\$\{[0-9@*]")  # no job file can expand that
_ARGUMENT = regex(r"\$(\{[@*0-9][^}]*\}|[@*0-9])")  # of the batch script
_SUBSTITUTION = regex(r"\$\(\(.*?\)\)|\$\([^()]*\)|`[^`]*`", re.DOTALL)
_ENVIRONMENTS = regex(
    r"(source|\.)\s+\S|(conda|mamba|micromamba|pyenv|spack)\s+(activate|load|shell)|eval\s.*(conda|spack)"
)
_VERBS = (
    "load", "add", "purge", "reset", "use", "unuse", "unload", "rm", "del", "swap", "switch", "restore", "save", "list", "avail",
    "spider", "show", "refresh", "try-load",
)  # fmt: skip
_OWN_MODULES = "modules of a folder of your own are loaded in `setup`, on every node: `module` must be known there"
_WRITERS = ("cat", "tee", "printf", "echo")
_NOTHING_TO_DO = (
    "echo", "printf", "date", "hostname", "set", "wait", "exit", "sleep", "pwd", "nvidia-smi", "rocm-smi", "ls", "env",
    "printenv", "true", "scontrol", "trap", "sinfo", "squeue",
)  # fmt: skip


def convert(text: str) -> Draft:
    script = read(text)
    draft = Draft()
    read_directives(draft, script.directives)
    for line, words in foreign_directives(text):
        draft.question(
            line, words, "not a line for Slurm, so it is not read: write nodes, gpus, time and the rest yourself"
        )
    for line in script.late:
        draft.drop(line, "#SBATCH", "it comes after the first command, so sbatch ignores it")
    _unclosed(draft, script)
    known: Dict[str, str] = {}
    launches: List[Command] = []
    for pipeline in script.pipelines:
        commands = [command for command in pipeline.commands if not command.within]
        for command in commands:
            for each in command.assignments:
                _assignment(draft, each, known)
        starting = [each for each in commands if starts_training(each, lambda word: _fill(word, known))]
        launches += starting
        for command in commands if not starting else []:
            if command.words:
                _other(draft, command, known)
    waited = [each for each in launches if each.ended_by != "&"] or launches
    chosen = next((each for each in waited if each.name in STARTERS), waited[-1] if waited else None)
    for other in launches:
        if other is not chosen:
            draft.drop(other.line, other.text, "a job file starts one command; give this one a job of its own")
    if chosen is None:
        started = [each for pipeline in script.pipelines for each in pipeline.commands if each.name in STARTERS]
        draft.unknown = next(((each.line, each.text) for each in started[::-1] if not each.within), None)
    else:
        _command(draft, chosen, known, script)
        _only_for_dropped_flags(draft, chosen, script)
    _still_used(draft)
    ask_about_findings(draft, script)
    draft.keys = {key: in_job_file(value) for key, value in draft.keys.items()}
    draft.env = {name: in_job_file(value) for name, value in draft.env.items()}
    return draft


def _unclosed(draft: Draft, script: Script) -> None:
    """Ask about a quote that is never closed: it makes the rest of the script one word."""
    fault = next((each for each in script.faults if each.kind == "quote"), None)
    if fault:
        draft.question(fault.line, fault.text, "a quote that is never closed: what follows it may be read wrongly")


def _only_for_dropped_flags(draft: Draft, launch: Command, script: Script) -> None:
    """Drop an exported variable that only a dropped flag of the launcher used; question srun in what stays."""
    meant = " ".join(word.raw for word in launch.words)
    lines = {each.name: each.line for each in script.assignments if each.how == "export"}
    for export in [line for line in draft.setup if line.startswith("export ")]:
        name = export[len("export ") :].partition("=")[0]
        rest = [line for line in draft.setup if line != export]
        carried = " ".join([*map(str, draft.keys.values()), *draft.env.values(), *rest])
        asked = re.compile(rf"\$\{{?{re.escape(name)}\b")
        if asked.search(meant) and not asked.search(carried):
            draft.setup.remove(export)
            draft.drop(lines.get(name, launch.line), export, "only flags that drumbeat fills in used it")
        elif re.search(r"\b(?:srun|scontrol)\b", export):
            draft.question(
                lines.get(name, launch.line), export, "asks Slurm on every node, inside the job: write its value"
            )


def _still_used(draft: Draft) -> None:
    """Ask about values that the script computes when it runs, if something that was carried over needs them."""
    carried = " ".join([*map(str, draft.keys.values()), *draft.env.values(), *draft.setup])
    for name, (line, text) in draft.computed.items():
        if re.search(rf"\$\{{?{name}\b", carried):
            draft.question(
                line, text, f"the script sets {name} when it runs: put that into `setup`, or write its value"
            )


def _fill(word: str, known: Dict[str, str], used: Optional[Set[str]] = None) -> str:
    """Fill in what the script assigns; other variables stay: drumbeat expands them where the job is submitted."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if used is not None and name in known:
            used.add(name)
        return known.get(name, found[0])

    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, word)


def _assignment(draft: Draft, each: Assignment, known: Dict[str, str]) -> None:
    value = _fill(literal(each.value), known)
    computed = bool(each.value.parts) or bool(_BASH_ONLY.search(value)) or each.value.raw.startswith("(")
    whole = _SUBSTITUTION.sub(lambda found: re.sub(r"\s", BLANK, found[0]), value)
    if not computed or re.search(r"\S\s+\S", whole):  # several words: a launch line that is kept in a variable
        known[each.name] = whole
    else:
        known.pop(each.name, None)
    if each.how != "export":
        if computed:
            draft.computed[each.name] = (each.line, f"{each.name}={each.value.raw}")
        return
    if each.name in OURS:
        draft.drop(each.line, f"{each.name}={each.text}", WORKED_OUT)
    elif each.name in DEBUGGING:
        draft.drop(each.line, f"{each.name}={each.text}", f"for debugging: {DEBUGGING[each.name].cost}")
    elif is_secret(each.name, value):
        draft.env[each.name] = "pass"
        draft.question(each.line, each.name, "looks secret: export it before you submit, and it is handed on by name")
    elif computed or _IN_THE_JOB.search(value):
        draft.setup.append(f"export {each.name}={each.value.raw}")
    else:
        draft.env[each.name] = value


def _other(draft: Draft, command: Command, known: Dict[str, str]) -> None:
    words = [_fill(word.text, known) for word in command.words]
    name = command.name
    if command.text.strip() == "_":  # a process substitution stands alone: the command that reads it is named
        return
    if name in ("for", "read") and len(words) > 1:
        loop = name == "for"
        for variable in words[1:2] if loop else [word for word in words[1:] if not word.startswith("-")]:
            draft.computed[variable] = (command.line, command.text)
    if name in ("module", "ml"):
        _modules(draft, command, words)
    elif name == "cd" and len(words) == 2:
        draft.set("workdir", words[1], command.line)
    elif _ENVIRONMENTS.match(command.text):
        draft.setup.append(" ".join(word.raw for word in command.words))
    elif any(token.text.startswith(("<<", ">")) for token in command.redirects) and name in _WRITERS:
        draft.drop(command.line, _target(command), "written when the job runs: make it a file beside the job file")
    elif name in _NOTHING_TO_DO:
        draft.drop(command.line, command.text, "not needed")
    elif name not in ("export", "declare", "readonly", "unset", "["):
        draft.drop(
            command.line, command.text, "a command of the batch script: move it to `setup` if every node needs it"
        )


def _target(command: Command) -> str:
    files = [token.word.text for token in command.redirects if token.word and token.text.startswith(">")]
    return f"{command.name} > {' '.join(files)}" if files else command.text


def _modules(draft: Draft, command: Command, words: List[str]) -> None:
    rest = words[1:]
    verb = rest.pop(0) if rest and (command.name == "module" or rest[0] in _VERBS) else "load"
    if verb in ("purge", "reset"):
        draft.drop(command.line, command.text, "modules are loaded in a clean environment")
    elif verb in ("load", "add") and not draft.own_modules:
        draft.modules += rest
    elif verb in ("load", "add", "use"):
        draft.own_modules = True
        draft.setup.append(" ".join(word.raw for word in command.words))
        draft.question(command.line, command.text, _OWN_MODULES)
    else:
        draft.drop(command.line, command.text, "put it into `setup` if the command needs it")


def _command(draft: Draft, command: Command, known: Dict[str, str], script: Script) -> None:
    used: Set[str] = set()
    launch = peel(draft, command.words, command.line, lambda word: _fill(word, known, used))
    for name in _all_of(used, known, script):  # they now stand in the command
        draft.env.pop(name, None)
        draft.setup = [line for line in draft.setup if not line.startswith(f"export {name}=")]
    for each in command.assignments:
        if each.how == "prefix":
            launch.env[each.name] = _fill(literal(each.value), known)
    for name, value in launch.env.items():
        if name in OURS:
            draft.drop(launch.line, f"{name}={value}", WORKED_OUT)
        else:
            draft.env[name] = "pass" if is_secret(name, value) else value
    why = "every rank's output is kept in the run folder, and the exit code is the training's"
    for pipeline in script.pipelines:
        if command in pipeline.commands:
            for after in pipeline.commands[pipeline.commands.index(command) + 1 :]:
                draft.drop(command.line, f"| {after.text}", why)
    if not launch.words:
        draft.drop(command.line, command.text, "nothing is left of it to start")
        return
    tasks = tasks_per_node(script.directives)
    _own_size(draft, launch, tasks)
    _ranks(draft, launch, tasks)
    draft.set("command", _as_command(draft, launch), launch.line)


def _all_of(used: Set[str], known: Dict[str, str], script: Script) -> Set[str]:
    """Add variables that only hold a part of another one that was used."""
    parts = {each.name: set(re.findall(r"\$\{?(\w+)", each.text)) & set(known) for each in script.assignments}
    found = set(used)
    while True:
        more = {part for name in found for part in parts.get(name, set())} - found
        if not more:
            return found
        found |= more


def _ranks(draft: Draft, launch: Launch, tasks: Optional[int]) -> None:
    """Give a node one rank per GPU if the script does not say otherwise."""
    count = launch.tasks if launch.launcher else launch.tasks or tasks
    if count and count != draft.keys.get("gpus"):
        draft.set("ranks-per-node", count, launch.line)


def _own_size(draft: Draft, launch: Launch, tasks: Optional[int]) -> None:
    """Ask about a size of srun's own: it may start fewer or more than the job has; a job file uses the whole job."""
    nodes: int = draft.keys.get("nodes", 1)
    per_node: int = 1 if launch.launcher else launch.tasks or tasks or draft.keys.get("gpus") or 1
    given = {"nodes": nodes, "ntasks": nodes * per_node}
    other = [f"--{name}={count}" for name, count in launch.size.items() if count != given[name]]
    if other:
        has = f"nodes: {nodes}" + ("" if launch.launcher else f" with {per_node} ranks each")
        draft.question(
            launch.line, f"srun {' '.join(other)}", f"not the job's size ({has}), which the job file takes: write yours"
        )


def _as_command(draft: Draft, launch: Launch) -> List[str]:
    launch.words = [word.replace(BLANK, " ") for word in launch.words]
    own = [word for word in launch.words if _ARGUMENT.search(word)]
    if own:
        draft.question(
            launch.line, " ".join(own), "an argument of the batch script: write its value in place of ARGUMENT"
        )
        launch.words = [_ARGUMENT.sub("ARGUMENT", word) for word in launch.words]
    made = [line.partition("=")[0].split()[-1] for line in draft.setup if line.startswith("export ")]
    from_setup = re.compile(r"\$\{?(" + "|".join(map(re.escape, made)) + r")\b") if made else re.compile(r"(?!)")
    later = [word for word in launch.words if any(p.search(word) for p in (_IN_THE_JOB, _BASH_ONLY, from_setup))]
    if not later:
        return launch.words
    if launch.launcher:  # it must stay in sight: behind a shell it would be started once per rank
        draft.question(launch.line, " ".join(later), "filled in where you submit: export it there, or write its value")
        return launch.words
    draft.question(launch.line, " ".join(later), "known only in the job, so a shell on the node fills it in")
    text = " ".join(for_shell(word) for word in launch.words)
    return ["bash", "-c", "exec " + text.replace("$", "$$")]
