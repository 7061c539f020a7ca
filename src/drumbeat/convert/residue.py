"""The statements before the training, as far as a job file needs them: `env` for what is decided, `on-start` and `setup` for
all else.

Each is a slice of the script: every statement that acts or changes the shell, and those that give a variable which the command,
the ranks' environment or a later statement of the slice reads. `setup`, which every rank runs, takes what a task runs, and what
only brings an environment. As soon as the batch script does more than that, it keeps it: `on-start` runs once, where the batch
script runs, and what it exports reaches the ranks as srun would bring it there.
"""

from __future__ import annotations

import re
from typing import FrozenSet, List, Optional, Set

from drumbeat.base.redact import is_secret
from drumbeat.commands.events import Event, options_at
from drumbeat.commands.programs import ASK, WITH_FILES
from drumbeat.commands.state import ARGUMENTS
from drumbeat.commands.syntax import DECLARING, arguments_read, into_file, names_read, parse, program_of
from drumbeat.commands.values import HEAD, HOSTS, JOB, MARK, ONCE, SUBMIT, TASK, Unknown, at_submission
from drumbeat.convert.draft import Draft, LeftOut
from drumbeat.convert.job_shell import OWN_PATH, JobShell, by_own_name
from drumbeat.convert.launch import AS_TEXT, IMAGE_FOLDER, OURS, PLACE, WORKED_OUT, Launch

_VERBS = (
    "load", "add", "purge", "reset", "use", "unuse", "unload", "rm", "del", "swap", "switch", "restore", "save", "list", "avail",
    "spider", "show", "refresh", "try-load", "--force", "-q",
)  # fmt: skip
_NEXT = re.compile(
    r"\bsbatch(?:\s+(?:--parsable|-Q|--quiet))*\s+(?:--dependency[=\s]|-d\s*)(?:singleton|afterany:\$\{?SLURM_JOB_?ID\}?)"
    r"\s+[\"']?\$(?:0|\{0\})[\"']?\s*(?:[)`]|$)"
)
_MOST_JOBS = 20  # of a script that submits itself without end
_BY_NAME = re.compile(r"\$\{!\w+\}|\\\$\{?\$")  # ${!1}, eval echo \$$1: which variable it is, only the job knows
_LIMITS = ("ulimit", "umask", "stty")  # of a process: they do not come back from on-start
_OF_STEPS = ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK")  # srun's defaults
OF_TASKS = (
    *_OF_STEPS, "SLURM_NPROCS", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_GPU", "SLURM_GPUS", "SLURM_GPUS_PER_TASK",
    "SLURM_TRES_PER_TASK",
)  # fmt: skip  # otherwise in our job
_NUMBERED = frozenset("123456789")


def keep(draft: Draft, launch: Launch, wanted: FrozenSet[str]) -> None:
    """Write `env`, `on-start`, `setup`, `modules` and `workdir`. The command reads `wanted`, which must be exported."""
    _Residue(draft, launch, wanted).write()


