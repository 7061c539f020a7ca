"""The state of an interpreted shell script, and how its simple commands change it.

Each statement leaves an event. What a command is started with, `argv` and exported variables, is text with marks for
what only the running job knows (`values`). A condition that cannot be decided stays as it stands, with all that it may
assign unknown from there on. Steps and lengths of values are bounded.
"""

from __future__ import annotations

import copy
import re
from typing import Any, Callable, Dict, FrozenSet, List, Mapping, Optional, Sequence, Tuple, TypeVar

from drumbeat.base.problem import Problem
from drumbeat.commands.events import (
    MAX_MADE,
    MAX_STEPS,
    Event,
    Exit,
    Leaves,
    Return,
    Started,
    Statement,
    Trap,
    Variable,
    options_at,
)
from drumbeat.commands.expand import MAX_VALUE, Expander, Value, calculated
from drumbeat.commands.shell import Lexer
from drumbeat.commands.syntax import (
    Node,
    assignment,
    bodies_of,
    exports,
    files_of,
    into_file,
    names_read,
    own_variables,
    parse,
    program_of,
    substituted,
)
from drumbeat.commands.values import BLANKS, HEAD, JOB, MARK, ONCE, SUBMIT, TASK, Marks, Unknown, outside_quotes

EACH_TIME = frozenset((
    "RANDOM", "SRANDOM", "SECONDS", "EPOCHSECONDS", "EPOCHREALTIME", "BASHPID", "PPID", "LINENO", "$", "!", "?",
))  # fmt: skip

ARGUMENTS = "ARGUMENTS"  # a list of the arguments that only the job knows
LATE: List[str] = ["\0"]  # `ShellState.arguments` then

S = TypeVar("S", bound="ShellState")


