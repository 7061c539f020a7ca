"""Rules are data: read from rules/*.yaml, checked, and matched against lines.

Patterns are compiled when first used, because most never are; a test compiles them all.

A rule's `find` holds plain substrings; only a line with one of them is given to its patterns. See contributing/log-rules.md for
every key.
"""

from __future__ import annotations

import functools
import re
import signal as signals
from dataclasses import fields
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.data import load, names
from drumbeat.base.light_dataclass import dataclass
from drumbeat.causes.events import fault_in
from drumbeat.findings.model import ERROR, SEVERITIES
from drumbeat.logs.meaning.grammar import is_exception, is_in_prose, is_quoted, is_talk
from drumbeat.logs.meaning.senses import CODE_OF_SIGNAL, DEATH_WORDS, death_in, gpu_error_in, gpu_errors, owned, senses

# Which literals a line holds: cheap for the lines that hold none, which are nearly all. Every literal has a word
# that is looked for first. Lines are split into words, and one set operation says whether any of them is such a
# word; only then are its literals themselves looked for. What was found is remembered by the line's shape (every
# digit made 0), because lines of a training log mostly differ in their numbers only.


SHORTEST = 3  # letters that a literal's word must have
MAX_SHAPES = 20_000  # then the memory of shapes starts anew: bounded, whatever the log holds
MAX_SHAPE_LENGTH = 512  # longer lines hardly ever come again
SHAPE = bytes(ord("0") if ord("0") <= code <= ord("9") else code for code in range(256))
_WORDS = bytes(code if chr(code).isalpha() and code < 128 else ord(" ") for code in range(256))
_DIGITS = b"0123456789"


def word_of(literal: str) -> str:
    """The word that is looked for first: an inner one if possible, because an outer one may be cut off or glued."""
    return max(_inner_words(literal) or _words_of(literal) or [""], key=len)


def _words_of(literal: str) -> List[str]:
    words: List[str] = re.findall(r"[A-Za-z]+", re.sub(r"\d", "", literal))
    return words


def _inner_words(literal: str) -> List[str]:
    return [word for word in _words_of(literal)[1:-1] if len(word) >= SHORTEST]


@functools.lru_cache(maxsize=4)
def _index(literals: Tuple[str, ...]) -> Dict[bytes, List[Tuple[bytes, int]]]:
    """Word to look for first -> the shapes of its literals, with the literals' numbers. The same for every reader."""
    index: Dict[bytes, List[Tuple[bytes, int]]] = {}
    for number, literal in enumerate(literals):
        index.setdefault(word_of(literal).encode(), []).append((literal.encode().translate(SHAPE), number))
    return index


def _split(text: bytes) -> List[bytes]:
    """Its words. Digits are left out and do not part words: pieces of numbers and names would be most of the words."""
    return text.translate(_WORDS, _DIGITS).split()


class Prefilter:
    """`max_repeats`: after so many lines of one shape nothing more is found in them; None for no end."""

    def __init__(self, literals: Sequence[str], max_repeats: Optional[int] = None) -> None:
        self._max_repeats = max_repeats
        self.limited = True  # False: also what has come too often is found
        self._index = _index(tuple(literals))
        self._words = frozenset(self._index)
        self._known: Dict[bytes, Tuple[int, ...]] = {}
        self._repeats: Dict[bytes, int] = {}

    def words_in(self, text: bytes) -> FrozenSet[bytes]:
        """The words of literals that stand in these lines. Of a line without any of them nothing will be found."""
        return self._words.intersection(_split(text))

    def __call__(self, line: bytes) -> Tuple[int, ...]:
        """The numbers of the literals that stand in this line (digits count as any digit)."""
        words = _split(line)
        if self._words.isdisjoint(words):
            return ()
        shape = line.translate(SHAPE)
        found = self._known.get(shape)
        if found is None:
            keys = (key for word in self._words.intersection(words) for key in self._index[word])
            found = tuple(sorted(number for key, number in keys if key in shape))
            self._remember(shape, found)
        elif found and self._max_repeats:
            repeats = self._repeats[shape] = self._repeats.get(shape, 0) + 1
            if repeats > self._max_repeats and self.limited:
                return ()
        return found

    def _remember(self, shape: bytes, found: Tuple[int, ...]) -> None:
        if len(self._known) >= MAX_SHAPES:
            self._known.clear()
            self._repeats.clear()
        if len(shape) <= MAX_SHAPE_LENGTH:
            self._known[shape] = found


