"""A batch script as a job file. Pure: text in, draft out. What cannot be carried over is named with its line."""

from __future__ import annotations

import re
from typing import Callable, Dict, FrozenSet, List, Mapping, Optional, Sequence, Set

from drumbeat.base.problem import Problem
from drumbeat.base.redact import is_secret, redact
from drumbeat.commands.events import Started, options_at
from drumbeat.commands.interpret import Shell
from drumbeat.commands.launch import STARTERS
from drumbeat.commands.program import read_script
from drumbeat.commands.script import Script, foreign_directives, read
from drumbeat.commands.shell import Lexer
from drumbeat.commands.syntax import arguments_read, names_needed, names_read, parse_loosely
from drumbeat.commands.values import JOB, SUBMIT, Unknown, at_submission, without_marks
from drumbeat.convert.compare import Reached, absolute, differences, from_job, from_script, world, world_of_job
from drumbeat.convert.directives import exported, read_directives, shown_gpus, slurm_variables, tasks_per_node
from drumbeat.convert.draft import Draft, LeftOut, job_file
from drumbeat.convert.ending import acts, at_the_end, exit_code, functions_in, retries, same, traps
from drumbeat.convert.job_shell import JobShell
from drumbeat.convert.launch import (
    AS_TEXT,
    OURS,
    Launch,
    manages_ray,
    peel,
    ranks_of_launchers,
    redirected,
    starts_something,
    starts_training,
    unwrapped,
)
from drumbeat.convert.lines import account
from drumbeat.convert.residue import OF_TASKS, changed, keep
from drumbeat.convert.spread import cluster, spread
from drumbeat.findings.model import Finding
from drumbeat.jobfile.check import names_expanded
from drumbeat.jobfile.job import job_from_text
from drumbeat.lint.context import rules
from drumbeat.lint.engine import lint
from drumbeat.plan.binding import ranks_without_gpu

MAX_LINES = 10_000
_AFTERWARDS = re.compile(r"eval|infer|(?<!pre)test|convert|merge|export|plot|visuali|upload|generate|summar")
_OF_RANKS = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # the launcher gives them to its ranks
_ARGUMENT = re.compile(r"\$[0#]")


def convert(
    text: str,
    arguments: Optional[Sequence[str]] = None,
    read_file: Callable[[str], str] = lambda path: "",
    required: FrozenSet[str] = frozenset(),
) -> Draft:
    """Convert a batch script. `arguments`: those of the script, if they are known; `read_file` gives the text of a file that it
    sources, '' if it cannot be read here; `required`: variables that have a value where the job is submitted."""
    if text.count("\n") > MAX_LINES:
        raise Problem(f"more than {MAX_LINES:,} lines", "no batch script has so many: is it the right file?")
    script = read(text)
    draft = Draft(arguments=None if arguments is None else list(arguments))
    _one_part(draft, script)
    read_directives(draft, script.directives)
    for line, words in foreign_directives(text):
        draft.question(
            line, words, "not a line for Slurm, so it is not read: write nodes, gpus, time and the rest yourself"
        )
    for line in script.late:
        draft.drop(line, "#SBATCH", "it comes after the first command, so sbatch ignores it")
    if re.match(r"#!\s*\S*sh\s+(?:-\w*l|--login)", text):
        draft.drop(1, text.split("\n", 1)[0], "your login shell has read its profile, and its variables are passed on")
    for fault in [each for each in script.faults if each.kind == "quote"][:1]:
        draft.question(fault.line, fault.text, "a quote that is never closed: what follows it may be read wrongly")
    known = slurm_variables(draft, script.directives)
    known.update({name: draft.marks.mark(Unknown(f"${{{name}}}", SUBMIT, frozenset((name,)))) for name in required})

    def batch_shell(
        wanted: Callable[[List[str]], bool], supposed: Optional[Started] = None, succeeds: bool = False
    ) -> JobShell:
        shell = JobShell(known, wanted, arguments, draft.marks, read=read_file)
        shell.supposed = {(supposed.line, supposed.text): succeeds} if supposed else {}
        shell.cwd = absolute(draft.keys.get("workdir", ""), draft.marks)
        shell.set_options(re.findall(r"\A#!\s*\S*sh\s+(-\w+)", text))
        for name, value in exported(script.directives).items():
            shell.assign(name, value, shell.marks.quoted(value), 1, True)
        shell.run(without_marks(text))
        spread(shell)
        return shell

    def supposing(chosen: Started, succeeds: bool) -> JobShell:
        try:
            return batch_shell(batch.wanted, chosen, succeeds)
        except Problem:  # a loop that goes on for too long
            return batch

    batch = batch_shell(lambda words: manages_ray(words) or starts_training(words))
    if all(manages_ray(each.words) for each in batch.started):
        batch = batch_shell(lambda words: manages_ray(words) or starts_something(words))
        if batch.ended_at and batch.last is False:
            batch.started = []  # it fails before it starts what it is for
    ray = _without_ray(batch)
    chosen = _selected(batch)
    if chosen is None:
        draft.ended_at = batch.ended_at
        ask_about_findings(draft, script)
        return draft
    failed = supposing(chosen, False)
    tries = sum(same(each, chosen) for each in failed.started)
    if not chosen.certain or tries > sum(same(each, chosen) and each.certain for each in batch.started):
        done = supposing(chosen, True)
        if retries(draft, chosen, failed, done):
            batch, chosen = done, _selected(done) or chosen
    chosen = _chosen(draft, batch, chosen, ray)
    _carry_over(draft, chosen, batch, script, ray)
    if not chosen.whole:
        exit_code(draft, chosen, failed)
    ask_about_findings(draft, script)
    asked_for = {note.text for note in draft.to_export} & draft.defaults.keys()  # then they are not unset
    return convert(text, arguments, read_file, required | asked_for) if asked_for - required else draft


