"""Expansion of shell words: variables, defaults, arrays, arithmetic, substitutions. Unknown parts become marks."""

from __future__ import annotations

import fnmatch
import operator
import re
from typing import Callable, Dict, List, Optional, Protocol, Tuple, Union

from drumbeat.base.regex import regex
from drumbeat.commands.shell import Brackets
from drumbeat.commands.syntax import CALCULATED, names_read
from drumbeat.commands.values import (
    HOSTS,
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
_NAME = regex(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_INSIDE = regex(
    r"(?P<mode>[#!]?)(?P<name>[A-Za-z_]\w*|[0-9]+|[@*#?])(?P<index>\[[^\]]*\])?"
    r"(?P<op>:?[-=+?]|%%?|##?|//?|\^\^?|,,?|:|@)?(?P<rest>.*)",
    re.DOTALL,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a"}
_LIST = regex(r"(?<!\$)\{([^{}\s]*,[^{}\s]*|-?\d{1,6}\.\.-?\d{1,6})\}")
_GLOB = regex(r"[*?]|\[[^\s\]'\"$]+\]")
Value = Union[str, List[str]]


class _Default(str):
    """The expanded word of an unquoted ${NAME:-word}, with its pieces: what it quotes itself is not split into words."""

    pieces: List[Tuple[Union[str, List[str]], bool]]


class Surroundings(Protocol):
    """The shell in which words are expanded."""

    marks: Marks

    def lookup(self, name: str) -> Optional[Value]: ...
    def unset(self, name: str, default: str) -> Optional[bool]: ...
    def assign_default(self, name: str, value: str) -> None: ...
    def forget(self, name: str) -> None: ...
    def substitute(self, text: str) -> str: ...
    def separators(self) -> str: ...
    def globs(self) -> bool: ...


class Expander:
    """Expands words with the variables of a shell, and what it puts in place of command substitutions."""

    def __init__(self, shell: Surroundings) -> None:
        self.shell, self.marks = shell, shell.marks

    def unknown(self, text: str, kind: str = "", stable: bool = True) -> str:
        reads = names_read(text)
        values = "".join(value if isinstance(value, str) else "".join(value) for value in map(self._value, reads))
        kind = kind or self.marks.kind(values) or JOB
        return self.marks.mark(Unknown(text, JOB if kind in (SUBMIT, "head", "hosts") else kind, reads, stable))

    def _value(self, name: str) -> Value:
        found = self.shell.lookup(name)
        return "" if found is None else found

    def text(self, raw: str) -> str:
        """Expand to one text without word splitting, as in an assignment."""
        return whole_marks(
            "".join(" ".join(part) if isinstance(part, list) else part for part, _ in self._pieces(raw))
        )[: MAX_VALUE + 1]

    def fields(self, raw: str) -> List[str]:
        """Expand a command's word, which may become several words or none."""
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
        for part, quoted in self._pieces(raw, self.shell.globs()):
            if isinstance(part, list):  # "${list[@]}": one word for each, none if it is empty
                empty = empty or not part
                if part:
                    pieces.append((part[0], True))
                for item in part[1:]:
                    done += fields_of(pieces, self.shell.separators())
                    pieces = [(item, True)]
            else:
                pieces.append((part, quoted))
        return (
            done if empty and not any(text for text, _ in pieces) else done + fields_of(pieces, self.shell.separators())
        )

    def _pieces(self, raw: str, globs: bool = False, whole: bool = True) -> List[Tuple[Union[str, List[str]], bool]]:
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
                found += [(plain, whole)] if plain else []
                plain = ""
                at = self._special(raw, at, brackets, found)
                continue
            if MARK.match(char):  # put in by an outer shell
                found += [*([(plain, whole)] if plain else []), (split_marks(char), True)]
                plain, at = "", at + 1
                continue
            pattern = _GLOB.match(raw, at) if globs and not re.match(r"\S*=", raw[:at]) else None
            if pattern:
                found += [(plain, whole)] if plain else []
                plain, at = "", pattern.end()
                found.append((split_marks(self.marks.mark(Unknown(pattern[0], JOB))), True))
                continue
            plain += char
            at += 1
        return [*found, (plain, whole)] if plain else found

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
        if isinstance(text, _Default):
            found += text.pieces
        else:
            found.append((" ".join(text) if isinstance(text, list) else text, False))
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
                part, at = self._expansion(text, at, brackets, True)
                found.append((part, True))
            else:
                plain += char
                at += 1
        found.append((plain, True))

    def heredoc(self, text: str) -> str:
        found: List[Tuple[Union[str, List[str]], bool]] = []
        self._quoted(text.replace('\\"', '\\\\"'), found)
        return "".join(" ".join(part) if isinstance(part, list) else part for part, _ in found)

    def _expansion(
        self, raw: str, at: int, brackets: Brackets, quoted: bool = False
    ) -> Tuple[Union[str, List[str]], int]:
        if raw[at] == "`":
            end = brackets.backtick(at) or len(raw) + 1
            return self.shell.substitute(raw[at + 1 : end - 1].replace("\\`", "`")), end
        if raw[at] in "<>":  # a process substitution is a file's name
            end = brackets.paren(at + 1, 0) or len(raw)
            return self.unknown(raw[at:end], JOB, False), end
        if raw.startswith("$((", at):
            end = brackets.paren(at + 1, 0) or len(raw)
            return self.arithmetic(raw[at + 3 : end - 2], raw[at:end]), end
        if raw.startswith("$(", at):
            end = brackets.paren(at + 1, 0) or len(raw) + 1
            return self.shell.substitute(raw[at + 2 : end - 1]), end
        if raw.startswith("${", at):
            end = brackets.brace(at + 1) or len(raw) + 1
            return self._braces(raw[at + 2 : end - 1], quoted), end
        name = _NAME.match(raw, at + 1)
        if not name:
            return "$", at + 1
        value = self._variable(name[0])
        return value, name.end()

    def _variable(self, name: str) -> Union[str, List[str]]:
        value = self.shell.lookup(name)
        if isinstance(value, list):
            return value if name == "@" else (self._joined(value) if name == "*" else value[0] if value else "")
        return value or ""

    def _joined(self, items: List[str]) -> str:
        return self.shell.separators()[:1].join(items)

    def _braces(self, inside: str, quoted: bool = False) -> Union[str, List[str]]:
        written = "${" + inside + "}"
        found = _INSIDE.fullmatch(inside)
        if not found:
            return self.unknown(written)
        mode, name, index, op, rest = (found[key] or "" for key in ("mode", "name", "index", "op", "rest"))
        value = self.shell.lookup(name)
        if index:
            if isinstance(value, str):  # one that is not known to be a list
                if MARK.search(value) and self.marks.kind(value) != SUBMIT:  # no list comes from outside
                    return self.unknown(written, stable=False)
                value = "" if MARK.search(value) else value
                value = [value] if value else []
            value = self._indexed(value, index[1:-1], written)
        elif isinstance(value, list) and name != "@":
            value = self._joined(value) if name == "*" else value[0] if value else ""
        if mode == "#":
            count = len(value) if isinstance(value, list) else len(value or "")
            if (
                isinstance(value, list)
                and len(value) == 1
                and self.marks.kind(value[0]) == HOSTS
                and MARK.fullmatch(value[0])
            ):
                nodes = self._value("SLURM_NNODES")
                return nodes if isinstance(nodes, str) and nodes.isdigit() else self.unknown(written)
            return (
                str(count)
                if not MARK.search("".join(value or "")) or isinstance(value, list) and value[:-1]
                else self.unknown(written)
            )
        if mode == "!" and index in ("[@]", "[*]"):
            items, nodes = self.shell.lookup(name), self._value("SLURM_NNODES")
            if isinstance(items, list) and len(items) == 1 and self.marks.kind(items[0]) == HOSTS:
                known = isinstance(nodes, str) and nodes.isdigit()
                return list(map(str, range(int(str(nodes))))) if known else self.unknown(written, stable=False)
            known = isinstance(items, list) and not any("[@]" in each.text for each in self.marks.of("".join(items)))
            return (
                [str(place) for place in range(len(items))] if known and items else self.unknown(written, stable=False)
            )
        if mode == "!":
            target = value if isinstance(value, str) else ""
            return (
                self._variable(target) if re.fullmatch(r"[A-Za-z_]\w*", target) else self.unknown(written, stable=False)
            )
        if not op:
            return value if value is not None else ""
        if op.lstrip(":") in "-=+?" and op != ":":
            given = self._between_quotes if quoted else self._word
            return self._default(name, value, op, rest, written, given)
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
            return self._joined(items)
        number = self.arithmetic(index, index) if self.text(index) else "0"
        if not re.fullmatch(r"-?\d+", number):
            return self.unknown(
                written, self.marks.kind(number), stable=self.marks.stable("".join(items) + number) and False
            )
        place = int(number)
        head = [each for each in items if MARK.search(each)]
        if head and place >= items.index(head[0]):
            kinds = {unknown.kind for unknown in self.marks.of(items[items.index(head[0])])}
            if kinds == {"hosts"} and place - items.index(head[0]) >= 0 and MARK.fullmatch(items[0]):
                text = re.sub(r"\[.*\]", f"[{place}]", written, flags=re.DOTALL)
                return self.marks.mark(Unknown(text, HOSTS if place else "head", self.marks.reads(head[0]), False))
            counted = kinds != {"hosts"} and not any("[@]" in unknown.text for unknown in self.marks.of(head[0]))
            return items[place] if counted and len(items) > place else self.unknown(written, stable=False)
        return items[place] if -len(items) <= place < len(items) else ""

    def _between_quotes(self, raw: str) -> str:
        """Expand the word of "${name:-word}": double quotes in it go, single ones stay."""
        plain = re.sub(r'\\([}"])|(\\.)|"', r"\1\2", raw, flags=re.DOTALL)
        return self.heredoc(plain)

    def _word(self, raw: str) -> _Default:
        pieces = self._pieces(raw, self.shell.globs(), whole=False)
        word = _Default("".join(" ".join(part) if isinstance(part, list) else part for part, _ in pieces))
        word.pieces = pieces
        return word

    def _default(
        self, name: str, value: Optional[Value], op: str, rest: str, written: str, given: Callable[[str], str]
    ) -> Union[str, List[str]]:
        text = value if isinstance(value, str) else " ".join(value) if value else ""
        known_unset = value is None or (not text and op[0] == ":")
        if value is not None and MARK.search(text):
            plain = [
                unknown
                for unknown in self.marks.of(text)
                if unknown.kind == SUBMIT
                and (unknown.text == f"${{{name}}}" or name.isdigit() and unknown.text.startswith("${ARG_"))
            ]
            if plain and len(text) == 1 and op[-1] != "?":  # not of the script: what the submitting shell has
                taken = self.shell.unset(name, rest)
                if taken is None:
                    return self._undecided(name, op, rest, written, True)
                known_unset = taken
            elif MARK.sub("", text) or op[-1] == "?":
                known_unset = False  # some text is there in any case, or the script ends
            elif all(
                unknown.kind in ("head", "hosts") or unknown.text == "${SLURM_JOB_ID}"
                for unknown in self.marks.of(text)
            ):
                known_unset = False
            else:
                return self._undecided(name, op, rest, written, self.marks.stable(text))
        kind = op[-1]
        if kind == "+":
            return "" if known_unset else given(rest)
        if known_unset and kind in "-=":
            new = given(rest)
            if kind == "=":
                new = whole_marks(new)
                self.shell.assign_default(name, new)
            return new
        return text if not isinstance(value, list) else value

    def _undecided(self, name: str, op: str, rest: str, written: str, stable: bool) -> Union[str, List[str]]:
        """Leave a default to the running job. `:=` is an assignment of its own, before the statement."""
        if op[-1] != "=":
            return self.unknown(written, stable=stable)
        given = f"${{{name}{op[:-1]}-{rest}}}"
        if self.marks.resolved("".join(self._variable(name))) != given:  # a word may be expanded twice
            self.shell.assign_default(name, self.unknown(given, stable=stable))
        return self._variable(name)

    def _edited(self, text: str, op: str, rest: str, written: str) -> str:
        if MARK.search(text):
            return self.unknown(written, stable=self.marks.stable(text))
        if op[0] in "^,":
            end = len(text) if len(op) == 2 else 1
            return (text[:end].upper() if op[0] == "^" else text[:end].lower()) + text[end:]
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
        given: Dict[str, str] = {}

        def get(name: str) -> str:
            value = given.get(name) or self._variable(name)
            return value if isinstance(value, str) else " ".join(value)

        number = calculated(text, get, given.__setitem__)
        if number is None:
            reads = "".join(get(name) for name in re.findall(r"[A-Za-z_]\w*", text)) + text
            once = self.marks.kind(reads)
            for name in {match[1] or match[2] for match in CALCULATED.finditer(text)}:
                self.shell.forget(name)
            text = written if written.startswith("$") else f"$(({written}))"
            return self.unknown(text, once or JOB, once not in (ONCE, TASK) and not CALCULATED.search(text))
        for name, value in given.items():
            self.shell.assign_default(name, value)
        return str(number)


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


_BINARY: Tuple[Dict[str, Callable[[int, int], int]], ...] = (
    {"||": lambda a, b: int(bool(a or b))}, {"&&": lambda a, b: int(bool(a and b))}, {"|": operator.or_},
    {"^": operator.xor}, {"&": operator.and_}, {"==": operator.eq, "!=": operator.ne},
    {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt},
    {"<<": lambda a, b: a << min(max(b, 0), 62), ">>": lambda a, b: a >> min(max(b, 0), 62)},
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
     "%": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1)},
)  # fmt: skip
_POWER = len(_BINARY)
_COMPARING = ("==", "!=", "<=", ">=")
_TOKEN = regex(
    r"\s*(\d+#\w+|0[xX][\da-fA-F]+|\d+|[A-Za-z_]\w*|<<=|>>=|\+\+|--|\*\*|<<|>>|&&|\|\||[-+*/%&|^<>=!]=|[-+*/%&|^<>=!~?:,()])"
)


class _Arithmetic:
    """The shell's integer arithmetic. `get` gives a variable's text, `put` takes a new value."""

    def __init__(self, text: str, get: Callable[[str], str], put: Callable[[str, str], None]) -> None:
        self.tokens: List[str] = []
        self.at, self.get, self.put = 0, get, put
        place, end = 0, len(text.rstrip())
        while place < end:
            found = _TOKEN.match(text, place)
            if not found or len(self.tokens) > 400:
                raise ValueError
            self.tokens.append(found[1])
            place = found.end()

    def value(self) -> int:
        chooses = not {"?", "&&", "||"}.isdisjoint(self.tokens)
        if chooses and any(
            each in ("++", "--") or each.endswith("=") and each not in _COMPARING for each in self.tokens
        ):
            raise ValueError  # what it assigns depends on values
        number = self.comma() if self.tokens else 0
        if self.at != len(self.tokens):
            raise ValueError
        return number

    def take(self, *texts: str) -> str:
        token = self.tokens[self.at] if self.at < len(self.tokens) else ""
        self.at += token in texts
        return token if token in texts else ""

    def comma(self) -> int:
        number = self.assigned()
        while self.take(","):
            number = self.assigned()
        return number

    def assigned(self) -> int:
        name, sign = (*self.tokens[self.at : self.at + 2], "", "")[:2]
        if name.isidentifier() and sign.endswith("=") and sign not in _COMPARING:
            self.at += 2
            number = self.assigned()
            if sign != "=":
                number = next(level[sign[:-1]] for level in _BINARY if sign[:-1] in level)(self.named(name), number)
            return self.given(name, number)
        number = self.binary(0)
        if self.take("?"):
            one = self.assigned()
            if not self.take(":"):
                raise ValueError
            other = self.assigned()
            return one if number else other
        return number

    def binary(self, level: int) -> int:
        if level == _POWER:
            base = self.unary()
            if self.take("**"):
                exponent = self.binary(level)
                if not 0 <= exponent <= 62:
                    raise ValueError
                return int(base**exponent)
            return base
        number = self.binary(level + 1)
        while True:
            sign = self.take(*_BINARY[level])
            if not sign:
                return number
            other = self.binary(level + 1)
            if max(abs(number), abs(other)) > 1 << 62:
                raise ValueError
            number = int(_BINARY[level][sign](number, other))

    def unary(self) -> int:
        sign = self.take("-", "+", "!", "~", "++", "--")
        if sign in ("++", "--") and self.at < len(self.tokens) and self.tokens[self.at].isidentifier():
            self.at += 1
            name = self.tokens[self.at - 1]
            return self.given(name, self.named(name) + (1 if sign == "++" else -1))
        if sign:
            number = self.unary()
            return {"-": -number, "+": number, "!": int(not number), "~": ~number}.get(sign, number)
        if self.take("("):
            number = self.comma()
            if not self.take(")"):
                raise ValueError
            return number
        token, self.at = (*self.tokens[self.at : self.at + 1], "")[0], self.at + 1
        if not token.isidentifier():
            return _number(token)
        number = self.named(token)
        after = self.take("++", "--")
        if after:
            self.given(token, number + (1 if after == "++" else -1))
        return number

    def named(self, name: str) -> int:
        for _ in range(8):  # a variable may hold another one's name
            text = self.get(name).strip()
            if not text.isidentifier():
                return _number(text or "0")
            name = text
        raise ValueError

    def given(self, name: str, number: int) -> int:
        self.put(name, str(number))
        return number


def _number(text: str) -> int:
    base, joint, digits = text.partition("#")
    if joint:
        return int(digits, int(base))
    sign, digits = (-1, text[1:]) if text[:1] == "-" else (1, text)
    return sign * (int(digits, 16) if digits[:2] in ("0x", "0X") else int(digits, 8 if digits[:1] == "0" else 10))


def calculated(
    text: str, get: Callable[[str], str] = lambda name: "?", put: Callable[[str, str], None] = lambda name, value: None
) -> Optional[int]:
    """Return the value of integer arithmetic; None if the text does not decide it."""
    try:
        return _Arithmetic(text, get, put).value() if len(text) <= 500 else None
    except (ValueError, ZeroDivisionError, RecursionError, OverflowError, StopIteration):
        return None