# A cause explains; a symptom shows what went on but not why; a report is a launcher saying that somebody failed; a
# consequence follows from another's failure; noise is printed by healthy runs too, mostly at their end; a note explains
# or advises, and nothing fails because of it.
CAUSE, SYMPTOM, REPORT, CONSEQUENCE, NOISE, NOTE = "cause", "symptom", "report", "consequence", "noise", "note"
ROLES = (CAUSE, SYMPTOM, REPORT, CONSEQUENCE, NOISE, NOTE)
SELF, OTHER, JOB = "self", "other", "job"  # whom a line blames
NEAR = 30  # lines
MAX_TEXT = 4096  # of a line that patterns see; NCCL cuts its own at 1023


_NAME, _NAME_BEHIND = re.compile(r"\{(\w+)\}"), re.compile(r"(\w?)\{(\w+)\}")
_OPTIONAL = re.compile(r"\[([^\[\]]*\{\w+\}[^\[\]]*)\]")  # `[ to {peer}]`


_SIGNALS = frozenset(map(int, signals.Signals))


class RuleError(ValueError):
    """A rule file is wrong; the message names file, rule and key."""


@dataclass(frozen=True)
class Rule:
    id: str
    code: str  # stable, kebab-case
    title: str  # may hold {names} of the pattern's groups, as cause and fix may
    cause: str
    fix: str
    source: str
    locate: str = ""  # how to find out where in the program it happened; not said where the log shows it
    find: Tuple[str, ...] = ()
    pattern: Tuple[str, ...] = ()  # one must match; none: the substring is enough
    mentions: Tuple[str, ...] = ()  # weaker: words that also stand in lines which only talk of such an error
    unless: str = ""
    role: str = CAUSE
    severity: str = ERROR
    library: str = ""  # nccl or rccl; empty: both
    versions: str = ""  # of the library, as '<2.21' or '>=2.22 <2.27'
    when: Optional[Mapping[str, Any]] = None  # conditions on what the whole log says; conditions.py
    seen: Tuple[str, ...] = ()  # substrings that must all stand somewhere in the log
    unseen: Tuple[str, ...] = ()  # substrings of which none may
    not_near: Tuple[str, ...] = ()  # substrings of which none may stand within NEAR lines of it
    runtime: bool = False  # speaks about every line with an error of a GPU runtime that means its code
    dies: bool = False  # speaks about every line that says that a process died from the signal of its code
    fallback: bool = False  # speaks only about lines on which no other rule does
    any_level: bool = False  # speaks also when the line's own logger calls it a warning or less
    survivable: bool = False  # no failure when the log goes on behind it (a line of a set-up script)
    quiet: bool = False  # a consequence that healthy runs print too when they end: no failure without other signs
    names_itself: bool = False  # a symptom whose line leaves no doubt what happened, if not why
    absorbs: Tuple[str, ...] = ()  # codes that say less about the same failure
    blames: str = SELF  # or other: who prints the line is not the one to look at; job: no single rank is
    over: Tuple[str, ...] = ()  # ids of rules that say less about the same line
    confidence: str = "certain"  # or likely: the line does not tell which of several causes it was
    explains: str = ""  # network: why another one was taken; gpudirect: why it goes without
    file: str = ""

    @property
    def conditional(self) -> bool:
        """Return True if it depends on more than its own line."""
        return bool(self.when or self.seen or self.unseen or self.not_near or self.versions or self.library)


@dataclass(frozen=True)
class Match:
    rule: Rule
    groups: Mapping[str, str]
    mention: bool = False  # the line has the words, but not the shape of the error itself
    talk: bool = False  # the line talks about the error: it is avoided, handled or possible

    @property
    def confidence(self) -> str:
        return "likely" if self.mention else self.rule.confidence

    @property
    def title(self) -> str:
        return self._filled(self.rule.title)

    @property
    def cause(self) -> str:
        return self._filled(self.rule.cause)

    def fix(self, located: bool) -> str:
        """`located`: the log shows where in the program it happened, so nobody needs to be told how to find that out."""
        find_out = f"{self.rule.locate}; " if self.rule.locate and not located else ""
        return find_out + self._filled(self.rule.fix)

    def _filled(self, text: str) -> str:
        """With what the pattern's groups hold. A part in square brackets is left out where one of its groups holds nothing."""

        def part(match: re.Match[str]) -> str:
            return match[1] if all(self.groups.get(name, "").strip() for name in _NAME.findall(match[1])) else ""

        def fill(match: re.Match[str]) -> str:
            value = self.groups.get(match[2], "").strip()
            return f"{match[1]} {value}" if match[1] and value else match[1] + value

        return _NAME_BEHIND.sub(fill, _OPTIONAL.sub(part, text))