def draft_of(text: str, name: str, arguments: Optional[Sequence[str]], read_file: Callable[[str], str]) -> Draft:
    """Convert a batch script; Problem if no line of it starts a program."""
    draft = convert(text, arguments, read_file)
    if "command" in draft.keys:
        return draft
    what, fix = "no line starts a program", "name the batch script itself; drumbeat lint reads any script"
    if draft.ended_at:
        fix = f"it exits at line {draft.ended_at} before: fill in what it misses there, or give its arguments after --"
    elif arguments is None and re.search(r"^[^#\n]*\$\{?[@*]", text, re.M):
        fix = "it may start what its arguments say: give them after the script's name"
    elif re.search(r"^\s*sbatch\s", text, re.M):
        fix = "it submits other scripts: convert those"
    raise Problem(f"{name}: {what}", fix, exit_code=1)


def _one_part(draft: Draft, script: Script) -> None:
    """Keep the options of one part of a heterogeneous job: the first with GPUs."""
    lines = script.text.split("\n")
    ends = [place for place, line in enumerate(lines, 1) if re.match(r"#SBATCH\s+(?:het|pack)job\b", line)]
    if not ends:
        return
    parts = [
        [each for each in script.directives if first < each.line < last]
        for first, last in zip([0, *ends], [*ends, len(lines) + 1])
    ]
    kept = next((part for part in parts if any("gpu" in f"{each.name}={each.value}" for each in part)), parts[0])
    why = "a job file has one kind of node: give the other parts of this job a job of their own"
    for each in script.directives:
        if each not in kept:
            draft.question(each.line, each.text, why)
    for line in ends:
        draft.drop(line, lines[line - 1], why)
    draft.differs("parts of the job", len(parts), 1)
    script.directives = kept


def _without_ray(batch: Shell) -> List[Started]:
    """Remove commands that start or stop a Ray cluster from the candidates, and return them."""
    ours = [each for each in batch.started if manages_ray(each.words)]
    others = [each for each in batch.started if not manages_ray(each.words)]
    if not ours or not others:
        return []
    batch.started = others
    for event in batch.events:
        if any(manages_ray(each.words) for each in event.starts):
            event.text = batch.without(event, ours)
            if not any(map(acts, batch.effects(event.text, event.line))):
                event.kind = "part"  # nothing is left of it
    return ours


def _selected(batch: Shell) -> Optional[Started]:
    """Pick the command that the job is for."""
    waited = [each for each in batch.started if not each.background] or batch.started
    starters = [each for each in waited if unwrapped(each.words)[0].rsplit("/", 1)[-1] in STARTERS]
    candidates = [each for each in starters if _trains(each)] or starters or waited
    if not candidates:
        return None
    wide = [each for each in candidates if not _one_task(each)] or candidates
    trains = [each for each in wide if not _AFTERWARDS.search(_program(each))] or wide
    return next((each for each in trains[::-1] if each.certain), trains[0])


