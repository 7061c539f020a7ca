"""Rules are data: read from rules/*.yaml, checked, and matched against lines.

Patterns are compiled when first used, because most never are; a test compiles them all.

A rule's `find` holds plain substrings; only a line with one of them is given to its patterns. See contributing/log-rules.md for
every key.
"""

from __future__ import annotations

import functools
import re
import signal as signals
from typing import Any, Dict, FrozenSet, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.data import load, names
from drumbeat.base.light_dataclass import dataclass
from drumbeat.causes.events import fault_in
from drumbeat.findings.model import ERROR, Evidence, Finding
from drumbeat.logs.meaning.grammar import is_exception, is_in_prose, is_quoted, is_talk
from drumbeat.logs.meaning.senses import CODE_OF_SIGNAL, READERS, owned, words_of

# Find which literals a line holds; fast for lines with none, which are nearly all. Each literal has one word that is checked
# first: a line is split into words, and one set operation tells if any of them is such a word. Only then are the literals
# searched for. Results are cached by the line's shape (every digit replaced by 0), because lines of a training log mostly
# differ only in their numbers.


SHORTEST = 3  # minimum letters of a literal's word
MAX_SHAPES = 20_000  # the shape cache is cleared at this size: bounded, whatever the log holds
MAX_SHAPE_LENGTH = 512  # longer lines hardly ever repeat
SHAPE = bytes(ord("0") if ord("0") <= code <= ord("9") else code for code in range(256))
_WORDS = bytes(code if chr(code).isalpha() and code < 128 else ord(" ") for code in range(256))
_DIGITS = b"0123456789"


def word_of(literal: str) -> str:
    """Return the word that is checked first: an inner one if possible, because outer ones may be cut off or joined to others."""
    return max(_inner_words(literal) or _words_of(literal) or [""], key=len)


def _words_of(literal: str) -> List[str]:
    words: List[str] = re.findall(r"[A-Za-z]+", re.sub(r"\d", "", literal))
    return words


def _inner_words(literal: str) -> List[str]:
    return [word for word in _words_of(literal)[1:-1] if len(word) >= SHORTEST]


@functools.lru_cache(maxsize=4)
def _index(literals: Tuple[str, ...]) -> Dict[bytes, List[Tuple[bytes, int]]]:
    """Return word -> shapes of its literals with the literals' numbers. Shared by all readers."""
    index: Dict[bytes, List[Tuple[bytes, int]]] = {}
    for number, literal in enumerate(literals):
        index.setdefault(word_of(literal).encode(), []).append((literal.encode().translate(SHAPE), number))
    return index


def split_words(text: bytes) -> List[bytes]:
    """Return the words of a text. Digits are dropped and do not separate words, or most words would be pieces of numbers."""
    return text.translate(_WORDS, _DIGITS).split()


class Prefilter:
    """Finds the literals in lines. `max_repeats`: lines of one shape are ignored after this many; None for no limit."""

    def __init__(self, literals: Sequence[str], max_repeats: Optional[int] = None) -> None:
        self._max_repeats = max_repeats
        self.limited = True  # False: ignore max_repeats
        self._index = _index(tuple(literals))
        self._words = frozenset(self._index)
        self._known: Dict[bytes, Tuple[int, ...]] = {}
        self._repeats: Dict[bytes, int] = {}

    def words_in(self, text: bytes) -> FrozenSet[bytes]:
        """Return the first words of literals that occur in these lines. A line without any of them has no literal."""
        return self._words.intersection(split_words(text))

    def __call__(self, line: bytes) -> Tuple[int, ...]:
        """Return the numbers of the literals in this line (any digit matches any digit)."""
        words = split_words(line)
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
MAX_TEXT = 4096  # part of a line that patterns see; NCCL cuts its own lines at 1023


