"""A small interpreter of shell scripts: what a script does is worked out as far as its text decides it; nothing is run.

Each statement leaves an event. What a command is started with, `argv` and exported variables, is text with marks for
what only the running job knows (`values`). A condition that cannot be decided stays as it stands, with all that it may
assign unknown from there on. Steps and lengths of values are bounded.
"""

from __future__ import annotations

import copy
import fnmatch
import re
from dataclasses import field
from typing import Callable, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.commands.expand import MAX_VALUE, Expander, Value, Variables, calculated
from drumbeat.commands.shell import Lexer
from drumbeat.commands.syntax import Node, assignment, names_read, parse
from drumbeat.commands.values import (
    BLANKS,
    HEAD,
    HOSTS,
    JOB,
    MARK,
    ONCE,
    SUBMIT,
    TASK,
    Marks,
    Unknown,
    outside_quotes,
    whole_marks,
    without_marks,
)

MAX_STEPS = 20_000
MAX_MADE = 4096  # characters of what a variable was given, for comparison
MAX_ROUNDS = 256  # of one loop
MAX_DEPTH = 20  # of functions and substitutions in each other
EACH_TIME = frozenset((
    "RANDOM", "SRANDOM", "SECONDS", "EPOCHSECONDS", "EPOCHREALTIME", "BASHPID", "PPID", "LINENO", "$", "!", "?",
))  # fmt: skip
_PRINTED = r"(?:[^%\\]|%0?\d*[sd])+"  # formats of printf that are followed
_ARGUMENTS = r"\$[#@*\d]|\$\{(?:[@*\d]|#[@*}])|\bgetopts\b"
_DECLARING = ("export", "declare", "typeset", "readonly", "local")


class Variable(NamedTuple):
    value: Value
    exported: bool = False
    event: int = -1  # the one that gave it its value; -1: it was there before
    maybe: bool = False  # exported by a statement that may not be reached


@dataclass
class Event:
    """One statement. `kind`: assign, export, cd, print (nothing to keep), started (asked for by
    the caller), shell (changes the shell), part (of another one that is kept whole), once (all else)."""

    kind: str
    line: int
    text: str
    reads: FrozenSet[str] = frozenset()
    writes: FrozenSet[str] = frozenset()
    value: Optional[Value] = None  # assign: what it gives
    words: Tuple[str, ...] = ()
    soft: bool = False  # shell: brings an environment, and leaves the script's own variables alone
    starts: Sequence[Started] = ()  # what the caller asked for, inside a statement that is kept as it stands
    around: str = ""  # the list or condition that it is part of, where that starts something


class Statement(NamedTuple):
    """A statement of the script itself, and the shell before it."""

    start: int  # its place in the text
    line: int
    events: int  # before it
    variables: Dict[str, Variable]
    cwd: str


@dataclass
class Started:
    """A command that the caller asked for, with what reaches it."""

    line: int
    words: List[str]
    variables: Dict[str, Variable]
    cwd: str
    before: int  # events before it
    certain: bool  # not inside a condition that cannot be decided
    text: str
    prefix: Dict[str, str] = field(default_factory=dict)  # variables for this command alone
    piped: str = ""
    background: bool = False
    redirected: str = ""  # files that it reads or writes: > log 2> err
    within: Optional[Statement] = None  # the statement of the script that starts it
    whole: bool = False  # several statements: `bash -c` with their text


class Trap(NamedTuple):
    line: int
    text: str
    body: str
    signals: Tuple[str, ...]  # without SIG: USR1, EXIT


class _Leaves(Exception):
    """A statement that ends what it is in. `result`: that of its exit code, as far as it is known."""

    def __init__(self, result: Optional[bool] = None) -> None:
        self.result = result


class _Exit(_Leaves):
    pass


class _Return(_Leaves):
    pass


class _Next(_Leaves):
    """`continue`, or `break` with a result of False."""


class _Unclear(Exception):
    """A loop whose end its text does not decide."""