class Rulebook:
    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = tuple(rules)
        literals = [
            (literal, rule)
            for rule in self.rules
            for literal in rule.find
            + (DEATH_WORDS if rule.dies else ())
            + (_words_of_runtime(rule) if rule.runtime else ())
        ]
        self._owners = [rule for _, rule in literals]
        self._marks = sorted({mark for rule in self.rules for mark in rule.seen + rule.unseen + rule.not_near})
        self.literals = tuple(literal for literal, _ in literals) + tuple(self._marks)

    @functools.cached_property
    def prefilter(self) -> Prefilter:
        return Prefilter(self.literals)

    def match(self, text: str, found: Optional[Sequence[int]] = None) -> List[Match]:
        """Every rule that this line alone satisfies (conditions on the rest of the log are not looked at).

        `found` are the numbers of the literals in it, as the prefilter said.
        """
        text = text[:MAX_TEXT]
        if found is None:
            found = self.prefilter(text.encode("utf-8", "replace"))
        matches: List[Match] = []
        tried = set()
        for number in found:
            if number < len(self._owners):
                rule = self._owners[number]
                if rule.id not in tried and self.literals[number] in text:
                    tried.add(rule.id)
                    match = _apply(rule, text, self.literals[number])
                    if match is not None and owned(text, rule.code) == rule.code:
                        matches.append(match)
        return [match for match in matches if not match.rule.fallback] or matches

    def marks(self, text: str, found: Sequence[int]) -> List[str]:
        """The substrings that conditions of rules ask for and that stand in this line."""
        return [
            self.literals[n] for n in found if len(self._owners) <= n < len(self.literals) and self.literals[n] in text
        ]


def _apply(rule: Rule, text: str, literal: str) -> Optional[Match]:
    if rule.unless and _compiled(rule.unless).search(text):
        return None
    runtime, place = gpu_error_in(text) if rule.runtime else ("", (0, 0))
    if runtime == rule.code:
        return _match(rule, text, place, {}, False)
    code, only_status = death_in(text) if rule.dies else ("", False)
    if code == rule.code:
        return _match(rule, text, (0, len(text)), {}, only_status)
    if not rule.pattern and literal in rule.find:
        start = text.find(literal)
        return _match(rule, text, (start, start + len(literal)), {}, False)
    for mention, patterns in ((False, rule.pattern), (True, rule.mentions)):
        for pattern in patterns:
            match = _compiled(pattern).search(text)
            if match:
                groups = {name: value for name, value in match.groupdict().items() if value is not None}
                return _match(rule, text, match.span(), groups, mention)
    return None


def _words_of_runtime(rule: Rule) -> Tuple[str, ...]:
    return tuple(words for words, code in gpu_errors().items() if code == rule.code)


def _match(rule: Rule, text: str, span: Tuple[int, int], groups: Mapping[str, str], mention: bool) -> Optional[Match]:
    """The words of a rule, by where they stand in their line."""
    message = fault_in(text)
    if message and (rule.dies or span[0] >= message) and rule.role not in (NOISE, NOTE):
        return None  # words in a fault's message; a rule that speaks of such faults names their class
    quoted = is_quoted(text, span[0])
    if quoted and (rule.any_level or rule.fallback):
        return None
    told = is_in_prose(text, span[0])
    talk = quoted or is_talk(text, *span) or (told and rule.role in (REPORT, CONSEQUENCE))
    return Match(rule, groups, told or (mention and not is_exception(text)), talk)


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


