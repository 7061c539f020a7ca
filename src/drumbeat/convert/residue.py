"""The statements before the training, as far as a job file needs them: `env` for what is decided, `setup` for all else.

`setup` is a slice of the script: each statement that changes the shell, and each that gives a variable which the
command, the ranks' environment or a later statement of the slice reads. What a statement gives is written down where it
is known. What the batch script does once is done by rank 0.
"""

from __future__ import annotations

import re
from typing import Callable, Dict, FrozenSet, List, Optional, Set

from drumbeat.base.redact import is_secret
from drumbeat.commands.interpret import Event
from drumbeat.commands.syntax import names_read, parse
from drumbeat.commands.values import HOSTS, MARK, ONCE, SUBMIT, TASK, Marks
from drumbeat.convert.draft import Draft
from drumbeat.convert.launch import OURS, WORKED_OUT, Launch

_VERBS = (
    "load", "add", "purge", "reset", "use", "unuse", "unload", "rm", "del", "swap", "switch", "restore", "save", "list", "avail",
    "spider", "show", "refresh", "try-load", "--force", "-q",
)  # fmt: skip
_LATER_MODULES = (
    "modules that need what runs before them are loaded in `setup`, on every node: `module` must be known there"
)
_BY_RANK_0 = "run once before all tasks in the script; here by rank 0, for which the others do not wait"
_BY_EACH_NODE = (
    "run before all tasks in the script; here by the first rank of each node, for which the others do not wait"
)
_INSIDE = (
    "run before the container starts in the script; `setup` runs inside it: what it does for the container is lost"
)
_FIRST = '[ "${RANK:-${NODE_RANK:-0}}" = 0 ]'
_FIRST_HERE = '[ "${LOCAL_RANK:-0}" = 0 ]'
_ARGUMENTS = re.compile(r"\$(?:\{?[0-9@*#](?![A-Za-z_{]))")


def keep(draft: Draft, launch: Launch, needed: FrozenSet[str], wanted: FrozenSet[str]) -> None:
    """Write `env`, `setup`, `modules` and `workdir`. The command reads `needed`; `wanted` of them must be exported."""
    _Residue(draft, launch, wanted).write(needed)