class Shell:
    """The state of one shell that reads one text."""

    prints: FrozenSet[str] = frozenset()  # programs that only print or wait
    state: FrozenSet[str] = frozenset()  # programs that change the shell, but no variable
    asks: FrozenSet[str] = frozenset(("[", "[[", "test"))  # programs whose exit code is an answer
    acts = re.compile(r"\Z.")  # what a program that else only prints does beside
    environments = re.compile(r"\Z.")  # commands that bring an environment, and leave the script's own variables alone

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
        self.required: FrozenSet[str] = frozenset()  # variables from outside without which the script does not go on
        self.ended_at = 0  # the line of an exit that is reached in any case
        self.own: FrozenSet[str] = frozenset()  # variables that some statement gives, without what they were before
        self.exports: FrozenSet[str] = frozenset()  # variables that are exported whenever they get a value
        self.forgotten: FrozenSet[str] = frozenset()  # variables that arithmetic in a statement's words makes unknown
        self.hidden: FrozenSet[str] = frozenset()  # variables that the shell outside has not exported
        self.files: Dict[str, str] = {}  # what the script writes into files: path -> text
        self.events: List[Event] = []
        self.started: List[Started] = []
        self.traps: List[Trap] = []
        self.defaults: Dict[str, str] = {}  # variables that the script takes from outside, and its default for each
        self.unread: List[Tuple[int, str, Tuple[str, ...]]] = []  # sourced, not to be read here, and what it may change
        self.cwd = ""
        self.zero = ""  # $0, where it is known
        self.foreign = False  # something was sourced that may set any variable
        self.exports_all = False
        self.inlines = False  # loops and functions leave the events of their bodies, decided or not
        self.options: List[Tuple[int, str, bool]] = []  # of `set`: from which event on each holds, or no longer
        self.certain = True
        self.fails: Optional[Tuple[int, str]] = None  # line and text of a started command that is taken to fail
        self.lost = False  # it has, in the background
        self.last: Optional[bool] = True  # the exit code of the last command is zero
        self.guarded = 0  # inside conditions, where a failure ends nothing
        self.locals: Optional[Dict[str, Tuple[Optional[Variable], bool]]] = None  # of a function: as they were outside
        self.doubts: List[Tuple[int, str, str]] = []  # line, text and reason of what is not followed
        self.statement: Optional[Statement] = None
        self.steps, self.depth = [0], 0
        self.text = ""
        self.words = self._expander()

    def _expander(self) -> Expander:
        variables = Variables(self.lookup, self.unset, self._assign_default, self._forget)
        return Expander(self.marks, variables, self._substitute, self.separators, self.globs)

    def run(self, text: str, line: int = 1) -> Shell:
        """Read a text. Marks in it are what an outer shell has put in."""
        self.text = text
        try:
            nodes = parse(self.text, line)
            self.own = self.own | _own([each for top in nodes for each in top.walk()])
            for node in nodes:
                self.statement = Statement(node.start, node.line, len(self.events), dict(self.variables), self.cwd)
                self._body([node])
        except (_Exit, _Return) as left:
            self.last = left.result
        return self

    def separators(self) -> str:
        """Return IFS, where the script has set it to something that is known."""
        found = self.variables.get("IFS")
        return found.value if found and isinstance(found.value, str) and not MARK.search(found.value) else BLANKS

    def globs(self) -> bool:
        return "f" not in options_at(self.options, len(self.events))

    # Variables

    def lookup(self, name: str) -> Optional[Value]:
        """Return a variable's value: a mark if it comes from outside and is not known."""
        found = self.variables.get(name)
        if name == "?" and self.last is False:
            return "1"
        if found is not None and name not in EACH_TIME:
            return found.value
        if name in ("@", "*") or name.isdigit():
            return self._argument(name)
        if name in self.hidden:
            return ""
        if name == "#":
            return str(len(self.arguments)) if self.arguments is not None else self.mark("$#", SUBMIT)
        if name == "PWD":
            return self.cwd or self.mark("${PWD}", SUBMIT)
        if name in self.own - EACH_TIME and not self.foreign and name not in self.known and self.unset(name, ""):
            return ""  # what the script gives only elsewhere is not expected from outside
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
        """Return true for a variable from outside that is taken to be unset; None if it may well be set."""
        return True

    def _argument(self, name: str) -> Value:
        if name == "0":
            return self.zero or self.mark("$0", JOB)
        if self.arguments is None:
            if name in ("@", "*"):  # nobody gave any
                self.defaults.setdefault("$@", "")
                return []
            return self.mark(f"${{ARG_{name}}}", SUBMIT)
        if name in ("@", "*"):
            return list(self.arguments)
        return self.arguments[int(name) - 1] if int(name) <= len(self.arguments) else ""

    def mark(self, text: str, kind: str, stable: bool = True) -> str:
        return self.marks.mark(Unknown(text, kind, names_read(text), stable))

    def _assign_default(self, name: str, value: str) -> None:
        raw = f'"{value}"' if MARK.search(value) else f'"${{{name}:={value}}}"'
        self._assign(name, value, raw, 0, False)

    def _assign(self, name: str, value: Value, raw: str, line: int, exported: bool) -> None:
        before, declared = self.variables.get(name), ("export",) if exported else ()
        exported = exported or self.exports_all or name in self.exports or bool(before and before.exported)
        joined = value if isinstance(value, str) else "\0".join(value)
        own = f"${{{name}}}"
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
        self.events.append(
            Event("assign", line, f"{name}={raw}", self._reads(raw), frozenset((name,)), value, declared)
        )
        self.variables[name] = Variable(value, exported, len(self.events) - 1, bool(before and before.maybe))

    def _keep_copies(self, name: str) -> None:
        """Let variables that hold the old value of this one keep it under their own name."""
        for other, variable in list(self.variables.items()):
            held = variable.value if isinstance(variable.value, str) else "".join(variable.value)
            if other != name and name in self.marks.reads(held) and variable.event >= 0:
                made = self.marks.resolved(held)[:MAX_MADE]
                mark = self.marks.mark(Unknown(f"${{{other}}}", JOB, frozenset((other,)), False, made))
                self.variables[other] = variable._replace(value=mark if isinstance(variable.value, str) else [mark])

    def _forget(self, name: str) -> None:
        """Take a variable for unknown: arithmetic in the words of this statement changes it by a value that is not known."""
        self._keep_copies(name)
        old = self.variables.get(name)
        exported = bool(old and old.exported) or self.exports_all or name in self.exports
        mark = self.marks.mark(Unknown(f"${{{name}}}", JOB, frozenset((name,)), False))
        self.variables[name] = Variable(mark, exported, len(self.events), bool(old and old.maybe))
        self.forgotten = self.forgotten | {name}

    def with_names(self, text: str, line: int) -> str:
        """Return a text in which what only a run can tell has a variable of its own, so that all around it stays known."""
        return text

    def _set(self, parts: Tuple[str, str, bool, str], line: int, exported: bool) -> None:
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
                self._leave(name, f"{name}{index}{'+' * more}={raw}", line)
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
        self._assign(name, value, raw, line, exported)

    def _leave(self, name: str, text: str, line: int) -> None:
        """Leave a statement about a list, such as one with names for its items, as it stands."""
        self.events.append(Event("shell", line, text, self._reads(text) | {name}, frozenset((name,))))
        self.variables[name] = Variable([self.mark(f"${{{name}[@]}}", JOB, False)], False, len(self.events) - 1)

    # Substitutions

    def _substitute(self, text: str) -> str:
        written = f"$({text})"
        if self.depth > MAX_DEPTH:
            return self.marks.mark(Unknown(written, JOB, names_read(text), False))
        nodes = parse(text)
        inner = self._apart(certain=False)
        inner.text, inner.depth = text, self.depth + 1
        if len(nodes) == 1 and nodes[0].kind == "simple" and not nodes[0].assigned:
            words = [each for word in nodes[0].words for each in inner.words.fields(word.raw)]
            known = self._simple_output(words, nodes[0], inner)
            if known is not None:
                return known.rstrip("\n")
        if not self.task:
            found = self.host_of(text, nodes, inner)
            if found:
                return found
        names = {word.text.rsplit("/", 1)[-1] for node in nodes for each in node.walk() for word in each.words[:1]}
        each_time = names & {"date", "mktemp", "uuidgen", "shuf", "openssl"} or "/urandom" in text
        reads = names_read(text)
        values = "".join("".join(value) for value in (self.lookup(name) or "" for name in reads))
        own = {"hostname", "nproc", "nvidia-smi", "rocm-smi", "taskset"} & names
        kind = ONCE if each_time else TASK if own else self.marks.kind(values) or JOB
        kind = JOB if kind in (SUBMIT, HEAD, HOSTS) else kind
        return self.marks.mark(Unknown(written, kind, reads, False))

    def _simple_output(self, words: List[str], node: Node, inner: Shell) -> Optional[str]:
        name = words[0].rsplit("/", 1)[-1] if words else ""
        decided = not any(self.marks.kind(word) for word in words)
        if name == "echo" and not node.redirects:
            if "-e" in words[:3] and "\\" in "".join(words):
                return None
            return " ".join(word for word in words[1:] if word not in ("-n", "-e"))
        if name == "printf" and decided and not node.redirects and re.fullmatch(_PRINTED, "".join(words[1:2])):
            places = [each[-1] for each in re.findall(r"%0?\d*[sd]", words[1])]
            given = [int(each) if kind == "d" and each.isdigit() else each for kind, each in zip(places, words[2:])]
            sure = places == ["s" if isinstance(each, str) else "d" for each in given] and len(words) == 2 + len(places)
            return words[1] % tuple(given) if sure else None
        if name == "cat" and node.heredocs and len(words) == 1:
            return node.heredocs[0].text if node.heredocs[0].literal else inner.words.heredoc(node.heredocs[0].text)
        if name == "pwd":
            return self.cwd or self.mark("${PWD}", SUBMIT)
        if name in ("whoami",) or words[:2] == ["id", "-un"]:
            return self.mark("${USER}", SUBMIT)
        if name == "expr" and decided:
            number = calculated(" ".join(words[1:]))
            return None if number is None else str(number)
        if name == "seq" and decided and all(word.isdigit() for word in words[1:]) and len(words) in (2, 3):
            first, last = (1, int(words[1])) if len(words) == 2 else (int(words[1]), int(words[2]))
            return "\n".join(map(str, range(first, min(last, first + 1000) + 1)))
        if name in ("dirname", "basename") and len(words) == 2 and words[1]:
            place = words[1].rstrip("/")
            if not decided and "/" not in MARK.sub("", place):
                return None
            return (place.rpartition("/")[0] or ".") if name == "dirname" else place.rpartition("/")[2]
        return None

    def host_of(self, text: str, nodes: Sequence[Node], inner: Shell) -> str:
        """Return a mark if this substitution gives the job's nodes, or the first of them: convert knows how jobs ask."""
        return ""

    def name_hosts(self, words: Sequence[str], text: str, names: FrozenSet[str]) -> None:
        """Mark variables that are read from a list of the job's nodes."""

    # Commands

    def _apart(self, certain: bool = True) -> Shell:
        """Return a copy whose variables and events are its own."""
        other = copy.copy(self)
        other.variables, other.files, other.events = dict(self.variables), dict(self.files), list(self.events)
        other.certain = self.certain and certain
        other.words = other._expander()
        return other

    def _body(self, nodes: Sequence[Node]) -> Optional[bool]:
        result: Optional[bool] = True
        for node in nodes:
            result = self._command(node)
            ends = result is False and not self.guarded and not node.negated and node.kind != "list"
            if ends and "e" in options_at(self.options, len(self.events)):
                raise _Exit(False)
        return result

    def _asked(self, nodes: Sequence[Node]) -> Optional[bool]:
        """Run a condition: its exit code is an answer."""
        self.guarded += 1
        try:
            return self._body(nodes)
        finally:
            self.guarded -= 1

    def _command(self, node: Node, piped: str = "") -> Optional[bool]:
        """Run one command. The result is that of its exit code, as far as it is known."""
        self.steps[0] += 1
        if self.steps[0] > MAX_STEPS:
            raise Problem(
                f"line {node.line}: more than {MAX_STEPS:,} steps",
                "no batch script needs so many: is it the right file?",
            )
        if node.background and node.kind != "simple":
            self._keep(node)
            self._look_inside(*_bodies(node))
            return True
        result = self._simple(node, piped) if node.kind == "simple" else _COMPOUND[node.kind](self, node)
        self.last = (not result if result is not None else None) if node.negated else result
        return self.last

    def _written(self, node: Node, words: Sequence[str] = ()) -> str:
        """Return a command as a statement of its own: what runs in the background stays there, and `words` stand for the
        arguments of a function that it is in."""
        text = self.text[node.start : node.end]
        if words and self.depth and re.search(r"\$\{?[@*\d]", text) and not (node.redirects or node.assigned):
            text = " ".join(map(self.marks.quoted, words))
        return text + (" &" if node.background else "")

    def _reads(self, text: str) -> FrozenSet[str]:
        """Return the variables that a statement reads, and the functions that it calls."""
        called = {f"{name}()" for name in self.functions if re.search(rf"(?<![\w$-]){re.escape(name)}(?![\w=-])", text)}
        return names_read(text) | called

    def _keep(self, node: Node, trial: Optional[Shell] = None) -> None:
        """Leave a command as it stands; what it may assign, also in a trial of it, is unknown from here on."""
        text = self._written(node)
        inside, fresh = list(node.walk()), trial.events[len(self.events) :] if trial else []
        names, kinds = {_name(each) for each in inside if each.kind == "simple"}, {event.kind for event in fresh}
        writes = frozenset() if node.kind in ("subshell", "pipeline") or node.background else node.writes()
        writes |= frozenset(name for event in fresh for name in event.writes)
        state = (
            writes
            or kinds & {"shell", "cd"}
            or names
            & (self.state | {"cd", "source", ".", "export", "module", "ml", "conda", "exit", "eval", "trap", "exec"})
        )
        quiet = names <= self.prints and "once" not in kinds and not writes and not any(map(_into_file, inside))
        quiet = quiet and not self.acts.search(text)
        kind = "print" if quiet else "shell" if state and node.kind not in ("subshell", "pipeline") else "once"
        self.events.append(Event(kind, node.line, text, self._reads(text), writes))
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
            )
        self.foreign = self.foreign or bool(names & {"source", ".", "eval"})

    def _undecided(self, node: Node) -> Optional[bool]:
        started = len(self.started)
        self._keep(node)
        self._look_inside(*_bodies(node))
        self.events[-1].starts = self.started[started:]
        return None

    def without(self, event: Event) -> str:
        """Return the text of a kept statement without what it starts: `:` stands in its place, also for a function's call."""
        text, starts = event.text, {each.text for each in event.starts}
        called: FrozenSet[str] = frozenset()
        for _ in self.functions:  # those that start something themselves, then those that call them, ...
            called |= {
                name
                for name, (body, source) in self.functions.items()
                if any(source[each.start : each.end] in starts or _name(each) in called for each in body.walk())
            }
        for each in sorted((each for top in parse(text) for each in top.walk()), key=lambda each: -each.start):
            if each.kind == "simple" and (text[each.start : each.end] in starts or _name(each) in called):
                text = f"{text[: each.start]}:{text[each.end :]}"
        event.reads = self._reads(text)
        return text

    def _look_inside(self, *bodies: Sequence[Node]) -> None:
        """Look for what is started inside a command that is left as it stands."""
        for body in bodies:
            inner = self._apart(certain=False)
            try:
                inner._body(body)
            except _Leaves:
                pass

    def _unknown(self, node: Node) -> Optional[bool]:
        self._keep(node)
        return None

    def _arithmetic(self, node: Node) -> Optional[bool]:
        number = self.words.arithmetic(node.words[0].raw, self.text[node.start : node.end])
        if re.fullmatch(r"-?\d+", number):
            return number != "0"
        if node.end > node.start:
            self._keep(node)
        return None

    def _let(self, words: List[str], node: Node, text: str) -> Optional[bool]:
        inside = copy.copy(node)
        inside.words = (node.words[0]._replace(raw=",".join(words[1:])),)
        return self._arithmetic(inside)

    def _group(self, node: Node) -> Optional[bool]:
        started = len(self.started)
        result = self._body(node.bodies[0])
        for each in self.started[started:]:
            each.redirected = f"{each.redirected} {_files(node)}".strip()
        return result

    def _subshell(self, node: Node) -> Optional[bool]:
        before, events, started = self._apart(), len(self.events), len(self.started)
        result: Optional[bool] = None
        try:
            for body in _bodies(node):
                result = self._body(body)
        except (_Exit, _Return) as left:
            result = left.result
        found = len(self.started) > started
        kept = self.events if found else self.events[:events]
        self.__dict__.update({**before.__dict__, "events": kept, "started": self.started, "words": self.words})
        if found:
            self._part_of(node, events)
        else:
            self._keep(node)
        return False if result is False and found else None

    def _pipeline(self, node: Node) -> Optional[bool]:
        started = len(self.started)
        results: List[Optional[bool]] = []
        for place, body in enumerate(node.bodies):
            inner = self._apart()
            rest = self.text[node.bodies[place + 1][0].start : node.end] if place + 1 < len(node.bodies) else ""
            results.append(inner._command(body[0], rest))
        if len(self.started) == started:
            self._keep(node)
        else:
            text = self._written(node)
            self.events.append(Event("started", node.line, text, names_read(text)))
            counted = results if "pipefail" in options_at(self.options, len(self.events)) else results[-1:]
            return False if False in counted else None
        return None

    def _list(self, node: Node) -> Optional[bool]:
        names = [_name(body[0]) for body in node.bodies]
        before, events = self._apart(), len(self.events)
        started = len(self.started)
        result = self._asked(node.bodies[0])
        for place, joint in enumerate(node.joints):
            if joint == "||" and names[place] == "mkdir":
                result = None  # it may well be there
            if result is None and len(self.started) > started:  # it has run: `&&` goes on, `||` is for when it fails
                following = node.bodies[place + 1][0]
                if joint == "&&":
                    if len(self.events) > events and self.events[-1].kind == "started":
                        self.events[-1].text += " || exit"
                    result = self._part(node, place)
                elif not {_name(each) for each in following.walk() if each.kind == "simple"} <= self.prints | {"exit"}:
                    self._keep(following)
                    self._look_inside([following])
                continue
            if result is None:  # what follows depends on it
                ahead = self._apart()
                ahead.started = []
                ahead._look_inside(*node.bodies[place + 1 :])
                certain = names[place] not in self.asks and node.bodies[place][0].kind == "simple" and joint == "&&"
                if certain and ahead.started:
                    sourced = len(self.events) > events and self.events[-1].words[:1] in (("source",), (".",))
                    if len(self.events) > events and self.events[-1].kind == "once" or sourced:
                        self.events[-1].text += " || exit"
                    result = self._part(node, place)
                    continue
                fresh = self.events[events:]
                soft = bool(fresh) and all(each.soft for each in fresh)
                self.__dict__.update({**before.__dict__, "started": self.started, "words": self.words})
                self._undecided(node)
                self.events[-1].soft = soft
                return None
            taken = result is not False
            if (joint == "&&") == taken:
                result = self._part(node, place)
        if len(self.started) > started:
            self._part_of(node, events)
        return result

    def _part(self, node: Node, place: int) -> Optional[bool]:
        """Run what follows one of the operators of a list: only a failure of the last one ends a script."""
        body = node.bodies[place + 1]
        return self._body(body) if place + 1 == len(node.joints) else self._asked(body)

    def _part_of(self, node: Node, events: int) -> None:
        """Remember the whole statement with each of its events, of which it decides which one follows which."""
        for event in self.events[events:]:
            event.around = self._written(node)

    def _if(self, node: Node) -> Optional[bool]:
        before, events = self._apart(), len(self.events)
        pairs = list(zip(node.bodies[0::2], node.bodies[1::2]))
        for condition, body in pairs:
            started, defaults = len(self.started), set(self.defaults)
            result = self._asked(condition)
            if len(self.started) > started and result is None:
                for rest in node.bodies[1:]:
                    self.events += self.effects(self.text[rest[0].start : rest[-1].end], rest[0].line) if rest else []
                self._look_inside(*node.bodies[1:])
                self._part_of(node, events)
                return None
            fresh = set(self.defaults) - defaults
            if result and fresh and _ends(body):  # it does not go on without them
                self.required = self.required | fresh
                for name in fresh:
                    del self.defaults[name]
                continue
            if result is None:
                asks = re.search(_ARGUMENTS, self.text[node.start : body[0].start])
                if self.arguments is None and asks and _ends(body):
                    continue  # it asks for arguments, which whoever submits the job gives
                del self.events[events:]
                self.variables = before.variables
                return self._undecided(node)
            if result:
                return self._body(body)
        return self._body(node.bodies[-1]) if len(node.bodies) % 2 else True

    def _case(self, node: Node) -> Optional[bool]:
        value = self.words.text(node.words[0].raw) if node.words else ""
        patterns = [[self.words.text(each) for each in joint.split("\n")] for joint in node.joints]
        if MARK.search(value) or any(MARK.search(each) for some in patterns for each in some):
            return self._undecided(node)
        for some, body in zip(patterns, node.bodies):
            if any(fnmatch.fnmatchcase(value, each) for each in some):
                return self._body(body)
        return True

    def _while(self, node: Node) -> Optional[bool]:
        if self.arguments is None and re.search(_ARGUMENTS, self.text[node.start : node.bodies[1][0].start]):
            self.defaults.setdefault("$@", "")  # it goes through arguments, and nobody gave any
            return True

        def rounds(shell: Shell) -> Optional[bool]:
            result: Optional[bool] = True
            for first in node.bodies[2:3]:
                shell._body(first)
            for _ in range(MAX_ROUNDS):
                asked = shell._asked(node.bodies[0])
                if asked is None:
                    raise _Unclear
                if asked is node.negated:
                    return result
                result = shell._round(node.bodies[1])
                for step in node.bodies[3:]:
                    shell._body(step)
            raise _Unclear

        return self._inline(node, rounds)

    def _for(self, node: Node) -> Optional[bool]:
        items = [each for word in node.words[1:] for each in self.words.fields(word.raw)]
        if any(MARK.search(each) for each in items) or len(items) > MAX_ROUNDS or (len(node.words) == 1):
            return self._undecided(node)

        def rounds(shell: Shell) -> Optional[bool]:
            result: Optional[bool] = True
            for item in items:
                shell._assign(node.words[0].text, item, self.marks.quoted(item), node.line, False)
                result = shell._round(node.bodies[0])
            return result

        return self._inline(node, rounds)

    def _round(self, nodes: Sequence[Node]) -> Optional[bool]:
        try:
            return self._body(nodes)
        except _Next as left:
            if left.result is False:
                raise
            return True

    def _leave_loop(self, words: List[str], node: Node, text: str) -> Optional[bool]:
        if len(words) > 1 and words[1] != "1":
            raise _Unclear  # of an outer loop
        raise _Next(words[0] == "continue")

    def _inline(self, node: Node, body: Callable[[Shell], Optional[bool]]) -> Optional[bool]:
        """Run a loop or a function here if its text decides all that it does; else keep it as it stands."""
        left: Optional[_Leaves] = None
        trial = self if self.inlines else self._apart()
        if not self.inlines:
            trial.started = []
        try:
            result = body(trial)
        except (_Return, _Next) as ended:
            result = ended.result if isinstance(ended, _Return) else True
        except _Exit as ended:
            left, result = ended, ended.result
        except _Unclear:
            return None if self.inlines else self._undecided(node)
        if self.inlines:
            return None
        fresh = trial.events[len(self.events) :]
        held = {each for variable in self.variables.values() for each in self.marks.of("".join(variable.value))}
        changed = frozenset(name for event in fresh for name in event.writes)
        decided = all(
            event.kind in ("print", "cd", "export")
            or (
                event.kind == "assign"
                and all(
                    each in held and each.reads.isdisjoint(changed)
                    for each in self.marks.of("".join(event.value or ""))
                )
            )
            for event in fresh
        )
        if trial.started and len(trial.started) > 1 and node.kind == "for":
            for each in trial.started:
                each.certain = False
        if decided or trial.started:
            self.started += trial.started
            kept = {name: self.__dict__[name] for name in ("started", "certain", "words", "guarded", "locals")}
            self.__dict__.update({**trial.__dict__, **kept})
            if left:
                raise left
            return result
        self._keep(node, trial)
        return None

    def _function(self, node: Node) -> Optional[bool]:
        name = node.words[0].text
        text = self.text[node.start : node.end]
        reads = self._reads(text) - {f"{name}()"}
        self.functions[name] = (node.bodies[0][0], self.text)
        self.events.append(Event("assign", node.line, text, reads, frozenset((f"{name}()",))))
        return True

    def _call(self, name: str, words: List[str], node: Node) -> Optional[bool]:
        body, text = self.functions[name]

        def call(shell: Shell) -> Optional[bool]:
            outer, shell.arguments = shell.arguments, words[1:]
            source, shell.text = shell.text, text
            before, shell.locals = shell.locals, {}
            shell.depth += 1
            try:
                return shell._command(body) if shell.depth < MAX_DEPTH else None
            finally:
                shell.arguments, shell.text = outer, source
                shell.depth -= 1
                for name, was in shell.locals.items():
                    shell._restore(name, *was, node.line)
                shell.locals = before

        return self._inline(node, call)

    def _restore(self, name: str, was: Optional[Variable], exported: bool, line: int) -> None:
        """Give a variable back what it was outside a function, or before a command that had one of its own."""
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
        self._assign(name, was.value, raw if isinstance(was.value, str) else f"({raw})", line, was.exported)

    def _simple(self, node: Node, piped: str = "") -> Optional[bool]:
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
                self._set(each, node.line, False)
            if node.redirects and not assigned:
                self.events.append(Event("once", node.line, self.text[node.start : node.end]))
            given = "".join("".join(self.variables[each[0]].value) for each in assigned)
            ran = any((each.made or each.text).startswith("$(") for each in self.marks.of(given))
            return None if ran and assigned else True  # the exit code is that of what gives the value
        words = [each for word in node.words for each in self.words.fields(word.raw)]
        text = self.text[node.start : node.end]
        if not words:
            return True
        name = words[0].rsplit("/", 1)[-1]
        builtin = _BUILTINS.get(words[0])
        if builtin:
            return builtin(self, words, node, text)
        if words[0] in self.functions:
            own = {each[0]: (self.variables.get(each[0]), each[0] in self.exports) for each in assigned}
            for each in assigned:
                self._set(each, node.line, True)
            result = self._call(words[0], words, node)
            for each_name, was in own.items():
                self._restore(each_name, *was, node.line)
            return result
        self._remember_file(words, node)
        if self.wanted(words):
            prefix: Dict[str, str] = {}
            outside = dict(self.variables)
            for each in assigned:
                prefix[each[0]] = self.words.text(each[3])
                self.variables[each[0]] = Variable(prefix[each[0]], True)
            self.variables = outside
            if self.separators() != BLANKS and any(map(outside_quotes, MARK.findall("".join(words)))):
                self.doubts.append((node.line, text, "IFS is changed, and splits what only the job knows"))
            if not self.task:
                words = [self.with_names(word, node.line) for word in words]
                prefix = {name: self.with_names(value, node.line) for name, value in prefix.items()}
            fed = self.fed(words, node)
            started = Started(
                node.line, fed or words, dict(self.variables), self.cwd, len(self.events), self.certain, text, prefix
            )
            started.piped, started.background, started.within = piped, node.background, self.statement
            started.redirected = " ".join([_files(node), *("<< ..." for _ in node.heredocs[: not fed])]).strip()
            self.started.append(started)
            written = self._written(node, words)
            self.events.append(Event("started", node.line, written, names_read(text), words=tuple(started.words)))
            failed = self.fails == (node.line, text)
            self.lost = self.lost or failed and node.background
            return True if node.background else False if failed else None
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
            quiet = name in self.prints and not self.acts.match(text) and (node.background or not _into_file(node))
            written = self._written(node, words)
            self.events.append(Event("print" if quiet else "once", node.line, written, reads, words=tuple(words)))
        return None if name not in ("echo", "printf", "mkdir", "export") else True

    def fed(self, words: List[str], node: Node) -> List[str]:
        """Return the command with the program that it reads from a heredoc as an argument; empty if it reads none."""
        return []

    def _remember_file(self, words: List[str], node: Node) -> None:
        """Remember the text of a file that the script writes with a heredoc."""
        targets = [token.word for token in node.redirects if token.text in (">", ">|") and token.word]
        if node.heredocs and words[0] in ("cat", "tee"):
            path = self.words.text(targets[0].raw) if targets else words[-1] if len(words) > 1 else ""
            document = node.heredocs[0]
            self.files[path] = document.text if document.literal else self.words.heredoc(document.text)

    # Builtins

    def _declare(self, words: List[str], node: Node, text: str) -> Optional[bool]:
        flags = "".join(word.raw for word in node.words[1:] if word.raw.startswith("-"))
        exports = words[0] == "export" or "x" in flags
        if words[0] == "export" and "n" in flags:
            exports = False
        if "A" in flags:  # a mapping
            for name in re.findall(r"^[A-Za-z_]\w*", "\n".join(word.raw for word in node.words[1:]), re.M):
                self._leave(name, text, node.line)
            return True
        if "f" in flags:
            called = frozenset(f"{name}()" for name in words[1:])
            self.events.append(Event("shell", node.line, text, called, soft=True))
            self.exports = self.exports | called
            return True
        names = {match[0] for match in (re.match(r"[A-Za-z_]\w*", word.text) for word in node.words[1:]) if match}
        if self.locals is not None and words[0] in ("local", "declare", "typeset") and "g" not in flags:
            for name in names:
                self.locals.setdefault(name, (self.variables.get(name), name in self.exports))
        for word in node.words[1:]:
            parts = assignment(word)
            if parts:
                self._set(parts, node.line, exports)
                if exports:
                    self.variables[parts[0]] = self.variables[parts[0]]._replace(maybe=False)
                continue
            for name in self.words.fields(word.raw) if not word.raw.startswith("-") else ():
                found = assignment(word._replace(raw=name)) if "=" in name else None
                if found:
                    self._assign(found[0], found[3], self.marks.quoted(found[3]), node.line, exports)
                elif name in self.variables and words[0] == "export" and not exports:
                    self.variables[name] = self.variables[name]._replace(exported=False)
                elif re.fullmatch(r"[A-Za-z_]\w*", name) and exports:
                    old = self.variables.get(name)
                    self.exports = self.exports | {name}
                    if old:
                        self.variables[name] = old._replace(exported=True, maybe=False)
                        self.events.append(
                            Event("export", node.line, f"export {name}", frozenset((name,)), frozenset((name,)))
                        )
        return True

    def _unset_builtin(self, words: List[str], node: Node, text: str) -> Optional[bool]:
        for name in words[1:]:
            if name.startswith("-"):
                continue
            if "[" in name:
                self._leave(name.partition("[")[0], text, node.line)
                continue
            self.hidden |= {name}
            kind = "shell" if self.variables.pop(name, None) is None else "assign"
            self.events.append(Event(kind, node.line, f"unset {name}", frozenset(), frozenset((name,)), soft=True))
        return True

    def _cd(self, words: List[str], node: Node, text: str) -> Optional[bool]:
        place = words[1] if len(words) > 1 else self.mark("${HOME}", SUBMIT)
        if place[:1] in ("-", "+") or words[0] == "popd" or words == ["pushd"]:
            self.cwd = self.mark("${PWD}", JOB, False)
        else:
            base = self.cwd or self.mark("${PWD}", SUBMIT)
            absolute = place.startswith("/") or MARK.match(place)
            if whole_marks(place) in (whole_marks(base), ".", "./"):  # it is there
                self.events.append(Event("print", node.line, text))
                return True
            self.cwd = place if absolute else f"{base}/{place}"
        self.events.append(Event("cd", node.line, text, names_read(text), words=tuple(words)))
        return True

    def _set_builtin(self, words: List[str], node: Node, text: str) -> Optional[bool]:
        rest = self.set_options(words[1:])
        if "--" in rest:
            self.arguments = rest[rest.index("--") + 1 :]
        return True

    def set_options(self, words: Sequence[str]) -> List[str]:
        """Set options as `set`, or the call of a shell, names them; return the words after them."""
        rest = list(words)
        while rest and re.fullmatch(r"[-+][A-Za-z]+", rest[0]):
            word = rest.pop(0)
            names = [rest.pop(0) if letter == "o" and rest else letter for letter in word[1:]]
            names = [_SHORT.get(name, name) for name in names if name not in _CALLED]
            self.options = [*self.options, *((len(self.events), name, word[0] == "-") for name in names)]
        self.exports_all = "a" in options_at(self.options, len(self.events))
        return rest

    def _shift(self, words: List[str], node: Node, text: str) -> Optional[bool]:
        if self.arguments is not None:
            count = int(words[1]) if len(words) > 1 and words[1].isdigit() else 1
            del self.arguments[:count]
        return True

    def _source(self, words: List[str], node: Node, text: str) -> Optional[bool]:
        soft = bool(self.environments.match(text))
        self.foreign = True
        self.events.append(Event("shell", node.line, text, names_read(text), words=tuple(words), soft=soft))
        self.sourced(self.events[-1])
        return True if soft else None

    def sourced(self, event: Event) -> None:
        """Take in what a file that is sourced may change."""

    def _eval(self, words: List[str], node: Node, text: str) -> Optional[bool]:
        said = " ".join(words[1:])
        if MARK.match(said) and self.marks.get(said[0]).text.startswith("$("):
            return self._source(words, node, text)
        outer, self.text = self.text, said
        try:
            return self._body(parse(self.text, node.line))
        finally:
            self.text = outer

    def _exec(self, words: List[str], node: Node, text: str) -> Optional[bool]:
        if len(node.words) > 1 and not node.words[1].raw.startswith("-"):
            rest = copy.copy(node)
            rest.words = node.words[1:]
            raise _Exit(self._simple(rest))
        return True

    def _exit(self, words: List[str], node: Node, text: str) -> Optional[bool]:
        if self.certain:
            self.events.append(Event("print", node.line, text))
            self.ended_at = node.line
        code = "".join(words[1:2])
        result = self.last if not code else int(code) % 256 == 0 if code.isdigit() else None
        raise (_Return if words[0] == "return" else _Exit)(result)

    def _read(self, words: List[str], node: Node, text: str) -> Optional[bool]:
        self._keep(node)
        self.events[-1].kind = "assign"
        self.name_hosts(words, text, self.events[-1].writes)
        return None

    def _echo(self, words: List[str], node: Node, text: str) -> Optional[bool]:
        if words[:2] == ["printf", "-v"]:
            self._keep(node)
            return True
        self._remember_file(words, node)
        self.events.append(Event("once" if _into_file(node) else "print", node.line, text, names_read(text)))
        return True

    def _true(self, words: List[str], node: Node, text: str) -> Optional[bool]:
        if _into_file(node):
            self.events.append(Event("once", node.line, text, names_read(text)))
        return words[0] != "false"

    def _trap(self, words: List[str], node: Node, text: str) -> Optional[bool]:
        self.events.append(Event("print", node.line, text))
        rest = [word for word in words[1:] if word not in ("--", "-p", "-l")]
        if len(rest) > 1 and rest[0] not in ("", "-"):
            signals = tuple(re.sub("^SIG", "", _NUMBERS.get(each, each.upper())) for each in rest[1:])
            self.traps.append(Trap(node.line, text, self.marks.shown(rest[0]), signals))
        return True

    def effects(self, text: str, line: int) -> List[Event]:
        """Return what a text, such as the body of a trap, would do at the end of the script."""
        inner = self._apart(certain=False)
        inner.started, inner.text, inner.inlines = [], text, True
        try:
            inner._body(parse(text, line))
        except _Leaves:
            pass
        return inner.events[len(self.events) :]

    def _without_outside(self, text: str) -> str:
        """Return '' for a variable of the submitting shell that is taken to be unset."""
        found = self.marks.get(text) if MARK.fullmatch(text) else None
        if found and (found.kind == HEAD or found.text == "${SLURM_JOB_ID}"):
            return "1"  # not empty
        name = re.fullmatch(r"\$\{(?!ARG_\d)(\w+)\}", found.text) if found and found.kind == SUBMIT else None
        return "" if name and self.unset(name[1], "") else text

    def _test(self, words: List[str], node: Node, text: str) -> Optional[bool]:
        double = words[0] == "[["
        raw = [word.raw for word in node.words]
        each = [[self.words.text(word)] if double else self.words.fields(word) for word in raw[1:]]
        fields = [field for some in each for field in some]
        quoted = [word[:1] in "'\"" for word, some in zip(raw[1:], each) for _ in some]
        if fields and fields[-1] in ("]", "]]"):
            fields.pop()
        if len(fields) <= 2 or fields[0] == "!":
            fields = [self._without_outside(each) for each in fields]
        else:
            fields = [
                self._without_outside(each) if each != "1" and self.marks.kind(each) == SUBMIT else each
                for each in fields
            ]
        return _decide(list(zip(fields, quoted)), double)


