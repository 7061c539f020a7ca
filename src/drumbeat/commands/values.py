"""Values of a shell script that is read and not run: text in which marks stand for what only the running job knows."""

from __future__ import annotations

import re
import shlex
from typing import Callable, Dict, FrozenSet, Iterator, List, NamedTuple, Tuple

from drumbeat.base.regex import regex

_FIRST_MARK = 0xF0000  # a private plane of Unicode: two marks for each unknown, the second one for outside quotes
_MOST_MARKS = 16_000
MARK = regex(f"[{chr(_FIRST_MARK)}-{chr(_FIRST_MARK + 2 * _MOST_MARKS + 1)}]")

# Where a value is known, from early to late. SUBMIT: where the job is submitted. JOB: in the job, alike on all nodes.
# HEAD: the name or address of the node that runs the batch script. TASK: differs between tasks. ONCE: differs each time.
SUBMIT, JOB, HOSTS, HEAD, TASK, ONCE = "submit", "job", "hosts", "head", "task", "once"
_ORDER = (SUBMIT, JOB, HEAD, HOSTS, TASK, ONCE)


class Unknown(NamedTuple):
    """Part of a value that cannot be decided. `text` is the shell text that gives it on a node."""

    text: str
    kind: str
    reads: FrozenSet[str] = frozenset()
    stable: bool = True  # the same wherever it is worked out again: a variable that the script does not assign
    made: str = ""  # a variable of the script: what it was given


class Marks:
    """The unknowns of one script."""

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
        """Return where the whole text is known at the latest; '' if it is known already."""
        kinds = {unknown.kind for unknown in self.of(text)}
        return next((kind for kind in reversed(_ORDER) if kind in kinds), "")

    def reads(self, text: str) -> FrozenSet[str]:
        return frozenset(name for unknown in self.of(text) for name in unknown.reads)

    def stable(self, text: str) -> bool:
        return all(unknown.stable for unknown in self.of(text))

    def named(self, text: str) -> bool:
        """Return true if each unknown can be had again by a variable's name: one of the script, or one that stays as it is."""
        return all(
            unknown.stable or unknown.made and re.fullmatch(r"\$\{\w+\}", unknown.text) for unknown in self.of(text)
        )

    def shown(self, text: str, of: Callable[[Unknown], str] = lambda unknown: unknown.text) -> str:
        """Return the text with the shell's words for what is not known."""
        return MARK.sub(lambda found: of(self.get(found[0])), text)

    def resolved(self, text: str) -> str:
        """Return the text with what variables were given in place of their names, for comparison."""
        return self.shown(text, lambda unknown: unknown.made or unknown.text)

    def quoted(self, text: str, of: Callable[[Unknown], str] = lambda unknown: unknown.text) -> str:
        """Return the text as one word of a shell, or several where an unknown stands outside quotes."""
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
    """Return true for the folder in which the job is submitted; the shell's PWD is another one after a `cd`."""
    return unknown.text == "${PWD}" and unknown.kind == SUBMIT


def outside_quotes(mark: str) -> bool:
    return bool((ord(mark) - _FIRST_MARK) % 2)


def split_marks(text: str) -> str:
    """Return the text as it is outside quotes: the shell splits what its unknowns hold."""
    return MARK.sub(lambda found: chr(ord(found[0]) | 1), text)


def whole_marks(text: str) -> str:
    return MARK.sub(lambda found: chr(ord(found[0]) & ~1), text)


def without_marks(text: str) -> str:
    """Replace characters of a script that would be taken for marks."""
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
