"""Checks of the shell's own grammar: what was typed is not what will be run."""

from __future__ import annotations

import bisect
import difflib
import re
from typing import Dict, Iterator, List, Optional, Set, Tuple

from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex
from drumbeat.commands.interpret import Shell
from drumbeat.commands.launch import STARTERS
from drumbeat.commands.programs import CONTROL, PRINTS, WITH_FILES
from drumbeat.commands.script import CONTAINER, FILE, SUBSTITUTION, TASK, Command, Script, last_number, runtime_at
from drumbeat.commands.shell import Fault, Lexer
from drumbeat.commands.starts import OF_LAUNCHERS, PER_TASK
from drumbeat.commands.syntax import names_read, parse_loosely
from drumbeat.commands.values import without_marks
from drumbeat.lint.context import LONGEST_FIXED, Context, Edit, Hit, by_name
from drumbeat.plan.binding import check_masks, from_slurm
from drumbeat.plan.variables import DEAD, DEBUGGING, SPELT

_DASHES = "‐‑‒–—―−"
_DOUBLE, _SINGLE = "“”„‟", "‘’‚‛"
_VARIABLE = regex(r"\s*([A-Z][A-Z0-9_]*_[A-Z0-9_]*|[A-Z]{3,}[A-Z0-9]*)\s*")
_PLACEHOLDER = regex(r"<[A-Za-z/][\w /.-]{1,40}>")


def typographic(context: Context) -> Iterator[Hit]:
    by_line: Dict[int, List[Fault]] = {}
    for fault in context.script.faults:
        if fault.kind == "typographic":
            by_line.setdefault(fault.line, []).append(fault)
    lines = context.lines
    for line, faults in by_line.items():
        shown = ", ".join(sorted({f"U+{ord(fault.text):04X} {fault.text.strip()}".strip() for fault in faults}))
        edits = [edit for fault in faults for edit in _plain(fault, lines.get(line, ""))]
        yield Hit(line, {"shown": shown}, tuple(edits))


def _plain(fault: Fault, line: str) -> List[Edit]:
    """Return the edit to the intended key, if that is certain."""
    new = None
    if len(line) > LONGEST_FIXED:
        return []
    if fault.text in _DASHES:
        start = max(fault.column - (2 if line[: fault.column].endswith("-") else 1), 0)
        found = re.match(rf"\s(-?)[{_DASHES}](-?)(\w[\w-]*)", line[start:])
        if found:
            before, after, name = found.groups()
            # One letter, perhaps with its number: -N, -n16. A long name had two dashes that an editor drew together.
            long = len(name) > 3 and not name[1:].isdigit()
            short = len(name) == 1 or name[1:].isdigit()
            new = "-" if before or after or short else "--" if long else None
    elif fault.text in _DOUBLE and sum(line.count(mark) for mark in _DOUBLE) % 2 == 0 and '"' not in line:
        new = '"'
    elif fault.text in _SINGLE and sum(line.count(mark) for mark in _SINGLE) % 2 == 0 and "'" not in line:
        new = "'"
    elif fault.text == "\u00a0":
        new = " "
    elif fault.text in "\u200b\u200c\u200d\u2060\ufeff":
        new = ""
    return [] if new is None else [Edit(fault.line, fault.column, fault.text, new)]


def continuation(context: Context) -> Iterator[Hit]:
    starts = sorted(pipeline.line for pipeline in context.script.pipelines)
    for fault in context.script.faults:
        if fault.kind != "continuation":
            continue
        comment = fault.text[1:].strip()
        before = bisect.bisect_right(starts, fault.line)
        first = starts[before - 1] if before else fault.line
        above = (first, comment) if comment else None
        words = {"what": f"'{comment[:40]}'" if comment else "a space"}
        yield Hit(fault.line, words, (Edit(fault.line, fault.column, fault.text, "\\", above),))


def joined_lines(context: Context) -> Iterator[Hit]:
    return (Hit(fault.line) for fault in context.script.faults if fault.kind == "joined")


def quote_unclosed(context: Context) -> Iterator[Hit]:
    for fault in context.script.faults:
        if fault.kind == "quote":
            yield Hit(fault.line, {"quote": fault.text})
            return  # the rest follows from the first


def script_cut(context: Context) -> Iterator[Hit]:
    if context.script.cut:
        yield Hit(context.script.cut)


def carriage_returns(context: Context) -> Iterator[Hit]:
    if context.returns:
        yield Hit(1)