class ShellState:
    """One shell and its state. `run` reads a text; `events` and `started` then hold what it does."""

    builtins: Mapping[str, Callable[[Any, List[str], Node, str], Optional[bool]]] = {}  # name -> what it does
    compound: Mapping[str, Callable[[Any, Node], Optional[bool]]] = {}  # kind of node -> what it does

    def substitute(self, text: str) -> str:
        """Return what `$(text)` is replaced by."""
        raise NotImplementedError

    def call(self, name: str, words: List[str], node: Node) -> Optional[bool]:
        """Call one of the script's own functions."""
        raise NotImplementedError

    prints: FrozenSet[str] = frozenset()  # programs that only print or wait
    state: FrozenSet[str] = frozenset()  # programs that change the shell, but no variable
    asks: FrozenSet[str] = frozenset(("[", "[[", "test"))  # programs whose exit code is an answer
    acts = re.compile(r"\Z.")  # arguments with which a program in `prints` does more than print
    looks: FrozenSet[str] = frozenset()  # programs that change nothing, for what they print
    environments = re.compile(r"\Z.")  # commands that load an environment and do not touch the script's own variables

    def __init__(
        self,
        known: Mapping[str, str],
        wanted: Callable[[List[str]], bool],
        arguments: Optional[Sequence[str]] = (),
        marks: Optional[Marks] = None,
        task: bool = False,
        read: Callable[[str], str] = lambda path: "",
    ) -> None:
        self.marks = marks or Marks()
        self.known, self.wanted, self.task, self.read = known, wanted, task, read
        self.arguments = None if arguments is None else list(arguments)
        self.variables: Dict[str, Variable] = {}
        self.functions: Dict[str, Tuple[Node, str]] = {}
        self.required: FrozenSet[str] = frozenset()  # outside variables that the script exits without
        self.ended_at = 0  # line of an exit that is always reached
        self.own: FrozenSet[str] = frozenset()  # variables that some statement sets without using their old value
        self.exports: FrozenSet[str] = frozenset()  # names marked for export, set or not
        self.forgotten: FrozenSet[str] = frozenset()  # variables that this statement's arithmetic made unknown
        self.hidden: FrozenSet[str] = frozenset()  # variables that the outer shell does not export
        self.files: Dict[str, str] = {}  # what the script writes into files: path -> text
        self.events: List[Event] = []
        self.started: List[Started] = []
        self.traps: List[Trap] = []
        self.defaults: Dict[str, str] = {}  # variables that the script takes from outside, and its default for each
        # files sourced and not readable here: line, text, variables that may change
        self.unread: List[Tuple[int, str, Tuple[str, ...]]] = []
        self.cwd = ""
        self.zero = ""  # $0, where it is known
        self.foreign = False  # something was sourced that may set any variable
        self.exports_all = False
        self.inlines = False  # keep the events of loop and function bodies even if undecided
        self.options: List[Tuple[int, str, bool]] = []  # changes by `set`: event number, option, on or off
        self.certain = True
        # line and text of started commands, and whether they succeed
        self.supposed: Mapping[Tuple[int, str], bool] = {}
        self.lost = False  # that command failed in the background
        self.last: Optional[bool] = True  # the exit code of the last command is zero
        self.code = 1  # that exit code, where `last` is false
        self.guarded = 0  # inside conditions, where a failure ends nothing
        # local variables of the current function, with their values outside
        self.locals: Optional[Dict[str, Tuple[Optional[Variable], bool]]] = None
        self.doubts: List[Tuple[int, str, str]] = []  # line, text and reason of what is not followed
        self.statement: Optional[Statement] = None
        self.steps, self.depth, self.shifted = [0], 0, 0
        self.text = ""
        self.words = Expander(self)

    def run(self: S, text: str, line: int = 1) -> S:
        """Interpret a text. Marks in it stand for values that an outer shell inserted."""
        self.text = text
        try:
            nodes = self.parsed(text, line)
            self.own = self.own | own_variables([each for top in nodes for each in top.walk()])
            for node in nodes:
                self.statement = Statement(node.start, node.line, len(self.events), dict(self.variables), self.cwd)
                self.body([node])
        except (Exit, Return) as left:
            self.last = left.result
        return self

    def parsed(self, text: str, line: int) -> List[Node]:
        return parse(text, line)

    def separators(self) -> str:
        """Return IFS if the script sets it to a known value, else the default."""
        found = self.variables.get("IFS")
        return found.value if found and isinstance(found.value, str) and not MARK.search(found.value) else BLANKS

    def globs(self) -> bool:
        return "f" not in options_at(self.options, len(self.events))

    # Variables

    def lookup(self, name: str) -> Optional[Value]:
        """Return a variable's value, or a mark if the value comes from outside and is unknown."""
        found = self.variables.get(name)
        if name == "?" and self.last is not None:
            return "0" if self.last else str(self.code)
        if found is not None and name not in EACH_TIME:
            return found.value
        if name in ("@", "*") or name.isdigit():
            return self._argument(name)
        if name in self.hidden:
            return ""
        if name == "#" and self.arguments is LATE:
            return self.mark(f"${{#{ARGUMENTS}[@]}}", JOB, False)
        if name == "#":
            return str(len(self.arguments)) if self.arguments is not None else self.mark("$#", SUBMIT)
        if name == "BASH_SOURCE":  # all is in one file
            return self.lookup("0")
        if name == "PWD":
            return self.cwd or self.mark("${PWD}", SUBMIT)
        if name in self.own - EACH_TIME and not self.foreign and name not in self.known and self.unset(name, ""):
            return ""  # a variable that the script sets only elsewhere is not expected from outside
        return self.outside(name)

    def outside(self, name: str) -> str:
        """Return the value of a variable that the script does not set itself."""
        if name in self.known:
            return self.known[name]
        if name in EACH_TIME:
            return self.mark(f"${{{name}}}" if len(name) > 1 else f"${name}", ONCE, False)
        later = self.foreign and name not in ("HOME", "USER", "LOGNAME")
        return self.mark(f"${{{name}}}", JOB if later else SUBMIT)

    def unset(self, name: str, default: str) -> Optional[bool]:
        """Return true to treat an outside variable as unset, None if it may be set. Subclasses decide."""
        return True

    def late_arguments(self, text: str, items: str, line: int) -> None:
        """Leave the arguments that a statement sets to the job, in a list beside them."""
        self._keep_copies(ARGUMENTS)
        self.leave_list(ARGUMENTS, f"{text}\n{ARGUMENTS}=({items})", line)
        self.arguments = LATE

    def moved_arguments(self, text: str, line: int) -> None:
        """Note that the script's own arguments change here, for statements behind it that are kept as they stand."""
        if not self.depth:
            self.events.append(Event("arguments", line, text, names_read(text)))

    def _argument(self, name: str) -> Value:
        if name == "0":
            return self.zero or self.mark("$0", JOB, False)
        if self.arguments is LATE:
            number = f"[{int(name) - 1}]" if name.isdigit() else "[@]"
            mark = self.mark(f"${{{ARGUMENTS}{number}}}", JOB, False)
            return mark if name.isdigit() else [mark]
        if self.arguments is None:
            if name in ("@", "*"):  # nobody gave any
                self.defaults.setdefault("$@", "")
                return []
            return self.mark(f"${{ARG_{int(name) + self.shifted}}}", SUBMIT)
        if name in ("@", "*"):
            return list(self.arguments)
        return self.arguments[int(name) - 1] if int(name) <= len(self.arguments) else ""

    def mark(self, text: str, kind: str, stable: bool = True) -> str:
        return self.marks.mark(Unknown(text, kind, names_read(text), stable))

    def assign_default(self, name: str, value: str) -> None:
        outside = name not in self.variables and name in self.marks.reads(value)
        self.assign(name, value, self.marks.quoted(value), 0, False)
        if outside:  # exported if it was
            self.variables[name] = self.variables[name]._replace(exported=True, maybe=True)

    def assign(self, name: str, value: Value, raw: str, line: int, exported: bool) -> None:
        before, declared = self.variables.get(name), ("export",) if exported else ()
        exported = exported or self.exports_all or name in self.exports or bool(before and before.exported)
        joined = value if isinstance(value, str) else "\0".join(value)
        own, late = f"${{{name}}}", self.marks.reads(joined) & {ARGUMENTS}
        if isinstance(value, str) and re.search(r"\s", joined) and not self.marks.named(joined):
            value = joined = self.with_names(value, line)
            raw = self.marks.quoted(value)
        if isinstance(value, list) and not self.marks.named(joined):
            value = [each if MARK.fullmatch(each) else self.with_names(each, line) for each in value]
            joined = "\0".join(value)
            raw = f"({' '.join(map(self.marks.quoted, value))})" if self.marks.named(joined) else raw
        if len(joined) > MAX_VALUE or not self.marks.named(joined) or name in self.marks.reads(joined):
            kind = self.marks.kind(joined) or JOB
            if isinstance(value, str):
                value = self.marks.mark(
                    Unknown(own, kind, frozenset((name,)), False, self.marks.resolved(joined)[:MAX_MADE])
                )
            elif len(joined) > MAX_VALUE or kind in (ONCE, TASK, HEAD):
                value = [self.marks.mark(Unknown(f"${{{name}[@]}}", kind, frozenset((name,)), False, raw))]
        self._keep_copies(name)
        reads = self.reads(raw) | late
        self.events.append(Event("assign", line, f"{name}={raw}", reads, frozenset((name,)), value, declared))
        self.variables[name] = Variable(value, exported, len(self.events) - 1, bool(before and before.maybe), line)

    def _keep_copies(self, name: str) -> None:
        """Before `name` changes, make variables whose values refer to it refer to themselves instead."""
        for other, variable in list(self.variables.items()):
            held = variable.value if isinstance(variable.value, str) else "".join(variable.value)
            if other != name and name in self.marks.reads(held) and variable.event >= 0:
                made = self.marks.resolved(held)[:MAX_MADE]
                mark = self.marks.mark(Unknown(f"${{{other}}}", JOB, frozenset((other,)), False, made))
                self.variables[other] = variable._replace(value=mark if isinstance(variable.value, str) else [mark])

    def forget(self, name: str) -> None:
        """Mark a variable as unknown because arithmetic in this statement's words changes it by an unknown value."""
        self._keep_copies(name)
        old = self.variables.get(name)
        exported = bool(old and old.exported) or self.exports_all or name in self.exports
        mark = self.marks.mark(Unknown(f"${{{name}}}", JOB, frozenset((name,)), False))
        self.variables[name] = Variable(mark, exported, len(self.events), bool(old and old.maybe))
        self.forgotten = self.forgotten | {name}

    def with_names(self, text: str, line: int) -> str:
        """Return the text with each part that only a run can tell replaced by a variable. The rest of the text stays known."""
        return text

    def assign_parts(self, parts: Tuple[str, str, bool, str], line: int, exported: bool) -> None:
        name, index, more, raw = parts
        value: Value
        if raw.startswith("(") and raw.endswith(")"):
            words = [token.word for token in Lexer(raw[1:-1], line).run().tokens if token.kind == "word" and token.word]
            value = [each for word in words for each in self.words.fields(word.raw)]
        else:
            value = self.words.text(raw)
        before = self.lookup(name) if more or index else ""
        if index:
            place = calculated(self.words.text(index[1:-1]))
            items = list(before) if isinstance(before, list) else []
            if place is None or isinstance(value, list) or not 0 <= place <= len(items) or MARK.search("".join(items)):
                self.leave_list(name, f"{name}{index}{'+' * more}={raw}", line)
                return
            value = [*items[:place], value, *items[place + 1 :]]
            raw = f"({' '.join(map(self.marks.quoted, value))})"
        elif more:
            if isinstance(before, list) or isinstance(value, list):
                old = before if isinstance(before, list) else [before] if before and name in self.variables else []
                value = [*old, *(value if isinstance(value, list) else [value])]
                raw = f"({' '.join(map(self.marks.quoted, value))})"
            else:
                raw = f"${{{name}}}{raw}" if before else raw
                value = (before or "") + value
        self.assign(name, value, raw, line, exported)

    def leave_list(self, name: str, text: str, line: int) -> None:
        """Keep a statement about an array as it stands, such as one with named items (declare -A)."""
        self.events.append(Event("shell", line, text, self.reads(text) | {name}, frozenset((name,))))
        self.variables[name] = Variable(
            [self.mark(f"${{{name}[@]}}", JOB, False)], False, len(self.events) - 1, line=line
        )

    # Substitutions

    def host_of(self, text: str, nodes: Sequence[Node], inner: ShellState) -> str:
        """Return a mark if this substitution prints the job's nodes or the first of them, else ''. JobShell decides."""
        return ""

    def name_hosts(self, words: Sequence[str], text: str, names: FrozenSet[str]) -> None:
        """Mark variables that `read` takes from a list of the job's nodes. JobShell decides."""

    # Commands

    def apart(self: S, certain: bool = True) -> S:
        """Return a copy with separate variables, files and events."""
        other = copy.copy(self)
        other.variables, other.files, other.events = dict(self.variables), dict(self.files), list(self.events)
        other.certain = self.certain and certain
        other.words = Expander(other)
        return other

    def body(self, nodes: Sequence[Node]) -> Optional[bool]:
        result: Optional[bool] = True
        for node in nodes:
            result = self.command(node)
            ends = result is False and not self.guarded and not node.negated and node.kind != "list"
            if ends and "e" in options_at(self.options, len(self.events)):
                raise Exit(False)
        return result

    def asked(self, nodes: Sequence[Node]) -> Optional[bool]:
        """Interpret a condition: under `set -e` its failure does not end the script."""
        self.guarded += 1
        try:
            return self.body(nodes)
        finally:
            self.guarded -= 1

    def command(self, node: Node, piped: str = "") -> Optional[bool]:
        """Interpret one command. Return true if it succeeds, false if it fails, None if unknown."""
        self.steps[0] += 1
        if self.steps[0] > MAX_STEPS:
            raise Problem(
                f"line {node.line}: more than {MAX_STEPS:,} steps",
                "no batch script needs so many: is it the right file?",
            )
        if node.background and (node.kind != "simple" or program_of(node) in self.functions):
            self.keep(node)
            started, called = len(self.started), copy.copy(node)
            called.background = False
            self.look_inside(*(bodies_of(node) if node.kind != "simple" else [[called]]))
            self.events[-1].starts = self.started[started:]
            for each in self.started[started:]:
                each.background = True
            return True
        result = self.simple(node, piped) if node.kind == "simple" else self.compound[node.kind](self, node)
        if node.kind == "simple" and program_of(node) not in {"return", "exit", *self.functions} or node.negated:
            self.code = 1
        self.last = (not result if result is not None else None) if node.negated else result
        return self.last

    def written(self, node: Node, words: Sequence[str] = ()) -> str:
        """Return a command as a statement of its own, with its `&`. Inside a function, `words` replace text that reads the
        function's arguments."""
        text = self.text[node.start : node.end]
        if words and self.depth and re.search(r"\$\{?[@*\d]", text) and not (node.redirects or node.assigned):
            text = " ".join(map(self.marks.quoted, words))
        return text + (" &" if node.background else "")

    def reads(self, text: str) -> FrozenSet[str]:
        """Return the variables that a statement reads, and the functions that it calls."""
        called = {f"{name}()" for name in self.functions if re.search(rf"(?<![\w$-]){re.escape(name)}(?![\w=-])", text)}
        return names_read(text) | called

    def changes(self, nodes: Sequence[Node]) -> bool:
        """Return true if a command substitution in these commands may change something, rather than only print."""
        return bool(self.looks) and not substituted(nodes) <= self.looks | self.prints | self.asks

    def keep(self, node: Node, trial: Optional[ShellState] = None) -> None:
        """Keep a command as it stands. All that it may assign, or assigned in `trial`, is unknown from here on."""
        text = self.written(node)
        inside, fresh = list(node.walk()), trial.events[len(self.events) :] if trial else []
        names, kinds = {program_of(each) for each in inside if each.kind == "simple"}, {event.kind for event in fresh}
        writes = frozenset() if node.kind in ("subshell", "pipeline") or node.background else node.writes()
        writes |= frozenset(name for event in fresh for name in event.writes)
        state = (
            writes
            or kinds & {"shell", "cd"}
            or names
            & (self.state | {"cd", "source", ".", "export", "module", "ml", "conda", "exit", "eval", "trap", "exec"})
        )
        quiet = names <= self.prints and "once" not in kinds and not writes and not any(map(into_file, inside))
        quiet = quiet and not self.acts.search(text) and not self.changes(inside[:1])
        kind = "print" if quiet else "shell" if state and node.kind not in ("subshell", "pipeline") else "once"
        if self.arguments is LATE and kind == "shell" and re.search(r"\bshift\b|\bset\s+--", text):
            self.late_arguments(text, '"$@"', node.line)
        else:
            self.events.append(Event(kind, node.line, text, self.reads(text), writes))
        self.events[-1].writes |= writes
        for name in writes:
            old = self.variables.get(name)
            is_list = old is not None and not isinstance(old.value, str)
            written = f"${{{name}[@]}}" if is_list else f"${{{name}}}"
            mark = self.marks.mark(Unknown(written, JOB, frozenset((name,)), False, text))
            tried = trial.variables.get(name) if trial else None
            before = any(each and each.exported for each in (old, tried)) or self.exports_all or name in self.exports
            maybe = not before and exports(inside, name)
            sure = (
                maybe
                and node.kind == "if"
                and len(node.bodies) % 2
                and all(exports(body, name) for body in [*node.bodies[1:-1:2], node.bodies[-1]])
            )
            self.variables[name] = Variable(
                [mark] if is_list else mark,
                before or maybe,
                len(self.events) - 1,
                not sure and (maybe or bool(old and old.maybe)),
                node.line,
            )
        self.foreign = self.foreign or bool(names & {"source", ".", "eval"})

    def undecided(self, node: Node) -> Optional[bool]:
        started = len(self.started)
        self.keep(node)
        self.look_inside(*bodies_of(node))
        self.events[-1].starts = self.started[started:]
        return None

    def without(self, event: Event, those: Sequence[Started] = ()) -> str:
        """Return a kept statement's text with `:` in place of the commands that it starts (or only `those`), and of calls of
        functions that start them."""
        text, starts = event.text, {each.text for each in those or event.starts}
        called: FrozenSet[str] = frozenset()
        for _ in self.functions:  # those that start something themselves, then those that call them, ...
            called |= {
                name
                for name, (body, source) in self.functions.items()
                if any(source[each.start : each.end] in starts or program_of(each) in called for each in body.walk())
            }
        for each in sorted((each for top in parse(text) for each in top.walk()), key=lambda each: -each.start):
            if each.kind == "simple" and (text[each.start : each.end] in starts or program_of(each) in called):
                text = f"{text[: each.start]}:{text[each.end :]}"
        event.reads = self.reads(text)
        return text

    def look_inside(self, *bodies: Sequence[Node]) -> None:
        """Collect the commands started inside a command that is kept as it stands."""
        for body in bodies:
            inner = self.apart(certain=False)
            try:
                inner.body(body)
            except Leaves:
                pass

    def restore(self, name: str, was: Optional[Variable], exported: bool, line: int) -> None:
        """Restore a variable after a function that made it local, or after a command with its own value for it."""
        self.exports = self.exports | {name} if exported else self.exports - {name}
        if name not in self.variables or self.variables[name] is was:
            return
        if was is None:
            del self.variables[name]
            self.events.append(Event("assign", line, f"unset {name}", frozenset(), frozenset((name,)), soft=True))
            return
        items = [was.value] if isinstance(was.value, str) else was.value
        raw = " ".join(map(self.marks.quoted, items))
        self.variables[name] = self.variables[name]._replace(exported=False, maybe=False)
        self.assign(name, was.value, raw if isinstance(was.value, str) else f"({raw})", line, was.exported)

    def simple(self, node: Node, piped: str = "") -> Optional[bool]:
        self.forgotten, before = frozenset(), len(self.events)
        result = self._statement(node, piped)
        if self.forgotten:
            if len(self.events) == before:
                text = self.text[node.start : node.end]
                self.events.append(Event("shell", node.line, text, names_read(text)))
            event = self.events[before]
            event.writes |= self.forgotten
            event.kind = "shell" if event.kind == "print" else event.kind
            self.forgotten = frozenset()
        return result

    def _statement(self, node: Node, piped: str) -> Optional[bool]:
        assigned = [each for each in map(assignment, node.assigned) if each]
        if not node.words:
            for each in assigned:
                self.assign_parts(each, node.line, False)
            if node.redirects and not assigned:
                self.events.append(Event("once", node.line, self.text[node.start : node.end]))
            given = "".join("".join(self.variables[each[0]].value) for each in assigned)
            ran = any((each.made or each.text).startswith("$(") for each in self.marks.of(given))
            return None if ran and assigned else True  # the exit code is that of the substitution
        words = [each for word in node.words for each in self.words.fields(word.raw)]
        text = self.text[node.start : node.end]
        if not words:
            return True
        name = words[0].rsplit("/", 1)[-1]
        builtin = self.builtins.get(words[0])
        if builtin:
            return builtin(self, words, node, text)
        if words[0] in self.functions:
            own = {each[0]: (self.variables.get(each[0]), each[0] in self.exports) for each in assigned}
            for each in assigned:
                self.assign_parts(each, node.line, True)
            result = self.call(words[0], words, node)
            for each_name, was in own.items():
                self.restore(each_name, *was, node.line)
            return result
        self.remember_file(words, node)
        if self.wanted(words):
            prefix: Dict[str, str] = {}
            outside = dict(self.variables)
            for each in assigned:
                prefix[each[0]] = self.words.text(each[3])
                self.variables[each[0]] = Variable(prefix[each[0]], True)
            self.variables = outside
            if self.separators() != BLANKS and any(map(outside_quotes, MARK.findall("".join(words)))):
                self.doubts.append((node.line, text, "IFS is changed, and splits what only the job knows"))
            if not self.task and self.certain:  # in a part that is kept as it stands no variable can be added
                words = [self.with_names(word, node.line) for word in words]
                prefix = {name: self.with_names(value, node.line) for name, value in prefix.items()}
            fed = self.fed(words, node)
            started = Started(
                node.line, fed or words, dict(self.variables), self.cwd, len(self.events), self.certain, text, prefix
            )
            started.written, started.piped, started.background = node.words, piped, node.background
            started.within = self.statement
            started.redirected = " ".join([files_of(node), *("<< ..." for _ in node.heredocs[: not fed])]).strip()
            self.started.append(started)
            written = self.written(node, words)
            self.events.append(Event("started", node.line, written, names_read(text), words=tuple(started.words)))
            result = self.supposed.get((node.line, text))
            self.lost = self.lost or result is False and node.background
            return True if node.background else result
        if name == "wait" and self.lost:
            self.events.append(Event("print", node.line, text))
            return len(words) == 1
        reads = names_read(text)
        environment = self.environments.match(text)
        if environment:
            self.foreign = True
            self.events.append(Event("shell", node.line, text, reads, words=tuple(words), soft=True))
        elif name in self.state:
            self.events.append(Event("shell", node.line, text, reads, words=tuple(words), soft=True))
        else:
            quiet = name in self.prints and not self.acts.match(text) and not into_file(node)
            quiet = quiet and not self.changes([node])
            written = self.written(node, words)
            self.events.append(Event("print" if quiet else "once", node.line, written, reads, words=tuple(words)))
        return None if name not in ("echo", "printf", "mkdir", "export") else True

    def fed(self, words: List[str], node: Node) -> List[str]:
        """Return the command with the program from its heredoc as a `-c` argument; empty if it reads no program there."""
        return []

    def remember_file(self, words: List[str], node: Node) -> None:
        """Remember the text of a file that the script writes with a heredoc."""
        targets = [token.word for token in node.redirects if token.text in (">", ">|") and token.word]
        if node.heredocs and words[0] in ("cat", "tee"):
            path = self.words.text(targets[0].raw) if targets else words[-1] if len(words) > 1 else ""
            document = node.heredocs[0]
            # a child process expands it: what `:=` sets there is gone afterwards
            self.files[path] = document.text if document.literal else self.apart().words.heredoc(document.text)

    # Builtins

    def set_options(self, words: Sequence[str]) -> List[str]:
        """Apply options in the form of `set` or of a shell's command line. Return the words after them."""
        rest = list(words)
        while rest and re.fullmatch(r"[-+][A-Za-z]+", rest[0]):
            word = rest.pop(0)
            names = [rest.pop(0) if letter == "o" and rest else letter for letter in word[1:]]
            names = [_SHORT.get(name, name) for name in names if name not in _CALLED]
            self.options = [*self.options, *((len(self.events), name, word[0] == "-") for name in names)]
        self.exports_all = "a" in options_at(self.options, len(self.events))
        return rest

    def sourced(self, event: Event) -> None:
        """Record what a sourced file may change. Subclasses that can read files override it."""

    def effects(self, text: str, line: int) -> List[Event]:
        """Return the events that a text, such as a trap's body, would leave at the end of the script."""
        inner = self.apart(certain=False)
        inner.started, inner.text, inner.inlines = [], text, True
        try:
            inner.body(parse(text, line))
        except Leaves:
            pass
        return inner.events[len(self.events) :]


_CALLED = frozenset("cilrs")  # how a shell was called: `set` does not take them
_SHORT = {
    "errexit": "e", "nounset": "u", "allexport": "a", "noglob": "f", "noclobber": "C", "xtrace": "x", "verbose": "v",
}  # fmt: skip
