"""Every rule, by its own examples: it speaks on each of them and keeps silent on each near miss."""

import re
from dataclasses import fields
from types import SimpleNamespace

import pytest
import yaml

from drumbeat.base.data import load, names
from drumbeat.findings.model import SEVERITIES
from drumbeat.logs.meaning.conditions import CONDITIONS
from drumbeat.logs.meaning.rules import (
    JOB,
    LISTS,
    OTHER,
    ROLES,
    SELF,
    SHORTEST,
    Match,
    Prefilter,
    Rule,
    Rulebook,
    rulebook,
    rules_of,
    word_of,
)
from drumbeat.logs.meaning.senses import READERS, senses
from drumbeat.logs.reader import Reader
from tests.logs.reading import rule_examples

try:
    from re import _parser as parser
except ImportError:  # before Python 3.11
    import sre_parse as parser

RULES = rulebook().rules
REMOVED = {entry["id"]: re.search(entry["python"], entry["bad"])[0] for entry in load("drumbeat.lint", "removed")}
EXAMPLES = {
    **rule_examples(),
    **{
        key: SimpleNamespace(examples=[f"ImportError: cannot import name '{name}'"], near=[name])
        for key, name in REMOVED.items()
    },
}


HANGING = re.compile(
    r"(?:[:(]|\(\)|\b(?:to|on|at|of|in|for|from|by|with|named|no|is|a|the|and|or|than|as))$|\[|\(\)|  "
)


def rules_in(text, book=None):
    reader = Reader(book)
    for number, line in enumerate(text.splitlines(), 1):
        reader.feed("log", number, line.encode())
    return reader.report().failure.rules


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_examples(rule):
    for pattern in (*rule.pattern, rule.unless):
        re.compile(pattern)
    own = EXAMPLES.get(rule.id)
    if not (rule.find or rule.when or rule.reads):  # its words alone: the grammar gives its code
        assert own is None and rule.code in senses()
        return
    assert own and own.examples and own.near, "a rule comes with examples and near misses"
    for text in own.examples:
        assert rule.id in rules_in(text), text
    for text in own.near:
        assert rule.id not in rules_in(text), text


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_the_prefilter_lets_each_literal_through_by_itself(rule):
    for literal in rule.find + rule.seen + rule.unseen:
        alone = Prefilter([literal])
        for line in (
            line
            for text in EXAMPLES[rule.id].examples + EXAMPLES[rule.id].near
            for line in text.splitlines()
            if literal in line
        ):
            assert alone(line.encode()), f"'{literal}' begins or ends inside a word; write the whole word"


def test_ids_are_unique():
    ids = [rule.id for rule in RULES]
    assert len(ids) == len(set(ids))


def test_codes_and_words_keep_to_the_form():
    for rule in RULES:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.code), rule.id
        assert not rule.title.endswith("."), rule.id
        assert set(rule.over) <= {other.id for other in RULES}, rule.id


def always(pattern):
    """The names of the groups without which this pattern does not match."""
    parsed = parser.parse(pattern)
    numbers = {number: name for name, number in parsed.state.groupdict.items()}
    return {numbers[number] for number in _always(parsed) if number in numbers}


def _always(items):
    found = set()
    for kind, value in items:
        name = str(kind)
        if name == "SUBPATTERN":
            found |= ({value[0]} - {None}) | _always(value[3])
        elif name == "BRANCH":
            found |= set.intersection(*map(_always, value[1]))
        elif name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT") and value[0] > 0:
            found |= _always(value[2])
        elif name == "ATOMIC_GROUP":
            found |= _always(value)
    return found


def test_no_words_are_left_hanging_where_a_group_holds_nothing():
    """Every pattern of every rule, with only the groups that it always fills."""
    assert always("(?P<a>x)(?P<b>y)?(?:(?P<c>z)|w)") == {"a"}
    assert HANGING.search("gloo could not connect to") and not HANGING.search("gloo could not connect")
    for rule in RULES:
        settings = dict.fromkeys((rule.when or {}).get("env", ()), "X")
        for pattern in (*(rule.pattern or ("",)), *rule.mentions):
            match = Match(rule, {**settings, **dict.fromkeys(always(pattern), "X")})
            for text, words in ((rule.title, match.title), (rule.cause, match.cause), (rule.fix, match.fix(True))):
                assert words and ("{" not in text or not HANGING.search(words)), f"{rule.id}: {words}"


