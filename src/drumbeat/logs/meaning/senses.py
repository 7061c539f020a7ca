"""What an error means, whatever program words it.

An error's words become concepts: things (a GPU, a port, a file) and what befell them (missing, exhausted, refused). A row
of the table gives the code of each combination; numbers and names with a fixed meaning (errno, signals, exit statuses, HTTP)
are read first. A sense is the code of a rule, whose cause and fix are used; a rule with a pattern of its own only refines.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import signal as signals
from collections import Counter
from typing import Dict, FrozenSet, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.data import load
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.causes.table import OF_ERRNO

# Names, numbers and texts of errno all mean the same.
_TEXTS = {os.strerror(number).lower(): code for number, code in OF_ERRNO.items()}
_NAMES = {errno.errorcode[number]: code for number, code in OF_ERRNO.items()}
_ERRNO = regex(
    r"(?i)\b(?:errno|os error|error code)[\s:=#(]{0,3}(?P<number>\d{1,3})\b|\b(?:FI_)?(?P<name>(?-i:"
    + "|".join(_NAMES)
    + r"))\b"
)
_TEXT = regex("(?i)(?:" + "|".join(map(re.escape, _TEXTS)) + ")")

# The code of a process that a signal ended.
CODE_OF_SIGNAL = {
    signals.SIGKILL: "killed",
    signals.SIGSEGV: "segfault",
    signals.SIGBUS: "bus-error",
    signals.SIGABRT: "aborted",
    signals.SIGILL: "illegal-instruction",
    signals.SIGFPE: "illegal-instruction",
}
_SIGNALS = frozenset(map(int, signals.Signals))
# `exited with status 137`, `exit code: 1`, `returned non-zero exit status 3`, `RC=9`, `terminated by signal 9 (SIGKILL)`
STATUS = regex(
    r"(?i)\b(?:(?:exit(?:ed|s|ing)?|end(?:ed|s)|terminated|return(?:ed|s)?|finished|fail(?:ed|s)|die[ds]|stopped|quit|crashed|left)\b"
    r"(?: with)?(?: an?)?(?: non-?zero)?[\s:=(]{0,3}(?:(?:exit|return)[ _-]?)?(?:status|code|value)"
    r"|(?:exit|return)[ _-]?(?:status|code)|exitcode|rc|exit(?:ed)?(?= -?[1-9]))"
    r"[\s:=(]{1,3}(?P<status>-?\d{1,3})(?![\w.%])"
    r"|\b(?:signal|sig)[\s:=#(]{0,3}(?P<signal>\d{1,2})(?![\w.%])|\bSIG(?P<name>KILL|SEGV|BUS|ABRT|ILL|FPE)\b"
)
_HTTP = regex(
    r"(?i)\b(?:https?|(?-i:GET|POST) \S{1,200} \S{0,2}|status(?: code)?"
    r"|answer(?:ed|s)?|return(?:ed|s)?|response|repl(?:ied|ies)|gave|got|sa(?:id|ys))"
    r"(?: with| error| status| code)*\W{1,3}(?P<http>[45]\d\d)\b(?! ?(?:[a-z]?i?b|ms|s|steps|samples)\b)"
)

_LETTERS = regex(r"[a-z+]+")
_APOSTROPHE = regex(r"(?<=\w)n['\u2019]t\b")

_DO = r"(?:\w+ ){0,3}?"  # what may stand between `not` and its verb


@dataclass(frozen=True)
class Words:
    names: Sequence[Tuple[re.Pattern[str], str]]
    spellings: Sequence[Tuple[re.Pattern[str], str]]
    concepts: Mapping[str, re.Pattern[str]]
    rows: Sequence[Tuple[str, Sequence[str]]]  # code and concepts
    cues: Mapping[str, Mapping[str, float]]  # stem -> code -> how much it speaks for it


@functools.lru_cache(maxsize=1)
def words() -> Words:
    """Spellings, concepts and rows of words.yaml."""
    data = load("drumbeat.logs.meaning", "words")
    concepts = {**data["things"], **data["happenings"]}
    names, spellings = ([(regex(_joined(one)), word) for one, word in data[key]] for key in ("names", "spellings"))
    patterns = {name: regex(rf"(?<![\w-])(?:{_joined(text)})(?!\w|-\d)") for name, text in concepts.items()}
    rows = [(code, row.split()) for each in data["rows"] for code, rows in each.items() for row in rows]
    return Words(names, spellings, patterns, rows, _weights(data["cues"]))


def _weights(cues: Mapping[str, str]) -> Dict[str, Dict[str, float]]:
    """A stem counts the less, the more causes it goes with."""
    halves = {code: text.split("|") for code, text in cues.items()}
    lists = [(code, strong.split(), weak.split()) for code, (strong, weak) in halves.items()]
    telling = Counter(stem for _, stems, _ in lists for stem in stems)
    shared = Counter(stem for _, _, stems in lists for stem in stems)
    weights: Dict[str, Dict[str, float]] = {}
    for code, strong, weak in lists:
        for stem in weak:
            weights.setdefault(stem, {})[code] = _WEAK if shared[stem] <= 4 else _WEAK / 2
        for stem in strong:
            weights.setdefault(stem, {})[code] = telling[stem] ** -0.5
    return weights


def senses() -> FrozenSet[str]:
    """Every code that the grammar can give."""
    cues = (code for codes in words().cues.values() for code in codes)
    return frozenset((*OF_ERRNO.values(), *CODE_OF_SIGNAL.values(), *(code for code, _ in words().rows), *cues))


def _joined(text: str) -> str:
    """A pattern that is written on several lines, broken behind `|`."""
    return text.replace("|\n", "|").replace("{do}", _DO)


_NEAR = 60  # characters between two concepts that belong together
# Faults of a program's own code: their names say what went wrong, and their messages are about the code's own objects.
_OF_CODE = regex(
    r"(?:\w+\.)*(?:Type|Key|Attribute|Name|Index|UnboundLocal|ZeroDivision|Syntax|Indentation|UnicodeDecode|JSONDecode)Error\b"
)
_REMEDY = regex(
    r"(?i)\b(?P<how>(?:(?:python3? -m )?pip3?|conda|mamba|apt(?:-get)?|module) (?:install|load)"
    r"(?: -[\w-]+)* [\w.\[\]=~<>,-]*\w\]?)"
)
_SET = regex(
    r"\b(?:require\w*|must|needs?|[Pp]lease|have to)\b[^.]{0,60}?\b(?:[Ss]et(?:ting)?|export)"
    r"(?: the)?(?: environment)?(?: variable)? [`'\"]?(?P<name>[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)[`'\"]?"
    r"(?: to |=)[`'\"]?(?P<value>[\w./:-]*\w)"
)
_MAX = 600  # characters of an error that are read


@functools.lru_cache(maxsize=4096)
def sense(text: str) -> str:
    """The code of what this error means; empty where its words do not tell."""
    text = text[:_MAX]
    found = _ERRNO.search(text)
    exact = (OF_ERRNO.get(int(found["number"])) if found["number"] else _NAMES[found["name"]]) if found else None
    if exact is None:
        said = _TEXT.search(text)
        exact = _TEXTS[said[0].lower()] if said else None
    meant = "" if _OF_CODE.match(text) else _meant(text)
    if "os error" in text and "peer-lost" in (exact, meant):  # Rust's words, of a client that fetches something
        return "connect-failed"
    if exact and meant not in _NAMES_OBJECT.get(exact, ()):
        return exact
    if not exact and meant in ("", "peer-lost", "node-failure", "oom-kill"):
        number = signal_of(text)
        ended = CODE_OF_SIGNAL.get(signals.Signals(number)) if number in _SIGNALS else None
        meant = ended if ended and meant != "oom-kill" else meant
    if not meant and _HTTP.search(text):
        return "hub-access"
    return meant


# What an errno befell, where the object says more than the number.
_NAMES_OBJECT = {
    "file-missing": ("import-error", "command-not-found", "bad-image", "shm-full"),
    "disk-full": ("shm-full",),
    "permission": ("hub-access", "memlock-low", "process-limit"),
    "host-out-of-memory": ("gpu-out-of-memory", "memlock-low", "shm-full", "oom-kill"),
    "connect-failed": ("collective-timeout", "hub-access", "peer-lost"),
    "store-refused": ("hub-access",),
    "peer-lost": ("hub-access",),
}


_MEMBER = regex(r"(?i)\b(?:rank|worker|trainer|member|replica|process|peer|task)[\s#=:]{1,2}(\d{1,6})\b")


def rank_in(text: str) -> Optional[int]:
    """The one rank that an error speaks of: `Worker 0 has failed`."""
    numbers = set(_MEMBER.findall(text))
    return int(numbers.pop()) if len(numbers) == 1 else None


def is_about(concept: str, word: str) -> bool:
    """Is this one of the words for a thing of the grammar?"""
    return bool(words().concepts[concept].fullmatch(word))


def signal_of(text: str) -> Optional[int]:
    """The signal that an exit status of this line stands for: 137, -9, SIGKILL and `signal 9` are all the same."""
    found = STATUS.search(text)
    if found is None:
        return None
    if found["name"]:
        return int(getattr(signals, f"SIG{found['name']}"))
    number = int(found["signal"] or found["status"])
    number = number if found["signal"] else -number if number < 0 else number - 128
    return number if 0 < number < 65 else None


_WEAK = 0.3  # of a stem that only supports a cause; one that no other cause has counts 1
_FEWEST, _AHEAD, _CLEARLY = 0.75, 0.1, 1.0  # points of the best cause, before the second, and before what the rows say
_OF_A_ROW = 1.0  # points
_SUFFIX = 4  # letters behind a stem
_SHORTEST = 4  # letters of a stem that others may follow


def likely_sense(text: str) -> Tuple[str, float]:
    """The code of what the words of a failed run mean most likely, and how much speaks for it: by the rows, or by all cues
    together where no row fits or the cues clearly speak against it."""
    meant, points = sense(text), _points(text[:_MAX])
    best, second = (*sorted(points.values(), reverse=True), 0.0, 0.0)[:2]
    sure = meant and (best - points.get(meant, best) < _CLEARLY or meant != _meant(text[:_MAX]))
    if best < _FEWEST or best - second < _AHEAD or sure:
        return meant, points.get(meant, 0.0) + _OF_A_ROW if meant else 0.0
    return max(points, key=points.__getitem__), best


def _points(text: str) -> Dict[str, float]:
    weights, words_of = words().cues, [_stems(word) for word in _LETTERS.findall(_spelt(text))]
    found = {next((stem for stem in stems if stem in weights), "") for stems in words_of}
    for place, stems in enumerate(words_of):
        beside = [each for others in words_of[place + 1 : place + 3] for each in others]
        found.update(pair for stem in stems for each in beside if (pair := f"{stem}_{each}") in weights)
    points: Dict[str, float] = {}
    for stem in found:
        for code, weight in weights.get(stem, {}).items():
            points[code] = points.get(code, 0.0) + weight
    return points


def _stems(word: str) -> List[str]:
    plural = [word[:-1]] if word.endswith("s") else []
    return [
        word,
        *plural,
        *(word[:length] for length in range(len(word) - 1, max(len(word) - _SUFFIX, _SHORTEST) - 1, -1)),
    ]


def _meant(text: str) -> str:
    text, patterns = _spelt(text), words().concepts
    spans: Dict[str, List[Tuple[int, int]]] = {}

    def find(name: str) -> List[Tuple[int, int]]:
        if name not in spans:
            spans[name] = [match.span() for match in patterns[name].finditer(text)]
        return spans[name]

    for code, row in words().rows:
        if all(map(find, row)) and _together([spans[name] for name in row]):
            return code
    return ""


def _together(places: Sequence[Sequence[Tuple[int, int]]]) -> bool:
    """Does one span of each concept stand no further than _NEAR from the first one's?"""
    return any(
        all(any(start - _NEAR <= end and begin <= stop + _NEAR for begin, end in others) for others in places[1:])
        for start, stop in places[0]
    )


def _spelt(text: str) -> str:
    """In small letters and plain words."""
    text = _APOSTROPHE.sub(" not", text)
    for pattern, word in words().names:
        text = pattern.sub(word, text)
    text = text.lower()
    for pattern, word in words().spellings:
        text = pattern.sub(word, text)
    return text


def remedy(text: str) -> Optional[str]:
    """The remedy that the error itself names."""
    found = _REMEDY.search(text)
    if found:
        return found["how"]
    variable = _SET.search(text)
    return f"export {variable['name']}={variable['value']}" if variable else None