_NAME, _NAME_BEHIND = re.compile(r"\{(\w+)\}"), re.compile(r"(\w?)\{(\w+)\}")
_OPTIONAL = re.compile(r"\[([^\[\]]*\{\w+\}[^\[\]]*)\]")  # `[ to {peer}]`


_SIGNALS = frozenset(map(int, signals.Signals))


@dataclass(frozen=True)
class Rule:
    id: str
    code: str  # stable, kebab-case
    title: str  # may hold {names} of the pattern's groups, as cause and fix may
    cause: str
    fix: str
    source: str
    locate: str = ""  # how to find where in the program it happened; left out if the log shows it
    find: Tuple[str, ...] = ()
    says: Tuple[str, ...] = ()  # substrings of which each is enough, whatever the patterns are
    pattern: Tuple[str, ...] = ()  # one must match; none: the substring is enough
    mentions: Tuple[str, ...] = ()  # weaker patterns: words also used in lines that only mention such an error
    unless: str = ""
    role: str = CAUSE
    severity: str = ERROR
    library: str = ""  # nccl or rccl; empty: both
    versions: str = ""  # of the library, as '<2.21' or '>=2.22 <2.27'
    when: Optional[Mapping[str, Any]] = None  # conditions on the log as a whole; conditions.py
    seen: Tuple[str, ...] = ()  # substrings that must all occur in the log
    unseen: Tuple[str, ...] = ()  # substrings that must not occur in the log
    until: Tuple[str, ...] = ()  # substrings of later lines that withdraw it: the opposite has happened since
    reads: str = ""  # death, gpu-error or link: matches every line that this reader of senses.py gives the rule's code
    fallback: bool = False  # matches only lines that no other rule matches
    any_level: bool = False  # matches even if the line was logged as a warning or lower
    survivable: bool = False  # not a failure if the log continues after it (a line of a setup script)
    quiet: bool = False  # a consequence that healthy runs also print at their end: not a failure without other signs
    names_itself: bool = False  # a symptom whose line is clear about what happened, if not why
    absorbs: Tuple[str, ...] = ()  # codes that say less about the same failure
    blames: str = SELF  # or other: the rank that prints the line is not at fault; job: no single rank is
    over: Tuple[str, ...] = ()  # ids of rules that say less about the same line
    confidence: str = "certain"  # or likely: the line does not tell which of several causes it was
    explains: str = ""  # network: why another one was taken; gpudirect: why it goes without
    file: str = ""

    @property
    def conditional(self) -> bool:
        """Return True if the rule depends on more than its own line."""
        return bool(self.when or self.seen or self.unseen or self.until or self.versions or self.library)


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
        """Return the fix. `located`: the log shows where in the program it happened, so advice on finding that is left out."""
        find_out = f"{self.rule.locate}; " if self.rule.locate and not located else ""
        return find_out + self._filled(self.rule.fix)

    def finding(self, evidence: Tuple[Evidence, ...]) -> Finding:
        """Return the finding in the rule's own words."""
        return Finding(self.rule.code, ERROR, self.title, self.cause, self.fix(False), evidence)

    def _filled(self, text: str) -> str:
        """Fill in the pattern's groups. A part in square brackets is dropped if one of its groups is empty."""

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
            for literal in rule.find + rule.says + (words_of(rule.reads, rule.code) if rule.reads else ())
        ]
        self._owners = [rule for _, rule in literals]
        self._marks = sorted({mark for rule in self.rules for mark in rule.seen + rule.unseen + rule.until})
        self.literals = tuple(literal for literal, _ in literals) + tuple(self._marks)

    @functools.cached_property
    def prefilter(self) -> Prefilter:
        return Prefilter(self.literals)

    def match(self, text: str, found: Optional[Sequence[int]] = None) -> List[Match]:
        """Return every rule that this line alone satisfies (conditions on the rest of the log are not checked).

        `found` are the numbers of the literals in the line, as returned by the prefilter.
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
        """Return the substrings in this line that rules' conditions ask for."""
        return [
            self.literals[n] for n in found if len(self._owners) <= n < len(self.literals) and self.literals[n] in text
        ]