class _Residue:
    def __init__(self, draft: Draft, launch: Launch, wanted: FrozenSet[str]) -> None:
        self.draft, self.launch, self.marks = draft, launch, draft.marks
        self.variables = launch.shell.variables
        self.wanted = wanted
        self.shown = {name for name, variable in self.variables.items() if variable.exported}
        self.exported = self.shown | wanted
        self.in_env: Set[str] = set()
        self.places = {id(event): place for place, event in enumerate(launch.events)}
        self.late = next((place for place, event in enumerate(launch.events) if ARGUMENTS in event.writes), 1 << 30)
        self.once = bool(launch.in_binds or launch.for_end)  # what the batch script runs goes into on-start
        self.given = dict(draft.env)
        # of the script; empty: nobody gave any
        self.arguments = " ".join(map(draft.marks.quoted, draft.arguments or ()))
        self.elsewhere = "workdir" in draft.keys  # the script does not begin where it is submitted

    def write(self) -> None:
        kept = self._settled()
        modules = self._modules(kept)
        if any(map(self._only_once, [event for event in kept if self._outside(event) and event not in modules])):
            self.once = True
            kept = self._settled()
        for event in modules:
            kept.remove(event)
        self._emit(kept)
        events, variables = self.launch.events, self.variables
        given = [events[variables[name].event] for name in self.draft.env if name in self.in_env]
        for event in [*modules, *kept, *given]:
            self.draft.carried |= set(range(event.line, event.line + 1 + event.text.count("\n")))

    def _outside(self, event: Event) -> bool:
        return self.places[id(event)] < self.launch.outside

    def _arguments(self, event: Event) -> Set[str]:
        """Return the arguments of the script that a statement reads, before it gets others that only the job knows."""
        early = self.places[id(event)] < self.late
        acts = early and event.kind in ("shell", "once") and "()" not in event.text
        gives = early and event.kind == "assign" and self._known(event) is None  # as written
        return arguments_read(event.text, not self.arguments) if acts or gives else set()

    def _settled(self) -> List[Event]:
        later: Set[str] = set()
        while True:
            self.draft.env, self.in_env = dict(self.given), set()
            kept = self._slice(set(self.wanted) | self._environment(later))
            early = self._read_too_early(kept)
            if not early:
                return kept
            later |= early

    def _read_too_early(self, kept: List[Event]) -> Set[str]:
        """Return variables of `env` whose earlier value a statement of `setup` reads or changes."""
        return {
            name
            for event in kept
            if not (self.once and self._outside(event))
            for name in (self._reads(event) | event.writes) & self.in_env
            if self.places[id(event)] < self.variables[name].event
        }

    def _only_once(self, event: Event) -> bool:
        """Return true for a statement that `setup` cannot take: its effect is lost in a container, or differs by rank."""
        if OWN_PATH.search(event.text):
            return True
        if event.kind == "assign":
            value = "".join(event.value or "")
            found = list(self.marks.of(value))
            late = any(each.kind in (ONCE, TASK, HOSTS, HEAD) or "$(" in each.text + each.made for each in found)
            return late or bool(self.launch.shell.cwd) and any(map(at_submission, found))
        if event.kind == "shell" and event.soft and not _module(event):
            return self.launch.container and event.words[:1] not in [(name,) for name in _LIMITS] and not event.writes
        return event.kind not in ("export", "cd") or self.marks.kind(self.launch.shell.cwd) not in ("", SUBMIT)

    def _environment(self, not_in_env: Set[str]) -> Set[str]:
        """Put decided variables into `env`; return the names that `on-start` or `setup` must set."""
        events = self.launch.events
        hard = [
            place for place, each in enumerate(events) if each.kind == "shell" and not each.soft and not each.writes
        ]
        later: Set[str] = set()
        for name in sorted(
            self.exported, key=lambda name: self.variables[name].event if name in self.variables else -1
        ):
            variable = self.variables.get(name)
            if variable is None or not isinstance(variable.value, str) or variable.event < 0:
                continue
            value, at = variable.value, variable.event
            line = events[at].line if at < len(events) else self.launch.line
            # `env` holds before `setup`, and after `on-start`
            settled = all(place < at if self.once and place < self.launch.outside else at < place for place in hard)
            if name in OURS:
                self.draft.drop(line, events[at].text if at < len(events) else f"{name}={value}", WORKED_OUT)
            elif is_secret(name, self.marks.shown(value)) and not MARK.fullmatch(value):
                self.draft.env[name] = "pass"
                self.in_env.add(name)
                note = LeftOut(
                    line, name, "looks secret, so it is handed on by name; it stood in plain text: revoke it"
                )
                if note not in self.draft.to_export:
                    self.draft.to_export.append(note)
            elif (
                name not in not_in_env
                and self.marks.kind(value) in ("", SUBMIT)
                and settled
                and name not in self.marks.reads(value)  # it extends the node's own
                and not any(each.endswith("PATH") for each in self.marks.reads(value))
            ):
                self.draft.env[name] = value
                self.in_env.add(name)
            else:
                later.add(name)
        return later

    def _slice(self, needed: Set[str]) -> List[Event]:
        kept: List[Event] = []
        if any(_BY_NAME.search(event.text) for event in self.launch.events[: self.launch.outside]):
            needed |= {name for event in self.launch.events for name in event.writes if event.kind == "assign"} - OURS
        for place in range(len(self.launch.events) - 1, -1, -1):
            event = self.launch.events[place]
            ours = self.once and place < self.launch.outside  # written down with all that it needs
            if event.kind == "arguments":
                kept += [event] if any(map(self._arguments, kept)) else []
                continue
            if event.kind in ("started", "part") or event.kind == "print" and not self._waits(place):
                continue
            if event.kind in ("assign", "export"):
                names = event.writes & needed - {name for name, value in self.draft.env.items() if value == "pass"}
                final = {name for name in names if name in self.variables and self.variables[name].event == place}
                known = names <= OURS or names <= self.in_env and (final or event.kind == "export")
                if names and (ours or not known) or not names and self._acts(event):
                    kept.append(event)
                    if event.kind == "assign":
                        needed -= event.writes
                    needed |= self._reads(event)
                continue
            if event.kind == "shell" and event.writes and not event.soft and not _has_effects(event):
                if not event.writes & needed:
                    continue  # it only gives variables that nothing reads
            elif event.words[:1] in (("source",), (".",)) and not event.soft:  # it may read all that is set before it
                needed |= {
                    name for each in self.launch.events[:place] if each.kind == "assign" for name in each.writes
                } - OURS
            elif ours and not (event.kind == "cd" or event.soft or set(event.words[:1]) & WITH_FILES):
                needed |= self.exported - OURS  # what it starts may read them
            if re.search(r"\bsbatch\b.*\$\{?0\b", event.text, re.DOTALL):
                self._submits_itself(event)
                continue
            if event.kind == "once" and any(self.marks.resolved(word) == "$0" for word in event.words[1:]):
                why = "$0 is drumbeat's batch script here, and Slurm's copy of yours there: name the file"
                copies = bool(set(event.words[:1]) & WITH_FILES)  # the script that Slurm runs, as there
                self.draft.question(event.line, event.text, why, advice=copies)
            if event.kind == "cd" and not ours and not self._cd_in_setup(place):
                continue
            if place < self.launch.outside and not self.arguments and self._arguments(event) - _NUMBERED:
                why = "looks at the batch script's own arguments: give them to convert, after the script's name"
                self.draft.question(event.line, event.text, why)
                continue
            kept.append(event)
            needed |= self._reads(event)
        return kept[::-1]

    def _submits_itself(self, event: Event) -> None:
        """Write an array of one job at a time if each job submits the next one, whatever becomes of itself."""
        why = (
            "the script submits itself: array, dependency and requeues of the job file do that, or a line after submit"
        )
        simple = [each.kind for each in parse(event.text)] == ["simple"]
        chain = _NEXT.search(event.text) and simple and self._outside(event)
        if chain and self.draft.lines.setdefault("array", event.line) == event.line:
            self.draft.set("array", f"1-{_MOST_JOBS}%1", event.line)
            why = f"each job submits the next one, without end; here {_MOST_JOBS}, one at a time: write your number (array)"
        self.draft.question(event.line, event.text, why, advice=self.draft.lines.get("array") == event.line)

    def _acts(self, event: Event) -> bool:
        """Return true for an assignment whose `$(...)` may change something."""
        nodes = (
            not self._outside(event)
            or event.writes <= OURS
            or self.marks.kind("".join(event.value or "")) in (HEAD, HOSTS)
        )
        return not nodes and self.launch.shell.changes(parse(event.text))

    def _waits(self, place: int) -> bool:
        """Return true for a `wait` after something that on-start leaves in the background."""
        before = self.launch.events[:place] if place < self.launch.outside else []
        left = any(
            node.background
            for each in before
            if each.kind in ("once", "shell")
            for top in parse(each.text)
            for node in top.walk()
        )
        return left and bool(re.match(r"wait\b", self.launch.events[place].text))

    def _reads(self, event: Event) -> Set[str]:
        text = self._known(event)
        event.reads |= self.marks.reads(event.text)
        reads = set(self.marks.reads(text) if text is not None else event.reads)
        return reads if self.once and self._outside(event) else reads - OURS

    def _known(self, event: Event) -> Optional[str]:
        """Return the value of an assignment if it is valid where the statement stands, else None."""
        value = event.value
        if value is None or event.kind != "assign":
            return None
        text = value if isinstance(value, str) else "".join(value)
        unknown = list(self.marks.of(text))
        mine = all(event.writes.isdisjoint(each.reads) or each.stable for each in unknown)
        held = any(each.kind == HOSTS for each in unknown)
        earlier = self.launch.events[: self.places[id(event)]]
        reads = self.marks.reads(text)
        old = any(not each.writes.isdisjoint(reads) for each in earlier if each.kind == "assign")
        return text if mine and not held and not (old and self.marks.stable(text)) else None

    def _cd_in_setup(self, place: int) -> bool:
        """Return true if the directory is known, or exists, only after earlier statements have run."""
        acts = any(each.kind in ("once", "each") or each.kind == "shell" and not _module(each)
                   for each in self.launch.events[:place])  # fmt: skip
        return acts or self.marks.kind(self.launch.shell.cwd) not in ("", SUBMIT)

    def _emit(self, kept: List[Event]) -> None:
        batch = [event for event in kept if self.once and self._outside(event)]
        setup = [event for event in kept if event not in batch or event.words[:1] and event.words[0] in _LIMITS or
                 re.match(r"unset [\w ]+$", event.text) and not any(
                     event.writes & each.writes for each in self.launch.events[self.places[id(event)] + 1 :])]  # fmt: skip
        batch = [event for event in batch if event.words[:1] == () or event.words[0] not in _LIMITS]
        place = self._workdir(batch, any(event.kind == "cd" for event in setup))
        self.draft.on_start = self._written(batch, self.elsewhere)
        lines = self._written(setup, bool(place) or "workdir" in self.draft.keys)
        hidden = sorted(self.launch.in_binds - self.shown - self.launch.as_text)
        self.draft.setup = [*place, *([f"export -n {' '.join(hidden)}"] if hidden else []), *lines]

    def _workdir(self, batch: List[Event], in_setup: bool) -> List[str]:
        """Write `workdir`, or return what `setup` must do to get there."""
        workdir = self.launch.workdir or self.launch.shell.cwd
        moves = [event for event in batch if event.kind == "cd"]
        there = self.marks.kind(workdir) in ("", SUBMIT)
        inside = any(event.kind == "cd" and not self._outside(event) for event in self.launch.events)
        if self.launch.container and (self.launch.workdir or inside and not self.marks.kind(workdir)):
            return [f"cd {self._quoted(workdir, self.elsewhere)}"]
        if workdir.startswith(self.marks.mark(IMAGE_FOLDER)):
            return ['cd "$OLDPWD"']
        begin = self.draft.keys.get("workdir") or self.marks.mark(Unknown("${SLURM_SUBMIT_DIR}", JOB))
        if moves and not self.launch.workdir and (not there or self._cd_in_setup(self.places[id(moves[-1])])):
            if there:
                return [f"cd {self._quoted(workdir, self.elsewhere)}"]
            batch.append(Event("shell", self.launch.line, f'export {PLACE}="$PWD"', writes=frozenset((PLACE,))))
            self.places[id(batch[-1])] = self.launch.outside - 1
            return [f'cd "${PLACE}"']
        if workdir and not in_setup and there:
            line = next((event.line for event in self.launch.events[::-1] if event.kind == "cd"), self.launch.line)
            here = re.match(f"{MARK.pattern}/", workdir)
            relative = here is not None and self.marks.get(here[0][0]).text == "${PWD}"
            self.draft.set("workdir", workdir[2:] if relative else workdir, line)
            if moves or batch and self.launch.workdir:  # on-start begins in `workdir`
                batch.insert(0, Event("cd", line, f"cd {self.marks.quoted(begin)}"))
                self.places[id(batch[0])] = -1
        return []

    def _quoted(self, text: str, moved: bool) -> str:
        """Return a shell word. `moved`: the shell has left the folder in which the job was submitted."""
        return self.marks.quoted(
            text, lambda unknown: "${SLURM_SUBMIT_DIR}" if moved and at_submission(unknown) else unknown.text
        )

    def _written(self, events: List[Event], moved: bool) -> List[str]:
        """Return the statements as lines under the script's own `set` options; drumbeat itself begins with `set -e`."""
        lines: List[str] = []
        now = frozenset("e")
        relies = False  # on -e, a statement before the first `set`
        for event in events:
            text = self._assignment(event, moved) if event.kind == "assign" else event.text
            if self._outside(event) and "<<" not in text:  # a heredoc may be of another script
                text = by_own_name(text)
            moved = moved or event.kind == "cd" and self.places[id(event)] >= 0
            chooses = any(name == "e" for _, name, _ in self.launch.options)  # the script says itself from where on
            environment = not event.words or JobShell.environments.match(event.text)  # one that fails stops the job
            fails = set(event.words[:1]) & {"source", ".", *_LIMITS} and not environment
            acts = event.kind in ("once", "each") or event.kind == "shell" and (not event.soft or chooses or fails)
            substitutes = bool(re.search(r"\$\((?!\()|`", text))
            acts = acts or substitutes
            options = self.launch.options if self._outside(event) else self.launch.shell.options
            there = options_at(options, self.places[id(event)]) - _PRINTING
            if event.kind == "assign" and substitutes and "e" in there and not event.words:
                # `export` hides a failure
                text = re.sub(r"\Aexport (\w+)(=.*)", r"\1\2\nexport \1", text, flags=re.DOTALL)
            wanted = there if acts else there - {"e"} | now & {"e"}
            if wanted != now and (acts or event.kind not in ("assign", "export") or "$" in text):
                first = wanted < now == {"e"} and not relies and not any(line.startswith("set ") for line in lines)
                held = "; -e is on already" if "e" in now & wanted and not lines else ""
                lines.insert(0 if first else len(lines), f"set {changed(now, wanted)}  # as in the script{held}")
                now = wanted
            relies = relies or acts and "e" in now
            lines.append(text)
        written = "\n".join(lines)
        sure = {name for name in self.exported if name not in self.variables or not self.variables[name].maybe} - OURS
        given = {name for event in events for name in event.writes & (sure | self.wanted)}
        also = {name for name in given if not re.search(rf"^export {name}\b", written, re.M)}
        lines += [
            f'export {AS_TEXT}{name}="$(declare -p {name} 2> /dev/null)"' for name in sorted(also & self.launch.as_text)
        ]
        also -= self.launch.as_text
        lines += [f"export {' '.join(sorted(also))}"] if also else []
        step = any(event.words[:1] == ("srun",) or re.search(r"\bsrun\b", event.text) for event in events)
        reads = names_read(written)
        known = self.launch.shell.known
        tasks = [f"{name}={known[name]}  # as in the script" for name in OF_TASKS
                 if self.once and known.get(name) and (step and name in _OF_STEPS or name in reads)]  # fmt: skip
        needed, before, used = 0, 0, False
        for event in filter(self._outside, events):
            before += int(event.text[6:]) if event.kind == "arguments" and event.text.startswith("shift") else 0
            if event.kind == "arguments" and event.text.startswith("set"):
                break  # what follows reads others
            used = used or bool(self._arguments(event))
            needed = max([needed, *(before + int(each) for each in self._arguments(event) if each.isdigit())])
        if used:
            numbered = [f'"${{ARG_{number}?}}"' for number in range(1, needed + 1)]
            tasks.insert(0, f"set -- {self.arguments or ' '.join(numbered)}")
        return [line for text in [*tasks, *lines] for line in self.marks.shown(text).split("\n")]

    def _assignment(self, event: Event, moved: bool) -> str:
        found = re.match(r"(\w+)=", event.text)
        name = found[1] if found and found[1] in event.writes else next(iter(event.writes), "")
        variable = self.variables.get(name)
        exports = name in self.exported - OURS - self.launch.as_text and not (variable and variable.maybe)
        export = "export " if exports and re.match(rf"{re.escape(name)}=", event.text) else ""
        if self._known(event) is None or event.value is None:
            return export + event.text
        items = [event.value] if isinstance(event.value, str) else event.value
        text = " ".join(self._quoted(each, moved) for each in items)
        return f"{export}{name}={text if isinstance(event.value, str) else f'({text})'}"

    def _modules(self, kept: List[Event]) -> List[Event]:
        """Return the module statements that the key `modules` can replace: those before any statement that acts."""
        draft, done = self.draft, []
        for event in kept:
            if not _module(event):
                if event.kind not in ("assign", "export"):
                    break
                continue
            rest = [word for word in event.words[1:] if word not in ("-q", "--force", "--quiet")]
            verb = rest.pop(0) if rest and (event.words[0] == "module" or rest[0] in _VERBS) else "load"
            if verb in ("purge", "reset"):
                draft.modules.append(verb)
            elif verb in ("load", "add") and self.marks.kind("".join(rest)) in ("", SUBMIT):
                draft.modules += rest
            elif verb not in ("list", "avail", "spider", "show"):
                break
            done.append(event)
        return done


_PRINTING = frozenset("xv")


def changed(before: FrozenSet[str], after: FrozenSet[str]) -> str:
    """Return the arguments of `set` that change one set of options into another."""
    words = []
    for sign, names in (("-", sorted(after - before)), ("+", sorted(before - after))):
        letters = "".join(name for name in names if len(name) == 1)
        words += [f"{sign}{letters}"] if letters else []
        words += [f"{sign}o {name}" for name in names if len(name) > 1]
    return " ".join(words)


def _module(event: Event) -> bool:
    return event.kind == "shell" and event.words[:1] in (("module",), ("ml",))


_SILENT = DECLARING | {"echo", "printf", "read", "mapfile", "readarray", "let", "continue", "break", ":"}


def _has_effects(event: Event) -> bool:
    """Return true if a kept compound statement may do more than assign variables."""
    nodes = [each for top in parse(event.text) for each in top.walk()]
    called = {program_of(each) for each in nodes if each.words and each.kind in ("simple", "unknown")}
    return any(map(into_file, nodes)) or not called <= _SILENT | ASK