def _chosen(draft: Draft, batch: Shell, chosen: Started, ray: Sequence[Started]) -> Started:
    """Take the command out of the statements around it; name the others."""
    whole = None if ray else _whole(chosen, batch, draft)
    if whole:
        return whole
    for place, event in enumerate(batch.events):
        if any(each is chosen for each in event.starts):  # the command starts it, so on-start does not
            event.text, chosen.before = batch.without(event), place + 1
    if not chosen.certain:
        draft.question(
            chosen.line, chosen.text, "starts only under a condition, or in a loop, that is decided when the job runs"
        )
    seen = [(chosen.line, list(map(draft.marks.resolved, chosen.words)))]
    for other in batch.started:
        if other.before < chosen.before + (not other.certain) and chosen.certain and not other.background:
            _run_before(other, batch, chosen)
            if unwrapped(other.words)[0].rsplit("/", 1)[-1] in STARTERS or ranks_of_launchers([other], 1):
                why = "a step before the last one: on-start runs it, and drumbeat watches only the last"
                draft.question(other.line, other.text, why, advice=True)
        elif _left_in_on_start(other, batch, chosen):
            apart = draft.keys.get("nodes", 1) > 1 and _one_task(chosen) and _one_task(other)
            why = (
                "runs at the same time on a node of its own; on-start starts it, and here "
                if apart
                else "on-start starts it; "
            )
            draft.question(other.line, other.text, f"{why}drumbeat watches only the last", advice=not apart)
        elif (other.line, list(map(draft.marks.resolved, other.words))) not in seen:
            seen.append((other.line, list(map(draft.marks.resolved, other.words))))
            again = other.line == chosen.line and other.text == chosen.text  # another round of a loop
            words = " ".join(other.words) if again else other.text
            draft.question(other.line, words, "a job file starts one command; give this one a job of its own")
            draft.differs(f"line {other.line}", words, "not started")
    return chosen


def _left_in_on_start(started: Started, batch: Shell, chosen: Started) -> bool:
    """Return true for a command inside a statement that on-start runs as it stands: the training is not part of it."""
    starts = [list(map(id, event.starts)) for event in batch.events[: chosen.before]]
    return any(id(started) in each and id(chosen) not in each for each in starts)


def _whole(chosen: Started, batch: Shell, draft: Draft) -> Optional[Started]:
    """Return all statements from the training on as one command, if there are more and the batch script runs them itself:
    a loop of trainings, a training and its evaluation, a copy of its results. On one node that is the same wherever it runs."""
    others = [
        each
        for each in batch.started
        if each is not chosen
        and not (each.before < chosen.before + (not each.certain) and chosen.certain and not each.background)
    ]
    rounds = [each for each in batch.started if not each.certain and _is_event(each, batch)]  # of a loop
    parts = [each for each in [chosen, *rounds, *(other for other in others if other.background)] if each.within]
    alone = chosen.certain and not others + rounds and not any(acts(each) for each in batch.events[chosen.before + 1 :])
    if not parts or alone or draft.keys.get("nodes", 1) != 1:
        return None
    first = min((each.within for each in parts if each.within), key=lambda each: each.start)
    text = batch.text[first.start :].rstrip("\n")
    if re.search(r"\bsrun\b|\b(?:mpirun|mpiexec)\b|\$\{?0", "\n".join([text, *functions_in(text, batch.events)])):
        return None
    if any(each.background and each.before < first.events for each in batch.started):
        return None
    if len(set(ranks_of_launchers([each for each in batch.started if each.before >= first.events], 1))) > 1:
        draft.set("launcher", "once", first.line)  # each launcher starts as many ranks as it is asked for
    for other in batch.started:
        if other.before < first.events:
            _run_before(other, batch, chosen)
    del batch.events[first.events :]
    said = f"all from line {first.line} on"
    return Started(first.line, ["bash", "-c", text], first.variables, first.cwd, first.events, True, said, whole=True)


def _is_event(started: Started, batch: Shell) -> bool:
    """Return true for a command with an event of its own; others are part of a statement that is kept whole."""
    events = batch.events[started.before : started.before + 1]  # that of a pipeline has no words
    return any(each.line == started.line and each.words in ((), tuple(started.words)) for each in events)


def _run_before(started: Started, batch: Shell, chosen: Started) -> None:
    """Move a command into on-start, with the list or condition around it unless the training is part of that too."""
    if not _is_event(started, batch):
        return
    event = batch.events[started.before]
    if event.kind == "part":
        return
    if not event.around or chosen.text in event.around:
        event.kind = "once"
        return
    for other in batch.events:
        if other is not event and other.around == event.around:
            event.writes, other.kind, other.around = event.writes | other.writes, "part", ""
    event.kind, event.text, event.reads = "once", event.around, batch.reads(event.around)
    event.around = ""


def _program(started: Started) -> str:
    words = [word for word in started.words if re.search(r"\.(?:py|sh)$", word)] or started.words[:4]
    return words[0].rsplit("/", 1)[-1] if words[0].endswith((".py", ".sh")) else " ".join(words)