def commands_of(text: str, environ: Mapping[str, str], arguments: Optional[Sequence[str]]) -> List[List[str]]:
    """Return the words of each command that a script may start, also in functions that it does not call itself and in
    files that it writes."""
    shell = Shell(environ, lambda words: True, arguments)
    shell.run(without_marks(text))
    shell.arguments = None
    for body, source in list(shell.functions.values()):
        shell.text = source
        if not any(each.line >= body.line and each.text in source[body.start : body.end] for each in shell.started):
            shell._look_inside([body])
    for path in {word for each in shell.started for word in each.words} & set(shell.files):
        shell.run(without_marks(shell.files[path]))
    return [[shell.marks.shown(word) for word in each.words] for each in shell.started]


_NUMBERS = {"0": "EXIT", "1": "HUP", "2": "INT", "3": "QUIT", "10": "USR1", "12": "USR2", "15": "TERM"}  # of signals
_CALLED = frozenset("cilrs")  # how a shell was called: `set` does not take them
_SHORT = {
    "errexit": "e", "nounset": "u", "allexport": "a", "noglob": "f", "noclobber": "C", "xtrace": "x", "verbose": "v",
}  # fmt: skip


def options_at(options: Sequence[Tuple[int, str, bool]], place: int) -> FrozenSet[str]:
    """Return the options of `set` that hold at an event."""
    last = {name: on for start, name, on in options if start <= place}
    return frozenset(name for name, on in last.items() if on)


