"""Every rule carries a bad and a good example, and they are its first tests."""

import pytest

from drumbeat.diagnose.lint.engine import CHECKS, lint
from drumbeat.diagnose.lint.python_code import CHECKS as PYTHON_CHECKS
from drumbeat.diagnose.lint.python_program import CHECKS as PROGRAM_CHECKS
from drumbeat.diagnose.lint.rules import RuleError, checked, rules
from drumbeat.packaged import parse_yaml

RULES = {rule.id: rule for rule in rules()}
MADE = {"script-cut": "true\n" * 10_001}


def codes(text, name="-"):
    return [finding.code for finding in lint(text, name).findings]


@pytest.mark.parametrize("name", RULES)
def test_bad_example_is_found(name):
    found = [finding for finding in lint(MADE.get(name, RULES[name].bad)).findings if finding.code == name]
    assert found
    for finding in found:
        assert finding.title and finding.cause and finding.fix and finding.evidence[0].line
        assert "{" not in finding.title.replace("${", ""), "a name in the title was not filled in"


@pytest.mark.parametrize("name", RULES)
def test_good_example_is_clean(name):
    assert name not in codes(RULES[name].good)


def test_every_check_has_a_rule_and_every_rule_its_check():
    asked = {rule.check for rule in rules() if rule.check}
    assert asked == {*CHECKS, *PYTHON_CHECKS, *PROGRAM_CHECKS}


@pytest.mark.parametrize(
    "text,says",
    [
        ("{}", "expected a list"),
        ("- 3", "not a mapping"),
        ("- {id: a, patern: x}", "unknown key patern"),
        ("- {id: a, title: t}", "lacks reason"),
        ("- {id: a, title: t, reason: r, fix: f, source: s, bad: b, good: g}", "needs one of"),
        ("- {id: a, title: t, reason: r, fix: f, source: s, bad: b, good: g, command: '('}", "is no pattern"),
        (
            "- {id: a, title: t, reason: r, fix: f, source: s, bad: b, good: g, command: x, severity: bad}",
            "severity is",
        ),
        ("- {id: 3}", "must be str"),
    ],
)
def test_a_wrong_rule_file_says_where(text, says):
    with pytest.raises(RuleError, match=says):
        checked(parse_yaml(text.encode()), "mine")