def variable_as_command(context: Context) -> Iterator[Hit]:
    functions = set(re.findall(r"^\s*(?:function\s+)?([A-Z]\w*)\s*\(\)", context.script.text, re.MULTILINE))
    seen = set()
    for command in context.script.commands:
        words = [*(each.value for each in command.assignments if each.how in ("plain", "prefix")), *command.words]
        for word in words:
            for part in word.parts:
                found = _VARIABLE.fullmatch(part.text) if part.raw.startswith("$(") else None
                place = (part.line, part.column)
                if found and found.group(1) not in functions and place not in seen:
                    seen.add(place)
                    name = found.group(1)
                    yield Hit(
                        part.line, {"name": name}, (Edit(part.line, part.column - 2, part.raw, "${" + name + "}"),)
                    )


def missing_semicolon(context: Context) -> Iterator[Hit]:
    for command in context.script.commands:
        texts = [word.raw for word in command.words]
        for place, text in enumerate(texts[1:], 1):
            tested = texts[0] in ("[", "[[", "test") and texts[place - 1] in ("]", "]]")
            if (text == "then" and tested) or (
                text == "do" and place == len(texts) - 1 and (tested or texts[2:3] == ["in"])
            ):
                word, before = command.words[place], command.words[place - 1]
                edits: Tuple[Edit, ...] = ()
                if before.line == word.line:
                    edits = (Edit(before.line, before.column + len(before.raw), "", ";"),)
                yield Hit(word.line, {"word": text}, edits)


def exit_code_lost(context: Context) -> Iterator[Hit]:
    script = context.script
    harmless = set(context.settings.get("harmless", ()))
    kept = max(
        (line for line, text in context.lines.items() if "PIPESTATUS" in text or "pipestatus" in text), default=0
    )
    safe = {command.within for command in script.commands if command.name == "set" and "pipefail" in command.text}
    if re.match(r"#![^\n]*pipefail", script.text):
        safe.add(())
    fixes = _pipefail_edit(context)
    ends = {pipeline.commands[0].within: place for place, pipeline in enumerate(script.pipelines)}
    for place, pipeline in enumerate(script.pipelines):
        last, first = pipeline.commands[-1], pipeline.commands[0]
        if len(pipeline.commands) < 2 or last.name != "tee" or first.name in harmless or SUBSTITUTION in last.within:
            continue
        if last.within in safe or pipeline.line <= kept:
            continue
        after = [command for other in script.pipelines[place + 1 : place + 2] for command in other.commands]
        asked = any("$?" in text for each in after for text in [each.text, *(set_.text for set_ in each.assignments)])
        severity = "error" if asked or ends[last.within] == place else "warning"
        yield Hit(last.line, {"name": first.name or "the command"}, () if last.within else fixes, severity)


def _pipefail_edit(context: Context) -> Tuple[Edit, ...]:
    """Set pipefail only in a whole bash script that does not stop at errors: there it changes exit codes and nothing else."""
    script = context.script
    first_line = script.text.split("\n", 1)[0]
    stops = any(command.name == "set" and re.search(r" -\w*e|errexit", command.text) for command in script.commands)
    if (
        not script.pipelines
        or not context.whole
        or stops
        or not re.match(r"#!.*\b(bash|zsh)\b", first_line)
        or "-e" in first_line
    ):
        return ()
    first = min(pipeline.line for pipeline in script.pipelines)
    return (Edit(first, 0, "", "", (first, "set -o pipefail")),)


def dollar_escaped(context: Context) -> Iterator[Hit]:
    for command in context.script.commands:
        words = list(command.words)
        if not words or "file" in command.within:
            continue
        tested = words if command.name in ("[", "[[", "test", "taskset", "export") else words[:1]
        for word in tested:
            found = re.match(r"[^'\"]*\\\$\{?(\w+)", word.raw)
            if found:
                yield Hit(word.line, {"name": found.group(1)})
                break


def placeholder(context: Context) -> Iterator[Hit]:
    for fault in context.script.faults:
        if fault.kind == "placeholder":
            yield Hit(fault.line, {"shown": fault.text})
    for directive in context.script.directives:
        found = _PLACEHOLDER.search(directive.value)
        if found:
            yield Hit(directive.line, {"shown": found.group()})