def _trains(started: Started) -> bool:
    return bool(
        re.search(
            r"\.py\b|\s-m\s|\b(?:torchrun|accelerate|deepspeed|composer|train|pretrain)\b", " ".join(started.words)
        )
    )


def _one_task(started: Started) -> bool:
    text = " ".join(started.words[:16])
    return bool(re.search(r"(?:^|\s)(?:-n\s?1|--ntasks[= ]1|-N\s?1|--nodes[= ]1)(?=\s)", text))


def _carry_over(draft: Draft, chosen: Started, batch: Shell, script: Script, ray: Sequence[Started]) -> None:
    launch = peel(draft, chosen, batch)
    launch.ray = bool(ray)
    if ray:
        cluster(draft, launch, batch, chosen, ray)
    draft.defaults.update(batch.defaults)
    draft.defaults.update(launch.shell.defaults)
    for line, words, names in batch.unread:
        _check_sourced(draft, launch, line, words, set(names) & names_read("\n".join(script.text.split("\n")[line:])))
    for line, words, why in batch.doubts:
        draft.question(line, words, why)
    redirected(draft, chosen)
    if chosen.piped:
        why = "every rank's output is kept in the run folder, and the exit code is the training's"
        draft.drop(chosen.line, f"| {chosen.piped}", why)
    on_exit = traps(draft, batch)
    quiet = ("exit", "echo", "printf", "date", "set", "wait", "trap")
    for event in batch.events:
        if event.kind == "print" and not event.text.startswith(quiet):
            there = event.text.startswith(("cd", "pushd"))
            draft.drop(event.line, event.text, "it is there already" if there else "only prints or waits")
    if not any(launch.words):
        draft.drop(chosen.line, chosen.text, "nothing is left of it to start")
        return
    _ask_for_arguments(draft, launch)
    tasks = tasks_per_node(script.directives, draft.keys.get("gpus"))
    ranks = _ranks(draft, launch, tasks)
    _visibility(draft, launch, {**{each.name: each.value for each in script.directives}, **launch.gpus}, ranks)
    shape = {"ranks-per-node": 0, "gpus": 0, "ranks-per-gpu": 1, "gpus-per-rank": 1}
    for each in ranks_without_gpu(*(draft.keys.get(key, usual) for key, usual in shape.items())):
        draft.question(launch.line, chosen.text, f"{each.title} ({each.cause}): {each.fix}")
    _secrets(draft, launch)
    wanted = _command(draft, launch)
    at_the_end(draft, launch, batch, chosen, on_exit, wanted)
    keep(draft, launch, wanted | launch.in_binds | launch.for_end)
    draft.on_start[:0] = [draft.marks.shown(line) for line in launch.before]
    for kept in [*draft.on_start, *draft.setup]:
        if redact(kept) != kept:
            draft.question(launch.line, kept, "its value looks secret and was left out: write what the line needs")
    draft.lines.setdefault("command", launch.line)
    for name in sorted(set(re.findall(r"\$\{?(ARG_\d+)", job_file(draft, "")))) if draft.arguments is None else ():
        why = "an argument of the script: export it when you submit, or give it to convert after the script's name"
        draft.to_export.append(LeftOut(launch.line, name, why))
    _from_outside(draft, script, batch.required)
    account(draft, batch, chosen, launch)
    _compare(draft, launch, ranks, batch, chosen)
    gone = [int(each.what[5:]) for each in draft.differences if each.job == "not started" and each.what[5:].isdigit()]
    for event in batch.events[: chosen.before]:
        if gone and event.line > min(gone) and event.text.startswith(("until ", "while ")):
            why = "waits in on-start, perhaps for what is not started here: take it out if so"
            draft.question(event.line, event.text, why)


_OF_THE_JOB = ("SLURM_", "CUDA_", "ROCR_", "HIP_", "RANK", "LOCAL_", "WORLD_", "MASTER_", AS_TEXT)
_OF_EVERY_LOGIN = frozenset(("HOME", "USER", "LOGNAME", "PWD", "SHELL", "PATH", "HOSTNAME", "LANG", "TMPDIR"))