def _apply(rule: Rule, text: str, literal: str) -> Optional[Match]:
    if rule.unless and _compiled(rule.unless).search(text):
        return None
    if rule.reads:
        code, place, only_status = READERS[rule.reads](text)
        if code == rule.code:
            return _match(rule, text, place, {}, only_status)
    plain = rule.says if rule.pattern or literal not in rule.find else (literal,)
    said = next((re.escape(words) for words in plain if words in text), None)
    for mention, patterns in ((False, (*rule.pattern, said) if said else rule.pattern), (True, rule.mentions)):
        for pattern in patterns:
            match = _compiled(pattern).search(text)
            if match:
                groups = {name: value for name, value in match.groupdict().items() if value is not None}
                return _match(rule, text, match.span(), groups, mention)
    return None


def _match(rule: Rule, text: str, span: Tuple[int, int], groups: Mapping[str, str], mention: bool) -> Optional[Match]:
    """Return a rule's match, or None if its place in the line rules it out (a quotation, a fault's message)."""
    message = fault_in(text)
    if message and (rule.reads == "death" or span[0] >= message) and rule.role not in (NOISE, NOTE):
        return None  # words in a fault's message; a rule that speaks of such faults names their class
    quoted = is_quoted(text, span[0])
    if quoted and (rule.any_level or rule.fallback):
        return None
    told = rule.reads != "link" and is_in_prose(text, span[0])  # a driver tells of itself: `mlx5_1: got event: ...`
    talk = quoted or is_talk(text, *span) or (told and rule.role in (REPORT, CONSEQUENCE))
    return Match(rule, groups, told or (mention and not is_exception(text)), talk)


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


@functools.lru_cache(maxsize=1)
def rulebook() -> Rulebook:
    """The rules that come with drumbeat."""
    package = "drumbeat.logs.rules"
    rules = [rule for name in names(package) for rule in rules_of(load(package, name), f"{name}.yaml")]
    return Rulebook([*rules, *_removed_apis(load("drumbeat.lint", "removed"))])


def _removed_apis(entries: Any) -> List[Rule]:
    """Make rules from the removed APIs in `lint`'s table."""
    words = ("cannot import name", "No module named", "has no attribute")
    source, over, file = "release notes of the package", ("P8", "P92", "M11"), "lint/removed.yaml"
    return [
        Rule(
            entry["id"], "removed-api", entry["title"], entry["reason"], entry["fix"], source, find=words, over=over, file=file,
            pattern=(f"Error: .*(?:{'|'.join(words)}).{{0,120}}(?:{entry['python']})",),
        )
        for entry in entries
    ]  # fmt: skip


LISTS = ("find", "says", "pattern", "mentions", "seen", "unseen", "until", "over", "absorbs")


def rules_of(entries: Sequence[Mapping[str, Any]], file: str) -> Iterator[Rule]:
    """Yield the rules of a file; tests/logs/test_rules.py checks its keys and values."""
    for entry in entries:
        lists = {key: (each,) if isinstance(each, str) else tuple(each) for key, each in entry.items() if key in LISTS}
        yield Rule(**{**entry, **lists}, file=file)


def rule_of_code(code: str) -> Rule:
    """Return the first rule with this code that explains a failure, preferably for any program: its text is used when no line
    matched it."""
    rules = [rule for rule in rulebook().rules if rule.code == code]
    return min(rules, key=lambda rule: (rule.role == NOTE, rule.file != "process.yaml"))


def rule_of_signal(number: Optional[int]) -> Optional[Rule]:
    """Return the rule of a signal; None for signals that ask a process to end."""
    code = CODE_OF_SIGNAL.get(signals.Signals(number)) if number in _SIGNALS else None
    return rule_of_code(code) if code else None