def clone_then_cd(context: Context) -> Iterator[Hit]:
    commands = list(context.script.commands)
    for before, after in zip(commands, commands[1:]):
        clone = re.match(r"git clone (?:-\S+ )*\S*?([\w.-]+?)(?:\.git)?/?$", before.text)
        into = re.match(r"cd ([\w.-]+)/", after.text)
        if clone and into and into.group(1) != clone.group(1):
            yield Hit(after.line, {"name": clone.group(1), "shown": after.text[3:]})


def export_of_itself(context: Context) -> Iterator[Hit]:
    assigned = {each.name for each in context.script.assignments if each.how == "plain"}
    # In a file written by a heredoc, or a script in quotes, the outer shell has already put the value there.
    here = [each for command in context.script.commands if not command.within for each in command.assignments]
    for each in here:
        itself = each.text in (f"${each.name}", f"${{{each.name}}}") and each.name == each.spelt
        # `export X=$X` after a plain X=... does export it.
        if itself and (each.how == "plain" or (each.how == "export" and each.name not in assigned)):
            yield Hit(each.line, {"name": each.name})


def export_of_prose(context: Context) -> Iterator[Hit]:
    for command in context.script.commands:
        if command.name != "export" or not command.assignments:
            continue
        texts = [word.raw for word in command.words[2:]]
        bare = [text for text in texts if re.fullmatch(r"[A-Za-z]+", text)]
        if sum(text.islower() for text in bare) > 1:
            yield Hit(command.line, {"shown": " ".join(bare)})


def stops_all_containers(context: Context) -> Iterator[Hit]:
    listing = re.compile(r"\s*(?:docker|podman) (?:ps|container ls)\b")
    ending = re.compile(r"(?:.* )?(?:docker|podman) (?:container )?(?:stop|kill|rm)\b")
    for pipeline in context.script.pipelines:
        listed = False
        for command in pipeline.commands:
            if ending.match(command.text) and (
                listed or any(listing.match(part.text) for word in command.words for part in word.parts)
            ):
                yield Hit(command.line)
            listed = listed or bool(listing.match(command.text))


def appended_to(context: Context) -> Iterator[Hit]:
    for command in context.script.commands:
        for token in command.redirects:
            if token.text == ">>" and token.word and token.word.text in context.settings["files"]:
                yield Hit(token.line, {"file": token.word.text})


def comment_in_command(context: Context) -> Iterator[Hit]:
    """Find a comment that ends in a backslash: the command ends before it, and the options below run as a command."""
    lines = context.lines
    for each in context.script.comments:
        code, after = lines.get(each.line, "").strip(), lines.get(each.line + 1, "").split()
        if each.text.rstrip().endswith("\\") and not code.startswith("#") and after and after[0].startswith("-"):
            yield Hit(each.line + 1, {"shown": " ".join(after[:2])})


def blanks_around_equals(context: Context) -> Iterator[Hit]:
    for command in context.script.commands:
        raw = [word.raw for word in command.words]
        if (
            raw[1:2] == ["="]
            and re.fullmatch(r"[A-Za-z_]\w*", raw[0])
            and raw[0] not in ("test", "expr", "echo", "printf", "let")
        ):
            yield Hit(command.line, {"name": raw[0]})


def never_set(context: Context) -> Iterator[Hit]:
    """Find a variable that is read and never set, beside one of nearly that name that is set and never read."""
    text = context.script.text
    nodes = [each for top in parse_loosely(Lexer(text, 1).run()) for each in top.walk()]
    given = {name for each in nodes for name in each.writes()}
    read = {name for name in names_read(text) if not re.search(rf"\$\{{{name}:?[-+=?]|-[zn] \"?\$\{{?{name}\b", text)}
    for name in sorted(read - given):
        near = difflib.get_close_matches(name, given - names_read(text), 1, _NEAR_NAME) if len(name) > 3 else []
        line = next((number for number, code in context.script.code_lines() if re.search(rf"\$\{{?{name}\b", code)), 0)
        if near and line and not name.startswith("SLURM_"):
            yield Hit(line, {"name": name, "near": near[0]})


_NEAR_NAME = 0.85

# Checks of a script's requests to Slurm, and of what runs once per job although it should run in every task.

