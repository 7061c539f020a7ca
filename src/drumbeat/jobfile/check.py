"""The one checker: a mapping of text and a dataclass whose fields describe themselves -> an instance, or one Problem.

Values of flags go through the same functions, so a file and a flag are refused in the same words.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import shlex
import sys
from dataclasses import MISSING
from typing import Any, Callable, Dict, Iterable, List, Mapping, NoReturn, Optional, Sequence, Tuple, Type, TypeVar

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.base.ranges import HostlistError
from drumbeat.base.ranges import expand as expand_hosts
from drumbeat.base.redact import is_secret
from drumbeat.base.regex import regex
from drumbeat.jobfile.yamlfile import Items, Node, Table, Text, kind_of, shown

# Self-describing fields of Job and Site: each is documented once, next to its definition. The checker, the flags of
# `drumbeat run`, its --help and the pages in docs/ are all made from this.


# kind -> how a message and the docs name it
KINDS = {
    "name": "a name (letters, digits, '.', '_', '-'; at most 64)",
    "text": "text",
    "path": "a path",
    "shell": "shell text",
    "command": "a command line, or a list of words",
    "choice": "one of a few words",
    "number": "a whole number",
    "count": "a whole number, or a range such as 4-8",
    "numbers": "a list of whole numbers",
    "words": "a list of words",
    "names": "a word, or a list of words",
    "hosts": "a list of hosts, such as [a, b] or n[1-4]",
    "size": "a size such as 440G, 64Gi or 512000M",
    "array": "numbers such as 0-3 or 1,4,7, and after % how many at once",
    "duration": "a time such as 90s, 30m, 1h, 2d6h30m, 1:30:00 or 1-02:00:00",
    "switch": "true or false",
    "variables": "a mapping NAME: value",
    "lists": "a mapping NAME: [values]",
    "table": "a mapping",
    "tables": "a mapping of mappings",
}


class Count(int):
    """A number that may be a range: as an int it is the most that is wanted, `least` is enough."""

    least: int

    def __new__(cls, most: int, least: int) -> Count:
        made = super().__new__(cls, most)
        made.least = least
        return made

    def __str__(self) -> str:
        return f"{self.least}-{int(self)}"

    def at_most(self, most: int) -> int:
        """Return the range with a lower upper end, if that is inside it."""
        return Count(most, self.least) if self.least <= most <= self else self


def least_of(number: Optional[int]) -> Optional[int]:
    """Return the lower end of a range; None for a plain number."""
    return number.least if isinstance(number, Count) else None


@dataclass(frozen=True)
class Key:
    """Description of one key of a YAML file."""

    kind: str
    help: str
    example: str
    allowed: Tuple[str, ...] = ()
    minimum: Optional[int] = None
    flag: str = ""  # the flag's placeholder (`N`); empty: no flag
    inner: Any = None  # the dataclass of a `table`, or of each value of `tables`
    default_text: str = ""  # what the default is, where the value itself does not say it

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind


REQUIRED = MISSING  # in place of a key's default
# kind -> the placeholder of its flag. Kinds that are missing here have none: they cannot be typed as one word.
_FLAGS = {
    "name": "NAME", "text": "NAME", "choice": "NAME", "path": "PATH", "shell": "SHELL", "number": "N", "count": "N",
    "names": "A,B", "hosts": "A,B", "size": "SIZE", "array": "N-M", "duration": "TIME", "switch": "switch",
    "variables": "NAME=TEXT", "lists": "NAME=A,B",
}  # fmt: skip
# kind -> its value if nothing is given; of any other kind: None
_NOTHING: Dict[str, Any] = {"words": (), "names": (), "hosts": (), "shell": ""}
_NOTHING.update(dict.fromkeys(("variables", "lists", "tables"), {}))


def key(
    kind: Any, help: str, example: str, default: Any = None, flag: Optional[str] = None, inner: Any = None, **more: Any
) -> Any:
    """Make a dataclass field with its Key. `kind` is one of KINDS, the words of a choice, or the dataclass of a table. `flag`:
    another placeholder than that of the kind, or "" for none."""
    if isinstance(kind, tuple):
        more["allowed"], kind = kind, "choice"
    elif isinstance(kind, type):
        inner, kind = kind, "table"
    flag = _FLAGS.get(kind, "") if flag is None else flag
    metadata = {"key": Key(kind, help, example, flag=flag, inner=inner, **more)}
    default = _NOTHING.get(kind) if default is None else default
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def origins_field() -> Any:
    """Make the field that holds the origin of each value: key -> `job.yaml:3: nodes` or `--nodes`. It is not part of the
    request."""
    return dataclasses.field(default_factory=dict, compare=False, repr=False)


def keys_of(cls: Any) -> Dict[str, Tuple[str, Key]]:
    """Map each YAML key to the field's name and Key, in the order of their definition."""
    return {
        field.name.replace("_", "-"): (field.name, field.metadata["key"])
        for field in dataclasses.fields(cls)
        if "key" in field.metadata
    }