class _Residue:
    def __init__(self, draft: Draft, launch: Launch, wanted: FrozenSet[str]) -> None:
        self.draft, self.launch, self.marks = draft, launch, draft.marks
        self.variables = launch.shell.variables
        self.exported = {name for name, variable in self.variables.items() if variable.exported} | wanted
        self.wanted = wanted
        self.lines: List[str] = []
        self.acted = False  # something but assignments is in `lines`
        self.in_env: Set[str] = set()
        self.places: Dict[int, int] = {}

    def write(self, needed: FrozenSet[str]) -> None:
        later: Set[str] = set()
        while True:
            self.draft.env = {name: value for name, value in self.draft.env.items() if name not in self.in_env}
            self.in_env.clear()
            kept = self._slice(set(needed) | self._environment(later))
            early = self._read_too_early(kept)
            if not early:
                break
            later |= early
        self._emit(kept)

    def _read_too_early(self, kept: List[Event]) -> Set[str]:
        """Return variables in `env` of which a statement needs, or changes, the value that they had before."""
        return {
            name
            for event in kept
            for name in (self._reads(event) | event.writes) & self.in_env
            if self.places[id(event)] < self.variables[name].event
        }

    def _environment(self, not_in_env: Set[str]) -> Set[str]:
        """Put what is decided into `env`; return the names that `setup` must give."""
        events = self.launch.events
        hard = next(
            (place for place, each in enumerate(events) if each.kind == "shell" and not each.soft and not each.writes),
            len(events),
        )
        later: Set[str] = set()
        for name in sorted(
            self.exported, key=lambda name: self.variables[name].event if name in self.variables else -1
        ):
            variable = self.variables.get(name)
            if variable is None or not isinstance(variable.value, str) or variable.event < 0:
                continue
            value, line = (
                variable.value,
                events[variable.event].line if variable.event < len(events) else self.launch.line,
            )
            if name in OURS:
                text = events[variable.event].text if variable.event < len(events) else f"{name}={value}"
                self.draft.drop(line, text, WORKED_OUT)
            elif is_secret(name, self.marks.shown(value)) and not MARK.fullmatch(value):
                self.draft.env[name] = "pass"
                self.in_env.add(name)
                why = "looks secret: export it before you submit, and it is handed on by name"
                self.draft.question(line, name, why)
            elif (
                name not in not_in_env
                and self.marks.kind(value) in ("", SUBMIT)
                and variable.event < hard
                and not _of_the_node(name, value, self.marks.reads(value))
            ):
                self.draft.env[name] = value
                self.in_env.add(name)
            else:
                later.add(name)
        return later

    def _slice(self, needed: Set[str]) -> List[Event]:
        kept: List[Event] = []
        for place in range(len(self.launch.events) - 1, -1, -1):
            event = self.launch.events[place]
            self.places[id(event)] = place
            if event.kind in ("print", "started"):
                continue
            if event.kind in ("assign", "export"):
                names = event.writes & needed
                final = {name for name in names if name in self.variables and self.variables[name].event == place}
                if names and not (names <= self.in_env and (final or event.kind == "export")) and not names <= OURS:
                    kept.append(event)
                    if event.kind == "assign":
                        needed -= event.writes
                    needed |= self._reads(event)
                continue
            if (
                event.kind == "shell"
                and event.writes
                and not event.soft
                and not _has_effects(event)
                and not event.writes & needed
            ):
                continue  # it only gives variables that nothing reads
            if re.search(r"\bray\s+(?:start|stop)\b", event.text):
                why = "drumbeat starts no Ray cluster: keep this script, with drumbeat run --launcher once before the driver"
                self.draft.question(event.line, event.text, why)
                continue
            if event.kind == "cd" and not self._cd_in_setup(place):
                continue
            if (
                event.kind == "shell"
                and _ARGUMENTS.search(re.sub(r"'[^']*'", "", event.text))
                and event in self.launch.events[: self.launch.outside]
            ):
                why = "looks at the batch script's own arguments: give them to convert, after the script's name"
                self.draft.question(event.line, event.text, why)
                continue
            kept.append(event)
            needed |= self._reads(event)
        return kept[::-1]

    def _reads(self, event: Event) -> Set[str]:
        text = self._known(event)
        event.reads |= self.marks.reads(event.text)
        return set(self.marks.reads(text) if text is not None else event.reads) - OURS

    def _known(self, event: Event) -> Optional[str]:
        """Return the value of an assignment, if it can be written down where the statement stands."""
        value = event.value
        if value is None or event.kind != "assign":
            return None
        text = value if isinstance(value, str) else "".join(value)
        mine = all(event.writes.isdisjoint(unknown.reads) or unknown.stable for unknown in self.marks.of(text))
        held = any(unknown.kind in (HOSTS,) for unknown in self.marks.of(text))
        earlier = self.launch.events[: self.places.get(id(event), 0)]
        old = (
            any(not each.writes.isdisjoint(self.marks.reads(text)) for each in earlier if each.kind == "assign")
            if text
            else False
        )
        return text if mine and not held and not (old and self.marks.stable(text)) else None

    def _cd_in_setup(self, place: int) -> bool:
        before = self.launch.events[:place]
        acts = any(
            each.kind in ("once", "each") or (each.kind == "shell" and each.words[:1] not in (("module",), ("ml",)))
            for each in before
        )
        known = self.marks.kind(self.launch.shell.cwd) in ("", SUBMIT)
        return acts or not known

    def _emit(self, kept: List[Event]) -> None:
        workdir = self.launch.workdir or self.launch.shell.cwd
        in_setup = any(event.kind == "cd" for event in kept)
        if workdir and not in_setup and self.marks.kind(workdir) in ("", SUBMIT):
            line = next((event.line for event in self.launch.events[::-1] if event.kind == "cd"), self.launch.line)
            self.draft.set("workdir", re.sub(f"^{MARK.pattern}/", _without_here(self.marks), workdir), line)
        once: List[str] = []
        stops, first = True, True  # `setup` ends at its first error, unless it says otherwise
        for event in kept:
            outside = event in self.launch.events[: self.launch.outside]
            lines = self._written(event, outside)
            acts = event.kind in ("once", "each") or (event.kind == "shell" and not event.soft)
            if outside and lines and self.launch.container and event.kind in ("once", "shell"):
                self.draft.question(event.line, event.text, _INSIDE)
            if acts and lines and self._stops(event, outside) is not stops:
                self._flush(once)
                stops, once = not stops, []
                place = 0 if first else len(self.lines)
                self.lines.insert(place, f"set {'-' if stops else '+'}e  # as in the script")
            first = first and not (acts and lines)
            if (
                outside
                and event.kind == "once"
                and lines
                and lines != self._by_every_rank(event)
                and not _in_every_node(event)
            ):
                once += lines
                continue
            self._flush(once)
            once = []
            self.lines += lines
            self.acted = self.acted or event.kind != "assign" and bool(lines)
        self._flush(once)
        exported = {name for name in self.exported if name not in self.variables or not self.variables[name].maybe}
        written = "\n".join(self.lines)
        given = {name for event in kept for name in event.writes & (exported | self.wanted)}
        also = {name for name in given if not re.search(rf"^export {name}\b", written, re.M)}
        self.lines += [f"export {' '.join(sorted(also))}"] if also else []
        shown = {name for name, each in self.variables.items() if each.exported and not each.maybe}
        self.launch.also = frozenset(self.wanted - shown)
        self.draft.setup = [line for text in self.lines for line in self.marks.shown(text).split("\n")]

    def _stops(self, event: Event, outside: bool) -> bool:
        """Return true if an error of this statement ends the script."""
        said = self.launch.errexit if outside else self.launch.shell.errexit
        return next((on for place, on in said[::-1] if place <= self.places[id(event)]), False)

    def _flush(self, once: List[str]) -> None:
        if once:
            self.acted = True
            self.lines += [f"if {_FIRST}; then  # once, as in the script", *once, "fi"]

    def _written(self, event: Event, outside: bool) -> List[str]:
        draft, words = self.draft, event.words
        if event.kind == "assign":
            return [self._assignment(event)]
        if event.kind == "shell" and words[:1] and words[0] in ("module", "ml"):
            return self._modules(event)
        if event.kind == "once" and words[:1] == ("srun",):
            text = re.sub(r"^\s*srun\s+(?:-\S+\s+(?:\d+\s+)?)*", "", event.text)
            every = _in_every_node(event)
            self.draft.question(event.line, event.text, _BY_EACH_NODE if every else _BY_RANK_0)
            return [f"if {_FIRST_HERE}; then {text}; fi" if every else text]
        if event.kind == "once" and outside:
            alike = self._by_every_rank(event)
            if alike:
                return alike
            self.draft.question(event.line, event.text, _BY_RANK_0)
        if event.kind in ("once", "shell") and re.search(r"\b(?:srun|sbatch)\b", event.text):
            draft.question(event.line, event.text, "asks Slurm on every node, inside the job: write its value")
        return [event.text]

    def _by_every_rank(self, event: Event) -> List[str]:
        """Return a statement that may run in every rank with the same effect, so that none has to wait for rank 0: `mkdir -p`,
        and a text written into a file, which then appears whole. Nothing for any other."""
        node = next(iter(parse(event.text)), None)
        names = names_read(event.text)
        values = "".join("".join(self.launch.shell.lookup(name) or "") for name in names) + "".join(event.words)
        if node is None or node.kind != "simple" or node.background or self.marks.kind(values) in (TASK, ONCE):
            return []
        if event.words[:1] == ("mkdir",) and not node.redirects:
            return [event.text] if any(re.fullmatch(r"-\w*p\w*|--parents", word) for word in event.words) else []
        files = [token for token in node.redirects if token.text == ">" and token.word]
        asks = any("$(" in each.text or "`" in each.text for each in node.heredocs if not each.literal)
        if event.words != ("cat",) or len(node.heredocs) != 1 or len(node.redirects) != 2 or len(files) != 1 or asks:
            return []
        path = event.text[files[0].start : files[0].end].lstrip("> ")
        own = f"{path}.$HOSTNAME.$$"
        text = f"{event.text[: files[0].start]}> {own}{event.text[files[0].end :]}"
        return [text, f"mv -f {own} {path}"]

    def _assignment(self, event: Event) -> str:
        name = next(iter(event.writes)) if len(event.writes) == 1 else ""
        variable = self.variables.get(name)
        exports = name in self.exported and not (variable and variable.maybe)
        export = "export " if exports and re.match(rf"{re.escape(name)}=", event.text) else ""
        if self._known(event) is not None and event.value is not None:
            items = event.value
            text = (
                self.marks.quoted(items) if isinstance(items, str) else f"({' '.join(map(self.marks.quoted, items))})"
            )
            return f"{export}{name}={text}"
        kinds = {unknown.kind for unknown in self.marks.of("".join(event.value or ""))}
        own = event.text.partition("=")[2]
        if ONCE in kinds:
            self.draft.question(
                event.line, event.text, "worked out once in the script, here by every rank: they may differ"
            )
        elif TASK in kinds and not self.launch.shell.task:
            self.draft.question(
                event.line, event.text, "worked out on the first node in the script, here on every node"
            )
        if re.search(r"\b(?:srun|scontrol)\b", own):
            self.draft.question(event.line, event.text, "asks Slurm on every node, inside the job: write its value")
        return export + event.text

    def _modules(self, event: Event) -> List[str]:
        draft, rest = self.draft, [word for word in event.words[1:] if word not in ("-q", "--force", "--quiet")]
        verb = rest.pop(0) if rest and (event.words[0] == "module" or rest[0] in _VERBS) else "load"
        if verb in ("purge", "reset") and not self.acted:
            draft.drop(event.line, event.text, "modules are loaded in a clean environment")
        elif verb in ("list", "avail", "spider", "show"):
            return []
        elif verb in ("load", "add") and not self.acted and self.marks.kind("".join(rest)) in ("", SUBMIT):
            draft.modules += rest
        else:
            draft.question(event.line, event.text, _LATER_MODULES)
            return [event.text]
        return []