def _from_outside(draft: Draft, script: Script, required: FrozenSet[str]) -> None:
    """Name variables that the job file reads and the script never sets, or without which it ends: the user must export them."""
    written = draft.in_job_file([*draft.keys.values(), *draft.env.values()])
    texts = [each for value in written for each in (value if isinstance(value, list) else [value])]
    names = {name for each in texts if isinstance(each, str) for name in names_expanded(each)}
    names |= {name for name in required if name.isidentifier()}
    command = draft.keys.get("command", [])
    if command[:2] == ["bash", "-c"]:  # what its shell reads on the nodes, and nothing there gives a value
        text = draft.marks.shown(command[2])
        nodes = [
            each
            for part in (script.text, text, *map(draft.marks.shown, (*draft.on_start, *draft.setup)))
            for top in parse_loosely(Lexer(part, 1).run())
            for each in top.walk()
        ]
        names |= names_needed(text) - OURS - {name for each in nodes for name in each.writes()}
    for name in sorted(each for each in names - _OF_EVERY_LOGIN if not each.startswith(_OF_THE_JOB)):
        line = next((at for at, text in script.code_lines() if re.search(rf"\$\{{?{name}\b", text)), 0)
        if line:
            why = "the script sets it nowhere (a file that it sources may): export it where you submit, or write its value"
            draft.to_export.append(LeftOut(line, name, why))


def _secrets(draft: Draft, launch: Launch) -> None:
    """Make the command read a secret from its variable, so that the value stays out of the job file."""
    marks = draft.marks
    for name, variable in launch.shell.variables.items():
        value = variable.value
        if (
            variable.exported
            and isinstance(value, str)
            and len(value) > 3
            and not marks.kind(value)
            and is_secret(name, value)
        ):
            mark = marks.mark(Unknown(f"${{{name}}}", JOB, frozenset((name,))))
            launch.words = [word.replace(value, mark) for word in launch.words]
            launch.in_rank = [word.replace(value, mark) for word in launch.in_rank]


def _check_sourced(draft: Draft, launch: Launch, line: int, words: str, used: Set[str]) -> None:
    """Let `on-start` end the job if a file that was not read here changes a variable whose value stands in the job file."""
    event = next((each for each in launch.events if (each.line, each.text) == (line, words)), None)
    for name in sorted(used - OURS):
        given = next((each for each in launch.events[::-1] if name in each.writes and each.line < line), None)
        value = given.value if given and given.kind == "assign" else None
        if not isinstance(value, str) or draft.marks.kind(value) not in ("", SUBMIT):
            continue  # the job works it out
        if event is None:
            draft.question(line, words, f"not read here: if it sets {name}, the values in this file are wrong")
            continue
        right = draft.marks.quoted(value).replace("${PWD}", "${SLURM_SUBMIT_DIR}")
        said = f"{name} was changed in line {line} of the script: write its value into the job file"
        event.text += f'\n[ "${name}" = {right} ] || {{ echo "{said}" >&2; exit 1; }}'
        event.reads |= {name}


def _ask_for_arguments(draft: Draft, launch: Launch) -> None:
    """Put a placeholder where the command has the script's own name, or the number of its arguments."""
    used = [word for word in launch.words if any(_ARGUMENT.fullmatch(each.text) for each in draft.marks.of(word))]
    if used:
        draft.question(launch.line, " ".join(used), "name, or number of arguments, of the batch script: write it")
        marks = draft.marks
        launch.words = [
            marks.shown(word, lambda unknown: _ARGUMENT.sub("ARGUMENT", unknown.text)) if word in used else word
            for word in launch.words
        ]


def _command(draft: Draft, launch: Launch) -> FrozenSet[str]:
    """Write the command. Return the variables that it reads, which must be exported for it."""
    marks, words = draft.marks, launch.words
    if launch.whole is not None:
        return _statements(draft, launch)
    unknown = [each for word in words for each in marks.of(word)]
    lists = {
        name: _list_of(launch, name)
        for each in unknown
        if "[" in each.text
        for name in each.reads
        if re.search(rf"\{{[!#]?{name}\[", each.text)
    }
    given = {name: items for name, items in lists.items() if items is not None}
    unknown += [each for items in given.values() for item in items for each in marks.of(item)]
    own = {name for each in unknown for name in each.reads if not each.stable or each.kind != SUBMIT} - OURS
    own -= set(given)
    variables = launch.shell.variables
    assigned = {name for name in own if name in variables or any(name in each.writes for each in launch.events)}
    if all(each.kind == SUBMIT and each.stable for each in unknown):
        draft.keys["command"] = words
        return frozenset()
    doubtful = {name for name in assigned if name in variables and variables[name].maybe}
    launch.as_text = frozenset(doubtful | assigned & (set(lists) - set(given)))
    private = sorted(
        name for name in assigned - launch.as_text if name not in variables or not variables[name].exported
    )
    strict = "u" in options_at(launch.options, launch.outside) and own - assigned
    text = "set -u; " if strict else ""
    if any(each.text[0] in "*?[" for each in unknown):
        text += "".join(f"{each.text}; " for each in launch.events if each.words[:1] == ("shopt",))
    text += f"export -n {' '.join(private)}; " if private else ""  # the shell's own, as in the script
    for name in sorted(launch.as_text):  # a shell of the tasks has it only if it was exported
        private_there = name in doubtful - launch.read_outside
        text += f'eval "${AS_TEXT}{name}"; '
        text += f'[[ "${AS_TEXT}{name}" == "declare -"*x*" {name}="* ]] || unset {name}; ' if private_there else ""
        text += f"unset {AS_TEXT}{name}; "

    def quoted(some: Sequence[str]) -> str:
        return " ".join(
            marks.quoted(each, lambda unknown: marks.mark(unknown) if at_submission(unknown) else unknown.text)
            for each in some
        )

    text += "".join(f"{name}=({quoted(items)}); " for name, items in given.items())
    folder, _, program = words[0].rpartition("/")
    if launch.launcher and folder:  # drumbeat gives its flags to a launcher that bash finds by its name
        text += f"PATH={quoted([folder])}:$PATH; {quoted([program, *words[1:]])}"
    else:
        text += "exec " + quoted(words)
    draft.keys["command"] = ["bash", "-c", text]
    return frozenset(assigned)


