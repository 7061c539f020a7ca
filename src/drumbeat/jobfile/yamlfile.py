"""Reads an untrusted YAML file into text with line numbers, and nothing more.

Only PyYAML's pure scanner and parser are used. Values stay as they were written: YAML 1.1 would turn `1:30:00` into
5400, `off` into false and `012` into 10, so the type of a value is decided by the field it is for (check.py), not here.
Anchors, tags and merge keys have no place in a job file, and a bomb needs one of them, or depth, or size: all refused.
"""

from __future__ import annotations

import os
import stat
from dataclasses import field
from typing import Any, Dict, Iterator, NoReturn, Optional, Tuple, Union

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex

MAX_BYTES = 256 * 1024
MAX_DEPTH = 16
MAX_VALUES = 10_000  # keeps the pure parser's time bounded

# All that YAML does not call printable; refused before the parser sees it.
_UNPRINTABLE = regex("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True)
class Text:
    """One value as written. `quoted` tells `"pass"` from `pass`, and `""` from nothing."""

    value: str
    line: int = 0
    quoted: bool = False

    @property
    def missing(self) -> bool:
        return not self.value and not self.quoted


@dataclass(frozen=True)
class Items:
    values: Tuple[Node, ...]
    line: int = 0


@dataclass(frozen=True)
class Table:
    entries: Dict[str, Node] = field(default_factory=dict)
    lines: Dict[str, int] = field(default_factory=dict)  # of each key
    line: int = 0


Node = Union[Text, Items, Table]


def shown(text: str, limit: int = 40) -> str:
    """Format untrusted text for a message: quoted, on one line, short."""
    return repr(text if len(text) <= limit else text[:limit] + "...")


def shown_path(path: str) -> str:
    return path if path.isprintable() else repr(path)


def load_file(path: str, what: str) -> Table:
    """Load a file. `what` is what it should be, with its article: `a job file`."""
    return load_text(read_file(path, what), shown_path(path), what)


def read_file(path: str, what: str) -> str:
    name = shown_path(path)
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise Problem(f"{name}: is a folder, not {what}")
        if not stat.S_ISREG(status.st_mode):
            raise Problem(f"{name}: is not a regular file, so not {what}")
        if status.st_size > MAX_BYTES:
            raise Problem(f"{name}: {status.st_size} bytes is too large for {what} (at most {MAX_BYTES})")
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise Problem(f"{name}: no such file") from None
    except OSError as error:
        raise Problem(f"{name}: cannot be read: {error.strerror}") from None
    except ValueError:  # a NUL byte in the path
        raise Problem(f"{name}: no such file") from None
    return decode(data, name, what)


def decode(data: bytes, name: str, what: str) -> str:
    if len(data) > MAX_BYTES:
        raise Problem(f"{name}: too large for {what} (at most {MAX_BYTES} bytes)")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Problem(f"{name}:{line}: not UTF-8 text, so not {what}") from None


def load_text(text: str, name: str, what: str) -> Table:
    bad = _UNPRINTABLE.search(text)
    if bad:
        line = text.count("\n", 0, bad.start()) + 1
        raise Problem(f"{name}:{line}: a control character ({bad.group()!r}) is not allowed in {what}")
    root = _Builder(name, _events(text, name)).root()
    if root is None or (isinstance(root, Text) and root.missing):
        raise Problem(f"{name}: is empty, not {what}")
    if not isinstance(root, Table):
        raise Problem(f"{name}:{root.line}: expected 'key: value' lines at the top of {what}, got {kind_of(root)}")
    return root


def kind_of(node: Node) -> str:
    """Name the kind of a value in the words of a message."""
    if isinstance(node, Items):
        return "a list" if node.values else "an empty list"
    if isinstance(node, Table):
        return "a mapping" if node.entries else "an empty mapping"
    return "nothing" if node.missing else shown(node.value)


# What PyYAML says -> what it usually means.
_REMEDIES = (
    ("mapping values are not allowed", "check the indentation of this line; quote a value that holds a colon"),
    ("could not find expected ':'", "each line is `key: value`; a value of several lines needs `|` after its key"),
    ("cannot start any token", "indent with blanks, not tabs; quote a value that begins with %, @ or `"),
    ("expected <block end>", "check the indentation: keys of one level begin in the same column"),
)  # fmt: skip
# What PyYAML was reading -> how it begins.
_OPENED = {"flow sequence": "the [", "flow mapping": "the {", "quoted scalar": "the quote"}


def _events(text: str, name: str) -> Iterator[Any]:
    import yaml  # here, because most commands need no YAML

    try:
        yield from yaml.parse(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        said, around = error.problem or error.context or "", error.context or ""
        fix = next((fix for words, fix in _REMEDIES if words in said), "")
        opened = next((sign for words, sign in _OPENED.items() if words in around), "")
        at = mark.index if mark else 0
        sign = text[at : at + 1]
        if opened and sign == "?" or sign in ("[", "{") and text[at - 1] not in " \t\r\n,[{":
            fix = f"quote the value that holds {sign}"
        elif opened and error.context_mark:
            said, fix = f"{said} (is {opened} of line {error.context_mark.line + 1} closed?)", ""
        raise Problem(f"{name}:{line}: not YAML: {said}", fix) from None
    except yaml.YAMLError as error:
        raise Problem(f"{name}: not YAML: {shown(str(error), 80)}") from None
    except (ValueError, OverflowError):  # PyYAML's own, for "\UFFFFFFFF" and a huge %YAML number
        raise Problem(f"{name}: not YAML: an escape or a version number is out of range") from None


class _Builder:
    """Turns the parser's events into nodes."""

    def __init__(self, name: str, events: Iterator[Any]) -> None:
        self.name, self.events = name, events
        self.count = 0

    def root(self) -> Optional[Node]:
        import yaml

        root: Optional[Node] = None
        documents = 0
        for event in self.events:
            line = event.start_mark.line + 1
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._refuse(line, "a second document ('---') is not allowed")
            elif isinstance(event, yaml.NodeEvent):
                root = self._node(event, 0)
        return root

    def _node(self, event: Any, depth: int) -> Node:
        """Return the node that begins with this event, inside `depth` others."""
        import yaml

        line = event.start_mark.line + 1
        self._refuse_features(event, line)
        if isinstance(event, yaml.ScalarEvent):
            return Text(event.value, line, event.style is not None)
        if depth >= MAX_DEPTH:
            self._refuse(line, f"nested deeper than {MAX_DEPTH} levels")
        inner = self._inner(depth + 1)
        return self._table(inner, line) if isinstance(event, yaml.MappingStartEvent) else Items(tuple(inner), line)

    def _inner(self, depth: int) -> Iterator[Node]:
        import yaml

        for event in self.events:
            if isinstance(event, yaml.CollectionEndEvent):
                return
            yield self._node(event, depth)

    def _refuse_features(self, event: Any, line: int) -> None:
        import yaml

        self.count += 1
        if self.count > MAX_VALUES:
            self._refuse(line, f"more than {MAX_VALUES} values")
        if isinstance(event, yaml.AliasEvent):
            self._refuse(line, f"aliases ({shown(f'*{event.anchor}')}) are not allowed; write the value out")
        if event.anchor is not None:
            self._refuse(line, f"anchors ({shown(f'&{event.anchor}')}) are not allowed; write the value out")
        if event.tag is not None:
            self._refuse(line, f"tags ({shown(event.tag)}) are not allowed")

    def _table(self, nodes: Iterator[Node], line: int) -> Table:
        """Return the table of `nodes`, which are keys and values in turn."""
        table = Table({}, {}, line)
        for key in nodes:
            if not isinstance(key, Text):
                self._refuse(key.line, f"a key must be a word, got {kind_of(key)}")
            if key.missing:
                self._refuse(key.line, "a key is missing before ':'")
            if key.value == "<<" and not key.quoted:
                self._refuse(key.line, "merge keys ('<<') are not allowed; write the values out")
            if key.value in table.entries:
                first = table.lines[key.value]
                self._refuse(key.line, f"key {shown(key.value)} is given twice, first on line {first}")
            table.entries[key.value], table.lines[key.value] = next(nodes), key.line
        return table

    def _refuse(self, line: int, what: str) -> NoReturn:
        raise Problem(f"{self.name}:{line}: {what}")