_INHERITED = {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", *SPELT, *DEAD, *DEBUGGING}


def sbatch_late(context: Context) -> Iterator[Hit]:
    return (Hit(line) for line in context.script.late)


def sbatch_misspelt(context: Context) -> Iterator[Hit]:
    for comment in context.script.comments:
        found = re.match(r"#\s*(S[A-Za-z]{3,6})\s*(?:--\w|-[A-Za-z]\b)", comment.text)
        near = found and difflib.get_close_matches(found[1].upper(), ["SBATCH"], 1, 0.8)
        if near and not comment.text.startswith("#SBATCH") or re.match(r"#SBATCH[-\w]", comment.text):
            yield Hit(comment.line, {"shown": comment.text.split()[0]})


def _cores_said(script: Script) -> bool:
    """Return true if something other than #SBATCH --cpus-per-task says how many cores its tasks get."""
    steps = any(
        each.flags.keys() & {"cpus-per-task", "cpus-per-gpu", "exclusive", "cpu-bind"} for each in script.starts
    )
    return steps or script.option("exclusive", "cpus-per-gpu", "ntasks-per-gpu") is not None


def cores_for_many_tasks(context: Context) -> Iterator[Hit]:
    script = context.script
    asked, tasks = script.option("ntasks-per-node"), script.extent_of({}, script.nodes or 1).tasks_per_node
    if asked and tasks and tasks > 1 and script.gpus and not (script.option("cpus-per-task") or _cores_said(script)):
        yield Hit(asked.line, {"tasks": str(tasks)})


def cores_for_one_task(context: Context) -> Iterator[Hit]:
    script, gpus = context.script, context.script.gpus
    said = [script.option(name) for name in ("cpus-per-task", "gpus-per-node", "gres", "ntasks-per-node", "ntasks")]
    asked, line = said[0], next((each.line for each in said if each), 0)
    likely = script.extent_of({}, script.nodes or 1)
    if not any(said[3:]) or likely.tasks_per_node != 1 or gpus < 2 or "drumbeat.pyz" in script.text:
        return  # drumbeat's own script asks for what the site says
    cores = last_number(asked.value) if asked else None
    elsewhere = _cores_said(script)
    for node in context.settings["nodes"]:
        if gpus == node["gpus"] and re.search(node["signs"], context.script.text):
            if cores is not None and cores * 2 <= node["cores"]:
                words = {"cores": str(cores), "all": str(node["cores"]), "gpus": str(gpus), "node": node["name"]}
                yield Hit(line, words)
            return
    if (cores is None and not elsewhere) or (cores is not None and cores < gpus):
        words = {"cores": str(cores or 1), "all": "the node's", "gpus": str(gpus), "node": "the node"}
        yield Hit(line, words)


def masks_overlap(context: Context) -> Iterator[Hit]:
    lists: Dict[str, Tuple[int, List[str]]] = {}
    for command in context.script.commands:
        for word in command.words:
            found = from_slurm(word.text)
            if found and "=$" not in word.text and command.name not in ("export", "declare"):
                lists[f"{word.line}:{word.column}"] = (word.line, list(found))
        for each in command.assignments:
            if re.fullmatch(
                r"0x[0-9a-fA-F]+(,0x[0-9a-fA-F]+)+", each.text
            ):  # named here, used as mask_cpu=$MASKS below
                lists[each.name] = (each.line, each.text.split(","))
            elif from_slurm(each.text):
                lists[each.name] = (each.line, list(from_slurm(each.text)))
    for directive in context.script.directives:
        if from_slurm(directive.value):
            lists[f"#{directive.line}"] = (directive.line, list(from_slurm(directive.value)))
    for line, entries in lists.values():
        _, faults = check_masks(entries[:256], len(entries[:256]), ())
        for fault in faults[:1]:
            yield Hit(line, {"title": fault.title, "evidence": fault.evidence[0].text if fault.evidence else ""})


_NODE_RANK = regex(r"--(?:node|machine)[-_]rank[= ]?\$\{?SLURM_\w+\}?")


def rank_frozen(context: Context) -> Iterator[Hit]:
    """Find `srun ... $SLURM_PROCID`: the batch shell replaces it before srun sees it."""
    for command in context.script.commands:
        if TASK in command.within or FILE in command.within or not set(command.names) & set(STARTERS):
            continue
        written = " ".join(word.raw for word in command.words)
        dynamic = re.search(r"rdzv[-_]backend[= ]['\"]?(?:c10d|etcd)", written)  # it numbers the nodes itself
        for before, word in zip(("", *command.names), command.words):
            frozen = PER_TASK & set(word.active)
            if frozen and dynamic:
                rest = _NODE_RANK.sub("", f"{before if before.endswith('rank') else ''} {word.raw}")
                frozen &= set(re.findall(r"(?<!\\)\$\{?(\w+)", rest))
            if frozen:
                yield Hit(word.line, {"name": sorted(frozen)[0]})


def not_exported(context: Context) -> Iterator[Hit]:
    script = context.script
    ranks = [each for each in script.starts if each.step or each.launcher or each.python]
    given = {each.name for each in script.assignments if each.how == "option"}
    own = OF_LAUNCHERS if ranks and all(each.launcher for each in ranks) else frozenset()  # set for the ranks anyhow
    used: Set[str] = set()
    for command in script.commands:
        for word in [*command.words, *(each.value for each in command.assignments)]:
            used |= set(word.active)
        used |= {name for token in command.redirects if token.word for name in token.word.active}
    for each in script.assignments:
        if each.how != "plain" or each.name not in _INHERITED - own - used - given:
            continue
        heirs = [start for start in ranks if start.line >= each.line]
        named = [{*start.inherited, *start.own, *start.flags.get("export", "").split(",")} for start in heirs]
        if heirs and not any(each.name in names for names in named):
            yield Hit(each.line, {"name": each.name})


def launched_on_one_node(context: Context) -> Iterator[Hit]:
    if not context.script.directives or (context.script.nodes or 1) < 2:
        return
    for start in context.script.starts:
        if not start.step and not start.before and start.started_by("torchrun", "launch"):
            yield Hit(start.line, {"nodes": str(context.script.nodes)})


def monitor_on_one_node(context: Context) -> Iterator[Hit]:
    if not context.batch or (context.script.nodes or 1) < 2:
        return
    for command in context.script.commands:
        if command.within or not command.background or set(command.names) & set(STARTERS):
            continue
        if command.name in ("nvidia-smi", "rocm-smi", "amd-smi", "dcgmi"):
            yield Hit(command.line, {"name": command.name})


NODE_LOCAL = regex(r"(?:/tmp|/var/tmp|/dev/shm|/scratch/local|\$\{?(?:TMPDIR|SLURM_TMPDIR|LOCAL_SCRATCH))(?![\w-])")


def staged_on_one_node(context: Context) -> Iterator[Hit]:
    if not context.batch or (context.script.nodes or 1) < 2:
        return
    for command in context.script.commands:
        words = [word.text for word in command.words]
        if command.within or command.name not in ("cp", "rsync", "mv", "tar", "unzip", "unsquashfs"):
            continue
        inside = re.search(r" (?:-C|-d|--directory)[ =]?(\S+)", command.text)
        target = inside[1] if inside else words[-1] if command.name in ("cp", "rsync", "mv") else ""
        if NODE_LOCAL.match(target):
            yield Hit(command.line, {"name": command.name, "target": target, "nodes": str(context.script.nodes)})


def output_folder_too_late(context: Context) -> Iterator[Hit]:
    made = {
        word.text.rstrip("/")
        for command in context.script.commands
        if command.name == "mkdir"
        for word in command.words[1:]
    }
    return (hit for hit in _output_folders(context) if hit.words["folder"] in made)


def output_folder_missing(context: Context) -> Iterator[Hit]:
    """Name relative folders of the job's log that are not beside the script. Those that it makes itself are made too late."""
    late = {hit.line for hit in output_folder_too_late(context)}
    if context.script.option("chdir") is None:
        for hit in _output_folders(context):
            folder = hit.words["folder"]
            if hit.line not in late and not re.search(r"^/|%", folder) and not context.read(f"{folder}/"):
                yield hit


def _output_folders(context: Context) -> Iterator[Hit]:
    for each in context.script.directives:
        folder = each.value.rpartition("/")[0]
        if each.name in ("output", "error") and folder:
            yield Hit(each.line, {"folder": folder, "value": each.value})


# Commands that end at once: a script that goes on with nothing else ends before its background work.
_QUICK = (PRINTS | WITH_FILES | CONTROL | {"module", "source", "."}) - {"wait"}


def not_waited_for(context: Context) -> Iterator[Hit]:
    if not context.script.directives:
        return
    works = {each.line for each in context.script.starts if each.step or each.launcher or "train" in each.program}
    started: Optional[Command] = None  # a step, a launcher or a training, as against a service beside the work
    for command in context.script.commands:
        if command.within:
            continue
        if command.background and command.line in works:
            started = command
        elif not command.background and command.name and command.name not in _QUICK:
            started = None  # wait, or work in the foreground for which the other is only a service
    if started:
        yield Hit(started.line, {"name": started.name})


def interpreter_not_first(context: Context) -> Iterator[Hit]:
    script = context.script
    if (script.directives or script.late) and not script.text.startswith("#!"):
        for each in script.comments:
            if re.match(r"#!\s*/\S", each.text):
                yield Hit(each.line, {"shown": each.text.strip()})
                return


_SUBMITS_ITSELF = regex(r"(?:^|\s)sbatch\s.*\$\{?0(?!\w)")


def submits_itself(context: Context) -> Iterator[Hit]:
    """Find a job that submits $0, except a script that does so only outside a job."""
    lines = [
        each.line
        for each in context.script.commands
        if _SUBMITS_ITSELF.search(each.text) and any(name.rsplit("/", 1)[-1] == "sbatch" for name in each.names)
    ]
    if not lines:
        return

    inside, outside = ({each.line for each in _reached(context, job).started} for job in ("1", ""))
    yield from (Hit(line) for line in lines if line in inside or line not in outside)


def _reached(context: Context, job: str) -> Shell:
    """Return what the script does in a job of this number, with each sbatch that it starts; '' is outside a job."""
    known, script = {"SLURM_JOB_ID": job, "SLURM_JOBID": job, "SLURM_SUBMIT_DIR": job and "/"}, context.script
    try:
        return Shell(known, lambda words: "sbatch" in words, None).run(without_marks(script.text), script.line)
    except Problem:
        return Shell(known, bool, None)  # too long to follow


_OWN_FOLDER = regex(
    r"\b(?:dirname|realpath|readlink)\s+(?:-\S+\s+)*[\"']?\$(?:0\b|\{?(?:0|BASH_SOURCE)\b)[^\s)]*"
    r"|\$\{(?:0|BASH_SOURCE(?:\[0\])?)%[^}]*/[^}]*\}"
)


def beside_script(context: Context) -> Iterator[Hit]:
    """Find paths made from $0 in statements that a job reaches."""
    if not _OWN_FOLDER.search(context.script.text):
        return
    shell = _reached(context, "1")
    told: Set[str] = set()
    for event in shell.events:
        words = [event.value] if isinstance(event.value, str) else event.value or event.words
        text = shell.marks.resolved(" ".join(words)) if words else event.text
        found = _OWN_FOLDER.search(text)
        if found and found[0] not in told:
            told.add(found[0])
            yield Hit(event.line, {"shown": re.sub("[\"']", "", found[0])})


def scontrol_in_container(context: Context) -> Iterator[Hit]:
    tools = set(context.settings["tools"])
    for command in context.script.commands:
        inside = CONTAINER in command.within
        begins = runtime_at(command)
        names = command.names
        found = [
            name for place, name in enumerate(names) if name in tools and (inside and place == 0 or 0 <= begins < place)
        ]
        if found:
            yield Hit(command.line, {"name": found[0]})


def gpus_task_by_task(context: Context) -> Iterator[Hit]:
    """Find GPUs handed out task by task where a task has neighbours on its node."""
    script = context.script
    steps = [each for each in script.started_anywhere if each.step == "srun"]
    shared = [each for each in steps if (script.likely(each).tasks_per_node or 2) > 1]
    for name, value, line in [
        *((name, value, each.line) for each in shared for name, value in each.flags.items()),
        *((each.name, each.value, each.line) for each in script.directives if shared),
    ]:
        if name == "gpus-per-task" or name == "gpu-bind" and value not in ("none", "N"):
            yield Hit(line, {"instead": "--gpu-bind=none" if name == "gpu-bind" else "--gpus-per-node"})


CHECKS = by_name(
    comment_in_command, blanks_around_equals, never_set, typographic, continuation, joined_lines, quote_unclosed,
    script_cut, carriage_returns, variable_as_command, missing_semicolon, exit_code_lost, dollar_escaped, placeholder,
    clone_then_cd, export_of_itself, export_of_prose, stops_all_containers, appended_to, interpreter_not_first,
    submits_itself, beside_script, gpus_task_by_task, sbatch_late, sbatch_misspelt,
    cores_for_many_tasks, cores_for_one_task, masks_overlap,
    rank_frozen, not_exported, launched_on_one_node, monitor_on_one_node, staged_on_one_node,
    output_folder_too_late, output_folder_missing,
    not_waited_for, scontrol_in_container,
)  # fmt: skip