def required_keys(cls: Any) -> Tuple[str, ...]:
    return tuple(
        field.name.replace("_", "-")
        for field in dataclasses.fields(cls)
        if "key" in field.metadata and field.default is MISSING and field.default_factory is MISSING
    )


def default_words(cls: Any, field: str, key: Key) -> str:
    default = {each.name: each.default for each in dataclasses.fields(cls)}[field]
    if key.default_text or default in (None, (), "", MISSING):
        return key.default_text or "none"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


# Times as people and schedulers write them, in seconds. A bare number is refused: some mean minutes, others seconds.


_UNITS = regex(r"(?:([0-9]{1,6})d)?(?:([0-9]{1,6})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,7})s)?")
_CLOCK = regex(r"(?:([0-9]{1,6})-)?([0-9]{1,6}):([0-5][0-9]):([0-5][0-9])")


def parse_duration(text: str) -> int:
    """Return seconds; ValueError says what to write instead."""
    if re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError(f"needs a unit: write {text}s, {text}m or {text}h")
    if re.fullmatch(r"[0-9]{1,6}:[0-9]{2}", text):
        first, second = text.split(":")
        raise ValueError(f"{text} can be read in two ways: write {first}h{second}m or {first}m{second}s")
    clock = _CLOCK.fullmatch(text)
    match = clock or (_UNITS.fullmatch(text) if text else None)
    if match is None:
        raise ValueError("expected a time such as 90s, 30m, 1h, 2d6h30m, 1:30:00 or 1-02:00:00")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    if clock and clock[1] is not None and hours > 23:
        raise ValueError(f"{hours} hours after the days: at most 23")
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


# `$NAME` and `${NAME}` in a job's text, filled in once, where the order is made. `$$` is a plain `$`.


_DOLLAR = regex(r"\$(?:(\$)|([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})?")


def expand(text: str, environ: Mapping[str, str], place: str) -> str:
    """Expand variables once; the result is not expanded again. `place` begins a message: `job.yaml:3: command`."""

    def fill(match: re.Match[str]) -> str:
        if match.group(1):
            return "$"
        name = match.group(2) or match.group(3)
        if not name:
            raise Problem(
                f"{place}: a '$' without a name after it",
                "write $$ for a plain '$'; no shell reads this text, so $(...) and $1 mean nothing here",
            )
        if name not in environ:
            raise Problem(
                f"{place}: ${name} is not defined", f"export {name}, or write $${name} for the text '${name}'"
            )
        if is_secret(name, environ[name]):
            raise Problem(
                f"{place}: the value of ${name} looks secret and would be written into the run folder",
                f"pass it on by name (env: {{{name}: pass}}) and read it in the command",
            )
        return environ[name]

    return _DOLLAR.sub(fill, text)


def names_expanded(text: str) -> List[str]:
    """Return the variables that `expand` fills in."""
    return [match.group(2) or match.group(3) for match in _DOLLAR.finditer(text) if match.group(2) or match.group(3)]


def literal(text: str) -> str:
    """Escape text that has been through the user's shell already, so that `expand` returns it unchanged."""
    return text.replace("$", "$$")


T = TypeVar("T")

