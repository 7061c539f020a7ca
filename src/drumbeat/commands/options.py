"""The options of one launcher, and how a command line is split by them.

Each table lists every option of the launcher's own parser (tests compare them), so that an option is never taken for the
script or the script for an option's value. Names are written with '-', and compared so.
"""

from __future__ import annotations

from dataclasses import field
from typing import Dict, FrozenSet, List, Mapping, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem


def names(text: str) -> FrozenSet[str]:
    """Option names from a table's text: `nnodes -r redirects` gives --nnodes, -r, --redirects."""
    return frozenset(word if word.startswith("-") else f"--{word}" for word in text.split())


@dataclass(frozen=True)
class Options:
    valued: FrozenSet[str]
    bare: FrozenSet[str]
    replaced: FrozenSet[str] = frozenset()  # who meets where, and where output goes: drumbeat says that
    shape: FrozenSet[str] = frozenset()  # how the script is called: read, and said again by drumbeat
    refused: Mapping[str, str] = field(default_factory=dict)  # option -> what to do instead
    aliases: Mapping[str, str] = field(default_factory=dict)  # short or second name -> the name that is looked up

    def known(self) -> FrozenSet[str]:
        return self.valued | self.bare


@dataclass(frozen=True)
class Split:
    kept: Tuple[str, ...]  # options that reach the launcher as they were written
    replaced: Dict[str, str]  # as written -> value
    flags: Dict[str, str]  # all options by name -> value
    rest: Tuple[str, ...]  # the script and its arguments


def split(options: Options, launcher: str, words: Sequence[str]) -> Split:
    kept: List[str] = []
    replaced: Dict[str, str] = {}
    flags: Dict[str, str] = {}
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] not in ("-", "--"):
        written, name, value, taken = _option(options, launcher, words, index)
        if name in options.refused:
            raise Problem(f"{launcher} {written}: not with drumbeat", options.refused[name])
        flags[name] = value
        if name in options.replaced:
            replaced[written] = value
        elif name not in options.shape:
            kept += words[index : index + taken]
        index += taken
    rest = words[index + 1 :] if words[index : index + 1] == ["--"] else words[index:]
    return Split(tuple(kept), replaced, flags, tuple(rest))


def _option(options: Options, launcher: str, words: Sequence[str], index: int) -> Tuple[str, str, str, int]:
    """The option as written, its name, its value, and how many words it takes."""
    word = words[index]
    written, equals, value = word.partition("=")
    if not word.startswith("--") and word[:2] in options.known() and len(word) > 2:
        written, equals, value = word[:2], "=", word[2:]  # -t3
    name = _full_name(options, written.replace("_", "-") if written.startswith("--") else written)
    if equals:
        return written, name, value, 1
    following = words[index + 1] if index + 1 < len(words) else None
    if name in options.bare or following is None:
        return written, name, "", 1
    if name not in options.valued:
        if not following.startswith("-") and not following.endswith(".py"):
            raise Problem(
                f"{launcher} {written}: not an option that drumbeat knows, so it cannot tell whether "
                f"{following!r} is its value or the script",
                f"write {written}={following}, or put -- before the script",
            )
        return written, name, "", 1
    return written, name, following, 2


def _full_name(options: Options, name: str) -> str:
    """argparse takes any beginning of an option that only one has."""
    name = options.aliases.get(name, name)
    if name in options.known() or not name.startswith("--"):
        return name
    longer = {options.aliases.get(known, known) for known in options.known() if known.startswith(name)}
    return longer.pop() if len(longer) == 1 else name