def _without_here(marks: Marks) -> Callable[[re.Match[str]], str]:
    return lambda found: "" if marks.get(found[0][0]).text == "${PWD}" else found[0]


def _in_every_node(event: Event) -> bool:
    """Return true for what a step of its own does on all nodes, such as copying data to their disks."""
    one = re.search(r"\s(?:-[nN]\s?1|--(?:ntasks|nodes)[= ]1|-w|--nodelist)(?=[\s=])", event.text)
    return event.kind == "once" and event.words[:1] == ("srun",) and not one


def _of_the_node(name: str, value: str, reads: FrozenSet[str]) -> bool:
    """Return true for a value that goes on from what the node has, such as a search path."""
    return name in reads or any(each.endswith("PATH") for each in reads)


def _has_effects(event: Event) -> bool:
    """Return true if a kept compound statement may do more than assign variables."""
    plain = re.sub(r"#.*", "", event.text)
    commands: Dict[str, int] = {}
    for found in re.finditer(r"(?:^|[;&|]|\b(?:then|else|do)\b)\s*([\w./-]+)(?![\w]*\+?=)", plain, re.M):
        commands[found[1]] = 1
    silent = {
        "if",
        "then",
        "else",
        "elif",
        "fi",
        "for",
        "while",
        "until",
        "do",
        "done",
        "case",
        "esac",
        "echo",
        "export",
        "declare",
        "local",
        "in",
        "test",
    }
    return bool(set(commands) - silent)