def test_a_part_in_brackets_is_left_out_where_its_group_holds_nothing():
    text = "- {id: X, code: x, title: 'no answer[ from {peer}]', cause: 'a[{0}]', fix: f, source: s, find: [abcd]}"
    (rule,) = rules_of(yaml.safe_load(text), "x.yaml")
    assert (Match(rule, {}).title, Match(rule, {"peer": "n7"}).title) == ("no answer", "no answer from n7")
    assert Match(rule, {"peer": " "}).title == "no answer"


def test_a_rule_is_added_without_python():
    text = """
- id: X1
  code: my-rule
  title: "the {colour} light is on"
  find: [light]
  pattern: '(?P<colour>red|green) light'
  cause: a test
  fix: none
  source: here
"""
    book = Rulebook([*RULES, *rules_of(yaml.safe_load(text), "mine.yaml")])
    assert "X1" in rules_in("a red light", book)
    assert "X1" not in rules_in("a blue light", book)
    (match,) = book.match("a green light")
    assert match.title == "the green light is on"


KINDS = {"when": dict, **dict.fromkeys(("fallback", "any_level", "survivable", "quiet", "names_itself"), bool)}
WORDS = {
    "role": ROLES,
    "severity": SEVERITIES,
    "confidence": ("certain", "likely"),
    "blames": (SELF, OTHER, JOB),
    "reads": READERS,
    "library": ("nccl", "rccl"),
    "explains": ("network", "gpudirect"),
}
COMPARISON = re.compile(r"(?:<=|>=|<|>|=)\d+(?:\.\d+)*")


def wrong_in(entry):
    """What is wrong with an entry of a rule file, in words."""
    yield from (
        f"unknown key {key}" for key in entry.keys() - {field.name for field in fields(Rule)} | {"file"} & entry.keys()
    )
    yield from (f"lacks {key}" for key in ("id", "code", "title", "cause", "fix", "source") if not entry.get(key))
    for key, value in entry.items():
        items = value if key in LISTS and isinstance(value, list) else [value]
        if not all(isinstance(item, KINDS.get(key, str)) and item for item in items):
            yield f"'{key}' is not of its kind"
        if key in WORDS and value not in WORDS[key]:
            yield f"{key} is one of {', '.join(WORDS[key])}"
        if key in ("find", "seen", "unseen", "until"):
            yield from (
                f"'{item}' needs a word of {SHORTEST} letters" for item in items if len(word_of(str(item))) < SHORTEST
            )
    when = entry.get("when", {})
    yield from (f"unknown condition {key}" for key in when if key not in CONDITIONS)
    for condition in (*entry.get("versions", "").split(), *filter(None, [when.get("nodes")])):
        if not COMPARISON.fullmatch(condition):
            yield f"'{condition}' is not a comparison such as <2.21"
    if not (entry.get("find") or when or entry.get("reads")) and entry.get("code") not in senses():
        yield "lacks 'find'"


def test_the_files_of_rules_hold_known_keys_and_values():
    package = "drumbeat.logs.rules"
    wrong = {entry.get("id", name): list(wrong_in(entry)) for name in names(package) for entry in load(package, name)}
    assert not {key: words for key, words in wrong.items() if words}


@pytest.mark.parametrize(
    "text,words",
    [
        ("{id: X, code: x}", "lacks title"),
        ("{id: X, coed: x}", "unknown key"),
        ("{id: X, code: x, title: t, cause: c, fix: f, source: s}", "lacks 'find'"),
        ("{id: X, code: x, title: t, cause: c, fix: f, source: s, find: [ab1]}", "word of 3 letters"),
        ("{id: X, code: x, title: t, cause: c, fix: f, source: s, find: [abcd], role: boss}", "role is one of"),
        ("{id: X, code: x, title: t, cause: c, fix: f, source: s, find: 3}", "not of its kind"),
        ("{id: X, code: x, title: t, cause: c, fix: f, source: s, when: {moon: full}}", "unknown condition"),
        ("{id: X, code: x, title: t, cause: c, fix: f, source: s, find: [abcd], versions: '2.21'}", "not a comparison"),
    ],
)
def test_a_wrong_rule_is_seen(text, words):
    assert any(words in each for each in wrong_in(yaml.safe_load(text)))