def _statements(draft: Draft, launch: Launch) -> FrozenSet[str]:
    """Write a command of several statements, with the shell that they find: options, functions, variables, arguments."""
    text, variables = launch.words[2], launch.shell.variables
    assert launch.whole is not None
    functions = functions_in(text, launch.events)
    reads = names_read("\n".join([text, *functions]))
    given = {name for name in reads - OURS if any(name in each.writes for each in launch.events)}
    launch.as_text = frozenset(
        name for name in given if name not in launch.whole or not isinstance(launch.whole[name].value, str)
    )
    private = sorted(name for name in given - launch.as_text if name not in variables or not variables[name].exported)
    options = options_at(launch.options, launch.outside)
    before = [f"unset {' '.join(_OF_RANKS)}"] if draft.keys.get("launcher") == "once" else []
    before += [f"set {changed(frozenset(), options)}"] if options else []
    before += [f"export -n {' '.join(private)}"] if private else []
    before += [f'eval "${AS_TEXT}{name}"; unset {AS_TEXT}{name}' for name in sorted(launch.as_text)]
    before += [
        f"{name}={launch.shell.known[name]}" for name in OF_TASKS if name in reads and launch.shell.known.get(name)
    ]
    numbers = [int(each) for each in arguments_read(text) if each.isdigit()]
    arguments = list(launch.arguments) or [
        draft.marks.mark(Unknown(f"${{ARG_{number}}}", SUBMIT)) for number in range(1, max(numbers, default=0) + 1)
    ]
    draft.keys["command"] = [
        "bash",
        "-c",
        "\n".join([*before, *functions, text]),
        *(["bash", *arguments] if arguments else []),
    ]
    return frozenset(given)


def _list_of(launch: Launch, name: str) -> Optional[List[str]]:
    """Return an array's items if its last assignment is known, so that the command can contain them; else None."""
    last = next((each for each in launch.events[::-1] if name in each.writes and each.kind != "export"), None)
    items = last.value if last is not None and last.kind == "assign" and isinstance(last.value, list) else None
    return None if items is None or name in launch.shell.marks.reads("".join(items)) else items


def _ranks(draft: Draft, launch: Launch, tasks: Optional[int]) -> Optional[int]:
    """Return ranks per node as the script starts them; None if its launcher takes one per GPU. The job file says so."""
    nodes = _own_nodes(draft, launch)
    count = launch.tasks
    if not launch.launcher:
        count = launch.size.get("ntasks", 0) // nodes or count or (1 if launch.alone else tasks) or 1
    if draft.keys.get("launcher") == "once" and not launch.wrapper:
        return None
    _mpi(draft, launch, count or 1)
    if count and (count != draft.keys.get("gpus") or "launcher" in draft.keys):
        draft.set("ranks-per-node", count, launch.line)
    _cores(draft, launch, 1 if launch.launcher else count or 1)
    if launch.ray:
        draft.set("launcher", "once", launch.line)
        draft.keys.pop("ranks-per-node", None)
    elif launch.alone and not launch.launcher and nodes > 1:
        words = draft.marks.shown(" ".join(launch.words))
        draft.question(
            launch.line, words, f"the script starts it on its first node alone; here it starts on all {nodes}"
        )
    return count


_INTERPRETED = re.compile(r"(?:\S*/)?(?:python[\d.]*|(?:ba)?sh|uv|poetry|pixi|micromamba|conda|\S+\.(?:py|sh|bash))")