@functools.lru_cache(maxsize=1)
def rulebook() -> Rulebook:
    """The rules that come with drumbeat."""
    package = "drumbeat.logs.rules"
    rules = [rule for name in names(package) for rule in check(load(package, name), f"{name}.yaml")]
    return Rulebook([*rules, *_removed_apis(load("drumbeat.lint", "removed"))])


def _removed_apis(entries: Any) -> List[Rule]:
    """Make rules of the names in `lint`'s table that newer versions no longer have."""
    rules = []
    for entry in entries:
        missing = "(?:cannot import name|No module named|has no attribute)"
        rules.append(
            Rule(
                id=entry["id"],
                code="removed-api",
                title=entry["title"],
                cause=entry["reason"],
                fix=entry["fix"],
                source="release notes of the package",
                find=("cannot import name", "No module named", "has no attribute"),
                pattern=(f"Error: .*{missing}.{{0,120}}(?:{entry['python']})",),
                over=("P8", "P92", "M11"),
                file="lint/removed.yaml",
            )
        )
    return rules


def check(entries: Any, file: str) -> List[Rule]:
    """Return the rules of a file, every key checked."""
    if not isinstance(entries, list):
        raise RuleError(f"{file}: expected a list of rules")
    return [_rule(entry, file, number) for number, entry in enumerate(entries, 1)]


_NAMES = {field.name for field in fields(Rule)} - {"file"}
_LISTS = ("find", "pattern", "mentions", "seen", "unseen", "not_near", "over", "absorbs")
_FLAGS = ("runtime", "dies", "fallback", "any_level", "survivable", "quiet", "names_itself")


def _rule(entry: Any, file: str, number: int) -> Rule:
    if not isinstance(entry, dict):
        raise RuleError(f"{file}: rule {number} is not a mapping")
    where = f"{file}: rule {entry.get('id', number)}"
    unknown = set(entry) - _NAMES
    if unknown:
        raise RuleError(f"{where}: unknown key {sorted(map(str, unknown))}; known: {', '.join(sorted(_NAMES))}")
    values: Dict[str, Any] = {"file": file}
    for name, value in entry.items():
        if name in _LISTS:
            items = value if isinstance(value, list) else [value]
            if not all(isinstance(item, str) and item for item in items):
                raise RuleError(f"{where}: '{name}' must be text or a list of texts")
            values[name] = tuple(items)
        elif name == "when":
            if not isinstance(value, dict):
                raise RuleError(f"{where}: 'when' must be a mapping")
            values[name] = value
        elif name in _FLAGS:
            if not isinstance(value, bool):
                raise RuleError(f"{where}: '{name}' must be true or false")
            values[name] = value
        elif not isinstance(value, str):
            raise RuleError(f"{where}: '{name}' must be text")
        else:
            values[name] = value
    missing = [name for name in ("id", "code", "title", "cause", "fix", "source") if not values.get(name)]
    if missing:
        raise RuleError(f"{where}: lacks {', '.join(missing)}")
    rule = Rule(**values)
    if (
        rule.role not in ROLES
        or rule.severity not in SEVERITIES
        or rule.confidence not in ("certain", "likely")
        or rule.blames not in (SELF, OTHER, JOB)
    ):
        raise RuleError(
            f"{where}: role is one of {', '.join(ROLES)}, severity one of {', '.join(SEVERITIES)}, "
            "confidence certain or likely, blames self, other or job"
        )
    marks = rule.find + rule.seen + rule.unseen + rule.not_near
    short = [literal for literal in marks if len(word_of(literal)) < SHORTEST]
    if short:
        raise RuleError(f"{where}: '{short[0]}' needs a word of {SHORTEST} letters")
    if not (rule.find or rule.when or rule.dies or rule.runtime) and rule.code not in senses():
        raise RuleError(f"{where}: lacks 'find'")
    return rule


def rule_of_code(code: str) -> Rule:
    """The first rule with this code that explains a failure, if possible of any program: its words are used where no line of a
    log matched it."""
    rules = [rule for rule in rulebook().rules if rule.code == code]
    return min(rules, key=lambda rule: (rule.role == NOTE, rule.file != "process.yaml"))


def rule_of_signal(number: Optional[int]) -> Optional[Rule]:
    """None for a signal with which somebody asks a process to end."""
    code = CODE_OF_SIGNAL.get(signals.Signals(number)) if number in _SIGNALS else None
    return rule_of_code(code) if code else None
