"""Expansion of shell words: variables, defaults, arrays, arithmetic, substitutions. What is not known stays as a mark."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from typing import Callable, Dict, List, Optional, Tuple, Union

from drumbeat.commands.shell import Brackets
from drumbeat.commands.values import (
    JOB,
    MARK,
    ONCE,
    SUBMIT,
    TASK,
    Marks,
    Unknown,
    fields_of,
    split_marks,
    whole_marks,
)

MAX_VALUE = 1 << 16  # characters of one value; a longer one is not followed
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_INSIDE = re.compile(
    r"(?P<mode>[#!]?)(?P<name>[A-Za-z_]\w*|[0-9]+|[@*#?])(?P<index>\[[^\]]*\])?"
    r"(?P<op>:?[-=+?]|%%?|##?|//?|\^\^?|,,?|:|@)?(?P<rest>.*)",
    re.DOTALL,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a"}
_LIST = re.compile(r"(?<!\$)\{([^{}\s]*,[^{}\s]*|-?\d{1,6}\.\.-?\d{1,6})\}")
Value = Union[str, List[str]]


class Expander:
    """Expands words by what `lookup` and `substitute` know."""

    def __init__(
        self,
        marks: Marks,
        lookup: Callable[[str], Optional[Value]],
        substitute: Callable[[str], str],
        unset: Callable[[str, str], Optional[bool]],
        assign: Callable[[str, str], None],
    ) -> None:
        self.marks, self._lookup, self._substitute, self._unset, self._assign = marks, lookup, substitute, unset, assign

    def unknown(self, text: str, kind: str = "", stable: bool = True) -> str:
        from drumbeat.commands.syntax import names_read

        reads = names_read(text)
        values = "".join(value if isinstance(value, str) else "".join(value) for value in map(self._value, reads))
        kind = kind or self.marks.kind(values) or JOB
        return self.marks.mark(Unknown(text, JOB if kind in (SUBMIT, "head", "hosts") else kind, reads, stable))

    def _value(self, name: str) -> Value:
        found = self._lookup(name)
        return "" if found is None else found

    def text(self, raw: str) -> str:
        """Expand as in an assignment: one text, nothing is split."""
        return whole_marks(
            "".join(" ".join(part) if isinstance(part, list) else part for part, _ in self._pieces(raw))
        )[: MAX_VALUE + 1]

    def fields(self, raw: str) -> List[str]:
        """Expand as a word of a command: it may become several words, or none."""
        lists = _LIST.search(raw) if raw[:1] not in "'\"" else None
        if lists and "'" not in raw[: lists.start()] and '"' not in raw[: lists.start()]:
            return [
                field
                for item in _items(lists[1])
                for field in self.fields(raw[: lists.start()] + item + raw[lists.end() :])
            ]
        pieces: List[Tuple[str, bool]] = []
        done: List[str] = []
        empty = False
        for part, quoted in self._pieces(raw, globs=True):
            if isinstance(part, list):  # "${list[@]}": one word for each, none if it is empty
                empty = empty or not part
                if part:
                    pieces.append((part[0], True))
                for item in part[1:]:
                    done += fields_of(pieces)
                    pieces = [(item, True)]
            else:
                pieces.append((part, quoted))
        return done if empty and not any(text for text, _ in pieces) else done + fields_of(pieces)

    def _pieces(self, raw: str, globs: bool = False) -> List[Tuple[Union[str, List[str]], bool]]:
        found: List[Tuple[Union[str, List[str]], bool]] = []
        at, plain = 0, ""
        if raw[:1] == "~" and (len(raw) == 1 or raw[1] == "/"):
            found.append((self._variable("HOME"), True))
            at = 1
        brackets = Brackets(raw)
        while at < len(raw):
            char = raw[at]
            if char == "\\":
                plain += "" if raw[at + 1 : at + 2] == "\n" else raw[at + 1 : at + 2]
                at += 2
                continue
            if char in "'\"$`" or raw.startswith(("<(", ">("), at):
                found += [(plain, True)] if plain else []
                plain = ""
                at = self._special(raw, at, brackets, found)
                continue
            if MARK.match(char):  # put in by an outer shell
                found += [*([(plain, True)] if plain else []), (split_marks(char), True)]
                plain, at = "", at + 1
                continue
            if globs and char in "*?" and not re.match(r"\S*=", raw[:at]):
                found += [(plain, True)] if plain else []
                plain, at = "", at + 1
                found.append((split_marks(self.marks.mark(Unknown(char, JOB))), True))
                continue
            plain += char
            at += 1
        return [*found, (plain, True)] if plain else found

    def _special(self, raw: str, at: int, brackets: Brackets, found: List[Tuple[Union[str, List[str]], bool]]) -> int:
        char = raw[at]
        if char == "'" or raw.startswith("$'", at):
            start = at + 1 if char == "'" else at + 2
            end = raw.find("'", start)
            while char == "$" and end > 0 and raw[end - 1] == "\\":
                end = raw.find("'", end + 1)
            inside = raw[start : end if end >= 0 else len(raw)]
            if char == "$":
                inside = re.sub(r"\\(.)", lambda part: _ESCAPES.get(part[1], part[0]), inside, flags=re.DOTALL)
            found.append((inside, True))
            return end + 1 if end >= 0 else len(raw)
        if char == '"':
            end = brackets.quoted(at, 0) or len(raw) + 1
            found.append(("", True))
            self._quoted(raw[at + 1 : end - 1], found)
            return end
        text, end = self._expansion(raw, at, brackets)
        if isinstance(text, list):
            text = " ".join(text)
        found.append((text, False))
        return end

    def _quoted(self, text: str, found: List[Tuple[Union[str, List[str]], bool]]) -> None:
        at, plain, brackets = 0, "", Brackets(text)
        while at < len(text):
            char = text[at]
            if char == "\\" and text[at + 1 : at + 2] in ("$", "`", '"', "\\", "\n"):
                plain += text[at + 1].replace("\n", "")
                at += 2
            elif char in "$`":
                found.append((plain, True))  # also where it is empty: these are quotes
                plain = ""
                part, at = self._expansion(text, at, brackets)
                found.append((part, True))
            else:
                plain += char
                at += 1
        found.append((plain, True))

    def heredoc(self, text: str) -> str:
        found: List[Tuple[Union[str, List[str]], bool]] = []
        self._quoted(text.replace('\\"', '\\\\"'), found)
        return "".join(" ".join(part) if isinstance(part, list) else part for part, _ in found)

    def _expansion(self, raw: str, at: int, brackets: Brackets) -> Tuple[Union[str, List[str]], int]:
        if raw[at] == "`":
            end = brackets.backtick(at) or len(raw) + 1
            return self._substitute(raw[at + 1 : end - 1].replace("\\`", "`")), end
        if raw[at] in "<>":  # a process substitution is a file's name
            end = brackets.paren(at + 1, 0) or len(raw)
            return self.unknown(raw[at:end], JOB, False), end
        if raw.startswith("$((", at):
            end = brackets.paren(at + 1, 0) or len(raw)
            return self.arithmetic(raw[at + 3 : end - 2], raw[at:end]), end
        if raw.startswith("$(", at):
            end = brackets.paren(at + 1, 0) or len(raw) + 1
            return self._substitute(raw[at + 2 : end - 1]), end
        if raw.startswith("${", at):
            end = brackets.brace(at + 1) or len(raw) + 1
            return self._braces(raw[at + 2 : end - 1]), end
        name = _NAME.match(raw, at + 1)
        if not name:
            return "$", at + 1
        value = self._variable(name[0])
        return value, name.end()

    def _variable(self, name: str) -> Union[str, List[str]]:
        value = self._lookup(name)
        if isinstance(value, list):
            return value if name == "@" else (" ".join(value) if name == "*" else value[0] if value else "")
        return value or ""

    def _braces(self, inside: str) -> Union[str, List[str]]:
        written = "${" + inside + "}"
        found = _INSIDE.fullmatch(inside)
        if not found:
            return self.unknown(written)
        mode, name, index, op, rest = (found[key] or "" for key in ("mode", "name", "index", "op", "rest"))
        value = self._lookup(name)
        if index:
            if isinstance(value, str):  # one that is not known to be a list
                if MARK.search(value) and self.marks.kind(value) != SUBMIT:  # no list comes from outside
                    return self.unknown(written, stable=False)
                value = "" if MARK.search(value) else value
                value = [value] if value else []
            value = self._indexed(value, index[1:-1], written)
        elif isinstance(value, list) and name != "@":
            value = " ".join(value) if name == "*" else value[0] if value else ""
        if mode == "#":
            count = len(value) if isinstance(value, list) else len(value or "")
            return (
                str(count)
                if not MARK.search("".join(value or "")) or isinstance(value, list) and value[:-1]
                else self.unknown(written)
            )
        if mode == "!":
            target = value if isinstance(value, str) else ""
            return (
                self._variable(target) if re.fullmatch(r"[A-Za-z_]\w*", target) else self.unknown(written, stable=False)
            )
        if not op:
            return value if value is not None else ""
        if op.lstrip(":") in "-=+?" and op != ":":
            return self._default(name, value, op, rest, written)
        if value is None:
            return ""
        if isinstance(value, list) and op == ":":  # a part of the list; arguments count from 1
            first, length = (self.arithmetic(each, "") if each.strip() else "" for each in rest.partition(":")[::2])
            if not first.isdigit() or length and not length.isdigit() or MARK.search("".join(value)):
                return self.unknown(written, stable=False)
            start = max(0, int(first) - (name in ("@", "*")))
            return value[start : start + int(length)] if length else value[start:]
        if isinstance(value, list):
            edited = [self._edited(each, op, rest, written) for each in value]
            return edited if index[1:-1] == "@" or name == "@" else " ".join(edited)
        return self._edited(value, op, rest, written)

    def _indexed(self, value: Optional[Value], index: str, written: str) -> Optional[Value]:
        items = value if isinstance(value, list) else []
        if index == "@":
            return items
        if index == "*":
            return " ".join(items)
        number = self.arithmetic(index, index) if self.text(index) else "0"
        if not re.fullmatch(r"-?\d+", number):
            return self.unknown(
                written, self.marks.kind(number), stable=self.marks.stable("".join(items) + number) and False
            )
        place = int(number)
        head = [each for each in items if MARK.search(each)]
        if head and place >= items.index(head[0]):
            kinds = {unknown.kind for unknown in self.marks.of(items[items.index(head[0])])}
            if kinds == {"hosts"} and place == 0:
                return self.marks.mark(Unknown(written, "head", self.marks.reads(head[0]), False))
            counted = kinds != {"hosts"} and not any("[@]" in unknown.text for unknown in self.marks.of(head[0]))
            return items[place] if counted and len(items) > place else self.unknown(written, stable=False)
        return items[place] if -len(items) <= place < len(items) else ""

    def _default(self, name: str, value: Optional[Value], op: str, rest: str, written: str) -> Union[str, List[str]]:
        text = value if isinstance(value, str) else " ".join(value) if value else ""
        known_unset = value is None or (not text and op[0] == ":")
        if value is not None and MARK.search(text):
            plain = [
                unknown
                for unknown in self.marks.of(text)
                if unknown.text in (f"${{{name}}}", f"${{ARG_{name}}}") and unknown.kind == SUBMIT
            ]
            if plain and len(text) == 1:  # not of the script: what the submitting shell has
                taken = self._unset(name, rest)
                if taken is None:
                    return self.unknown(written)
                known_unset = taken
            elif MARK.sub("", text):
                known_unset = False  # some text is there in any case
            elif all(
                unknown.kind in ("head", "hosts") or unknown.text == "${SLURM_JOB_ID}"
                for unknown in self.marks.of(text)
            ):
                known_unset = False
            else:
                return self.unknown(written, stable=self.marks.stable(text))
        kind = op[-1]
        if kind == "+":
            return "" if known_unset else self.text(rest)
        if known_unset and kind in "-=":
            given = self.text(rest)
            if kind == "=":
                self._assign(name, given)
            return given
        return text if not isinstance(value, list) else value

    def _edited(self, text: str, op: str, rest: str, written: str) -> str:
        if MARK.search(text):
            return self.unknown(written, stable=self.marks.stable(text))
        if op in ("^^", ",,"):
            return text.upper() if op == "^^" else text.lower()
        if op in ("^", ","):
            return (text[:1].upper() if op == "^" else text[:1].lower()) + text[1:]
        if op == ":":
            numbers = [self.arithmetic(each.strip(), "") for each in rest.split(":")]
            if not all(re.fullmatch(r"-?\d+", each) for each in numbers):
                return self.unknown(written)
            start = int(numbers[0])
            if len(numbers) == 1:
                return text[start:]
            return text[start : start + int(numbers[1])] if int(numbers[1]) >= 0 else text[start : int(numbers[1])]
        if op in ("/", "//"):
            pattern, _, new = rest.partition("/")
            found = re.compile(fnmatch.translate(self.text(pattern))[:-2].replace("(?s:", "(?s:", 1))
            return found.sub(lambda _: self.text(new), text, count=0 if op == "//" else 1)
        if op in ("%", "%%", "#", "##"):
            pattern = self.text(rest)
            if MARK.search(pattern):
                return self.unknown(written)
            return _trimmed(text, pattern, op)
        return self.unknown(written)

    def arithmetic(self, inside: str, written: str) -> str:
        text = self.text(inside.replace('"', ""))
        for _ in range(8):
            named = re.search(r"\b[A-Za-z_]\w*\b", text)
            if not named or len(text) > 500:
                break
            value = self._variable(named[0])
            text = text[: named.start()] + (value if isinstance(value, str) else "").strip() + text[named.end() :]
            if not value:
                text = text[: named.start()] + "0" + text[named.start() :]
        number = calculated(text)
        if number is not None:
            return str(number)
        once = self.marks.kind(text)
        return self.unknown(
            written if written.startswith("$") else f"$(({written}))", once or JOB, once not in (ONCE, TASK)
        )


def _items(inside: str) -> List[str]:
    numbers = re.fullmatch(r"(-?\d+)\.\.(-?\d+)", inside)
    if not numbers:
        return inside.split(",")
    first, last = int(numbers[1]), int(numbers[2])
    step = 1 if last >= first else -1
    return [str(number) for number in range(first, last + step, step)][:1000]


def _trimmed(text: str, pattern: str, op: str) -> str:
    matches = re.compile(fnmatch.translate(pattern)).match
    if "*" not in pattern and "?" not in pattern and "[" not in pattern:  # fnmatch on a few thousand characters is slow
        cut = text.endswith(pattern) if op[0] == "%" else text.startswith(pattern)
        return (text[: len(text) - len(pattern)] if op[0] == "%" else text[len(pattern) :]) if cut and pattern else text
    places = range(min(len(text), 2000) + 1)
    ends = [place for place in places if matches(text[len(text) - place :] if op[0] == "%" else text[:place])]
    if not ends:
        return text
    cut_at = max(ends) if len(op) == 2 else min(ends)
    return text[: len(text) - cut_at] if op[0] == "%" else text[cut_at:]


_OPERATORS: Dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.FloorDiv: lambda a, b: int(a / b), ast.LShift: lambda a, b: a << min(b, 62), ast.RShift: operator.rshift,
    ast.Gt: operator.gt, ast.Lt: operator.lt, ast.GtE: operator.ge, ast.LtE: operator.le, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip


def calculated(text: str) -> Optional[int]:
    """Return the value of plain integer arithmetic; None for anything else."""
    text = text.strip()
    if len(text) > 500 or not re.fullmatch(r"[\d\s+\-*/%()<>=!]+", text) or "**" in text or "//" in text:
        return None
    try:
        return _calculated(ast.parse(re.sub(r"\b0+(?=\d)", "", text).replace("/", "//"), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError, OverflowError):
        return None


def _calculated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _calculated(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _calculated(node.left), _calculated(node.right)
        if max(abs(left), abs(right)) > 1 << 62:
            raise ValueError
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return int(_OPERATORS[type(node.ops[0])](_calculated(node.left), _calculated(node.comparators[0])))
    raise ValueError