def _mpi(draft: Draft, launch: Launch, ranks: int) -> None:
    """Let the scheduler start each rank as a task where the script's starter, or a program of its own kind, brings MPI."""
    if launch.launcher:
        return
    imports = read_script(launch.words, launch.shell.read).about_mpi
    compiled = not _INTERPRETED.fullmatch(launch.words[0])
    if launch.mpi in STARTERS:
        why = "MPI that does not find the other ranks: export SLURM_MPI_TYPE in on-start, one of srun --mpi=list"
        draft.differs("MPI", f"{launch.mpi} starts the ranks", "srun starts them", why)
    elif launch.mpi:
        launch.before.append(f"export SLURM_MPI_TYPE={draft.marks.quoted(launch.mpi)}  # srun --mpi")
    if launch.mpi or not launch.alone and ranks > 1 and (imports or compiled):
        draft.set("launcher", "tasks", launch.line)


def _visibility(draft: Draft, launch: Launch, given: Mapping[str, str], ranks: Optional[int]) -> None:
    """Write `visibility` if Slurm or the script shows each task only its own GPUs."""
    count, gpus = launch.size.get("ntasks", 0) // draft.keys.get("nodes", 1) or ranks or 1, draft.keys.get("gpus", 0)
    if "gpus-per-task" in launch.gpus and given["gpus-per-task"].isdigit():
        gpus = int(given["gpus-per-task"]) * count
        draft.set("gpus", gpus, launch.line)
        draft.keys.pop("ranks-per-node" if count == gpus else "", None)
    own = _own_variable(draft, launch, gpus)
    text, seen, sharing = shown_gpus(given) if not launch.alone and not own else ("", 1, 1)
    if launch.launcher or count < 2 or not (own or text):
        return
    draft.set("visibility", "own", launch.line)
    for key, number in (("gpus-per-rank", seen), ("ranks-per-gpu", sharing)):
        if number > 1:
            draft.set(key, number, launch.line)
    if not seen:
        draft.question(launch.line, text, "here each rank sees one GPU, its own: visibility: all shows it all of them")
        draft.differs("GPUs that a rank sees", text, "its own")


def _own_variable(draft: Draft, launch: Launch, gpus: int) -> bool:
    """Return true if the script gives each task one GPU by its local rank; ask about other choices."""
    for name in sorted(each for each in launch.shell.variables if each.endswith("_VISIBLE_DEVICES")):
        variable = launch.shell.variables.get(name)
        value = str(variable.value) if variable and variable.exported and variable.event >= 0 else ""
        if draft.marks.resolved(value) in ("${SLURM_LOCALID}", "${LOCAL_RANK}"):
            return True
        if value and not (re.fullmatch(r"\d+(,\d+)*", value) and value.count(",") + 1 == gpus):
            why = "drumbeat gives the ranks all GPUs of the job, from the first on: gpus: N asks for fewer"
            draft.question(launch.line, f"{name}={value}", why)
            draft.differs("GPUs that a rank sees", value, f"all {gpus or 'of the node'}")
    return False


def _cores(draft: Draft, launch: Launch, tasks: int) -> None:
    """Write the cores that srun gives each task, and where it binds them."""
    asked = launch.shell.known.get("SLURM_CPUS_PER_TASK") and draft.keys.get("cpus")
    if launch.cores and (not asked or launch.cores * tasks < asked):
        draft.set("cpus", launch.cores * tasks, launch.line)
    bind = launch.cpu_bind
    if bind and not launch.launcher and (bind == ["none"] or len(bind) == tasks):
        draft.set("cpu-bind", bind, launch.line)
    elif bind:
        why = "worked out on each node from its GPUs, cores and NICs (cpu-bind overrides it)"
        draft.drop(launch.line, f"srun --cpu-bind={','.join(bind)}", why)


def _own_nodes(draft: Draft, launch: Launch) -> int:
    """Return the nodes that the step uses, and ask for no others; a step that does not fit them is the user's to decide."""
    has: int = draft.keys.get("nodes", 1)
    nodes = launch.size.get("nodes", has)
    total = launch.size.get("ntasks", nodes)
    said = f"srun {' '.join(f'--{name}={count}' for name, count in launch.size.items())}"
    if nodes > has or total % nodes or (launch.launcher and total != nodes):
        draft.question(
            launch.line, said, f"not as many on each of the job's nodes ({has}): write nodes and ranks-per-node"
        )
        return has
    if nodes < has:
        draft.set("nodes", nodes, launch.line)
        draft.drop(launch.line, said, f"uses {nodes} of the script's {has} nodes, and the job asks for no others")
    return nodes