_NAME = regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_VARIABLE = regex(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_SIZE = regex(r"\d{1,12}(?:[KMGTPkmgtp]i?)?B?")
_MOST_MEMORY = 1000**5  # bytes per node
_ARRAY = regex(r"(?=.)(?:\d{1,9}(?:-\d{1,9}(?::[1-9]\d{0,8})?)?(?:,(?!$|%)|(?=%|$)))*(?:%[1-9]\d{0,8})?")
_WHOLE = regex(r"-?(0|[1-9][0-9]{0,8})")
_TOO_LARGE = regex(r"[1-9][0-9]{9,}")
_BETWEEN_HOSTS = regex(r",(?![^\[]*\])")  # a comma, but not one in brackets
_SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


# Keys that other launchers and schedulers use, and ours.
_KNOWN_AS = {
    "gpus-per-node": "gpus", "gres": "gpus", "nnodes": "nodes", "nproc-per-node": "ranks-per-node",
    "tasks-per-node": "ranks-per-node", "ntasks-per-node": "ranks-per-node", "processes-per-node": "ranks-per-node",
    "cpus-per-task": "cpus", "image": "container", "walltime": "time", "timeout": "time", "time-limit": "time",
    "cmd": "command", "script": "command", "run": "command", "environment": "env", "envs": "env", "vars": "env",
    "cluster": "site", "mem": "memory", "max-restarts": "restarts", "retries": "restarts", "cwd": "workdir",
    "working-dir": "workdir", "mounts": "binds", "volumes": "binds", "queue": "partition", "project": "account",
    "hostlist": "hosts", "machines": "hosts", "nodelist": "hosts",
    "infiniband": "ib", "slingshot": "ofi", "cxi": "ofi", "efa": "ofi", "libfabric": "ofi", "ethernet": "tcp", "socket": "tcp",
}  # fmt: skip


_OF_JOB = ("modules", "command", "restarts", "launcher", "checks", "workdir", "preset", "on-start")
_OF_SUBMIT = ("partition", "account", "qos", "constraint", "reservation", "time")


def check(cls: Type[T], table: Table, file: str, what: str, **given: Any) -> T:
    """Check a table. `what` names the whole for messages (`the job`); `given` are fields that are not in the file."""
    checker = Checker(file)
    made = checker.record(cls, table, what, **given)
    raise_all(file, checker.problems)
    return dataclasses.replace(made, origins=checker.origins)  # type: ignore[type-var]


def raise_all(file: str, problems: Sequence[Problem]) -> None:
    """Raise the mistakes of a file as one Problem; none: go on."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        lines = [str(problem).replace("\n ", ";") for problem in sorted(problems, key=_line)]
        raise Problem("\n  ".join([f"{file}: {len(problems)} mistakes", *lines]))


def _line(problem: Problem) -> int:
    """Return the line that a mistake names; those without one come last."""
    found = re.search(r":(\d+): ", problem.what)
    return int(found[1]) if found else sys.maxsize


def mistakes(cls: Type[T], table: Table, file: str, what: str, **given: Any) -> List[Problem]:
    """Return the mistakes that `check` would refuse, one by one."""
    checker = Checker(file)
    checker.record(cls, table, what, **given)
    return checker.problems


class Checker:
    """Checker of one file. `origins` gathers where each value is: its path (`env.A`) -> the words that begin a message
    about it."""

    def __init__(self, file: str = "") -> None:
        self.file = file
        self.origins: Dict[str, str] = {}
        self.problems: List[Problem] = []  # of a file: all are shown at once

    def record(self, cls: Type[T], table: Table, what: str, prefix: str = "", **given: Any) -> T:
        known = keys_of(cls)
        values: Dict[str, Any] = dict(given)
        unlike = [name for name in table.entries if name not in known and not _hint(name, known)]
        if not prefix and len(unlike) > max(2, len(table.entries) // 2):  # another file, rather than many mistakes
            self.problems.append(
                Problem(
                    f"{self.file}:{table.lines[unlike[0]]}: this does not look like a {what.split()[-1]} file: {len(unlike)} "
                    f"of its {len(table.entries)} keys are unknown ({', '.join(map(shown, unlike[:3]))}, ...)",
                    f"known keys: {', '.join(known)}",
                )
            )
            return cls.__new__(cls)
        for name, node in table.entries.items():
            if name not in known:
                hint = "; known keys: " + ", ".join(known) if name in unlike[:1] else _hint(name, known)
                self.problems.append(
                    Problem(f"{self.file}:{table.lines[name]}: unknown key {shown(name)} in {what}{hint}")
                )
                continue
            field, key = known[name]
            try:
                values[field] = self.value(key, node, self._place(table, name, prefix), prefix + name)
            except Problem as problem:
                self.problems.append(problem)
        misspelt = any(name not in known for name in table.entries)  # what is missing may be what that was meant to be
        for name in () if misspelt else required_keys(cls):
            if known[name][0] not in values and name not in table.entries:
                key = known[name][1]
                self.problems.append(
                    Problem(
                        f"{self.file}:{table.line}: {what} has no '{name}' ({KINDS[key.kind]}; example: {key.example})"
                    )
                )
        # With problems, what comes out is never used: check() raises them.
        return cls(**values) if not self.problems else cls.__new__(cls)

    def value(self, key: Key, node: Node, place: str, path: str) -> Any:
        """Check one value. `place` begins every message about it: `job.yaml:3: nodes`, `--nodes`."""
        self.origins[path] = place
        if key.kind == "table":
            return self.record(key.inner, _table(key, node, place), path, path + ".")
        if key.kind == "tables":
            return self._tables(key, _table(key, node, place), path)
        if key.kind == "variables":
            return self._variables(_table(key, node, place), path)
        if key.kind == "lists":
            return self._lists(key, _table(key, node, place), path)
        value = _READERS[key.kind](key, node, place)
        check_limits(key, value, place)
        return value

    def variable(self, name: str, node: Node, place: str, path: str) -> Optional[str]:
        """Return the text of an environment variable; None if it is passed by name."""
        check_variable_name(name, place)
        self.origins[path] = place
        if not isinstance(node, Text):
            raise Problem(f"{place}: expected text, got {kind_of(node)}")
        if node.missing:
            raise Problem(f"{place}: has no value; write '' for an empty one, or pass to use your exported one")
        check_no_nul(node.value, place)
        return None if node.value == "pass" and not node.quoted else node.value

    def _variables(self, table: Table, path: str) -> Dict[str, Optional[str]]:
        return {
            name: self.variable(name, node, self._place(table, name, path + "."), f"{path}.{name}")
            for name, node in table.entries.items()
        }

    def _lists(self, key: Key, table: Table, path: str) -> Dict[str, Tuple[str, ...]]:
        made = {}
        for name, node in table.entries.items():
            place = self._place(table, name, path + ".")
            check_variable_name(name, place)
            made[name] = _words(key, node, place)
            if not made[name]:
                raise Problem(f"{place}: has no values; write [a, b]")
        return made

    def _tables(self, key: Key, table: Table, path: str) -> Dict[str, Any]:
        made = {}
        for name, node in table.entries.items():
            place, inner = self._place(table, name, path + "."), f"{path}.{name}"
            check_variable_name(name, place)
            self.origins[inner] = place
            if isinstance(node, Text) and not node.missing and required_keys(key.inner):
                first, *others = required_keys(key.inner)
                whole = ", ".join([f"{first}: {node.value}", *(f"{each}: ..." for each in others)])
                raise Problem(f"{place}: write {{{whole}}}, not {kind_of(node)} alone")
            made[name] = self.record(key.inner, _table(key, node, place), inner, inner + ".")
        return made

    def _place(self, table: Table, name: str, prefix: str) -> str:
        path = prefix + name
        return f"{self.file}:{table.lines[name]}: {path if path.isprintable() and len(path) < 80 else shown(path)}"


def check_limits(key: Key, value: Any, place: str) -> None:
    """Check the limits on a value of the right type."""
    if key.minimum is not None and value is not None and value < key.minimum:
        unit = " s" if key.kind == "duration" else ""
        raise Problem(f"{place}: must be at least {key.minimum}{unit}, got {value}{unit}")
    if key.allowed and value is not None and value not in key.allowed:
        raise Problem(f"{place}: {shown(value)} is not one of {', '.join(key.allowed)}{near(value, key.allowed)}")


def check_no_nul(text: str, place: str) -> None:
    if "\0" in text:
        raise Problem(f"{place}: has a NUL character, which no path, argument or variable can hold")


def check_variable_name(name: str, place: str) -> None:
    if not _VARIABLE.fullmatch(name):
        raise Problem(f"{place}: {shown(name)} is not a valid variable name (letters, digits and '_', no digit first)")


def _hint(name: str, known: Iterable[str]) -> str:
    if name in _OF_SUBMIT and "submit" in known:  # a site's default for all jobs
        return f"; write submit: {{{name}: {{value: --{name}=..., why: ...}}}}"
    if name in _OF_JOB and "submit" in known:
        return f"; {name} is a key of a job file (docs page job), where each job says its own"
    return near(name, known)


def near(word: str, known: Iterable[str]) -> str:
    ours = _KNOWN_AS.get(word.replace("_", "-").lower(), "")
    found = [ours] if ours in set(known) else difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean '{found[0]}'?" if found else ""


def _table(key: Key, node: Node, place: str) -> Table:
    return node if isinstance(node, Table) else _wrong(key, node, place)


def _text(key: Key, node: Node, place: str) -> str:
    if not isinstance(node, Text) or node.missing:
        return _wrong(key, node, place)
    check_no_nul(node.value, place)
    return node.value


def _filled(key: Key, node: Node, place: str) -> str:
    return _text(key, node, place) or _wrong(key, node, place)


def _name(key: Key, node: Node, place: str) -> str:
    text = _text(key, node, place)
    return text if _NAME.fullmatch(text) else _wrong(key, node, place)


def _command(key: Key, node: Node, place: str) -> Tuple[str, ...]:
    if isinstance(node, Items):
        words = _words(key, node, place)
    else:
        text = _text(key, node, place)
        only_shell = shell_syntax(text)
        if only_shell:
            refuse_shell(only_shell, place)
        try:
            words = tuple(shlex.split(text))
        except ValueError as error:
            raise Problem(f"{place}: cannot be split into words: {str(error).lower()}") from None
    if not words or not words[0]:
        raise Problem(f"{place}: is empty; expected {KINDS[key.kind]} (example: {key.example})")
    return words


def _words(key: Key, node: Node, place: str) -> Tuple[str, ...]:
    if not isinstance(node, Items):
        _wrong(key, node, place)
    return tuple(_text(key, item, f"{place}[{index}]") for index, item in enumerate(node.values))


def _names(key: Key, node: Node, place: str) -> Tuple[str, ...]:
    return _words(key, node, place) if isinstance(node, Items) else tuple(_filled(key, node, place).split(","))


def _hosts(key: Key, node: Node, place: str) -> Tuple[str, ...]:
    """Parse a list, or one text as schedulers write it: a,b or n[1-4]; each may have a user before it."""
    words = _words(key, node, place) if isinstance(node, Items) else (_filled(key, node, place),)
    hosts: List[str] = []
    for each in (part for word in words for part in _BETWEEN_HOSTS.split(word)):
        user, at, names = each.strip().rpartition("@")
        try:
            hosts += [user + at + host for host in expand_hosts(names)]
        except HostlistError as error:
            raise Problem(f"{place}: {error}") from None
    return tuple(hosts) or _wrong(key, node, place)


def _number(key: Key, node: Node, place: str) -> int:
    text = _text(key, node, place)
    if _TOO_LARGE.fullmatch(text):
        raise Problem(f"{place}: {text[:20]} is too large")
    return int(text) if _WHOLE.fullmatch(text) else _wrong(key, node, place)


def _range(key: Key, node: Node, place: str) -> int:
    least, dash, most = _text(key, node, place).partition("-")
    if not dash or not least:
        return _number(key, node, place)
    if not (_WHOLE.fullmatch(least) and _WHOLE.fullmatch(most)):
        _wrong(key, node, place)
    if not 0 < int(least) <= int(most):
        raise Problem(f"{place}: {least}-{most} is not a range: write the smaller number first, at least 1")
    return Count(int(most), int(least)) if int(least) < int(most) else int(most)


def _numbers(key: Key, node: Node, place: str) -> Tuple[int, ...]:
    if not isinstance(node, Items) or not node.values:
        _wrong(key, node, place)
    numbers = tuple(_number(key, item, f"{place}[{index}]") for index, item in enumerate(node.values))
    if min(numbers) < 0:
        raise Problem(f"{place}: must be at least 0, got {min(numbers)}")
    return numbers


def _size(key: Key, node: Node, place: str) -> str:
    text = _text(key, node, place)
    if not _SIZE.fullmatch(text):
        raise Problem(f"{place}: expected {KINDS[key.kind]}, got {shown(text)}")
    if least_bytes(text, 1000) > _MOST_MEMORY:
        raise Problem(f"{place}: {shown(text)} is more memory than any node has")
    return text


def least_bytes(size: str, unit: int) -> int:
    """Return the bytes of a size with a unit; `unit` is what K stands for where it may be 1000 or 1024. 0: no unit is given."""
    found = re.fullmatch(r"(\d+)([KMGTP])(i?)B?", size, re.IGNORECASE)
    return int(found[1]) * (1024 if found[3] else unit) ** ("KMGTP".index(found[2].upper()) + 1) if found else 0


def _array(key: Key, node: Node, place: str) -> str:
    """Check the numbers of an array; `%N` alone goes with a sweep."""
    text = _filled(key, node, place)
    numbers = text.partition("%")[0]
    if not _ARRAY.fullmatch(text):
        _wrong(key, node, place)
    for first, last in re.findall(r"(\d+)-(\d+)", numbers):
        if int(first) > int(last):
            raise Problem(f"{place}: {first}-{last} is not a range: write the smaller number first")
    return text


def _duration(key: Key, node: Node, place: str) -> int:
    text = _text(key, node, place)
    try:
        return parse_duration(text)
    except ValueError as error:
        raise Problem(f"{place}: {error}, got {shown(text)}") from None


def _switch(key: Key, node: Node, place: str) -> bool:
    text = _text(key, node, place).lower()
    return _SWITCH[text] if text in _SWITCH else _wrong(key, node, place)


def _wrong(key: Key, node: Node, place: str) -> NoReturn:
    kind = "one of " + ", ".join(key.allowed) if key.allowed else KINDS[key.kind]
    raise Problem(f"{place}: expected {kind}, got {kind_of(node)} (example: {key.example})")


_READERS: Dict[str, Callable[[Key, Node, str], Any]] = {
    "name": _name,
    "text": _filled,
    "path": _filled,
    "shell": _text,
    "command": _command,
    "choice": _text,
    "number": _number,
    "count": _range,
    "numbers": _numbers,
    "words": _words,
    "names": _names,
    "hosts": _hosts,
    "size": _size,
    "array": _array,
    "duration": _duration,
    "switch": _switch,
}


# Shell syntax in a job's command: no shell reads it, so its words would all become arguments.


_OPERATOR = regex(r"&&|\|\||\||;|&|\|&|\d?>>?|\d?<|<<<?|&>>?|\d?>&\d|\(|\)|.+;")
_WORD = regex(r"""\n|(?:\\.?|'[^']*'?|"(?:\\.|[^"\\])*"?|[^\s\\'"])+""", re.DOTALL)
_ASSIGNMENT = regex(r"[A-Za-z_]\w*=")


def shell_syntax(text: str) -> Optional[str]:
    """Return the first word, or line break, that only a shell understands; None if there is none. What is quoted is text."""
    for whole in _WORD.findall(text.strip()):
        word = whole.replace("\\\n", "")  # a line that goes on
        if word == "\n":
            return "a line break"
        if word.startswith("#"):
            return "#"
        if not set("\\\"'") & set(word) and _OPERATOR.fullmatch(word):
            return ";" if len(word) > 1 and word.endswith(";") else str(word)
    return None


def refuse_shell(found: str, place: str) -> NoReturn:
    why = "a line break does not end it" if found == "a line break" else f"{found} would be passed as an argument"
    raise Problem(
        f"{place}: not run by a shell; {why}",
        "put what comes before the command into setup; or write a shell line: bash -c 'first && second'"
        + ("; one command over several lines is written with >- instead of |" if found == "a line break" else ""),
    )


def refuse_assignment(command: Sequence[str], place: str) -> None:
    """Refuse `NAME=value program`: only a shell takes the first word for anything but the program's name."""
    if _ASSIGNMENT.match(command[0]):
        raise Problem(
            f"{place}: not run by a shell; {command[0]} would be taken for the program's name",
            f"put env before it: env {shlex.join(command)}",
        )