def _bodies(node: Node) -> List[List[Node]]:
    return node.bodies if node.kind != "list" else [[part for each in node.bodies for part in each]]


def _decide(words: List[Tuple[str, bool]], double: bool) -> Optional[bool]:
    """Return what a test says; None if its text does not decide it."""
    for joint, empty in (("||", False), ("-o", False), ("&&", True), ("-a", True)):
        places = [
            place
            for place, (word, quoted) in enumerate(words)
            if word == joint and not quoted and 0 < place < len(words) - 1
        ]
        if places and not any(word in "()" for word, quoted in words if word and not quoted):
            left, right = _decide(words[: places[0]], double), _decide(words[places[0] + 1 :], double)
            if left is (not empty) or right is (not empty):
                return not empty
            return None if left is None or right is None else empty
    if words and words[0] == ("!", False):
        result = _decide(words[1:], double)
        return None if result is None else not result
    text = [word for word, _ in words]
    if len(text) == 1:
        return bool(text[0]) if not MARK.search(text[0]) else True if MARK.sub("", text[0]) else None
    if len(text) == 2 and text[0] in ("-z", "-n"):
        sure = MARK.sub("", text[1])
        if not sure and MARK.search(text[1]):
            return None
        return bool(sure) == (text[0] == "-n")
    if len(text) != 3 or MARK.search(text[0] + text[2]):
        return None
    one, op, other = text
    if op in ("=", "==", "!="):
        same = fnmatch.fnmatchcase(one, other) if double and not words[2][1] else one == other
        return same == (op != "!=")
    numbers = {"-eq": "==", "-ne": "!=", "-gt": ">", "-lt": "<", "-ge": ">=", "-le": "<="}
    if op in numbers and not double and not (one and other):
        return False  # `[ "" -gt 0 ]` is an error
    if op in numbers:
        number = calculated(f"({one or 0}){numbers[op]}({other or 0})")
        return None if number is None else bool(number)
    return None


