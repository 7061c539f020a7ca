"""Values of an interpreted script: text in which marks (private Unicode characters) stand for unknown parts."""

from __future__ import annotations

import re
import shlex
from typing import Callable, Dict, FrozenSet, Iterator, List, NamedTuple, Tuple

from drumbeat.base.regex import regex

_FIRST_MARK = 0xF0000  # a private plane of Unicode: two marks for each unknown, the second one for outside quotes
_MOST_MARKS = 16_000
MARK = regex(f"[{chr(_FIRST_MARK)}-{chr(_FIRST_MARK + 2 * _MOST_MARKS + 1)}]")

# Where an unknown becomes known, from early to late. SUBMIT: in the submitting shell. JOB: in the job, equal on all nodes.
# HEAD: the name or address of the first node. HOSTS: the list of nodes. TASK: differs by task. ONCE: differs each time.
SUBMIT, JOB, HOSTS, HEAD, TASK, ONCE = "submit", "job", "hosts", "head", "task", "once"
_ORDER = (SUBMIT, JOB, HEAD, HOSTS, TASK, ONCE)


class Unknown(NamedTuple):
    """An unknown part of a value. `text` is shell text that yields it in the running job."""

    text: str
    kind: str
    reads: FrozenSet[str] = frozenset()
    stable: bool = True  # the same whenever it is evaluated: a variable that the script does not assign
    made: str = ""  # for a variable of the script: what it was assigned


class Marks:
    """The unknowns of one script, numbered by their marks."""

    def __init__(self) -> None:
        self._known: List[Unknown] = []
        self._numbers: Dict[Unknown, int] = {}

    def mark(self, unknown: Unknown) -> str:
        number = self._numbers.get(unknown)
        if number is None:
            number = min(len(self._known), _MOST_MARKS)
            if number < _MOST_MARKS:
                self._known.append(unknown)
                self._numbers[unknown] = number
        return chr(_FIRST_MARK + 2 * number)

    def get(self, mark: str) -> Unknown:
        number = (ord(mark) - _FIRST_MARK) // 2
        return self._known[number] if number < len(self._known) else Unknown("", ONCE, stable=False)

    def of(self, text: str) -> Iterator[Unknown]:
        return (self.get(mark) for mark in MARK.findall(text))

    def kind(self, text: str) -> str:
        """Return the latest of the kinds in the text, which says where all of it is known; '' if it has no marks."""
        kinds = {unknown.kind for unknown in self.of(text)}
        return next((kind for kind in reversed(_ORDER) if kind in kinds), "")

    def reads(self, text: str) -> FrozenSet[str]:
        return frozenset(name for unknown in self.of(text) for name in unknown.reads)

    def stable(self, text: str) -> bool:
        return all(unknown.stable for unknown in self.of(text))

    def named(self, text: str) -> bool:
        """Return true if each unknown can be read again from a variable: one that the script sets, or one that never changes."""
        return all(
            unknown.stable or unknown.made and re.fullmatch(r"\$\{\w+\}", unknown.text) for unknown in self.of(text)
        )

    def shown(self, text: str, of: Callable[[Unknown], str] = lambda unknown: unknown.text) -> str:
        """Return the text with marks replaced by their shell text."""
        return MARK.sub(lambda found: of(self.get(found[0])), text)

    def resolved(self, text: str) -> str:
        """Return the text with variables replaced by what they were assigned, for comparison."""
        return self.shown(text, lambda unknown: unknown.made or unknown.text)

    def quoted(self, text: str, of: Callable[[Unknown], str] = lambda unknown: unknown.text) -> str:
        """Return the text quoted as shell source. An unknown outside quotes stays unquoted, so the shell may split it."""
        if not MARK.search(text):
            return text if text and re.fullmatch(r"[\w@%+=:,./-]+", text) else shlex.quote(text)
        done, inside = [], ""
        for piece in re.split(f"({MARK.pattern})", text):
            if MARK.fullmatch(piece) and outside_quotes(piece):
                done += [f'"{inside}"' if not re.fullmatch(r"[\w@%+=:,./-]*", inside) else inside, of(self.get(piece))]
                inside = ""
            else:
                inside += of(self.get(piece)) if MARK.fullmatch(piece) else re.sub(r'(["$`\\])', r"\\\1", piece)
        return "".join(done) + (inside if re.fullmatch(r"[\w@%+=:,./-]*", inside) else f'"{inside}"')


def at_submission(unknown: Unknown) -> bool:
    """Return true for the PWD of the submitting shell, not one after a `cd`."""
    return unknown.text == "${PWD}" and unknown.kind == SUBMIT


def outside_quotes(mark: str) -> bool:
    return bool((ord(mark) - _FIRST_MARK) % 2)


def split_marks(text: str) -> str:
    """Return the text with its marks turned into those for outside quotes, where the shell splits values."""
    return MARK.sub(lambda found: chr(ord(found[0]) | 1), text)


def whole_marks(text: str) -> str:
    return MARK.sub(lambda found: chr(ord(found[0]) & ~1), text)


def without_marks(text: str) -> str:
    """Replace characters that would be mistaken for marks."""
    return MARK.sub("?", text)


BLANKS = " \t\n"


def fields_of(pieces: List[Tuple[str, bool]], separators: str = BLANKS) -> List[str]:
    """Join pieces of a word (text, in quotes) into words, split at blanks, or what IFS says, outside quotes."""
    blanks = f"[{''.join(each for each in separators if each in BLANKS)}]" if set(separators) & set(BLANKS) else r"\Z."
    others = "".join(re.escape(each) for each in separators if each not in BLANKS)
    between = re.compile(f"(?:{blanks})*[{others}](?:{blanks})*|{blanks}+" if others else f"{blanks}+")
    done: List[str] = []
    current, any_piece = "", False
    for text, quoted in pieces:
        if quoted:
            current, any_piece = current + text, True
            continue
        parts = between.split(split_marks(text))
        for place, part in enumerate(parts):
            if place and (current or any_piece or others and (place > 1 or text[:1] not in BLANKS)):
                done.append(current)
                current, any_piece = "", False
            current += part
    return [*done, current] if current or any_piece else done