def _compare(draft: Draft, launch: Launch, ranks: Optional[int], batch: Shell, chosen: Started) -> None:
    """List what reaches a rank in the job file otherwise than in the script."""
    known = batch.known
    try:
        job = job_from_text(job_file(draft, "script"), "the converted job")
    except Problem:
        return  # said when the file is written
    here = from_job(job, draft.marks, launch, known)
    draft.differences += differences(from_script(launch), here, draft.marks, draft.env, launch.given_before)
    _compare_steps(draft, launch, batch, chosen, here)
    if launch.whole is None and (job.launcher != "once" or launch.wrapper):
        counts = [
            world(chosen, batch, draft.keys.get("gpus")), world_of_job(job, draft.marks, launch.alone)
        ]  # fmt: skip
        if None not in counts and counts[0] != counts[1]:
            draft.differs("rank processes in total", counts[0], counts[1])
    tasks = 1 if launch.launcher else ranks or 1
    per_task = known.get("SLURM_CPUS_PER_TASK", "")
    cores = launch.cores or (int(per_task) if per_task.isdigit() else 0)
    if launch.alone and tasks == 1 or job.launcher == "once":
        cores = 0  # a process of the batch script itself may use all cores of the job
    if cores and job.cpus and job.cpus // tasks != cores:
        draft.differs("cores per task", cores, job.cpus // tasks)


def _compare_steps(draft: Draft, launch: Launch, batch: Shell, chosen: Started, here: Reached) -> None:
    """Name training commands of the script that the job file never starts, or starts twice."""
    if launch.whole is not None:
        return
    of_job = [list(map(draft.marks.resolved, each)) for each in here.before]
    of_script = [list(map(draft.marks.resolved, each.words)) for each in batch.started]
    for each, words in zip(batch.started, of_script):
        what, seen, times = f"line {each.line}", of_job.count(words), of_script.count(words)
        told = any(known.what == what for known in draft.differences)
        told = told or _left_in_on_start(each, batch, chosen)
        if each is chosen and seen >= times:
            draft.differs(what, "started once", "started by on-start too")
        elif each is chosen and not each.certain and not told:
            draft.differs(what, "started under a condition, or in a loop", "started once")
        elif each is not chosen and seen > times:
            draft.differs(what, f"started {times} times", f"{seen} times by on-start")
        elif each is not chosen and not seen and not told and each.line != chosen.line:
            draft.differs(what, " ".join(each.words), "not started")


# Findings of `drumbeat lint` are carried into the job file too, unless the conversion fixes them.


def ask_about_findings(draft: Draft, script: Script) -> None:
    gone = {rule.id for rule in rules() if rule.converted}
    dropped = {note.line for note in draft.left_out} - _carried(draft, script)
    pipes = {note.line for note in draft.left_out if note.text.startswith("| ")}
    unpiped = {each.commands[-1].line for each in script.pipelines if each.line in pipes}
    findings = lint(script.text, "script.sh").findings
    rest = lint(_without_replaced(draft, script.text), "script.sh").findings if draft.replaced else findings
    left = {(each.code, each.evidence[0].line) for each in rest}
    for finding in findings:
        place = finding.evidence[0]
        line = place.line or 0
        if (finding.code, line) not in left:
            continue  # about a flag that the job file no longer has
        if finding.code == "exit-code-lost" and line in unpiped:
            continue
        if finding.code not in gone and line not in dropped and not _asked(draft, finding, line):
            why = redact(f"{finding.title}; {finding.fix} [{finding.code}]")
            draft.question(line, place.text, why, advice=True)


def _without_replaced(draft: Draft, text: str) -> str:
    """Return the script without the launcher's flags that drumbeat fills in."""
    flags = "|".join(map(re.escape, sorted(draft.replaced, key=len, reverse=True)))
    return re.sub(rf"(?<![\w-])(?:{flags})(?:(?:=|[ \t]+)(?:\"[^\"\n]*\"|[^\s'\"\\-][^\s'\"\\]*))?(?![\w-])", "", text)


def _carried(draft: Draft, script: Script) -> Set[int]:
    """Return lines of which something is in the job file."""
    exported = {found[1] for found in (re.match(r"export (\w+)=", line) for line in draft.setup) if found}
    variables = {each.line for each in script.assignments if each.name in exported | set(draft.env)}
    return variables | set(draft.lines.values()) | {note.line for note in draft.to_check}


def _asked(draft: Draft, finding: Finding, line: int) -> bool:
    """Return lines with a question of their own: a secret, an open quote."""
    known: Dict[str, str] = {"secret-in-script": "looks secret", "quote-unclosed": "never closed"}
    words = known.get(finding.code)
    notes = [*draft.to_check, *draft.to_export]
    return bool(words) and any(note.line == line and str(words) in note.why for note in notes)