def _own(nodes: Sequence[Node]) -> FrozenSet[str]:
    """Return the variables that some statement gives a value that does not go on from the one before."""
    words = [
        word
        for each in nodes
        for word in (each.words if _name(each) in _DECLARING else () if each.words else each.assigned)
    ]
    given = [(parts, word) for word in words for parts in [assignment(word)] if parts]
    goes_on = {parts[0] for parts, word in given if parts[0] in names_read(word.raw) or parts[2]}
    return frozenset(parts[0] for parts, _ in given) - goes_on


def _ends(body: Sequence[Node]) -> bool:
    return any(_name(each) == "exit" for each in body)


def _name(node: Node) -> str:
    return node.words[0].text.rsplit("/", 1)[-1] if node.kind == "simple" and node.words else ""


def _files(node: Node) -> str:
    """Return the redirections of a command to and from files, as they are written."""
    given = [(each.text, each.word.raw) for each in node.redirects if each.word]
    return " ".join(
        f"{sign} {name}"
        for sign, name in given
        if not sign.endswith("&") and sign not in ("<<", "<<-") and name != "/dev/null"
    )


def _into_file(node: Node) -> bool:
    return any(
        token.text in (">", ">>", "&>", "&>>", ">|") and token.word and not token.word.text.startswith("/dev/")
        for token in node.redirects
    )


def exports(nodes: Sequence[Node], name: str) -> bool:
    return any(
        _name(each) == "export" and any(re.match(rf"{name}(?:=|$)", word.raw) for word in each.words[1:])
        for each in nodes
    )


_BUILTINS: Dict[str, Callable[[Shell, List[str], Node, str], Optional[bool]]] = {
    **dict.fromkeys(_DECLARING, Shell._declare),
    **dict.fromkeys(("[", "[[", "test"), Shell._test),
    **dict.fromkeys(("source", "."), Shell._source),
    **dict.fromkeys(("read", "mapfile", "readarray"), Shell._read),
    **dict.fromkeys(("exit", "return"), Shell._exit),
    **dict.fromkeys(("cd", "pushd", "popd"), Shell._cd),
    **dict.fromkeys(("true", "false", ":"), Shell._true),
    **dict.fromkeys(("echo", "printf"), Shell._echo),
    **dict.fromkeys(("break", "continue"), Shell._leave_loop),
    "let": Shell._let,
    "unset": Shell._unset_builtin,
    "set": Shell._set_builtin,
    "shift": Shell._shift,
    "eval": Shell._eval,
    "exec": Shell._exec,
    "trap": Shell._trap,
}
_COMPOUND: Dict[str, Callable[[Shell, Node], Optional[bool]]] = {
    "arithmetic": Shell._arithmetic,
    "case": Shell._case,
    "for": Shell._for,
    "function": Shell._function,
    "group": Shell._group,
    "if": Shell._if,
    "list": Shell._list,
    "pipeline": Shell._pipeline,
    "subshell": Shell._subshell,
    "unknown": Shell._unknown,
    "while": Shell._while,
}
